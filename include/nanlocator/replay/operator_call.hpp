// An operator call with its live tensors, and its conversion to and from a bundle.
//
// The trace creates one while the operator runs; `to_bundle` copies its values to the host and
// names each storage range once; `from_bundle` recreates the tensors in another process. Nothing
// here depends on Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/operator_name.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/record/bundle.hpp"

namespace nanlocator::inline replay_room {

/// The original devices of storages that were copied to host memory. Keys are identities, never
/// dereferenced.
using CameFrom = std::map<const c10::StorageImpl*, at::Device>;

/// A call as seen by the dispatcher. Tensors are shared with their owners, except those that the
/// operator writes: these are clones with the same strides, from before the call.
struct OperatorCall {
  c10::OperatorName name{"", ""};
  std::vector<c10::IValue> arguments;  // one for each in the schema
  /// After the call: the returned values, then the arguments that the operator writes without
  /// returning them (the running statistics of batch norm, the list of `_foreach_add_`).
  std::vector<c10::IValue> outputs;
  std::map<std::string, at::Tensor> generator_states;  // by device; see BundleOperatorCall
  std::map<std::string, std::string> settings;         // see current_settings
  CameFrom came_from;  // of the storages of arguments and outputs; those not listed are on their
                       // original device
};

/// The settings of this thread that may affect a result: autocast (if active for this call), grad
/// mode, deterministic algorithms, TF32 and reduced-precision reductions, oneDNN, threads,
/// flush-denormal. Cheap: called once per kept call.
[[nodiscard]] std::map<std::string, std::string> current_settings();
/// Versions of torch, CUDA, cuDNN, nanlocator, and the CPU's capability.
[[nodiscard]] std::map<std::string, std::string> current_versions();

/// Gathers the tensors of one bundle: every storage byte that any of them can reach, once.
class StorageCollector {
 public:
  StorageCollector();
  ~StorageCollector();
  StorageCollector(const StorageCollector&) = delete;  // holds the tensors
  StorageCollector& operator=(const StorageCollector&) = delete;

  /// The value for bundle.json, once `finish` has fixed names and offsets. `name`: the name shown
  /// in tensors.safetensors ("argument.0.self", "module.weight"). Sparse, quantised, meta, nested
  /// and subclass tensors become `unsupported`, with the reason.
  [[nodiscard]] BundleValue add(const c10::IValue& value, std::string_view name);
  [[nodiscard]] BundleValue add(const at::Tensor& tensor, std::string_view name);
  /// Records tensors of these storages on their original devices; call it before their `add`.
  void note(const CameFrom& came_from);

  /// Copies device memory to the host, names the ranges and completes every BundleTensor that this
  /// collector made within `bundle`. The contents' bytes live as long as this object. A tensor that
  /// is dense in its own range keeps its shape and dtype in tensors.safetensors; a range that
  /// several views share is one-dimensional.
  [[nodiscard]] BundleContents finish(Bundle& bundle);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Visits every tensor of a value or a bundle: arguments, outputs, generator states, weights, ...
void for_each_bundle_tensor(BundleValue& value, const std::function<void(BundleTensor&)>& visit);
void for_each_bundle_tensor(Bundle& bundle, const std::function<void(BundleTensor&)>& visit);

/// Sets `bundle.operator_call`, its settings and versions from `call`.
void add_to_bundle(const OperatorCall& call, Bundle& bundle, StorageCollector& storages);

/// Creates tensors from their descriptions, in fresh memory on `device`; views of one range share
/// it. Throws UnsupportedError for a dtype or device that this build of Torch lacks.
class BundleTensors {
 public:
  BundleTensors(const OpenBundle& bundle, at::Device device);
  ~BundleTensors();
  BundleTensors(const BundleTensors&) = delete;  // caches the ranges
  BundleTensors& operator=(const BundleTensors&) = delete;
  [[nodiscard]] at::Tensor tensor(const BundleTensor& tensor);
  /// The device for tensors that were on `recorded` ("cuda:3"): `device`. But if only some tensors
  /// were in host memory (numbers, indices), those stay there.
  [[nodiscard]] at::Device place_of(const std::string& recorded) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// "aten::div.Tensor" -> {"aten::div", "Tensor"}.
[[nodiscard]] c10::OperatorName operator_name_of(const std::string& op);

/// The recorded operator call with fresh tensors on `device`. Throws UnsupportedError if the
/// operator is not registered in this process, its schema differs, or a value could not be kept;
/// UsageError for a bundle without an operator call.
[[nodiscard]] OperatorCall operator_call_of(const OpenBundle& bundle, at::Device device);

}  // namespace nanlocator::inline replay_room
