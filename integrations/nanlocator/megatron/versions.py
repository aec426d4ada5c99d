"""Differences between versions of Megatron-Core: one function each, with the versions that need it.

Source: 0.12.3, 0.13.1, 0.14.0, 0.15.3 and 0.16.1 of PyPI, and 0.17.1, 0.18.2, 0.19.0 and main (0.20) of
GitHub. docs/support.md has what was tested on each of them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state, process_groups_config

# Groups by their fields in the collections below, and the functions of parallel_state that return them. Up to
# 0.12 nothing fills a collection with these; 0.13 and 0.14 leave out the last one.
_GETTERS = {
    "tp": "get_tensor_model_parallel_group",
    "pp": "get_pipeline_model_parallel_group",
    "cp": "get_context_parallel_group",
    "ep": "get_expert_model_parallel_group",
    "expt_tp": "get_expert_tensor_parallel_group",
    "tp_ep": "get_expert_tensor_and_model_parallel_group",
    "tp_cp": "get_tensor_and_context_parallel_group",
    "hcp": "get_hierarchical_context_parallel_groups",
    "embd": "get_embedding_group",
    "pos_embd": "get_position_embedding_group",
    "mp": "get_model_parallel_group",
    "tp_ep_pp": "get_expert_tensor_model_pipeline_parallel_group",
    "gtp_remat": "get_gtp_weight_remat_group",  # 0.20
    "expt_gtp_remat": "get_expert_gtp_weight_remat_group",
    "tp_dp_cp": "get_tensor_and_data_parallel_group",
}
_COLLECTIONS = tuple(
    getattr(process_groups_config, name)
    for name in ("ModelCommProcessGroups", "ProcessGroupCollection")  # up to 0.14, from 0.15 on
    if hasattr(process_groups_config, name)
)
_ATTRIBUTES = ("model_comm_pgs", "pg_collection")  # of modules: in 0.13 and 0.14, from 0.15 on


def process_groups(chunks: list[torch.nn.Module], field: str) -> Iterator[Any]:
    """The groups of ``parallel_state`` and of the modules of ``chunks`` under a field of
    ProcessGroupCollection."""
    values = [_group_of_parallel_state(field)]
    for chunk in chunks:
        for module in chunk.modules():
            for attribute in _ATTRIBUTES:
                own = vars(module).get(attribute)
                if isinstance(own, _COLLECTIONS):
                    values.append(getattr(own, field, None))
    for value in values:
        yield from value if isinstance(value, list | tuple) else [value]


def _group_of_parallel_state(field: str) -> Any:
    getter = getattr(parallel_state, _GETTERS[field], None)
    if getter is None:
        return None
    try:
        return getter(with_context_parallel=True) if field == "tp_dp_cp" else getter()
    except AssertionError:  # the group does not exist
        return None


def is_sent_already(bucket_group: Any) -> bool:
    """Whether ``start_grad_sync`` will return at once. From 0.16 on ``finish_grad_sync`` calls it again in
    the first batch while the collective is in flight."""
    return getattr(bucket_group, "is_first_batch", False) and bucket_group.grad_reduce_handle is not None


def router_losses() -> dict[str, Any]:
    """The dictionary to which routers add their auxiliary losses."""
    try:  # from 0.18 on, where the older function copies at each call
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        return _router_losses_before_0_18()
    return get_moe_metrics_tracker().metrics


def _router_losses_before_0_18() -> dict[str, Any]:
    from megatron.core.transformer.moe import moe_utils

    holder = moe_utils if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker") else parallel_state  # 0.12
    return holder.get_moe_layer_wise_logging_tracker()
