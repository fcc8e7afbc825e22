"""Training of models that make images, from the command line: in part, by class, and what is refused."""

from __future__ import annotations

import pytest

import vitreous
from tests.conftest import say
from vitreous.errors import UsageError
from vitreous.weights.adopt import open_weights

TINY = ["digits", "--model", "DiT-32x2/2", "--steps", "3", "--batch-size", "32"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("part", [["--last-blocks", "1"], ["--lora", "2"]])
def test_a_part_of_a_model_is_trained(part, precision, tmp_path):
    """What stays as it is computes in the run's precision, and is in the bundle to the bit."""
    first = say("train", *TINY, "--recipe", "dit", "--out", str(tmp_path / "first"), "--precision", precision)
    assert first.returncode == 0, first.stderr
    words = ["train", *TINY[:1], "--recipe", "dit", "--init", str(tmp_path / "first"), *TINY[3:], *part]
    done = say(*words, "--out", str(tmp_path / "run"), "--precision", precision)
    assert done.returncode == 0, done.stderr
    before, after = (open_weights(tmp_path / name).read_state() for name in ("first", "run"))
    same = {name for name in before if (before[name] == after[name]).all()}
    assert {"projection.weight", "encoder.blocks.0.mlp.fc1.weight"} <= same < set(before)


@pytest.mark.parametrize("recipe", [None, "dino", "photos"])
def test_models_that_make_images_do_not_learn_to_read_them(recipe, tmp_path):
    with pytest.raises(UsageError, match="cannot train a generative model"):
        vitreous.train("digits", model="DiT-32x2/2", recipe=recipe, out=str(tmp_path / "run"), progress=False)
    assert not (tmp_path / "run").exists()


def test_samples_may_be_drawn_by_class_and_weighed_they_are_not(tmp_path):
    done = say("train", *TINY, "--recipe", "sit", "--sampling", "balanced", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    done = say("train", *TINY, "--recipe", "sit", "--class-weights", "balanced", "--out", str(tmp_path / "other"))
    assert done.returncode == 2 and "--class-weights balanced" in done.stderr
    done = say("soup", str(tmp_path / "run"), str(tmp_path / "run"), "--out", str(tmp_path / "soup"))
    assert done.returncode == 2 and "run is a generative model, which soups do not support" in done.stderr
