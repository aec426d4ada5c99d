// Which storages hold something bad, and from which births.
//
// A storage is known by its StorageImpl and a weak pointer, which keeps the address from being used
// again and nothing alive that matters. A record says what the trace saw of its memory last:
// allocated, written finite, received; and which of its bytes are bad from which births. Not
// thread-safe: the trace holds its lock.
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
#include "tensor/observed_tensor.hpp"

namespace nanlocator::inline operators_room {

/// Position in the trace's births.
using BirthId = std::int32_t;
/// Sorted, without repetition.
using BirthIds = std::vector<BirthId>;
void unite(BirthIds& ids, const BirthIds& more);

/// Strided, with elements of whatever dtype: something that an operator can read or write.
[[nodiscard]] bool has_bytes(const at::Tensor& tensor) noexcept;

/// What a frame that computes off the dispatcher was given, as far as it was bad: what it makes bad
/// of that, nobody but these births has to answer for.
struct Given {
  BirthIds with_nan;
  BirthIds with_any;
  /// Their identities, whose addresses nobody else gets: a compiled region lets go of its inputs.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> inputs;
  std::vector<std::string> parameters;  // names of the declared ones among them

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

struct NamedGroup {
  std::string name;
  std::vector<int> members;  // global ranks
};
/// What name_process_group was told of the group with this c10d name; null where nothing was.
[[nodiscard]] std::shared_ptr<const NamedGroup> named_group(const std::string& group);

/// Something that computes without the dispatcher, or a place in the model: what an opaque birth is
/// said to be inside of.
struct Place {
  std::string frame;       // "MyFunction", "CompiledFunction", "MyFunctionBackward"; "" for none
  std::string module;      // its module path; "" where unknown
  std::string node;        // backward: the autograd node
  std::string forward_op;  // backward: what it is the derivative of
  std::string custom_function;  // the custom autograd Function whose own code runs
  /// Of the forward operator, in backward; of the frame off the dispatcher, where one runs.
  ProgramCode::Caller caller;
  std::shared_ptr<const NamedGroup> group;  // of a collective, where somebody has named it
  /// Of an allocation, where the trace fills fresh memory.
  ProgramCode::Caller allocated_at;
  /// Of the frame; the trace's lock guards what it points to. Null where there is no frame.
  std::shared_ptr<Given> given;
  bool is_called_by_program = true;  // no engine between the program's code and the operator
  bool is_backward = false;
  bool is_recomputed = false;  // a forward that runs again inside backward
  bool is_module_inferred = false;
};

enum class StorageState : std::uint8_t {
  allocated,  // by an operator; no operator has written it
  written,    // by operators, finite in `finite_range` at their time
  received,   // by a collective; not scanned yet
  foreign,    // appeared as a gradient that no operator has written
};

struct Tag {
  ByteRange range;
  BirthIds births;
  Content content = Content::finite;  // known to be in the range; finite: not known
};

/// The last write of some bytes, at the trace's clock.
struct RangeWrite {
  ByteRange range;
  std::uint64_t clock = 0;
  const std::string* writer = nullptr;  // interned
  bool is_received = false;             // by a collective
};

/// A frame off the dispatcher had these bytes in hand.
struct Touch {
  ByteRange range;
  std::shared_ptr<const Place> by;
};

struct StorageRecord {
  explicit StorageRecord(c10::weak_intrusive_ptr<c10::StorageImpl> storage)
      : owner(std::move(storage)) {}

  c10::weak_intrusive_ptr<c10::StorageImpl> owner;
  StorageState state = StorageState::allocated;
  bool is_filled = false;                  // the last write was of a constant
  std::uint64_t last_write = 0;            // the trace's clock
  ByteRange finite_range;                  // what was written finite, where that is one piece
  const std::string* writer = nullptr;     // operator of the last write or allocation; interned
  const std::string* allocator = nullptr;  // operator that allocated it in this pass; interned
  std::shared_ptr<const Place> place;      // allocated, received, foreign: where
  std::vector<Touch> touches;  // of bytes that nobody has written since, the latest at the end
  std::vector<Tag> tags;
  /// Gradients of many parameters lie in one buffer: which of them has an operator written, and
  /// when?
  std::vector<RangeWrite> writes;
};

class Lineage {
 public:
  void clear();

  void note_allocation(const at::Tensor& tensor, std::uint64_t clock, const std::string* writer,
                       const std::shared_ptr<const Place>& place);
  /// A known storage has become larger: nobody has written what was added.
  void note_growth(const at::Tensor& tensor, const std::string* writer,
                   const std::shared_ptr<const Place>& place);
  void note_finite_write(const at::Tensor& tensor, std::uint64_t clock, const std::string* writer,
                         bool is_filler);
  void note_bad_write(const at::Tensor& tensor, std::uint64_t clock, const std::string* writer,
                      const BirthIds& births, Content content);
  /// Marks what is there as bad without a write: a root that was found when it was read.
  void note_bad_content(const at::Tensor& tensor, const BirthIds& births);
  /// `sent`: the births of what this rank put into the collective; where what came out is bad,
  /// it is from them.
  void note_received(const at::Tensor& tensor, std::uint64_t clock, const std::string* writer,
                     const std::shared_ptr<const Place>& place, const BirthIds& sent);
  /// The collective `writer` has put there what operators, on its behalf, seem to have written
  /// last (gloo's reduce-scatter copies its result while it is waited for).
  void note_arrival(const c10::StorageImpl* storage, const ByteRange& range, std::uint64_t clock,
                    const std::string* writer);
  /// The frame that had any of these bytes in hand last, and that nobody has written since; or
  /// null.
  [[nodiscard]] std::shared_ptr<const Place> last_touch_of(const at::Tensor& tensor);
  /// A frame without schema has the tensor; nothing where the storage is not known.
  void note_touch(const at::Tensor& tensor, const std::shared_ptr<const Place>& place);
  /// A gradient that no operator has written; nothing where the storage is known.
  void note_foreign(const at::Tensor& tensor, const std::shared_ptr<const Place>& place);

  /// Null where the storage is not known. Valid until the next note.
  [[nodiscard]] StorageRecord* find(const at::Tensor& tensor);
  /// Births of the bytes that `tensor` reaches.
  [[nodiscard]] BirthIds births_in(const at::Tensor& tensor);
  /// True if what an operator wrote there last has a NaN, wherever in it that is.
  [[nodiscard]] bool is_known_to_have_nan(const at::Tensor& tensor);
  /// The last write of any of the bytes that `tensor` reaches; its clock is 0 where there is none.
  [[nodiscard]] RangeWrite last_write_of(const at::Tensor& tensor);

  [[nodiscard]] std::size_t size() const noexcept { return records_.size(); }

 private:
  StorageRecord& record_of(const at::Tensor& tensor);
  void forget_the_dead();

  std::unordered_map<const c10::StorageImpl*, StorageRecord> records_;
  std::size_t sweep_at_ = 4096;
};

/// What the caller has declared. Lives as long as the trace; `Lineage` only as long as a pass.
class Declarations {
 public:
  struct Declared {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    ByteRange range;
    DeclaredAs as;
    std::string name;
    std::string module;  // of a parameter or buffer: its name without the last part
  };

  void declare(const at::Tensor& tensor, DeclaredAs as, std::string name);
  /// Finds the storages again: `parameter.data = ...` may have changed them.
  void refresh();
  /// The first declared tensor that shares memory with `tensor`, gradients aside; null for none.
  [[nodiscard]] const Declared* find(const at::Tensor& tensor) const;
  /// All of them, in the order of their declaration: a flat buffer holds many parameters.
  [[nodiscard]] std::vector<const Declared*> find_all(const at::Tensor& tensor) const;
  /// The live gradients that share memory with `tensor`, by their parameters' names.
  [[nodiscard]] std::vector<NamedTensor> gradients_in(const at::Tensor& tensor) const;
  /// The first `most` live parameters of this module itself, in the order of their declaration.
  [[nodiscard]] std::vector<NamedTensor> parameters_of(const std::string& module,
                                                       std::size_t most) const;
  /// The live tensor itself; undefined where it is gone.
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
