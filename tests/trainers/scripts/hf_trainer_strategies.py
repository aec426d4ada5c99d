"""transformers.Trainer with its FSDP options: `torchrun ... hf_trainer_strategies.py fsdp2`."""

import functools
import sys

import on_cpus
import tiny_llama
from hf_trainer import BATCH, UnitMLP, make_data, masked_loss
from transformers import Trainer, TrainingArguments, set_seed


def main():
    set_seed(0)
    on_cpus.with_fsdp_plugin()
    model = tiny_llama.make_model(UnitMLP)
    losses = tiny_llama.train(
        functools.partial(Trainer, model, train_dataset=make_data(), compute_loss_func=masked_loss),
        TrainingArguments,
        per_device_train_batch_size=BATCH,
        max_steps=on_cpus.STEPS,
        train_sampling_strategy="sequential",
        fsdp="full_shard auto_wrap",
        fsdp_config={
            "fsdp_version": int(sys.argv[1][-1]),
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "sync_module_states": False,  # broadcasts on GPUs
            "cpu_ram_efficient_loading": False,
        },
    )
    on_cpus.report(losses, model)


if __name__ == "__main__":
    main()
