#include "recorder/recorded_event.hpp"

#include <ATen/ops/equal.h>

#include <algorithm>
#include <iterator>

#include "tensor/own_work.hpp"
#include "tensor/steady_copy.hpp"

namespace nanlocator::inline recorder_room {

at::Tensor Region::of(const c10::Storage& storage) const {
  const OwnWork own_work;
  const auto options = at::TensorOptions().dtype(dtype).device(storage.device());
  return at::empty({0}, options).set_(storage, offset, sizes, strides);
}

bool have_same_bits(const at::Tensor& a, const at::Tensor& b) {
  const OwnWork own_work;
  const auto bytes_of = [](const at::Tensor& tensor) {
    return tensor.variable_data().reshape({-1}).contiguous().view(at::kByte);
  };
  return a.sizes() == b.sizes() && (a.numel() == 0 || at::equal(bytes_of(a), bytes_of(b)));
}

bool RecordedInput::is_overwritten() const {
  return kept.defined() && is_read && (version_of(kept) != version || !has_content(kept, sample));
}

RecordedEvent::RecordedEvent() : data_(std::make_unique<Data>()) {}

RecordedEvent::~RecordedEvent() {
  // Destroys a long chain iteratively, not recursively.
  auto needs = std::move(data_->needs);
  data_->inputs.clear();
  data_->differentiated.clear();
  data_->tensors.clear();
  while (!needs.empty()) {
    const auto last = std::const_pointer_cast<RecordedEvent>(std::move(needs.back()));
    needs.pop_back();
    if (last.use_count() > 1 || !last) continue;
    auto& data = last->data();
    std::ranges::move(data.needs, std::back_inserter(needs));
    data.needs.clear();
  }
}

bool RecordedEvent::is_operator() const noexcept {
  return data_->handle.has_value();
}
const std::shared_ptr<void>& RecordedEvent::payload() const noexcept {
  return data_->payload;
}
int RecordedEvent::backwards_before() const noexcept {
  return data_->backwards_before;
}

RecordedEvents reached_from(RecordedEvents events, RecordedEvents RecordedEvent::Data::*links) {
  std::unordered_set<const RecordedEvent*> seen;
  RecordedEvents reached;
  while (!events.empty()) {
    auto event = std::move(events.back());
    events.pop_back();
    if (!seen.insert(event.get()).second) continue;
    const auto& more = event->data().*links;
    events.insert(events.end(), more.begin(), more.end());
    reached.push_back(std::move(event));
  }
  return reached;
}

std::optional<std::vector<std::pair<int, at::Tensor>>> first_outputs(
    const RecordedEvent::Data& operation) {
  std::vector<std::pair<int, at::Tensor>> found;
  for (const auto& output : operation.outputs) {
    at::Tensor tensor(output.tensor.lock());
    if (!tensor.defined() || version_of(tensor) != output.version) return std::nullopt;
    found.emplace_back(output.index, std::move(tensor));
  }
  return found;
}

}  // namespace nanlocator::inline recorder_room
