// Where memory was written that a traced pass reads and does not write.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "nanlocator/operators/program_code.hpp"

namespace nanlocator::inline operators_room {

struct NamedGroup;  // src/operators/process_groups.hpp

struct EarlierWrite {
  std::string op;  // "aten::div_.Tensor", "c10d::allgather_", "nn.Module.__call__"
  ProgramCode::Caller caller{};
  bool is_received = false;  // by a collective, or from another rank
  /// The memory is a copy, and what it was copied from was written again while the step ran, by
  /// something that was not observed. No other field is set.
  bool is_rewritten = false;
  std::shared_ptr<const NamedGroup> group{};  // of the collective; null if it has no name
};

/// Tells the running trace: a bad value in this memory was made or received there, so it is neither
/// data nor kept by a module. Of declared tensors, only parameters get a writer. Does nothing
/// without a trace. Any thread.
void note_earlier_write(const at::Tensor& tensor, const EarlierWrite& write);

/// While one lives, the collectives that observers on this thread see are not executed: what they
/// bring is from the first pass.
class RepeatedExchange {
 public:
  RepeatedExchange() noexcept;
  ~RepeatedExchange();
  RepeatedExchange(const RepeatedExchange&) = delete;  // strictly nested
  RepeatedExchange& operator=(const RepeatedExchange&) = delete;
};

/// The same holds for `copy`, which was made of `tensor` unobserved.
void note_copy(const at::Tensor& tensor, const at::Tensor& copy);

}  // namespace nanlocator::inline operators_room
