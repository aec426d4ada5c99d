"""Policies after a finding under DeepSpeed: recover, skip, report, and overflows of a loss scale."""

import pytest
from on_cpu import run_kept_ranks

VARIANTS = ["zero0", "zero1_fp32_sums", "zero2_accumulation", "zero2_offload", "zero3_partitioned"]


def recovered(rank, world_size, variants):
    from engine_training import Training, equal

    results = []
    for variant in variants:
        expected = Training(rank, variant, watched=False).run(4).state()
        training = Training(rank, variant, on_bad="recover")
        training.plant("gradient")
        training.run(4)
        causes = [verdict["origins"][0]["cause"] for verdict in training.locator.verdicts]
        results.append((variant, equal(expected, training.state()), causes))
        training.locator.remove()
    return results


def test_after_a_transient_fault_training_equals_the_run_that_never_had_it():
    for result in run_kept_ranks(2, recovered, VARIANTS):
        assert result == [(variant, True, ["not_reproduced"]) for variant in VARIANTS]


def skipped(rank, world_size, variants):
    import torch
    from engine_training import Training, equal

    results = []
    for variant in variants:
        training = Training(rank, variant, on_bad="skip")
        training.plant("forward")
        training.step()
        before = training.masters()
        training.step()
        is_same = equal(before, training.masters())
        training.run(2)
        is_finite = all(each.isfinite().all() for each in training.masters())
        moved = not equal(before, training.masters())
        engine = training.engine
        counted = engine.skipped_steps, engine.global_steps, engine.was_step_applied()
        results.append((variant, is_same, is_finite, moved, counted, len(training.locator.verdicts)))
        if isinstance(engine.optimizer, torch.optim.Optimizer):
            assert not hasattr(engine.optimizer, "overflow")
        training.locator.remove()
    return results


def test_a_skipped_step_leaves_the_update_out_as_deepspeed_does_after_an_overflow():
    for result in run_kept_ranks(2, skipped, VARIANTS):
        assert result == [(variant, True, True, True, (1, 4, True), 1) for variant in VARIANTS]


def stopped_twice(rank, world_size, variant):
    from engine_training import Training

    import nanlocator

    training = Training(rank, variant)
    training.plant("gradient")
    found = []
    for _ in range(4):
        before = training.masters()
        try:
            training.step()
        except nanlocator.NonFiniteGradientError as error:
            found.append(error.verdict["iteration"])
        else:
            assert not all(map(lambda a, b: a.equal(b), before, training.masters()))
    training.locator.remove()
    return found


@pytest.mark.parametrize("variant", ["zero1", "zero2_accumulation", "zero3"])
def test_a_caller_that_goes_on_after_the_error_is_in_a_fresh_step(variant):
    assert run_kept_ranks(2, stopped_twice, variant) == [[2], [2]]


def routine_overflows(rank, world_size, variants):
    from engine_training import Training

    results = []
    for variant in variants:
        training = Training(rank, variant, initial_scale_power=24).run(12)
        moved = training.engine.global_steps - training.engine.skipped_steps
        found = training.locator.verdicts, training.locator.dismissed == training.engine.skipped_steps > 0
        results.append((variant, *found, moved > 0))
        training.locator.remove()
    return results


def test_overflows_with_which_fp16_looks_for_its_loss_scale_are_no_findings():
    variants = ["zero1_fp16", "zero2_fp16", "zero3_fp16"]
    for result in run_kept_ranks(2, routine_overflows, variants):
        assert result == [(variant, [], True, True) for variant in variants]


def bad_under_fp16(rank, world_size, variants):
    from engine_training import verdict_of

    return [verdict_of(rank, variant, "forward") for variant in variants]


def test_a_bad_loss_under_fp16_is_no_overflow_of_the_scale():
    for verdicts in run_kept_ranks(2, bad_under_fp16, ["zero2_fp16", "zero3_fp16"]):
        for verdict in verdicts:
            (origin,) = verdict["origins"]
            assert (origin["cause"], origin["module"]) == ("operator_undefined", "divide")
            assert origin["coordinates"]["rank"] == 1


def norm_overflows(rank, world_size, variants):
    from engine_training import Training

    results = {}
    for variant in variants:
        training = Training(rank, variant, on_bad="report")
        training.step()
        training.model.head.weight.register_hook(lambda gradient: gradient.fill_(1e30))
        training.step()
        found = []
        for verdict in training.locator.verdicts:
            (origin,) = verdict["origins"]
            found.append((verdict["iteration"], origin["phase"], origin["parameter"]))
        results[variant] = (found, training.engine.skipped_steps)
        training.locator.remove()
    return results


def test_a_step_whose_norm_alone_overflows_is_reported():
    """bf16 has no loss scale that could fall: every such step is left out silently (DeepSpeed#8415). In fp32
    the clip of stage 0 sets all gradients to zero. ZeRO-3 sums in float64, where this is no overflow."""
    left_out = ["zero0_bf16", "zero1_fp32_sums", "zero1", "zero2_bf16", "zero2_offload", "zero3_offload"]
    expected = {variant: ([(2, "grad_norm", "head.weight")], 1) for variant in left_out}
    expected |= {"zero0": ([(2, "grad_norm", "head.weight")], 0), "zero3": ([], 0)}
    assert run_kept_ranks(2, norm_overflows, list(expected)) == [expected] * 2


def norm_overflows_under(rank, world_size, on_bad, variants):
    from engine_training import Training, equal

    import nanlocator

    results = {}
    for variant in variants:
        training = Training(rank, variant, on_bad=on_bad)
        training.step()
        before = training.masters()
        huge = training.model.head.weight.register_hook(lambda gradient: gradient.fill_(1e30))
        try:
            training.step()
            is_stopped = False
        except nanlocator.NonFiniteGradientError:
            is_stopped = True
        is_same = equal(before, training.masters())
        huge.remove()
        training.step()
        results[variant] = is_stopped, is_same, not equal(before, training.masters())
        training.locator.remove()
    return results


@pytest.mark.parametrize("on_bad", ["stop", "skip", "recover"])
def test_a_step_whose_norm_alone_overflows_ends_as_the_policy_says(on_bad):
    """Forward and backward have ended, so nothing can be recovered."""
    variants = ["zero0", "zero0_bf16", "zero1_fp32_sums", "zero1", "zero2_bf16", "zero2_offload"]
    expected = dict.fromkeys(variants, (on_bad != "skip", True, True))
    assert run_kept_ranks(2, norm_overflows_under, on_bad, variants) == [expected] * 2


def bad_gradients(rank, world_size, variants):
    from engine_training import Training

    results = {}
    for variant in variants:
        training = Training(rank, variant, on_bad="report")
        training.step()
        training.model.head.weight.register_hook(lambda gradient: gradient.fill_(float("nan")))
        training.step()
        said = [verdict["job"]["framework_skips_update"] for verdict in training.locator.verdicts]
        results[variant] = (said, training.engine.skipped_steps)
        training.locator.remove()
    return results


def test_a_report_says_whether_deepspeed_leaves_the_update_out():
    applied = {"zero0": ([False], 0), "zero2_bf16_unchecked": ([False], 0)}
    left_out = ["zero0_bf16", "zero1", "zero1_fp32_sums", "zero2_bf16", "zero2_offload"]
    expected = applied | {variant: ([True], 1) for variant in [*left_out, "zero3", "zero3_bf16"]}
    assert run_kept_ranks(2, bad_gradients, list(expected)) == [expected] * 2


def overflow_at_the_smallest_scale(rank, world_size):
    from engine_training import Training

    training = Training(rank, "zero2_fp16", initial_scale_power=0, on_bad="report")
    training.step()
    training.model.head.weight.register_hook(lambda gradient: gradient.fill_(float("nan")))
    try:
        training.step()
    except Exception as error:  # DeepSpeed's own (runtime/fp16/loss_scaler.py)
        (verdict,) = training.locator.verdicts
        (origin,) = verdict["origins"]
        return (
            str(error).split(" - ")[0],
            (origin["cause"], origin["parameter"]),
            verdict["job"]["framework_skips_update"],
        )
    finally:
        training.locator.remove()
    return None


def test_an_overflow_at_the_smallest_loss_scale_is_a_finding_before_deepspeed_ends_the_run():
    said, found, is_skipped = run_kept_ranks(2, overflow_at_the_smallest_scale)[0]
    assert said == "Current loss scale already at minimum" and is_skipped
    assert found == ("user_hook", "head.weight")
