"""A step of a published configuration on Megatron-Core: model, gradient buckets, optimizer, schedule.

On the CPU and the meta device (examples/megatron_gpt/cpu_platform.py) or, with MEGATRON_ON=cuda in the
environment, on the GPU. torch.distributed must be initialised.
"""

import os
import sys
from pathlib import Path
from typing import Any

from plan_configurations import Configuration

ON_CUDA = os.environ.get("MEGATRON_ON") == "cuda"
if not ON_CUDA:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "megatron_gpt"))
    import cpu_platform

    cpu_platform.install()

import torch  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402


class Training:
    """Model, buckets and optimizer of this rank; bf16, distributed optimizer, sequence parallelism if
    there is tensor parallelism. Tokens are distributed evenly among the experts."""

    def __init__(self, c: Configuration) -> None:
        self.c = c
        parallel_state.initialize_model_parallel(
            c.tp,
            c.pp,
            c.vp,
            expert_model_parallel_size=c.ep,
            expert_tensor_parallel_size=c.tp,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        self.config = TransformerConfig(
            num_layers=c.layers,
            hidden_size=c.hidden,
            ffn_hidden_size=c.ffn,
            num_attention_heads=c.heads,
            num_query_groups=c.kv_heads,
            tensor_model_parallel_size=c.tp,
            pipeline_model_parallel_size=c.pp,
            virtual_pipeline_model_parallel_size=c.vp,
            sequence_parallel=c.tp > 1,
            account_for_embedding_in_pipeline_split=c.is_embedding_a_layer,
            account_for_loss_in_pipeline_split=c.is_embedding_a_layer,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            bf16=True,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=not ON_CUDA,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=ON_CUDA,
            bias_activation_fusion=False,
            persist_layer_norm=False,
            deallocate_pipeline_outputs=False,
            batch_p2p_comm=not c.vp,
            **self._options(),
        )
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True
        )
        self.chunks = [self._chunk(ddp, stage if c.vp else None) for stage in range(c.vp or 1)]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-4,
                clip_grad=1.0,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
            ),
            self.chunks,
            use_gloo_process_groups=False,
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        no_sync = [chunk.no_sync for chunk in self.chunks]
        self.config.no_sync_func = no_sync if c.vp else no_sync[0]

    def _options(self) -> dict[str, Any]:
        """More of TransformerConfig's."""
        if not self.c.experts:
            return {}
        return {
            "num_moe_experts": self.c.experts,
            "expert_model_parallel_size": self.c.ep,
            "expert_tensor_parallel_size": self.c.tp,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_topk": self.c.topk,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.01,
            # Each expert gets its even share: shapes do not depend on values.
            "moe_expert_capacity_factor": 1.0,
            "moe_pad_expert_input_to_capacity": True,
        }

    def _layer_spec(self) -> Any:
        return get_gpt_layer_local_spec(
            num_experts=self.c.experts, moe_grouped_gemm=False, normalization="RMSNorm"
        )

    def _chunk(self, ddp: DistributedDataParallelConfig, vp_stage: int | None) -> torch.nn.Module:
        model = GPTModel(
            self.config,
            self._layer_spec(),
            vocab_size=self.c.vocabulary,
            max_sequence_length=self.c.sequence,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        if ON_CUDA:
            model.cuda()
        return DistributedDataParallel(self.config, ddp, Float16Module(self.config, model))

    def step(self) -> list[dict[str, torch.Tensor]]:
        """train_step of Megatron-LM's megatron/training/training.py; the losses of the microbatches."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        iterators = [iter(range(self.c.microbatches)) for _ in self.chunks]
        losses = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iterators if self.c.vp else iterators[0],
            model=self.chunks,
            num_microbatches=self.c.microbatches,
            seq_length=self.c.sequence,
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.step()
        return losses

    def _forward(self, data: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        next(data)
        shape = 1, self.c.sequence
        tokens = torch.arange(self.c.sequence, device="cuda").expand(shape) % self.c.vocabulary
        return model(tokens, tokens, None, labels=tokens), _loss


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach()}
