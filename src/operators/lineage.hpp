// Records which storages hold bad values, and from which births.
//
// A storage is identified by its StorageImpl and a weak pointer, which prevents reuse of the
// address but keeps no tensor memory alive. A record has the last known state of the memory
// (allocated, written finite, received) and its bad bytes with their births. Not thread-safe: the
// trace holds its lock.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "nanlocator/operators/operator_trace.hpp"
#include "nanlocator/operators/program_code.hpp"
#include "nanlocator/scan/content.hpp"
#include "operators/process_groups.hpp"
#include "tensor/observed_tensor.hpp"

namespace nanlocator::inline operators_room {

/// Index into the trace's births.
using BirthId = std::int32_t;
/// Sorted, without duplicates.
using BirthIds = std::vector<BirthId>;
void unite(BirthIds& ids, const BirthIds& more);

/// True for a strided tensor with elements of any dtype, which an operator can read or write.
[[nodiscard]] bool has_bytes(const at::Tensor& tensor) noexcept;

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

  [[nodiscard]] bool has_input(const at::Tensor& tensor) const {
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    return std::ranges::any_of(
        inputs, [&](const auto& each) { return each._unsafe_get_target() == storage; });
  }
  bool has_unread = false;  // bytes that may be NaN, as an operator or kernel wrote integers there

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

enum class StorageState : std::uint8_t {
  allocated,  // by an operator; no operator has written it
  written,    // by operators, finite in `finite_range` at their time
  received,   // by a collective; not scanned yet
  earlier,    // by an operator that this pass does not repeat
  foreign,    // appeared as a gradient that no operator has written
  bytes,      // by an operator on integers; what its bytes are as floating-point values is unknown
};

struct Tag {
  ByteRange range;
  BirthIds births;
  Content content = Content::finite;  // lower bound for the range; finite: unknown
};

/// The last write of some bytes, at the trace's clock.
struct RangeWrite {
  ByteRange range;
  std::uint64_t clock = 0;
  const std::string* writer = nullptr;  // interned
  bool is_received = false;             // by a collective
  bool is_finite = false;               // by an operator whose result was finite
  bool is_filler = false;               // a constant
};

/// A frame off the dispatcher had access to these bytes.
struct Touch {
  ByteRange range;
  std::shared_ptr<const Place> by;
};

struct StorageRecord {
  explicit StorageRecord(c10::weak_intrusive_ptr<c10::StorageImpl> storage)
      : owner(std::move(storage)) {}

  c10::weak_intrusive_ptr<c10::StorageImpl> owner;
  StorageState state = StorageState::allocated;
  bool is_filled = false;                  // the last write was a constant
  std::uint64_t last_write = 0;            // the trace's clock
  ByteRange finite_range;                  // the last finite write, if contiguous
  const std::string* writer = nullptr;     // operator of the last write or allocation; interned
  const std::string* allocator = nullptr;  // operator that allocated it in this pass; interned
  std::shared_ptr<const Place> place;  // where it was allocated, received, or first seen (foreign)
  std::vector<Touch> touches;          // for bytes without a later write, latest last
  std::vector<Tag> tags;
  /// Last writes by range, because gradients of many parameters share a buffer.
  std::vector<RangeWrite> writes;
};

class Lineage {
 public:
  void clear();

  void note_allocation(const at::Tensor& tensor, std::uint64_t clock, const std::string* writer,
                       const std::shared_ptr<const Place>& place);
  /// A known storage has grown; the added part is unwritten.
  void note_growth(const at::Tensor& tensor, const std::string* writer,
                   const std::shared_ptr<const Place>& place);
  void note_finite_write(const at::Tensor& tensor, std::uint64_t clock, const std::string* writer,
                         bool is_filler);
  /// A write of integers, which may be viewed as floating-point values (a payload in float8).
  void note_bytes(const at::Tensor& tensor, std::uint64_t clock, const std::string* writer,
                  const std::shared_ptr<const Place>& place);
  /// What this memory holds is from elsewhere.
  void forget(const at::Tensor& tensor);
  void note_bad_write(const at::Tensor& tensor, std::uint64_t clock, const std::string* writer,
                      const BirthIds& births, Content content);
  /// Marks the present content as bad without a write: a root that was found on reading.
  void note_bad_content(const at::Tensor& tensor, const BirthIds& births);
  /// `sent`: births in this rank's input to the collective, assigned to a bad result.
  void note_received(const at::Tensor& tensor, std::uint64_t clock, const std::string* writer,
                     const std::shared_ptr<const Place>& place, const BirthIds& sent);
  /// Attributes to the collective `writer` the last writes here, which its own operators made
  /// (gloo's reduce-scatter copies its result during the wait).
  void note_arrival(const c10::StorageImpl* storage, const ByteRange& range, std::uint64_t clock,
                    const std::string* writer);
  /// The last frame with access to any of these bytes, if nothing has written them since; else
  /// null.
  [[nodiscard]] std::shared_ptr<const Place> last_touch_of(const at::Tensor& tensor);
  /// A frame without schema has access to the tensor. Ignored if the storage is unknown.
  void note_touch(const at::Tensor& tensor, const std::shared_ptr<const Place>& place);
  void note_earlier(const at::Tensor& tensor, const std::string* writer,
                    const std::shared_ptr<const Place>& place);
  /// A gradient that no operator has written. Ignored if the storage is known.
  void note_foreign(const at::Tensor& tensor, const std::shared_ptr<const Place>& place);

  /// Null if the storage is unknown. Valid until the next note.
  [[nodiscard]] StorageRecord* find(const at::Tensor& tensor);
  /// Births of the bytes that `tensor` reaches.
  [[nodiscard]] BirthIds births_in(const at::Tensor& tensor);
  /// True if an operator's last write there has a NaN, anywhere in it.
  [[nodiscard]] bool is_known_to_have_nan(const at::Tensor& tensor);
  /// The last write of any of the bytes that `tensor` reaches; its clock is 0 if there is none.
  [[nodiscard]] RangeWrite last_write_of(const at::Tensor& tensor);
  /// True if operators wrote all of `tensor`, and it was finite then. False also if unknown.
  [[nodiscard]] bool was_written_finite(const at::Tensor& tensor);

  [[nodiscard]] std::size_t size() const noexcept { return records_.size(); }

 private:
  StorageRecord& record_of(const at::Tensor& tensor);
  void forget_the_dead();

  std::unordered_map<const c10::StorageImpl*, StorageRecord> records_;
  std::size_t sweep_at_ = 4096;
};

/// The caller's declarations. They live as long as the trace, `Lineage` as long as a pass.
class Declarations {
 public:
  struct Declared {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    ByteRange range;
    DeclaredAs as;
    std::string name;
    std::string module;  // of a parameter or buffer: its name without the last part
    std::shared_ptr<const Place> writer{};  // of a parameter: the program's own, after the update
  };

  void declare(const at::Tensor& tensor, DeclaredAs as, std::string name);
  /// For the very parameter, not for one that shares its memory.
  void note_writer(const at::Tensor& parameter, const std::shared_ptr<const Place>& writer);
  /// Looks the storages up again: `parameter.data = ...` may have changed them.
  void refresh();
  /// The first declared tensor that shares memory with `tensor`, gradients excluded; null if none.
  [[nodiscard]] const Declared* find(const at::Tensor& tensor) const;
  /// All of them, in order of declaration: a flat buffer holds many parameters.
  [[nodiscard]] std::vector<const Declared*> find_all(const at::Tensor& tensor) const;
  /// The live gradients that share memory with `tensor`, named after their parameters.
  [[nodiscard]] std::vector<NamedTensor> gradients_in(const at::Tensor& tensor) const;
  /// True if a parameter's gradient, as autograd keeps it or as it was declared, shares memory with
  /// `tensor`.
  [[nodiscard]] bool has_gradient_in(const at::Tensor& tensor) const;
  /// The first `most` live parameters of this module itself, in order of declaration.
  [[nodiscard]] std::vector<NamedTensor> parameters_of(const std::string& module,
                                                       std::size_t most) const;
  /// The live tensor; undefined if it is gone.
  [[nodiscard]] static at::Tensor tensor_of(const Declared& declared);
  [[nodiscard]] bool empty() const noexcept { return declared_.empty(); }

 private:
  void index(std::size_t position);
  template <typename Use>
  void for_each_sharing(const at::Tensor& tensor, const Use& use) const;

  std::vector<Declared> declared_;
  std::unordered_multimap<const c10::StorageImpl*, std::size_t> by_storage_;
};

}  // namespace nanlocator::inline operators_room
