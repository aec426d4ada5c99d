"""A loop of lightning.Fabric with a strategy for sharded models: `... fabric_strategies.py fsdp1`."""

import sys

import on_cpus
import torch
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.accelerators import CPUAccelerator
from lightning.fabric.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from plain_loop import Block, Gpt
from torch.distributed.fsdp import fully_shard


class FsdpOnCpus(FSDPStrategy):
    """Without a GPU, Fabric refuses exactly the base class: "You selected the FSDP strategy but FSDP is only
    available on GPU"."""


class DeepSpeedOnCpus(DeepSpeedStrategy):
    """Omits the check: "The DeepSpeed strategy is only supported on CUDA GPUs"."""

    def setup_environment(self):
        super(DeepSpeedStrategy, self).setup_environment()


class NumberedCpus(CPUAccelerator):
    """DeepSpeed's strategy requires a device with each local rank's number."""

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device("cpu", number) for number in range(devices)]


def shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def make_strategy(name):
    if name.startswith("deepspeed"):
        configuration = on_cpus.deepspeed_configuration(stage=int(name[-1]))
        return DeepSpeedOnCpus(config=configuration, process_group_backend="gloo")
    if name == "fsdp2":
        return ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    on_cpus.without_device()
    return FsdpOnCpus(auto_wrap_policy={Block})


def main():
    seed_everything(0)
    accelerator = NumberedCpus() if sys.argv[1].startswith("deepspeed") else "cpu"
    fabric = Fabric(accelerator=accelerator, devices=2, strategy=make_strategy(sys.argv[1]))
    fabric.launch()
    model = Gpt()
    if sys.argv[1] == "fsdp2":  # the optimizer must hold the shards
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    else:
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for step, (inputs, labels, mask) in enumerate(on_cpus.make_data()):
        loss = on_cpus.masked_loss(model(inputs), labels, mask, step)
        fabric.backward(loss)
        if not sys.argv[1].startswith("deepspeed"):  # DeepSpeed clips by itself
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    on_cpus.report(losses, model)


if __name__ == "__main__":
    main()
