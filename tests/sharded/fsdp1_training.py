"""``Training`` with ``FullyShardedDataParallel``, in its variants."""

from unittest import mock

import torch
from sharded_training import Training, mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, _runtime_utils

OPTIONS = {
    "flat": {"use_orig_params": False},
    "kept_after_forward": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "no_shard": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "mixed_precision": {
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
    "hybrid": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
}
VARIANTS = ("plain", *OPTIONS, "accumulation")


def shard(net, variant):
    """Variant ``hybrid``: two times two ranks."""
    options = {"use_orig_params": True, "device_id": torch.device("cpu"), **OPTIONS.get(variant, {})}
    if variant == "hybrid":
        options["device_mesh"] = mesh(2, 2, names=("replicate", "shard"))
    for name in ("body", "middle", "head"):
        setattr(net, name, FullyShardedDataParallel(getattr(net, name), **options))
    return FullyShardedDataParallel(net, **options)


class Fsdp1(Training):
    """Faults ``before`` and ``after``: a bit of the head's gradient changes before or after its reduction."""

    def __init__(self, rank, variant, fault=None, culprits=(1,)):
        super().__init__(rank, shard, variant, fault, culprits)

    def planted(self):
        names = ("_reduce_grad", "_reduce_grad_no_shard")
        return mock.patch.multiple(
            _runtime_utils, **{name: self._damaging(getattr(_runtime_utils, name)) for name in names}
        )

    def _damaging(self, original):
        def reduce(state, handle):
            is_heads = handle is self.net.head._handle
            if is_heads:  # 3 rows of 8, then the bias
                self.corrupt_once(handle.flat_param.grad, "before", 17)
            original(state, handle)
            if is_heads:
                shard = handle.sharded_grad if handle.uses_sharded_strategy else handle.flat_param.grad
                self.corrupt_once(shard, "after", 1)

        return reduce

    def backwards(self):
        if self.variant == "accumulation":
            with self.model.no_sync():
                self.loss().backward()
        super().backwards()

    def clip(self):
        self.model.clip_grad_norm_(1.0)
