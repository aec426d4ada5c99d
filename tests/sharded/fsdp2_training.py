"""``Training`` with ``fully_shard``, in its variants."""

from unittest import mock

import torch
from sharded_training import Training, mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

POLICIES = {
    "mixed_precision": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
    "kept_after_forward": {"reshard_after_forward": False},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}
SUMS = {"float16_sums": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}}
VARIANTS = (
    "plain",
    *POLICIES,
    "one_group",
    "accumulation",
    "two_backwards",
    "frozen",
    "checkpointed",
    "columns",
)


def shard(net, variant):
    """Variants that begin with hsdp: two times two ranks."""
    options = dict((POLICIES | SUMS).get(variant.removeprefix("hsdp_"), {}))
    if variant.startswith("hsdp"):
        options["mesh"] = mesh(2, 2, names=("dp_replicate", "dp_shard"))
    if variant == "columns":
        options["shard_placement_fn"] = lambda p: (
            torch.distributed.tensor.Shard(1) if p.ndim == 2 and p.shape[1] % 2 == 0 else None
        )
    if variant != "one_group":
        for module in (net.body, net.middle, net.head):
            fully_shard(module, **options)
    return fully_shard(net, **options)


class Fsdp2(Training):
    """Faults ``before`` and ``after``: bits of ``parameter``'s gradient change before or after its
    reduction."""

    def __init__(self, rank, variant, fault=None, culprits=(1,), parameter="head.weight"):
        super().__init__(rank, shard, variant, fault, culprits)
        self.parameter = parameter
        self.sharded = dict(self.net.named_parameters())[parameter]

    def planted(self):
        original = _fsdp_param_group.foreach_reduce

        def foreach_reduce(params, gradients, *args, **kwargs):
            for each, gradient in zip(params, gradients, strict=True):
                if each.sharded_param is self.sharded:
                    self.corrupt_once(gradient, "before")
            result = original(params, gradients, *args, **kwargs)
            gradient = self.sharded.grad
            if gradient is not None and any(each.sharded_param is self.sharded for each in params):
                self.corrupt_once(gradient.to_local(), "after")
            return result

        return mock.patch.object(_fsdp_param_group, "foreach_reduce", foreach_reduce)

    def backwards(self):
        if self.variant == "accumulation":
            self.model.set_requires_gradient_sync(False)
            self.model.set_is_last_backward(False)
            self.loss().backward()
            self.model.set_requires_gradient_sync(True)
            self.model.set_is_last_backward(True)
        if self.variant in ("two_backwards", "hsdp_accumulation"):
            if self.variant == "hsdp_accumulation":
                self.model.set_requires_all_reduce(False)
            self.loss().backward()
            if self.variant == "hsdp_accumulation":
                self.model.set_requires_all_reduce(True)
        super().backwards()
