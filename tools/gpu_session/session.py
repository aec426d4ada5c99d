"""Runs the checks and benchmarks of a first hour on a GPU, in one command.

    tools/gpu                        every step, in order; figures into gpu_session.json
    tools/gpu --list                 the steps, and what each needs
    tools/gpu --only scan-stats faults    only these
    tools/gpu --cpu                  on the CPU and at smaller size; skips steps that need a GPU
    tools/gpu --pack .gpu            copies what a machine without network lacks from one that has it

Works from a checkout without network, if Torch, nvcc, CMake and a C++20 compiler are installed. The build's
other dependencies (headers of nlohmann-json, GoogleTest and benchmark; Megatron-Core) come from the folder
.gpu, which --pack fills, or from the system. Without a GPU it does the same as --cpu, and uses build/release.

Each step is stopped after ten minutes; the steps after a failed one still run. Each step's log is beside the
figures. Exit status: 0 nothing failed, 1 something failed, 2 wrong use.
"""

import argparse
import dataclasses
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("steps.py")
LIMIT = 600  # seconds a step may take
PACKED = ROOT / ".gpu"


@dataclasses.dataclass
class Machine:
    """Where the steps run."""

    device: str  # cuda or cpu
    build: Path
    logs: Path

    @property
    def environment(self) -> dict[str, str]:
        paths = [self.build / "python", PACKED / "site"]
        path = [str(self.build / "bin"), os.environ.get("PATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(p) for p in paths if p.exists()] or [""]),
            "PATH": os.pathsep.join(path),
            "MEGATRON_ON": self.device,
            "PYTHONUNBUFFERED": "1",
        }


Commands = list[list[str]]


@dataclasses.dataclass
class Step:
    name: str
    shows: str
    commands: Callable[[Machine], Commands]
    needs_gpu: bool = False


class Skipped(Exception):
    """Why."""


# ---- the steps, in order --------------------


def build(machine: Machine) -> Commands:
    if machine.device == "cpu":
        if not (machine.build / "python" / "nanlocator" / "_C.so").exists():
            raise Skipped("nothing is built: run tools/setup")
        return [[sys.executable, "-c", "import nanlocator; print(nanlocator.__version__)"]]
    capability = "import torch; print('%d%d' % torch.cuda.get_device_capability())"
    done = subprocess.run([sys.executable, "-c", capability], capture_output=True, text=True)
    architecture = done.stdout.strip() or "90"
    configure = [
        "cmake", "-S", str(ROOT), "-B", str(machine.build), "-DCMAKE_BUILD_TYPE=Release",
        "-DNANLOCATOR_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={architecture}",
        f"-DPython3_EXECUTABLE={sys.executable}", f"-DCMAKE_CUDA_COMPILER={nvcc()}",
    ]  # fmt: skip
    if shutil.which("ninja"):
        configure += ["-G", "Ninja"]
    if (PACKED / "dev").exists():
        configure.append(f"-DCMAKE_PREFIX_PATH={PACKED / 'dev' / 'usr'}")
    targets = ["nanlocator_python", "nanlocator_command", "nanlocator_replay", "nanlocator_cuda_tests"]
    targets += ["cuda_scan_benchmark"]
    jobs = str(os.cpu_count() or 1)
    return [configure, ["cmake", "--build", str(machine.build), "-j", jobs, "--target", *targets]]


def kernels(machine: Machine) -> Commands:
    if machine.device == "cuda":
        return [[binary(machine, "nanlocator_cuda_tests")]]
    return [[binary(machine, "nanlocator_scan_tests"), "--gtest_brief=1"]]


def sanitizer(machine: Machine) -> Commands:
    tool = shutil.which("compute-sanitizer") or str(Path(nvcc()).with_name("compute-sanitizer"))
    if not Path(tool).exists():
        raise Skipped("no compute-sanitizer beside nvcc")
    tests = binary(machine, "nanlocator_cuda_tests")
    small = "--gtest_filter=-*TwoToThe31Elements*"
    smaller = small + ":*AnyBitsOfAnyLength*"  # some hundred times slower under these two
    return [
        [tool, "--tool", name, "--error-exitcode", "1", tests, cases]
        for name, cases in (("memcheck", small), ("racecheck", smaller), ("initcheck", smaller))
    ]


def scan(machine: Machine) -> Commands:
    if machine.device == "cuda":
        return [[binary(machine, "cuda_scan_benchmark"), "--benchmark_format=json"]]
    if not (machine.build / "lib" / "libmemory_read.so").exists():
        raise Skipped("its peer memory_read is not built: run tools/setup")
    benchmark = str(ROOT / "tools" / "benchmarks" / "scan.py")
    return [[sys.executable, benchmark, "--rounds", "1", "--layers", "1", "--dtypes", "bfloat16", "--json"]]


def worker(name: str, *arguments: str) -> Callable[[Machine], Commands]:
    return lambda machine: [[sys.executable, str(WORKER), name, "--device", machine.device, *arguments]]


def megatron(machine: Machine) -> Commands:
    common = [sys.executable, str(WORKER), "megatron", "--device", machine.device]
    return [[*common, "--without"], common]


# Worth it on a GPU: the others are about the host, processes of their own, or installed packages.
SUITE = [
    *(
        f"pytorch/test_{name}.py"
        for name in (
            "births_of_steps", "compiled", "compiled_gpt", "cuda_graphs", "fp8_scales", "gradients_by_hand",
            "kernel_references", "locating_optimizer", "loop_reading", "memory_of_models", "modules",
            "opaque_calls", "operator_trace", "overwritten_data", "rerun", "stream_sanitizer",
            "tensors_without_memory", "thread_races", "watch",
        )
    ),
    *(f"debugger/test_debugger{name}.py" for name in ("", "_backward", "_scans", "_output")),
]  # fmt: skip
TRAINER = [f"transformers/test_trainer{name}.py" for name in ("", "_autocast", "_patch")]


def suite(machine: Machine) -> Commands:
    targets = ["planted_kernels", "opaque_kernels", "counting_allocator"]
    built = ["cmake", "--build", str(machine.build), "-j", "4", "--target"]
    return [built + [f"nanlocator_{name}" for name in targets], pytest(SUITE, default_device(machine))]


def triton(machine: Machine) -> Commands:
    """By one process: what its cases share starts nineteen at one time."""
    return [pytest(["pytorch/test_triton_kernels.py"], default_device(machine), processes=0)]


def trainer(machine: Machine) -> Commands:
    return [pytest(TRAINER, default_device(machine))]


def default_device(machine: Machine) -> str:
    return f"NANLOCATOR_TEST_DEVICE={machine.device}"


def pytest(files: list[str], *variables: str, processes: int | None = None) -> list[str]:
    if processes is None:
        processes = max(1, min(14, (os.cpu_count() or 1) - 2))
    command = ["env", "OMP_NUM_THREADS=1", *variables, sys.executable, "-m", "pytest"]
    command += ["-n", str(processes), "--dist", "worksteal", "-q", "--tb=short"]
    return command + [str(ROOT / "tests" / file) for file in files]


STEPS = [
    Step("build", "the extension, the kernels' tests and their benchmark", build),
    Step("kernels", "the kernels' tests", kernels),
    Step("sanitizer", "the same under memcheck, racecheck and initcheck", sanitizer, needs_gpu=True),
    Step("scan", "the scan's rate beside a copy of the same bytes", scan),
    Step(
        "scan-stats", "the device's stats equal the CPU's: dtypes, strides, alignments", worker("scan-stats")
    ),
    Step("streams", "a scan sees the tensor as it was when it was asked for", worker("streams")),
    Step("faults", "plain PyTorch: planted faults, verdicts, bundles that replay", worker("faults")),
    Step("megatron", "a Megatron-Core step: same bits, ratio, host waits, work", megatron),
    Step("megatron-faults", "Megatron-Core: planted faults, verdicts, bundles", worker("megatron-faults")),
    Step("ddp-faults", "DistributedDataParallel, one rank and two: the same", worker("ddp-faults")),
    Step("fsdp-faults", "FSDP: the same", worker("fsdp-faults")),
    Step("rerun", "a bad step on a full device: its time and peak over a healthy one's", worker("rerun")),
    Step("rank-failure", "two ranks, one out of memory in the re-run", worker("rank-failure")),
    Step("scan-cost", "a scan of one tensor: host, device, rate", worker("scan-cost")),
    Step("overhead", "a healthy step of GPT-2 at every level over one without", worker("overhead")),
    Step("kernel-faults", "a fault each in kernels of many kinds", worker("kernel-faults")),
    Step("streams-races", "streams that do not wait, and some that do", worker("streams-races"), True),
    Step("transparency", "GPT-2: same bits at each level; its peak and host waits", worker("transparency")),
    Step("graph", "forward and backward captured in one CUDA graph", worker("graph"), needs_gpu=True),
    Step("suite", "pytest's tests of one process, with the GPU as default device", suite, needs_gpu=True),
    Step("triton", "verdicts of Triton kernels, ours and libraries', compiled", triton, needs_gpu=True),
    Step("trainer", "pytest's tests of transformers' Trainer", trainer, needs_gpu=True),
]


# ---- running --------------------


def nvcc() -> str:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or str(Path(home) / "bin" / "nvcc")


def binary(machine: Machine, name: str) -> str:
    path = machine.build / "bin" / name
    if not path.exists():
        raise Skipped(f"{path.relative_to(ROOT)} is not built")
    return str(path)


def run(step: Step, machine: Machine) -> dict[str, Any]:
    if step.needs_gpu and machine.device == "cpu":
        return {"name": step.name, "status": "skipped", "why": "needs a GPU"}
    started = time.monotonic()
    log = machine.logs / f"{step.name}.log"
    status, figures = "passed", {}
    try:
        with log.open("w") as output:
            for command in step.commands(machine):
                left = LIMIT - (time.monotonic() - started)
                status = execute(command, machine, output, left)
                output.flush()
                figures |= figures_of(log.read_text(errors="replace"))
                if status != "passed":
                    break
    except Skipped as reason:
        return {"name": step.name, "status": "skipped", "why": str(reason)}
    seconds = round(time.monotonic() - started, 1)
    return {"name": step.name, "status": status, "seconds": seconds, "figures": figures, "log": str(log)}


def execute(command: list[str], machine: Machine, output: Any, seconds: float) -> str:
    """In a session of its own, which ends as a whole."""
    process = subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=machine.environment,
        cwd=machine.logs,
        start_new_session=True,
    )
    try:
        return "passed" if process.wait(max(seconds, 1)) == 0 else "failed"
    except subprocess.TimeoutExpired:
        return "timed out"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def figures_of(log: str) -> dict[str, Any]:
    """What a worker prints in its last line, GoogleTest's or pytest's count, or a benchmark's JSON."""
    for line in reversed(log.splitlines()):
        if line.startswith('{"figures":'):
            return json.loads(line)["figures"]
    if passed := re.findall(r"\[  PASSED  \] (\d+) tests?", log):
        failed = re.findall(r"\[  FAILED  \] (\d+) tests?", log)
        return {"passed": int(passed[-1]), "failed": int(failed[-1]) if failed else 0}
    if counts := re.findall(r"^((?:\d+ \w+(?:, )?)+) in \d+\.\d+s", log, re.MULTILINE):
        return {outcome: int(count) for count, outcome in re.findall(r"(\d+) (\w+)", counts[-1])}
    begin = min((log.find(c) for c in "[{" if c in log), default=-1)
    try:
        content = json.loads(log[begin:]) if begin >= 0 else None
    except json.JSONDecodeError:
        return {}
    if isinstance(content, dict):
        content = content.get("benchmarks", content)
    return {"benchmark": content} if content else {}


def has_gpu() -> bool:
    check = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", check], stderr=subprocess.DEVNULL).returncode == 0


def describe_machine(device: str) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    script = (
        "import json, torch\n"
        "gpu = torch.cuda.is_available()\n"
        "print(json.dumps({'torch': torch.__version__, 'cuda': torch.version.cuda,"
        " 'gpu': torch.cuda.get_device_name() if gpu else None}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    versions = json.loads(done.stdout) if done.returncode == 0 else {}
    return {"device": device, "python": platform.python_version(), "commit": commit, **versions}


# ---- what has to be brought along --------------------


def pack(folder: Path) -> None:
    """Headers, CMake packages and static libraries of this system; nlohmann_json and Megatron-Core of this
    Python."""
    include, site = folder / "dev" / "usr" / "include", folder / "site"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    library = Path("/usr/lib") / sysconfig.get_config_var("MULTIARCH")
    found = {
        include: ["gtest", "gmock", "benchmark"],
        folder / "dev" / library.relative_to("/"): ["libgtest*.a", "libgmock*.a", "libbenchmark*"],
        folder / "dev" / library.relative_to("/") / "cmake": ["GTest", "benchmark"],
    }
    for target, patterns in found.items():
        source = Path("/") / target.relative_to(folder / "dev")
        target.mkdir(parents=True, exist_ok=True)
        for pattern in patterns:
            things = list(source.glob(pattern))
            if not things:
                print(f"tools/gpu: {source / pattern} is not here and is left out", file=sys.stderr)
            for thing in things:
                copy(thing, target / thing.name)
    packages = Path(sysconfig.get_paths()["purelib"])
    for name in ("nlohmann_json", "megatron", *(p.name for p in packages.glob("megatron_core-*"))):
        if (packages / name).exists():
            copy(packages / name, site / name)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20
    print(f"{folder}: {size:.0f} MiB; take it along with the checkout, as {PACKED.name}")


def copy(source: Path, target: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=ignored)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


# ---- the command --------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="tools/gpu"
    )
    names = [step.name for step in STEPS]
    parser.add_argument("--list", action="store_true", help="list the steps")
    parser.add_argument("--only", nargs="+", metavar="STEP", choices=names, help=", ".join(names))
    parser.add_argument("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="fill this folder; run nothing")
    parser.add_argument("--output", type=Path, default=Path("gpu_session.json"), help="file for the figures")
    arguments = parser.parse_args()
    if arguments.list:
        for step in STEPS:
            print(f"{step.name:15} {'GPU' if step.needs_gpu else '   '}  {step.shows}")
        return 0
    if arguments.pack:
        pack(arguments.pack.absolute())
        return 0
    device = "cpu" if arguments.cpu or not has_gpu() else "cuda"
    output = arguments.output.absolute()
    logs = output.with_suffix(".logs")
    logs.mkdir(parents=True, exist_ok=True)
    machine = Machine(device, ROOT / "build" / ("gpu" if device == "cuda" else "release"), logs)
    described, results = describe_machine(device), []
    for step in STEPS:
        if arguments.only and step.name not in arguments.only:
            continue
        print(f"{step.name:15} {step.shows} ...", flush=True)
        result = run(step, machine)
        results.append(result)
        shown = result.get("why") or f"{result['seconds']} s  {json.dumps(result['figures'])[:300]}"
        print(f"{'':15} {result['status']}: {shown}", flush=True)
        # After each step: a machine that is taken away leaves what was found until then.
        output.write_text(json.dumps({"machine": described, "steps": results}, indent=1))
    bad = [result["name"] for result in results if result["status"] in ("failed", "timed out")]
    print(f"figures in {output}" + (f"; failed: {', '.join(bad)}" if bad else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
