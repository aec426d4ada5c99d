"""The ``boundaries`` level: which groups Megatron-Core's activations cross, and in which modules."""

from collections.abc import Iterable, Iterator

import torch
from torch._C._distributed_c10d import ProcessGroup

from nanlocator.exchange.boundaries import Boundaries
from nanlocator.exchange.collectives import name_of
from nanlocator.megatron.configuration import unwatched_groups
from nanlocator.megatron.layout import exchanging_modules
from nanlocator.megatron.versions import process_groups

# Fields of ProcessGroupCollection and the names in ledgers. Gradients cross the data-parallel
# groups and are scanned elsewhere; `tp_dp_cp` is here for the routers' token counts and auxiliary losses.
_GROUP_NAMES = {
    "tp": "tp",
    "pp": "pp",
    "cp": "cp",
    "ep": "ep",
    "expt_tp": "etp",
    "tp_ep": "tp_ep",
    "tp_cp": "tp_cp",
    "hcp": "hcp",
    "embd": "embd",
    "pos_embd": "pos_embd",
    "mp": "tp_pp",
    "tp_ep_pp": "tp_ep_pp",
    "gtp_remat": "gtp_remat",
    "expt_gtp_remat": "expt_gtp_remat",
    "tp_dp_cp": "tp_dp_cp",
}


def boundaries_of(
    chunks: list[torch.nn.Module], gathering: Iterable[ProcessGroup] = (), *, reads_gathered: bool = False
) -> Boundaries:
    """Watches the tensors that leave and enter this rank with these model chunks, whose process groups may
    differ from ``parallel_state``'s. The result is a listener of ``Microbatches``.

    Args:
        gathering: groups that gather weights at each use.
        reads_gathered: see :class:`Boundaries`.
    """
    groups = [*_model_parallel_groups(chunks), *((name_of(group), group) for group in gathering)]
    modules = [named for chunk in chunks for named in exchanging_modules(chunk)]
    return Boundaries(groups, modules, unwatched_groups(chunks), reads_gathered=reads_gathered)


def _model_parallel_groups(chunks: list[torch.nn.Module]) -> Iterator[tuple[str, ProcessGroup]]:
    """Every group with more than one member that activations cross, by its first name."""
    for field, name in _GROUP_NAMES.items():
        for group in process_groups(chunks, field):
            if isinstance(group, ProcessGroup) and group.size() > 1:
                yield name, group
