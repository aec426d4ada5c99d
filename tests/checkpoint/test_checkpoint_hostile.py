"""Truncated, damaged, hostile and foreign files: an error that names file and byte, in bounded time and
memory, and nothing of the file is run."""

import json
import math
import os
import pickle
import resource
import socket
import struct
import subprocess
import sys
import time
import zipfile

import pytest
import torch
from checkpoints import contents, flip, found, trained
from safetensors.torch import save_file

from nanlocator import check_checkpoint


def unread(path):
    """The reasons for what was not read."""
    report = check_checkpoint(path)
    assert report.exit_code in (1, 3) and report.is_safe is not True
    return [f"{each.what}: {each.reason}" for each in report.checkpoints[0].unread]


def safetensors_file(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        (
            {"a": entry(offsets=(0, 8), shape=(2,)), "b": entry(offsets=(4, 8))},
            b"\0" * 8,
            "b at byte 4 .*overlaps",
        ),
        ({"a": entry(offsets=(4, 8))}, b"\0" * 8, "a hole"),
        ({"a": entry()}, b"\0" * 8, "4 bytes follow the last tensor"),
        ({"a": entry(shape=(3,))}, b"\0" * 4, "does not have the 4 bytes"),
        ({"a": entry(shape=(-1,))}, b"\0" * 4, "no valid shape"),
        ({"a": entry(shape=(1 << 62, 1 << 62))}, b"\0" * 4, "does not have the 4 bytes"),
        ({"a": entry(offsets=(4, 0))}, b"\0" * 4, "does not have the -4 bytes"),
        ({"a": entry(dtype="X9")}, b"\0" * 4, "unknown dtype X9"),
        ({"a": {"dtype": "F32"}}, b"\0" * 4, "entry for a is incomplete"),
        ({"a": 3}, b"", "entry for a is incomplete"),
        (b'{"a":1,"a":2}', b"", "appears twice"),
        (b'{"a"', b"", "no valid JSON"),
        (b"[" * 100_000, b"", "no valid JSON"),
    ],
)
def test_a_damaged_header_of_safetensors_is_named(tmp_path, header, data, reason):
    import re

    (text,) = unread(safetensors_file(tmp_path / "a.safetensors", header, data))
    assert re.search(reason, text) and text.startswith("a.safetensors: ")


@pytest.mark.parametrize("length", [1 << 60, (1 << 64) - 1, 99_999_999])
def test_a_header_of_2_to_the_60_bytes_is_not_read(tmp_path, length):
    (text,) = unread(safetensors_file(tmp_path / "a.safetensors", {"a": entry()}, b"\0" * 4, length))
    assert f"would have {length} bytes at byte 8" in text


def test_of_a_truncated_safetensors_file_what_is_there_is_read(tmp_path):
    file = tmp_path / "a.safetensors"
    tensors = {"first": torch.tensor([1.0, math.nan]), "second": torch.ones(1000)}
    save_file(tensors, file)
    flip(file, lambda content: content.__delitem__(slice(-100, None)))
    assert found(file) == {("nonfinite", "first", (1,))}
    (text,) = unread(file)
    assert text.startswith("second: a.safetensors: ") and "truncated" in text


def test_a_truncated_archive_is_named(tmp_path):
    file = tmp_path / "a.pt"
    torch.save(trained()[0].state_dict(), file)
    size = file.stat().st_size
    for kept in (size // 2, 100, 3, 0):
        flip(file, lambda content, kept=kept: content.__delitem__(slice(kept, None)))
        (text,) = unread(file)
        assert text.startswith("a.pt: ") and ("truncated" in text or "neither" in text or "empty" in text)
        assert contents(file) == ("unknown", "unknown")


def test_of_a_truncated_old_file_what_is_there_is_read(tmp_path):
    file = tmp_path / "a.pt"
    state = {name: torch.full((1000,), math.inf) for name in "ab"}
    torch.save(state, file, _use_new_zipfile_serialization=False)
    flip(file, lambda content: content.__delitem__(slice(-10, None)))
    (text,) = unread(file)
    ((_, name, _),) = found(file)
    assert "truncated" in text and name != text[0]


def test_every_cut_of_a_file_ends_with_a_reason(tmp_path):
    for name, save in {
        "a.pt": lambda path: torch.save({"w": torch.ones(3)}, path),
        "b.pt": lambda path: torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False),
        "c.safetensors": lambda path: save_file({"w": torch.ones(3)}, path),
    }.items():
        file = tmp_path / name
        save(file)
        content = file.read_bytes()
        for kept in range(0, len(content), 7):
            file.write_bytes(content[:kept])
            assert check_checkpoint(file).exit_code == 3, (name, kept)


def test_random_damage_ends_with_a_report(tmp_path):
    import random

    chance = random.Random(0)
    for name in ("a.pt", "b.pt", "c.safetensors"):
        file = tmp_path / name
        state = trained()[0].state_dict()
        if name == "c.safetensors":
            save_file(state, file)
        else:
            torch.save(state, file, _use_new_zipfile_serialization=name == "a.pt")
        content = file.read_bytes()
        for _ in range(150):
            damaged = bytearray(content)
            for _ in range(chance.randint(1, 8)):
                damaged[chance.randrange(min(len(damaged), 1500))] = chance.randrange(256)
            file.write_bytes(damaged)
            assert check_checkpoint(file).exit_code in (0, 1, 3)


class Planted:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_that_would_run_a_function_runs_nothing_and_its_tensors_are_read(tmp_path, is_zip):
    state = {"evil": Planted(), "w": torch.tensor([math.nan])}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
    assert found(tmp_path / "a.pt") == {("nonfinite", "w", (0,))}
    assert not (tmp_path / "executed").exists()
    with pytest.raises(FileNotFoundError):
        (tmp_path / "executed").rmdir()


def archive(path, pickled, compression=zipfile.ZIP_STORED, **records):
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("a/data.pkl", pickled)
        for name, content in records.items():
            file.writestr(f"a/data/{name}", content)
    return path


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path):
    file = archive(tmp_path / "a.pt", b"\0" * (64 << 20), zipfile.ZIP_DEFLATED)
    assert file.stat().st_size < 1 << 20
    (text,) = unread(file)
    assert "compressed" in text


def test_records_that_share_their_bytes_are_refused(tmp_path):
    torch.save({"a": torch.ones(100), "b": torch.ones(100)}, tmp_path / "a.pt")

    def point_to_the_first(content):
        """Gives the record data/1 the place of data/0, in the directory."""
        places = [content.rfind(f"data/{number}".encode()) for number in (0, 1)]
        first, second = (content.rfind(b"PK\x01\x02", 0, place) for place in places)
        content[second + 42 : second + 46] = content[first + 42 : first + 46]

    flip(tmp_path / "a.pt", point_to_the_first)
    (text,) = unread(tmp_path / "a.pt")
    assert "overlaps" in text


def storage(numel):
    return (
        b"(X\x07\x00\x00\x00storagectorch\n" + b"FloatStorage\nX\x01\x00\x00\x000"
        + b"X\x03\x00\x00\x00cpu\x8a\x08" + struct.pack("<q", numel) + b"tQ"
    )  # fmt: skip


def number(value):
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def view(sizes, strides, offset=0):
    """A pickle of one tensor, by hand."""
    sizes, strides = (b"(" + b"".join(map(number, each)) + b"t" for each in (sizes, strides))
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage(1) + number(offset) + sizes + strides
        + b"\x89}tR."
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "strides", "offset"),
    [((1 << 40,), (1,), 0), ((2,), (1 << 60,), 0), ((1,), (1,), 1 << 60), ((-1,), (1,), 0), ((1,), (-1,), 0)],
)
def test_a_view_beyond_its_storage_is_not_read(tmp_path, sizes, strides, offset):
    (text,) = unread(archive(tmp_path / "a.pt", view(sizes, strides, offset), **{"0": b"\0" * 64}))
    assert "beyond" in text or "no valid shape" in text


@pytest.mark.parametrize(
    ("sizes", "strides"),
    [((1 << 60,), (0,)), ((1 << 20, 1 << 20), (0, 1 << 3)), ((4,) * 40, (1,) * 40), ((1 << 40, 2), (0, 2))],
)
def test_a_view_of_few_bytes_with_2_to_the_60_elements_takes_no_time(tmp_path, sizes, strides):
    file = archive(tmp_path / "a.pt", view(sizes, strides), **{"0": b"\0" * (64 << 20)})
    began = time.monotonic()
    assert check_checkpoint(file).exit_code == 0
    assert time.monotonic() - began < 30


HOSTILE_PICKLES = {
    # (((...),(...)),...) as a key: hashing it would take 2^60 steps.
    "a nested key": b"\x80\x04}("
    + b")\x94"
    + b"".join(b"h" + bytes([i]) + b"\x86\x94" for i in range(60))
    + b"Nu.",
    "a memo at 2^32": b"\x80\x04Nr\xff\xff\xff\xff.",
    "a text of 2^60 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"abc.",
    "a bytearray of 2^60 bytes": b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b"abc.",
    "a number of 2^31 bytes": b"\x80\x04\x8b" + struct.pack("<i", (1 << 31) - 1) + b"\x01.",
    "a negative number of bytes": b"\x80\x04\x8b" + struct.pack("<i", -1) + b"\x01.",
    "a tensor of 2^60": b"\x80\x02ctorch\nTensor\n" + number(1 << 60) + b"\x85R.",
    "a bytearray of builtins": b"\x80\x02cbuiltins\nbytearray\n" + number(1 << 50) + b"\x85R.",
    "a list in itself": b"\x80\x04]\x94h\x00a.",
    "nested lists": b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "no mark": b"\x80\x04t.",
    "an empty stack": b"\x80\x040.",
    "an extension": b"\x80\x02\x82\x01.",
    "a line without an end": b"\x80\x02c" + b"a" * 200_000,
    "many calls with the same arguments": b"\x80\x04("
    + b"N" * 30_000
    + b"t\x940]("
    + b"cx\ny\n\x94h\x00R"
    + b"h\x01h\x00R" * 30_000
    + b"e.",
    "many dictionaries of the same arguments": b"\x80\x04("
    + b"N" * 30_000
    + b"t\x940]("
    + b"ccollections\nOrderedDict\n\x94h\x00R"
    + b"h\x01h\x00R" * 30_000
    + b"e.",
    "the same long key": b"\x80\x04(" + b"K\x01" * 30_000 + b"t\x940](" + b"}h\x00Ns" * 30_000 + b"e.",
    "calls in calls": b"\x80\x02"
    + b"ctorch._utils\n_rebuild_parameter\n(" * 20_000
    + b"N"
    + b"tR" * 20_000
    + b".",
    "a storage in a key": b"\x80\x02((lp0\ng0\ntQ.",
}


@pytest.mark.parametrize("name", HOSTILE_PICKLES)
def test_a_hostile_pickle_costs_neither_time_nor_memory(tmp_path, name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    assert check_checkpoint(archive(tmp_path / "a.pt", HOSTILE_PICKLES[name])).exit_code == 3
    assert time.monotonic() - began < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB


def test_memory_does_not_grow_with_the_file(tmp_path):
    file = tmp_path / "a.safetensors"
    safetensors_file(file, {"a": entry("F32", (1 << 28,), (0, 1 << 30))})
    os.truncate(file, (1 << 30) + file.stat().st_size)
    script = (
        "import resource, sys, nanlocator\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert nanlocator.check_checkpoint(sys.argv[1]).checkpoints[0].bytes_read == 1 << 30\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, file], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64_000  # kB


def test_pipes_devices_and_sockets_are_not_read(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    os.mkfifo(folder / "model.safetensors")
    (folder / "zero.pt").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket.bin"))
        texts = unread(folder)
    assert len(texts) == 3 and all(
        "not a regular file" in text or "cannot be opened" in text for text in texts
    )


def test_a_link_out_of_the_folder_is_read_and_said_to_be_one(tmp_path):
    """As in the cache of Hugging Face's hub."""
    save_file({"w": torch.ones(3)}, tmp_path / "blob")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    (folder / "loop").symlink_to(folder)
    (checkpoint,) = check_checkpoint(folder).checkpoints
    assert checkpoint.is_safe and f"is a link to {tmp_path / 'blob'}" in checkpoint.notes[0]
    assert len(checkpoint.tensors) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.gguf", b"GGUF"),
        ("tf_model.h5", b"\x89HDF\r\n"),
        ("flax_model.msgpack", b"\x80"),
        ("pytorch_model.bin", b"ggml and more"),
        ("model.pt", b"not a checkpoint"),
    ],
)
def test_foreign_files_beside_a_model_are_named_as_unread(tmp_path, name, content):
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / name).write_bytes(content)
    (text,) = unread(tmp_path)
    assert text.startswith(f"{name}: ")


def test_a_script_of_torch_is_unread_with_its_reason(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "a.pt")
    (text,) = unread(tmp_path / "a.pt")
    assert "TorchScript" in text


def test_what_a_plain_pickle_or_numpy_holds_is_unread_and_not_finite(tmp_path):
    import numpy

    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"w": torch.ones(2)}))
    torch.save({"w": numpy.ones(3)}, tmp_path / "b.pt")
    assert "pickled without torch.save" in unread(tmp_path / "a.pkl")[0]
    assert "numpy array" in unread(tmp_path / "b.pt")[0]


def test_names_from_files_do_not_reach_the_terminal_raw(tmp_path):
    from nanlocator.check_checkpoint.text import text_of

    torch.save({"\x1b[2Jw": torch.tensor([math.nan])}, tmp_path / "a.pt")
    assert "\x1b" not in text_of(check_checkpoint(tmp_path / "a.pt"))
