"""The network check on one machine: device self-tests, versions, hardware counters, layout, SLURM script."""

import itertools
import math
import shlex
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanlocator import _C
from nanlocator.netcheck import facts, gpu, layout, slurm

SAMPLES = Path(__file__).parent / "samples"
QUOTED_SAMPLES = shlex.quote(str(SAMPLES))  # for a shell
FIRST_GPU, SECOND_GPU, VOLTA = (f"GPU-00000000-0000-0000-0000-00000000000{n}" for n in (1, 2, 3))


def sample(name):
    return (SAMPLES / name).read_text()


# --- device self-tests ---------------------------------------------------------------------------------


def test_this_machine_computes_correctly_and_the_same_twice():
    first, second = _C.check_compute("cpu"), _C.check_compute("cpu")
    assert first.failures == [] and first.is_right
    prints = [(o.name, o.dtype, o.fingerprint) for o in first.operators]
    assert prints == [(o.name, o.dtype, o.fingerprint) for o in second.operators]
    assert {dtype for _, dtype, _ in prints} == {"float32", "bfloat16", "float16", "float64"}


def test_a_wrong_element_of_one_operator_is_named():
    def plant(name, dtype, repeat, result):
        if (name, dtype) == ("softmax", "float32"):
            result[3, 5] *= 1.001

    outcome = _C.check_compute("cpu", plant)
    (failure,) = outcome.failures
    assert failure.startswith("softmax in float32: 1 of 16384 elements are wrong, the first at [3, 5]")


def test_a_flipped_bit_of_memory_is_named():
    def flip(test, chunks):
        if test == "pattern 0xff":
            chunks[0][100] ^= 1 << 7

    outcome = _C.check_memory("cpu", after=flip)
    (failure,) = outcome.failures
    assert failure.startswith("memory, pattern 0xff: chunk 0, byte 800: written 0xffffffffffffffff, read ")
    assert "XOR 0x0000000000000080" in failure
    assert outcome.bytes == 64 << 20


def test_a_fraction_of_the_free_memory_is_a_fraction():
    with pytest.raises(_C.UsageError, match=r"from 0 to 0\.95"):
        _C.check_memory("cpu", 1.5, 1.0)


# --- versions ------------------------------------------------------------------------------------------


def test_facts_are_of_this_process_and_equal_to_themselves(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("LOCAL_RANK", "3")
    mine = facts.collect("cpu")
    assert (mine["torch"], mine["local_rank"], mine["device"]) == (torch.__version__, 3, "cpu")
    assert mine["environment NCCL_ALGO"] == "Ring"
    assert facts.differences([mine, dict(mine)]) == []


def test_what_differs_is_listed_with_its_ranks():
    ranks = [{"torch": "2.11.0", "nccl": "2.28.9", "host": f"a{n}", "clock": 1000.0 + n} for n in range(4)]
    ranks[3]["torch"] = "2.10.0"
    del ranks[1]["nccl"]
    assert facts.differences(ranks) == [
        {"what": "torch", "values": {"2.11.0": [0, 1, 2], "2.10.0": [3]}},
        {"what": "nccl", "values": {"2.28.9": [0, 2, 3], "not known": [1]}},
    ]


def test_variables_of_nccl_that_must_agree_are_compared_and_those_of_a_host_are_not():
    ranks = [{"environment NCCL_ALGO": "Ring", "environment NCCL_SOCKET_IFNAME": f"eth{n}"} for n in range(3)]
    del ranks[2]["environment NCCL_ALGO"]
    assert facts.differences(ranks) == [
        {"what": "environment NCCL_ALGO", "values": {"Ring": [0, 1], "not set": [2]}}
    ]


def test_a_clock_far_from_the_others_is_listed():
    ranks = [{"clock": 1000.0}, {"clock": 1001.5}, {"clock": 880.0}, {"clock": 1000.0}]
    assert facts.differences(ranks) == [
        {"what": "clock", "values": {"the median": [0, 1, 3], "-120 s": [2]}, "seconds": 120.0}
    ]


# --- hardware counters ---------------------------------------------------------------------------------


def test_a_healthy_gpu_is_read_whole_and_has_no_faults():
    read = gpu.parse_query(sample("healthy.xml"), FIRST_GPU)
    assert read["pci_address"] == "00000000:1B:00.0"
    assert (read["serial"], read["driver"]) == ("1650000000001", "570.86.15")
    assert read["ecc_volatile"]["dram_correctable"] == 2
    assert read["remapped_rows"] == {"corrected": 0, "uncorrected": 1, "pending": "No", "failure": "No"}
    assert read["clocks"] == {"sm": "1980 MHz", "memory": "2619 MHz", "sm_most": "1980 MHz"}
    assert read["clocks_limited_by"] == ["gpu_idle"]
    assert read["temperature"] == {"gpu": "41 C", "memory": "52 C"}
    assert read["power"] == {"draw": "112.50 W", "limit": "700.00 W"}
    assert "retired_pages" not in read  # N/A since Ampere
    assert gpu.hardware_faults(read) == []


def test_each_fault_of_a_gpu_is_a_sentence():
    read = gpu.parse_query(sample("faulty.xml"), FIRST_GPU)
    assert gpu.hardware_faults(read) == [
        "1 uncorrected ECC error since the driver was loaded (sram_uncorrectable_parity)",
        "3 uncorrected ECC errors since the driver was loaded (dram_uncorrectable)",
        "the threshold of uncorrected SRAM errors is exceeded: NVIDIA replaces such GPUs",
        "remapping of a bad memory row has failed: NVIDIA replaces such GPUs",
        "remapping of a bad memory row is pending: reset the GPU",
        "the driver requires a reset of the GPU",
        "the driver requests a recovery of the GPU: Drain and Reset",
    ]
    assert read["clocks_limited_by"] == ["gpu_idle", "hw_thermal_slowdown"]


def test_the_counters_of_older_gpus_and_drivers_are_read():
    read = gpu.parse_query(sample("volta.xml"), VOLTA)
    assert read["ecc_volatile"] == {"single_bit": 4, "double_bit": 1}
    assert read["clocks_limited_by"] == ["hw_power_brake_slowdown"]
    assert gpu.hardware_faults(read) == [
        "1 uncorrected ECC error since the driver was loaded (double_bit)",
        "retirement of a bad memory page is pending: reset the GPU",
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "cannot be read"),
        (sample("healthy.xml")[:2500], "cut short"),
        ("No devices were found\n", "cannot be read"),
        ('<!DOCTYPE a [<!ENTITY b "bb">]><a>&b;</a>', "something other than its XML log"),
        (sample("volta.xml"), f"does not list {FIRST_GPU}"),
    ],
)
def test_what_is_no_log_of_this_gpu_is_refused_with_the_reason(text, reason):
    with pytest.raises(gpu.Unreadable, match=reason):
        gpu.parse_query(text, FIRST_GPU)


def test_a_log_cut_anywhere_is_refused_or_read_but_never_raises_another_error():
    text = sample("healthy.xml")
    end = text.rindex("</nvidia_smi_log>")
    for length in range(0, end, 41):
        with pytest.raises(gpu.Unreadable):
            gpu.parse_query(text[:length], FIRST_GPU)


def test_xid_lines_are_those_of_this_gpu_and_only_hardware_codes_are_faults():
    found = gpu.parse_kernel_log(sample("dmesg.txt"), "00000000:1B:00.0")
    assert [entry["code"] for entry in found] == [13, 63, 79]
    faults = gpu.hardware_faults({"xid": found})
    assert [fault.split(",")[0] for fault in faults] == [
        "Xid 63 (ECC page retirement or row remapping recording event)",
        "Xid 79 (GPU has fallen off the bus)",
    ]
    remapped = {"xid": found, "remapped_rows": {"pending": "No"}}
    assert len(gpu.hardware_faults(remapped)) == 1  # the row of Xid 63 has been replaced since
    assert [e["code"] for e in gpu.parse_kernel_log(sample("dmesg.txt"), "00000000:CB:00.0")] == [74]


def test_a_hostile_log_is_read_as_what_it_is():
    digits = "9" * 5000  # int() refuses more than 4300
    lines = (
        f"NVRM: Xid (PCI:0000:1b:00): {digits}, x\nNVRM: Xid (PCI:::::): 79, x\nNVRM: Xid (PCI:0000): 79, x"
    )
    assert gpu.parse_kernel_log(lines, "00000000:1B:00.0") == []
    assert gpu.parse_kernel_log(lines, "N/A") == []
    assert gpu.parse_nvlink(f"Link {digits}: CRC Errors: {digits}\nLink 0: CRC Errors: {digits}") == []
    huge = sample("healthy.xml").replace("<dram_correctable>2<", f"<dram_correctable>{digits}<")
    assert gpu.hardware_faults(gpu.parse_query(huge, FIRST_GPU)) == []


def test_nvlink_errors_are_read_by_link():
    assert gpu.parse_nvlink(sample("nvlink.txt")) == [
        {"link": 0, "replay": 0, "recovery": 0, "crc": 0},
        {"link": 1, "replay": 12, "recovery": 1, "crc": 65535},
    ]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """The test's own commands, and the GPU that Torch would describe."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    properties = SimpleNamespace(
        uuid=FIRST_GPU.removeprefix("GPU-"), pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def add(name, script):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    add("dmesg", "exit 1")
    add("journalctl", "exit 1")
    return add


def test_the_hardware_of_a_gpu_is_asked_from_nvidia_smi_and_the_kernel(machine):
    machine(
        "nvidia-smi",
        f'case "$*" in "-q -x -i {FIRST_GPU}") cat {QUOTED_SAMPLES}/healthy.xml ;; '
        f'"nvlink -e -i {FIRST_GPU}") cat {QUOTED_SAMPLES}/nvlink.txt ;; *) exit 9 ;; esac',
    )
    machine("journalctl", f"cat {QUOTED_SAMPLES}/dmesg.txt")
    read = facts.hardware("cuda:0")
    assert (read["uuid"], read["serial"], read["missing"]) == (FIRST_GPU, "1650000000001", [])
    assert (len(read["nvlink"]), len(read["xid"])) == (2, 3)
    (fault,) = facts.hardware_faults(read)
    assert fault.startswith(
        "Xid 79 (GPU has fallen off the bus), 1 in the kernel log, the latest: [ 2600.000001]"
    )


def test_what_cannot_be_read_is_said(machine, monkeypatch):
    read = facts.hardware("cuda:0")  # no nvidia-smi on this PATH
    assert read["pci_address"] == "00000000:1B:00.0"
    assert read["missing"] == [
        "ECC, remapped rows, clocks and temperature: nvidia-smi is not installed",
        "NVLink errors: nvidia-smi is not installed",
        "Xid errors: kernel log not readable (dmesg failed with status 1: no message; journalctl "
        "failed with status 1: no message)",
    ]
    monkeypatch.setattr(gpu, "_DEADLINE", 0.2)
    machine("nvidia-smi", "exec sleep 60")
    assert "nvidia-smi did not answer within" in facts.hardware("cuda:0")["missing"][0]
    machine("nvidia-smi", "echo 'Unable to determine the device handle: GPU is lost' >&2; exit 15")
    assert "failed with status 15: Unable to determine the device" in facts.hardware("cuda:0")["missing"][0]


def test_a_cpu_has_no_hardware_to_ask_for():
    assert facts.hardware("cpu") == {} and facts.hardware_faults({}) == []


# --- layout --------------------------------------------------------------------------------------------


def test_the_groups_are_megatrons():
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    order = "tp-cp-ep-dp-pp"
    compared = 0
    for world, tp, cp, ep, pp in itertools.product(
        (1, 2, 4, 6, 8, 16, 24, 48), (1, 2, 4), (1, 2, 3), (1, 2, 4), (1, 2, 3)
    ):
        if world % math.prod((tp, cp, pp)) or world % math.prod((tp, ep, pp)):
            continue
        dense = parallel_state.RankGenerator(
            tp=tp, ep=1, dp=world // (tp * cp * pp), pp=pp, cp=cp, order=order
        )
        experts = parallel_state.RankGenerator(
            tp=tp, ep=ep, dp=world // (tp * ep * pp), pp=pp, cp=1, order=order
        )
        theirs = [(name, ranks) for name in ("tp", "cp", "dp", "pp") for ranks in dense.get_ranks(name)]
        theirs += [("ep", ranks) for ranks in experts.get_ranks("ep")]
        ours = layout.groups(world, tp=tp, cp=cp, ep=ep, pp=pp)
        assert ours == [group for group in theirs if len(group[1]) > 1]
        compared += 1
    assert compared > 100


def test_a_small_layout_by_hand():
    assert layout.groups(8, tp=2, pp=2) == [
        *[("tp", ranks) for ranks in ([0, 1], [2, 3], [4, 5], [6, 7])],
        *[("dp", ranks) for ranks in ([0, 2], [1, 3], [4, 6], [5, 7])],
        *[("pp", ranks) for ranks in ([0, 4], [1, 5], [2, 6], [3, 7])],
    ]


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"tp": 3}, "8 ranks cannot be laid out: the dense layers need tp 3 = 3 ranks or a multiple of that"),
        ({"tp": 2, "pp": 3}, "need tp 2 x pp 3 = 6 ranks"),
        ({"ep": 3}, "the experts need ep 3 = 3 ranks"),
        ({"cp": 0}, "cp is 0; expected 1 or more"),
    ],
)
def test_sizes_that_do_not_divide_explain_themselves(sizes, text):
    with pytest.raises(_C.UsageError, match=text):
        layout.groups(8, **sizes)


# --- SLURM ---------------------------------------------------------------------------------------------


def test_the_slurm_script_is_valid_and_hands_the_arguments_on_whole(tmp_path):
    arguments = ["--tp", "2", "--output", "a file; rm -rf $HOME 'x'.json"]
    script = tmp_path / "netcheck.sbatch"
    script.write_text(slurm.template(arguments))
    subprocess.run(["bash", "-n", script], check=True)
    seen = run_with_stand_ins(script, tmp_path)
    assert seen[:2] == ["-m", "nanlocator.netcheck"]
    assert seen[-len(arguments) :] == arguments
    assert seen[seen.index("--rdzv-endpoint") + 1] == f"a17:{29400 + 123456 % 10000}"
    assert seen[seen.index("--nproc-per-node") + 1] == "4"


def run_with_stand_ins(script, folder):
    """The words that Python would receive on a node."""
    for name, body in {
        "srun": 'shift; exec "$@"',
        "scontrol": "printf 'a17\\na18\\n'",
        "python": 'for word in "$@"; do printf "%s\\0" "$word"; done',
    }.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o700)
    environment = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "a[17-18]",
        "SLURM_GPUS_ON_NODE": "4",
    }
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]
