// Captures an operator call while it runs, so that it can be executed again.
//
//     start callback:   capture.begin(call, facts);
//     finish callback:  if (something is wrong) kept = capture.end(call);
//
// In: at::RecordFunction's start and finish of one operator. Out: an OperatorCall with the values
// of the arguments before the call and of the outputs after it. Cheap if nothing is wrong: `begin`
// takes references, and copies only the tensors that the operator writes and, for operators that
// draw random numbers, the generators' states. Small copies stay on their device, others go to the
// host. `end` copies everything to the host, because training continues to use the tensors and the
// device's memory. Runs on the thread of the callbacks, on the current streams; copies to the host
// wait.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "nanlocator/replay/operator_call.hpp"

namespace nanlocator::inline replay_room {

/// Facts from the schema for keeping and repeating a call.
struct CallFacts {
  c10::OperatorHandle handle;
  /// Positions of the arguments that the operator writes: those that the schema marks, and the
  /// running statistics of batch norm, which it does not.
  std::vector<std::size_t> written;
  /// Those of `written` that are not returned; in OperatorCall::outputs their values after the call
  /// follow the returned values.
  std::vector<std::size_t> written_unreturned;
  bool draws_random_numbers = false;
};

/// Throws UnsupportedError if no operator of this name is registered. The reference is valid for
/// the life of the process; any thread.
[[nodiscard]] const CallFacts& call_facts(const c10::OperatorName& name);

class CallCapture {
 public:
  /// Whether copies may take this many bytes.
  using MayTake = std::function<bool(std::uint64_t bytes)>;

  /// For the start callback, which must have asked for inputs. False, without a capture, if copies
  /// of the written tensors are not allowed or there is no memory for them.
  [[nodiscard]] bool begin(const at::RecordFunction& call, const CallFacts& facts,
                           const MayTake& may_take);
  /// The same for a call with a schema, without a limit; looks up the facts (slower: copies the
  /// name). Throws UnsupportedError if there is no memory.
  void begin(const at::RecordFunction& call);

  /// The bytes that `end` will have copied.
  [[nodiscard]] std::uint64_t bytes(const at::RecordFunction& call) const;

  /// For the finish callback, which must have asked for outputs. The result owns its tensors, in
  /// host memory. Leaves the capture empty. Throws Torch's error if there is no memory.
  [[nodiscard]] OperatorCall end(const at::RecordFunction& call);

 private:
  [[nodiscard]] bool copy_what_is_written(const MayTake& may_take);
  /// Copies everything except storages in `own_` that are already on the host.
  void copy_to_host(std::vector<c10::IValue>& values);

  const CallFacts* facts_ = nullptr;
  std::vector<c10::IValue> arguments_;  // before the call; `written` and tensors that share memory
                                        // with it are copies, in the storages `own_`
  std::set<const c10::StorageImpl*> own_;
  CameFrom came_from_;
  std::vector<c10::IValue> live_written_;  // the tensors of `written_unreturned` themselves
  std::vector<std::pair<std::string, at::Generator>> generators_;  // copies from before the call
};

}  // namespace nanlocator::inline replay_room
