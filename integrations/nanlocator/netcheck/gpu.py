"""Data that a vendor asks for when a GPU is suspected: read from nvidia-smi and the kernel's log, without
changes.

Any source may be absent, hang or be cut short, especially on a machine with a broken GPU. So each has a
deadline, and "missing" lists what could not be read. The elements are those of nvidia-smi's
nvsmi_device_v12.dtd (drivers since 525) and v11; an element that a driver does not have is missing.
"""

import re
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import Any

import torch

_DEADLINE = 10.0  # seconds per command; nvidia-smi waits forever if its driver does
_LARGEST_XML = 16 << 20  # bytes; one GPU takes 50 kB
_DOCUMENT_ENTITIES = re.compile(r"<!ENTITY", re.IGNORECASE)

_COUNT = re.compile(r"[0-9]{1,18}")

# NVIDIA, "XID Errors" (docs.nvidia.com/deploy/xid-errors), in the words of its table. Only codes that point
# to the machine; codes that a program can cause by itself (13, 31, 43, 45, ...) are shown and not counted.
XID_FAULTS = {
    48: "Double Bit ECC Error",
    62: "Internal micro-controller halt",
    63: "ECC page retirement or row remapping recording event",
    64: "ECC page retirement or row remapper recording failure",
    74: "NVLINK Error",
    79: "GPU has fallen off the bus",
    92: "High single-bit ECC error rate",
    94: "Contained ECC error",
    95: "Uncontained ECC error",
    119: "GSP RPC Timeout",
    120: "GSP Error",
    140: "Unrecovered ECC Error",
}
_UNCORRECTED = ("sram_uncorrectable", "dram_uncorrectable", "double_bit")
_ROW_REMAPPING = 63  # recorded, and resolved if no remapping is pending

# "NVRM: Xid (PCI:0000:17:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
_XID_LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]{1,32})\): (\d{1,4})\b")
_NVLINK_LINE = re.compile(r"Link (\d{1,4}): (Replay|Recovery|CRC) Errors: (\d{1,18})\b")


def hardware(device: torch.device | str) -> dict[str, Any]:
    """Facts of one GPU ("cuda:3"); {} for a CPU. Keys, if they can be read: pci_address, uuid, serial,
    product, vbios, driver; ecc_mode, ecc_volatile (since the driver was loaded), ecc_aggregate (over the
    GPU's life), remapped_rows, retired_pages; clocks, clocks_limited_by, temperature, power, pcie;
    reset_required, recovery_action; nvlink (error counters by link), xid (lines of the kernel's log); missing
    (sentences)."""
    device = torch.device(device)
    if device.type != "cuda":
        return {}
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    missing: list[str] = []
    facts = _query(uuid, missing)
    address = facts.get("pci_address") or _address_by_torch(device)
    facts["nvlink"] = _nvlink_errors(uuid, missing)
    facts["xid"] = _xids(address, missing)
    return {"uuid": uuid, "pci_address": address, **facts, "missing": missing}


def hardware_faults(facts: dict[str, Any]) -> list[str]:
    """Sentences on facts of `hardware` that disqualify the GPU. Counts over the GPU's life do not: those
    errors may have been repaired."""
    return [*_ecc_faults(facts), *_repair_faults(facts), *_xid_faults(facts)]


# --- judging -----------------------------------------------------------------------------------------


def _ecc_faults(facts: dict[str, Any]) -> list[str]:
    faults = [
        f"{count} uncorrected ECC error{'s' if count != 1 else ''} since the driver was loaded ({name})"
        for name, count in facts.get("ecc_volatile", {}).items()
        if name.startswith(_UNCORRECTED) and isinstance(count, int) and count > 0
    ]
    if facts.get("ecc_aggregate", {}).get("sram_threshold_exceeded") == "Yes":
        faults.append("the threshold of uncorrected SRAM errors is exceeded: NVIDIA replaces such GPUs")
    return faults


def _repair_faults(facts: dict[str, Any]) -> list[str]:
    remapped = facts.get("remapped_rows", {})
    faults = []
    if remapped.get("failure") == "Yes":
        faults.append("remapping of a bad memory row has failed: NVIDIA replaces such GPUs")
    if remapped.get("pending") == "Yes":
        faults.append("remapping of a bad memory row is pending: reset the GPU")
    if facts.get("retired_pages", {}).get("pending") == "Yes":
        faults.append("retirement of a bad memory page is pending: reset the GPU")
    if facts.get("reset_required") == "Yes":
        faults.append("the driver requires a reset of the GPU")
    action = facts.get("recovery_action", "None")
    if action != "None":
        faults.append(f"the driver requests a recovery of the GPU: {action}")
    return faults


def _xid_faults(facts: dict[str, Any]) -> list[str]:
    is_remapped = facts.get("remapped_rows", {}).get("pending") == "No"
    lines: dict[int, list[str]] = {}
    for entry in facts.get("xid", []):
        lines.setdefault(entry["code"], []).append(entry["line"])
    return [
        f"Xid {code} ({XID_FAULTS[code]}), {len(found)} in the kernel log, the latest: {found[-1]}"
        for code, found in sorted(lines.items())
        if code in XID_FAULTS and not (code == _ROW_REMAPPING and is_remapped)
    ]


# --- nvidia-smi --------------------------------------------------------------------------------------


class Unreadable(Exception):
    """The reason why a source gave no data."""


def _query(uuid: str, missing: list[str]) -> dict[str, Any]:
    try:
        return parse_query(_output(["nvidia-smi", "-q", "-x", "-i", uuid]), uuid)
    except Unreadable as reason:
        missing.append(f"ECC, remapped rows, clocks and temperature: {reason}")
        return {}


def parse_query(text: str, uuid: str) -> dict[str, Any]:
    """The GPU `uuid` in the output of ``nvidia-smi -q -x``. Raises Unreadable if the GPU is absent or the
    output cut off."""
    if len(text) > _LARGEST_XML or _DOCUMENT_ENTITIES.search(text):
        raise Unreadable("nvidia-smi printed something other than its XML log")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise Unreadable(f"nvidia-smi's XML cannot be read ({error}); was it cut short?") from None
    gpu = next((gpu for gpu in root.iter("gpu") if gpu.findtext("uuid", "").strip() == uuid), None)
    if gpu is None:
        raise Unreadable(f"nvidia-smi does not list {uuid}")
    facts = {
        "pci_address": gpu.get("id") or _text(gpu, "pci/pci_bus_id"),
        "serial": _text(gpu, "serial"),
        "product": _text(gpu, "product_name"),
        "vbios": _text(gpu, "vbios_version"),
        "driver": _text(root, "driver_version"),
        "ecc_mode": _text(gpu, "ecc_mode/current_ecc"),
        "ecc_volatile": _ecc_counts(gpu, "ecc_errors/volatile"),
        "ecc_aggregate": _ecc_counts(gpu, "ecc_errors/aggregate"),
        "remapped_rows": _some(
            gpu,
            corrected="remapped_rows/remapped_row_corr",
            uncorrected="remapped_rows/remapped_row_unc",
            pending="remapped_rows/remapped_row_pending",
            failure="remapped_rows/remapped_row_failure",
        ),
        "retired_pages": _some(
            gpu,
            single_bit="retired_pages/multiple_single_bit_retirement/retired_count",
            double_bit="retired_pages/double_bit_retirement/retired_count",
            pending="retired_pages/pending_retirement",
        ),
        "clocks": _some(gpu, sm="clocks/sm_clock", memory="clocks/mem_clock", sm_most="max_clocks/sm_clock"),
        "clocks_limited_by": _active_reasons(gpu),
        "temperature": _some(gpu, gpu="temperature/gpu_temp", memory="temperature/memory_temp"),
        "power": _some(
            gpu, draw="gpu_power_readings/power_draw", limit="gpu_power_readings/current_power_limit"
        ),
        "pcie": _some(
            gpu,
            generation="pci/pci_gpu_link_info/pcie_gen/current_link_gen",
            most_generation="pci/pci_gpu_link_info/pcie_gen/max_link_gen",
            width="pci/pci_gpu_link_info/link_widths/current_link_width",
            most_width="pci/pci_gpu_link_info/link_widths/max_link_width",
            replays="pci/replay_counter",
        ),
        "reset_required": _text(gpu, "gpu_reset_status/reset_required"),
        "recovery_action": _text(gpu, "gpu_recovery_action"),
    }
    return {name: value for name, value in facts.items() if value not in (None, {})}


def _text(element: ElementTree.Element, path: str) -> str | None:
    text = element.findtext(path, "").strip()
    return text if text and text not in ("N/A", "[N/A]") else None


def _value(element: ElementTree.Element, path: str) -> str | int | None:
    text = _text(element, path)
    return int(text) if text is not None and _COUNT.fullmatch(text) else text


def _some(element: ElementTree.Element, **paths: str) -> dict[str, str | int]:
    values = {name: _value(element, path) for name, path in paths.items()}
    return {name: value for name, value in values.items() if value is not None}


def _ecc_counts(gpu: ElementTree.Element, path: str) -> dict[str, str | int]:
    """By kind and cause from Turing on; before, the totals of single_bit and double_bit."""
    parent = gpu.find(path)
    if parent is None:
        return {}
    kinds = {child.tag: child.tag for child in parent}
    return _some(parent, **(kinds | {"single_bit": "single_bit/total", "double_bit": "double_bit/total"}))


def _active_reasons(gpu: ElementTree.Element) -> list[str] | None:
    """Called throttle reasons before driver 535."""
    for name in ("clocks_event_reason", "clocks_throttle_reason"):
        reasons = gpu.find(f"{name}s")
        if reasons is not None:
            return [
                child.tag.removeprefix(f"{name}_")
                for child in reasons
                if (child.text or "").strip() == "Active"
            ]
    return None


def _nvlink_errors(uuid: str, missing: list[str]) -> list[dict[str, int]]:
    try:
        return parse_nvlink(_output(["nvidia-smi", "nvlink", "-e", "-i", uuid]))
    except Unreadable as reason:
        missing.append(f"NVLink errors: {reason}")
        return []


def parse_nvlink(text: str) -> list[dict[str, int]]:
    """[{"link": 0, "replay": 0, "recovery": 0, "crc": 0}, ...] of one GPU; [] if it has no NVLink."""
    links: dict[int, dict[str, int]] = {}
    for number, kind, count in _NVLINK_LINE.findall(text):
        links.setdefault(int(number), {"link": int(number)})[kind.lower()] = int(count)
    return list(links.values())


# --- the kernel's log --------------------------------------------------------------------------------


def _xids(address: str, missing: list[str]) -> list[dict[str, Any]]:
    try:
        return parse_kernel_log(_kernel_log(), address)
    except Unreadable as reason:
        missing.append(f"Xid errors: kernel log not readable ({reason})")
        return []


def _kernel_log() -> str:
    reasons = []
    for command in (["dmesg"], ["journalctl", "--dmesg", "--boot", "--quiet", "--no-pager"]):
        try:
            if text := _output(command):
                return text
            reasons.append(f"{command[0]} printed nothing")
        except Unreadable as reason:
            reasons.append(str(reason))
    raise Unreadable("; ".join(reasons))


def parse_kernel_log(text: str, address: str) -> list[dict[str, Any]]:
    """[{"code": 79, "line": "..."}]: the Xid lines of the GPU at `address` ("00000000:1B:00.0"), in order."""
    place = _place(address)
    if place is None:
        return []
    matches = ((line.strip(), match) for line in text.splitlines() if (match := _XID_LINE.search(line)))
    return [{"code": int(match[2]), "line": line} for line, match in matches if _place(match[1]) == place]


def _place(address: str) -> tuple[int, ...] | None:
    """Domain, bus and device. The kernel writes the domain with four digits and no function, nvidia-smi with
    eight digits and one."""
    try:
        domain, bus, device = address.split(".")[0].split(":")
        return int(domain, 16), int(bus, 16), int(device, 16)
    except ValueError:
        return None


def _address_by_torch(device: torch.device) -> str:
    p: Any = torch.cuda.get_device_properties(device)  # torch's types lack these three
    return f"{p.pci_domain_id:08X}:{p.pci_bus_id:02X}:{p.pci_device_id:02X}.0"


def _output(command: Sequence[str]) -> str:
    """Output of `command` within the deadline. Raises Unreadable if there is none."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_DEADLINE, check=False
        )
    except FileNotFoundError:
        raise Unreadable(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise Unreadable(f"{command[0]} did not answer within {_DEADLINE:.0f} s") from None
    except OSError as error:
        raise Unreadable(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Unreadable(
            f"{command[0]} failed with status {done.returncode}: {said[0] if said else 'no message'}"
        )
    return done.stdout
