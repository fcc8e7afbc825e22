"""The benchmark scripts still fit the library: they are imported and their contenders take a step."""

from __future__ import annotations

import importlib.util
from pathlib import Path

HOME = Path(__file__).parent.parent / "benchmarks"


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, HOME / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_neighbours_are_judged_on_the_same_split():
    k, val, test = script("digits").neighbours()
    assert k in (1, 3, 5, 7, 9)
    assert min(val, test) > 0.95


def test_the_cifar_script_imports():
    assert callable(script("cifar").theirs)
