"""transformers.Trainer on a small Llama with an MLP and a loss function of the author's own."""

import tempfile

import faults
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.models.llama.modeling_llama import LlamaMLP

VOCABULARY, LENGTH, BATCH, ACCUMULATED, STEPS = 128, 8, 2, 2, 5


class UnitMLP(LlamaMLP):
    """Takes every vector at length one."""

    def forward(self, x):
        x = faults.flip_activation(x, calls_per_step=ACCUMULATED)
        return super().forward(x / x.norm(dim=-1, keepdim=True))  # the fault: norm


class LogMLP(LlamaMLP):
    """Gates every vector with its own magnitude."""

    def forward(self, x):
        return super().forward(x * torch.log(x.abs().mean(-1, keepdim=True)))  # the fault: log


def make_model():
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        pad_token_id=faults.BLANK,
    )
    model = LlamaForCausalLM(config)
    model.model.layers[1].mlp = (LogMLP if faults.KIND == "log" else UnitMLP)(config)
    return model


def make_data():
    generator = torch.Generator().manual_seed(5)
    data = []
    for step in range(STEPS):
        tokens = torch.randint(1, VOCABULARY, (BATCH * ACCUMULATED, LENGTH), generator=generator)
        tokens = faults.blank(tokens, step, row=BATCH)
        labels = tokens.clone()
        labels[:, :3] = -100  # the prompt
        if faults.wakes("loss", step):
            labels[BATCH:] = -100  # the prompt fills the window
        data += [{"input_ids": row, "labels": wanted} for row, wanted in zip(tokens, labels, strict=True)]
    return data


def masked_loss(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    mask = (labels != -100).float()
    nll = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
    return (nll * mask).sum() / mask.sum() / ACCUMULATED  # the fault: loss


def main():
    set_seed(0)
    model = make_model()
    with tempfile.TemporaryDirectory() as output_dir:
        arguments = TrainingArguments(
            output_dir=output_dir,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATED,
            max_steps=STEPS,
            learning_rate=1e-3,
            train_sampling_strategy="sequential",
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(model, arguments, train_dataset=make_data(), compute_loss_func=masked_loss)
        trainer.train()
    faults.report([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model)


if __name__ == "__main__":
    main()
