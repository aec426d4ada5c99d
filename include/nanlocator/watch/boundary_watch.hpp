// The always-on `boundaries` level: this rank's inputs to and outputs of collectives, sends and
// receives.
//
// In: each crossing with its tensors, before and after; the modules as they run; the schedule's
// microbatches. Out, when the step ends: sightings of bad tensors in execution order, and the
// number of scanned crossings. A crossing is identified by (group, sequence number), which all
// members count alike; a message by (group, sender, receiver, sequence number).
//
// A tensor that cannot be scanned (bytes of a quantised tensor, a subclass that hides its memory, a
// stream under capture) counts as not scanned, never as finite.
//
// It counts the crossings of a pass, from which every observer takes its position
// (nanlocator/watch/position.hpp).
//
// Cost: one read of each tensor (host memory), or one launch (CUDA; current stream); only `collect`
// waits. Nothing is cached by address, because a collective overwrites its input without a new
// version. Keeps no tensor alive. Any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/record/ledger.hpp"
#include "nanlocator/record/sighting.hpp"
#include "nanlocator/watch/microbatch_scope.hpp"
#include "nanlocator/watch/module_scope.hpp"

namespace nanlocator::inline watch_room {

/// One collective or message. Unique for the life of the watch.
using CrossingId = std::int64_t;
using CrossingGroup = std::size_t;

class BoundaryWatch {
 public:
  /// `threads`: for scan_cpu, if a tensor is bad.
  explicit BoundaryWatch(int threads = 1);
  ~BoundaryWatch();
  BoundaryWatch(const BoundaryWatch&) = delete;  // owns device memory
  BoundaryWatch& operator=(const BoundaryWatch&) = delete;

  /// `members`: global ranks. Every member must add the group under this name.
  CrossingGroup add_group(std::string name, std::vector<int> members);
  /// The group's members also exchange activations in a way that this watch does not see. Each
  /// step's coverage says so.
  void has_unwatched(CrossingGroup group);

  /// Forgets the previous step; sequence numbers start at 0. All members call it at the same point
  /// between their crossings.
  void begin_step();
  /// Forgets this step's crossings so far, which were not scanned, but keeps their number. The
  /// calling thread executes the pass, whose positions start at 0.
  void begin_pass();
  /// The pass is executed again on this thread: positions start at 0, observations are kept. Its
  /// crossings are not scanned (`skip_collective`, `skip_message`).
  void begin_rerun();
  /// True if the re-run has issued the crossings of the first pass, in their order, so that the
  /// positions of both mean the same places. Call it when the re-run has ended.
  [[nodiscard]] bool has_same_crossings() const;

  // ---- Crossings ----

  /// This rank enters a collective with the input `sent` (empty if only the root has one). `op`:
  /// the dispatcher's name, "c10d::allreduce_".
  [[nodiscard]] CrossingId begin_collective(CrossingGroup group, std::string_view op,
                                            std::span<const at::Tensor> sent);
  /// This rank sends; no `finish` follows. `peer`: global rank.
  [[nodiscard]] CrossingId begin_send(CrossingGroup group, int peer,
                                      std::span<const at::Tensor> sent);
  [[nodiscard]] CrossingId begin_receive(CrossingGroup group, int peer);
  /// The call that issues the crossing has returned, on the calling thread.
  void was_issued(CrossingId crossing);
  /// A collective or message that is not scanned, after it was issued: in a re-run, between two
  /// passes, after the last. It is counted, and coverage ends before it.
  void skip_collective(CrossingGroup group);
  void skip_message(CrossingGroup group, int peer, bool is_received);
  /// The output of a collective or receive; on CUDA the current stream must be ordered after it.
  /// Coverage ends before a crossing without `finish`. Crossings of earlier steps are ignored.
  void finish(CrossingId crossing, std::span<const at::Tensor> received);

  // ---- Place: forward ----

  /// A module begins or ends on this thread; `enter` returns the argument for `leave`. `leave` also
  /// ends calls entered since (an exception may have passed through them).
  [[nodiscard]] std::size_t enter(ModulePath path);
  void leave(std::size_t call);

  /// Until `leave_transfer`, this thread's collectives are the framework's own: they gather the
  /// weights of `owner`, or reduce gradients. Must not be nested.
  void enter_transfer(ModulePath owner, bool reduces_gradients);
  void leave_transfer();

  // ---- Place: the schedule. Pipeline stages transfer between its steps; a message within a step
  // belongs to a layer (context parallelism's ring). ----

  /// The forward of `place` consumes the received `inputs`, or has computed `outputs` to be sent.
  /// Tensors are recognised by the address of their memory.
  void begin_forward(MicrobatchPlace place, std::span<const at::Tensor> inputs);
  void end_forward(MicrobatchPlace place, std::span<const at::Tensor> outputs);
  void begin_backward(MicrobatchPlace place, std::span<const at::Tensor> output_grads);
  void end_backward(MicrobatchPlace place, std::span<const at::Tensor> input_grads);

  /// In the next pass, keeps what this rank receives from collectives that give every member the
  /// same result, in the asking rank's groups and microbatch; at most 4,096 results. Reads each at
  /// once, so it waits for a device.
  void keep_results(const PeerQuestion& question);
  /// Returns the kept results and stops keeping.
  [[nodiscard]] std::vector<CollectiveResult> take_results();

  struct Collected {
    std::vector<Sighting> sightings;         // bad ones, in execution order; each has a crossing
    std::vector<CrossingCoverage> coverage;  // of all crossings, scanned or not
  };
  /// Waits for the devices.
  [[nodiscard]] Collected collect(std::int64_t iteration);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nanlocator::inline watch_room
