"""nanlocator.replay and the replay programs, on bundles of planted faults."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_python
from torch import nn

import nanlocator
from nanlocator import _C, replay
from nanlocator.calls import module_calls

BIN = Path(_C.__file__).parents[2] / "bin"
HERE = Path(__file__).parent


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extra: Any = None


class Block(nn.Module):
    """Has a keyword tensor, a dataclass output and a buffer, and no dropout."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.full((width,), 2.0))

    def forward(
        self, x: torch.Tensor, options: dict[str, Any] | None = None, *, bias: torch.Tensor
    ) -> Output:
        y = self.linear(x) * self.scale + bias
        return Output(torch.log(y), (options or {}).get("note"))


def recorded_call(folder: Path, **changes: Any) -> tuple[Path, nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    module = Block()
    x = torch.randn(2, 4, requires_grad=True)
    bias = torch.randn(4)
    output = module(x, {"note": "seen", "ids": [1, 2.5, None]}, bias=bias)
    gradient = torch.randn_like(output.hidden)
    output.hidden.backward(gradient)
    arguments = changes.pop("arguments", (x, {"note": "seen", "ids": [1, 2.5, None]}))
    call = module_calls.module_call(
        "blocks.0", module, arguments, {"bias": bias}, output, (gradient,), (x.grad,), **changes
    )
    path = folder / call.write(folder)
    gradients = {"x": x.grad, "weight": module.linear.weight.grad}
    return path, module, {"output": output.hidden.detach(), **gradients}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.detach().view(torch.int32), b.detach().view(torch.int32))


def test_a_module_bundle_gives_arguments_weights_and_gradients_back(tmp_path: Path) -> None:
    path, module, seen = recorded_call(tmp_path)
    call = replay.load(path)
    (x, options), keywords = call.inputs
    assert options == {"note": "seen", "ids": [1, 2.5, None]}
    assert x.requires_grad and keywords["bias"].shape == (4,)
    assert call.name == "blocks.0" and call.class_name.endswith(".Block")
    assert same_bits(call.weights["linear.weight"], module.linear.weight)
    assert same_bits(call.weights["scale"], module.scale)
    assert call.outputs.class_name.endswith(".Output") and call.outputs["extra"] == "seen"
    assert same_bits(call.outputs.hidden, seen["output"])
    assert same_bits(call.grad_inputs[0], seen["x"])


def test_a_bound_module_repeats_forward_and_backward_bit_for_bit(tmp_path: Path) -> None:
    path, _, seen = recorded_call(tmp_path)
    again = replay.load(path).bind(Block())()
    assert same_bits(again.outputs.hidden, seen["output"])
    assert same_bits(again.grad_inputs[0], seen["x"])
    assert same_bits(again.weight_gradients["linear.weight"], seen["weight"])


def test_a_pickled_module_is_called_only_where_that_is_allowed(tmp_path: Path) -> None:
    path, _, seen = recorded_call(tmp_path)
    with pytest.raises(nanlocator.UsageError, match="allow_pickle=True"):
        replay.load(path)()
    again = replay.load(path, allow_pickle=True)()
    assert same_bits(again.outputs.hidden, seen["output"])


def test_a_module_of_another_size_is_refused_by_name(tmp_path: Path) -> None:
    path, _, _ = recorded_call(tmp_path)
    with pytest.raises(nanlocator.UsageError, match=r"linear\.weight|scale"):
        replay.load(path).bind(Block(width=8))
    with pytest.raises(nanlocator.UsageError, match="different weights"):
        replay.load(path).bind(nn.Linear(4, 4))


def test_a_value_that_no_bundle_can_hold_is_named_where_it_is_needed(tmp_path: Path) -> None:
    path, _, _ = recorded_call(tmp_path, arguments=(torch.ones(2, 4).to_sparse(), None))
    call = replay.load(path)
    assert "Sparse" in call.arguments[0].description
    with pytest.raises(nanlocator.UnsupportedError, match="Sparse"):
        call.bind(Block())()


def test_a_module_that_cannot_be_pickled_says_why(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    module.callback = lambda: None
    call = module_calls.module_call("lin", module, (torch.ones(1, 2),), {}, torch.ones(1, 2))
    loaded = replay.load(tmp_path / call.write(tmp_path), allow_pickle=True)
    with pytest.raises(nanlocator.UsageError, match=r"no pickle.*lambda"):
        loaded()


def test_a_module_with_the_weights_of_a_whole_model_stays_out_of_the_bundle(tmp_path: Path) -> None:
    module = Block()
    module.large = nn.Parameter(torch.zeros(1).expand(2**28))
    call = module_calls.module_call("model", module, (torch.ones(2, 4),), {}, None)
    bundle = json.loads((tmp_path / call.write(tmp_path) / "bundle.json").read_text())
    assert bundle["module_call"] is None
    assert bundle["notes"] == ["The call of the module model was not kept: its weights take 1024 MiB"]


def test_run_says_that_a_module_bundle_holds_no_operator_call(tmp_path: Path) -> None:
    path, _, _ = recorded_call(tmp_path)
    with pytest.raises(nanlocator.UsageError, match=r"replay\.load"):
        replay.run(path)


SAMPLE = """
import ctypes, sys, torch
sampler = ctypes.CDLL(sys.argv[1])
sampler.operator_sampler_write.argtypes = [ctypes.c_char_p]
sampler.operator_sampler_start()
x = torch.tensor([[1.0, -2.0], [0.0, 4.0]])
x.log()
torch.ones(3).exp()
torch.full((2,), 3.0).add_(torch.ones(2), alpha=2)
torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8))
torch.nn.functional.dropout(torch.ones(50), 0.5)
sampler.operator_sampler_write(sys.argv[2].encode())
"""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles by operator."""
    sampler = Path(_C.__file__).parents[2] / "tests" / "operator_sampler.so"
    if not sampler.exists():
        pytest.skip(f"{sampler.name} is built with the C++ tests")
    folder = tmp_path_factory.mktemp("bundles")
    subprocess.run([sys.executable, "-c", SAMPLE, str(sampler), str(folder)], check=True, timeout=60)
    found = {}
    for bundle in (folder / "bundles").iterdir():
        found[json.loads((bundle / "bundle.json").read_text())["operator_call"]["operator"]] = bundle
    return found


def program(*arguments: Any, path: str | None = None) -> subprocess.CompletedProcess[str]:
    if not (BIN / "nanlocator-replay").exists():
        pytest.skip("nanlocator-replay was not built")
    command = [str(BIN / "nanlocator"), "replay", *map(str, arguments)]
    environment = os.environ | ({} if path is None else {"PATH": path})
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


def test_run_reports_the_planted_logarithms(bundles: dict[str, Path]) -> None:
    report = replay.run(bundles["aten::log"])
    assert report["is_bit_exact"] and report["conclusion"] == "deterministic_undefined"
    assert report["recorded"][0]["nan"] == 1 and report["recorded"][0]["neg_inf"] == 1
    assert report["inputs_at_first_bad"] == [
        {"name": "self", "dtype": "float32", "index": [0, 1], "value": -2.0}
    ]


def test_the_command_exits_with_1_where_it_is_bad_again_and_0_where_not(bundles: dict[str, Path]) -> None:
    bad = program(bundles["aten::log"], "--json")
    assert bad.returncode == 1
    assert json.loads(bad.stdout)["conclusion"] == "deterministic_undefined"
    assert program(bundles["aten::exp"]).returncode == 0


def test_the_command_refuses_wrong_use_with_2(bundles: dict[str, Path], tmp_path: Path) -> None:
    assert program().returncode == 2
    assert program(tmp_path / "nothing").returncode == 2
    refused = program(bundles["aten::log"], "--repeats", "0")
    assert refused.returncode == 2 and "at least 1" in refused.stderr


def test_the_command_takes_what_only_python_can_obey_to_python(bundles: dict[str, Path]) -> None:
    refused = program(bundles["aten::log"], "--reference", "math:log")
    assert refused.returncode == 2 and "only a kernel can be compared with" in refused.stderr
    assert refused.stderr.endswith("; see nanlocator replay --help\n")
    assert program(bundles["aten::log"], "--trust").returncode == 1
    alone = subprocess.run(
        [BIN / "nanlocator-replay", bundles["aten::log"], "--trust"], capture_output=True, text=True
    )
    assert alone.returncode == 2 and "--trust needs Python: use nanlocator replay" in alone.stderr


def test_the_three_programs_have_one_help(bundles: dict[str, Path]) -> None:
    programs = [[BIN / "nanlocator", "replay"], [BIN / "nanlocator-replay"]]
    programs.append([sys.executable, "-m", "nanlocator.replay"])
    wide = os.environ | {"COLUMNS": "100"}
    said = [
        subprocess.run([*command, "--help"], capture_output=True, text=True, env=wide) for command in programs
    ]
    assert {(each.returncode, each.stderr) for each in said} == {(0, "")}
    assert len({each.stdout for each in said}) == 1
    assert "--reference MODULE:FUNCTION" in said[0].stdout and "--load FILE.so" in said[0].stdout


def test_a_script_is_exported_to_a_file_that_is_named(bundles: dict[str, Path]) -> None:
    refused = program(bundles["aten::log"], "--export-python")
    assert refused.returncode == 2 and "--export-python needs a value: --export-python FILE" in refused.stderr
    assert program(bundles["aten::log"], "--export-python", "-").stdout.count("\n") <= 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to execute it on")
def test_the_command_says_how_to_execute_a_call_of_a_gpu_where_there_is_none(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(bundles["aten::log"], tmp_path / "bundle")
    recorded = json.loads((copy / "bundle.json").read_text())
    (copy / "bundle.json").write_text(json.dumps(recorded).replace('"cpu"', '"cuda:1"'))
    refused = program(copy)
    assert refused.returncode == 2 and refused.stderr.endswith("on the CPU: --device cpu\n")
    assert program(copy, "--device", "cpu").returncode == 1


def test_the_command_without_its_program_says_what_to_install(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    alone = shutil.copy(BIN / "nanlocator", tmp_path / "nanlocator")
    done = subprocess.run(
        [alone, "replay", "x"], capture_output=True, text=True, env={"PATH": "/nowhere"}, check=False
    )
    assert done.returncode == 2
    assert "nanlocator-replay is neither beside" in done.stderr
    assert "python -m nanlocator.replay" in done.stderr


@pytest.mark.parametrize(
    "op", ["aten::log", "aten::add_.Tensor", "aten::scaled_dot_product_attention", "aten::dropout"]
)
def test_an_exported_script_is_short_and_gives_the_recorded_values(
    op: str, bundles: dict[str, Path], tmp_path: Path
) -> None:
    script = tmp_path / "bug.py"
    assert program(bundles[op], "--export-python", script).returncode == 0
    lines = script.read_text().splitlines()
    assert len(lines) <= 20
    # Unchanged, it runs alone; with its print replaced, it is compared here.
    assert run_python(script).returncode == 0
    assert lines[-1].startswith("print(") and lines[-1].endswith(")")
    scope: dict[str, Any] = {}
    code = "\n".join([*lines[:-1], f"result = {lines[-1].removeprefix('print')}"]).replace("sys.argv", "['']")
    exec(code, scope)
    stored = json.loads((bundles[op] / "bundle.json").read_text())["operator_call"]["outputs"][0]
    tensors = scope["tensors"][stored["storage"]].reshape(-1)
    recorded = tensors.as_strided(stored["sizes"], stored["strides"], stored["offset"])
    assert same_bits(scope["result"].contiguous(), recorded.contiguous())


def test_the_module_on_the_command_line_does_the_same(bundles: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "nanlocator.replay", str(bundles["aten::log"]), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert json.loads(done.stdout)["is_bit_exact"]
