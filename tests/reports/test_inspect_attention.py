"""The figures of attention as the command makes them: files, their numbers, and refusals."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import make_folder, picture, say
from tests.inspection.made import NARROW, POOLED, made
from vitreous.data.preprocess import Preprocess
from vitreous.inspection.attention import attention
from vitreous.inspection.distance import distances, uniform
from vitreous.inspection.gradient import gradient
from vitreous.inspection.rollout import Mixing, rollout
from vitreous.inspection.segments import segments
from vitreous.weights.bundle import Bundle

CLASSES = ("ant", "bee", "cat", "dog", "elk")
FIGURES = ("distance", "rollout", "attention", "gradient", "segments")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Bundles of several kinds for images of 16 x 20, photographs, and a data set."""
    home = tmp_path_factory.mktemp("inspect")
    for kind in ("registers", *NARROW):
        Bundle(made(kind), CLASSES, Preprocess((16, 20))).save(home / kind)
    Bundle(made(num_classes=0), (), Preprocess((16, 20))).save(home / "headless")
    Bundle(made(channels=1, **POOLED), CLASSES, Preprocess((16, 20), 1, (0.5,), (0.5,))).save(home / "grey")
    make_folder(home / "data", {"train": 2, "val": 3})
    for number in range(2):
        picture(number, (50, 40), number).save(home / f"photo {number}.png")
    return home


def inspect(home, bundle, *words, to="out"):
    """Run the command; its figures' documents by name, and the folder. Every picture is opened."""
    result = say("inspect", bundle, *words, "--out", to, "--device", "cpu", "--precision", "fp32", "--json", cwd=home)
    assert result.returncode == 0, result.stderr
    made = {one["name"]: one for one in json.loads(result.stdout)["figures"]}
    for one in made.values():
        assert np.asarray(Image.open(home / to / one["png"]).convert("L")).std() > 5
        assert one["caption"].endswith(".")
    return made, home / to


def given(home, names):
    preprocess = Preprocess((16, 20))
    return preprocess.normalise(torch.stack([preprocess.pixels(preprocess.decoded(home / name)) for name in names]))


def test_numbers_are_those_of_the_functions(home):
    bundle, photos = "registers", ("photo 0.png", "photo 1.png")
    words = ("--fusion", "max", "--residual", "0.3", "--discard", "0.25", "--mass", "0.5", "--of-class", "cat")
    found, out = inspect(home, bundle, *photos, "--figures", *FIGURES, *words, to=bundle)
    assert list(found) == ["distance", "rollout", "rollout-blocks", "attention", "gradient", "segments"]
    numbers = {name: np.load(out / one["npz"]) for name, one in found.items()}
    model, x = made(bundle), given(home, photos)
    prefix = model.config.prefix
    far = distances(model, [x])
    assert np.allclose(numbers["distance"]["distance"], far.mean) and np.allclose(numbers["distance"]["std"], far.std, atol=1e-6)
    mixed = rollout(model, x, Mixing(0.3, "max", 0.25))
    assert np.allclose(numbers["rollout"]["maps"], mixed.maps, atol=1e-6)
    assert np.allclose(numbers["rollout"]["prefix"], mixed.joint[..., :prefix], atol=1e-6)
    raw = attention(model, x, [1])[1][..., prefix:]
    assert np.allclose(numbers["attention"]["maps"], raw.unflatten(-1, (4, 5)), atol=1e-6)
    assert np.allclose(numbers["attention"]["mean"], raw.mean(1).unflatten(-1, (4, 5)), atol=1e-6)
    assert np.array_equal(numbers["segments"]["kept"], segments(raw, 0.5).unflatten(-1, (4, 5)))
    speaking = gradient(model, x, torch.tensor([2, 2]))
    assert np.allclose(numbers["gradient"]["maps"], speaking.maps, rtol=1e-3, atol=1e-5)
    assert numbers["gradient"]["classes"].tolist() == ["cat", "cat"]
    rows = list(csv.DictReader((out / "distance.csv").open()))
    assert [(row["block"], row["head"]) for row in rows] == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert [float(row["distance_px"]) for row in rows] == pytest.approx(far.mean.flatten().tolist(), abs=1e-4)
    assert [float(row["uniform_px"]) for row in rows] == pytest.approx([uniform((4, 5), (4, 4))] * 4, abs=1e-4)


def test_layers_heads_and_sizes_are_those_asked_for(home):
    words = ("--figures", "attention", "segments", "--layers", "0", "-1", "--heads", "1", "--image-size", "24", "16")
    found, out = inspect(home, "registers", "photo 0.png", *words, to="chosen")
    assert list(found) == ["attention-0", "attention-1", "segments-0", "segments-1"]
    assert np.load(out / "attention-0.npz")["maps"].shape == (1, 1, 6, 4)
    assert np.load(out / "segments-1.npz")["kept"].shape == (1, 1, 6, 4)


def test_pictures_come_from_the_data_where_none_are_named(home):
    found, out = inspect(
        home, "grey", "--data", "data", "--figures", "distance", "rollout", "--count", "5", "--batch-size", "2", to="grey-out"
    )
    assert len(np.load(out / "distance.npz")["images"]) == 5
    assert len(np.load(out / "rollout.npz")["images"]) == 4
    assert "5 images" in found["distance"]["caption"] and "mean over the patches" in found["rollout"]["caption"]


@pytest.mark.parametrize("kind", NARROW)
def test_models_that_do_not_see_everything_have_a_distance_and_say_why_no_more(home, kind):
    found, out = inspect(home, kind, "photo 0.png", "--figures", "distance", to=f"{kind}-out")
    assert set(np.load(out / "distance.npz")["spans"]) == ({"row", "column"} if kind == "axial" else {"window", "all"})
    assert list(found) == ["distance"]
    for figure in ("rollout", "gradient"):
        refused = say("inspect", kind, "photo 0.png", "--figures", figure, "--device", "cpu", cwd=home)
        assert refused.returncode == 2 and "distance" in refused.stderr and ("row" in refused.stderr or "window" in refused.stderr)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("registers", "--figures", "gradient", "--of-class", "bea"), "did you mean bee"),
        (("registers", "--figures", "gradient", "--of-class", "zebra"), "ant, bee"),
        (("headless", "--figures", "gradient"), "no head"),
        (("registers", "--figures", "attention", "--heads", "2"), "a block has 2"),
        (("registers", "--figures", "segments", "--layers", "2"), "the model has 2"),
        (("registers", "--figures", "rollout", "--residual", "1.5"), "residual"),
        (("registers", "--figures", "segments", "--mass", "0"), "mass"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_way_out(home, words, told):
    refused = say("inspect", words[0], "photo 0.png", *words[1:], "--device", "cpu", cwd=home)
    assert refused.returncode == 2 and told in refused.stderr
