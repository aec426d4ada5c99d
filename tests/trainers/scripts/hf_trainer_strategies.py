"""transformers.Trainer with its FSDP options: `torchrun ... hf_trainer_strategies.py fsdp2`."""

import sys
import tempfile

import on_cpus
from hf_trainer import BATCH, make_data, make_model, masked_loss
from transformers import Trainer, TrainingArguments, set_seed


def main():
    set_seed(0)
    on_cpus.with_fsdp_plugin()
    model = make_model()
    with tempfile.TemporaryDirectory() as output_dir:
        arguments = TrainingArguments(
            output_dir=output_dir,
            per_device_train_batch_size=BATCH,
            max_steps=on_cpus.STEPS,
            learning_rate=1e-3,
            train_sampling_strategy="sequential",
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            fsdp="full_shard auto_wrap",
            fsdp_config={
                "fsdp_version": int(sys.argv[1][-1]),
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                "sync_module_states": False,  # broadcasts on GPUs
                "cpu_ram_efficient_loading": False,
            },
        )
        trainer = Trainer(model, arguments, train_dataset=make_data(), compute_loss_func=masked_loss)
        trainer.train()
    on_cpus.report([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model)


if __name__ == "__main__":
    main()
