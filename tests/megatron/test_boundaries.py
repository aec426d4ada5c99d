"""Crossings in real Megatron-Core: both sides count the same, and a NaN is first seen where it left a rank,
in the right module and microbatch. (test_healthy.py checks that results do not change.)

All scenarios run `boundaries` alone (run_boundaries.py), in one process that forks their ranks.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("nanlocator_is_built")]

STEPS = 2
LAYERS = 4
MICROBATCHES = 4
SMALL = {"hidden": 32, "sequence": 16, "dropout": 0.1, "layers": LAYERS, "num_microbatches": MICROBATCHES}

HEALTHY = {
    "tp2": (2, {"tp": 2}),
    "tp2_sequence_parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "pp2_vp2": (2, {"pp": 2, "vp": 2}),
    "pp4_vp2": (4, {"pp": 4, "vp": 2, "layers": 8}),
    "tp2_recomputed": (2, {"tp": 2, "recompute": "full"}),
    "pp2_loss_per_token": (2, {"pp": 2, "loss_counts_tokens": True, "calculate_per_token_loss": True}),
    "ep2": (2, {"ep": 2, "num_experts": 4, "expert_bias": True}),
    "tp2_ep2_allgather": (
        4,
        {
            "tp": 2,
            "ep": 2,
            "num_experts": 4,
            "sequence_parallel": True,
            "token_dispatcher": "allgather",
            "recompute": "full",
        },
    ),
    "tp2_pp2_tied_sequence_parallel_bf16": (
        4,
        {"tp": 2, "pp": 2, "tied_embeddings": True, "sequence_parallel": True, "precision": "bf16"},
    ),
}

FAULTS = {
    "forward_in_a_row_parallel_layer": (
        4,
        {"tp": 2, "pp": 2},
        # Rank 2: tp 0 of the second stage, whose second layer is layer 3.
        {
            "plant": "nan_in_module_input",
            "rank": 2,
            "microbatch": 1,
            "layer": 3,
            "module": "mlp.linear_fc2",
        },
    ),
    "forward_under_sequence_parallelism": (
        2,
        {"tp": 2, "sequence_parallel": True},
        {
            "plant": "nan_in_module_input",
            "rank": 1,
            "microbatch": 2,
            "layer": 1,
            "module": "self_attention.linear_proj",
        },
    ),
    "forward_in_an_expert": (
        2,
        {"ep": 2, "num_experts": 4},
        {
            "plant": "nan_in_module_input",
            "rank": 1,
            "microbatch": 3,
            "layer": 2,
            "module": "mlp.experts.local_experts.0.linear_fc2",
        },
    ),
    "backward_in_a_column_parallel_layer": (
        4,
        {"tp": 2, "pp": 2},
        {
            "plant": "nan_in_gradient_of_output",
            "rank": 1,
            "microbatch": 2,
            "layer": 1,
            "module": "mlp.linear_fc1",
        },
    ),
    "forward_in_the_second_chunk": (
        4,
        {"pp": 4, "vp": 2, "layers": 8},
        {"plant": "nan_in_module_input", "rank": 1, "microbatch": 2, "layer": 5, "module": "mlp.linear_fc2"},
    ),
    "forward_in_the_second_chunk_of_two_stages": (
        2,
        {"pp": 2, "vp": 2},
        {"plant": "nan_in_module_input", "rank": 0, "microbatch": 1, "layer": 2, "module": "mlp.linear_fc2"},
    ),
    "collectives_of_its_own": (
        2,
        {"tp": 2},
        {
            "plant": "collectives_of_its_own",
            "rank": None,
            "microbatch": 1,
            "layer": 0,
            "module": "mlp.linear_fc2",
        },
    ),
    # 1F1B with 2 stages: stage 1 receives only activations, stage 0 only gradients.
    "activation_corrupted_on_arrival": (
        2,
        {"pp": 2},
        {"plant": "corrupted_receive", "rank": 1, "number": 2},
    ),
    "gradient_corrupted_on_arrival": (
        2,
        {"pp": 2},
        {"plant": "corrupted_receive", "rank": 0, "number": 3},
    ),
    "activation_corrupted_on_arrival_of_a_batch": (
        2,
        {"pp": 2},
        {"plant": "corrupted_receive", "rank": 1, "number": 2},
        {"plant": "coalesced_messages", "rank": None},
    ),
    "interleaved_activation_corrupted_on_arrival": (
        4,
        {"pp": 4, "vp": 2, "layers": 8},
        {"plant": "corrupted_receive", "rank": 1, "number": 0},
    ),
}


@pytest.fixture(scope="module")
def runs(run_by, tmp_path_factory):
    """{scenario: [result of each rank]}."""
    scenarios = []
    for name, (ranks, training) in HEALTHY.items():
        scenarios.append(_scenario(name, ranks, training, []))
    for name, (ranks, training, *faults) in FAULTS.items():
        scenarios.append(_scenario(name, ranks, training, [{"iteration": 2, **f} for f in faults]))
    return run_by("run_boundaries.py", scenarios, tmp_path_factory.mktemp("boundaries"))


def _scenario(name, ranks, training, faults):
    return {
        "name": name,
        "ranks": ranks,
        "steps": STEPS + (name == "collectives_of_its_own"),
        "training": SMALL | training,
        "faults": faults,
    }


# ---- healthy -------------------------------------------------------------------------------------------


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_seen_in_a_healthy_run_and_torchs_methods_are_restored(runs, name):
    for rank in runs[name]:
        assert rank["crossings"] == [[]] * STEPS
        assert rank["is_restored"]


@pytest.mark.parametrize("name", HEALTHY)
def test_every_member_counts_the_same_collectives_and_every_message_has_two_ends(runs, name):
    for step in range(STEPS):
        collectives: dict[tuple, list[int]] = {}
        messages: dict[tuple, dict[str, int]] = {}
        for rank in runs[name]:
            for entry in rank["coverage"][step]:
                group = (entry["group"], tuple(entry["members"]))
                if entry["peer"] is None:
                    collectives.setdefault(group, []).append(entry["count"])
                else:
                    ends = (rank["rank"], entry["peer"])
                    ends = ends if entry["role"] == "sent" else ends[::-1]
                    messages.setdefault((group, ends), {})[entry["role"]] = entry["count"]
        assert collectives or messages
        for (group, members), counts in collectives.items():
            assert len(counts) == len(members), group
            assert len(set(counts)) == 1, (group, counts)
            assert counts[0] > 0
        for message, counts in messages.items():
            assert counts.keys() == {"sent", "received"}, message
            assert counts["sent"] == counts["received"] > 0, message


def _count(result, step=1, **wanted):
    return sum(
        entry["count"]
        for entry in result["coverage"][step]
        if all(entry[key] == value for key, value in wanted.items())
    )


def test_every_all_reduce_of_a_tensor_parallel_pass_is_counted(runs):
    # Per layer: the outputs of the projection and of fc2, and in backward the inputs' gradients of the
    # attention and of fc1. Also: the embedding, three in the loss (maximum, the label's logit, sum), and the
    # gradient of the output layer's input.
    per_microbatch = 4 * LAYERS + 1 + 3 + 1
    for rank in runs["tp2"]:
        assert _count(rank, group="tp") == per_microbatch * MICROBATCHES


def test_what_a_layer_does_again_in_backward_is_counted_again(runs):
    per_microbatch = (4 + 2) * LAYERS + 1 + 3 + 1
    for rank in runs["tp2_recomputed"]:
        assert _count(rank, group="tp") == per_microbatch * MICROBATCHES


def test_expert_dispatch_and_combine_are_counted(runs):
    # Dispatch (tokens, probabilities) and combine, forward and backward; and each rank's token counts.
    for rank in runs["ep2"]:
        assert _count(rank, group="ep") == (3 + 3) * LAYERS * MICROBATCHES
        assert _count(rank, group="tp_ep") == LAYERS * MICROBATCHES


def test_every_message_of_a_pipeline_is_counted(runs):
    for name in ("pp2", "pp4_vp2"):
        ranks = runs[name]
        last = len(ranks) - 1
        chunks = 2 if "vp2" in name else 1
        for rank in range(last):
            # Each chunk's forward sends to the next stage; backward the other way.
            for sender, peer in ((rank, rank + 1), (rank + 1, rank)):
                sent = _count(ranks[sender], group="pp", peer=peer, role="sent")
                assert sent == MICROBATCHES * chunks, (name, sender, peer)
    # From the last stage to the first, which has the next chunk, and its gradients back.
    assert _count(runs["pp4_vp2"][3], group="pp", peer=0, role="sent") == MICROBATCHES
    assert _count(runs["pp4_vp2"][0], group="pp", peer=3, role="sent") == MICROBATCHES
    # Two stages are each other's next and previous one; half of the messages go by the group of all ranks.
    for rank, peer in ((0, 1), (1, 0)):
        sent = _count(runs["pp2_vp2"][rank], group="pp", peer=peer, role="sent")
        assert sent == MICROBATCHES * 3


def test_tied_embeddings_and_sequence_parallel_norms_are_crossings_too(runs):
    for rank in runs["tp2_pp2_tied_sequence_parallel_bf16"]:
        # One all-reduce of the embedding's gradient over the first and the last stage.
        assert _count(rank, group="embd") == 1


# ---- planted -------------------------------------------------------------------------------------------


def _first_bad(result):
    """The bad crossings on this rank up to the end of the first one."""
    seen = result["crossings"][1]
    if not seen:
        return []
    key = ("op", "group", "members", "peer", "sequence")
    return [s for s in seen if all(s[k] == seen[0][k] for k in key)]


def _require_planted(run, fault):
    assert [len(rank["planted"]) for rank in run] == [int(r["rank"] == fault["rank"]) for r in run]
    for rank in run:
        assert rank["crossings"][0] == []  # the iteration before


@pytest.mark.parametrize("name", ["forward_in_a_row_parallel_layer", "forward_under_sequence_parallelism"])
def test_a_nan_of_one_rank_is_sent_by_it_alone_and_received_by_all_its_members(runs, name):
    fault, run = FAULTS[name][2], runs[name]
    _require_planted(run, fault)
    culprit = run[fault["rank"]]
    sent, *received = _first_bad(culprit)
    assert sent["role"] == "sent"
    assert sent["group"] == "tp"
    assert sent["phase"] == "forward"
    assert sent["microbatch"] == fault["microbatch"]
    assert sent["chunk"] == 0
    assert sent["module"] == f"decoder.layers.{fault['layer']}.{fault['module']}"
    for member in sent["members"]:
        if member == fault["rank"]:
            continue
        first = _first_bad(run[member])
        assert {s["role"] for s in first} == {"received"}
        for key in ("group", "members", "sequence", "module", "microbatch", "phase", "op"):
            assert first[0][key] == sent[key], key
    if "sequence" not in name:  # a reduce-scatter sends the bad row only to its owner
        assert [s["role"] for s in received] == ["received"]
        assert sent["op"] == "c10d::allreduce_"


def test_a_nan_of_an_expert_leaves_its_rank_in_the_combine_of_its_layer(runs):
    name = "forward_in_an_expert"
    fault, run = FAULTS[name][2], runs[name]
    _require_planted(run, fault)
    sent = _first_bad(run[fault["rank"]])[0]
    assert (sent["role"], sent["group"], sent["phase"]) == ("sent", "ep", "forward")
    assert sent["op"] == "c10d::alltoall_base_"
    assert sent["microbatch"] == fault["microbatch"]
    assert sent["module"] == f"decoder.layers.{fault['layer']}.mlp"
    for first in _first_bad(run[1 - fault["rank"]]):
        assert (first["role"], first["sequence"]) == ("received", sent["sequence"])


def test_a_nan_of_one_rank_in_backward_is_sent_by_it_alone_in_the_module_of_the_node(runs):
    name = "backward_in_a_column_parallel_layer"
    fault, run = FAULTS[name][2], runs[name]
    _require_planted(run, fault)
    sent, received = _first_bad(run[fault["rank"]])
    assert (sent["role"], received["role"]) == ("sent", "received")
    assert sent["phase"] == received["phase"] == "backward"
    assert sent["module"] == f"decoder.layers.{fault['layer']}.{fault['module']}"
    assert sent["microbatch"] == fault["microbatch"]
    (peer,) = set(sent["members"]) - {fault["rank"]}
    (only,) = _first_bad(run[peer])
    assert only["role"] == "received"
    assert only["sequence"] == sent["sequence"]
    assert only["module"] == sent["module"]
    # It was born on the first stage, in backward: the last stage never sees it.
    for rank in run:
        if rank["coordinates"]["pp"] == 1:
            assert rank["crossings"][1] == []


@pytest.mark.parametrize(
    "name, phase, microbatch, chunk, sender",
    [
        ("activation_corrupted_on_arrival", "forward", 2, 0, 0),
        ("activation_corrupted_on_arrival_of_a_batch", "forward", 2, 0, 0),
        ("gradient_corrupted_on_arrival", "backward", 3, 0, 1),
        ("interleaved_activation_corrupted_on_arrival", "forward", 0, 0, 0),
    ],
)
def test_a_message_that_is_corrupted_on_arrival_was_sent_finite(runs, name, phase, microbatch, chunk, sender):
    fault, run = FAULTS[name][2], runs[name]
    _require_planted(run, fault)
    (received,) = _first_bad(run[fault["rank"]])
    assert received["role"] == "received"
    assert received["op"] == "c10d::recv_"
    assert received["peer"] == sender
    assert (received["phase"], received["microbatch"], received["chunk"]) == (phase, microbatch, chunk)
    assert received["module"] == ""
    # The sender scanned this message, and found nothing.
    sent = _count(run[sender], group="pp", peer=fault["rank"], role="sent")
    assert sent > received["sequence"]
    for sighting in run[sender]["crossings"][1]:
        key = (sighting["role"], sighting["peer"], sighting["sequence"])
        assert key != ("sent", fault["rank"], received["sequence"])


@pytest.mark.parametrize("name", ["forward_in_the_second_chunk", "forward_in_the_second_chunk_of_two_stages"])
def test_a_stage_sends_its_nan_with_its_microbatch_and_chunk(runs, name):
    fault, run = FAULTS[name][2], runs[name]
    _require_planted(run, fault)
    (sent,) = _first_bad(run[fault["rank"]])
    assert (sent["role"], sent["op"], sent["peer"]) == ("sent", "c10d::send", fault["rank"] + 1)
    place = ("phase", "microbatch", "chunk", "sequence")
    assert [sent[key] for key in place[:3]] == ["forward", fault["microbatch"], 1]
    (received,) = _first_bad(run[fault["rank"] + 1])
    assert (received["role"], received["peer"]) == ("received", fault["rank"])
    assert [received[key] for key in place] == [sent[key] for key in place]


@pytest.mark.parametrize("name", [name for name in FAULTS if name.startswith(("forward", "backward"))])
def test_a_nan_is_seen_in_its_own_microbatch_only(runs, name):
    seen = [s for rank in runs[name] for s in rank["crossings"][1] if s["phase"] != "grad_reduced"]
    assert seen
    assert {s["microbatch"] for s in seen} == {FAULTS[name][2]["microbatch"]}


def test_an_asynchronous_collective_is_seen_when_it_is_known_to_be_complete_and_only_once(runs):
    before = (2 * LAYERS + 1 + 3) + 2  # microbatch 0 in forward; the embedding, the first layer's projection
    per_microbatch = 4 * LAYERS + 1 + 3 + 1
    for rank in runs["collectives_of_its_own"]:
        assert rank["planted"] == [{"is_work": True, "has_its_methods": True}] * 2
        first, second = rank["crossings"][1:]
        assert [s["role"] for s in first] == ["sent", "received"]
        # A forward pre-hook of linear_fc2 made it: before the module's own forward.
        assert {s["module"] for s in first} == {"decoder.layers.0"}
        assert _count(rank, step=1, group="tp") == per_microbatch * MICROBATCHES + 1
        # No rank waited for the second one. Later crossings were scanned, but the count stops there.
        assert [s["role"] for s in second] == ["sent"]
        backward = per_microbatch - (2 * LAYERS + 1 + 3)  # of microbatch 0, before it
        assert second[0]["sequence"] == before + backward
        assert _count(rank, step=2, group="tp") == before + backward


def test_what_a_corrupted_activation_becomes_travels_with_its_microbatch(runs):
    run = runs["activation_corrupted_on_arrival"]
    # Its gradient goes back to the first stage: same microbatch, and bad on both ends.
    backward = [s for s in run[1]["crossings"][1] if s["role"] == "sent"]
    arrived = [s for s in run[0]["crossings"][1] if s["role"] == "received"]
    assert [(s["phase"], s["microbatch"]) for s in backward] == [("backward", 2)]
    assert [(s["phase"], s["microbatch"]) for s in arrived] == [("backward", 2)]
    assert backward[0]["sequence"] == arrived[0]["sequence"]
