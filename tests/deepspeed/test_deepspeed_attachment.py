"""Wrong attachment gives advice; attachment to an unedited script finds the engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import on_cpu
import pytest
from on_cpu import run_ranks
from ranks import free_port

import nanlocator

HOW = "call nanlocator.deepspeed.install(engine) after deepspeed.initialize"


def wrong(rank, world_size, how):
    import deepspeed
    import torch
    from engine_training import Net, Training, configuration

    import nanlocator

    def initialize(optimizer):
        return deepspeed.initialize(model=model, optimizer=optimizer, config=configuration("zero2"))

    os.environ["LOCAL_RANK"] = str(rank)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    if how == "locating optimizer":
        return initialize(nanlocator.LocatingOptimizer(optimizer, model))
    if how == "function that makes one":
        return initialize(lambda groups: nanlocator.LocatingOptimizer(torch.optim.Adam(groups), model))
    if how == "watched optimizer":
        nanlocator.watch(model, optimizer)
        return initialize(optimizer)
    engine = Training(rank, "zero0" if how.startswith("zero0") else "zero2", watched=False).engine
    if how == "watch of engine":
        nanlocator.watch(engine, engine.optimizer)
    if how == "watch of model":
        nanlocator.watch(engine.module, optimizer)
    if how == "zero0: watch of model":
        nanlocator.watch(engine.module, engine.optimizer)
    if how == "locating optimizer of engine":
        nanlocator.LocatingOptimizer(engine.optimizer, engine.module)
    if how == "install on a model":
        nanlocator.deepspeed.install(engine.module)
    if how == "install twice":
        locator = nanlocator.deepspeed.install(engine)
        try:
            nanlocator.deepspeed.install(engine)
        finally:
            locator.remove()


MESSAGES = {
    "watch of engine": HOW,
    "watch of model": HOW,
    "zero0: watch of model": HOW,
    "locating optimizer of engine": HOW,
    "install on a model": "expects the engine, the first value that deepspeed.initialize returns, not a Net",
    "locating optimizer": HOW,
    "function that makes one": HOW,
    "install twice": "is already installed on this engine",
    "watched optimizer": HOW,
}


def all_wrong(rank, world_size):
    import nanlocator

    said = {}
    for how in MESSAGES:
        try:
            wrong(rank, world_size, how)
        except nanlocator.UsageError as error:
            said[how] = str(error)
    return said


def test_a_wrong_attachment_says_what_to_do():
    for said in run_ranks(2, all_wrong):
        assert {how: text in said.get(how, "") for how, text in MESSAGES.items()} == dict.fromkeys(
            MESSAGES, True
        ), said


def installed_and_removed(rank, world_size):
    from engine_training import Training, equal

    import nanlocator

    expected = Training(rank, "zero2", watched=False).run(3).state()
    training = Training(rank, "zero2")
    training.locator.remove()
    training.locator.remove()
    own = [name for name in vars(training.engine) if name in ("backward", "_take_model_step", "scale")]
    nanlocator.deepspeed.install(training.engine, output_dir="again").remove()
    return own, equal(expected, training.run(3).state())


def test_what_was_removed_leaves_nothing_and_can_be_installed_again():
    assert run_ranks(2, installed_and_removed) == [([], True)] * 2


def maps(rank, world_size):
    from engine_training import Training

    for variant in ("zero1", "zero2", "zero3"):
        Training(rank, variant).locator.remove()


def test_each_ranks_map_says_which_part_it_updates():
    run_ranks(2, maps)
    for folder in ("run/a0", "run/a1", "run/a2"):
        command = ["nanlocator", "map", "find", folder, "body.weight", "--json"]
        shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        assert [match["name"] for match in shown["matches"]] == ["body.weight"]
        parts = []
        for rank in range(2):
            manifest = json.loads(Path(folder, f"param_manifest_tp0pp0dp{rank}.json").read_text())
            parts += [p["shard"] for p in manifest["parameters"] if p["name"] == "body.weight"]
        # 16 x 16 elements in total; one rank updates each.
        assert parts[0]["begin"] == 0 and parts[0]["end"] == parts[1]["begin"] and parts[1]["end"] == 256


SCRIPT = Path(__file__).parent / "scripts" / "train.py"


def run_script(*command, **variables):
    paths = [os.getcwd(), *filter(None, sys.path), str(on_cpu.PACKAGES)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def run_with_torchrun():
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run_script(*torchrun, "-m", "nanlocator", SCRIPT)


def run_with_deepspeed():
    """DeepSpeed's own launcher, with nanlocator.pth as if installed."""
    package = Path(nanlocator.__file__).parents[1]
    Path("sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(package)!r})\n")
    launcher = [on_cpu.PACKAGES / "bin" / "deepspeed", "--num_gpus", "2", "--master_port", free_port()]
    return run_script(*launcher, SCRIPT, NANLOCATOR="1")


@pytest.mark.parametrize("run", [run_with_torchrun, run_with_deepspeed])
def test_an_unedited_script_is_watched_through_the_launcher(run):
    result = run()
    assert "watching 6 parameters of a DeepSpeed engine, ZeRO stage 2" in result.stderr
    assert "ERROR[no_labels] " in result.stderr and "on rank 1 " in result.stderr
    assert "averages over nothing" in result.stderr
    assert "NonFiniteGradientError" in result.stderr and result.returncode != 0
