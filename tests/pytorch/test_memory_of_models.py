"""Models of transformers whose fresh memory is full of NaN, as after a bad step: a read of unwritten memory
would show, and only planted faults are found."""

import pytest
import torch
import transformers
from behind_torch import write_behind
from kernel_models import kernels
from tiny_models import BATCH, VOCABULARY, batch, language_model
from watched_steps import verdict_of_steps

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}


def model_of(name, **changes):
    model = getattr(transformers, name)
    return model(model.config_class(**SMALL | changes))


def images(labels=4):
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.arange(BATCH) % labels}


def sound():
    return {"input_values": torch.randn(BATCH, 800), "labels": torch.tensor([[3, 4], [5, 6]])}


MODELS = {
    "gpt2": (lambda: language_model("gpt2"), batch),
    "bert": (lambda: language_model("bert", "sdpa"), batch),
    "t5": (lambda: language_model("t5"), batch),
    "llama": (lambda: language_model("llama", "sdpa"), batch),
    "mixtral": (lambda: language_model("mixtral"), batch),
    "mamba": (lambda: model_of("MambaForCausalLM"), batch),
    "deepseek": (
        lambda: model_of(
            "DeepseekV3ForCausalLM",
            **EXPERTS,
            num_key_value_heads=4,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        ),
        batch,
    ),
    "gpt-oss": (lambda: model_of("GptOssForCausalLM", num_local_experts=4, head_dim=8), batch),
    "qwen3-next": (
        lambda: model_of(
            "Qwen3NextForCausalLM",
            **EXPERTS,
            num_experts=4,
            head_dim=8,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention"],
        ),
        batch,
    ),
    "longformer": (
        lambda: model_of("LongformerForMaskedLM", attention_window=4, max_position_embeddings=64),
        batch,
    ),
    "vit": (
        lambda: model_of("ViTForImageClassification", image_size=32, patch_size=8, num_labels=4),
        images,
    ),
    "wav2vec2": (
        lambda: model_of(
            "Wav2Vec2ForCTC", conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), mask_time_length=4,
            num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, ctc_loss_reduction="mean",
            num_feat_extract_layers=2,
        ),
        sound,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def spoilt_memory():
    kernels.spoil_memory(True)
    if torch.get_default_device().type != "cpu":  # the allocator's free blocks of the test
        del [torch.full((2**exponent,), torch.nan) for exponent in range(7, 20) for _ in range(32)][:]
    yield
    kernels.spoil_memory(False)


def verdict_of(name, spoilt=lambda loss: loss, corrupt=lambda model: None, **options):
    make, draw = MODELS[name]
    torch.manual_seed(0)
    model = make().train().to(torch.get_default_device())
    return verdict_of_steps(
        model, lambda: spoilt(model(**draw()).loss), corrupt=lambda: corrupt(model), **options
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_healthy_model_reads_nothing_that_was_not_written(name, capfd):
    assert verdict_of(name, rerun="always") is None
    if (
        torch.get_default_device().type == "cpu"
    ):  # on a GPU, longformer's backward adds in a different order each time
        assert "other bits" not in capfd.readouterr().err


# In this order: a model that reads only weights, experts that are filled one by one, windows that are cut out
# of a longer sequence, and a mask in fresh memory.
USUAL = ("gpt2", "mixtral", "longformer", "wav2vec2")
each_model = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in USUAL else pytest.mark.exhaustive) for name in MODELS]
)


@each_model
def test_an_overflow_is_no_memory_that_nobody_wrote(name):
    """The step is re-run with 1 in fresh memory."""
    (origin,) = verdict_of(name, lambda loss: torch.exp(loss * 1000))["origins"]
    assert (origin["operator"], origin["cause"]) == ("aten::exp", "operator_overflow")


@each_model
def test_what_is_gone_is_no_memory_that_nobody_wrote(name):
    """The step is re-run with NaN in fresh memory."""

    def corrupt(model):
        gradient = next(p.grad for p in model.parameters() if p.grad is not None)
        write_behind(gradient, 0, float("nan"))

    verdict = verdict_of(name, corrupt=corrupt)
    (origin,) = verdict["origins"]
    assert origin["cause"] in ("not_reproduced", "memory_corruption"), origin
    assert "nan_memory" in [each["variant"] for each in verdict["rerun"]["variants"]], verdict["rerun"]
