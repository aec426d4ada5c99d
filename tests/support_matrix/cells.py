"""The cells of the support matrix, that is, the versions that nanlocator is run with, and the tests of
each."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_PYTHON = "3.11"

# One line is one cell. A version that begins with a digit is a release of the package registry; any other
# version of Megatron-Core is a branch or tag of Megatron-LM's repository. docs/support.md has the results in
# this order.
TABLE = """
torch   Python  framework      version
2.6.0   3.12    pytorch
2.6.0   3.12    transformers   4.57.6
2.8.0   3.10    pytorch
2.8.0   3.10    transformers   5.17.0
2.10.0  3.13    pytorch
2.10.0  3.13    transformers   5.17.0
2.11.0  3.11    pytorch
2.11.0  3.11    transformers   4.57.6
2.11.0  3.11    transformers   5.17.0
2.11.0  3.11    transformers   5.23.0
2.11.0  3.11    megatron-core  0.12.3
2.11.0  3.11    megatron-core  0.13.1
2.11.0  3.11    megatron-core  0.14.0
2.11.0  3.11    megatron-core  0.15.3
2.11.0  3.11    megatron-core  0.16.1
2.11.0  3.11    megatron-core  core_v0.17.1
2.11.0  3.11    megatron-core  core_v0.18.2
2.11.0  3.11    megatron-core  core_v0.19.0
2.11.0  3.11    megatron-core  main
2.13.0  3.12    pytorch
2.13.0  3.12    transformers   5.17.0
2.15.0  3.13    pytorch
2.15.0  3.13    transformers   5.23.0
"""

# The fault tests of a cell, as arguments of pytest: faults are planted, named, replayed and reported in the
# framework's own training loop. Some minutes on one core.
TESTS = {
    "pytorch": [
        "tests/pytorch/test_one_fault.py",
        "tests/pytorch/test_births_of_steps.py",
        "tests/pytorch/test_locating_optimizer.py",
        "tests/pytorch/test_modules.py",
        "tests/pytorch/test_ranks.py",
        "tests/pytorch/test_replay.py",
        "tests/pytorch/test_rerun.py",
        "tests/pytorch/test_scan.py",
        "tests/pytorch/test_tensors_without_memory.py",
        "tests/pytorch/test_torch_versions.py",
        "tests/pytorch/test_watch.py",
        "tests/pytorch/test_ddp.py",
        "tests/pytorch/test_attach.py",
        "tests/pytorch/test_kernels.py",
        "tests/pytorch/test_compiled.py",
        "tests/netcheck/test_netcheck_command.py",
        "tests/pytorch/test_program_ends.py",
        "tests/sharded",
        "tests/step/test_contract.py",
        "-k",
        "not (test_contract and (trainer or megatron or deepspeed))"
        " and not healthy_models and not transformers",
    ],
    "transformers": [
        "tests/transformers",
        "tests/debugger/test_debugger.py",
        "tests/debugger/test_debugger_backward.py",
        "tests/debugger/test_debugger_ranks.py",
        "tests/pytorch/test_operator_trace.py",
        "tests/step/test_contract.py",
        *("-k", "not (test_contract and (plain or megatron or deepspeed))"),
    ],
    "megatron-core": [
        "tests/megatron/test_versions.py",
        "tests/megatron/test_first_step.py",
        *(
            f"tests/megatron/test_matrix.py::test_every_fault_is_named[{layout}]"
            for layout in (
                "distributed_optimizer_bf16",
                "overlap_param_gather",
                "sequence_parallel_tied_embeddings",  # TP2 x PP2
                "interleaved_pipeline",
                "experts_alltoall",
                "multi_token_prediction",
            )
        ),
        "tests/step/test_contract.py",
        *("-k", "not (test_contract and (plain or trainer or deepspeed))"),
    ],
}

# With --smoke: a fault, its replay and its report, in well under a minute.
SMOKE_TESTS = {
    "pytorch": [
        "tests/pytorch/test_one_fault.py",
        "tests/pytorch/test_attach.py::test_a_fault_in_an_unedited_script_is_located",
    ],
    "transformers": [
        "tests/transformers/test_trainer.py::"
        "test_an_overflow_names_module_and_operator_and_its_bundle_replays"
    ],
    "megatron-core": ["tests/megatron/test_matrix.py::test_every_fault_is_named[ddp_fp32]"],
}

# (framework or "torch", version, part of a test's name): the reason why that test cannot pass there. The test
# is run, its failure is listed with this reason, and the cell still passes.
_EAGER = "its T5 has eager attention only"
_SHARED = "its T5 has one embedding under three names, whose frame the original prints three times"
_NO_BOOL = "its BERT makes no bool mask for the original to stumble over"
_LOCAL = "its Trainer keeps its summed loss to itself: a recovered step is logged with the first loss"
_OTHER_BITS = (
    "its pipelines reduce the first microbatch of their first step under DistributedDataParallel, too"
)
_TO_ITSELF = "its V schedule sends what stays on a rank, too, which gloo does not"
_INNERMOST = "its tensor parallelism has to be the innermost dimension of a mesh"
_NO_EVALUATION = "its pipelines cannot leave out the backward"
_NO_FSDP = "it has no Megatron-FSDP"
_OLD_MESHES = "its Megatron-FSDP uses what meshes of torch 2.11 no longer have"
IMPOSSIBLE = {
    ("torch", "2.6.0", "model_in_shards"): "its fully_shard does not run on CPUs",
    ("torch", "2.8.0", "[v]"): _TO_ITSELF,
    ("torch", "2.8.0", "[v-"): _TO_ITSELF,
    ("torch", "2.8.0", "[tensor]"): _INNERMOST,
    ("torch", "2.8.0", "[tensor-"): _INNERMOST,
    ("torch", "2.8.0", "a_step_without_a_backward_is_no_step"): _NO_EVALUATION,
    ("torch", "2.13.0", "every_step_is_executed_again_alike[ddp]"): _OTHER_BITS,
    ("torch", "2.15.0", "every_step_is_executed_again_alike[ddp]"): _OTHER_BITS,
    ("megatron-core", "0.12.3", "[megatron_fsdp]"): _NO_FSDP,
    ("megatron-core", "0.13.1", "[megatron_fsdp]"): _NO_FSDP,
    ("megatron-core", "0.14.0", "[megatron_fsdp]"): _OLD_MESHES,
    ("transformers", "4.57.6", "no_origins[-t5-sdpa"): _EAGER,
    ("transformers", "4.57.6", "no_origins[memory filled with NaN-t5-sdpa"): _EAGER,
    ("transformers", "4.57.6", "a_bool_mask_does_not_end_the_run[t5]"): _EAGER,
    ("transformers", "4.57.6", "the_text_is_the_originals_byte_for_byte[t5-healthy"): _SHARED,
    ("transformers", "4.57.6", "a_traced_batch_has_the_frames_of_the_public_documentation"): _SHARED,
    ("transformers", "4.57.6", "a_bool_mask_does_not_end_the_run[bert]"): _NO_BOOL,
    ("transformers", "4.57.6", "a_bool_mask_that_the_original_does_not_survive"): _NO_BOOL,
    ("transformers", "4.57.6", "recover_goes_on_as_if_the_fault_had_never_been[3]"): _LOCAL,
}

_NAMES = {"pytorch": "plain PyTorch", "transformers": "transformers", "megatron-core": "Megatron-Core"}


@dataclasses.dataclass(frozen=True)
class Cell:
    torch: str
    python: str  # 3.11
    framework: str  # a key of TESTS
    version: str = ""  # the framework's; none for plain PyTorch

    @property
    def framework_name(self) -> str:
        return f"{_NAMES[self.framework]} {self.version}".strip()

    @property
    def is_from_registry(self) -> bool:
        return not self.version or self.version[0].isdigit()

    @property
    def key(self) -> tuple[str, str, str]:
        """Identifies a cell in docs/support.md."""
        return self.torch, self.python, self.framework_name

    def __str__(self) -> str:
        return f"torch {self.torch}, Python {self.python}, {self.framework_name}"


def cells_of(table: str) -> list[Cell]:
    """The cells of a text like TABLE."""
    lines = table.strip().splitlines()[1:]
    return [Cell(*line.split()) for line in lines]


CELLS = cells_of(TABLE)


def torch_version(text: str) -> str:
    """A command-line argument: 2.8 or 2.8.0."""
    if not re.fullmatch(r"\d+(\.\d+){1,2}", text):
        raise argparse.ArgumentTypeError(f"{text} is no version such as 2.8 or 2.8.0")
    return text


def python_version(text: str) -> str:
    """A command-line argument: 3.10."""
    if not re.fullmatch(r"\d+\.\d+", text):
        raise argparse.ArgumentTypeError(f"{text} is no version such as 3.10: two numbers are meant")
    return text


def versions_of(torch: str | None, python: str | None) -> tuple[str, str]:
    """Torch and Python in full. If the table has the version, the table's, with its Python."""
    torch = torch or pins()["torch"]
    known = next((cell for cell in CELLS if is_of(cell.torch, torch)), None)
    return (known.torch, python or known.python) if known else (torch, python or DEFAULT_PYTHON)


def pins() -> dict[str, str]:
    """The versions that tools/setup installs, which tools/test runs with and which are the defaults here."""
    lines = []
    for name in ("requirements-build.txt", "requirements.txt"):
        lines += (ROOT / "tools" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if re.match(r"[\w-]+==", line))


def is_of(version: str, asked: str) -> bool:
    """2.8 matches every 2.8.x."""
    return version == asked or version.startswith(f"{asked}.")


def reason_why_impossible(cell: Cell, test: str) -> str | None:
    for (framework, version, part), reason in IMPOSSIBLE.items():
        of_cell = [(cell.framework, cell.version), ("torch", cell.torch)]
        if (framework, version) in of_cell and part in test:
            return reason
    return None


def in_rotation(cells: list[Cell], commit: str) -> Cell:
    """The same cell for the same commit; over many commits every cell is chosen."""
    return cells[int(commit, 16) % len(cells)]
