"""Training of generative models from the command line: partial training, class conditioning, rejected options."""

from __future__ import annotations

import pytest

import vitreous
from tests.conftest import run_cli
from vitreous.errors import UsageError
from vitreous.weights.adopt import open_weights

TINY_ARGUMENTS = ["digits", "--model", "DiT-32x2/2", "--steps", "3", "--batch-size", "32"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("train_arguments", [["--last-blocks", "1"], ["--lora", "2"]])
def test_partial_training_keeps_frozen_weights_bit_identical(train_arguments, precision, tmp_path):
    """Frozen weights compute in the run's precision, and are stored in the bundle bit-identically."""
    first = run_cli(
        "train", *TINY_ARGUMENTS, "--recipe", "dit", "--out", str(tmp_path / "first"), "--precision", precision
    )
    assert first.returncode == 0, first.stderr
    arguments = [
        "train",
        *TINY_ARGUMENTS[:1],
        "--recipe",
        "dit",
        "--init",
        str(tmp_path / "first"),
        *TINY_ARGUMENTS[3:],
        *train_arguments,
    ]
    result = run_cli(*arguments, "--out", str(tmp_path / "run"), "--precision", precision)
    assert result.returncode == 0, result.stderr
    before, after = (open_weights(tmp_path / name).read_state() for name in ("first", "run"))
    unchanged = {name for name in before if (before[name] == after[name]).all()}
    assert {"projection.weight", "encoder.blocks.0.mlp.fc1.weight"} <= unchanged < set(before)


@pytest.mark.parametrize("recipe", [None, "dino", "photos"])
def test_generative_models_reject_recognition_recipes(recipe, tmp_path):
    with pytest.raises(UsageError, match="cannot train a generative model"):
        vitreous.train("digits", model="DiT-32x2/2", recipe=recipe, out=str(tmp_path / "run"), progress=False)
    assert not (tmp_path / "run").exists()


def test_generators_support_balanced_sampling_but_not_class_weights(tmp_path):
    result = run_cli(
        "train", *TINY_ARGUMENTS, "--recipe", "sit", "--sampling", "balanced", "--out", str(tmp_path / "run")
    )
    assert result.returncode == 0, result.stderr
    result = run_cli(
        "train", *TINY_ARGUMENTS, "--recipe", "sit", "--class-weights", "balanced", "--out", str(tmp_path / "other")
    )
    assert result.returncode == 2 and "--class-weights balanced" in result.stderr
    result = run_cli("soup", str(tmp_path / "run"), str(tmp_path / "run"), "--out", str(tmp_path / "soup"))
    assert result.returncode == 2 and "run is a generative model, which soups do not support" in result.stderr
