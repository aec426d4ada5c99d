// A crossing's place. In a module's forward (recomputation included), it is the innermost module.
// No module runs in backward, but a module made the autograd node that does. Nodes are numbered in
// the order in which a thread makes them (torch/csrc/autograd/function.h, sequence_nr), so it is
// the module that was innermost when that number was assigned. A message that is sent while the
// schedule executes a microbatch belongs to a layer, such as ring attention, and gets its place
// like a collective. Any other message is between pipeline stages and belongs to the microbatch
// whose step computes or consumes it.
#include "nanlocator/watch/boundary_watch.hpp"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "nanlocator/error.hpp"
#include "nanlocator/record/collective_kind.hpp"
#include "nanlocator/tensor/scan_one.hpp"
#include "nanlocator/watch/position.hpp"
#include "tensor/deferred_scans.hpp"
#include "tensor/tensor_access.hpp"

namespace nanlocator::inline watch_room {
namespace {

struct Group {
  std::string name;
  RankList members;
  bool has_unwatched = false;
};

enum class Direction : std::uint8_t { collective, sent, received };

/// Crossings that are counted together.
struct Lane {
  CrossingGroup group = 0;
  Direction direction = Direction::collective;
  int peer = -1;  // of sends and receives
  friend auto operator<=>(const Lane&, const Lane&) = default;
};

struct Count {
  std::int64_t begun = 0;
  std::int64_t first = 0;     // sequence number at the start of the pass
  std::int64_t finished = 0;  // every crossing below has finished
  std::set<std::int64_t> finished_early;
  std::vector<int> not_scanned;  // sequence numbers
  bool is_unseen_by_member = false;
  bool watches_weights = false;
  bool watches_gradients = false;

  void begin_pass() {
    first = finished = begun;
    watches_weights = watches_gradients = false;
    finished_early.clear();
    not_scanned.clear();
  }

  void finish(std::int64_t sequence) {
    finished_early.insert(sequence);
    while (finished_early.erase(finished) > 0) ++finished;
  }
};

struct CrossingPlace {
  Phase phase = Phase::forward;
  MicrobatchPlace microbatch;
  ModulePath module = nullptr;
  bool carries_weights = false;
  bool reduces_gradients = false;  // of a framework's own transfer
};

struct CrossingRecord {
  Lane lane;
  std::int64_t sequence;
  ModulePath op;  // interned, as paths are
  CrossingPlace place;
  bool was_scanned = true;
  bool awaits_step = false;  // received between two steps of the schedule, for a later step
};

struct Event {
  std::size_t crossing;  // index in this step
  bool is_received;
  DeferredScans::Id scan;
  at::ScalarType type;
  std::vector<std::int64_t> shape;
  std::optional<std::int64_t> position;
};

/// `module` makes the nodes from this number up to the next mark.
struct Mark {
  std::uint64_t first_sequence_number;
  ModulePath module;
  MicrobatchPlace microbatch;
};

/// The framework's own collective, and the module whose weights or gradients it moves.
struct OwnTransfer {
  ModulePath owner;
  bool reduces_gradients;
};

/// The modules that one thread has run.
struct Timeline {
  std::optional<OwnTransfer> transfer;
  std::vector<ModulePath> running;  // outermost first
  std::vector<Mark> marks;          // by ascending number

  void mark() {
    const auto next = at::sequence_number::peek();
    const auto module = running.empty() ? nullptr : running.back();
    // Drops the mark of a module that has made no node: no node can lead to it.
    if (!marks.empty() && marks.back().first_sequence_number == next) marks.pop_back();
    marks.push_back({next, module, current_microbatch()});
  }

  [[nodiscard]] const Mark* at(std::uint64_t sequence_number) const {
    const auto after =
        std::ranges::upper_bound(marks, sequence_number, {}, &Mark::first_sequence_number);
    return after == marks.begin() ? nullptr : &*std::prev(after);
  }
};

/// The schedule's current step.
enum class Step : std::uint8_t {
  before_first,  // no microbatch yet
  forward,       // in a microbatch's forward step, before its model was called
  loss,          // in the same step, after the model's call
  backward,
  between,  // between microbatches, or after the last
};

constexpr std::size_t kMostResults = 4096;

const void* address_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().data() : nullptr;
}

/// True for a tensor without elements, or of integers. Bytes do not count: quantised tensors cross
/// ranks as bytes.
bool cannot_be_bad(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return true;
  return at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true) &&
         tensor.scalar_type() != at::kByte;
}

}  // namespace

struct BoundaryWatch::Impl {
  explicit Impl(int threads) : scans(threads) {}

  std::mutex mutex;
  std::vector<Group> groups;
  DeferredScans scans;
  std::vector<CrossingRecord> crossings;  // of this step
  CrossingId first_crossing = 0;
  std::vector<Event> events;
  std::map<Lane, Count> counts;
  std::unordered_map<std::uint64_t, Timeline> timelines;  // by at::RecordFunction::currentThreadId
  Step step = Step::before_first;
  std::unordered_map<const void*, CrossingPlace> computed;  // by the schedule's steps, may be sent
  std::unordered_map<const void*, std::size_t> arrived;     // crossings received for a later step
  std::optional<PeerQuestion> question;
  PositionCounter positions;
  std::optional<CrossingOrder> first_pass;  // of the pass that is executed again
  std::vector<bool> is_asked;               // by group: the asking rank is a member
  std::vector<CollectiveResult> results;

  CrossingId begin(const Lane& lane, std::string_view op, CrossingPlace place) {
    if (lane.group >= groups.size()) {
      throw UsageError("BoundaryWatch: no group " + std::to_string(lane.group) + " of " +
                       std::to_string(groups.size()) + " was added");
    }
    crossings.push_back({lane, counts[lane].begun++, intern_module_path(op), place});
    return first_crossing + static_cast<CrossingId>(crossings.size()) - 1;
  }

  void begin_pass() {
    forget();
    first_pass.reset();
    positions.begin();
  }

  void count_position(const Lane& lane) {
    const auto timeline = timelines.find(at::RecordFunction::currentThreadId());
    if (timeline != timelines.end() && timeline->second.transfer) return;
    constexpr int kBits = 16;
    const auto direction = static_cast<std::uint64_t>(lane.direction);
    positions.add(lane.group << 2 * kBits | direction << kBits |
                  static_cast<std::uint16_t>(lane.peer));
  }

  void skip(const Lane& lane) {
    ++counts[lane].begun;
    count_position(lane);
  }

  void see(CrossingId crossing, bool is_received, std::span<const at::Tensor> tensors) {
    for (const auto& tensor : tensors) {
      if (cannot_be_bad(tensor)) continue;
      if (!DeferredScans::can_scan(tensor) || is_captured(tensor.device())) {
        record_of(crossing).was_scanned = false;
        continue;
      }
      const auto scan = scans.scan_afresh(tensor);
      if (scan == DeferredScans::kFinite) continue;
      events.push_back({static_cast<std::size_t>(crossing - first_crossing), is_received, scan,
                        tensor.scalar_type(), tensor.sizes().vec(), current_position()});
    }
  }

  void keep_result(const CrossingRecord& crossing, std::span<const at::Tensor> received) {
    if (!question || !is_asked[crossing.lane.group] || results.size() == kMostResults) return;
    const auto kind = collective_kind_of(*crossing.op);
    if (!kind || !gives_all_members_the_same(*kind)) return;
    const auto number = crossing.place.microbatch.microbatch;
    if (question->microbatch && number && number != question->microbatch) return;
    const Group& group = groups[crossing.lane.group];
    CollectiveResult result{.phase = crossing.place.phase,
                            .microbatch = number,
                            .module = {},
                            .op = *crossing.op,
                            .crossing = {group.name, group.members, {}, crossing.sequence}};
    if (crossing.place.module) result.module = *crossing.place.module;
    for (const auto& tensor : received) {
      if (cannot_be_bad(tensor)) continue;
      const auto stats = is_captured(tensor.device()) ? std::nullopt : nanlocator::scan_one(tensor);
      if (!stats || !stats->is_finite()) return;
      result.fingerprint = std::rotl(result.fingerprint, 1) ^ stats->fingerprint;
      result.absmax = std::max(result.absmax, stats->absmax);
      result.sum_of_squares += stats->sum_of_squares;
      result.zeros += stats->zeros;
    }
    results.push_back(std::move(result));
  }

  void finish(CrossingId crossing) {
    const auto& record = record_of(crossing);
    auto& count = counts[record.lane];
    count.finish(record.sequence);
    if (record.was_scanned) return;
    count.not_scanned.push_back(static_cast<int>(record.sequence));
    count.is_unseen_by_member |= !gives_all_members_the_same(
        collective_kind_of(*record.op).value_or(CollectiveKind::exchange));
  }

  [[nodiscard]] CrossingRecord& record_of(CrossingId crossing) {
    return crossings.at(static_cast<std::size_t>(crossing - first_crossing));
  }

  [[nodiscard]] bool is_in_step() const {
    return step == Step::forward || step == Step::loss || step == Step::backward;
  }

  /// The place of an exchange on this thread: a collective, or a message in a step of the schedule.
  [[nodiscard]] CrossingPlace place_here() const {
    const auto microbatch = current_microbatch();
    const auto timeline = timelines.find(at::RecordFunction::currentThreadId());
    if (timeline != timelines.end() && timeline->second.transfer) {
      const auto& [owner, reduces_gradients] = *timeline->second.transfer;
      if (reduces_gradients) return {Phase::grad_reduced, microbatch, owner, false, true};
      const bool is_in_backward = torch::autograd::get_current_node() != nullptr;
      return {is_in_backward ? Phase::backward : Phase::forward, microbatch, owner, true};
    }
    if (const auto module = current_module()) return {Phase::forward, microbatch, module};
    if (const auto node = torch::autograd::get_current_node()) {
      return place_in_backward(*node, microbatch);
    }
    switch (step) {
      case Step::before_first:
      case Step::forward:
        return {Phase::forward, microbatch, nullptr};
      case Step::loss:
        return {Phase::loss, microbatch, nullptr};
      case Step::backward:
        return {Phase::backward, microbatch, nullptr};
      case Step::between:  // finalize_model_grads: tied embeddings, norms under sequence
                           // parallelism
        return {Phase::grad_reduced, microbatch, nullptr};
    }
    return {};
  }

  [[nodiscard]] CrossingPlace place_in_backward(const torch::autograd::Node& node,
                                                MicrobatchPlace microbatch) const {
    CrossingPlace place{Phase::backward, microbatch, nullptr};
    const bool is_accumulator = node.sequence_nr() == std::numeric_limits<std::uint64_t>::max();
    const auto timeline = timelines.find(node.thread_id());
    if (is_accumulator || timeline == timelines.end()) return place;
    if (const Mark* mark = timeline->second.at(node.sequence_nr())) {
      place.module = mark->module;
      if (!microbatch.microbatch) place.microbatch = mark->microbatch;
    }
    return place;
  }

  [[nodiscard]] CrossingPlace place_of_send(std::span<const at::Tensor> sent) const {
    if (is_in_step()) return place_here();
    for (const auto& tensor : sent) {
      if (!tensor.is_floating_point()) continue;  // shapes, at a former tensor's address
      const auto found = computed.find(address_of(tensor));
      if (found != computed.end()) return found->second;
    }
    return {};
  }

  void expect_consumer(CrossingId crossing, std::span<const at::Tensor> received) {
    for (const auto& tensor : received) {
      if (!tensor.is_floating_point()) continue;
      arrived[address_of(tensor)] = static_cast<std::size_t>(crossing - first_crossing);
    }
  }

  void consume(const CrossingPlace& place, std::span<const at::Tensor> tensors) {
    for (const auto& tensor : tensors) {
      const auto found = arrived.find(address_of(tensor));
      if (found == arrived.end()) continue;
      crossings[found->second].place = place;
      arrived.erase(found);
    }
  }

  void keep(const CrossingPlace& place, std::span<const at::Tensor> tensors) {
    for (const auto& tensor : tensors) {
      if (const auto* address = address_of(tensor)) computed[address] = place;
    }
  }

  [[nodiscard]] Sighting sighting_of(const Event& event, std::int64_t iteration) const {
    const CrossingRecord& crossing = crossings[event.crossing];
    const Group& group = groups[crossing.lane.group];
    Sighting sighting;
    sighting.iteration = iteration;
    sighting.microbatch = crossing.place.microbatch.microbatch;
    sighting.chunk = crossing.place.microbatch.chunk;
    sighting.phase = crossing.place.phase;
    if (crossing.place.module) sighting.module = *crossing.place.module;
    sighting.op = *crossing.op;
    sighting.role = role_of(event.is_received);
    sighting.dtype = dtype_name(event.type);
    sighting.shape = event.shape;
    sighting.stats = scans.stats(event.scan);
    sighting.crossing = Crossing{group.name, group.members, peer_of(crossing.lane),
                                 crossing.sequence, crossing.place.carries_weights};
    sighting.position = event.position;
    return sighting;
  }

  [[nodiscard]] static TensorRole role_of(bool is_received) {
    return is_received ? "received" : "sent";
  }

  [[nodiscard]] static std::optional<int> peer_of(const Lane& lane) {
    if (lane.direction == Direction::collective) return std::nullopt;
    return lane.peer;
  }

  void forget() {
    first_crossing += static_cast<CrossingId>(crossings.size());
    crossings.clear();
    events.clear();
    scans.clear();
    for (auto& [thread, timeline] : timelines) timeline.marks.clear();
    step = Step::before_first;
    computed.clear();
    arrived.clear();
  }

  [[nodiscard]] CrossingCoverage coverage_of(const Lane& lane, const Count& count) const {
    const Group& group = groups[lane.group];
    std::vector<int> not_scanned;  // within the coverage
    std::ranges::copy_if(count.not_scanned, std::back_inserter(not_scanned),
                         [&](int sequence) { return sequence < count.finished; });
    return {group.name,
            group.members,
            peer_of(lane),
            role_of(lane.direction == Direction::received),
            count.first,
            count.finished,
            std::move(not_scanned),
            count.is_unseen_by_member,
            lane.direction == Direction::collective && group.has_unwatched,
            count.watches_weights,
            count.watches_gradients};
  }
};

BoundaryWatch::BoundaryWatch(int threads) : impl_(std::make_unique<Impl>(threads)) {}
BoundaryWatch::~BoundaryWatch() = default;

CrossingGroup BoundaryWatch::add_group(std::string name, std::vector<int> members) {
  const std::lock_guard lock(impl_->mutex);
  impl_->groups.push_back({std::move(name), std::move(members)});
  return impl_->groups.size() - 1;
}

void BoundaryWatch::has_unwatched(CrossingGroup group) {
  const std::lock_guard lock(impl_->mutex);
  impl_->groups.at(group).has_unwatched = true;
}

void BoundaryWatch::begin_step() {
  const std::lock_guard lock(impl_->mutex);
  impl_->begin_pass();
  impl_->counts.clear();
}

void BoundaryWatch::begin_pass() {
  const std::lock_guard lock(impl_->mutex);
  impl_->begin_pass();
  for (auto& [lane, count] : impl_->counts) count.begin_pass();
}

void BoundaryWatch::begin_rerun() {
  const std::lock_guard lock(impl_->mutex);
  if (!impl_->first_pass) impl_->first_pass = impl_->positions.order();
  impl_->positions.begin();
}

bool BoundaryWatch::has_same_crossings() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->first_pass == impl_->positions.order();
}

CrossingId BoundaryWatch::begin_collective(CrossingGroup group, std::string_view op,
                                           std::span<const at::Tensor> sent) {
  const std::lock_guard lock(impl_->mutex);
  const auto crossing = impl_->begin({group}, op, impl_->place_here());
  impl_->see(crossing, /*is_received=*/false, sent);
  return crossing;
}

CrossingId BoundaryWatch::begin_send(CrossingGroup group, int peer,
                                     std::span<const at::Tensor> sent) {
  const std::lock_guard lock(impl_->mutex);
  const auto crossing =
      impl_->begin({group, Direction::sent, peer}, "c10d::send", impl_->place_of_send(sent));
  impl_->see(crossing, /*is_received=*/false, sent);
  impl_->finish(crossing);
  return crossing;
}

void BoundaryWatch::was_issued(CrossingId crossing) {
  const std::lock_guard lock(impl_->mutex);
  if (crossing >= impl_->first_crossing) impl_->count_position(impl_->record_of(crossing).lane);
}

void BoundaryWatch::skip_collective(CrossingGroup group) {
  const std::lock_guard lock(impl_->mutex);
  impl_->skip({group});
}

void BoundaryWatch::skip_message(CrossingGroup group, int peer, bool is_received) {
  const std::lock_guard lock(impl_->mutex);
  impl_->skip({group, is_received ? Direction::received : Direction::sent, peer});
}

CrossingId BoundaryWatch::begin_receive(CrossingGroup group, int peer) {
  const std::lock_guard lock(impl_->mutex);
  const bool is_in_step = impl_->is_in_step();
  const auto crossing = impl_->begin({group, Direction::received, peer}, "c10d::recv_",
                                     is_in_step ? impl_->place_here() : CrossingPlace{});
  impl_->record_of(crossing).awaits_step = !is_in_step;
  return crossing;
}

void BoundaryWatch::finish(CrossingId crossing, std::span<const at::Tensor> received) {
  const std::lock_guard lock(impl_->mutex);
  if (crossing < impl_->first_crossing) return;
  if (impl_->record_of(crossing).awaits_step) impl_->expect_consumer(crossing, received);
  impl_->see(crossing, /*is_received=*/true, received);
  const auto& record = impl_->record_of(crossing);
  impl_->keep_result(record, received);
  if (!received.empty()) {
    Count& count = impl_->counts[record.lane];
    count.watches_weights |= record.place.carries_weights;
    count.watches_gradients |=
        record.place.reduces_gradients && received.front().is_floating_point();
  }
  impl_->finish(crossing);
}

std::size_t BoundaryWatch::enter(ModulePath path) {
  const std::lock_guard lock(impl_->mutex);
  auto& timeline = impl_->timelines[at::RecordFunction::currentThreadId()];
  if (impl_->step == Step::forward) impl_->step = Step::loss;
  timeline.running.push_back(path);
  timeline.mark();
  return timeline.running.size() - 1;
}

void BoundaryWatch::leave(std::size_t call) {
  const std::lock_guard lock(impl_->mutex);
  auto& timeline = impl_->timelines[at::RecordFunction::currentThreadId()];
  if (call >= timeline.running.size()) return;
  timeline.running.resize(call);
  timeline.mark();
}

void BoundaryWatch::enter_transfer(ModulePath owner, bool reduces_gradients) {
  const std::lock_guard lock(impl_->mutex);
  impl_->timelines[at::RecordFunction::currentThreadId()].transfer = {owner, reduces_gradients};
}

void BoundaryWatch::leave_transfer() {
  const std::lock_guard lock(impl_->mutex);
  impl_->timelines[at::RecordFunction::currentThreadId()].transfer.reset();
}

void BoundaryWatch::begin_forward(MicrobatchPlace place, std::span<const at::Tensor> inputs) {
  const std::lock_guard lock(impl_->mutex);
  impl_->step = Step::forward;
  impl_->consume({Phase::forward, place, nullptr}, inputs);
}

void BoundaryWatch::end_forward(MicrobatchPlace place, std::span<const at::Tensor> outputs) {
  const std::lock_guard lock(impl_->mutex);
  impl_->step = Step::between;
  impl_->keep({Phase::forward, place, nullptr}, outputs);
}

void BoundaryWatch::begin_backward(MicrobatchPlace place,
                                   std::span<const at::Tensor> output_grads) {
  const std::lock_guard lock(impl_->mutex);
  impl_->step = Step::backward;
  impl_->consume({Phase::backward, place, nullptr}, output_grads);
}

void BoundaryWatch::end_backward(MicrobatchPlace place, std::span<const at::Tensor> input_grads) {
  const std::lock_guard lock(impl_->mutex);
  impl_->step = Step::between;
  impl_->keep({Phase::backward, place, nullptr}, input_grads);
}

void BoundaryWatch::keep_results(const PeerQuestion& question) {
  const std::lock_guard lock(impl_->mutex);
  impl_->question = question;
  impl_->is_asked.clear();
  for (const Group& group : impl_->groups) {
    impl_->is_asked.push_back(std::ranges::binary_search(group.members.ranks(), question.rank));
  }
  impl_->results.clear();
}

std::vector<CollectiveResult> BoundaryWatch::take_results() {
  const std::lock_guard lock(impl_->mutex);
  impl_->question.reset();
  return std::exchange(impl_->results, {});
}

BoundaryWatch::Collected BoundaryWatch::collect(std::int64_t iteration) {
  const std::lock_guard lock(impl_->mutex);
  impl_->scans.read();
  Collected collected;
  for (const Event& event : impl_->events) {
    if (impl_->scans.stats(event.scan).is_finite()) continue;  // on a device, known only now
    collected.sightings.push_back(impl_->sighting_of(event, iteration));
  }
  for (CrossingGroup group = 0; group < impl_->groups.size(); ++group) {
    if (impl_->groups[group].has_unwatched) impl_->counts[{group}];  // even if nothing else crossed
  }
  for (const auto& [lane, count] : impl_->counts) {
    collected.coverage.push_back(impl_->coverage_of(lane, count));
  }
  return collected;
}

}  // namespace nanlocator::inline watch_room
