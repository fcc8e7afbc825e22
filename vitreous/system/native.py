"""Native C kernels in `native.c`, compiled once by the machine's C compiler. They are optional: without a compiler, or
on another processor, PyTorch's operators compute the same results.

The library is in the cache folder, with a name that depends on its source, its flags, the compiler and PyTorch's OpenMP
runtime. It shares that runtime, so its loops run on PyTorch's threads. `VITREOUS_NATIVE=0` disables it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from vitreous.system.children import run_shielded_process
from vitreous.system.disk import get_cache_folder as cache_folder
from vitreous.system.machine import get_cpu_features

C_SOURCE = Path(__file__).with_suffix(".c")
CPU_INSTRUCTIONS = "avx512f avx512bw avx512vl avx512dq avx512bf16 amx-tile amx-bf16"
COMPILER_FLAGS = ["-O3", "-fPIC", "-fopenmp", "-fno-math-errno", *(f"-m{name}" for name in CPU_INSTRUCTIONS.split())]
COMPILE_TIMEOUT = 60.0  # seconds; compilation usually takes one second


@dataclass(frozen=True)
class NativeLibrary:
    """The compiled library of native kernels.

    `library` is None if it is not available. `tiles`: whether its kernels may use matrix tiles (AMX). `note` is the
    reason why it is not available, or the compiler.
    """

    library: ctypes.CDLL | None
    tiles: bool
    note: str


@cache
def load_native_library() -> NativeLibrary:
    """Compile and load the library of native kernels, once per process."""
    if os.environ.get("VITREOUS_NATIVE") == "0":
        return NativeLibrary(None, False, "disabled by VITREOUS_NATIVE=0")
    if sys.platform != "linux" or platform.machine() != "x86_64" or not has_cpu_feature("avx512_bf16"):
        return NativeLibrary(None, False, "only for x86-64 processors with AVX512-BF16 on Linux")
    runtime, compiler = find_openmp_runtime(), find_compiler()
    if runtime is None:
        return NativeLibrary(None, False, "this build of PyTorch has no GNU OpenMP runtime")
    if not compiler:
        return NativeLibrary(None, False, "no C compiler: install one, such as gcc, for faster bfloat16")
    try:
        library = ctypes.CDLL(str(compile_library(compiler, runtime)))
        tiles = has_cpu_feature("amx_bf16") and library.request_tiles() == 0
    except subprocess.SubprocessError:
        return NativeLibrary(
            None, False, f"{compiler[0]} cannot compile the kernels: use a newer compiler, such as gcc 11 or later"
        )
    except (OSError, AttributeError) as error:
        return NativeLibrary(None, False, f"the library cannot be stored or loaded: {error}")
    return NativeLibrary(library, tiles, f"compiled by {Path(compiler[0]).name}")


def has_cpu_feature(feature: str) -> bool:
    """Return whether the processor has `feature` and `get_cpu_features` permits it: VITREOUS_CPU_ISA can remove a
    feature, but not add one."""
    return get_cpu_features().get(feature, False) and bool(getattr(torch.cpu, "get_capabilities", dict)().get(feature))


def find_compiler() -> list[str]:
    """Return the command of the C compiler with its absolute path: `CC` if it is set, else `cc` or `gcc`; empty if
    there is none."""
    compiler = os.environ.get("CC", "").strip()
    try:
        commands = [shlex.split(compiler)] if compiler else [["cc"], ["gcc"]]
    except ValueError:  # an unbalanced quotation mark
        return []
    return next(([path, *options] for program, *options in commands if (path := shutil.which(program))), [])


def find_openmp_runtime() -> str | None:
    """Return the path of the GNU OpenMP runtime that PyTorch has loaded in this process; None if there is none."""
    with open("/proc/self/maps") as file:
        paths = {line.split(maxsplit=5)[-1].strip() for line in file if "libgomp" in line}
    return min(paths, key=lambda path: ("torch" not in path, path), default=None)


def compile_library(compiler: list[str], runtime: str) -> Path:
    """Compile the library unless it is in the cache folder, and return its path. `runtime` is the path of the OpenMP
    runtime.

    Raises OSError if it cannot be stored, subprocess.SubprocessError if the compiler fails.
    """
    program = os.stat(compiler[0])
    build_settings = [*compiler, *COMPILER_FLAGS, runtime, str(program.st_size), str(program.st_mtime_ns)]
    name = hashlib.sha256("\0".join([*build_settings, C_SOURCE.read_text()]).encode()).hexdigest()[:16]
    library = cache_folder("native") / f"{name}.so"
    if not library.exists():
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            compiled, linked = Path(folder) / "native.o", Path(folder) / library.name
            # linked without -fopenmp, which would load another runtime with separate threads
            for arguments in (
                [*COMPILER_FLAGS, "-c", C_SOURCE, "-o", compiled],
                ["-shared", compiled, runtime, "-o", linked],
            ):
                command = [*compiler, *map(str, arguments)]
                run_shielded_process(command, COMPILE_TIMEOUT).check_returncode()
            os.replace(linked, library)
    if os.stat(library).st_uid not in (0, os.getuid()):
        raise OSError(f"{library} belongs to another user")
    return library
