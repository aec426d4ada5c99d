#include "nanlocator/gradients/gradient_scanner.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "gradients/gradient_history.hpp"
#include "nanlocator/error.hpp"
#include "tensor/device_slots.hpp"
#include "tensor/tensor_access.hpp"

namespace nanlocator::inline gradients_room {
namespace {

// Maps the first bad value of a sparse tensor to its index in the dense one.
struct SparseLayout {
  at::Tensor indices;  // int64 [sparse dimensions, values]
  std::vector<std::int64_t> sizes;
  std::int64_t dense_numel = 1;  // elements of one value
};

// One view, prepared for the kernels: dense and real.
struct PreparedView {
  at::Tensor tensor;
  std::string_view dtype;  // of the tensor as passed in
  bool is_complex = false;
  std::optional<SparseLayout> sparse;
};

/// The id used for losses.
constexpr std::int64_t kNoParameter = -1;

struct Entry {
  std::int64_t parameter = 0;
  std::int64_t element_offset = 0;
  std::int64_t numel = 0;  // as passed in
  std::string_view dtype;
  bool is_complex = false;
  std::optional<SparseLayout> sparse;
  DeviceSlots* device = nullptr;
  std::uint32_t place = 0;            // index in the device's batch
  std::vector<std::int64_t> sizes{};  // of a loss
  std::optional<LossView> loss{};     // its description, without the tensor
};

// The views of one call, and their slots.
struct Group {
  std::string role;
  std::uint64_t sequence = 0;  // 0: not scanned in this step
  std::vector<Entry> entries;
  std::map<DeviceSlots*, SlotBatch> batches;
};

PreparedView prepare(const at::Tensor& given, const ParameterInfo& parameter) {
  if (const char* reason = why_not_scannable(given)) {
    refuse(given, "the tensor of parameter '" + parameter.name + "'", reason);
  }
  PreparedView view;
  view.dtype = dtype_name(given.scalar_type());
  view.is_complex = given.is_complex();
  if (given.layout() == at::kStrided) {
    view.tensor = as_real(given);
    return view;
  }
  view.sparse = SparseLayout{given._indices(), given.sizes().vec(), 1};
  for (auto d = given.sparse_dim(); d < given.dim(); ++d) view.sparse->dense_numel *= given.size(d);
  view.tensor = as_real(given._values());
  return view;
}

// The index of the first bad element in the tensor as passed in.
std::int64_t first_bad_in_given(const Entry& entry, std::int64_t scanned_index) {
  const auto index = entry.is_complex ? scanned_index / 2 : scanned_index;
  if (!entry.sparse) return index;
  const auto& [indices, sizes, dense_numel] = *entry.sparse;
  const auto coordinates = indices.select(1, index / dense_numel).cpu();
  std::int64_t row = 0;
  for (std::int64_t d = 0; d < coordinates.numel(); ++d) {
    row = row * sizes[d] + coordinates[d].item<std::int64_t>();
  }
  return row * dense_numel + index % dense_numel;
}

std::int64_t element_in(const ParameterInfo& parameter, const Entry& entry, std::int64_t index) {
  const bool is_shard =
      entry.element_offset == 0 && parameter.shard && entry.numel < parameter.numel();
  return is_shard ? parameter.shard->element_at(index) : entry.element_offset + index;
}

/// Groups of one view each: its dequantised values are freed before the next one.
constexpr std::uint64_t kDequantized = std::uint64_t{1} << 32;

/// Parameters whose tensors have no memory of their own, by name: scanned, or left out.
struct WithoutMemory {
  std::set<std::string> scanned;
  std::map<std::string, std::string> left_out;  // with the reason

  [[nodiscard]] std::vector<std::string> notes(Phase phase) const;
};

std::string first_of(const std::string& first, std::size_t count) {
  return first + (count > 1 ? " and " + std::to_string(count - 1) + " more" : "");
}

std::vector<std::string> WithoutMemory::notes(Phase phase) const {
  std::vector<std::string> notes;
  const std::string no_memory = " (" + std::string(name_of(phase)) + "): no memory of its own, ";
  if (!scanned.empty()) {
    notes.push_back(first_of(*scanned.begin(), scanned.size()) + no_memory +
                    "scanned after dequantising.");
  }
  if (!left_out.empty()) {
    const auto& [name, reason] = *left_out.begin();
    notes.push_back(first_of(name, left_out.size()) + no_memory + "not scanned: " + reason + ".");
  }
  return notes;
}

/// The values of a view without memory; throws if they cannot be computed.
at::Tensor dequantized(const GradientView& view) {
  if (!view.dequantize) throw UnsupportedError("it has no dequantize function");
  auto values = view.dequantize();
  if (!values.defined()) throw UnsupportedError("dequantize returned no tensor");
  if (const char* reason = why_not_scannable(values)) throw UnsupportedError(reason);
  if (values.sizes() != view.tensor.sizes()) {
    throw UnsupportedError("dequantize returned a tensor of a different shape");
  }
  return values;
}

bool holds_gradients(Phase phase) noexcept {
  return phase == Phase::grad_local || phase == Phase::grad_reduced || phase == Phase::grad_norm;
}

/// Slots being read back for the history.
struct RememberedSlots {
  DeviceSlots* device = nullptr;
  std::uint32_t first = 0;
  std::uint32_t end = 0;
  std::span<const TensorStats> stats{};  // once they have arrived
};

std::optional<Phase> latest_gradient_phase(
    const std::vector<std::pair<Phase, const Group*>>& scans) {
  std::optional<Phase> latest;
  for (const auto& [phase, group] : scans) {
    if (holds_gradients(phase)) latest = std::max(phase, latest.value_or(phase));
  }
  return latest;
}

// "cuda" means the current device, as everywhere in Torch.
at::Device with_index(at::Device device) {
  if (device.is_cpu() || device.has_index()) return device;
  return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

}  // namespace

struct GradientScanner::Impl {
  const ParameterMap& map;
  int threads;
  std::map<std::pair<at::DeviceType, at::DeviceIndex>, std::unique_ptr<DeviceSlots>> devices;
  // Phase, number and pass: if a framework re-runs a pass within one step (Megatron's rerun state
  // machine), the second pass must not overwrite the first one's results.
  using GroupKey = std::tuple<Phase, std::uint64_t, int>;
  std::map<GroupKey, Group> groups;
  std::uint64_t scans = 0;                          // of this step
  std::map<Phase, WithoutMemory> without_memory{};  // of this step
  std::map<Phase, std::string> without_slots{};  // of this step: why some tensors were not scanned

  std::optional<GradientHistory> gradient_history{};
  std::optional<GradientHistory> weight_history{};  // if weights are scanned in every step
  double loss_scale = 1;                            // of this step
  std::optional<Phase> remembered_phase{};          // of this step; empty: not remembered yet
  bool remembers_weights = false;                   // of this step
  std::vector<RememberedSlots> remembered{};

  using Tensors = std::map<DeviceSlots*, std::vector<at::Tensor>>;

  /// Null, and a note, if the device has no memory for them: its tensors are not scanned, and
  /// training continues.
  DeviceSlots* slots_or_none(at::Device device, Phase phase) {
    try {
      return &slots_of(device);
    } catch (const CudaError& error) {
      without_slots.try_emplace(phase, error.what());
      return nullptr;
    }
  }

  /// Scans `tensors`, described by `entries`, as one group.
  void enqueue(Phase phase, std::uint64_t number, std::string_view role, std::vector<Entry> entries,
               const Tensors& tensors) {
    auto& group = group_for_next_pass(phase, number);
    std::vector<DeviceSlots*> prepared;
    for (const auto& [device, batch] : tensors) {
      try {
        device->prepare(group.batches[device], batch);
        prepared.push_back(device);
      } catch (const CudaError& error) {  // as above
        without_slots.try_emplace(phase, error.what());
        std::erase_if(entries, [&](const Entry& entry) { return entry.device == device; });
        group.batches.erase(device);
      }
    }
    group.role = role;
    group.sequence = ++scans;
    group.entries = std::move(entries);
    for (auto* const device : prepared) device->scan(group.batches[device], tensors.at(device));
  }

  DeviceSlots& slots_of(at::Device device) {
    device = with_index(device);
    const std::pair key(device.type(), device.is_cpu() ? at::DeviceIndex{-1} : device.index());
    auto found = devices.find(key);
    if (found == devices.end()) {
      found = devices.emplace(key, make_device_slots(device, threads)).first;
    }
    return *found->second;
  }

  [[nodiscard]] Group& group_for_next_pass(Phase phase, std::uint64_t number) {
    for (int pass = 0;; ++pass) {
      auto& group = groups[{phase, number, pass}];
      if (group.sequence == 0) return group;
    }
  }

  [[nodiscard]] std::map<const DeviceSlots*, std::vector<TensorStats>> read() const {
    std::map<const DeviceSlots*, std::vector<TensorStats>> stats;
    for (const auto& [key, slots] : devices) stats[slots.get()] = slots->read();
    return stats;
  }

  // ---- the history ----

  [[nodiscard]] std::optional<Phase> earliest_gradient_phase() const {
    for (const auto& [key, group] : groups) {  // ordered by phase
      const auto phase = std::get<Phase>(key);
      if (group.sequence > 0 && holds_gradients(phase)) return phase;
    }
    return std::nullopt;
  }

  // Calls visit(group, history, divisor) for this step's groups of the remembered phase, later
  // passes last, and for those of the weights before the step.
  template <class Visit>
  void visit_remembered(const Visit& visit) {
    for (const auto& [key, group] : groups) {
      if (group.sequence == 0) continue;
      if (std::get<Phase>(key) == *remembered_phase) visit(group, *gradient_history, loss_scale);
      if (remembers_weights && std::get<Phase>(key) == Phase::params_before) {
        visit(group, *weight_history, 1.0);
      }
    }
  }

  [[nodiscard]] bool has_scanned_weights() const {
    return std::ranges::any_of(groups, [](const auto& entry) {
      return entry.second.sequence > 0 && std::get<Phase>(entry.first) == Phase::params_before;
    });
  }

  void add_remembered(DeviceSlots* device, const SlotBatch& batch) {
    const auto end = batch.first_slot + batch.tensors;
    const auto known = std::ranges::find(remembered, device, &RememberedSlots::device);
    if (known == remembered.end()) {
      remembered.push_back({device, batch.first_slot, end});
      return;
    }
    known->first = std::min(known->first, batch.first_slot);
    known->end = std::max(known->end, end);
  }

  [[nodiscard]] bool begin_history_row(std::int64_t iteration) {
    const auto phase = earliest_gradient_phase();
    if (!phase) return false;
    if (!gradient_history) gradient_history.emplace(map.size());
    if (!gradient_history->begin(*phase, iteration)) return false;
    remembers_weights = has_scanned_weights();
    if (remembers_weights) {
      if (!weight_history) weight_history.emplace(map.size());
      (void)weight_history->begin(Phase::params_before, iteration);
    }
    remembered_phase = phase;
    return true;
  }

  void take_up_remembered() {
    if (!remembered_phase || remembered.empty()) return;
    for (auto& slots : remembered) {
      const auto stats = slots.device->arrived(slots.first, slots.end - slots.first);
      slots.stats = stats.value_or(std::span<const TensorStats>{});
    }
    visit_remembered([&](const Group& group, GradientHistory& history, double divisor) {
      for (const auto& entry : group.entries) {
        const auto& slots = *std::ranges::find(remembered, entry.device, &RememberedSlots::device);
        const auto place = group.batches.at(entry.device).first_slot + entry.place - slots.first;
        if (place >= slots.stats.size()) continue;
        history.set(entry.parameter, slots.stats[place], divisor);
      }
    });
  }

  // Slots that were read with a wait need no other readback.
  void remember_now(std::int64_t iteration,
                    const std::map<const DeviceSlots*, std::vector<TensorStats>>& stats) {
    remembered.clear();
    if (!begin_history_row(iteration)) return;
    visit_remembered([&](const Group& group, GradientHistory& history, double divisor) {
      for (const auto& entry : group.entries) {
        const auto slot = group.batches.at(entry.device).first_slot + entry.place;
        history.set(entry.parameter, stats.at(entry.device)[slot], divisor);
      }
    });
  }

  // This step's groups in scan order.
  [[nodiscard]] std::vector<std::pair<Phase, const Group*>> in_order() const {
    std::vector<std::pair<Phase, const Group*>> scans_in_order;
    for (const auto& [key, group] : groups) {
      if (group.sequence > 0) scans_in_order.emplace_back(std::get<Phase>(key), &group);
    }
    std::ranges::sort(scans_in_order, {}, [](const auto& scan) { return scan.second->sequence; });
    return scans_in_order;
  }

  [[nodiscard]] Sighting sighting_of(const Entry& entry, const TensorStats& stats) const {
    if (entry.parameter == kNoParameter) {
      Sighting sighting;
      sighting.dtype = entry.dtype;
      sighting.shape = entry.sizes;
      sighting.stats = stats;
      return sighting;
    }
    const auto& parameter = map.at(entry.parameter);
    Sighting sighting;
    sighting.parameter_id = entry.parameter;
    sighting.parameter = parameter.name;
    sighting.chunk = parameter.chunk;
    sighting.dtype = entry.dtype;
    sighting.shape = parameter.shape;
    sighting.stats = stats;
    sighting.stats.first_bad =
        element_in(parameter, entry, first_bad_in_given(entry, stats.first_bad));
    return sighting;
  }
};

GradientScanner::GradientScanner(const ParameterMap& map, int threads)
    : impl_(std::make_unique<Impl>(Impl{map, threads, {}, {}, 0})) {
  if (threads < 1) {
    throw UsageError("GradientScanner: " + std::to_string(threads) +
                     " threads requested; at least 1 is needed.");
  }
}

GradientScanner::~GradientScanner() = default;

void GradientScanner::begin_step() {
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unobserved(false);
  impl_->take_up_remembered();
  impl_->remembered.clear();
  impl_->remembered_phase.reset();
  impl_->remembers_weights = false;
  impl_->loss_scale = 1;
  for (auto& [device, slots] : impl_->devices) slots->clear_flag();
  for (auto& [key, group] : impl_->groups) {
    group.sequence = 0;
    for (auto& entry : group.entries) entry.sparse.reset();  // frees the indices' memory
  }
  impl_->scans = 0;
  impl_->without_memory.clear();
  impl_->without_slots.clear();
}

void GradientScanner::scan(Phase phase, std::uint64_t group_number, std::string_view role,
                           std::span<const GradientView> views) {
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unobserved(
      false);  // hides these operators from the program's observers
  std::vector<Entry> entries;
  entries.reserve(views.size());
  Impl::Tensors tensors;
  std::vector<const GradientView*> without_memory;
  for (const auto& view : views) {
    const auto& parameter = impl_->map.at(view.parameter);
    if (!view.tensor.defined()) {
      throw UsageError("The tensor of parameter '" + parameter.name +
                       "' is undefined. Leave parameters without a gradient out of the scan.");
    }
    if (!has_memory(view.tensor)) {
      without_memory.push_back(&view);
      continue;
    }
    auto prepared = prepare(view.tensor, parameter);
    auto* const device = impl_->slots_or_none(prepared.tensor.device(), phase);
    if (device == nullptr) continue;
    auto& batch = tensors[device];
    entries.push_back({view.parameter, view.element_offset, view.tensor.numel(), prepared.dtype,
                       prepared.is_complex, std::move(prepared.sparse), device,
                       static_cast<std::uint32_t>(batch.size())});
    batch.push_back(std::move(prepared.tensor));
  }
  impl_->enqueue(phase, group_number, role, std::move(entries), tensors);
  for (const auto* view : without_memory) scan_dequantized(phase, role, *view);
}

void GradientScanner::scan_dequantized(Phase phase, std::string_view role,
                                       const GradientView& view) {
  auto& seen = impl_->without_memory[phase];
  const auto& name = impl_->map.at(view.parameter).name;
  try {
    const GradientView values{view.parameter, dequantized(view), view.element_offset};
    scan(phase, kDequantized | static_cast<std::uint64_t>(view.parameter), role, {&values, 1});
    seen.scanned.insert(name);
  } catch (const std::exception& error) {  // for example no memory for the values
    seen.left_out.emplace(name, first_line(error));
  }
}

void GradientScanner::scan_losses(std::span<const LossView> losses) {
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unobserved(false);
  std::vector<Entry> entries;
  Impl::Tensors tensors;
  for (const auto& view : losses) {
    const auto& loss = view.tensor;
    if (!loss.defined() || !loss.is_floating_point() || why_not_scannable(loss)) continue;
    auto* const device = impl_->slots_or_none(loss.device(), Phase::loss);
    if (device == nullptr) continue;
    auto& batch = tensors[device];
    entries.push_back({kNoParameter, 0, loss.numel(), dtype_name(loss.scalar_type()), false,
                       std::nullopt, device, static_cast<std::uint32_t>(batch.size()),
                       loss.sizes().vec(),
                       LossView{{}, view.microbatch, view.chunk, view.valid_labels}});
    batch.push_back(loss.detach());
  }
  if (entries.empty()) return;
  impl_->enqueue(Phase::loss, 0, "loss", std::move(entries), tensors);
}

at::Tensor GradientScanner::flag(at::Device device) {
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unobserved(false);
  auto folded = impl_->slots_of(device).flag();
  if (impl_->devices.size() == 1) return folded;
  folded = folded.clone();
  for (auto& [key, slots] : impl_->devices) {
    // A copy to the CPU waits, because a collective on host memory reads it at once.
    const auto copy =
        slots->flag().to(folded.device(), at::kInt, /*non_blocking=*/!folded.is_cpu());
    folded.bitwise_or_(copy);
  }
  return folded;
}

void GradientScanner::remember(std::int64_t iteration) {
  if (impl_->remembered_phase || !impl_->begin_history_row(iteration)) return;
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unobserved(false);
  impl_->visit_remembered([&](const Group& group, GradientHistory&, double) {
    for (const auto& [device, batch] : group.batches) impl_->add_remembered(device, batch);
  });
  for (const auto& slots : impl_->remembered) {
    slots.device->start_reading(slots.first, slots.end - slots.first);
  }
}

void GradientScanner::set_loss_scale(double loss_scale) {
  if (!(loss_scale > 0)) {
    throw UsageError("set_loss_scale: " + std::to_string(loss_scale) + " is not positive.");
  }
  impl_->loss_scale = loss_scale;
}

History GradientScanner::history() const {
  if (!impl_->gradient_history) return {};
  return impl_->gradient_history->to_history(impl_->map);
}

History GradientScanner::weight_history() const {
  if (!impl_->weight_history) return {};
  return impl_->weight_history->to_history(impl_->map);
}

namespace {

/// A count that is NaN, Inf or negative is unknown.
std::optional<std::int64_t> count_of(const at::Tensor& labels) {
  constexpr double kLargest = 9007199254740992;  // 2^53: float64 counts exactly up to here
  const auto count = labels.item<double>();
  if (!(count >= 0 && count <= kLargest)) return std::nullopt;
  return static_cast<std::int64_t>(count);
}

void describe_loss(const LossView& loss, Sighting& sighting) {
  sighting.microbatch = loss.microbatch;
  sighting.chunk = loss.chunk;
  if (loss.valid_labels.defined()) sighting.valid_labels = count_of(loss.valid_labels);
}

}  // namespace

GradientScanner::Collected GradientScanner::collect(std::int64_t iteration) {
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unobserved(false);
  const auto stats = impl_->read();
  if (impl_->gradient_history) impl_->remember_now(iteration, stats);
  const auto in_order = impl_->in_order();
  const auto latest_gradients = latest_gradient_phase(in_order);

  Collected collected;
  std::map<Phase, std::map<std::int64_t, float>> covered;  // with their largest magnitudes
  for (const auto& [phase, group] : in_order) {
    auto& parameters = covered[phase];
    for (const auto& entry : group->entries) {
      const auto slot = group->batches.at(entry.device).first_slot + entry.place;
      const auto& stat = stats.at(entry.device)[slot];
      if (entry.parameter != kNoParameter) {
        auto& largest = parameters[entry.parameter];
        if (stat.has_finite()) largest = std::max(largest, to_float(stat.absmax));
      }
      if (phase == latest_gradients && stat.has_finite() &&
          (!collected.absmax || stat.absmax > *collected.absmax)) {
        collected.absmax = stat.absmax;
        collected.absmax_parameter = impl_->map.at(entry.parameter).name;
      }
      if (stat.is_finite()) continue;
      auto sighting = impl_->sighting_of(entry, stat);
      sighting.iteration = iteration;
      sighting.phase = phase;
      sighting.role = group->role;
      if (entry.loss) describe_loss(*entry.loss, sighting);
      collected.sightings.push_back(std::move(sighting));
    }
  }
  for (const auto& [phase, seen] : impl_->without_memory) {
    for (auto& note : seen.notes(phase)) collected.notes.push_back(std::move(note));
  }
  for (const auto& [phase, reason] : impl_->without_slots) {
    collected.notes.push_back("Not all of " + std::string(name_of(phase)) +
                              " was scanned: " + reason + ".");
  }
  for (auto& [phase, parameters] : covered) {
    auto& coverage = collected.coverage.emplace_back();
    coverage.phase = phase;
    for (const auto& [parameter, absmax] : parameters) {
      coverage.parameters.push_back(parameter);
      if (has_maxima(phase)) coverage.absmax.push_back(absmax);
    }
  }
  return collected;
}

std::vector<std::int64_t> GradientScanner::bad_parameters(Phase phase) {
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unobserved(false);
  const auto stats = impl_->read();
  std::vector<std::int64_t> bad;
  for (const auto& [scanned, group] : impl_->in_order()) {
    if (scanned != phase) continue;
    for (const auto& entry : group->entries) {
      const auto slot = group->batches.at(entry.device).first_slot + entry.place;
      if (stats.at(entry.device)[slot].is_finite()) continue;
      if (std::ranges::find(bad, entry.parameter) == bad.end()) bad.push_back(entry.parameter);
    }
  }
  return bad;
}

std::vector<GradientScanner::Scanned> GradientScanner::scanned_gradients() {
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unobserved(false);
  const auto stats = impl_->read();
  const auto in_order = impl_->in_order();
  const auto latest = latest_gradient_phase(in_order);
  std::vector<Scanned> scanned;
  for (const auto& [phase, group] : in_order) {
    if (phase != latest) continue;
    for (const auto& entry : group->entries) {
      const auto slot = group->batches.at(entry.device).first_slot + entry.place;
      const auto& stat = stats.at(entry.device)[slot];
      scanned.push_back({entry.parameter, stat.fingerprint, stat.is_finite(), stat.sum_of_squares});
    }
  }
  return scanned;
}

}  // namespace nanlocator::inline gradients_room
