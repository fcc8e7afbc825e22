"""Attention figures of `inspect`: files, arrays, and rejected options."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import make_folder, make_image, run_cli
from tests.inspection.small_models import LOCAL_MODEL_KINDS, MEAN_POOLING, make_model
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.inference.engine import InferenceOptions
from vitreous.inference.predict import load
from vitreous.inspection.attention import compute_attention_maps, threshold_attention_mass
from vitreous.inspection.distance import compute_attention_distances, uniform_attention_distance
from vitreous.inspection.gradient import compute_relevance
from vitreous.inspection.rollout import RolloutOptions, compute_rollout
from vitreous.progress import NullListener
from vitreous.reports.figures.attention import make_attention, make_distance, make_rollout
from vitreous.reports.figures.positions import make_positions
from vitreous.reports.figures.subject import FigureContext, InspectOptions, open_input_images
from vitreous.reports.inspect import inspect as inspect_run
from vitreous.tasks.classification import Classification
from vitreous.tasks.features import FeatureExtraction
from vitreous.weights.bundle import Bundle, load_bundle

CLASSES = ("ant", "bee", "cat", "dog", "elk")
FIGURES = ("distance", "rollout", "attention", "gradient", "segments")


@pytest.fixture(scope="module")
def inspected_models(tmp_path_factory) -> Path:
    """Return bundles of several architectures for images of 16 x 20, photos, and a dataset."""
    inspected_models = tmp_path_factory.mktemp("inspect")
    for model_kind in ("registers", *LOCAL_MODEL_KINDS):
        Bundle(make_model(model_kind), Classification(CLASSES), ImagePreprocess((16, 20))).save(
            inspected_models / model_kind
        )
    Bundle(make_model(num_classes=0), FeatureExtraction(), ImagePreprocess((16, 20))).save(
        inspected_models / "headless"
    )
    Bundle(
        make_model(channels=1, **MEAN_POOLING), Classification(CLASSES), ImagePreprocess((16, 20), 1, (0.5,), (0.5,))
    ).save(inspected_models / "grey")
    make_folder(inspected_models / "data", {"train": 2, "val": 3})
    for number in range(2):
        make_image(number, (50, 40), number).save(inspected_models / f"photo {number}.png")
    return inspected_models


def run_inspect(home, bundle, *arguments, to="out"):
    """Run the command; return the figure documents by name, and the folder. Every image file is opened."""
    result = run_cli(
        "inspect", bundle, *arguments, "--out", to, "--device", "cpu", "--precision", "fp32", "--json", cwd=home
    )
    assert result.returncode == 0, result.stderr
    figures = {figure["name"]: figure for figure in json.loads(result.stdout)["figures"]}
    for figure in figures.values():
        assert np.asarray(Image.open(home / to / figure["png"]).convert("L")).std() > 5
        assert figure["caption"].endswith(".")
    return figures, home / to


def load_image_batch(home, names):
    preprocess = ImagePreprocess((16, 20))
    return preprocess.normalise(torch.stack([preprocess.to_tensor(preprocess.decode(home / name)) for name in names]))


def test_saved_arrays_match_the_library_functions(inspected_models):
    bundle, photos = "registers", ("photo 0.png", "photo 1.png")
    arguments = ("--fusion", "max", "--residual", "0.3", "--discard", "0.25", "--mass", "0.5", "--of-class", "cat")
    document, out = run_inspect(inspected_models, bundle, *photos, "--figures", *FIGURES, *arguments, to=bundle)
    assert list(document) == ["distance", "rollout", "rollout-blocks", "attention", "gradient", "segments"]
    numbers = {name: np.load(out / figure["npz"]) for name, figure in document.items()}
    model, x = make_model(bundle), load_image_batch(inspected_models, photos)
    prefix = model.config.prefix
    distances = compute_attention_distances(model, [x])
    assert np.allclose(numbers["distance"]["distance"], distances.mean) and np.allclose(
        numbers["distance"]["std"], distances.std, atol=1e-6
    )
    mixed = compute_rollout(model, x, RolloutOptions(0.3, "max", 0.25))
    assert np.allclose(numbers["rollout"]["maps"], mixed.maps, atol=1e-6)
    assert np.allclose(numbers["rollout"]["prefix"], mixed.joint[..., :prefix], atol=1e-6)
    raw = compute_attention_maps(model, x, [1])[1][..., prefix:]
    assert np.allclose(numbers["attention"]["maps"], raw.unflatten(-1, (4, 5)), atol=1e-6)
    assert np.allclose(numbers["attention"]["mean"], raw.mean(1).unflatten(-1, (4, 5)), atol=1e-6)
    assert np.array_equal(numbers["segments"]["kept"], threshold_attention_mass(raw, 0.5).unflatten(-1, (4, 5)))
    relevance = compute_relevance(model, x, torch.tensor([2, 2]))
    assert np.allclose(numbers["gradient"]["maps"], relevance.maps, rtol=1e-3, atol=1e-5)
    assert numbers["gradient"]["classes"].tolist() == ["cat", "cat"]
    rows = list(csv.DictReader((out / "distance.csv").open()))
    assert [(row["block"], row["head"]) for row in rows] == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert [float(row["distance_px"]) for row in rows] == pytest.approx(distances.mean.flatten().tolist(), abs=1e-4)
    assert [float(row["uniform_px"]) for row in rows] == pytest.approx(
        [uniform_attention_distance((4, 5), (4, 4))] * 4, abs=1e-4
    )


def test_layers_heads_and_image_sizes_can_be_selected(inspected_models):
    arguments = (
        "--figures",
        "attention",
        "segments",
        "--layers",
        "0",
        "-1",
        "--heads",
        "1",
        "--image-size",
        "24",
        "16",
    )
    document, out = run_inspect(inspected_models, "registers", "photo 0.png", *arguments, to="chosen")
    assert list(document) == ["attention-0", "attention-1", "segments-0", "segments-1"]
    assert np.load(out / "attention-0.npz")["maps"].shape == (1, 1, 6, 4)
    assert np.load(out / "segments-1.npz")["kept"].shape == (1, 1, 6, 4)


def test_images_default_to_the_dataset(inspected_models):
    document, out = run_inspect(
        inspected_models,
        "grey",
        "--data",
        "data",
        "--figures",
        "distance",
        "rollout",
        "--count",
        "5",
        "--batch-size",
        "2",
        to="grey-out",
    )
    assert len(np.load(out / "distance.npz")["images"]) == 5
    assert len(np.load(out / "rollout.npz")["images"]) == 4
    assert "5 images" in document["distance"]["caption"] and "the mean-pooled output" in document["rollout"]["caption"]


@pytest.mark.parametrize("model_kind", LOCAL_MODEL_KINDS)
def test_local_attention_models_have_distance_but_no_rollout(inspected_models, model_kind):
    document, out = run_inspect(
        inspected_models, model_kind, "photo 0.png", "--figures", "distance", to=f"{model_kind}-out"
    )
    assert set(np.load(out / "distance.npz")["spans"]) == (
        {"row", "column"} if model_kind == "axial" else {"window", "all"}
    )
    assert list(document) == ["distance"]
    for figure in ("rollout", "gradient"):
        rejected = run_cli(
            "inspect", model_kind, "photo 0.png", "--figures", figure, "--device", "cpu", cwd=inspected_models
        )
        assert (
            rejected.returncode == 2
            and "distance" in rejected.stderr
            and ("row" in rejected.stderr or "window" in rejected.stderr)
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
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
def test_invalid_options_are_rejected_with_a_hint(inspected_models, arguments, message):
    rejected = run_cli("inspect", arguments[0], "photo 0.png", *arguments[1:], "--device", "cpu", cwd=inspected_models)
    assert rejected.returncode == 2 and message in rejected.stderr


def test_captions_number_blocks_from_one_and_name_the_option(inspected_models):
    arguments = ("--figures", "attention", "segments", "distance", "rollout", "--layers", "1", "--heads", "1")
    document, out = run_inspect(inspected_models, "registers", "photo 0.png", *arguments, to="counted")
    assert (
        document["attention"]["title"] == "Attention of block 2"
        and document["segments"]["title"] == "Segments of block 2"
    )
    assert "Attention of block 2 of 2 (--layers 1) from" in document["attention"]["caption"]
    assert "in each head of block 2 of 2 (--layers 1) " in document["segments"]["caption"]
    assert np.load(out / "distance.npz")["layers"].tolist() == [1] and np.load(out / "attention.npz")[
        "heads"
    ].tolist() == [1]
    assert "over 1 image, in" in document["distance"]["caption"]


def list_figure_labels(figure) -> list[str]:
    """Return titles and tick labels of the panels of a figure."""
    return [
        text.get_text()
        for axes in figure.axes
        for text in (axes.title, *axes.get_xticklabels(), *axes.get_yticklabels())
    ]


def test_figure_labels_count_from_one(inspected_models):
    scene = FigureContext(
        "registers",
        load_bundle(inspected_models / "registers"),
        InspectOptions(device="cpu", precision="fp32"),
        ImagePreprocess((16, 20)),
        device="cpu",
        images=(),
        listener=NullListener(),
    )
    scene = replace(scene, images=tuple(open_input_images([inspected_models / "photo 0.png"], scene.preprocess)))
    heads = list_figure_labels(make_attention(scene)[0].figure)
    assert {"head 1", "head 2", "mean"} <= set(heads) and "head 0" not in heads
    blocks = list_figure_labels(make_rollout(scene)[1].figure)
    assert {"block 1", "block 2"} <= set(blocks) and "block 0" not in blocks
    dots = make_distance(scene)[0].figure.axes[0].collections[0].get_offsets()
    assert sorted(set(np.asarray(dots)[:, 0].tolist())) == [1, 2]
    tiles = list_figure_labels(make_positions(scene)[0].figure)
    assert {"1", "4", "5"} <= set(tiles) and "0" not in tiles


def test_the_page_starts_with_the_input_images_and_predictions(inspected_models):
    document = inspect_run(
        inspected_models / "registers",
        [inspected_models / "photo 0.png"],
        inspected_models / "asked",
        InspectOptions(device="cpu", precision="fp32"),
    )
    assert [entry["name"] for entry in document["figures"]] == [
        "rollout",
        "rollout-blocks",
        "filters",
        "positions",
        "distance",
    ]
    expected = load(
        inspected_models / "registers", InferenceOptions(device="cpu", precision="fp32"), exact=True
    ).predict([inspected_models / "photo 0.png"], top=3)[0]
    (prediction,) = document["predictions"]
    assert prediction["path"].endswith("photo 0.png") and [entry["class"] for entry in prediction["classes"]] == list(
        expected.names
    )
    assert [entry["probability"] for entry in prediction["classes"]] == pytest.approx(expected.probabilities, abs=1e-4)
    page = (inspected_models / "asked" / "index.html").read_text()
    assert (
        page.index("data:image/png")
        < page.index("photo 0.")
        < page.index(expected.names[0])
        < page.index("Attention rollout")
    )
    filters_only = inspect_run(
        inspected_models / "registers",
        [],
        inspected_models / "not-asked",
        InspectOptions(device="cpu", data=str(inspected_models / "data"), count=2),
    )
    assert filters_only["figures"][0]["name"] == "filters" and filters_only["predictions"] == []
    without_predictions = inspect_run(
        inspected_models / "headless",
        [inspected_models / "photo 0.png"],
        inspected_models / "bare",
        InspectOptions(figures=("filters",), device="cpu"),
    )
    assert (
        without_predictions["predictions"][0]["classes"] == []
        and "photo 0." in (inspected_models / "bare" / "index.html").read_text()
    )
