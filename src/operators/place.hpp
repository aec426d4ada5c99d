// Where code computes that the dispatcher does not show, and what it was given.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "nanlocator/operators/program_code.hpp"
#include "nanlocator/scan/content.hpp"
#include "operators/process_groups.hpp"

namespace nanlocator::inline operators_room {

/// Index into the trace's births.
using BirthId = std::int32_t;
/// Sorted, without duplicates.
using BirthIds = std::vector<BirthId>;
inline void unite(BirthIds& ids, const BirthIds& more) {
  for (const BirthId id : more) {
    const auto at = std::ranges::lower_bound(ids, id);
    if (at == ids.end() || *at != id) ids.insert(at, id);
  }
}

/// The inputs of a frame that computes off the dispatcher, and the births of their bad values. If
/// these values explain its bad outputs, the births are passed on and the frame itself is not
/// blamed.
struct Given {
  BirthIds with_nan;
  BirthIds with_any;
  /// Identities of the inputs. Weak pointers, because a compiled region releases its inputs; they
  /// prevent reuse of the addresses.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> inputs;
  std::vector<std::string> parameters;  // names of the declared parameters among them
  bool has_unread = false;  // bytes that may be NaN, as an operator or kernel wrote integers there

  [[nodiscard]] bool has_input(const at::Tensor& tensor) const {
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    return std::ranges::any_of(
        inputs, [&](const auto& each) { return each._unsafe_get_target() == storage; });
  }

  void add(Content content, const BirthIds& births) {
    if (content == Content::nan) unite(with_nan, births);
    unite(with_any, births);
  }
};

/// Code that computes without the dispatcher, or a place in the model: the surroundings of an
/// opaque birth.
struct Place {
  std::string frame;       // "MyFunction", "CompiledFunction", "MyFunctionBackward"; "" if none
  std::string module;      // its module path; "" if unknown
  std::string node;        // backward: the autograd node
  std::string forward_op;  // backward: the operator whose derivative it is
  std::string custom_function;  // the custom autograd Function whose own code runs
  /// In backward, of the forward operator; inside a frame off the dispatcher, of that frame.
  ProgramCode::Caller caller;
  std::shared_ptr<const NamedGroup> group;  // of a collective, if it has been named
  double largest_sent = 0;  // of a reduction: the largest finite magnitude of this rank's input
  /// Of an allocation, if the trace fills fresh memory.
  ProgramCode::Caller allocated_at;
  /// Of the frame, null without one. The trace's lock guards the pointee.
  std::shared_ptr<Given> given;
  bool is_of_first_pass = false;     // of a collective that this pass does not execute
  bool is_rewritten = false;         // EarlierWrite::is_rewritten
  bool is_called_by_program = true;  // no engine between the program's code and the operator
  bool is_backward = false;
  bool is_recomputed = false;  // a forward that runs again inside backward
  bool is_module_inferred = false;
};

}  // namespace nanlocator::inline operators_room
