"""LocatingOptimizer around real torch optimizers, one process."""

import copy
import json
import re
from pathlib import Path

import jsonschema
import pytest
import torch
from ranks import run_python
from torch import nn

import nanlocator
from nanlocator import LocatingOptimizer, NonFiniteGradientError

SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "docs" / "verdict.schema.json").read_text())
OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4),
}


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))


def train(model, optimizer, steps, *, clip=None, scheduler=None):
    """Weights, losses and RNG state after `steps`; every batch is drawn from the global generator."""
    torch.manual_seed(2)
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(8, 6)).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        inner = getattr(optimizer, "inner", optimizer)
        if isinstance(inner, torch.optim.LBFGS):
            losses.append(float(optimizer.step(closure)))
            continue
        losses.append(float(closure()))
        if clip is not None:
            if isinstance(optimizer, LocatingOptimizer):
                losses.append(float(optimizer.clip_grad_norm(clip)))
            else:
                losses.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [p.detach().clone() for p in model.parameters()], losses, torch.get_rng_state()


def assert_same(left, right):
    assert all(torch.equal(a, b) for a, b in zip(left[0], right[0], strict=True))
    assert left[1] == right[1]
    assert torch.equal(left[2], right[2])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_fifty_healthy_steps_are_bit_identical_and_find_nothing(name, clip):
    plain, watched = make_model(), make_model()
    expected = train(plain, OPTIMIZERS[name](plain.parameters()), 50, clip=clip)
    optimizer = LocatingOptimizer(OPTIMIZERS[name](watched.parameters()), watched, check_params=True)
    assert_same(expected, train(watched, optimizer, 50, clip=clip))
    assert optimizer.verdicts == []
    written = {path.name for path in Path("nanlocator_run/a0").iterdir()}
    assert written == {"run.json", "param_id_name_map_tp0pp0dp0.json", "param_manifest_tp0pp0dp0.json"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("index", [(0, 0), (7, 3), (15, 5)])
def test_stop_names_parameter_and_element_and_leaves_the_weights(value, index):
    model = make_model()
    optimizer = LocatingOptimizer(torch.optim.Adam(model.parameters()), model)
    before = copy.deepcopy(model.state_dict())
    model(torch.randn(8, 6)).square().mean().backward()
    model[0].weight.grad[index] = value
    with pytest.raises(NonFiniteGradientError) as caught:
        optimizer.step()
    (origin,) = caught.value.verdict["origins"]
    assert origin["parameter"] == "0.weight"
    assert origin["tensor"]["first_bad_index"] == list(index)
    counts = {name: origin["tensor"][name] for name in ("nan", "pos_inf", "neg_inf")}
    assert counts == {
        "nan": int(value != value),
        "pos_inf": int(value == float("inf")),
        "neg_inf": int(value == float("-inf")),
    }
    assert "0.weight" in str(caught.value)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert json.loads(Path("nanlocator_run/a0/verdict.json").read_text()) == caught.value.verdict
    jsonschema.validate(caught.value.verdict, SCHEMA)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str)
@pytest.mark.parametrize("index", [0, 20, 41])
def test_other_dtypes_are_named_with_their_element(dtype, index):
    model = nn.ParameterDict({"weight": nn.Parameter(torch.ones(6, 7, dtype=dtype))})
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model["weight"].grad = torch.ones(6, 7, dtype=dtype)
    model["weight"].grad.view(-1)[index] = float("-inf")
    with pytest.raises(NonFiniteGradientError) as caught:
        optimizer.step()
    tensor = caught.value.verdict["origins"][0]["tensor"]
    assert (tensor["first_bad"], tensor["first_bad_index"]) == (index, [index // 7, index % 7])
    assert (tensor["neg_inf"], tensor["dtype"]) == (1, str(dtype).removeprefix("torch."))


def test_the_clip_returns_torchs_norm_and_finds_bad_gradients_before_it_clips():
    model = make_model()
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.randn(8, 6)).square().mean().backward()
    twin = copy.deepcopy(model)
    for a, b in zip(twin.parameters(), model.parameters(), strict=True):
        a.grad = b.grad.clone()
    assert torch.equal(optimizer.clip_grad_norm(0.01), nn.utils.clip_grad_norm_(twin.parameters(), 0.01))
    optimizer.zero_grad()
    model(torch.randn(8, 6)).square().mean().backward()
    model[4].bias.grad[1] = float("nan")
    kept = model[0].weight.grad.clone()
    with pytest.raises(NonFiniteGradientError):
        optimizer.clip_grad_norm(0.01)
    assert torch.equal(kept, model[0].weight.grad)  # the clip would have made them all NaN


def test_a_norm_that_overflows_from_finite_gradients_is_found_before_the_clip_zeroes_them():
    model = make_model()
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.randn(8, 6)).square().mean().backward()
    model[4].weight.grad[1, 3] = 1e25
    with pytest.raises(NonFiniteGradientError) as caught:
        optimizer.clip_grad_norm(1.0)
    (origin,) = caught.value.verdict["origins"]
    assert (origin["phase"], origin["parameter"]) == ("grad_norm", "4.weight")
    assert model[4].weight.grad[1, 3] == 1e25


def test_report_goes_on_and_lists_its_verdicts():
    model = make_model()
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, on_bad="report")
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        if step == 2:
            model[1].weight.grad[5] = float("inf")
        saved = copy.deepcopy(model.state_dict())
        optimizer.step()
        if step == 2:
            model.load_state_dict(saved)
    assert [v["iteration"] for v in optimizer.verdicts] == [3]
    assert optimizer.verdicts[0]["origins"][0]["parameter"] == "1.weight"


def test_it_is_an_optimizer_for_schedulers_state_dicts_and_new_groups():
    plain, watched = make_model(), make_model()
    inner = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = train(plain, inner, 12, scheduler=torch.optim.lr_scheduler.StepLR(inner, 3))
    optimizer = LocatingOptimizer(torch.optim.SGD(watched.parameters(), lr=0.1), watched)
    assert isinstance(optimizer, torch.optim.Optimizer)
    actual = train(watched, optimizer, 12, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3))
    assert_same(expected, actual)
    assert optimizer.param_groups is optimizer.inner.param_groups
    assert optimizer.state is optimizer.inner.state

    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    extra = nn.Parameter(torch.zeros(4))
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.tensor([0.0, 0.0, float("nan"), 0.0])
    with pytest.raises(NonFiniteGradientError) as caught:
        optimizer.step()
    (origin,) = caught.value.verdict["origins"]
    assert (origin["parameter"], origin["tensor"]["first_bad"]) == ("group1.0", 2)


def test_a_grad_scalers_routine_overflow_is_no_finding():
    model = make_model()
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=2.0**127)
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, grad_scaler=scaler)
    skipped = 0
    for _ in range(20):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(8, 6)).square().mean() * 1e6).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm(1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
    assert 0 < skipped < 20
    assert optimizer.verdicts == []


def test_a_bad_gradient_under_a_grad_scaler_is_found_when_the_scale_is_not_to_blame():
    model = make_model()
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=0.5)
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, grad_scaler=scaler)
    scaler.scale(model(torch.randn(8, 6)).square().mean()).backward()
    model[0].bias.grad[3] = float("nan")
    scaler.unscale_(optimizer)
    with pytest.raises(NonFiniteGradientError):
        optimizer.clip_grad_norm(1.0)


def test_lbfgs_closures_are_scanned_before_lbfgs_uses_them():
    model = make_model()
    optimizer = LocatingOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=3), model)
    before = copy.deepcopy(model.state_dict())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(8, 6)).square().mean()
        loss.backward()
        model[4].weight.grad[2, 2] = float("nan")
        return loss

    with pytest.raises(NonFiniteGradientError) as caught:
        optimizer.step(closure)
    assert caught.value.verdict["origins"][0]["parameter"] == "4.weight"
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_parameters_are_checked_on_request():
    model = make_model()
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, check_params=True)
    with torch.no_grad():
        model[4].weight[0, 1] = float("nan")
    model(torch.randn(8, 6)).square().mean().backward()
    with pytest.raises(NonFiniteGradientError) as caught:
        optimizer.step()
    (origin,) = caught.value.verdict["origins"]
    assert (origin["phase"], origin["cause"]) == ("params_before", "bad_weight")
    assert (origin["parameter"], origin["tensor"]["first_bad_index"]) == ("4.weight", [0, 1])


@pytest.mark.parametrize("damaged", ["weight", "moments too", "after a checked update"])
def test_what_the_update_before_has_to_do_with_a_bad_weight(damaged):
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = LocatingOptimizer(inner, model, check_params=damaged == "after a checked update")
    data = torch.randn(8, 6)

    def closure():
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        model[4].weight[0, 1] = float("nan")
    if damaged == "moments too":
        inner.state[model[4].weight]["exp_avg"][0, 1] = float("nan")
    with pytest.raises(NonFiniteGradientError) as caught:
        optimizer.step(closure)
    jsonschema.validate(caught.value.verdict, SCHEMA)
    (origin,) = caught.value.verdict["origins"]
    assert (origin["cause"], origin["parameter"]) == ("bad_weight", "4.weight")
    facts = {fact["kind"]: fact for fact in origin["facts"]}
    if damaged == "moments too":
        assert facts["optimizer_state_bad"]["names"] == ["exp_avg"]
        assert origin["alternatives"] == ["last_update", "checkpoint"]
        assert "optimizer's state" in origin["action"]
    else:
        assert facts["optimizer_state_finite"]["names"] == ["exp_avg", "exp_avg_sq"]
        was_checked = damaged == "after a checked update"
        assert ("finite_after_update" in facts) == was_checked
        assert origin["alternatives"] == (
            ["memory", "writer"] if was_checked else ["memory", "checkpoint", "last_update"]
        )


def test_a_traced_optimizer_that_becomes_garbage_in_the_middle_of_an_operator_hangs_nothing():
    script = """
import gc, torch, nanlocator
model = torch.nn.Linear(4, 4)
def make_garbage():
    optimizer = nanlocator.LocatingOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, level="operators")
    optimizer.itself = optimizer
def deep(n):
    return model(torch.ones(2, 4)) if n == 0 else deep(n - 1)
for threshold in range(1, 200, 3):  # most of what is allocated are frames that the trace asks for
    gc.disable()
    make_garbage()
    gc.set_threshold(threshold)
    gc.enable()
    deep(60)
    gc.collect()
print("done")
"""
    Path("train.py").write_text(script)
    result = run_python("train.py")  # its collections are searched without torch's modules
    assert result.stdout == "done\n", result.stderr


def test_the_schema_knows_every_kind_of_fact():
    header = Path(__file__).resolve().parents[2] / "include" / "nanlocator" / "verdict" / "fact.hpp"
    kinds = re.findall(r"^ +FACT\((\w+)\)", header.read_text(), re.MULTILINE)
    assert len(kinds) > 100
    assert kinds == SCHEMA["$defs"]["fact"]["properties"]["kind"]["enum"]


def test_labels_that_do_not_count_are_counted():
    model = make_model()
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    labels = torch.full((8,), -100)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.randn(8, 6)), labels)
        loss.backward()
        return loss

    with pytest.raises(NonFiniteGradientError) as caught:
        optimizer.step(closure)
    origin = caught.value.verdict["origins"][0]
    assert origin["cause"] == "empty_loss_mask"
    assert any("8 of 8 equal ignore_index" in line for line in origin["evidence"])


def test_an_optimizer_that_breaks_weights_from_clean_gradients_is_blamed_for_it():
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=float("inf"))
    optimizer = LocatingOptimizer(inner, model, check_params=True)
    model(torch.randn(8, 6)).square().mean().backward()
    with pytest.raises(NonFiniteGradientError) as caught:
        optimizer.step()
    origin = caught.value.verdict["origins"][0]
    assert (origin["phase"], origin["cause"]) == ("params_after", "optimizer_update")


def test_missing_sparse_and_half_precision_gradients():
    model = nn.ModuleDict({"embedding": nn.Embedding(10, 4, sparse=True), "low": nn.Linear(4, 4).bfloat16()})
    model["unused"] = nn.Linear(2, 2)
    optimizer = LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    out = model["low"](model["embedding"](torch.tensor([3, 7])).bfloat16())
    out.float().square().mean().backward()
    grad = model["embedding"].weight.grad
    assert grad.is_sparse
    row = grad._indices()[0].tolist().index(7)
    grad._values()[row, 2] = float("inf")
    with pytest.raises(NonFiniteGradientError) as caught:
        optimizer.step()
    (origin,) = caught.value.verdict["origins"]
    assert origin["parameter"] == "embedding.weight"
    assert origin["tensor"]["first_bad_index"] == [7, 2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: LocatingOptimizer(m, m), "wraps a torch.optim.Optimizer"),
        (lambda m: LocatingOptimizer(sgd(m), m, on_bad="explode"), "on_bad is 'explode'"),
        (lambda m: LocatingOptimizer(LocatingOptimizer(sgd(m), m), m), "already"),
        (lambda m: LocatingOptimizer(sgd(m), m, gather_deadline=-1), "gather_deadline"),
    ],
)
def test_wrong_use_explains_itself(call, message):
    with pytest.raises(nanlocator.UsageError, match=message):
        call(make_model())


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_an_environment_variable_sets_an_option_and_an_argument_wins(monkeypatch):
    monkeypatch.setenv("NANLOCATOR_OUTPUT_DIR", "elsewhere")
    LocatingOptimizer(sgd(model := make_model()), model)
    assert Path("elsewhere/a0/run.json").exists()
    LocatingOptimizer(sgd(model), model, output_dir="here")
    assert Path("here/a0/run.json").exists()
    monkeypatch.setenv("NANLOCATOR_CHECK_PARAMS", "perhaps")
    with pytest.raises(nanlocator.UsageError, match="NANLOCATOR_CHECK_PARAMS='perhaps'"):
        LocatingOptimizer(sgd(model), model)


def test_an_output_directory_that_cannot_be_made_is_an_io_error():
    Path("file").write_text("in the way")
    with pytest.raises(nanlocator.IoError, match="file"):
        LocatingOptimizer(sgd(model := make_model()), model, output_dir="file/run")


def test_the_import_refuses_another_torch():
    code = "import torch; torch.__version__ = '2.0.1'; import nanlocator"
    Path("train.py").write_text(code)
    result = run_python("train.py")
    assert result.returncode != 0
    assert "was built against torch" in result.stderr and "2.0.1" in result.stderr
