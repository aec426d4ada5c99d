#include "operators/operator_info.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "record/overwriting.hpp"

namespace nanlocator::inline operators_room {
namespace {

template <std::size_t count>
bool is_one_of(std::string_view name, const std::array<std::string_view, count>& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

constexpr auto kAllocators = std::to_array<std::string_view>(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted",
     "aten::empty_quantized", "aten::_empty_affine_quantized",
     "aten::_empty_per_channel_affine_quantized", "aten::new_empty", "aten::new_empty_strided",
     "aten::resize", "aten::resize_", "aten::resize_as", "aten::resize_as_", "aten::set_",
     "aten::set_data", "aten::_resize_output_", "aten::_resize_output"});

constexpr auto kFillers = std::to_array<std::string_view>(
    {"aten::fill_", "aten::zero_", "aten::zeros", "aten::zeros_like", "aten::ones",
     "aten::ones_like", "aten::full", "aten::full_like", "aten::new_zeros", "aten::new_ones",
     "aten::new_full", "aten::fill", "aten::zero", "aten::_efficientzerotensor",
     "aten::_foreach_zero_"});

/// Composites that are operators of their own: one calls kernels off the dispatcher, too
/// (mkldnn_convolution_transpose in aten/src/ATen/native/Convolution.cpp), one computes in the
/// memory of its result (native/ReduceOps.cpp).
constexpr auto kComputing =
    std::to_array<std::string_view>({"aten::_convolution", "aten::logsumexp"});

constexpr auto kReductions = std::to_array<std::string_view>(
    {"aten::sum", "aten::mean", "aten::prod", "aten::amax", "aten::amin"});

/// Their results are elements of their inputs.
constexpr auto kMovers = std::to_array<std::string_view>({"aten::copy_",
                                                          "aten::_to_copy",
                                                          "aten::to",
                                                          "aten::clone",
                                                          "aten::contiguous",
                                                          "aten::cat",
                                                          "aten::stack",
                                                          "aten::index",
                                                          "aten::index_select",
                                                          "aten::gather",
                                                          "aten::take_along_dim",
                                                          "aten::masked_select",
                                                          "aten::flip",
                                                          "aten::roll",
                                                          "aten::repeat",
                                                          "aten::repeat_interleave",
                                                          "aten::reshape",
                                                          "aten::flatten",
                                                          "aten::pin_memory",
                                                          "aten::_pin_memory",
                                                          "aten::pad",
                                                          "aten::constant_pad_nd",
                                                          "aten::lift_fresh"});

constexpr auto kTellers =
    std::to_array<std::string_view>({"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero",
                                     "aten::equal", "aten::allclose"});

/// True if scalars are only bounds, orders or replacement values.
bool scalars_steer_only(std::string_view name) {
  for (const std::string_view part :
       {"norm", "clamp", "clip", "hardtanh", "cdist", "pdist", "histc", "nan_to_num", "isclose",
        "allclose", "elu", "threshold", "where", "searchsorted"}) {
    // where(condition, x, -inf) does place its scalar.
    if (part != "where" && name.find(part) != std::string_view::npos) return true;
  }
  return false;
}

/// An argument of batch norm.
bool is_statistic_name(std::string_view name) {
  return name == "running_mean" || name == "running_var";
}

bool is_composite(const c10::OperatorHandle& handle) {
  if (handle.hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
      handle.hasKernelForDispatchKey(c10::DispatchKey::CUDA)) {
    return false;
  }
  return handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
         handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
}

std::unique_ptr<OperatorInfo> make_info(const c10::OperatorHandle& handle) {
  auto info = std::make_unique<OperatorInfo>();
  const auto& schema = handle.schema();
  info->name = schema.name();
  info->full_name = schema.name();
  if (!schema.overload_name().empty()) info->full_name += "." + schema.overload_name();
  const std::string_view name = info->name;
  const bool overwrites = is_overwriting(name);  // though the schema marks it (a!)
  info->is_batch_norm =
      name.starts_with("aten::") && name.find("batch_norm") != std::string_view::npos;
  const bool updates_statistics = info->is_batch_norm &&
                                  name.find("backward") == std::string_view::npos &&
                                  name.find("no_update") == std::string_view::npos &&
                                  name.find("elemt") == std::string_view::npos;
  for (const auto& argument : schema.arguments()) {
    const bool is_marked = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    // Batch norm updates its running statistics, though its schema does not say so.
    const bool is_statistic = updates_statistics && is_statistic_name(argument.name());
    auto use = ArgumentUse::read;
    if (is_marked || is_statistic) use = ArgumentUse::read_and_written;
    info->updates_statistics = info->updates_statistics || is_statistic;
    const bool says_whether_it_trains =
        argument.name() == "training" || argument.name() == "train" || argument.name() == "update";
    if (info->is_batch_norm && says_whether_it_trains) info->is_training = info->arguments.size();
    if (argument.is_out() || (is_marked && overwrites)) use = ArgumentUse::overwritten;
    if (argument.name() == "beta" && name.starts_with("aten::")) {
      info->beta = info->arguments.size();
    }
    info->writes = info->writes || use != ArgumentUse::read;
    info->arguments.push_back(use);
    info->argument_names.push_back(argument.name());
  }
  info->is_view = !schema.returns().empty();
  for (const auto& result : schema.returns()) {
    const bool is_alias = result.alias_info() != nullptr && !result.alias_info()->isWrite();
    info->returns_alias.push_back(is_alias);
    info->is_view = info->is_view && is_alias;
  }
  info->is_allocator = is_one_of(name, kAllocators);
  // A view, though its schema does not say so (native/TensorFactories.cpp, tensor_flatten.h).
  if (name == "aten::unflatten_dense_tensors") info->is_view = true;
  // as_strided_, unsqueeze_: marked as writes, but only of sizes and strides. Kernels use them on
  // memory that they fill themselves (max over a dimension, TensorCompare.cpp).
  if (!info->is_allocator && handle.hasTag(at::Tag::inplace_view)) info->is_view = true;
  info->collective = collective_kind_of(name);
  info->is_filler = is_one_of(name, kFillers);
  info->is_fill = name == "aten::fill_";
  info->is_pointwise = handle.hasTag(at::Tag::pointwise);
  info->is_arithmetic = info->is_pointwise || is_one_of(name, kReductions);
  info->is_custom =
      !name.starts_with("aten::") && !name.starts_with("prims::") && !info->collective;
  info->is_copy = name == "aten::copy_";
  info->owns_its_copy = name == "aten::_to_copy" || name == "aten::clone";
  info->is_lift_fresh = name == "aten::lift_fresh";
  info->moves_values = info->is_view || is_one_of(name, kMovers);
  info->tells_host = is_one_of(name, kTellers);
  info->scalars_are_values = !scalars_steer_only(name);
  info->is_composite = is_composite(handle) && !is_one_of(name, kComputing);
  const bool draws_finite_values = name == "aten::bernoulli_" || name == "aten::random_";
  // A composite's bad output was born in an operator inside it. But a custom composite may compute
  // itself: torch.library.custom_op registers all as CompositeExplicitAutograd.
  const bool may_give_birth = !info->is_view && !info->is_allocator && !info->collective &&
                              !info->is_filler && !draws_finite_values &&
                              (!info->is_composite || info->owns_its_copy || info->is_custom);
  if (may_give_birth) {
    info->facts = &call_facts(handle.operator_name());
  }
  return info;
}

/// One per operator, for the life of the process.
const OperatorInfo* shared_info(const c10::OperatorName& name) {
  static auto& mutex = *new std::mutex;
  static auto& infos = *new std::map<std::string, std::unique_ptr<OperatorInfo>>;
  const std::string key = name.name + "." + name.overload_name;
  const std::lock_guard lock(mutex);
  auto& info = infos[key];
  if (!info) {
    const auto handle = c10::Dispatcher::singleton().findSchema(name);
    if (!handle) return nullptr;
    info = make_info(*handle);
  }
  return info.get();
}

}  // namespace

const OperatorInfo* operator_info(const at::RecordFunction& call) {
  // The name is its registered schema's own string, one per overload, at a stable address
  // (record_function.cpp, RecordFunction::name). A frame without schema never gets here.
  thread_local std::unordered_map<const void*, const OperatorInfo*> known;
  const void* key = call.name();
  if (const auto found = known.find(key); found != known.end()) return found->second;
  const auto name = call.operator_name();
  if (!name) return nullptr;
  const OperatorInfo* info = shared_info(*name);
  if (info != nullptr) known.emplace(key, info);
  return info;
}

/// A running statistic on which the results do not depend
/// (aten/src/ATen/native/Normalization.cpp).
static bool is_idle_statistic(const OperatorInfo& info, c10::ArrayRef<c10::IValue> arguments,
                              std::size_t i) {
  if (!info.is_batch_norm || !is_statistic_name(info.argument_names[i])) return false;
  for (const char* const evaluation : {"no_update", "no_training"}) {
    if (info.name.find(evaluation) != std::string::npos) return false;
  }
  return !info.is_training || arguments[*info.is_training].toBool();
}

bool is_only_updated(const OperatorInfo& info, c10::ArrayRef<c10::IValue> arguments,
                     std::size_t i) {
  return info.updates_statistics && is_idle_statistic(info, arguments, i);
}

bool is_source(const OperatorInfo& info, std::size_t i) {
  const std::string& name = info.argument_names[i];
  const bool selects =
      name == "index" || name == "indices" || name == "mask" || name == "condition";
  return info.arguments[i] != ArgumentUse::overwritten && !selects;
}

bool is_read(const OperatorInfo& info, c10::ArrayRef<c10::IValue> arguments, std::size_t i) {
  if (info.arguments[i] == ArgumentUse::overwritten) return false;
  if (!info.updates_statistics && is_idle_statistic(info, arguments, i)) return false;  // backward
  if (i != 0 || !info.beta) return true;
  const c10::IValue& beta = arguments[*info.beta];
  return !(beta.isDouble() && beta.toDouble() == 0) && !(beta.isInt() && beta.toInt() == 0);
}

}  // namespace nanlocator::inline operators_room
