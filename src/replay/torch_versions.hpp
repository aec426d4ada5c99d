// Differences between versions of Torch for the room `replay` (src/tensor/torch_versions.hpp):
// settings of the process. A setter throws UsageError if this Torch has no such setting.
#pragma once

#include <string>

#include "tensor/torch_versions.hpp"

namespace nanlocator::inline replay_room {

/// How float32 is computed: "none" (no choice was made), "ieee", "tf32" or "bf16".
///
/// Before 2.9 there are two settings: cuda_conv ("none" or "tf32" for all of cuDNN, so cuda_rnn
/// reads the same) and cuda_matmul ("none", "tf32" or "bf16": "highest", "high" and "medium" of
/// torch.set_float32_matmul_precision, which also applies to the CPU). The others read "none"
/// there.
enum class Float32Use { cuda_conv, cuda_matmul, cuda_rnn, mkldnn_conv, mkldnn_matmul, mkldnn_rnn };
[[nodiscard]] std::string float32_precision(Float32Use use);
void set_float32_precision(Float32Use use, const std::string& text);

/// What cuBLAS may do in products of a 16-bit dtype. Before 2.10 it may always split k.
struct CublasReduction {
  bool is_reduced = true;
  bool splits_k = true;
};
[[nodiscard]] CublasReduction bf16_cublas_reduction();
void set_bf16_cublas_reduction(CublasReduction reduction);
[[nodiscard]] CublasReduction fp16_cublas_reduction();
void set_fp16_cublas_reduction(CublasReduction reduction);

/// Before 2.7 cuBLAS never accumulates in fp16.
[[nodiscard]] bool accumulates_in_fp16();
void set_accumulates_in_fp16(bool accumulates);

}  // namespace nanlocator::inline replay_room
