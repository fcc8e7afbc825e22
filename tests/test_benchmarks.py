"""The benchmark scripts still fit the library: they are imported and their contenders take a step."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HOME = Path(__file__).parent.parent / "benchmarks"


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, HOME / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_contender_of_the_step_benchmark_takes_a_step():
    pytest.importorskip("timm")
    module = script("step")
    for contender in module.CONTENDERS:
        module.build(contender, "ViT-32x1/8", 16, 2)()


def test_neighbours_are_judged_on_the_same_split():
    k, val, test = script("digits").neighbours()
    assert k in (1, 3, 5, 7, 9)
    assert min(val, test) > 0.95


def test_the_cifar_script_imports():
    assert callable(script("cifar").theirs)
