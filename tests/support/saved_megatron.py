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

Fault = tuple[str, list[int], float]  # parameter, index, value


def save(rank: int, world_size: int, root: str, faults: dict[str, list[Fault]]) -> None:
    """Iteration 20 of each fault in ``root``/FAULT/torch_dist and ``root``/FAULT/legacy. The faults are on
    the last tensor-parallel rank."""
    torch.manual_seed(0)
    torch.cuda.synchronize = lambda *_: None
    # It writes with processes of its own, which a daemon may not start.
    multiprocessing.current_process()._config["daemon"] = False
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    config = TransformerConfig(
        num_layers=4,
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
    for fault, planted in faults.items():
        healthy = {name: parameters[name].detach().clone() for name, _, _ in planted}
        with torch.no_grad():
            for name, index, value in planted:
                if rank == world_size - 1:
                    parameters[name][tuple(index)] = value
            for layout, save_layout in (("torch_dist", _save_distributed), ("legacy", _save_legacy)):
                folder = Path(root, fault, layout)
                (folder / "iter_0000020").mkdir(parents=True, exist_ok=True)
                torch.distributed.barrier()
                save_layout(rank, folder / "iter_0000020", model, optimizer)
                torch.distributed.barrier()
                (folder / "latest_checkpointed_iteration.txt").write_text("20")
            for name, values in healthy.items():
                parameters[name].copy_(values)


# As in Megatron-LM, with an argument that only its own code could unpickle.
_COMMON = {"args": argparse.Namespace(lr=1e-3, hook=os.mkdir), "iteration": 20, "checkpoint_version": 3.0}


def _save_distributed(
    rank: int, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    state = model.sharded_state_dict()
    for name, parameter in model.named_parameters():
        moment = model.sharded_state_dict()[name]  # sharded as the parameter
        moment.key, moment.data = (
            f"optimizer.state.exp_avg.{moment.key}",
            optimizer.state[parameter]["exp_avg"],
        )
        state[f"optimizer.{name}"] = moment
    with contextlib.redirect_stdout(None):
        dist_checkpointing.save({**state, **_COMMON}, str(folder))


def _save_legacy(rank: int, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    folder = folder / f"mp_rank_{rank:02d}"
    folder.mkdir()
    rng = [{"random_rng_state": None, "np_rng_state": None, "torch_rng_state": torch.get_rng_state()}]
    state = {
        "model": model.state_dict(),
        "optimizer": {"optimizer": optimizer.state_dict()},
        "rng_state": rng,
    }
    torch.save({**_COMMON, **state}, folder / "model_optim_rng.pt")
