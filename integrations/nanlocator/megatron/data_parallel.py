"""How a model chunk reduces its gradients over the data-parallel ranks, and which part it keeps.

Source, Megatron-Core 0.16.1: distributed/distributed_data_parallel.py, distributed/param_and_grad_buffer.py,
distributed/fsdp/mcore_fsdp_adapter.py, distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py and
param_and_grad_buffer.py beside it.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches
from nanlocator.megatron.versions import is_sent_already

Parameter = torch.nn.Parameter
Range = tuple[int, int]
# Number of a group of parameters that are reduced together, the parameters, this rank's gradients.
Reducing = Callable[[int, list[Parameter], list[torch.Tensor]], AbstractContextManager[None]]


class Transferring(Protocol):
    def __call__(
        self, parameters: list[Parameter], *, reduces_gradients: bool
    ) -> AbstractContextManager[None]: ...


class DataParallelChunk(Protocol):
    """A model chunk in its data-parallel wrapper."""

    parameters: list[tuple[str, Parameter]]  # trainable: names in ``module``'s wrapper, first use first
    groups: list[list[Parameter]]  # whose gradients are reduced together, numbered in this order

    def watch_reductions(self, patches: Patches, reducing: Reducing) -> None:
        """Calls ``reducing`` around the start of a group's collective."""
        ...

    def gathering_groups(self) -> list[ProcessGroup]:
        """Groups that gather weights at each use and reduce their gradients."""
        ...

    def watch_transfers(self, patches: Patches, transferring: Transferring) -> None:
        """Calls ``transferring`` around the start of a collective of these groups."""
        ...

    def clear_padding_of_gradients(self, number: int) -> None:
        """Zeroes the padding in a group's buckets, which is never written. It enters only the sums, but a
        trace would report NaN from freed memory in it."""
        ...

    def clear_padding_of_weights(self) -> None:
        """Zeroes the padding of the buffers that weights are gathered from."""
        ...

    def bucket_positions(self) -> dict[Parameter, Range]:
        """Bucket number, and first element in the bucket."""
        ...

    def kept(self, parameter: Parameter) -> Range | None:
        """The flat elements of its reduced gradient that this rank keeps; None: ask the optimizer."""
        ...

    def reduced_gradient(self, parameter: Parameter, kept: Range) -> torch.Tensor:
        """The reduced gradient of these elements."""
        ...

    def weight(self, parameter: Parameter) -> torch.Tensor:
        """The weight between two passes: whole, or the shard that is gathered at each use."""
        ...

    def ranks_that_gather(self, parameter: Parameter) -> list[int]:
        """Ranks that keep shards of the weight, including this one; empty: each keeps all of it."""
        ...


def data_parallel_chunk(chunk: torch.nn.Module) -> DataParallelChunk:
    return ShardedChunk(chunk) if is_sharded(chunk) else ReplicatedChunk(chunk)


def is_sharded(chunk: torch.nn.Module) -> bool:
    """Whether the chunk is a FullyShardedDataParallel of Megatron-FSDP."""
    return hasattr(chunk, "param_and_grad_buffer") and hasattr(chunk.module, "grad_reduce_pipeline")


class ReplicatedChunk:
    """A chunk in a DistributedDataParallel: ``main_grad`` is a part of a bucket, whole on every rank."""

    def __init__(self, chunk: Any) -> None:
        self._groups = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
        self.parameters = [(name, p) for name, p in chunk.named_parameters() if p.requires_grad]
        self.groups = [[p for bucket in group.buckets for p in bucket.params_list] for group in self._groups]

    def watch_reductions(self, patches: Patches, reducing: Reducing) -> None:
        for number, group in enumerate(self._groups):
            wrapper = self._around_start(number, group, reducing)
            patches.wrap(points.START_GRAD_SYNC, wrapper, of=group)

    def _around_start(self, number: int, group: Any, reducing: Reducing) -> Callable[..., Any]:
        parameters = self.groups[number]

        def start_grad_sync(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if is_sent_already(group):
                return original(*args, **kwargs)
            with reducing(number, parameters, list(map(_main_gradient, parameters))):
                return original(*args, **kwargs)

        return start_grad_sync

    def gathering_groups(self) -> list[ProcessGroup]:
        return []

    def watch_transfers(self, patches: Patches, transferring: Transferring) -> None:
        pass

    def clear_padding_of_gradients(self, number: int) -> None:
        pass  # buckets are zero-initialised

    def clear_padding_of_weights(self) -> None:
        pass

    def bucket_positions(self) -> dict[Parameter, Range]:
        """From addresses, because bucket.param_to_index leaves out the padding before a parameter."""
        positions = {}
        for number, bucket in enumerate(bucket for group in self._groups for bucket in group.buckets):
            for p in bucket.params_list:
                gradient = _main_gradient(p)
                bytes_before = gradient.data_ptr() - bucket.grad_data.data_ptr()
                positions[p] = (number, bytes_before // gradient.element_size())
        return positions

    def kept(self, parameter: Parameter) -> Range | None:
        return None

    def reduced_gradient(self, parameter: Parameter, kept: Range) -> torch.Tensor:
        gradient = _main_gradient(parameter)
        return gradient if kept == (0, gradient.numel()) else gradient.view(-1)[slice(*kept)]

    def weight(self, parameter: Parameter) -> torch.Tensor:
        return parameter

    def ranks_that_gather(self, parameter: Parameter) -> list[int]:
        return []


def _main_gradient(parameter: Any) -> torch.Tensor:
    return parameter.main_grad


class ShardedChunk:
    """A chunk in Megatron-FSDP. Its parameters are the ones that forward and backward use; their memory is
    allocated and freed. The module has them only from forward to the reduction of gradients, otherwise
    DTensors of shards.

    If gradients are sharded, each microbatch's are reduced and added to the ranks' shards.
    """

    def __init__(self, chunk: Any) -> None:
        self._pipeline = chunk.module.grad_reduce_pipeline
        self._gather_pipeline = chunk.module.all_gather_pipeline
        self._gather: contextlib.ExitStack | None = None  # while several buckets are gathered at once
        self._buffer = chunk.param_and_grad_buffer
        self._shards_weights = chunk.ddp_config.data_parallel_sharding_strategy == "optim_grads_params"
        self._place = {  # parameter -> its group, its index there
            p: (group, item) for group in self._buffer.parameter_groups for item, p in enumerate(group.params)
        }
        self.parameters = [
            (f"module.module.{name}", p) for name, p in chunk.module.raw_param.items() if p.requires_grad
        ]
        self._buckets = [  # per group
            [number for number in numbers if self._buffer.parameter_groups[number].main_grad_buffer]
            for numbers in dict.fromkeys(
                tuple(numbers) for numbers in self._buffer.bucket_to_bucket_group.values()
            )
        ]
        self._number_of = {buckets[0]: number for number, buckets in enumerate(self._buckets) if buckets}
        self.groups = [
            [p for bucket in buckets for p in self._buffer.parameter_groups[bucket].params]
            for buckets in self._buckets
        ]

    def watch_reductions(self, patches: Patches, reducing: Reducing) -> None:
        @contextlib.contextmanager
        def around(numbers: Iterable[int]) -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                for number in numbers:
                    gradients = [p.get_main_grad() for p in self.groups[number]]
                    stack.enter_context(reducing(number, self.groups[number], gradients))
                yield

        self._wrap_reductions(patches, around)

    def _wrap_reductions(
        self, patches: Patches, around: Callable[[Iterable[int]], AbstractContextManager[None]]
    ) -> None:
        """Calls ``around`` with the numbers of the groups that are reduced."""

        def reduce(original: Callable[..., Any], buckets: list[int], *args: Any, **kwargs: Any) -> Any:
            with around([self._number_of[buckets[0]]]):
                return original(buckets, *args, **kwargs)

        def reduce_all(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with around(range(len(self.groups))):
                return original(*args, **kwargs)

        patches.wrap(points.FSDP_BUCKET_REDUCE, reduce, of=self._pipeline)  # while backward runs
        for point in points.FSDP_REDUCE_ALL:  # after it
            patches.wrap(point, reduce_all, of=self._buffer)

    def gathering_groups(self) -> list[ProcessGroup]:
        buffers = [group.model_weight_buffer for group in self._buffer.parameter_groups]
        return list({id(b.data_parallel_group): b.data_parallel_group for b in buffers if b}.values())

    def watch_transfers(self, patches: Patches, transferring: Transferring) -> None:
        """One collective gathers the buckets of a module; it begins after all of them were named."""

        def gather(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            try:
                with contextlib.ExitStack() as self._gather:
                    return original(*args, **kwargs)
            finally:
                self._gather = None

        def gather_bucket(original: Callable[..., Any], bucket_id: int, bwd: bool) -> Any:
            buckets = self._buffer.bucket_to_bucket_group[bucket_id]
            parameters = [p for bucket in buckets for p in self._buffer.parameter_groups[bucket].params]
            with contextlib.ExitStack() as alone:
                stack = self._gather or alone
                stack.close()
                stack.enter_context(transferring(parameters, reduces_gradients=False))
                return original(bucket_id, bwd)

        def around(numbers: Iterable[int]) -> AbstractContextManager[None]:
            return transferring([p for n in numbers for p in self.groups[n]], reduces_gradients=True)

        patches.wrap(points.FSDP_GATHER, gather, of=self._gather_pipeline)
        patches.wrap(points.FSDP_GATHER_BUCKET, gather_bucket, of=self._gather_pipeline)
        self._wrap_reductions(patches, around)

    def clear_padding_of_gradients(self, number: int) -> None:
        for bucket_number in self._buckets[number]:
            buffer = self._pipeline.get_fsdp_buffer(bucket_number)
            first = buffer.bucket_index.global_data_index
            items = [(i.global_data_index - first, i.size) for i in buffer.item_index_map.values()]
            _clear_between(buffer.fetch_bucket().data, [(begin, begin + size) for begin, size in items])

    def clear_padding_of_weights(self) -> None:
        for group in self._buffer.parameter_groups:
            buffer = group.model_weight_buffer
            if buffer is not None and buffer.data.is_floating_point():
                items = [buffer._get_item_local_index(item) for item in range(len(group.params))]
                _clear_between(buffer.data, items)

    def bucket_positions(self) -> dict[Parameter, Range]:
        numbers = {id(group): number for number, group in enumerate(self._buffer.parameter_groups)}
        positions = {}
        for _, p in self.parameters:
            group, item = self._place[p]
            index = group.main_grad_buffer.item_index_map[item].global_data_index
            start = group.main_grad_buffer.bucket_index.global_data_index
            positions[p] = (numbers[id(group)], index - start)
        return positions

    def kept(self, parameter: Parameter) -> Range | None:
        group, item = self._place[parameter]
        begin, end = group.main_grad_buffer._get_item_slice_in_shard(item)
        return (begin, end) if begin < end else (0, 0)

    def reduced_gradient(self, parameter: Parameter, kept: Range) -> torch.Tensor:
        group, item = self._place[parameter]
        return group.main_grad_buffer.get_item(item, only_shard=True)

    def weight(self, parameter: Parameter) -> torch.Tensor:
        if not self._shards_weights:
            return parameter
        group, item = self._place[parameter]
        return group.model_weight_buffer.get_item(item, only_shard=True)

    def ranks_that_gather(self, parameter: Parameter) -> list[int]:
        if not self._shards_weights:
            return []
        group, _ = self._place[parameter]
        return dist.get_process_group_ranks(group.model_weight_buffer.data_parallel_group)


@torch.no_grad()
def _clear_between(flat: torch.Tensor, items: list[Range]) -> None:
    end = 0
    for begin, next_end in [*sorted(each for each in items if each[0] < each[1]), (flat.numel(), 0)]:
        if begin > end:
            flat[end:begin].zero_()
        end = next_end


def whole_parameter(parameter: torch.Tensor) -> Any:
    """The parameter that forward uses in place of one that a Megatron optimizer updates."""
    return getattr(parameter, "orig_param", parameter)
