"""Names of the arguments of kernels whose libraries bind them without any.

flash-attn, Mamba, causal-conv1d, grouped_gemm, Apex and TransformerEngine write ``m.def("bwd", &mha_bwd)``,
and pybind11 documents ``arg0, arg1, ...``. These are the names of the C++ signatures, in their order, without
a trailing underscore. Which release it is, the number of arguments tells. A number that no row has is of a
release that nobody has read: the names stay unknown, and no reference judges such a call
(nanlocator/calls/kernel_references.py).
"""

_QKV = "q k v out"
_GRADIENTS = "dout q k v out softmax_lse dq dk dv"
_ENDS = "cu_seqlens_q cu_seqlens_k"
_LENGTHS = "max_seqlen_q max_seqlen_k"
_WINDOW = "is_causal window_size_left window_size_right"
_SOFTMAX = f"p_dropout softmax_scale zero_tensors {_WINDOW}"
_DENSE_SOFTMAX = f"p_dropout softmax_scale {_WINDOW}"
_CACHES = "q kcache vcache k v seqlens_k rotary_cos rotary_sin cache_batch_idx"
_TENSORS = "chunk_size noop_flag tensor_lists"
_APEX_GRADIENT = "dout mean invvar input_or_output normalized_shape"

# "module::entry" -> a row for each signature that a release has had.
_SIGNATURES: dict[str, tuple[str, ...]] = {
    # Dao-AILab/flash-attention, csrc/flash_attn/flash_api.cpp, v2.4.0 to v2.8.3
    "flash_attn_2_cuda::fwd": (
        f"{_QKV} alibi_slopes {_DENSE_SOFTMAX} return_softmax gen",  # v2.4.0
        f"{_QKV} alibi_slopes {_DENSE_SOFTMAX} softcap return_softmax gen",  # v2.6.0
    ),
    "flash_attn_2_cuda::varlen_fwd": (
        # v2.4.0, v2.5.7, v2.6.0, v2.6.1
        f"{_QKV} {_ENDS} seqused_k alibi_slopes {_LENGTHS} {_SOFTMAX} return_softmax gen",
        f"{_QKV} {_ENDS} seqused_k block_table alibi_slopes {_LENGTHS} {_SOFTMAX} return_softmax gen",
        f"{_QKV} {_ENDS} seqused_k block_table alibi_slopes {_LENGTHS} {_SOFTMAX} softcap return_softmax gen",
        f"{_QKV} {_ENDS} seqused_k leftpad_k block_table alibi_slopes {_LENGTHS} {_SOFTMAX} "
        "softcap return_softmax gen",
    ),
    "flash_attn_2_cuda::bwd": (
        f"{_GRADIENTS} alibi_slopes {_DENSE_SOFTMAX} gen rng_state",  # v2.4.0
        f"{_GRADIENTS} alibi_slopes {_DENSE_SOFTMAX} deterministic gen rng_state",  # v2.4.1
        f"{_GRADIENTS} alibi_slopes {_DENSE_SOFTMAX} softcap deterministic gen rng_state",  # v2.6.0
    ),
    "flash_attn_2_cuda::varlen_bwd": (
        # v2.4.0, v2.4.1, v2.6.0
        f"{_GRADIENTS} {_ENDS} alibi_slopes {_LENGTHS} {_SOFTMAX} gen rng_state",
        f"{_GRADIENTS} {_ENDS} alibi_slopes {_LENGTHS} {_SOFTMAX} deterministic gen rng_state",
        f"{_GRADIENTS} {_ENDS} alibi_slopes {_LENGTHS} {_SOFTMAX} softcap deterministic gen rng_state",
    ),
    "flash_attn_2_cuda::fwd_kvcache": (
        # v2.4.0, v2.5.0, v2.6.0, v2.6.1
        f"{_CACHES} alibi_slopes out softmax_scale {_WINDOW} is_rotary_interleaved num_splits",
        f"{_CACHES} block_table alibi_slopes out softmax_scale {_WINDOW} is_rotary_interleaved num_splits",
        f"{_CACHES} block_table alibi_slopes out softmax_scale {_WINDOW} softcap "
        "is_rotary_interleaved num_splits",
        f"{_CACHES} leftpad_k block_table alibi_slopes out softmax_scale {_WINDOW} softcap "
        "is_rotary_interleaved num_splits",
    ),
    # The same, hopper/flash_api.cpp, v2.7.0 to v2.7.2. From v2.8.0 on FlashAttention-3 registers operators.
    "flashattn_hopper_cuda::fwd": (
        f"{_QKV} softmax_scale descale_q descale_k descale_v {_WINDOW} use_gqa_packing",
    ),
    "flashattn_hopper_cuda::varlen_fwd": (
        f"{_QKV} {_ENDS} seqused_q seqused_k block_table {_LENGTHS} softmax_scale {_WINDOW}",
    ),
    "flashattn_hopper_cuda::bwd": (f"{_GRADIENTS} softmax_scale {_WINDOW} deterministic",),
    "flashattn_hopper_cuda::varlen_bwd": (
        f"{_GRADIENTS} {_ENDS} seqused_q seqused_k {_LENGTHS} softmax_scale {_WINDOW} deterministic",
    ),
    "flash_attn_3_cuda::fwd": (  # v2.7.3, v2.7.4
        "q k v k_new v_new out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k "
        f"{_LENGTHS} page_table kv_batch_idx leftpad_k rotary_cos rotary_sin q_descale k_descale v_descale "
        f"softmax_scale {_WINDOW} sink_token_length softcap is_rotary_interleaved num_splits pack_gqa "
        "sm_margin",
    ),
    "flash_attn_3_cuda::bwd": (
        f"{_GRADIENTS} {_ENDS} seqused_q seqused_k {_LENGTHS} softmax_scale {_WINDOW} "
        "sink_token_length softcap deterministic sm_margin",
    ),
    # state-spaces/mamba, csrc/selective_scan/selective_scan.cpp, v1.0.0 to v2.3.2
    "selective_scan_cuda::fwd": ("u delta A B C D z delta_bias delta_softplus",),
    "selective_scan_cuda::bwd": (
        "u delta A B C D z delta_bias dout x out dz delta_softplus recompute_out_z",
    ),
    # Dao-AILab/causal-conv1d, csrc/causal_conv1d.cpp; v1.0.0, v1.1.0, v1.2.0, v1.5.1 (to v1.6.1)
    "causal_conv1d_cuda::causal_conv1d_fwd": (
        "x weight bias silu_activation",
        "x weight bias seq_idx silu_activation",
        "x weight bias seq_idx initial_states final_states_out silu_activation",
        "x weight bias seq_idx initial_states out final_states_out silu_activation",
    ),
    "causal_conv1d_cuda::causal_conv1d_bwd": (
        "x weight bias dout dx silu_activation",
        "x weight bias dout seq_idx dx silu_activation",
        "x weight bias dout seq_idx initial_states dfinal_states dx return_dinitial_states silu_activation",
        "x weight bias dout seq_idx initial_states dfinal_states dx dweight dbias dinitial_states "
        "silu_activation",
    ),
    "causal_conv1d_cuda::causal_conv1d_update": (  # v1.0.0, v1.4.0, v1.5.0, v1.5.1
        "x conv_state weight bias silu_activation",
        "x conv_state weight bias silu_activation cache_seqlens",
        "x conv_state weight bias silu_activation cache_seqlens conv_state_indices",
        "x conv_state weight bias out silu_activation cache_seqlens conv_state_indices",
    ),
    # fanshiqing/grouped_gemm, csrc/grouped_gemm.h and csrc/permute.h, v1.0 to v1.1.4
    "grouped_gemm_backend::gmm": ("a b c batch_sizes trans_a trans_b",),
    "grouped_gemm_backend::permute": (  # v1.1, v1.1.2
        "input indices workspace max_expanded_token_num",
        "input indices num_out_tokens workspace max_expanded_token_num",
    ),
    "grouped_gemm_backend::unpermute": ("input row_id_map prob num_tokens num_topK",),
    "grouped_gemm_backend::unpermute_bwd": ("input_bwd input_fwd row_id_map prob",),
    # NVIDIA/apex, csrc/layer_norm_cuda.cpp; where there are two, 22.03 and 23.11 (to 25.09)
    "fused_layer_norm_cuda::forward": ("input normalized_shape epsilon",),
    "fused_layer_norm_cuda::forward_affine": ("input normalized_shape gamma beta epsilon",),
    "fused_layer_norm_cuda::forward_affine_mixed_dtypes": ("input normalized_shape gamma beta epsilon",),
    "fused_layer_norm_cuda::backward": (
        "dout mean invvar input normalized_shape epsilon",
        f"{_APEX_GRADIENT} epsilon memory_efficient",
    ),
    "fused_layer_norm_cuda::backward_affine": (
        "dout mean invvar input normalized_shape gamma beta epsilon",
        f"{_APEX_GRADIENT} gamma beta epsilon memory_efficient",
    ),
    "fused_layer_norm_cuda::rms_forward": ("input normalized_shape epsilon",),
    "fused_layer_norm_cuda::rms_forward_affine": ("input normalized_shape gamma epsilon",),
    "fused_layer_norm_cuda::rms_forward_affine_mixed_dtypes": ("input normalized_shape gamma epsilon",),
    "fused_layer_norm_cuda::rms_backward": (
        "dout invvar input normalized_shape epsilon",
        "dout invvar input_or_output normalized_shape epsilon memory_efficient",
    ),
    "fused_layer_norm_cuda::rms_backward_affine": (
        "dout invvar input normalized_shape gamma epsilon",
        "dout invvar input_or_output normalized_shape gamma epsilon memory_efficient",
    ),
    # NVIDIA/apex, csrc/amp_C_frontend.cpp, 25.09
    "amp_C::multi_tensor_scale": (f"{_TENSORS} scale",),
    "amp_C::multi_tensor_axpby": (f"{_TENSORS} a b arg_to_check",),
    "amp_C::multi_tensor_l2norm": (f"{_TENSORS} per_tensor",),
    "amp_C::multi_tensor_l2norm_scale": (f"{_TENSORS} scale per_tensor",),
    "amp_C::multi_tensor_unscale_l2norm": (f"{_TENSORS} inv_scale per_tensor",),
    "amp_C::multi_tensor_sgd": (
        f"{_TENSORS} wd momentum dampening lr nesterov first_run wd_after_momentum scale",
    ),
    "amp_C::multi_tensor_adam": (
        f"{_TENSORS} lr beta1 beta2 epsilon step mode bias_correction weight_decay",
    ),
    "amp_C::multi_tensor_adam_capturable": (
        f"{_TENSORS} lr beta1 beta2 epsilon step mode bias_correction weight_decay inv_scale",
    ),
    "amp_C::multi_tensor_lamb": (
        f"{_TENSORS} lr beta1 beta2 epsilon step bias_correction weight_decay "
        "grad_averaging mode global_grad_norm max_grad_norm use_nvlamb",
    ),
    # NVIDIA/TransformerEngine, transformer_engine/pytorch/csrc/extensions.h. Named by itself since v2.0:
    # layernorm_fwd, rmsnorm_fwd, generic_gemm (A transA B transB D ...), the activations.
    "transformer_engine_torch::layernorm_fwd": ("input weight bias eps sm_margin zero_centered_gamma",),  # v1
    "transformer_engine_torch::layernorm_bwd": ("dz x mu rsigma gamma sm_margin zero_centered_gamma",),
    "transformer_engine_torch::rmsnorm_fwd": ("input weight eps sm_margin zero_centered_gamma",),  # v1
    "transformer_engine_torch::rmsnorm_bwd": ("dz x rsigma gamma sm_margin zero_centered_gamma",),
    "transformer_engine_torch::rmsnorm_bwd_add": (  # v2.8
        "dz x add rsigma gamma sm_margin zero_centered_gamma",
    ),
    "transformer_engine_torch::te_gemm": (  # v1.6 to v1.13
        "A A_scale_inverse A_type transa B B_scale_inverse B_type transb D D_scale D_type D_amax bias "
        "bias_type pre_gelu_out grad workspace workspaceSize accumulate use_split_accumulator math_sm_count",
    ),
    "transformer_engine_torch::te_general_grouped_gemm": (  # v2.0 to v2.18
        "A transa B transb D D_type m_splits bias bias_type single_output pre_gelu_out grad workspace "
        "workspaceSize accumulate use_split_accumulator math_sm_count",
    ),
    "transformer_engine_torch::fused_rope_forward": (  # v1.6, v2.3
        "input freqs transpose_output_memory",
        "input freqs start_positions qkv_format interleaved cu_seqlens cp_size cp_rank",
    ),
    "transformer_engine_torch::fused_rope_backward": (  # v1.6, v2.3, v2.10
        "output_grads freqs transpose_output_memory",
        "output_grads freqs qkv_format interleaved cu_seqlens cp_size cp_rank",
        "output_grads freqs start_positions qkv_format interleaved cu_seqlens cp_size cp_rank",
    ),
}
_ROWS = {
    kernel: {len(names): names for names in (row.split() for row in rows)}
    for kernel, rows in _SIGNATURES.items()
}


def is_known(kernel: str) -> bool:
    """``kernel``: "flash_attn_2_cuda::varlen_bwd"."""
    return kernel in _ROWS


def argument_names(kernel: str, count: int) -> list[str]:
    """Of a call with ``count`` arguments; empty where no row has as many."""
    return _ROWS.get(kernel, {}).get(count, [])
