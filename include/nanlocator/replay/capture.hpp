// Keeps an operator call while it runs, so that it can be executed again.
//
//     start callback:   capture.begin(call, facts);
//     finish callback:  if (something is wrong) kept = capture.end(call);
//
// In: at::RecordFunction's start and finish of one operator. Out: an OperatorCall with the values
// of the arguments before the call and of the outputs after it. Cheap where nothing goes wrong:
// `begin` takes references, and copies only what the operator writes and, for operators that draw
// random numbers, the generators' states. `end` copies everything, because training goes on with
// the tensors. Runs on the thread of the callbacks, on the current streams; never waits.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "nanlocator/replay/operator_call.hpp"

namespace nanlocator {

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
  /// In the start callback, which must have asked for inputs.
  void begin(const at::RecordFunction& call, const CallFacts& facts);
  /// The same for a call with a schema; looks the facts up (slower: copies the name).
  void begin(const at::RecordFunction& call);

  /// Bytes that `end` would copy, the arguments already copied included.
  [[nodiscard]] std::uint64_t bytes(const at::RecordFunction& call) const;

  /// In the finish callback, which must have asked for outputs. Tensors of the result belong to
  /// it alone, on the devices they were on. Leaves the capture empty.
  [[nodiscard]] OperatorCall end(const at::RecordFunction& call);

 private:
  const CallFacts* facts_ = nullptr;
  std::vector<c10::IValue> arguments_;     // before the call: `written` and what shares with it
                                           // are copies
  std::vector<c10::IValue> live_written_;  // the tensors of `written_unreturned` themselves
  std::vector<std::pair<std::string, at::Generator>> generators_;  // copies from before the call
};

}  // namespace nanlocator
