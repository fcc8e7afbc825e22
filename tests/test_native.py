"""Native kernels: compiled once, cached, and disabled if a requirement is missing."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vitreous.system import native as module
from vitreous.system.native import C_SOURCE, COMPILER_FLAGS, compile_library, find_compiler, find_openmp_runtime

IS_SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64"
pytestmark = pytest.mark.skipif(not IS_SUPPORTED, reason="they are for x86-64 on Linux")


def can_compile() -> bool:
    """Whether this machine has a C compiler that supports the instructions."""
    probe = [*find_compiler(), *COMPILER_FLAGS, "-x", "c", "-c", "-", "-o", "/dev/null"]
    return bool(find_compiler()) and not subprocess.run(probe, input=b"int x;", capture_output=True).returncode


needs_compiler = pytest.mark.skipif(
    not can_compile() or not find_openmp_runtime(), reason="no C compiler for AVX512-BF16 and AMX here"
)


@pytest.fixture
def library_loader(monkeypatch, tmp_path):
    """An empty cache on a simulated AVX512-BF16 processor; compiled code is not called."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("VITREOUS_NATIVE", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(module, "has_cpu_feature", lambda feature: feature == "avx512_bf16")
    return module.load_native_library.__wrapped__


@needs_compiler
def test_the_library_is_compiled_once_and_reused(library_loader, tmp_path, monkeypatch):
    library = library_loader()
    assert isinstance(library.library, ctypes.CDLL) and not library.tiles and library.note.startswith("compiled by ")
    assert all(hasattr(library.library, name) for name in ("layer_norm", "add", "gelu", "attend", "request_tiles"))
    (stored,) = (tmp_path / "vitreous" / "native").iterdir()  # the cache has no other file
    monkeypatch.setattr(module.subprocess, "run", lambda *arguments, **options: pytest.fail("compiled again"))
    assert library_loader().library is not None
    assert stored.suffix == ".so"


@needs_compiler
def test_a_changed_source_is_compiled_to_another_library(library_loader, tmp_path, monkeypatch):
    library_loader()
    changed = tmp_path / "native.c"
    changed.write_text(C_SOURCE.read_text() + "\nlong added(void) { return 7; }\n")
    monkeypatch.setattr(module, "C_SOURCE", changed)
    assert library_loader().library.added() == 7
    assert len(list((tmp_path / "vitreous" / "native").iterdir())) == 2


@needs_compiler
def test_the_source_has_no_warning(tmp_path):
    command = [
        *find_compiler(),
        *COMPILER_FLAGS,
        "-Wall",
        "-Wextra",
        "-Werror",
        "-c",
        str(C_SOURCE),
        "-o",
        str(tmp_path / "x.o"),
    ]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


@needs_compiler
def test_the_library_shares_the_threads_of_pytorch(library_loader, tmp_path):
    """The library does not load a second OpenMP runtime; checked in a new process."""
    library_loader()
    (stored,) = (tmp_path / "vitreous" / "native").iterdir()
    script = f"import ctypes, torch; ctypes.CDLL({str(stored)!r}); print(*open('/proc/self/maps'))"
    maps = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert str(stored) in maps
    assert len({line.split()[-1] for line in maps.splitlines() if "gomp" in line}) == 1


def test_the_library_can_be_disabled(library_loader, monkeypatch):
    monkeypatch.setenv("VITREOUS_NATIVE", "0")
    assert library_loader() == module.NativeLibrary(None, False, "disabled by VITREOUS_NATIVE=0")


def test_a_missing_compiler_is_reported_with_a_hint(library_loader, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert library_loader().library is None and "install one, such as gcc" in library_loader().note
    for named in ("no-such-compiler -O1", "gcc 'without its fellow"):
        monkeypatch.setenv("CC", named)
        assert find_compiler() == []


def test_the_compiler_comes_from_cc_or_the_path(monkeypatch, tmp_path):
    for name in ("gcc", "mine"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", " ")
    assert find_compiler() == [str(tmp_path / "gcc")]
    (tmp_path / "cc").touch(mode=0o755)
    assert find_compiler() == [str(tmp_path / "cc")]
    monkeypatch.setenv("CC", "mine -m64")
    assert find_compiler() == [str(tmp_path / "mine"), "-m64"]


def test_a_failing_compiler_disables_the_library(library_loader, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", shutil.which("false"))
    assert library_loader().library is None and "false cannot compile the kernels" in library_loader().note
    assert list((tmp_path / "vitreous" / "native").iterdir()) == []


def test_an_unwritable_cache_disables_the_library(library_loader, monkeypatch, tmp_path):
    (tmp_path / "vitreous").write_text("a file where the folder should be")
    monkeypatch.setenv("CC", shutil.which("true"))
    assert library_loader().library is None and "cannot be stored or loaded" in library_loader().note


@needs_compiler
def test_a_library_of_another_user_is_not_loaded(library_loader, monkeypatch):
    library_loader()
    owner = module.os.getuid()
    monkeypatch.setattr(module.os, "getuid", lambda: owner + 1)
    if owner != 0:  # libraries of the system administrator are trusted
        assert library_loader().library is None and "belongs to another user" in library_loader().note
    else:
        assert library_loader().library is not None


def test_an_invalid_cached_library_is_not_loaded(library_loader, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", shutil.which("true"))
    monkeypatch.setattr(module, "compile_library", lambda compiler, runtime: Path(__file__))
    assert library_loader().library is None and "cannot be stored or loaded" in library_loader().note


@pytest.mark.parametrize("missing", ["avx512_bf16", "platform", "machine", "runtime"])
def test_unsupported_machines_have_no_library(library_loader, monkeypatch, missing):
    if missing == "avx512_bf16":
        monkeypatch.setattr(module, "has_cpu_feature", lambda feature: False)
    elif missing == "platform":
        monkeypatch.setattr(module.sys, "platform", "darwin")
    elif missing == "machine":
        monkeypatch.setattr(module.platform, "machine", lambda: "aarch64")
    else:
        monkeypatch.setattr(module, "find_openmp_runtime", lambda: None)
    assert library_loader().library is None and not library_loader().tiles


def test_assumed_features_do_not_enable_kernels(monkeypatch):
    """VITREOUS_CPU_ISA may exceed the processor's features, whose kernels would crash the process."""
    monkeypatch.setenv("VITREOUS_CPU_ISA", "AVX512_CORE_AMX")
    monkeypatch.setattr(module.torch.cpu, "get_capabilities", lambda: {"avx2": True})
    assert not module.has_cpu_feature("amx_bf16") and module.has_cpu_feature("avx2")
    monkeypatch.setenv("VITREOUS_CPU_ISA", "AVX2")
    monkeypatch.setattr(module.torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    assert not module.has_cpu_feature("amx_bf16")


@needs_compiler
def test_concurrent_builds_share_one_library(library_loader, tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: compile_library(find_compiler(), find_openmp_runtime()), range(4)))
    (path,) = paths
    assert [path] == list(path.parent.iterdir()) and ctypes.CDLL(str(path)).add
