"""Lazy imports of optional libraries, mostly of the extra `export`, and OpenVINO without telemetry."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

from vitreous.errors import ResourceError, install_hint
from vitreous.system.cores import count_compute_threads


def import_optional_library(name: str, requirement: str = "exported models need") -> Any:
    """Import an optional library. Raises ResourceError, with the command that installs it, if it is missing.
    `requirement`: the start of that message, before the library's name."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ResourceError(f"{requirement} {name}, which is not installed", install_hint("export")) from None


@cache
def get_openvino_core() -> Any:
    """Return the OpenVINO Core of this process, which is never destroyed.

    Its CPU plugin gives the thread that loads it an alternate signal stack, and unmaps it when the Core is destroyed.
    If several Cores are destroyed in another order than they were created in, the thread keeps an unmapped stack, and
    the next signal ends the process with SIGSEGV. Raises ResourceError if OpenVINO is not installed.
    """
    return import_optional_library("openvino").Core()


def compile_openvino_graph(graph: Any, precision: str, **hints: str) -> Any:
    """Compile an OpenVINO graph for the CPU with the threads of `count_compute_threads`. `precision`: OpenVINO's
    precision hint, "f32" or "bf16". Raises RuntimeError for a graph that OpenVINO cannot run on this machine."""
    properties = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": count_compute_threads(), **hints}
    return get_openvino_core().compile_model(graph, "CPU", properties)


def build_onnx_session_options(runtime: Any) -> Any:
    """Build the options of an onnxruntime session that logs errors only and uses the threads of
    `count_compute_threads`."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = count_compute_threads(), 1
    options.log_severity_level = 4
    return options


def check_installed(names: Iterable[str], requirement: str = "exported models need") -> None:
    """Raise ResourceError, with the command that installs it, for the first missing library. Nothing is imported."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ResourceError(f"{requirement} {name}, which is not installed", install_hint("export"))


@contextmanager
def set_environment_variable(name: str, value: str) -> Generator[None, None, None]:
    """Set an environment variable within a `with` block, and restore it afterwards."""
    previous = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous


def disable_telemetry() -> AbstractContextManager[None]:
    """Return a context in which OpenVINO and nncf send no telemetry: it sets the environment variable of CI jobs."""
    return set_environment_variable("CI", "true")
