// A bundle in which every kind of value and every optional part occurs, with bytes chosen by hand.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "nanlocator/record/bundle.hpp"

namespace nanlocator::testing {

/// The bytes of the storages below; must outlive the use of the contents.
struct PlantedBundle {
  std::vector<float> self{1, 2, std::numeric_limits<float>::infinity(), 4, 5, 6, 7, 8};
  std::vector<std::uint8_t> generator{1, 2, 3, 4, 5};
  std::vector<float> output{0.5F, std::numeric_limits<float>::quiet_NaN(), -3, 0};
  Bundle bundle;
  BundleContents contents;

  PlantedBundle();
  PlantedBundle(const PlantedBundle&) = delete;  // the contents view its vectors
  PlantedBundle& operator=(const PlantedBundle&) = delete;
};

inline BundleTensor planted_tensor(const std::string& storage, std::vector<std::int64_t> sizes,
                                   std::vector<std::int64_t> strides, std::int64_t offset = 0,
                                   const std::string& dtype = "float32") {
  BundleTensor tensor;
  tensor.storage = storage;
  tensor.dtype = dtype;
  tensor.sizes = std::move(sizes);
  tensor.strides = std::move(strides);
  tensor.offset = offset;
  tensor.device = "cpu";
  return tensor;
}

inline BundleValue value_of_kind(BundleValueKind kind, const std::string& text = {}) {
  BundleValue value;
  value.kind = kind;
  value.text = text;
  return value;
}

inline BundleValue tensor_value(BundleTensor tensor) {
  BundleValue value = value_of_kind(BundleValueKind::tensor);
  value.tensor = std::move(tensor);
  return value;
}

inline BundleValue integer_value(std::int64_t integer) {
  BundleValue value = value_of_kind(BundleValueKind::integer);
  value.integer = integer;
  return value;
}

inline BundleValue real_value(double real) {
  BundleValue value = value_of_kind(BundleValueKind::real);
  value.real = real;
  return value;
}

inline BundleValue items_value(BundleValueKind kind, std::vector<BundleValue> items,
                               std::vector<std::string> names = {}) {
  BundleValue value = value_of_kind(kind);
  value.items = std::move(items);
  value.names = std::move(names);
  return value;
}

inline Sighting planted_sighting() {
  Sighting sighting;
  sighting.iteration = 12;
  sighting.microbatch = 1;
  sighting.phase = Phase::backward;
  sighting.module = "decoder.layers.3.q_layernorm";
  sighting.op = "aten::div.Tensor";
  sighting.role = "output[0]";
  sighting.dtype = "float32";
  sighting.shape = {2, 2};
  sighting.stats = {.numel = 4,
                    .nan = 1,
                    .zeros = 1,
                    .first_bad = 1,
                    .finite_min = -3,
                    .finite_max = 0.5,
                    .absmin = 0,
                    .absmax = 3,
                    .sum_of_squares = 9.25,
                    .fingerprint = 0xfedcba9876543210};
  return sighting;
}

inline Birth planted_birth() {
  Birth birth;
  birth.kind = BirthKind::nan_from_inf;
  birth.sighting = planted_sighting();
  birth.is_module_inferred = true;
  birth.node = "SqrtBackward0";
  birth.forward_op = "aten::sqrt";
  birth.parent = 2;
  Operand operand;
  operand.name = "self";
  operand.dtype = "float32";
  operand.shape = {2, 2};
  operand.stats = TensorStats{.numel = 4, .pos_inf = 1, .first_bad = 3, .absmax = 7};
  birth.operands = {operand};
  birth.stack = {"model.py:12 in forward", "train.py:80 in step"};
  return birth;
}

inline BundleOperatorCall planted_operator_call() {
  using Kind = BundleValueKind;
  BundleOperatorCall call;
  call.op = "aten::div.Tensor";
  call.schema = "aten::div.Tensor(Tensor self, Tensor other) -> Tensor";
  BundleTensor transposed = planted_tensor("argument.0.self", {2, 2}, {1, 4}, 2);
  transposed.requires_grad = true;
  BundleTensor number = planted_tensor("argument.0.self", {}, {}, 7);
  number.is_wrapped_number = true;
  BundleTensor complex = planted_tensor("argument.0.self", {2}, {2}, 0, "complex64");
  complex.is_conjugate = true;
  complex.is_negative = true;
  BundleValue yes = value_of_kind(Kind::boolean);
  yes.boolean = true;
  BundleValue complex_number = value_of_kind(Kind::complex);
  complex_number.real = -0.0;
  complex_number.imaginary = std::numeric_limits<double>::infinity();
  call.arguments = {
      tensor_value(transposed),
      tensor_value(number),
      tensor_value(complex),
      tensor_value(planted_tensor("argument.0.self", {1'000'000, 2}, {0, 1})),  // expanded
      tensor_value(planted_tensor("argument.0.self", {0, 3}, {3, 1})),
      value_of_kind(Kind::none),
      value_of_kind(Kind::undefined_tensor),
      yes,
      integer_value(std::numeric_limits<std::int64_t>::min()),
      integer_value(std::numeric_limits<std::int64_t>::max()),
      real_value(std::bit_cast<double>(std::uint64_t{0x7ff80000deadbeef})),  // a NaN's payload
      real_value(-0.0),
      real_value(1e-5),
      complex_number,
      value_of_kind(Kind::text, "ij,jk->ik \"quoted\"\n"),
      value_of_kind(Kind::device, "cuda:3"),
      value_of_kind(Kind::generator, "cpu"),
      items_value(Kind::list, {integer_value(1), items_value(Kind::list, {})}),
      value_of_kind(Kind::unsupported, "a sparse tensor")};
  call.outputs = {tensor_value(planted_tensor("output.0", {2, 2}, {2, 1}))};
  call.generator_states = {{"cpu", planted_tensor("generator.cpu", {5}, {1}, 0, "uint8")}};
  return call;
}

inline BundleModuleCall planted_module_call() {
  using Kind = BundleValueKind;
  const BundleValue tensor = tensor_value(planted_tensor("output.0", {4}, {1}));
  BundleModuleCall call;
  call.name = "decoder.layers.3.q_layernorm";
  call.class_name = "torch.nn.modules.normalization.LayerNorm";
  call.is_training = false;
  call.arguments = {items_value(Kind::tuple, {tensor, value_of_kind(Kind::none)})};
  // Order matters, and a name may be text that JSON would not accept as a unique key.
  call.keywords = {
      {"mask", tensor},
      {"cache", items_value(Kind::dictionary, {tensor, integer_value(3)}, {"z", "a"})}};
  call.outputs = items_value(Kind::object, {tensor}, {"last_hidden_state"});
  call.outputs.text = "transformers.modeling_outputs.BaseModelOutput";
  call.weights = {{"weight", planted_tensor("output.0", {4}, {1})},
                  {"bias", planted_tensor("output.0", {2}, {2}, 1)}};
  call.grad_outputs = {tensor};
  call.grad_inputs = {value_of_kind(Kind::none), tensor};
  call.pickle = "module.pickle";
  return call;
}

/// Not in the planted bundle: a bundle holds the call of an operator or of a kernel.
inline BundleKernelCall planted_kernel_call() {
  const BundleValue tensor = tensor_value(planted_tensor("output.0", {4}, {1}));
  BundleKernelCall call;
  call.name = "triton::scale_kernel";
  call.launcher = "triton";
  call.module = "my.kernels";
  call.entry = "scale_kernel";
  call.file = "/home/me/my/kernels.py";
  call.source = "module.pickle";  // a file of the planted bundle
  call.names = {"x", "y", "count"};
  call.arguments = {tensor, tensor, integer_value(4)};
  call.keywords = {{"BLOCK", integer_value(8)},
                   {"dtype", items_value(BundleValueKind::object,
                                         {value_of_kind(BundleValueKind::text, "torch"),
                                          value_of_kind(BundleValueKind::text, "float16")},
                                         {"module", "name"})}};
  call.launch = {integer_value(2), integer_value(1)};
  call.arguments_after = {tensor, tensor};
  call.beside = {Beside::nothing, Beside::bad};
  call.results = {tensor};
  call.environment = {{"TRITON_INTERPRET", "1"}};
  return call;
}

inline PlantedBundle::PlantedBundle() {
  bundle.run_id = "run-1";
  bundle.coordinates = {
      .rank = 3, .world_size = 8, .tp = {1, 2}, .pp = {0, 2}, .dp = {1, 2}, .host = "a17"};
  bundle.coordinates.device = "cpu";
  bundle.birth = planted_birth();
  bundle.operator_call = planted_operator_call();
  bundle.module_call = planted_module_call();
  bundle.settings = {{"autocast", "cpu bfloat16"}, {"threads", "2"}};
  bundle.versions = {{"torch", "2.11.0"}, {"nanlocator", "0.1.0"}};
  bundle.cpp_stack = {"at::native::div_kernel"};
  bundle.notes = {"the gradients were not seen"};
  contents.storages = {{"argument.0.self", "F32", {8}, std::as_bytes(std::span(self))},
                       {"generator.cpu", "U8", {5}, std::as_bytes(std::span(generator))},
                       {"output.0", "F32", {2, 2}, std::as_bytes(std::span(output))}};
  contents.files = {{"module.pickle", std::string("\x80\x05\x00pickle", 9)}};
}

}  // namespace nanlocator::testing
