"""A bundle may come from anywhere: code that came with it runs only with the user's consent."""

import functools
import json
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from replayed_bundles import BUILD, CUSTOM_OP, TRAINING, edited, exported, interpreter, replayed, trained

import nanlocator
from nanlocator import _C
from nanlocator.calls.bundle_code import import_named, require_own
from nanlocator.calls.kernel_calls import KernelCallRecord, _import_kernel

TRACE = Path("executed")  # written by planted code that runs; in the test's folder
OPERATOR = "from pathlib import Path\n\nPath({!r}).touch()\n" + CUSTOM_OP
KERNEL = """
import triton
import triton.language as tl
from pathlib import Path

Path({!r}).touch()


@triton.jit
def kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.sqrt(tl.load(x + at)))
"""
LAUNCHING = """
import torch
from evil_kernels import kernel


def planted(x):
    y = torch.empty_like(x)
    kernel[(1,)](x.detach(), y, BLOCK=4)
    return x + y
"""

# Layout: the bundle's folder, and the file that the bundle names.
LAYOUTS = {
    "in the run's folder": ("nanlocator_run/a0/bundles/b", "nanlocator_run/evil_ops.py"),
    "beside a bundle that was taken out": ("sent/b", "sent/evil_ops.py"),
    "in a folder that others can write": ("nanlocator_run/a0/bundles/b", "open/evil_ops.py"),
    "in the attempt's folder": ("nanlocator_run/a0/bundles/b", "nanlocator_run/a0/evil_ops.py"),
    "a kernel": ("nanlocator_run/a0/bundles/b", "nanlocator_run/evil_kernels.py"),
    "in the bundle": ("nanlocator_run/a0/bundles/b", "nanlocator_run/a0/bundles/b/evil_ops.py"),
    "in bundles": ("nanlocator_run/a0/bundles/b", "nanlocator_run/a0/bundles/evil_ops.py"),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Bundles of evil_ops and evil_kernels."""

    @functools.cache
    def of(module):
        folder = tmp_path_factory.mktemp(module)
        if module == "evil_kernels":
            pytest.importorskip("triton")
            files = {"evil_kernels.py": KERNEL.format("ignored"), "train.py": LAUNCHING + TRAINING}
            return trained(files, folder, TRITON_INTERPRET="1")[1]
        start = "import torch\nfrom evil_ops import planted\n"
        return trained({"evil_ops.py": OPERATOR.format("ignored"), "train.py": start + TRAINING}, folder)[1]

    return of


def laid_out(recorded, layout, folder):
    """The bundle, and the file, which leaves a trace when executed."""
    place, file = (folder / part for part in LAYOUTS[layout])
    shutil.copytree(recorded(file.stem), place)
    file.parent.mkdir(parents=True, exist_ok=True)
    text = KERNEL if layout == "a kernel" else OPERATOR
    file.write_text(text.format(str(folder / TRACE)))
    if layout == "in a folder that others can write":
        file.parent.chmod(0o777)

    def name(content):
        named = content["kernel_call"] or content["operator_call"]["registered_by"][0]
        content["files"].pop(named["source"], None)
        named |= {"file": str(file), "source": None}

    return edited(place, name), file


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_that_a_bundle_names_runs_with_consent_alone(layout, recorded, own_folder):
    bundle, file = laid_out(recorded, layout, own_folder)
    refused = replayed(bundle, TRITON_INTERPRET="1")
    assert refused.returncode == 2 and not TRACE.exists(), refused.stderr
    assert f"The bundle names {file}: none of that was loaded." in refused.stderr
    assert f"nanlocator replay {bundle} --trust" in refused.stderr
    trusted = replayed(bundle, "--trust", TRITON_INTERPRET="1")
    if layout == "in a folder that others can write":
        assert trusted.returncode == 2 and not TRACE.exists(), trusted.stderr
        assert f"{file.parent} is writable by group or others" in trusted.stderr
        assert f"chmod go-w {file.parent}" in trusted.stderr
    else:
        assert trusted.returncode == 1 and TRACE.exists(), trusted.stderr


@pytest.mark.parametrize("layout", ["in the run's folder", "in the bundle"])
def test_by_its_name_nothing_of_the_run_is_imported(layout, recorded, own_folder):
    """Even if the import path has the folder, for whatever reason."""
    bundle, file = laid_out(recorded, layout, own_folder)
    refused = replayed(bundle, importing_from=file.parent)
    assert refused.returncode == 2 and not TRACE.exists(), refused.stderr
    assert f"evil_ops is found at {file}, which may have come with the bundle" in refused.stderr


@pytest.mark.parametrize("kind", ["module", "package", "namespace"])
def test_by_its_name_nothing_of_the_current_folder_is_imported(kind, tmp_path, monkeypatch):
    bundle = tmp_path / "nanlocator_run" / "a0" / "bundles" / "b"
    bundle.mkdir(parents=True)
    here = tmp_path / "here"
    module, file = {
        "module": ("evil_ops", "evil_ops.py"),
        "package": ("evil_ops", "evil_ops/__init__.py"),
        "namespace": ("evil_ops.inner", "evil_ops/inner.py"),
    }[kind]
    (here / file).parent.mkdir(parents=True)
    (here / file).write_text(f"open({str(tmp_path / TRACE)!r}, 'w')")
    monkeypatch.chdir(here)
    for entry in ("", str(here)):
        with monkeypatch.context() as patch:
            patch.syspath_prepend(entry)
            with pytest.raises(nanlocator.UnsupportedError, match="is in the current folder"):
                import_named(module, bundle)
    assert not (tmp_path / TRACE).exists()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(here)
    import_named(module, bundle)  # from another folder, it is an ordinary module on the import path
    assert (tmp_path / TRACE).exists()
    del sys.modules[module]


def test_a_package_that_is_installed_from_the_current_folder_is_imported(tmp_path, monkeypatch):
    """Installed by `pip install -e .`, as pip records it among the installed packages."""
    project, installed = tmp_path / "project", tmp_path / "site-packages"
    (installed / "own_ops-1.dist-info").mkdir(parents=True)
    (installed / "own_ops-1.dist-info" / "METADATA").write_text("Name: own_ops\nVersion: 1\n")
    origin = {"url": project.as_uri(), "dir_info": {"editable": True}}
    (installed / "own_ops-1.dist-info" / "direct_url.json").write_text(json.dumps(origin))
    project.mkdir()
    (project / "own_ops.py").write_text("ANSWER = 42")
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed), str(project)])
    assert import_named("own_ops", project / "nanlocator_run/a0/bundles/b").ANSWER == 42
    del sys.modules["own_ops"]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no memory disk here")
def test_a_program_on_a_memory_disk_has_its_bundle_without_the_name_of_its_file():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        _, bundle = trained({"train.py": "import torch\n" + CUSTOM_OP + TRAINING}, folder)
        (found,) = json.loads((bundle / "bundle.json").read_text())["operator_call"]["registered_by"]
    assert found == {"module": "__main__", "file": None, "source": "registration.py"}


# ---- start of the program ----

# Modules that Python and Torch import early, however the program is started.
SHADOWS = ("argparse", "json", "platform", "typing_extensions", "numpy", "numbers", "sitecustomize")


@pytest.fixture
def hostile_folder(own_folder):
    folder = Path("unpacked")
    folder.mkdir()
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(f"open({str(own_folder / TRACE)!r}, 'a').write({name!r})")
    return folder


def environment(**variables):
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return kept | variables


@pytest.mark.parametrize("before", ["", ":"], ids=["", "with an empty entry in PYTHONPATH"])
def test_the_command_imports_nothing_from_the_current_folder(before, hostile_folder):
    """Also with a Python that does not support PYTHONSAFEPATH, such as 3.10."""
    if not (BUILD / "bin" / "nanlocator").exists():
        pytest.skip("the command was not built")
    Path("bin").mkdir()
    Path("bin/python").write_text(f'#!/bin/sh\nunset PYTHONSAFEPATH\nexec {sys.executable} "$@"\n')
    Path("bin/python").chmod(0o755)
    variables = {
        "PATH": f"{Path('bin').absolute()}:{os.environ['PATH']}",
        "PYTHONPATH": before + os.environ["PYTHONPATH"],
    }
    bundle = kernel_bundle(hostile_folder / "b", name="planted::kernel", module="nowhere", entry="kernel")
    done = subprocess.run(
        [BUILD / "bin" / "nanlocator", "replay", bundle.name],
        cwd=hostile_folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and not TRACE.exists(), done.stderr
    assert "nanlocator.replay: kernel of nowhere cannot be imported" in done.stderr


def test_python_m_imports_nothing_from_the_current_folder(hostile_folder):
    bundle = kernel_bundle(hostile_folder / "b", name="planted::kernel", module="argparse", entry="kernel")
    done = interpreter("-m", "nanlocator.replay", bundle.name, cwd=hostile_folder, PYTHONSAFEPATH="")
    assert done.returncode == 2 and not TRACE.exists(), done.stderr
    assert "argparse.kernel is not a function of a PyTorch extension module" in done.stderr


# ---- kernels ----


def kernel_bundle(folder, arguments=(), **call):
    """A bundle of a kernel with the attributes ``call`` and no tensors."""
    written = _C.ModuleCall("m", "M", True, ()).write(folder.parent / f"{folder.name}-written")
    (folder.parent / f"{folder.name}-written" / written).rename(folder)
    nothing = {"arguments_after": [], "beside": [], "results": [], "keywords": [], "launch": [], "names": []}
    unknown = {"launcher": "function", "file": None, "source": None, "why_not_replayed": None}

    def add(content):
        content["module_call"], content["files"] = None, {}
        content["kernel_call"] = nothing | unknown | {"environment": {}, "arguments": list(arguments)} | call

    return edited(folder, add)


@pytest.mark.parametrize(
    ("module", "entry", "launcher"),
    [
        ("os", "system", "function"),
        ("posix", "system", "function"),
        ("subprocess", "run", "function"),
        ("_posixsubprocess", "fork_exec", "function"),
        ("torch", "load", "function"),
        ("torch._C", "_cuda_synchronize", "function"),
        ("subprocess", "os", "triton"),
        ("os", "system", "triton"),
    ],
)
def test_what_a_bundle_calls_a_kernel_is_called_only_where_it_is_one(module, entry, launcher, tmp_path):
    """In a replay and in the exported script."""
    record = KernelCallRecord("planted::kernel", launcher, module, entry, "")
    with pytest.raises(
        nanlocator.UnsupportedError, match=r"is not a (function of a PyTorch ext|Triton kernel)"
    ):
        _import_kernel(record, tmp_path, trust=False)
    command = [f"touch {(tmp_path / TRACE).absolute()}"]
    bundle = kernel_bundle(
        tmp_path / "b", command, name="planted::kernel", module=module, entry=entry, launcher=launcher
    )
    done = exported(bundle, bundle)
    assert done.returncode == 1 and not TRACE.exists(), done.stdout
    assert f"{module}.{entry} is no " in done.stderr and "it was not called" in done.stderr


@pytest.mark.parametrize("launcher", ["function", "triton"])
def test_a_file_that_can_hold_no_kernel_is_not_executed_with_consent_either(launcher, own_folder):
    file = own_folder / f"evil.{ {'function': 'py', 'triton': 'so'}[launcher] }"
    file.write_text(f"open({str(own_folder / TRACE)!r}, 'w')")
    record = KernelCallRecord("planted::kernel", launcher, "evil", "kernel", str(file))
    with pytest.raises(
        nanlocator.UnsupportedError, match=r"loading it from .* failed, too: evil.kernel is not a"
    ):
        _import_kernel(record, own_folder / "b", trust=True)
    assert not TRACE.exists()


def test_an_argument_that_is_found_by_its_name_is_not_found_in_the_run(own_folder, monkeypatch):
    folder = own_folder / "nanlocator_run"
    (folder / "a0" / "bundles").mkdir(parents=True)
    (folder / "evil.py").write_text(f"X = open({str(own_folder / TRACE)!r}, 'w')")
    monkeypatch.syspath_prepend(folder)
    argument = {
        "kind": "object",
        "text": "nanlocator.kernel_calls.Imported",
        "names": ["module", "name"],
        "items": ["evil", "X"],
    }
    bundle = folder / "a0" / "bundles" / "b"
    kernel_bundle(bundle, [argument], name="k::k", module="planted_kernels", entry="silu")
    if not (BUILD / "tests" / "planted_kernels.so").exists():
        pytest.skip("planted_kernels.so is built with the C++ tests")
    monkeypatch.syspath_prepend(BUILD / "tests")
    with pytest.raises(nanlocator.UnsupportedError, match=r"evil\.X .* may have come with"):
        nanlocator.replay.run(bundle)
    assert not TRACE.exists()


def test_of_the_variables_only_those_of_libraries_of_kernels_are_read(tmp_path):
    for variable in ("LD_PRELOAD", "PYTHONPATH", "PATH", "triton_interpret"):
        call = {"name": "k::k", "module": "m", "entry": "e", "environment": {variable: ""}}
        bundle = kernel_bundle(tmp_path / variable, **call)
        with pytest.raises(nanlocator.FormatError, match=f'"{variable}" is not a variable of a kernel'):
            _C.export_python(bundle)


def test_a_script_sets_variables_that_name_programs_with_consent_alone(tmp_path):
    variables = {"TRITON_INTERPRET": "1", "TRITON_PTXAS_PATH": "/evil"}
    bundle = kernel_bundle(tmp_path / "b", name="k::k", module="os", entry="system", environment=variables)
    script = _C.export_python(bundle)
    assert '\nos.environ.setdefault("TRITON_INTERPRET", "1")\n' in script
    assert '\nif trust:\n    os.environ.setdefault("TRITON_PTXAS_PATH", "/evil")\n' in script


# ---- files ----


def test_a_file_is_loaded_where_nobody_else_could_have_written_it(own_folder):
    file = own_folder / "folder" / "file.py"
    file.parent.mkdir()
    file.write_text("")
    require_own(file)
    require_own("folder/file.py")

    def refusal(path=file):
        with pytest.raises(nanlocator.UnsupportedError) as raised:
            require_own(path)
        return str(raised.value)

    for changed, mode in ((file, 0o664), (file, 0o646), (file.parent, 0o775), (file.parent, 0o757)):
        usual = changed.stat().st_mode
        changed.chmod(mode)
        assert (
            f"{changed} is writable by group or others. Read the file, then run: chmod go-w {changed}"
            in refusal()
        )
        changed.chmod(usual)
    file.parent.chmod(0o1777)  # like /tmp: others can put files beside it
    assert f"{file.parent} is writable by group or others. Read the file, then copy it to" in refusal()
    file.parent.chmod(0o755)
    own_folder.chmod(0o1777)  # but not replace a folder of the user in it
    require_own(file)
    own_folder.chmod(0o777)
    assert f"{own_folder} is writable by group or others" in refusal()
    own_folder.chmod(0o755)
    # Through a link that others could have changed, though its current target is safe.
    between = own_folder / "between"
    between.mkdir()
    (between / "link").symlink_to(file)
    (own_folder / "start.py").symlink_to("between/../between/link")
    require_own("start.py")
    between.chmod(0o777)
    assert f"{between} is writable by group or others" in refusal("start.py")
    (own_folder / "loop").symlink_to("loop")
    assert "too many symbolic links" in refusal("loop")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_not_loaded(own_folder):
    file = own_folder / "file.py"
    file.write_text("")
    os.chown(file, 12345, -1)
    with pytest.raises(nanlocator.UnsupportedError, match=f"{file} belongs to user 12345"):
        require_own(file)
    os.chown(file, os.geteuid(), -1)
    link = own_folder / "link.py"
    link.symlink_to(file)
    require_own(link)
    os.chown(link, 12345, -1, follow_symlinks=False)
    with pytest.raises(nanlocator.UnsupportedError, match=f"{link} belongs to user 12345"):
        require_own(link)


def test_what_lies_compiled_beside_a_file_is_not_executed(recorded, own_folder):
    """A user who has read the source does not know the compiled file."""
    bundle, file = laid_out(recorded, "in the run's folder", own_folder)
    source = file.read_text()
    file.write_text("raise SystemExit('compiled')".ljust(len(source)))
    py_compile.compile(file)
    times = file.stat()
    file.write_text(source)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    imported = interpreter("-c", "import evil_ops", cwd=file.parent)
    assert imported.stderr == "compiled\n"
    done = replayed(bundle, "--trust")
    assert done.returncode == 1 and TRACE.exists(), done.stderr


# ---- printed text ----


def test_no_text_of_a_bundle_reaches_the_terminal_as_it_is(tmp_path):
    title, csi = "\x1b]0;owned\x07", "\x9b31m"
    unknown = kernel_bundle(tmp_path / "b1", name=f"k{title}::k", module=f"no{csi}where", entry=f"e{title}")
    known = kernel_bundle(
        tmp_path / "b2", name=f"k{title}::k", module="m", entry="e", why_not_replayed=f"because {title}{csi}"
    )
    for bundle in (unknown, known):
        done = replayed(bundle)
        assert done.returncode == 2
        said = done.stdout + done.stderr
        assert "\\x1b]0;owned\\x07" in said or "\\x9b31m" in said
        assert all(character.isprintable() or character == "\n" for character in said), said
    script = exported(unknown, unknown)
    assert script.returncode == 1
    assert all(character.isprintable() or character == "\n" for character in script.stderr), script.stderr
