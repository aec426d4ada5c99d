// The collectives of a process group, with data whose every element is known in advance.
//
// A value is an integer from 1 to 120 that depends on the case, the sender and the index. In a
// reduction each element has one or two contributors and the others add zero. So the sum is below
// 256, hence exact in bf16 (8 bits of significand), and a wrong element shows who made it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d

namespace nanlocator::netcheck {

enum class Collective : std::uint8_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  all_to_all,
  send_recv,          // every rank sends to the next one
  send_recv_reverse,  // and to the previous one, so that a wrong element names one of two ranks
};
inline constexpr std::array kCollectives = {
    Collective::all_reduce,       Collective::reduce_scatter, Collective::all_gather,
    Collective::broadcast,        Collective::all_to_all,     Collective::send_recv,
    Collective::send_recv_reverse};
[[nodiscard]] std::string_view name_of(Collective collective) noexcept;

/// One collective with one dtype and size, in a group of `size` ranks, as its member `rank`.
struct CollectiveCase {
  Collective collective = Collective::all_reduce;
  at::ScalarType dtype = at::kFloat;
  std::int64_t numel = 0;  // of the whole: a multiple of `size` (and of 1 for broadcast, send_recv)
  int root = 0;            // of a broadcast
  int rank = 0;
  int size = 1;
  int seed = 0;              // the same on all ranks; a different one gives different values
  bool carries_nan = false;  // one element of one rank is NaN
};

struct ExpectedElement {
  double value = 0;         // NaN if it must arrive
  std::set<int> senders{};  // in the group
  std::set<int> receivers{};
};

struct WrongElement {
  std::int64_t index = 0;    // in this rank's output
  std::int64_t element = 0;  // in the whole: the same number on all receiving ranks
  double found = 0;
  ExpectedElement expected;
  std::int64_t count = 0;  // wrong elements of this output
};

/// The factor from bytes per second of the whole to bus bandwidth, as nccl-tests defines it
/// (doc/PERFORMANCE.md): 2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter and
/// all_to_all, 1 for broadcast and send/recv.
[[nodiscard]] double bus_factor(const CollectiveCase& c);

/// This rank's input, in host memory.
[[nodiscard]] at::Tensor make_input(const CollectiveCase& c);
/// This rank's correct output, in host memory.
[[nodiscard]] at::Tensor make_expected(const CollectiveCase& c);
/// A buffer for the output on `device`, filled with -1. For in-place collectives `input` is copied.
[[nodiscard]] at::Tensor make_output(const CollectiveCase& c, const at::Tensor& input);
/// Launches the collective. The tensors must live until `finish`. Throws c10d's errors.
[[nodiscard]] std::vector<c10::intrusive_ptr<c10d::Work>> launch(const CollectiveCase& c,
                                                                 c10d::ProcessGroup& group,
                                                                 at::Tensor& input,
                                                                 at::Tensor& output);
/// Waits for it and, on an accelerator, for the stream. Without a deadline: the supervisor has one.
void finish(const std::vector<c10::intrusive_ptr<c10d::Work>>& works, at::Device device);
/// Compares every element; empty if all are right. `expected`: in host memory.
[[nodiscard]] std::optional<WrongElement> find_wrong(const CollectiveCase& c,
                                                     const at::Tensor& output,
                                                     const at::Tensor& expected);

}  // namespace nanlocator::netcheck
