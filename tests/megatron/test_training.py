"""The training program and its faults, without nanlocator: each configuration trains, and each fault does
what it says, only on its rank."""

from __future__ import annotations

import math

import pytest

pytestmark = pytest.mark.megatron

# hidden 32 and 16 tokens: a step of 8 ranks takes 0.2 s on 2 cores.
SMALL = {"hidden": 32, "sequence": 16}


OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 3000}
FOUR_EXPERTS = {"num_experts": 4, "layers": 2}
EXPERTS = FOUR_EXPERTS | {"ep": 2}
PER_TOKEN = {"loss_counts_tokens": True, "calculate_per_token_loss": True}
INF = math.inf


def train(pool, name, ranks, steps=2, faults=(), **training):
    return pool.run(
        {"name": name, "ranks": ranks, "steps": steps, "training": SMALL | training, "faults": list(faults)}
    ).require_success()


@pytest.fixture(scope="module")
def two_replicas(pool):
    return train(pool, "dp2", ranks=2)


@pytest.fixture(scope="module")
def four_experts(pool):
    return train(pool, "experts", ranks=2, **FOUR_EXPERTS)


def trains_as(ranks, reference):
    for ours, theirs in zip(ranks[0]["records"], reference[0]["records"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "ranks", "training"),
    [
        ("tp2_pp2_dp2", 8, {"tp": 2, "pp": 2}),
        ("tp2_dp2_sequence_parallel", 4, {"tp": 2, "sequence_parallel": True}),
        ("pp2_interleaved_dp2", 4, {"pp": 2, "vp": 2}),
        ("pp2_dp2_deallocated_outputs", 4, {"pp": 2, "deallocate_pipeline_outputs": True}),
        ("dp2_labels_counted", 2, {"loss_counts_tokens": True}),
        ("pp2_dp2_per_token", 4, {"pp": 2} | PER_TOKEN),
        (
            "dp2_everything_overlapped",
            2,
            {"use_distributed_optimizer": True} | OVERLAPPED,
        ),
        *(
            (f"dp2_megatron_fsdp_{sharded}", 2, {"use_distributed_optimizer": True, "megatron_fsdp": sharded})
            for sharded in ("optim", "optim_grads", "optim_grads_params")
        ),
    ],
)
def test_every_layout_trains_the_same_model_to_the_same_losses(pool, two_replicas, name, ranks, training):
    trains_as(train(pool, name, ranks, **training), two_replicas)


@pytest.fixture(scope="module")
def whole_sequences(pool):
    return train(pool, "whole_sequences", ranks=1, rope=True)


@pytest.mark.parametrize(
    ("name", "ranks", "training"),
    [
        ("cp2_all_gather", 2, {}),
        ("cp2_a2a", 2, {"cp_comm_type": "a2a"}),
        ("cp2_p2p", 2, {"cp_comm_type": "p2p"}),
        ("cp4_p2p", 4, {"cp": 4, "cp_comm_type": "p2p"}),
        ("cp2_per_token", 2, PER_TOKEN),
        ("cp2_loss_of_own_tokens", 2, {"loss_of_own_tokens": True}),  # as many on each rank
    ],
)
def test_context_parallel_ranks_train_the_same_model_as_one_with_the_whole_sequences(
    pool, whole_sequences, name, ranks, training
):
    trains_as(train(pool, name, ranks, rope=True, **{"cp": 2} | training), whole_sequences)


@pytest.mark.parametrize(
    ("name", "ranks", "training"),
    [
        ("ep2_alltoall", 2, {"ep": 2}),
        ("ep2_allgather", 2, {"ep": 2, "token_dispatcher": "allgather"}),
        ("ep2_pp2", 4, {"ep": 2, "pp": 2}),
        ("ep2_tp2", 4, {"ep": 2, "tp": 2, "etp": 1, "sequence_parallel": True}),
        (
            "ep2_tensor_parallel_experts",
            4,
            {"ep": 2, "tp": 2, "sequence_parallel": True, "token_dispatcher": "allgather"},
        ),
        ("ep2_distributed_optimizer", 2, {"ep": 2, "use_distributed_optimizer": True} | OVERLAPPED),
        ("ep2_per_token", 2, {"ep": 2} | PER_TOKEN),
    ],
)
def test_every_layout_of_experts_trains_the_same_model(pool, four_experts, name, ranks, training):
    trains_as(train(pool, name, ranks, **FOUR_EXPERTS, **training), four_experts)


def test_expert_weights_do_not_depend_on_the_rank_that_holds_them(pool, four_experts):
    names = {name for name in four_experts[0]["parameters"] if ".local_experts." in name}
    halves = [
        {name for name in rank["parameters"] if ".local_experts." in name}
        for rank in train(pool, "ep2_names", ranks=2, steps=1, **EXPERTS)
    ]
    assert halves[0] | halves[1] == names
    assert not halves[0] & halves[1]
    assert "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight" in halves[1]


def test_expert_bias_moves_and_the_load_balancing_loss_is_counted_once(pool, four_experts):
    one, two, again = (
        train(pool, f"expert_bias_{number}", ranks=2, steps=steps, expert_bias=True, **EXPERTS)
        for number, steps in enumerate([1, 2, 2])
    )
    assert one[0]["fingerprints"]["buffers"] != two[0]["fingerprints"]["buffers"]
    assert again[0]["fingerprints"] == two[0]["fingerprints"]
    # Perfectly balanced, it is 1 for each of 2 layers and 4 microbatches.
    for record in four_experts[0]["records"]:
        assert 8.0 < record["aux_loss"] < 9.0


def test_two_runs_are_bit_identical_in_different_processes(pool, two_replicas):
    again = train(pool, "dp2_again", ranks=2)
    for ours, reference in zip(again, two_replicas, strict=True):
        assert ours["fingerprints"] == reference["fingerprints"]


def test_dropout_moves_the_tracked_random_states(pool, two_replicas):
    # If the tracker's fork had no effect on CPU, its states would stay as they were seeded.
    ranks = train(pool, "dp2_dropout", ranks=2, dropout=0.1)
    assert ranks[0]["fingerprints"]["rng_tracker"] != two_replicas[0]["fingerprints"]["rng_tracker"]


@pytest.mark.parametrize("experts", [{}, EXPERTS | {"expert_bias": True}], ids=["dense", "moe"])
def test_recomputation_changes_no_bit_of_a_training_with_dropout(pool, experts):
    name = "moe" if experts else "dense"
    reference = train(pool, f"kept_{name}", ranks=2, dropout=0.1, **experts)
    for recompute in ("full", "selective"):
        options = {"dropout": 0.1, "recompute": recompute} | experts
        ranks = train(pool, f"{recompute}_{name}", ranks=2, **options)
        for ours, theirs in zip(ranks, reference, strict=True):
            assert ours["fingerprints"] == theirs["fingerprints"]


@pytest.mark.parametrize(
    ("options", "reads_freed_memory"),
    [
        ({"overlap_p2p_comm": True}, False),
        ({"deallocate_pipeline_outputs": True}, False),
        ({"overlap_p2p_comm": True, "deallocate_pipeline_outputs": True}, True),
    ],
    ids=["overlap", "deallocate", "both"],
)
def test_overlapped_sends_of_deallocated_outputs_read_freed_memory_on_gloo(pool, options, reads_freed_memory):
    """Nothing is planted: this is Megatron's own default for interleaved pipelines."""
    layout = {"pp": 2, "vp": 2}
    faults = [{"name": "freed_memory_is_nan"}]
    name = "_".join(options)
    ranks = train(pool, f"freed_{name}", ranks=2, steps=4, faults=faults, **layout, **options)
    reference = train(pool, f"kept_{name}", ranks=2, steps=4, **layout)
    is_same = ranks[0]["fingerprints"]["weights"] == reference[0]["fingerprints"]["weights"]
    # A race: mostly in the first step, otherwise in the second.
    assert any(math.isnan(record["loss"]) for record in ranks[0]["records"]) == reads_freed_memory
    assert is_same == (not reads_freed_memory)


@pytest.mark.parametrize("layout", [{}, {"pp": 2, "vp": 2}], ids=["dp", "interleaved"])
def test_megatrons_own_checks_change_no_bit_of_a_healthy_training(pool, layout):
    checks = {"check_for_nan_in_grad": True, "check_for_nan_in_loss": True}
    name = f"checks_{len(layout)}"
    runs = [
        train(pool, f"{name}_{number}", ranks=2, dropout=0.1, **layout, **options)
        for number, options in enumerate(
            [{}, checks, checks | {"rerun_state_machine": "validate_results"}],
        )
    ]
    for run in runs[1:]:
        for ours, theirs in zip(run, runs[0], strict=True):
            assert ours["fingerprints"] == theirs["fingerprints"]


def test_the_loss_falls_from_a_uniform_guess_to_below_four(pool):
    size = {"hidden": 64, "sequence": 32, "layers": 2, "num_microbatches": 2}
    ranks = train(pool, "loss", ranks=2, steps=25, lr=3e-3, **size)
    losses = [record["loss"] for record in ranks[0]["records"]]
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert max(losses[-5:]) < 4.0


def test_a_nan_in_a_duplicated_norm_weight_escapes_megatrons_norm_and_becomes_a_nan_weight(pool):
    fault = {"name": "tp_duplicated_layernorm", "rank": 1, "iteration": 2}
    name = "decoder.layers.1.input_layernorm.weight"
    ranks = train(pool, "escapes", ranks=2, tp=2, faults=[fault])
    assert math.isfinite(ranks[0]["records"][-1]["grad_norm"])
    assert ranks[0]["records"][-1]["successful"]
    assert ranks[0]["non_finite_parameters"] == {}
    assert ranks[1]["non_finite_parameters"] == {name: 1}


def test_undone_faults_leave_the_trajectory_of_steps_that_never_happened(pool):
    # Steps 2 and 3 carry a NaN each and are undone: weights and Adam's state are those after step 1.
    faults = [{"name": "main_grad_element", "rank": 1, "iteration": k} for k in (2, 3)]
    undone = pool.run(
        {"name": "undone", "ranks": 2, "steps": 3, "training": SMALL, "faults": faults, "undo_faults": True}
    ).require_success()
    never = train(pool, "never", ranks=2, steps=1)
    for ours, reference in zip(undone, never, strict=True):
        assert len(reference["records"]) == 1
        assert ours["fingerprints"]["weights"] == reference["fingerprints"]["weights"]
        assert ours["fingerprints"]["optimizer"] == reference["fingerprints"]["optimizer"]
    assert len(undone[1]["planted"]) == 2


def test_a_fault_that_does_not_fit_is_refused_on_every_rank(pool):
    ranks = pool.run(
        {
            "name": "refused",
            "ranks": 2,
            "steps": 1,
            "training": SMALL,
            "faults": [{"name": "bad_weight", "rank": 1, "parameter": "no.such.weight"}],
        }
    ).require_results()
    for rank in ranks:
        assert rank["error"]["type"] == "builtins.ValueError"
        assert "no.such.weight" in rank["error"]["text"]


def test_a_hanging_rank_is_killed_after_its_stack_was_shown(pool):
    outcome = pool.run(
        {"name": "hangs", "ranks": 2, "steps": 10**6, "training": SMALL | {"tp": 2}, "timeout": 3.0}
    )
    assert outcome.timed_out
    assert "in run_rank" in outcome.logs(last_lines=200)
    with pytest.raises(AssertionError, match="timed out"):
        outcome.require_results()


# ---- faults -----------------------------------------------------------------------------------------

EXPERT = "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight"
GRID = {"tp": 2, "pp": 2}  # ranks 0 and 1 are stage 0, 2 and 3 stage 1
# Ranks 0 and 2 hold experts 0 and 1, ranks 1 and 3 the others.


def plant(pool, name, ranks, faults, **training):
    """The results of two steps, with faults in the second."""
    faults = [{"iteration": 2} | fault for fault in faults]
    return pool.run(
        {"name": f"plant_{name}", "ranks": ranks, "steps": 2, "training": SMALL | training, "faults": faults}
    ).require_results()


def plant_one_after_another(pool, name, ranks, faults, **training):
    """The results of a healthy step, one per fault, each undone, and a last healthy one."""
    faults = [fault | {"iteration": 2 + number} for number, fault in enumerate(faults)]
    scenario = {"name": f"plant_{name}", "ranks": ranks, "steps": len(faults) + 2, "undo_faults": True}
    return pool.run(scenario | {"training": SMALL | training, "faults": faults}).require_success()


def planted(ranks):
    """Asserts what happened, and that it happened on one rank only."""
    (rank,) = [rank for rank in ranks if rank["planted"]]
    assert all(fact["rank"] == rank["rank"] for fact in rank["planted"])
    return rank["planted"]


def is_healthy(record):
    return math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])


def test_an_operator_in_forward_makes_the_loss_of_its_step_nan(pool):
    at = {"name": "forward_operator", "rank": 3, "layer": 3, "microbatch": 2}
    faults = [at | {"kind": kind} for kind in ("log", "log_zero", "softmax", "exp")]
    ranks = plant_one_after_another(pool, "forward", 4, faults, **GRID)
    before, *bad, after = ranks[0]["records"]
    for fact, record in zip(planted(ranks), bad, strict=True):
        assert (fact["rank"], fact["microbatch"], fact["module"]) == (3, 2, "decoder.layers.3.mlp")
        assert math.isnan(record["loss"])
    assert is_healthy(before) and is_healthy(after)


def test_a_value_born_in_backward_leaves_the_loss_finite(pool):
    at = {"name": "backward_operator", "rank": 2, "layer": 2}
    faults = [at | {"kind": kind} for kind in ("sqrt", "function", "opaque_function")]
    ranks = plant_one_after_another(pool, "backward", 4, faults, **GRID)
    for fact, record in zip(planted(ranks), ranks[0]["records"][1:-1], strict=True):
        assert (fact["rank"], fact["phase"]) == (2, "backward")
        assert math.isfinite(record["loss"])
        assert math.isnan(record["grad_norm"])


def test_recomputed_forwards_know_their_microbatch(pool):
    # On stage 0, the last forward before the backward of microbatch 0 is that of microbatch 1.
    fault = {"name": "forward_operator", "rank": 0, "layer": 0, "microbatch": 0}
    facts = planted(plant(pool, "recomputed", 2, [fault], pp=2, recompute="full"))
    assert [(fact["microbatch"], fact["is_recomputed"]) for fact in facts] == [(0, False), (0, True)]
    only = planted(plant(pool, "only", 2, [fault | {"only_in": "recompute"}], pp=2, recompute="full"))
    assert [fact["is_recomputed"] for fact in only] == [True]


@pytest.mark.parametrize(
    ("layout", "rank", "direction", "microbatch", "chunk"),
    [
        ({"pp": 2}, 1, "forward", 2, 0),
        ({"pp": 2}, 0, "backward", 2, 0),
        ({"pp": 2, "vp": 2}, 0, "forward", 3, 1),
        ({"pp": 2, "vp": 2}, 1, "backward", 1, 0),
    ],
)
def test_a_pipeline_transfer_is_spoiled_once_it_has_arrived(pool, layout, rank, direction, microbatch, chunk):
    fault = {"name": "pipeline_receive", "rank": rank, "direction": direction}
    fault |= {"microbatch": microbatch, "chunk": chunk}
    ranks = plant(pool, f"{direction}_{len(layout)}", 2, [fault], **layout)
    (fact,) = planted(ranks)
    assert (fact["rank"], fact["microbatch"], fact["chunk"]) == (rank, microbatch, chunk)
    record = ranks[0]["records"][-1]
    assert math.isfinite(record["loss"]) == (direction == "backward")
    assert math.isnan(record["grad_norm"])


@pytest.mark.parametrize("training", [{}, {"sequence_parallel": True}], ids=["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("name", ["activation_element", "tensor_parallel_reduction"])
def test_memory_is_spoiled_on_one_tensor_parallel_rank(pool, name, training):
    fault = {"name": name, "rank": 1, "layer": 0, "value": INF}
    ranks = plant(pool, f"{name}_{len(training)}", 2, [fault], tp=2, **training)
    (fact,) = planted(ranks)
    assert (fact["rank"], fact["pass_number"]) == (1, 1)
    assert not is_healthy(ranks[0]["records"][-1])


def test_an_expert_without_tokens_is_healthy_and_one_that_divides_by_their_number_is_not(pool):
    options = {"layer": 1, "expert": 2, "microbatch": 1}
    healthy = plant(pool, "empty", 4, [{"name": "expert_without_tokens"} | options], **EXPERTS)
    assert [fact["tokens"] for rank in healthy for fact in rank["planted"]] == [0, 0]
    assert is_healthy(healthy[0]["records"][-1])
    bad = plant(pool, "zero", 4, [{"name": "expert_zero_over_zero", "rank": 1} | options], **EXPERTS)
    (fact,) = planted(bad)
    assert (fact["rank"], fact["tokens"], fact["operator"]) == (1, 0, "aten::div")
    assert math.isnan(bad[0]["records"][-1]["loss"])


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", ["main_grad_element", "after_reduction", "optimizer_update"])
def test_faults_find_the_optimizer_of_an_expert(pool, name, sharded):
    # Buffers are filled from the last layer to the first: the second replica owns the shard of layer 0.
    fault = {"name": name, "rank": 3, "parameter": EXPERT}
    ranks = plant(pool, f"{name}_{sharded}", 4, [fault], use_distributed_optimizer=sharded, **EXPERTS)
    assert [rank["error"] for rank in ranks] == [None] * 4
    (fact,) = planted(ranks)
    assert fact["parameter"] == EXPERT
    assert EXPERT in ranks[3]["non_finite_parameters"]


def test_megatron_exits_in_validate_mode_and_a_fault_that_acts_once_is_gone_in_its_second_pass(pool):
    machine = {"rerun_state_machine": "validate_results", "check_for_nan_in_grad": True}
    once = plant(pool, "once", 2, [{"name": "main_grad_element", "rank": 1}], **machine)
    always = plant(pool, "always", 2, [{"name": "forward_operator", "rank": 1}], **machine)
    assert [fact["pass_number"] for fact in planted(once)] == [1]
    assert [fact["pass_number"] for fact in planted(always)] == [1, 2]
    # rerun_state_machine.py: 17 if the second pass differs, 16 if it is the same.
    for ranks, code in ((once, 17), (always, 16)):
        for rank in ranks:
            assert rank["error"]["type"] == "gpt_training.MegatronExit"
            assert rank["error"]["text"].endswith(f"code {code}")
            assert len(rank["records"]) == 1


@pytest.mark.parametrize("where", ["forward", "before_flag", "repeat"])
def test_a_killed_rank_leaves_its_place_in_the_log_and_the_others_their_results(pool, where):
    faults = [{"name": "killed", "rank": 1, "iteration": 2, "where": where}]
    training = SMALL | {"pp": 2}
    if where == "repeat":  # Megatron's own second pass, because of the first one's loss
        faults.append({"name": "forward_operator", "rank": 0, "iteration": 2})
        training |= {"rerun_state_machine": "validate_results", "check_for_nan_in_loss": True}
    outcome = pool.run(
        {"name": f"killed_{where}", "ranks": 2, "steps": 2, "training": training, "faults": faults}
    )
    assert outcome.exit_codes == [0, -9]
    assert f"killed: {where}, iteration 2" in (outcome.directory / "rank1.log").read_text()
    (survivor,) = outcome.require_survivors()
    assert survivor["rank"] == 0
    assert survivor["error"]["type"] == "builtins.RuntimeError"  # gloo: connection closed by peer
    with pytest.raises(AssertionError, match="left no result"):
        outcome.require_results()
