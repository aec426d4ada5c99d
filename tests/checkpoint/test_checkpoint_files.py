"""Single files of torch.save and safetensors: what is found in them, and where."""

import io
import math

import pytest
import torch
from checkpoints import contents, found, trained
from safetensors.torch import save_file

from nanlocator import check_checkpoint

FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


def statistics_of(path, name, **options):
    (checkpoint,) = check_checkpoint(path, parameters=[name], **options).checkpoints
    (row,) = (each for each in checkpoint.tensors if each.is_selected)
    return row.statistics


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("maps_files", [True, False])
def test_a_bad_weight_and_a_bad_moment_are_found_with_their_elements(tmp_path, is_zip, maps_files):
    model, optimizer = trained()
    file = tmp_path / "step.pt"

    def save():
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
        torch.save(state, file, _use_new_zipfile_serialization=is_zip)

    save()
    assert found(file, maps_files=maps_files) == set()
    assert contents(file, maps_files=maps_files) == ("finite", "finite")
    model[2].weight.data[3, 5] = math.nan
    save()
    assert found(file, maps_files=maps_files) == {("nonfinite", "model.2.weight", (3, 5))}
    assert contents(file, maps_files=maps_files) == ("bad", "finite")
    optimizer.state[model[0].bias]["exp_avg_sq"][7] = -math.inf
    save()
    assert ("nonfinite", "optimizer.state.1.exp_avg_sq", (7,)) in found(file, maps_files=maps_files)
    assert contents(file, maps_files=maps_files) == ("bad", "bad")


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("kind", ["torch.save", "safetensors"])
def test_a_nan_is_found_in_every_floating_point_type(tmp_path, dtype, kind):
    values = torch.linspace(-2, 2, 33).reshape(3, 11)
    values[2, 7] = math.nan
    tensors = {"odd": torch.ones(3, dtype=torch.uint8), "w": values.to(dtype), "n": torch.arange(5)}
    if kind == "torch.save":
        torch.save(tensors, tmp_path / "a.pt")
        file = tmp_path / "a.pt"
    else:
        save_file(tensors, tmp_path / "a.safetensors")
        file = tmp_path / "a.safetensors"
    for maps_files in (False, True):
        assert found(file, maps_files=maps_files) == {("nonfinite", "w", (2, 7))}


def test_both_parts_of_a_complex_tensor_are_looked_at(tmp_path):
    values = torch.zeros(4, 3, dtype=torch.complex64)
    values[2, 1] = complex(0, math.inf)
    torch.save({"rope": values}, tmp_path / "a.pt")
    assert found(tmp_path / "a.pt") == {("nonfinite", "rope", (2, 1))}


def test_the_statistics_are_those_that_torch_computes(tmp_path):
    values = torch.randn(3, 1_500_000)  # several blocks
    values[0, :100] = 0
    values[1, 1_400_000] = math.inf
    values[2, 3] = math.nan
    torch.save({"w": values}, tmp_path / "a.pt")
    s = statistics_of(tmp_path / "a.pt", "w")
    finite = values[values.isfinite()].double()
    assert (s.numel, s.nan, s.pos_inf, s.neg_inf, s.zeros) == (4_500_000, 1, 1, 0, int((values == 0).sum()))
    assert s.first_bad == (1, 1_400_000)
    assert (s.minimum, s.maximum, s.absmax) == (finite.min(), finite.max(), finite.abs().max())
    assert s.rms == pytest.approx(float(finite.square().mean().sqrt()), rel=1e-12)


def test_integers_are_measured_only_on_request(tmp_path):
    torch.save({"ids": torch.arange(-5, 10)}, tmp_path / "a.pt")
    s = statistics_of(tmp_path / "a.pt", "id*")
    assert (s.minimum, s.maximum, s.zeros) == (-5, 9, 1)
    (checkpoint,) = check_checkpoint(tmp_path / "a.pt").checkpoints
    assert checkpoint.bytes_read == 0 and checkpoint.contents["weights"] == "finite"


def _strided(size):
    """Views of one storage, none of which is contiguous, and a bad element of each."""
    base = torch.arange(float(size * size)).reshape(size, size)
    return {
        "transposed": (base.clone().t(), (2, 3)),
        "every other": (base.clone()[:, ::2], (3, 1)),
        "column": (base.clone()[:, 2], (4,)),
        "permuted": (base.clone().reshape(size // 2, 2, size).permute(2, 0, 1), (1, 2, 1)),
        "inner": (base.clone()[1:-1, 1:-1], (2, 2)),
    }


@pytest.mark.parametrize("size", [8, 1500])  # in one block, in several
def test_views_are_read_as_the_tensors_that_they_are(tmp_path, size):
    for name, (view, index) in _strided(size).items():
        copy = view.clone()
        view[index] = math.nan
        copy[index] = math.nan
        torch.save({"w": view}, tmp_path / "a.pt")
        s = statistics_of(tmp_path / "a.pt", "w")
        finite = copy[copy.isfinite()]
        assert s.first_bad == index, name
        assert (s.nan, s.numel, s.absmax) == (1, copy.numel(), finite.abs().max()), name
        assert s.sum_of_squares == pytest.approx(float(finite.double().square().sum())), name


def test_a_bad_element_beside_a_view_is_not_the_views(tmp_path):
    base = torch.ones(6, 6)
    base[0, 0] = math.nan
    torch.save({"w": base[2:4, 1:3]}, tmp_path / "a.pt")
    assert found(tmp_path / "a.pt") == set()


def test_an_expanded_tensor_is_read_once(tmp_path):
    torch.save({"w": torch.ones(1, 3).expand(1 << 20, 3)}, tmp_path / "a.pt")
    assert statistics_of(tmp_path / "a.pt", "w").numel == 3


def test_tied_weights_are_read_once_and_reported_under_both_names(tmp_path):
    weight = torch.ones(1000, 10)
    weight[5, 5] = math.nan
    torch.save({"wte.weight": weight, "lm_head.weight": weight}, tmp_path / "a.pt")
    (checkpoint,) = check_checkpoint(tmp_path / "a.pt").checkpoints
    assert {each.tensor.name for each in checkpoint.findings} == {"wte.weight", "lm_head.weight"}
    assert checkpoint.bytes_read == checkpoint.bytes_in_all == 40_000


def test_tensors_inside_of_objects_are_found_and_nothing_of_the_objects_is_run(tmp_path):
    holder = torch.nn.Linear(2, 2)
    holder.weight.data[1, 0] = math.nan
    holder.note = torch.optim.SGD
    torch.save(
        {"whole": holder, "sparse": torch.eye(3).mul(math.inf).nan_to_num(0, math.inf).to_sparse()},
        tmp_path / "a.pt",
    )
    names = {name for _, name, _ in found(tmp_path / "a.pt")}
    assert names == {"whole._parameters.weight", "sparse.1.1"}


def test_a_file_inside_of_a_file_is_read(tmp_path):
    """As TransformerEngine keeps its extra state."""
    inner = io.BytesIO()
    torch.save({"amax_history": torch.tensor([1.0, math.nan])}, inner)
    torch.save({"layer._extra_state": inner}, tmp_path / "a.pt")
    ((_, name, index),) = found(tmp_path / "a.pt")
    assert name.startswith("layer._extra_state") and name.endswith("amax_history") and index == (1,)


def test_a_learning_rate_of_nan_is_of_the_optimizer(tmp_path):
    _, optimizer = trained()
    optimizer.param_groups[0]["lr"] = math.nan
    torch.save(optimizer.state_dict(), tmp_path / "a.pt")
    assert found(tmp_path / "a.pt") == {("nonfinite", "param_groups.0.lr", ())}
    assert contents(tmp_path / "a.pt") == ("none", "bad")


def test_what_is_neither_weight_nor_optimizer_is_a_note(tmp_path):
    """Lightning's EarlyStopping begins with a best score of Inf."""
    state = {
        "state_dict": {"w": torch.ones(3)},
        "callbacks": {"EarlyStopping": {"best_score": torch.tensor(math.inf)}},
    }
    torch.save(state, tmp_path / "a.ckpt")
    (checkpoint,) = check_checkpoint(tmp_path / "a.ckpt").checkpoints
    assert checkpoint.is_safe and "best_score" in checkpoint.notes[0]


def test_master_weights_are_weights(tmp_path):
    """They overwrite the model's in the next step."""
    bad = torch.tensor([1.0, math.nan])
    torch.save(
        {"optimizer": {"fp32_from_fp16_params": [[bad]], "optimizer": {"state": {}}}}, tmp_path / "a.pt"
    )
    assert contents(tmp_path / "a.pt") == ("bad", "none")


def test_a_plain_glob_matches_the_ends_of_names(tmp_path):
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    (checkpoint,) = check_checkpoint(tmp_path / "a.pt", parameters=["2.weight", "*exp_avg"]).checkpoints
    selected = {each.name for each in checkpoint.tensors if each.is_selected}
    assert "model.2.weight" in selected and len(selected) == 9
