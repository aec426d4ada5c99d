// The always-on `boundaries` level: what this rank puts into collectives and sends to other ranks,
// and what it gets out of them.
//
// In: each crossing with its tensors, before and after; the modules as they run; the schedule's
// microbatches. Out, when the step ends: sightings of bad tensors in execution order, and how many
// crossings were scanned. A crossing is named by (group, sequence number), which all its members
// count alike; a message by (group, sender, receiver, sequence number).
//
// What cannot be scanned (bytes of a quantised tensor, a subclass that hides its memory, a stream
// that is being captured) is counted as not scanned: it is never taken to be finite.
//
// Cost: one read of each tensor (host memory), or one launch (CUDA; current stream); only `collect`
// waits. Nothing is cached by address: a collective writes its result over its input without a new
// version. Keeps no tensor. From any thread.
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
  /// `threads`: of scan_cpu, where a tensor is bad.
  explicit BoundaryWatch(int threads = 1);
  ~BoundaryWatch();
  BoundaryWatch(const BoundaryWatch&) = delete;  // owns device memory
  BoundaryWatch& operator=(const BoundaryWatch&) = delete;

  /// `members`: global ranks. Every member must add the group under this name.
  CrossingGroup add_group(std::string name, std::vector<int> members);
  /// The members of the group also exchange activations by a way that nobody shows to this watch:
  /// the coverage says so, in each step.
  void has_unwatched(CrossingGroup group);

  /// Forgets the step before; counting starts at 0. All members call it at the same place among
  /// their crossings.
  void begin_step();
  /// Forgets what crossed in this step so far, but for its number: nobody has scanned it.
  void begin_pass();

  // ---- Crossings ----

  /// This rank enters a collective; `sent` is what it puts in (none where only the root does).
  /// `op`: the dispatcher's name, "c10d::allreduce_".
  [[nodiscard]] CrossingId begin_collective(CrossingGroup group, std::string_view op,
                                            std::span<const at::Tensor> sent);
  /// This rank sends; all that is to be seen of it is seen here. `peer`: global rank.
  void send(CrossingGroup group, int peer, std::span<const at::Tensor> sent);
  [[nodiscard]] CrossingId begin_receive(CrossingGroup group, int peer);
  /// A collective, or a message, that crosses between two passes, or behind the last: it is
  /// counted, and the coverage ends before it.
  void skip_collective(CrossingGroup group);
  void skip_message(CrossingGroup group, int peer, bool is_received);
  /// What came out of a collective or receive; on CUDA the current stream must be ordered after
  /// it. A crossing of a step before is ignored. Until then the coverage ends before it.
  void finish(CrossingId crossing, std::span<const at::Tensor> received);

  // ---- Where: forward ----

  /// A module is called, and left, on this thread; returns what `leave` takes. Calls entered since
  /// and not left are left, too (an exception may have passed through them).
  [[nodiscard]] std::size_t enter(ModulePath path);
  void leave(std::size_t call);

  /// From here to `leave_transfer` what this thread exchanges collectively is a framework's own:
  /// weights of `owner` that are gathered, or gradients that are reduced. Not to be nested.
  void enter_transfer(ModulePath owner, bool reduces_gradients);
  void leave_transfer();

  // ---- Where: the schedule. Transfers between pipeline stages happen between its steps; a message
  // within one is a layer's (context parallelism's ring). ----

  /// Forward of `place` consumes `inputs`, which were received; it has computed `outputs`, which
  /// will be sent. Tensors are recognised by the address of their memory.
  void begin_forward(MicrobatchPlace place, std::span<const at::Tensor> inputs);
  void end_forward(MicrobatchPlace place, std::span<const at::Tensor> outputs);
  void begin_backward(MicrobatchPlace place, std::span<const at::Tensor> output_grads);
  void end_backward(MicrobatchPlace place, std::span<const at::Tensor> input_grads);

  /// In the pass that follows: what collectives that give every member the same give this rank, in
  /// groups that hold the rank that asks, in its microbatch. Reads each result at once: on a device
  /// it waits. Of at most 4,096.
  void keep_results(const PeerQuestion& question);
  /// What was kept; ends it.
  [[nodiscard]] std::vector<CollectiveResult> take_results();

  struct Collected {
    std::vector<Sighting> sightings;         // bad ones, in execution order; each has a crossing
    std::vector<CrossingCoverage> coverage;  // of what crossed at all
  };
  /// Waits for the devices.
  [[nodiscard]] Collected collect(std::int64_t iteration);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nanlocator::inline watch_room
