#include "recorder/recorded_parameters.hpp"

#include <algorithm>
#include <utility>

namespace nanlocator::inline recorder_room {

/// Calls in a step around which the weights are looked at: each look takes time in proportion to
/// their number. After more, what a call writes to its own weights counts as the program's.
constexpr std::size_t kMostCalls = 8;

void RecordedParameters::set(std::vector<at::Tensor> parameters) {
  const bool are_same = std::ranges::equal(
      parameters, parameters_,
      [](const at::Tensor& one, const at::Tensor& other) { return one.is_same(other); });
  parameters_ = std::move(parameters);
  members_.clear();
  for (const auto& each : parameters_) members_.insert(each.unsafeGetTensorImpl());
  zeroed_.clear();
  std::erase_if(program_writes_, [&](const auto& each) { return !members_.contains(each.first); });
  begin_step();
  if (!are_same) {
    weights_.clear();
    note_weights();
  }
}

void RecordedParameters::note_weights() {
  moved_.clear();
  replaced_.clear();
  for (std::size_t i = 0; i < weights_.size() && i < parameters_.size(); ++i) {
    if (weight_now(i).memory == weights_[i].memory) continue;
    replaced_.insert(parameters_[i].unsafeGetTensorImpl());
  }
  calls_ = 0;
  take_weights();
}

void RecordedParameters::begin_call() {
  if (++calls_ > kMostCalls) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (weight_now(i) != weights_[i]) moved_.insert(parameters_[i].unsafeGetTensorImpl());
  }
}

void RecordedParameters::end_call() {
  if (calls_ <= kMostCalls) take_weights();
}

void RecordedParameters::take_weights() {
  weights_.clear();
  by_storage_.clear();
  for (std::size_t i = 0; i < parameters_.size(); ++i) weights_.push_back(weight_now(i));
}

RecordedParameters::Weight RecordedParameters::weight_now(std::size_t parameter) const {
  const at::Tensor& weight = parameters_[parameter];
  return {has_memory(weight) ? weight.const_data_ptr() : nullptr, version_of(weight)};
}

std::vector<at::Tensor> RecordedParameters::changed_weights() const {
  std::vector<at::Tensor> changed;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& weight = parameters_[i];
    const bool has_moved = moved_.contains(weight.unsafeGetTensorImpl());
    if (has_moved || weight_now(i) != weights_[i]) changed.push_back(weight);
  }
  return changed;
}

std::vector<at::Tensor> RecordedParameters::written_by_program() const {
  std::vector<at::Tensor> written;
  for (const at::Tensor& each : parameters_) {
    const auto* const tensor = each.unsafeGetTensorImpl();
    const auto found = program_writes_.find(tensor);
    const bool is_written =
        found != program_writes_.end() && found->second.version == version_of(each);
    if (is_written || replaced_.contains(tensor)) written.push_back(each);
  }
  return written;
}

const at::Tensor* RecordedParameters::holder_of(const at::Tensor& tensor) {
  if (contain(tensor)) return &tensor;
  if (!has_memory(tensor)) return nullptr;
  if (by_storage_.empty()) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor& each = parameters_[i];
      if (has_memory(each)) by_storage_.emplace(each.storage().unsafeGetStorageImpl(), i);
    }
  }
  const auto found = by_storage_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == by_storage_.end()) return nullptr;
  const at::Tensor& parameter = parameters_[found->second];
  return parameter.is_alias_of(tensor) ? &parameter : nullptr;
}

void RecordedParameters::note_program_write(const at::Tensor& tensor, EarlierWrite write) {
  moved_.insert(tensor.unsafeGetTensorImpl());
  program_writes_.insert_or_assign(tensor.unsafeGetTensorImpl(),
                                   ProgramWrite{std::move(write), version_of(tensor)});
}

void RecordedParameters::tell_traces() const {
  for (const at::Tensor& each : parameters_) {
    const auto found = program_writes_.find(each.unsafeGetTensorImpl());
    if (found == program_writes_.end() || found->second.version != version_of(each)) continue;
    note_earlier_write(each, found->second.write);
  }
}

void RecordedParameters::begin_step() {
  are_new_ = true;
  written_.clear();
}

void RecordedParameters::find_gradients() {
  if (!are_new_) return;
  by_tensor_.clear();
  by_memory_.clear();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& grad = parameters_[i].grad();
    if (!grad.defined()) continue;
    by_tensor_.emplace(grad.unsafeGetTensorImpl(), i);
    if (has_memory(grad)) {
      by_memory_.emplace(grad.storage().unsafeGetStorageImpl(), i);
    }
  }
  are_new_ = false;
}

std::optional<std::size_t> RecordedParameters::index_of(const at::Tensor& gradient) {
  find_gradients();
  const auto found = by_tensor_.find(gradient.unsafeGetTensorImpl());
  if (found == by_tensor_.end()) return std::nullopt;
  // A program may have dropped its gradient since (FSDP1 in forward), and the address may be
  // reused.
  const bool is_its_own =
      parameters_[found->second].grad().unsafeGetTensorImpl() == gradient.unsafeGetTensorImpl();
  return is_its_own ? std::optional(found->second) : std::nullopt;
}

std::optional<std::pair<std::size_t, ViewOfGradient>> RecordedParameters::place_of(
    const at::Tensor& view) {
  find_gradients();
  if (by_memory_.empty() || !has_memory(view) || view.numel() == 0) return std::nullopt;
  const auto [begin, end] = by_memory_.equal_range(view.storage().unsafeGetStorageImpl());
  for (auto at = begin; at != end; ++at) {
    const at::Tensor& grad = parameters_[at->second].grad();
    if (!grad.defined() || !has_memory(grad) || !grad.is_alias_of(view)) continue;
    if (grad.dtype() != view.dtype() || !grad.is_contiguous()) continue;
    const std::int64_t first = view.storage_offset() - grad.storage_offset();
    std::int64_t last = first;
    for (std::int64_t d = 0; d < view.dim(); ++d) last += (view.size(d) - 1) * view.stride(d);
    if (first < 0 || last >= grad.numel()) continue;
    return std::pair(at->second, ViewOfGradient{view.sizes().vec(), view.strides().vec(), first});
  }
  return std::nullopt;
}

RecordedParameters::Written RecordedParameters::gradient_now(std::size_t parameter) const {
  const auto& grad = parameters_[parameter].grad();
  if (!grad.defined()) return {};
  return {grad.unsafeGetTensorImpl(), version_of(grad)};
}

void RecordedParameters::note_backward() {
  are_new_ = true;
  written_.clear();
  zeroed_.clear();
  for (std::size_t i = 0; i < parameters_.size(); ++i) written_.push_back(gradient_now(i));
}

void RecordedParameters::note_restored(std::span<const at::Tensor> parameters) {
  are_new_ = true;
  for (std::size_t i = 0; i < written_.size(); ++i) {
    const bool is_restored = std::ranges::any_of(
        parameters, [&](const at::Tensor& each) { return each.is_same(parameters_[i]); });
    if (is_restored) written_[i] = gradient_now(i);
  }
}

void RecordedParameters::note_write(const at::Tensor& tensor) {
  if (written_.size() != parameters_.size()) return;
  if (const auto parameter = index_of(tensor)) {
    written_[*parameter] = gradient_now(*parameter);
  } else if (const auto place = place_of(tensor)) {
    written_[place->first] = gradient_now(place->first);
  }
}

void RecordedParameters::note_zeroed(const at::Tensor& tensor) {
  std::optional<std::size_t> parameter = index_of(tensor);
  if (!parameter) {  // `.grad.data`
    const auto place = place_of(tensor);
    if (place && tensor.numel() == parameters_[place->first].numel()) parameter = place->first;
  }
  if (parameter) zeroed_.insert_or_assign(*parameter, gradient_now(*parameter));
}

std::vector<at::Tensor> RecordedParameters::zeroed_gradients() const {
  std::vector<at::Tensor> zeroed;
  for (const auto& [parameter, written] : zeroed_) {
    if (gradient_now(parameter) == written) zeroed.push_back(parameters_[parameter]);
  }
  return zeroed;
}

std::vector<at::Tensor> RecordedParameters::changed_gradients() const {
  std::vector<at::Tensor> changed;
  for (std::size_t i = 0; i < written_.size(); ++i) {
    if (gradient_now(i) != written_[i]) changed.push_back(parameters_[i]);
  }
  return changed;
}

std::uint64_t RecordedParameters::state_of_gradients() const {
  std::uint64_t state = 0;
  for (const auto& parameter : parameters_) {
    const auto& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    state = state * 31 + reinterpret_cast<std::uintptr_t>(gradient.unsafeGetTensorImpl());
    state = state * 31 + version_of(gradient);
  }
  return state;
}

}  // namespace nanlocator::inline recorder_room
