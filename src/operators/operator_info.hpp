// The facts of an operator's schema that matter for births; looked up once per operator and thread.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "nanlocator/record/collective_kind.hpp"
#include "nanlocator/replay/capture.hpp"

namespace nanlocator::inline operators_room {

/// How an operator uses an argument.
enum class ArgumentUse : std::uint8_t {
  read,
  read_and_written,  // in place
  overwritten,       // out=, self of copy_ and fill_: its earlier values are not an input
};

struct OperatorInfo {
  std::string name;       // "aten::div"
  std::string full_name;  // "aten::div.Tensor"
  std::vector<std::string> argument_names;
  std::vector<ArgumentUse> arguments;
  std::vector<bool> returns_alias;  // a view of an argument: no new values
  /// Returns memory without writing it: empty, resize_, set_. Its content is undefined until a
  /// write.
  bool is_allocator = false;
  bool is_view = false;                      // every return is a view
  bool updates_statistics = false;           // arguments that it writes and does not return
  bool is_batch_norm = false;                // or its derivative
  std::optional<std::size_t> is_training;    // of batch norm: index of the argument that says so
  std::optional<CollectiveKind> collective;  // empty: no transfer between ranks
  /// Its values come from a scalar, not from earlier content: zeros, fill_.
  bool is_filler = false;
  /// Made of other operators only, on every backend, which write its output.
  bool is_composite = false;
  /// A copy_ inside is reported as this operator, which users know.
  bool owns_its_copy = false;
  bool is_copy = false;
  bool is_fill = false;
  bool is_pointwise = false;
  bool is_arithmetic = false;  // kernels of other operators compute with it: pointwise, a sum
  bool is_custom = false;      // defined by a library or the user, not by PyTorch
  bool is_lift_fresh = false;
  bool moves_values = false;  // its results are elements of its inputs
  bool tells_host = false;    // returns a number to the program: item
  /// A non-finite scalar may become an output value (false for bounds and orders).
  bool scalars_are_values = true;
  bool writes = false;              // at least one argument
  std::optional<std::size_t> beta;  // index of the factor; argument 0 is not read if it is 0
  /// Null if calls need not be kept: views, allocations, fills, composites, collectives.
  const CallFacts* facts = nullptr;

  /// True if its own kernel, not only operators inside, reads and writes its arguments.
  [[nodiscard]] bool uses_memory() const noexcept {
    return !is_composite || is_copy || owns_its_copy;
  }
};

/// Null for a frame without a schema: a custom autograd function, the engine's evaluate_function.
/// Valid for the life of the process.
[[nodiscard]] const OperatorInfo* operator_info(const at::RecordFunction& call);

/// True if the call computes with argument `i` of `arguments`. False for overwritten ones, for
/// argument 0 if its factor `beta` is zero, and for running statistics in the derivative of a batch
/// norm in training.
[[nodiscard]] bool is_read(const OperatorInfo& info, c10::ArrayRef<c10::IValue> arguments,
                           std::size_t i);

/// True if an operator that moves values takes elements from argument `i`, which is neither an
/// index nor a mask.
[[nodiscard]] bool is_source(const OperatorInfo& info, std::size_t i);

/// True if argument `i` is a running statistic that the call updates, while its results do not
/// depend on it: batch norm in training.
[[nodiscard]] bool is_only_updated(const OperatorInfo& info, c10::ArrayRef<c10::IValue> arguments,
                                   std::size_t i);

}  // namespace nanlocator::inline operators_room
