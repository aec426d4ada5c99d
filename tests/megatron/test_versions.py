"""Differences between versions of Megatron-Core, on the installed one; with another in front of PYTHONPATH,
on that one."""

import os
import subprocess
import sys

import torch
from fixtures import run_in_tmp_path  # noqa: F401
from ranks import RankServer

# gpt_training redirects Megatron's CUDA to the CPU before it imports it.
run_ranks = RankServer("torch._dynamo", "gpt_training").run_ranks


def losses_after_restoring(rank, world_size):
    import gpt_training  # noqa: F401
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    from nanlocator.megatron import state

    def add(value):
        if hasattr(moe_utils, "get_moe_metrics_tracker"):
            moe_utils.get_moe_metrics_tracker().record("load_balancing_loss", torch.tensor(value), 1, 2)
        else:
            moe_utils.save_to_aux_losses_tracker("load_balancing_loss", torch.tensor(value), 1, 2)

    def read():
        if hasattr(moe_utils, "get_moe_metrics_tracker"):
            metrics = moe_utils.get_moe_metrics_tracker().metrics
            return {name: entry.values.tolist() for name, entry in metrics.items()}
        holder = moe_utils if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker") else parallel_state
        tracker = holder.get_moe_layer_wise_logging_tracker()
        return {name: entry["values"].tolist() for name, entry in tracker.items()}

    losses = state.router_losses()
    losses.save()
    empty = read()
    add(1.0)
    losses.restore()
    assert read() == empty
    add(1.0)
    losses.save()
    add(5.0)
    between = read()
    losses.restore()
    return between, read()


def test_what_routers_have_logged_is_restored_before_a_re_run():
    ((between, restored),) = run_ranks(1, losses_after_restoring)
    assert between == {"load_balancing_loss": [6.0, 0.0]}
    assert restored == {"load_balancing_loss": [1.0, 0.0]}


def versions_that_are_known(rank, world_size):
    import gpt_training  # noqa: F401
    import megatron.core

    from nanlocator.megatron import supported

    def unknown(version):
        megatron.core.__version__ = version
        return supported.unknown_version()

    given = ["0.11.0", "0.12.0rc3", "0.16.1", "0.20.0", "0.21.0", "1.0.0", "custom"]
    return [version for version in given if unknown(version)]


def test_a_version_that_nobody_has_tried_is_said_and_is_no_error():
    assert run_ranks(1, versions_that_are_known) == [["0.11.0", "0.21.0", "1.0.0", "custom"]]


def test_a_version_that_is_too_old_is_one_sentence_with_the_remedy(tmp_path):
    core = tmp_path / "megatron" / "core"  # 0.11 has no process_groups_config
    core.mkdir(parents=True)
    (core / "__init__.py").write_text('__version__ = "0.11.0"\n')
    (core / "parallel_state.py").write_text("")
    search = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", "import nanlocator.megatron; nanlocator.megatron.install"],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=120,
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "ImportError: nanlocator.megatron needs Megatron-Core 0.12 or newer, but 0.11.0 is"
    )
    assert "LocatingOptimizer" in last
