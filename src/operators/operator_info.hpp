// What an operator's schema says about births; looked up once per operator and thread.
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

/// How an argument takes part.
enum class ArgumentUse : std::uint8_t {
  read,
  read_and_written,  // in place
  overwritten,       // out=, self of copy_ and fill_: its values before are no input
};

struct OperatorInfo {
  std::string name;       // "aten::div"
  std::string full_name;  // "aten::div.Tensor"
  std::vector<std::string> argument_names;
  std::vector<ArgumentUse> arguments;
  std::vector<bool> returns_alias;  // a view of an argument: no new values
  /// Its memory is not written: empty, resize_, set_. What reads it before a write reads nothing.
  bool is_allocator = false;
  bool is_view = false;                      // every return is a view
  std::optional<CollectiveKind> collective;  // empty: it moves nothing between ranks
  /// Its values come from a scalar, whatever was there: zeros, fill_.
  bool is_filler = false;
  /// Made of other operators only, on every backend: what they wrote is what it gives.
  bool is_composite = false;
  /// copy_ inside of these is reported as theirs: the operator that a person knows.
  bool owns_its_copy = false;
  bool is_copy = false;
  bool is_fill = false;
  bool is_pointwise = false;
  bool is_custom = false;  // not PyTorch's own: registered by a library or by the user
  bool is_lift_fresh = false;
  bool tells_host = false;  // its result is a number of the program's: item
  /// A scalar that is not finite may become a value of the output (not: a bound or an order).
  bool scalars_are_values = true;
  bool writes = false;              // any argument
  std::optional<std::size_t> beta;  // argument 0 is not read where this argument is 0
  /// Null where a call need not be kept: views, allocations, fills, composites, collectives.
  const CallFacts* facts = nullptr;

  /// Its own kernel reads and writes its arguments, not only the operators that it is made of.
  [[nodiscard]] bool uses_memory() const noexcept {
    return !is_composite || is_copy || owns_its_copy;
  }
};

/// Null for a frame without a schema: a custom autograd function, the engine's evaluate_function.
/// Valid for the life of the process.
[[nodiscard]] const OperatorInfo* operator_info(const at::RecordFunction& call);

/// Whether the call computes with argument `i` of `arguments`: not with what it overwrites, and not
/// with argument 0 where its factor `beta` is zero.
[[nodiscard]] bool is_read(const OperatorInfo& info, c10::ArrayRef<c10::IValue> arguments,
                           std::size_t i);

}  // namespace nanlocator::inline operators_room
