"""Saves a tiny GPT of real Megatron-Core on CPU, in the layouts that its training loop writes."""

import argparse
import contextlib
import multiprocessing
import os
from pathlib import Path

import cpu_platform
import torch

cpu_platform.install()

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


def save(rank: int, world_size: int, root: str, bad: list[tuple[str, list[int], float]], layers: int = 4) -> None:
    """Iteration 20 in ``root``/torch_dist and ``root``/legacy; ``bad``: (parameter, index, value) on the last
    tensor-parallel rank."""
    torch.manual_seed(0)
    torch.cuda.synchronize = lambda *_: None
    # It writes with processes of its own, which a daemon may not start.
    multiprocessing.current_process()._config["daemon"] = False
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=16,
        num_attention_heads=2,
        tensor_model_parallel_size=world_size,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=8)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    if rank == world_size - 1:
        with torch.no_grad():
            for name, index, value in bad:
                parameters[name][tuple(index)] = value
    common = {"args": argparse.Namespace(lr=1e-3, hook=os.mkdir), "iteration": 20, "checkpoint_version": 3.0}
    folder = Path(root, "torch_dist", "iter_0000020")
    folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    state = model.sharded_state_dict()
    for name, parameter in parameters.items():
        if name in state:  # as the optimizer's sharded state: the parameter's own sharding under another key
            moment = optimizer.state[parameter]["exp_avg"]
            for key in ("exp_avg",):
                sharded = model.sharded_state_dict()[name]
                sharded.key, sharded.data = f"optimizer.state.{key}.{sharded.key}", moment
                state[f"optimizer.{key}.{name}"] = sharded
    with contextlib.redirect_stdout(None):
        dist_checkpointing.save({**state, **common}, str(folder))
    legacy = Path(root, "legacy", "iter_0000020", f"mp_rank_{rank:02d}")
    legacy.mkdir(parents=True)
    rng = [{"random_rng_state": None, "np_rng_state": None, "torch_rng_state": torch.get_rng_state()}]
    torch.save(
        {**common, "model": model.state_dict(), "optimizer": {"optimizer": optimizer.state_dict()}, "rng_state": rng},
        legacy / "model_optim_rng.pt",
    )
    torch.distributed.barrier()
    if rank == 0:
        for layout in ("torch_dist", "legacy"):
            Path(root, layout, "latest_checkpointed_iteration.txt").write_text("20")
