"""Training under DeepSpeed is bit-identical with nanlocator, also if every step is executed again."""

import pytest
from on_cpu import run_kept_ranks
from ranks import standard_error

VARIANTS = {
    "stage 0": ["zero0", "zero0_bf16"],
    "stage 1": ["zero1", "zero1_fp32_sums", "zero1_fp16", "zero1_overlap", "zero1_accumulation"],
    "stage 2": [
        "zero2_fp32_sums",
        "zero2_fp16",
        "zero2_small_buckets",
        "zero2_not_contiguous",
        "zero2_accumulation",
    ],
    "stage 3": ["zero3", "zero3_fp16", "zero3_partitioned", "zero3_accumulation"],
    "offloaded": ["zero2_offload", "zero3_offload"],
}


def healthy(rank, world_size, variants):
    from engine_training import Training, equal

    results = []
    with standard_error() as printed:
        for variant in variants:
            expected = Training(rank, variant, watched=False).run(3).state()
            watched = Training(rank, variant, rerun="always").run(3)
            results.append((variant, equal(expected, watched.state()), watched.locator.verdicts))
            watched.locator.remove()
        assert "nanlocator: step" not in printed()
    return results


@pytest.mark.parametrize("stage", VARIANTS)
def test_training_is_bit_identical_and_every_step_is_executed_again_alike(stage):
    for result in run_kept_ranks(2, healthy, VARIANTS[stage]):
        assert result == [(variant, True, []) for variant in VARIANTS[stage]]
