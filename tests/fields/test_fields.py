"""Loops of other fields than language models, written as their public code is and run unedited: healthy ones
do not change under the launcher, and each fault is located."""

import json
from pathlib import Path

import pytest
from ranks import run_python

PROGRAMS = Path(__file__).parent / "programs"
# The cause, or its detail where it has one, of each fault. Its line ends with "# fault: NAME".
FAULTS = {
    "detection": {"flat": "log_of_zero", "unmatched": "mean_of_nothing"},
    "diffusion": {"first_level": "division_by_zero", "blank": "zero_over_zero"},
    "flow": {"outlier": "exceeds_range", "singular": "log_of_zero"},
    "on_policy": {"one_row": "too_few_elements", "stale": "exceeds_range"},
    "off_policy": {"lost_sensor": "made_earlier", "saturated": "log_of_zero"},
    "graph": {"isolated": "zero_over_zero", "hub": "exceeds_range"},
    "speech": {"silence": "log_of_zero", "too_short": "operator_undefined"},
    "physics": {"centre": "zero_over_zero", "weight": "exceeds_range"},
    "private": {"empty_record": "zero_over_zero", "padding": "division_by_zero"},
    "adversarial": {"zero_latent": "zero_over_zero", "flat_critic": "derivative_at_pole"},
    "quantised_codes": {"dead_code": "bad_buffer", "constant": "division_by_zero"},
    "recommender": {"new_user": "zero_over_zero", "certain": "log_of_zero"},
    "meta": {"one_value": "zero_over_zero", "fast": "exceeds_range"},
    "gaussian_process": {"short": "zero_over_zero", "counts": "log_of_zero"},
    "points": {"one_point": "zero_over_zero", "exact": "derivative_at_pole"},
    "forecast": {"constant": "zero_over_zero", "no_sales": "division_by_zero"},
    "tagger": {"forbidden": "from_infinity", "unseen_word": "zero_over_zero"},
    "ordinary_differential": {"stiff": "exceeds_range", "logarithm": "log_of_negative"},
    "quantisation": {"dead_channel": "zero_over_zero", "constant_input": "division_by_zero"},
    "distillation": {"sure_teacher": "log_of_zero", "same_samples": "zero_over_zero"},
    "contrastive": {"collapsed": "zero_over_zero", "hot": "exceeds_range"},
}
# Each shows something that the others do not.
USUAL = {
    ("detection", "unmatched"),  # the mean of nothing in torch's own loss
    ("off_policy", "lost_sensor"),  # what the program keeps over steps
    ("physics", "weight"),  # an update with a closure
    ("private", "empty_record"),  # transforms of torch.func, gradients that the program sets
    ("gaussian_process", "short"),  # an operator that refuses a NaN which no variable holds
    ("ordinary_differential", "stiff"),  # an assertion of the program's own
    ("tagger", "forbidden"),  # -Inf that is meant
}
CASES = [
    pytest.param(program, fault, marks=() if (program, fault) in USUAL else pytest.mark.exhaustive)
    for program, faults in FAULTS.items()
    for fault in faults
]


def run(program, *options, watched=True):
    launcher = ("-m", "nanlocator") if watched else ()
    return run_python(*launcher, PROGRAMS / f"{program}.py", *options)


def line_of(program, fault):
    lines = (PROGRAMS / f"{program}.py").read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(f"# fault: {fault}")]
    return number


@pytest.mark.parametrize(("program", "fault"), CASES)
def test_a_fault_is_located(program, fault):
    done = run(program, "--steps", "10", "--fault", fault)
    assert done.returncode != 0, done.stderr
    (path,) = Path().glob("nanlocator_run/*/verdict.json")
    verdict = json.loads(path.read_text())
    (origin,) = verdict["origins"]
    place = Path(origin["code"]["file"]).stem, origin["code"]["line"]
    assert place == (program, line_of(program, fault))
    assert (origin["detail"] or origin["cause"]) == FAULTS[program][fault]


HEALTHY = [pytest.param(program, 40) for program, _ in sorted(USUAL)]
HEALTHY += [pytest.param(program, 300, marks=pytest.mark.exhaustive) for program in FAULTS]


@pytest.mark.parametrize(("program", "steps"), HEALTHY)
def test_a_healthy_loop_computes_the_same_bits(program, steps):
    options = ("--steps", str(steps))
    plain, watched = run(program, *options, watched=False), run(program, *options)
    assert plain.returncode == watched.returncode == 0, watched.stderr
    assert plain.stdout == watched.stdout != ""
    (line,) = watched.stderr.splitlines()
    assert line.startswith("nanlocator: attached to ")
