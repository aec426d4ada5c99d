#include "replay/torch_versions.hpp"

#include <ATen/Context.h>

#include "nanlocator/error.hpp"

namespace nanlocator::inline replay_room {

#if NANLOCATOR_TORCH_BEFORE(2, 9)

std::string float32_precision(Float32Use use) {
  const auto& context = at::globalContext();
  if (use == Float32Use::cuda_conv || use == Float32Use::cuda_rnn) {
    return context.allowTF32CuDNN() ? "tf32" : "none";
  }
  if (use != Float32Use::cuda_matmul) return "none";
  switch (context.float32MatmulPrecision()) {
    case at::Float32MatmulPrecision::HIGHEST:
      return "none";
    case at::Float32MatmulPrecision::HIGH:
      return "tf32";
    case at::Float32MatmulPrecision::MEDIUM:
      return "bf16";
  }
  return "none";
}

void set_float32_precision(Float32Use use, const std::string& text) {
  auto& context = at::globalContext();
  const bool is_tf32 = text == "tf32";
  if (use == Float32Use::cuda_conv && (is_tf32 || text == "none" || text == "ieee")) {
    context.setAllowTF32CuDNN(is_tf32);
  } else if (use == Float32Use::cuda_matmul) {
    context.setFloat32MatmulPrecision(is_tf32            ? at::Float32MatmulPrecision::HIGH
                                      : (text == "bf16") ? at::Float32MatmulPrecision::MEDIUM
                                                         : at::Float32MatmulPrecision::HIGHEST);
  } else {
    throw UsageError("Torch before 2.9 has no separate setting for it");
  }
}

#else

namespace {

struct BackendAndOperator {
  const char* backend;
  const char* op;
};

BackendAndOperator names_of(Float32Use use) {
  switch (use) {
    case Float32Use::cuda_conv:
      return {"cuda", "conv"};
    case Float32Use::cuda_matmul:
      return {"cuda", "matmul"};
    case Float32Use::cuda_rnn:
      return {"cuda", "rnn"};
    case Float32Use::mkldnn_conv:
      return {"mkldnn", "conv"};
    case Float32Use::mkldnn_matmul:
      return {"mkldnn", "matmul"};
    case Float32Use::mkldnn_rnn:
      return {"mkldnn", "rnn"};
  }
  throw UsageError("unknown use of float32");
}

}  // namespace

#if NANLOCATOR_TORCH_BEFORE(2, 10)  // they are strings

std::string float32_precision(Float32Use use) {
  const auto [backend, op] = names_of(use);
  return at::globalContext().float32Precision(backend, op);
}

void set_float32_precision(Float32Use use, const std::string& text) {
  const auto [backend, op] = names_of(use);
  at::globalContext().setFloat32Precision(backend, op, text);
}

#else

std::string float32_precision(Float32Use use) {
  const auto [backend, op] = names_of(use);
  return at::precision2str(
      at::globalContext().float32Precision(at::str2backend(backend), at::str2op(op)));
}

void set_float32_precision(Float32Use use, const std::string& text) {
  const auto [backend, op] = names_of(use);
  at::globalContext().setFloat32Precision(at::str2backend(backend), at::str2op(op),
                                          at::str2precision(text));
}

#endif

#endif

#if NANLOCATOR_TORCH_BEFORE(2, 10)

namespace {

bool is_reduced_where_k_is_split(CublasReduction reduction) {
  if (!reduction.splits_k) throw UsageError("before Torch 2.10 cuBLAS may always split k");
  return reduction.is_reduced;
}

}  // namespace

CublasReduction bf16_cublas_reduction() {
  return {.is_reduced = at::globalContext().allowBF16ReductionCuBLAS()};
}

void set_bf16_cublas_reduction(CublasReduction reduction) {
  at::globalContext().setAllowBF16ReductionCuBLAS(is_reduced_where_k_is_split(reduction));
}

CublasReduction fp16_cublas_reduction() {
  return {.is_reduced = at::globalContext().allowFP16ReductionCuBLAS()};
}

void set_fp16_cublas_reduction(CublasReduction reduction) {
  at::globalContext().setAllowFP16ReductionCuBLAS(is_reduced_where_k_is_split(reduction));
}

#else

namespace {

CublasReduction reduction_of(at::CuBLASReductionOption option) {
  using Option = at::CuBLASReductionOption;
  return {.is_reduced = option == Option::AllowReducedPrecisionWithSplitK,
          .splits_k = option != Option::DisallowReducedPrecisionDisallowSplitK};
}

}  // namespace

CublasReduction bf16_cublas_reduction() {
  return reduction_of(at::globalContext().allowBF16ReductionCuBLAS());
}

void set_bf16_cublas_reduction(CublasReduction reduction) {
  at::globalContext().setAllowBF16ReductionCuBLAS(reduction.is_reduced, reduction.splits_k);
}

CublasReduction fp16_cublas_reduction() {
  return reduction_of(at::globalContext().allowFP16ReductionCuBLAS());
}

void set_fp16_cublas_reduction(CublasReduction reduction) {
  at::globalContext().setAllowFP16ReductionCuBLAS(reduction.is_reduced, reduction.splits_k);
}

#endif

#if NANLOCATOR_TORCH_BEFORE(2, 7)

bool accumulates_in_fp16() {
  return false;
}

void set_accumulates_in_fp16(bool accumulates) {
  if (accumulates) throw UsageError("before Torch 2.7 cuBLAS never accumulates in fp16");
}

#else

bool accumulates_in_fp16() {
  return at::globalContext().allowFP16AccumulationCuBLAS();
}

void set_accumulates_in_fp16(bool accumulates) {
  at::globalContext().setAllowFP16AccumulationCuBLAS(accumulates);
}

#endif

}  // namespace nanlocator::inline replay_room
