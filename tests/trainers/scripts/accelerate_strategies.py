"""A loop of accelerate with a plugin for sharded models: `torchrun ... accelerate_strategies.py fsdp1`."""

import sys

import on_cpus
import torch
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import set_seed
from plain_loop import Gpt


def make_plugin(name):
    if name.startswith("deepspeed"):
        configuration = on_cpus.deepspeed_configuration(stage=int(name[-1]))
        return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=configuration)}
    on_cpus.with_fsdp_plugin()
    return {
        "fsdp_plugin": FullyShardedDataParallelPlugin(
            fsdp_version=int(name[4]),
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
        )
    }


def main():
    set_seed(0)
    PartialState(cpu=True)
    accelerator = Accelerator(**make_plugin(sys.argv[1]))
    model = Gpt()
    if sys.argv[1:] == ["fsdp1"]:  # the optimizer must hold the flat parameters
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
    else:
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for step, (inputs, labels, mask) in enumerate(on_cpus.make_data()):
        loss = on_cpus.masked_loss(model(inputs), labels, mask, step)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    on_cpus.report(losses, model)


if __name__ == "__main__":
    main()
