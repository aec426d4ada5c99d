// Keeps an operator call while it runs, so that it can be executed again.
//
//     start callback:   capture.begin(call, facts);
//     finish callback:  if (something is wrong) kept = capture.end(call);
//
// In: at::RecordFunction's start and finish of one operator. Out: an OperatorCall with the values
// of the arguments before the call and of the outputs after it. Cheap where nothing goes wrong:
// `begin` takes references, and copies only what the operator writes and, for operators that draw
// random numbers, the generators' states: on their device where they are small, else to the host.
// `end` copies everything to the host, because training goes on with the tensors and needs its
// device. Runs on the thread of the callbacks, on the current streams; copies to the host wait.
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

/// What the schema says about keeping and repeating a call.
struct CallFacts {
  c10::OperatorHandle handle;
  /// Arguments that the operator writes, by position: those that the schema marks, and the running
  /// statistics of batch norm, which it does not.
  std::vector<std::size_t> written;
  /// Of these, the ones that are not returned: their values after the call follow the returned
  /// values in OperatorCall::outputs.
  std::vector<std::size_t> written_unreturned;
  bool draws_random_numbers = false;
};

/// Throws UnsupportedError where no operator of this name is registered. The reference is valid for
/// the life of the process; any thread.
[[nodiscard]] const CallFacts& call_facts(const c10::OperatorName& name);

class CallCapture {
 public:
  /// Whether copies may take so many bytes.
  using MayTake = std::function<bool(std::uint64_t bytes)>;

  /// In the start callback, which must have asked for inputs. False, and nothing is captured, where
  /// copies of what the operator writes may not be taken or there is no memory for them.
  [[nodiscard]] bool begin(const at::RecordFunction& call, const CallFacts& facts,
                           const MayTake& may_take);
  /// The same for a call with a schema, without a limit; looks the facts up (slower: copies the
  /// name). Throws UnsupportedError where there is no memory.
  void begin(const at::RecordFunction& call);

  /// Bytes that are copied when `end` has run.
  [[nodiscard]] std::uint64_t bytes(const at::RecordFunction& call) const;

  /// In the finish callback, which must have asked for outputs. Tensors of the result belong to
  /// it alone and are in host memory. Leaves the capture empty. Throws what Torch throws where
  /// there is no memory.
  [[nodiscard]] OperatorCall end(const at::RecordFunction& call);

 private:
  [[nodiscard]] bool copy_what_is_written(const MayTake& may_take);
  /// But for what is in `own_` and there.
  void copy_to_host(std::vector<c10::IValue>& values);

  const CallFacts* facts_ = nullptr;
  std::vector<c10::IValue> arguments_;  // before the call: `written` and what shares with it
                                        // are copies, in the storages `own_`
  std::set<const c10::StorageImpl*> own_;
  CameFrom came_from_;
  std::vector<c10::IValue> live_written_;  // the tensors of `written_unreturned` themselves
  std::vector<std::pair<std::string, at::Generator>> generators_;  // copies from before the call
};

}  // namespace nanlocator::inline replay_room
