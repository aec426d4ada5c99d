"""Healthy checkpoints raise nothing; the magnitudes that do, and those that just do not."""

import math
from datetime import timedelta

import pytest
import torch
import transformers
from checkpoints import contents, found
from safetensors.torch import save_file
from tiny_models import language_model
from torch import nn

from nanlocator import check_checkpoint
from nanlocator.check_checkpoint.content import finite_of

_SMALL = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)
FAMILIES = {
    "gpt2": lambda: language_model("gpt2"),
    "llama": lambda: language_model("llama"),
    "bert": lambda: language_model("bert"),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=4, num_heads=4)
    ),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**_SMALL)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **_SMALL)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_SMALL)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(head_dim=8, **_SMALL)),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            **{key: value for key, value in _SMALL.items() if key != "num_key_value_heads"}
        )
    ),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=64,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            word_embed_proj_dim=32,
        )
    ),
    "mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=4, state_size=8)
    ),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=16,
            patch_size=8,
        )
    ),
    "wav2vec2": lambda: transformers.Wav2Vec2ForCTC(
        transformers.Wav2Vec2Config(
            vocab_size=16,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            conv_dim=(16, 16),
            conv_stride=(4, 2),
            conv_kernel=(8, 4),
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2,
        )
    ),
}
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters),
    "AMSGrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, max_iter=2),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_model_raises_nothing(tmp_path, family, dtype):
    """Every buffer too, those that a state_dict leaves out: rotary frequencies, masks, position ids."""
    model = FAMILIES[family]().to(dtype)
    torch.save({"model": model.state_dict(), "buffers": dict(model.named_buffers())}, tmp_path / "a.pt")
    report = check_checkpoint(tmp_path / "a.pt")
    assert report.exit_code == 0, report.checkpoints[0].findings or report.checkpoints[0].unread


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_states_raise_nothing(tmp_path, name):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4)))
    optimizer = OPTIMIZERS[name](model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)  # its best begins at Inf
    scaler = torch.amp.GradScaler("cpu")
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": schedule.state_dict(),
    }
    torch.save(
        {**state, "scaler": scaler.state_dict(), "rng_state": torch.get_rng_state()}, tmp_path / "a.pt"
    )
    assert found(tmp_path / "a.pt") == set()
    assert contents(tmp_path / "a.pt") == ("finite", "finite")


MASKS = {
    "causal": torch.full((1, 1, 6, 6), -math.inf).triu(1),
    "attn_mask": torch.full((3,), -math.inf),
    "alibi": torch.cat([-torch.arange(4.0), torch.full((4,), -math.inf)]),
    "filler": torch.full((6, 6), torch.finfo(torch.float32).min).triu(1),
    "filler16": torch.full((6, 6), torch.finfo(torch.float16).min, dtype=torch.float16).triu(1),
    "filler64": torch.full((6, 6), torch.finfo(torch.float64).min, dtype=torch.float64).triu(1),
    "masked_bias": torch.tensor(-1e9),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_masks_infinities_are_meant(tmp_path, name):
    save_file({f"h.0.attn.{name}": MASKS[name], "w": torch.ones(2)}, tmp_path / "a.safetensors")
    assert found(tmp_path / "a.safetensors") == set()


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([0.0, -math.inf, 1.0]),  # not a mask's other values
        torch.tensor([0.0, math.inf]),
        torch.tensor([0.0, -math.inf, math.nan]),
        torch.full((2,), -math.inf),
    ],
    ids=str,
)
def test_what_is_not_a_mask_is_a_finding(tmp_path, values):
    save_file({"h.0.mlp.weight": values}, tmp_path / "a.safetensors")
    assert [kind for kind, _, _ in found(tmp_path / "a.safetensors")] == ["nonfinite"]


def test_a_mask_among_the_moments_is_none(tmp_path):
    torch.save(
        {"optimizer": {"state": {0: {"exp_avg": torch.tensor([0.0, -math.inf])}}, "param_groups": []}},
        tmp_path / "a.pt",
    )
    assert contents(tmp_path / "a.pt") == ("none", "bad")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_number_within_a_factor_of_two_of_the_types_largest_is_a_finding(tmp_path, dtype):
    largest = torch.finfo(dtype).max
    for value, is_found in (
        (largest * 0.6, True),
        (-largest * 0.6, True),
        (largest * 0.4, False),
        (largest, True),
    ):
        save_file({"w": torch.tensor([0.1, value, 1.0]).to(dtype)}, tmp_path / "a.safetensors")
        kinds = [kind for kind, _, _ in found(tmp_path / "a.safetensors")]
        assert kinds == (["near_limit"] if is_found else []), value


def test_scaled_8_bit_weights_reach_their_largest_number(tmp_path):
    values = torch.tensor([448.0, -448.0, 3.0]).to(torch.float8_e4m3fn)
    save_file({"w": values, "w_scale": torch.ones(1)}, tmp_path / "a.safetensors")
    assert found(tmp_path / "a.safetensors") == set()


def _layers(largest):
    weights = {f"layers.{number}.w": torch.linspace(-0.1, 0.1, 10) for number in range(len(largest))}
    for number, value in enumerate(largest):
        weights[f"layers.{number}.w"][4] = value
    return weights


@pytest.mark.parametrize(
    ("largest", "outliers"),
    [
        ([0.1, 0.1, 1e30, 0.1], {2}),
        ([0.1, 1e6, 1e6, 0.1, 0.1], {1, 2}),
        ([0.1, 0.1, 900.0, 0.1], set()),  # 9,000 times the others
        ([1e-6, 1e-6, 1.0, 1e-6], set()),
        ([0.1, 1e6], set()),  # which of two is usual?
    ],
)
def test_a_weight_far_beyond_its_namesakes_is_a_finding(tmp_path, largest, outliers):
    weights = _layers(largest)
    if largest[0] == 1e-6:  # biases that have barely moved beside one that has
        weights = {name: torch.full((4,), value) for name, value in zip(weights, largest, strict=True)}
    save_file(weights, tmp_path / "a.safetensors")
    assert found(tmp_path / "a.safetensors") == {("outlier", f"layers.{n}.w", None) for n in outliers}


def test_for_the_engine_an_absurd_magnitude_is_neither_finite_nor_proof(tmp_path):
    save_file(_layers([0.1, 0.1, 1e30, 0.1]), tmp_path / "suspect.safetensors")
    save_file(_layers([0.1, 0.1, math.nan, 0.1]), tmp_path / "bad.safetensors")
    save_file(_layers([0.1, 0.1, 0.1, 0.1]), tmp_path / "good.safetensors")
    minute = timedelta(minutes=1)
    assert finite_of(tmp_path / "suspect.safetensors", minute)[:2] == (
        None,
        "layers.2.w has an absurd magnitude",
    )
    assert finite_of(tmp_path / "bad.safetensors", minute)[:2] == (False, "layers.2.w holds NaN")
    assert finite_of(tmp_path / "good.safetensors", minute)[0] is True


def test_tensors_whose_names_end_in_numbers_are_no_namesakes(tmp_path):
    weights = {f"mlp.{name}.weight": torch.full((4,), value) for name, value in
               [("fc1", 0.01), ("fc2", 0.01), ("fc3", 0.01), ("fc4", 1e6)]}  # fmt: skip
    save_file(weights, tmp_path / "a.safetensors")
    assert found(tmp_path / "a.safetensors") == set()


def test_moments_of_layers_may_differ_by_orders_of_magnitude(tmp_path):
    state = {number: {"exp_avg_sq": torch.full((4,), 10.0 ** (4 * number - 12))} for number in range(6)}
    torch.save({"optimizer": {"state": state, "param_groups": []}}, tmp_path / "a.pt")
    assert found(tmp_path / "a.pt") == set()


def test_zero_initialised_weights_that_grow_are_no_finding(tmp_path):
    for name, value in (("checkpoint-1", 1e-9), ("checkpoint-2", 1.0)):
        (tmp_path / name).mkdir()
        save_file({"lora_B.weight": torch.full((4,), value)}, tmp_path / name / "model.safetensors")
    assert found(tmp_path) == set()
