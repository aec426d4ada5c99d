// What another rank sends through the Store, or a file of one rank: after its first byte, which
// says what it is, any text. Either a FormatError, or something that is written again as it was
// read.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "nanlocator/error.hpp"
#include "nanlocator/map/parameter_map.hpp"
#include "nanlocator/record/ledger.hpp"
#include "nanlocator/report/verdict_json.hpp"

namespace nanlocator {
namespace {

template <typename Read, typename Write>
void read_and_write_again(const std::string& text, const Read& read, const Write& write) {
  const std::string once = write(read(text, "a message"));
  if (write(read(once, "a message")) != once) std::abort();
}

void read_message(char kind, const std::string& text) {
  switch (kind) {
    case 'v':  // rank 0's
      read_and_write_again(text, verdict_from_json,
                           [](const Verdict& each) { return to_json(each); });
      break;
    case 'q':
      read_and_write_again(text, peer_question_from_json,
                           [](const PeerQuestion& each) { return to_json(each); });
      break;
    case 'm':
      read_and_write_again(text, ParameterMap::from_manifest_json,
                           [](const ParameterMap& each) { return each.to_manifest_json(); });
      break;
    default:
      break;
  }
}

}  // namespace
}  // namespace nanlocator

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  try {
    nanlocator::read_message(static_cast<char>(data[0]),
                             {reinterpret_cast<const char*>(data) + 1, size - 1});
  } catch (const nanlocator::FormatError&) {
  }
  return 0;
}
