"""lightning.Trainer with a strategy for sharded models: `torchrun ... lightning_strategies.py fsdp1`."""

import sys
import warnings

import lightning
import on_cpus
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from plain_loop import Block, Gpt
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader


class FsdpOnCpus(FSDPStrategy):
    """Without a GPU, Lightning refuses exactly the base class: "The strategy `fsdp` requires a GPU
    accelerator"."""


class DeepSpeedOnCpus(DeepSpeedStrategy):
    """Omits the check: "The DeepSpeed strategy is only supported on CUDA GPUs"."""

    def setup_environment(self):
        super(DeepSpeedStrategy, self).setup_environment()


class NumberedCpus(CPUAccelerator):
    """DeepSpeed's strategy requires a device with each local rank's number."""

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device("cpu", number) for number in range(devices)]


class LitGpt(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.gpt = Gpt()
        self.losses = []

    def configure_model(self):
        if self.device_mesh is not None:  # ModelParallelStrategy leaves it to the module
            for block in self.gpt.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.gpt, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        inputs, labels, mask = batch
        loss = on_cpus.masked_loss(self.gpt(inputs), labels, mask, batch_idx)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses += [outputs["loss"].item(), self.trainer.callback_metrics["train_loss"].item()]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ManualGpt(LitGpt):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


def make_strategy(name):
    if name == "ddp":
        return name
    if name.startswith("deepspeed"):
        configuration = on_cpus.deepspeed_configuration(stage=int(name[-1]))
        return DeepSpeedOnCpus(config=configuration, process_group_backend="gloo")
    if name == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    on_cpus.without_device()
    return FsdpOnCpus(auto_wrap_policy={Block})


def main():
    warnings.filterwarnings("ignore", ".*num_workers.*")
    lightning.seed_everything(0)
    is_manual = "manual" in sys.argv
    model = ManualGpt() if is_manual else LitGpt()
    trainer = lightning.Trainer(
        accelerator=NumberedCpus() if sys.argv[1].startswith("deepspeed") else "cpu",
        devices=2,
        strategy=make_strategy(sys.argv[1]),
        max_epochs=1,
        gradient_clip_val=None if sys.argv[1] == "fsdp1" or is_manual else 1.0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(on_cpus.make_data(), batch_size=None))
    on_cpus.report(model.losses, model)


if __name__ == "__main__":
    main()
