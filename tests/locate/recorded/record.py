"""Makes this folder's files from runs of tests/megatron/test_matrix.py:

    python -m pytest tests/megatron/test_matrix.py -k every_fault --basetemp RUNS
    python tests/locate/recorded/record.py RUNS

A file has the ledgers of all ranks of one step, one after another, as the run wrote them, but without what
identifies the machine or run (hosts, devices, stacks, the run's id), the samples' digests, blanks and
superfluous digits. The longer ones omit the phase after the data-parallel reduction. planted.json has, by
file, what the faults recorded when they acted: a truth that does not depend on any verdict.
"""

from __future__ import annotations

import json
import pathlib
import sys
import zlib

HERE = pathlib.Path(__file__).resolve().parent

# By configuration of the matrix and iteration: the name of the file. All are small: 1 MB for the folder.
RECORDED = {
    "matrix_tp2_pp2_dp2": {
        2: "gradient_element",
        6: "after_reduction",
        12: "duplicated_norm_on_tp1",
        15: "pipeline_receive_backward",
        16: "gradient_elements_on_two_ranks",
    },
    "matrix_checked_tp2_pp2_dp2": {2: "optimizer_update"},
    "matrix_tp2_pp2_dp2_sharded_overlapped": {6: "sharded_after_reduction"},
    "matrix_sequence_parallel_tied_embeddings": {
        4: "sequence_parallel_backward_function",
        15: "sequence_parallel_receive_backward",
    },
    "matrix_interleaved_pipeline": {
        4: "interleaved_backward_function",
        7: "interleaved_loss_zero_over_zero",
        8: "interleaved_forward_log",
        13: "interleaved_receive_backward",
    },
    "matrix_experts_alltoall": {5: "experts_activation_element"},
}
MOST_CHARACTERS = 90_000  # in a file that keeps the phase after the reduction
FACTS = ("fault", "iteration", "rank", "phase", "microbatch", "chunk", "module", "parameter", "element")


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    planted = {}
    for run in sys.argv[1:]:
        for configuration, incidents in RECORDED.items():
            for folder in pathlib.Path(run).glob(f"**/{configuration}"):
                for iteration, name in incidents.items():
                    text = ledgers_of(folder, iteration, left_out=())
                    if len(text) > MOST_CHARACTERS:
                        text = ledgers_of(folder, iteration, left_out=("grad_reduced",))
                    (HERE / f"{name}.jsonl").write_text(text)
                    planted[f"{name}.jsonl"] = facts_of(folder, iteration)
    lines = [f"{json.dumps(name)}: {json.dumps(planted[name])}" for name in sorted(planted)]
    (HERE / "planted.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


def ledgers_of(folder: pathlib.Path, iteration: int, left_out: tuple[str, ...]) -> str:
    lines = []
    for path in sorted(folder.glob("nanlocator_run/a0/ledger_*.jsonl")):
        is_wanted = False
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["record"] == "ledger":
                is_wanted = record["iteration"] == iteration
                dropped, begin = 0, len(lines)
            if not is_wanted:
                continue
            is_left_out = record.get("phase") in left_out and record.get("crossing") is None
            if record["record"] == "microbatch" or is_left_out:
                dropped += 1
                continue
            record = without_machine(record, dropped)
            if record["record"] == "end":
                whole = "".join(line + "\n" for line in lines[begin:])
                record["crc32"] = f"{zlib.crc32(whole.encode()):08x}"
            lines.append(json.dumps(record, separators=(",", ":")))
    return "\n".join(lines) + "\n"


def without_machine(record: dict, dropped: int) -> dict:
    match record["record"]:
        case "ledger":
            at = record["coordinates"]
            record |= {"run": "recorded", "coordinates": at | {"host": "host0", "device": "cpu"}}
        case "birth":
            record |= {"stack": [], "inputs": [], "bundle": None, "replay_lines": []}
            shorten(record["sighting"]["stats"])
        case "sighting":
            shorten(record["stats"])
        case "end":
            record["lines"] -= dropped
    return record


def shorten(stats: dict) -> None:
    stats |= {name: float(f"{value:.3g}") for name, value in stats.items() if isinstance(value, float)}


def facts_of(folder: pathlib.Path, iteration: int) -> list[dict]:
    """The record of each fault and rank from its first pass; a fault that acts in every pass records each
    one."""
    facts = {}
    for path in sorted(folder.glob("rank*.json")):
        for fact in json.loads(path.read_text())["planted"]:
            if fact["iteration"] == iteration:
                key = (fact["fault"], fact["rank"], fact.get("parameter"))
                facts.setdefault(key, {name: fact[name] for name in FACTS if name in fact})
    return list(facts.values())


if __name__ == "__main__":
    sys.exit(main())
