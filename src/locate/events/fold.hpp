// Joins events that have one cause.
#pragma once

#include <cstddef>
#include <map>
#include <utility>
#include <vector>

namespace nanlocator::inline locate_room::events {

/// Of the elements with the same key, keeps the first and passes it the others, in order:
/// merge(first, other). Elements whose key is empty are kept. `key_of` returns an optional.
template <typename Element, typename KeyOf, typename Merge>
void fold_by(std::vector<Element>& elements, KeyOf key_of, Merge merge) {
  std::map<typename decltype(key_of(elements.front()))::value_type, std::size_t> known;
  std::vector<Element> kept;
  for (Element& each : elements) {
    if (auto key = key_of(each)) {
      const auto [entry, is_new] = known.try_emplace(*std::move(key), kept.size());
      if (!is_new) {
        merge(kept[entry->second], each);
        continue;
      }
    }
    kept.push_back(std::move(each));
  }
  elements = std::move(kept);
}

}  // namespace nanlocator::inline locate_room::events
