// How a rank ended that sent no ledger, by its own last words.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace nanlocator::inline verdict_room {

/// In the order in which one of several ranks' endings decides, the last first.
enum class EndingKind : std::uint8_t {
  other,     // may be of the code, the machine, the data, or follow from what is not finite
  of_peers,  // it lost its connection to another rank: a consequence
  killed,    // for want of memory, or from outside
  code,      // a programming error
  machine,
};
[[nodiscard]] constexpr auto names_of(EndingKind) {
  return std::to_array<std::string_view>({"other", "of_peers", "killed", "code", "machine"});
}

struct RankEnding {
  int rank = -1;
  EndingKind kind = EndingKind::other;
  std::string text;  // "torch.OutOfMemoryError: CUDA out of memory. ...", "exit code -9"
  friend bool operator==(const RankEnding&, const RankEnding&) = default;
};

/// By the words of PyTorch, the CUDA runtime, NCCL, gloo, torchrun and SLURM; `other` if they say
/// nothing of that.
[[nodiscard]] EndingKind ending_kind_of(std::string_view words);

/// The endings of `ranks` as the log of a job has them: the last error of a traceback whose lines
/// begin with "[rank5]:" (torch/distributed/c10d's excepthook), the exit code in torchrun's list of
/// failures, and what SLURM says of the whole job, which counts for a rank without either. Ranks of
/// which it says nothing are left out. At most 200 bytes of a line are kept.
[[nodiscard]] std::vector<RankEnding> endings_in(std::string_view log, std::span<const int> ranks);

}  // namespace nanlocator::inline verdict_room
