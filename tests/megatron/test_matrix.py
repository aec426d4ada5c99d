"""Every fault in every configuration that runs on a CPU: does the verdict name what was planted?

One run per configuration: each iteration plants another fault and is undone. The truth is the fault's own
record of its action (`planted`), never the verdict. Faults of memory and transfers act once and are absent
from a repeat; faults of computation are present in every pass.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import subprocess

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("nanlocator_is_built")]

SMALL = {"hidden": 32, "sequence": 16, "num_microbatches": 2}
OVERLAPPED = {"overlap_grad_reduce": True, "bucket_size": 3000}
SHARDED = {"use_distributed_optimizer": True, "precision": "bf16"}
EXPERTS = {"num_experts": 4, "ep": 2}
CONTEXT = {"cp": 2, "rope": True}
FULLY_SHARDED = {"use_distributed_optimizer": True, "megatron_fsdp": "optim_grads_params"}
FIRST = 2  # iteration of the first fault
FAULTY_MICROBATCH = 1


# Targets of faults that a layout can have its own mechanism for.
COMPUTATION = {"forward_operator", "backward_operator", "activation_element", "loss_zero_over_zero"}
GRADIENTS = {"main_grad_element", "after_reduction", "bad_weight"}


@dataclasses.dataclass
class Layout:
    ranks: int
    training: dict
    about: set[str] = dataclasses.field(default_factory=set)  # COMPUTATION, GRADIENTS

    def __post_init__(self) -> None:
        chunks = self.training.get("pp", 1) * (self.training.get("vp") or 1)
        self.training = SMALL | {"layers": max(2, chunks)} | self.training
        self.tp, self.pp, self.cp = (self.training.get(axis, 1) for axis in ("tp", "pp", "cp"))
        self.dp = self.ranks // (self.tp * self.pp * self.cp)
        self.faulty_layer = min(2, self.training["layers"] - 1)

    def rank(self, tp: int, pp: int, dp: int, cp: int = 0) -> int:
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def stage_of(self, layer: int) -> int:
        layers, chunks = self.training["layers"], self.training.get("vp") or 1
        return layer // (layers // (self.pp * chunks)) % self.pp

    def last_stage(self, dp: int, cp: int = 0) -> list[int]:
        return [self.rank(tp, self.pp - 1, dp, cp) for tp in range(self.tp)]


LAYOUTS = {
    "ddp_fp32": Layout(2, {"layers": 4}, COMPUTATION | GRADIENTS),
    "overlap_grad_reduce": Layout(2, OVERLAPPED, GRADIENTS),
    "distributed_optimizer_bf16": Layout(2, SHARDED, GRADIENTS),
    "overlap_param_gather": Layout(2, SHARDED | OVERLAPPED | {"overlap_param_gather": True}, GRADIENTS),
    "fp16_at_its_smallest_scale": Layout(
        2, {"tp": 2, "precision": "fp16", "initial_loss_scale": 1.0}, COMPUTATION
    ),
    "loss_per_token": Layout(2, {"pp": 2, "loss_counts_tokens": True, "calculate_per_token_loss": True}),
    "sequence_parallel": Layout(2, {"tp": 2, "sequence_parallel": True}, COMPUTATION),
    "sequence_parallel_tied_embeddings": Layout(
        4, {"tp": 2, "pp": 2, "sequence_parallel": True, "tied_embeddings": True}
    ),
    "interleaved_pipeline": Layout(4, {"pp": 4, "vp": 2, "num_microbatches": 4}),
    "full_recompute": Layout(2, {"tp": 2, "recompute": "full"}, COMPUTATION),
    "selective_recompute": Layout(2, {"tp": 2, "recompute": "selective"}, COMPUTATION),
    "experts_alltoall": Layout(4, EXPERTS | {"expert_bias": True}),
    "experts_allgather": Layout(
        4, EXPERTS | {"tp": 2, "sequence_parallel": True, "token_dispatcher": "allgather"}
    ),
    "multi_token_prediction": Layout(2, {"pp": 2, "mtp_layers": 1}),
    "context_parallel_all_gather": Layout(2, CONTEXT | {"loss_of_own_tokens": True}, COMPUTATION),
    "context_parallel_a2a_tp2": Layout(4, CONTEXT | {"tp": 2, "cp_comm_type": "a2a"}),
    "context_parallel_p2p_dp2": Layout(4, CONTEXT | {"cp_comm_type": "p2p"} | SHARDED),
    "context_parallel_p2p_pp2": Layout(
        4, CONTEXT | {"pp": 2, "cp_comm_type": "p2p", "loss_counts_tokens": True}
    ),
    "megatron_fsdp": Layout(2, FULLY_SHARDED, COMPUTATION | GRADIENTS),
    "megatron_fsdp_tp2_bf16": Layout(4, FULLY_SHARDED | {"tp": 2, "precision": "bf16"}),
    "megatron_fsdp_hybrid": Layout(4, FULLY_SHARDED | {"distributed_optimizer_instances": 2}, GRADIENTS),
    "megatron_fsdp_hybrid_optim": Layout(
        4,
        FULLY_SHARDED | {"distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"},
        GRADIENTS,
    ),
    "optimizer_instances": Layout(
        4, SHARDED | OVERLAPPED | {"distributed_optimizer_instances": 2}, GRADIENTS
    ),
    "tp2_pp2_dp2": Layout(8, {"tp": 2, "pp": 2}),
    "tp2_pp2_dp2_sharded_overlapped": Layout(
        8, {"tp": 2, "pp": 2, "overlap_param_gather": True} | SHARDED | OVERLAPPED
    ),
    "sequence_parallel_dp2": Layout(4, {"tp": 2, "sequence_parallel": True}),
    "full_recompute_tp2_pp2": Layout(4, {"tp": 2, "pp": 2, "recompute": "full"}),
    "multi_token_prediction_tp2_pp2": Layout(4, {"tp": 2, "pp": 2, "mtp_layers": 1}),
}
# Other layouts cover each of their axes.
COMBINATIONS = {
    "tp2_pp2_dp2",
    "sequence_parallel_dp2",
    "full_recompute_tp2_pp2",
    "multi_token_prediction_tp2_pp2",
}


def incidents_of(layout: Layout) -> list[list[dict]]:
    """The faults, one iteration each."""
    layer = layout.faulty_layer
    victim = layout.rank(layout.tp - 1, layout.stage_of(layer), layout.dp - 1, layout.cp - 1)
    at = {"rank": victim, "layer": layer, "microbatch": FAULTY_MICROBATCH}
    name = f"decoder.layers.{layer}."
    weight = name + "self_attention.linear_proj.weight"
    faults = [
        {"name": "main_grad_element", "rank": victim, "parameter": weight},
        {"name": "forward_operator", "kind": "softmax", "region": "attention"} | at,
        {"name": "backward_operator", "kind": "function", "region": "attention"} | at,
        {"name": "activation_element", "region": "attention"} | at,
        {"name": "after_reduction", "rank": victim, "parameter": weight},
    ]
    if not layout.training.get("loss_counts_tokens"):  # otherwise Megatron divides by at least one label
        faults.append({"name": "loss_zero_over_zero", "rank": victim, "microbatch": FAULTY_MICROBATCH})
    if layout.training.get("num_experts"):
        expert = 3  # of the last expert-parallel rank
        faults += [
            {"name": "expert_zero_over_zero", "expert": expert} | at,
            {"name": "forward_operator", "kind": "log", "region": "expert", "expert": 2} | at,
            {"name": "expert_without_tokens", "expert": expert} | at,
        ]
    else:
        faults += [
            {"name": "forward_operator", "kind": "log"} | at,
            {"name": "forward_operator", "kind": "exp"} | at,
            {"name": "backward_operator", "kind": "sqrt"} | at,
        ]
    if layout.training.get("mtp_layers"):
        faults.append({"name": "forward_operator", "kind": "exp", "region": "mtp"} | at)
    faults.append({"name": "bad_weight", "rank": victim, "parameter": weight})
    if layout.tp > 1:
        norm = name + "input_layernorm.weight"
        faults.append({"name": "tp_duplicated_layernorm", "rank": victim, "parameter": norm})
        if not layout.training.get("num_experts"):
            faults.append({"name": "tensor_parallel_reduction", "region": "attention"} | at)
        if layout.training.get("sequence_parallel") and not layout.training.get("num_experts"):
            faults.append({"name": "tensor_parallel_gather", "region": "attention"} | at)
    if layout.cp > 1:
        faults += [
            {"name": "context_parallel_transfer"} | at,
            {"name": "context_parallel_transfer", "direction": "backward"} | at,
        ]
        if not layout.training.get("loss_counts_tokens"):
            faults.append({"name": "padding_times_zero", "rank": victim, "microbatch": FAULTY_MICROBATCH})
    if layout.pp > 1:
        last = layout.rank(0, layout.pp - 1, layout.dp - 1)
        faults += [
            {"name": "pipeline_receive", "rank": last, "microbatch": FAULTY_MICROBATCH},
            {"name": "pipeline_receive", "direction": "backward", "microbatch": FAULTY_MICROBATCH},
        ]
    other = {
        "name": "main_grad_element",
        "rank": layout.rank(0, 0, 0),
        "parameter": "decoder.layers.0.self_attention.linear_qkv.weight",
        "value": -math.inf,
    }
    incidents = [[fault] for fault in faults] + [[faults[0], other]]  # a run gathers at most 16
    if layout.dp > 1 and not layout.training.get("num_experts"):  # replicas meet through it
        incidents.append(
            [{"name": "backward_operator", "kind": "function", "region": "attention"} | at, other]
        )
    return incidents


def usual_and_rest(layouts: dict[str, Layout], combinations: set[str]) -> list:
    """(configuration, incidents) for a usual run, and the rest for an exhaustive one.

    A usual run plants in each layout the faults that concern its mechanism, or else every fifth, with a
    different start in each layout; and those that only some layouts can have. It leaves out layouts that are
    `combinations` of others.
    """
    parts = []
    for number, (name, layout) in enumerate(layouts.items()):
        usual, rest = [], []
        plain = itertools.count(number)
        for incident in incidents_of(layout):
            faults = {fault["name"] for fault in incident}
            if not faults <= COMPUTATION | GRADIENTS or incident[0].get("region") in ("expert", "mtp"):
                is_usual = True
            else:
                is_usual = faults <= layout.about if layout.about else next(plain) % 5 == 0
            (usual if is_usual else rest).append(incident)
        marks = pytest.mark.exhaustive if name in combinations else []
        parts.append(pytest.param(name, usual, id=name, marks=marks))
        if rest:
            parts.append(pytest.param(name, rest, id=f"{name}-rest", marks=pytest.mark.exhaustive))
    return parts


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("configuration", "incidents"), usual_and_rest(LAYOUTS, COMBINATIONS))
def test_every_fault_is_named(pool, request, configuration, incidents):
    run_incidents(pool, f"matrix_{request.node.callspec.id}", LAYOUTS[configuration], incidents)


UPDATES = {  # another optimizer, or another copy of the weights
    "ddp_fp32",
    "distributed_optimizer_bf16",
    "overlap_param_gather",
    "fp16_at_its_smallest_scale",
    "experts_alltoall",
    "megatron_fsdp",
    "optimizer_instances",
}


@pytest.mark.parametrize(
    "configuration",
    [pytest.param(name, marks=[] if name in UPDATES else pytest.mark.exhaustive) for name in LAYOUTS],
)
def test_with_parameters_checked_the_update_and_the_weight_are_named(pool, configuration):
    layout = LAYOUTS[configuration]
    layer = layout.faulty_layer
    rank = layout.rank(layout.tp - 1, layout.stage_of(layer), layout.dp - 1)
    at = {"rank": rank, "parameter": f"decoder.layers.{layer}.self_attention.linear_proj.weight"}
    incidents = [[{"name": "optimizer_update"} | at], [{"name": "bad_weight"} | at]]
    run_incidents(pool, f"matrix_checked_{configuration}", layout, incidents, check_params=True)


def run_incidents(
    pool, name: str, layout: Layout, incidents: list[list[dict]], preparations: list[dict] = (), **options
) -> list[dict]:
    """The verdicts of a run with one step per incident."""
    faults = [
        [fault | {"iteration": FIRST + number} for fault in incident]
        for number, incident in enumerate(incidents)
    ]
    ranks = pool.run(
        {
            "name": name,
            "ranks": layout.ranks,
            "steps": len(faults) + FIRST,
            "training": layout.training,
            "nanlocator": {"on_bad": "report"} | options,
            "faults": list(itertools.chain(*faults)),
            "preparations": list(preparations),
            "undo_faults": True,
            "timeout": 300.0,
        }
    ).require_success()
    verdicts = {verdict["iteration"]: verdict for verdict in ranks[0]["verdicts"]}
    assert all(rank["verdicts"] == ranks[0]["verdicts"] for rank in ranks)
    planted = [fact for rank in ranks for fact in rank["planted"]]
    wrong = {}
    for incident in faults:
        iteration = incident[0]["iteration"]
        truths = [[fact for fact in planted if is_of(fact, fault)] for fault in incident]
        assert all(truths), f"{incident} did not act"
        try:
            check(layout, [truth[0] for truth in truths], verdicts.pop(iteration, None))
        except AssertionError as error:
            names = [f"{fault['name']} {fault.get('kind', '')}" for fault in incident]
            wrong[f"{iteration} {' and '.join(names)}"] = str(error)
    assert not wrong, "\n\n".join(f"{name}: {problem}" for name, problem in wrong.items())
    assert not verdicts  # healthy steps
    for verdict in ranks[0]["verdicts"]:
        assert verdict_of_files(ranks[0]["run_dir"], verdict["iteration"])["origins"] == verdict["origins"]
    return ranks[0]["verdicts"]


def verdict_of_files(run_dir: str, iteration: int) -> dict:
    """`nanlocator report` of the run's ledgers."""
    command = ["nanlocator", "report", run_dir, "--step", str(iteration), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    return json.loads(done.stdout)


def is_of(fact: dict, fault: dict) -> bool:
    same_parameter = fact.get("parameter") == fault.get("parameter")
    return (fact["iteration"], fact["fault"]) == (fault["iteration"], fault["name"]) and same_parameter


ONCE = {
    "main_grad_element",
    "tp_duplicated_layernorm",
    "activation_element",
    "after_reduction",
    "pipeline_receive",
    "tensor_parallel_reduction",
    "tensor_parallel_gather",
    "context_parallel_transfer",
}
AFTER_THE_STEP = {"optimizer_update"}  # cannot be repeated


def check(layout: Layout, facts: list[dict], verdict: dict | None) -> None:
    """The verdict has one origin per fact, with what that fact planted."""
    names = {fact["fault"] for fact in facts}
    if names == {"expert_without_tokens"} or (
        names == {"loss_zero_over_zero"} and layout.cp > 1 and not layout.training.get("loss_of_own_tokens")
    ):  # the loss is divided by the labels of all context-parallel ranks
        assert verdict is None, describe(verdict)
        return
    assert verdict is not None, "no finding"
    found = describe(verdict)
    assert verdict["status"] == "located"
    assert len(verdict["origins"]) == len(facts), found
    if not names & AFTER_THE_STEP:
        assert verdict["rerun"]["done"], found
        assert verdict["rerun"]["reproduced"] is not names.issubset(ONCE), found
        assert verdict["rerun"]["not_restored"] == [], found
    for fact in facts:
        candidates = candidates_of(layout, fact)
        origins = [origin for origin in verdict["origins"] if origin["candidates"] == candidates]
        assert len(origins) == 1, found
        check_origin(layout, fact, origins[0], found)


def candidates_of(layout: Layout, fact: dict) -> list[int]:
    if fact["fault"] in ("loss_zero_over_zero", "padding_times_zero"):
        return layout.last_stage(fact["dp"], fact["cp"])
    training = layout.training
    are_replicated = training.get("distributed_optimizer_instances", 1) > 1  # then another copy decides
    are_replicated &= training.get("outer_dp_sharding_strategy", "no_shard") == "no_shard"
    is_sharded = training.get("use_distributed_optimizer") and not are_replicated
    if fact["fault"] == "after_reduction" and is_sharded:
        # Only its owner holds the sum of a shard: the evidence cannot separate the sum from the owner.
        return [
            layout.rank(fact["tp"], fact["pp"], dp, cp) for dp in range(layout.dp) for cp in range(layout.cp)
        ]
    return [fact["rank"]]


CAUSES = {
    "main_grad_element": "not_reproduced",
    "tp_duplicated_layernorm": "not_reproduced",
    "after_reduction": "collective_result",  # of several ranks
    "bad_weight": "bad_weight",
    "optimizer_update": "optimizer_update",
}


def check_origin(layout: Layout, fact: dict, origin: dict, found: str) -> None:
    name = fact["fault"]
    if name == "loss_zero_over_zero":
        assert (origin["phase"], origin["microbatch"]) == ("loss", fact["microbatch"]), found
        assert origin["cause"] == "empty_loss_mask", found
        return
    if len(origin["candidates"]) == 1:
        for axis in ("tp", "pp", "dp", "cp"):
            assert origin["coordinates"][axis]["rank"] == fact[axis], found
    if name in CAUSES:
        assert origin["parameter"] == fact["parameter"], found
        assert origin["tensor"]["first_bad"] == fact["element"], found
        has_no_peers = name == "after_reduction" and layout.dp * layout.cp == 1
        assert origin["cause"] == ("not_reproduced" if has_no_peers else CAUSES[name]), found
        return
    assert origin["microbatch"] == fact["microbatch"], found
    if name == "padding_times_zero":
        assert origin["cause"] == "operator_undefined" and origin["operator"] == fact["operator"], found
        return
    assert origin["chunk"] == fact["chunk"], found
    assert origin["direction"] == fact["phase"], found
    if name in ("activation_element", "tensor_parallel_gather") or fact.get("exchange") == "all_gather":
        assert origin["cause"] == "not_reproduced", found
    elif name == "context_parallel_transfer":
        is_message = fact["exchange"] == "pass_on"
        assert origin["cause"] == ("pipeline_transfer" if is_message else "collective_result"), found
        assert origin["module"] == fact["module"], found
    elif name == "pipeline_receive":
        assert origin["cause"] == "pipeline_transfer", found
    elif name == "tensor_parallel_reduction":
        assert origin["cause"] == "collective_result", found
        assert origin["module"] == fact["module"], found
    else:
        assert origin["module"].startswith(fact["module"]), found
        operators = [origin["operator"], *origin["evidence"]]
        assert any(fact["operator"] in text for text in operators), found
        assert origin["cause"] in ("operator_undefined", "operator_overflow"), found
        assert origin["bundle"], found


def describe(verdict: dict) -> str:
    lines = [f"rerun {verdict['rerun']} notes {verdict['notes']}"]
    for origin in verdict["origins"]:
        keys = ("phase", "direction", "candidates", "microbatch", "chunk", "module", "operator", "parameter")
        lines.append(f"{ {key: origin[key] for key in (*keys, 'cause', 'confidence')} }")
        lines += [f"    {sentence}" for sentence in origin["evidence"]]
    return "\n".join(lines)


@pytest.mark.parametrize("level", ["grads", "modules", "operators"])
def test_other_levels_name_what_they_see(pool, level):
    layout = Layout(4, {"tp": 2, "pp": 2, "layers": 4, "dropout": 0.1})
    at = {"rank": 1, "layer": 1, "microbatch": FAULTY_MICROBATCH}
    faults = [
        {"name": "forward_operator", "kind": "log", "iteration": 2} | at,
        {"name": "activation_element", "iteration": 3} | at,
    ]
    scenario = {"ranks": 4, "steps": 4, "training": layout.training}
    options = {"level": level, "on_bad": "report"}
    faulty = pool.run(
        scenario | {"name": f"level_{level}", "nanlocator": options, "faults": faults, "undo_faults": True}
    ).require_success()

    repeated, once = faulty[0]["verdicts"]
    truth = [fact for rank in faulty for fact in rank["planted"] if fact["iteration"] == 2]
    check(layout, truth[:1], repeated)
    assert once["rerun"]["reproduced"] is False
    assert {origin["cause"] for origin in once["origins"]} == {"not_reproduced"}
    candidates = [origin["candidates"] for origin in once["origins"]]
    if level == "modules":
        assert candidates == [[1]]
        assert once["origins"][0]["module"] == "decoder.layers.1.mlp"
    else:  # gradients of the first pass: the replica is certain
        assert all(1 in ranks for ranks in candidates)
