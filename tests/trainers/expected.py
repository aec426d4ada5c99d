"""The faults of each script, and their births: operator, phase and module (None: outside of the model). The
faulty line, in the script or in tiny_llama.py, ends with ``# the fault: KIND``. "once" has no operator."""

from typing import NamedTuple


class Birth(NamedTuple):
    operator: str | None
    phase: str
    module: str | None


def norm(module):
    return Birth("aten::div", "forward", module)


def sqrt(module):
    return Birth("aten::sqrt", "backward", module)


def log(module):
    return Birth("aten::log", "forward", module)


LOSS = Birth("aten::div", "loss", None)
GRADIENT, ACTIVATION = Birth(None, "grad_local", None), Birth(None, "forward", None)

FAULTS = {
    "plain_loop": {
        "norm": norm("blocks.1.norm"),
        "log": log("blocks.1.norm"),
        "loss": LOSS,
        "once": GRADIENT,
    },
    # norm: in the generator; sqrt: in the discriminator.
    "gan": {
        "norm": norm("mapping.0"),
        "sqrt": sqrt("deviation"),
        "loss": Birth("aten::log", "loss", None),
        "once": GRADIENT,
    },
    # sqrt: the row is zeros in every layer, and backward reaches this one first.
    "torchtune_style": {
        "sqrt": sqrt("layers.1.mlp_norm"),
        "log": log("layers.0.gate"),
        "loss": LOSS,
        "once": GRADIENT,
    },
    "hf_trainer": {
        "norm": norm("model.layers.1.mlp"),
        "log": log("model.layers.1.mlp"),
        "loss": LOSS,
        "once": ACTIVATION,
    },
    "trl_sft": {
        "norm": norm("model.layers.1.mlp"),
        "log": log("model.layers.1.mlp"),
        "loss": LOSS,
        "once": ACTIVATION,
    },
    # log: also in the frozen reference, after the policy.
    "trl_dpo": {"sqrt": sqrt("model.layers.1.mlp"), "log": log("model.layers.1.mlp"), "once": ACTIVATION},
    # loss: in the advantages, which have no gradient.
    "trl_grpo": {
        "sqrt": sqrt("model.layers.0.mlp"),
        "loss": LOSS._replace(phase="forward"),
        "once": ACTIVATION,
    },
    "accelerate_loop": {"norm": norm("pooling"), "log": log("pooling"), "loss": LOSS, "once": ACTIVATION},
    # loss: in the LightningModule's training_step.
    "lightning_trainer": {
        "sqrt": sqrt("model.norm"),
        "log": log("model.norm"),
        "loss": LOSS,
        "once": ACTIVATION,
    },
    "lightning_fabric": {"norm": norm("prepare"), "log": log("prepare"), "loss": LOSS, "once": ACTIVATION},
    "peft_lora": {
        "norm": norm("base_model.model.model.layers.0.mlp"),
        "log": log("base_model.model.model.layers.0.mlp"),
        "loss": LOSS,
        "once": ACTIVATION,
    },
    "verl_style": {"sqrt": sqrt("model.layers.0.self_attn.v_proj"), "loss": LOSS, "once": GRADIENT},
}
