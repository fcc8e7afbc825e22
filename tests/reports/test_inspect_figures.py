"""Figures of `inspect` for weights, features and cost: valid files, finite values, and helpful rejections."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import make_folder, make_image, run_cli
from tests.contracts import randomise
from vitreous.data.modalities.bands import BandPreprocess
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import UsageError
from vitreous.models.zoo import create_untrained_model
from vitreous.reports.figures.drawing import count_from_one
from vitreous.reports.figures.subject import InspectOptions
from vitreous.reports.inspect import inspect
from vitreous.tasks.classification import Classification
from vitreous.weights.bundle import Bundle

CLASSES = ("ant", "bee", "cat")
MODELS = {
    "plain": ("ViT-16x2/8", {}),
    "headless": ("ViT-16x1/8", {"num_classes": 0, "registers": 1}),
    "grey": ("ViT-16x1/8", {"channels": 1, "class_token": False, "pool": "mean"}),
    "four": ("ViT-16x1/8", {"channels": 4, "positions": {"at": "each", "kind": "axes"}}),
    "relative": ("ViT-16x2/8", {"heads": 2, "attention": {"kind": "relative"}, "positions": {"kind": "none"}}),
    "rotary": ("ViT-16x1/8", {"attention": {"kind": "rotary"}, "positions": {"kind": "none"}}),
    "windows": (
        "ViT-16x2/8",
        {"attention": {"kind": "decomposed", "window": 2, "global_blocks": (1,)}, "class_token": False, "pool": "mean"},
    ),
    "placeless": ("ViT-16x1/8", {"positions": {"kind": "none"}}),
    "hybrid": (
        "R26+ViT-S/32",
        {"width": 16, "heads": 2, "depth": 1, "mlp": {"hidden": 16}, "patch": (8, 8), "stem": None},
    ),
    "bit": ("BiT-R50x1", {"blocks": (1, 1), "width": 16}),
}


@pytest.fixture(scope="module")
def inspected_folder(tmp_path_factory):
    """Return random bundles by name, and a dataset in `photos`."""
    from vitreous.models.config import StemConfig

    root = tmp_path_factory.mktemp("looked-into")
    for name, (model, changes) in MODELS.items():
        if name == "hybrid":
            changes = changes | {"stem": StemConfig((1, 1), 16)}
        torch.manual_seed(0)
        network = create_untrained_model(model, **{"image_size": 32, "num_classes": 3, **changes})
        channels = network.config.channels
        modality = BandPreprocess if channels == 4 else ImagePreprocess
        preprocess = modality((32, 32), channels, (0.5,) * channels, (0.5,) * channels)
        classes = CLASSES if network.config.classes else ()
        Bundle(randomise(network).eval(), Classification(classes), preprocess).save(root / name)
    make_folder(root / "photos", {"train": 4, "val": 2}, size=(40, 32))
    return root


def inspect_model(inspected_folder, model, *figures, images=(), **options):
    """Return the output of `inspect` after checking every file."""
    out = inspected_folder / "out" / f"{model}-{'-'.join(figures)}-{len(list(inspected_folder.glob('out/*')))}"
    inspect_options = InspectOptions(
        figures=figures,
        **{"data": str(inspected_folder / "photos"), "device": "cpu", "precision": "fp32", "count": 5, "batch_size": 2}
        | options,
    )
    document = inspect(inspected_folder / model, images, out, inspect_options)
    for figure in document["figures"]:
        with Image.open(out / figure["png"]) as image:
            assert image.width > 200 and len(image.convert("L").resize((64, 64)).getcolors()) > 3
        numbers = np.load(out / figure["npz"])
        assert all(np.isfinite(numbers[key]).all() for key in numbers if numbers[key].dtype.kind == "f")
        assert figure["caption"].endswith(".") and "nan" not in figure["caption"]
        if "csv" in figure:
            rows = list(csv.reader((out / figure["csv"]).read_text("utf-8").splitlines()))
            assert len(rows) > 1 and len({len(row) for row in rows}) == 1
    return {figure["name"]: (figure, np.load(out / figure["npz"])) for figure in document["figures"]}


@pytest.mark.parametrize(
    ("model", "shape", "caption"),
    [
        ("plain", (15, 3, 8, 8), "in colour"),
        ("grey", (15, 1, 8, 8), "in grey"),
        ("four", (15, 4, 8, 8), "the first three of 4 channels"),
        ("hybrid", (15, 3, 7, 7), "root convolution"),
        ("bit", (15, 3, 7, 7), "root convolution"),
    ],
)
def test_patch_filters_are_drawn(inspected_folder, model, shape, caption):
    figure, numbers = inspect_model(inspected_folder, model, "filters")["filters"]
    assert numbers["components"].shape == shape and caption in figure["caption"]
    assert numbers["share"].sum() == pytest.approx(1, abs=1e-4)


def test_positions_before_and_after_resizing(inspected_folder):
    figures = inspect_model(inspected_folder, "plain", "positions", image_size=(64, 144))
    assert list(figures) == ["positions", "positions-resized"]
    similar = figures["positions"][1]["similarity_input"]
    assert similar.shape == (4, 4, 4, 4)
    pairs = similar.reshape(16, 16)[~np.eye(16, dtype=bool)]
    assert f"Colours span {pairs.min():.2f} to {pairs.max():.2f}, the range" in figures["positions"][0]["caption"]
    figure, numbers = figures["positions-resized"]
    assert numbers["similarity_input"].shape == (4, 9, 8, 18) and numbers["step"] == 2
    assert "8 × 18" in figure["title"] and "second row" in figure["caption"]
    row, column, distant, contrast = figures["positions"][1]["structure"][0]
    assert contrast == pytest.approx((row + column) / 2 - distant)


def test_position_colours_span_the_range_of_the_data():
    from matplotlib.figure import Figure

    from vitreous.reports.figures.positions import (
        add_similarity_bar,
        compute_common_range,
        draw_similarity_tiles,
        format_colour_range,
    )

    similar = torch.tensor(np.linspace(0.88, 0.98, 16).reshape(4, 4)).fill_diagonal_(1)
    ends = compute_common_range([similar, similar - 0.01])
    assert (
        ends == pytest.approx((0.88 + 0.1 / 15 - 0.01, 0.98 - 0.1 / 15))
        and format_colour_range(ends) == "0.877 to 0.973"
    )
    figure = Figure()
    axes = figure.subplots()
    draw_similarity_tiles(axes, similar.reshape(2, 2, 2, 2).numpy(), 1, ends, show_labels=True)
    add_similarity_bar(figure, axes, ends, "cosine similarity")
    assert axes.images[0].get_clim() == ends
    written = [text.get_text() for text in figure.axes[1].get_yticklabels()]
    assert written[0] == "0.877" and written[-1] == "0.973"


def test_every_kind_of_position_embedding_is_drawn(inspected_folder):
    assert set(inspect_model(inspected_folder, "four", "positions")["positions"][1]) == {
        "similarity_block_0",
        "structure",
        "grid",
        "step",
    }
    heads = inspect_model(inspected_folder, "relative", "positions", layers=(-1,), heads=(1,))["positions-relative"][1]
    assert list(heads) == ["similarity_block_1_head_1"] and heads["similarity_block_1_head_1"].shape == (33, 33)
    with pytest.raises(UsageError, match="heads=2: a block has 2"):
        inspect_model(inspected_folder, "relative", "positions", heads=(2,))
    rotary_positions = inspect_model(inspected_folder, "rotary", "positions", image_size=(32, 48))["positions-rotary"][
        1
    ]
    assert rotary_positions["kernel"].shape == (7, 11) and rotary_positions["kernel"][3, 5] == 1
    figures = inspect_model(inspected_folder, "windows", "positions")
    assert list(figures) == ["positions", "positions-relative"]
    assert figures["positions-relative"][1]["similarity_block_1_columns"].shape == (7, 7)


def test_fourier_figures_are_drawn(inspected_folder):
    figure, numbers = inspect_model(inspected_folder, "plain", "fourier")["fourier"]
    assert numbers["frequency"].tolist() == [0, 0.5] and numbers["relative"].shape == (5, 2)
    assert not numbers["relative"][:, 0].any() and "Mean over 5 images" in figure["caption"]
    assert numbers["after"].tolist() == ["embedding", "attention", "mlp", "attention", "mlp"]
    oblong = inspect_model(inspected_folder, "headless", "fourier", image_size=(24, 40))["fourier"][0]
    assert "grid is not square" in oblong["caption"]
    with pytest.raises(UsageError, match="frequencies require a grid of at least 3 patches"):
        inspect_model(inspected_folder, "plain", "fourier", image_size=(16,))


@pytest.mark.parametrize("model", ["plain", "headless", "hybrid", "bit"])
def test_features_of_images_smaller_than_a_patch_are_drawn(inspected_folder, model):
    small = [inspected_folder / f"{number}.png" for number in range(2)]
    for number, path in enumerate(small):
        make_image(number, (5, 3)).save(path)
    _, numbers = inspect_model(inspected_folder, model, "features", images=small, data=None)["features"]
    assert numbers["all"].shape == (2, 4, 4, 3) and numbers["foreground"].dtype == bool
    _, arrays = inspect_model(inspected_folder, model, "features", images=small[:1], data=None, image_size=(32, 64))[
        "features"
    ]
    assert arrays["inside"].shape == (1, 4, 8, 3)


def test_the_nearest_training_image_is_the_image_itself(inspected_folder):
    image_path = inspected_folder / "photos" / "train" / "bee" / "1.png"
    figure = inspect_model(inspected_folder, "plain", "nearest", images=[image_path])["nearest"]
    assert figure[1]["similarity"].shape == (1, 6) and figure[1]["similarity"][0, 0] == pytest.approx(1, abs=1e-5)
    rows = list(
        csv.DictReader(
            (inspected_folder / "out").glob("plain-nearest-*/nearest.csv").__next__().read_text().splitlines()
        )
    )
    assert rows[0]["training_image"].endswith("bee/1.png") and rows[0]["class"] == "bee"
    assert "12 training images" in figure[0]["caption"]


@pytest.mark.parametrize("model", ["headless", "bit", "grey"])
def test_nearest_training_images_of_validation_images(inspected_folder, model):
    numbers = inspect_model(inspected_folder, model, "nearest", count=1)["nearest"][1]
    assert numbers["similarity"].shape == (6, 6) and (np.diff(numbers["similarity"]) <= 0).all()
    assert len(np.unique(numbers["sample"])) <= 8  # eight training images for each of --count


def test_nearest_excludes_the_shown_images_from_their_split(inspected_folder):
    numbers = inspect_model(inspected_folder, "plain", "nearest", split="train")["nearest"][1]
    assert numbers["sample"].shape == (8, 4)  # twelve images minus the eight that are shown


def test_similarity_within_and_between_models(inspected_folder):
    within_model = inspect_model(inspected_folder, "plain", "similarity")["similarity"][1]
    assert (
        within_model["cka"].shape == (5, 5)
        and np.allclose(within_model["cka"].diagonal(), 1)
        and np.allclose(within_model["cka"], within_model["cka"].T)
    )
    figure, numbers = inspect_model(inspected_folder, "plain", "similarity", other=str(inspected_folder / "bit"))[
        "similarity"
    ]
    assert numbers["cka"].shape == numbers["cka_biased"].shape == (5, 3) and "bit" in figure["caption"]
    assert numbers["other_layers"].tolist() == ["root", "stage 0 unit 0", "stage 1 unit 0"]
    assert count_from_one("stage 0 unit 11") == "stage 1 unit 12"
    image_paths = [inspected_folder / "photos" / "val" / name / "0.png" for name in CLASSES]
    with pytest.raises(UsageError, match="too few"):
        inspect_model(inspected_folder, "plain", "similarity", images=image_paths)


def test_comparing_a_model_with_itself_gives_its_self_similarity(inspected_folder):
    within_model = inspect_model(inspected_folder, "plain", "similarity")["similarity"][1]
    between_copies = inspect_model(inspected_folder, "plain", "similarity", other=str(inspected_folder / "plain"))[
        "similarity"
    ][1]
    assert np.allclose(within_model["cka"], between_copies["cka"])


def test_half_precision_figures_are_close_to_full_precision(inspected_folder):
    figures = ("fourier", "features", "similarity")
    full, half = (
        inspect_model(inspected_folder, "plain", *figures, precision=precision) for precision in ("fp32", "bf16")
    )
    for name, key in (("fourier", "relative"), ("similarity", "cka")):
        assert np.allclose(full[name][1][key], half[name][1][key], atol=0.1)
    assert not np.array_equal(full["fourier"][1]["relative"], half["fourier"][1]["relative"])


@pytest.mark.parametrize("model", ["plain", "bit"])
def test_cost_figures_contain_time_and_memory(inspected_folder, model, monkeypatch):
    from vitreous.reports.figures import layers

    monkeypatch.setattr(layers, "DEFAULT_IMAGE_SIZES", (64,))  # in addition to the model's native size of 32
    figure, numbers = inspect_model(inspected_folder, model, "cost", batch_sizes=(1, 2), data=None)["cost"]
    assert numbers["image"].tolist() == [[32, 32], [64, 64]] and (numbers["images_per_second"] > 0).all()
    assert numbers["memory_bytes"][1] > numbers["memory_bytes"][0] and "an estimate" in figure["caption"]


def test_a_model_without_tokens_reports_unavailable_figures(inspected_folder):
    out = inspected_folder / "out" / "bit-all"
    image_paths = [
        inspected_folder / "photos" / "val" / name / f"{number}.png" for name in CLASSES for number in range(2)
    ]
    for figure in ("positions", "fourier"):
        with pytest.raises(UsageError, match="BiT") as rejected:
            inspect(inspected_folder / "bit", image_paths, out, InspectOptions(figures=(figure,), device="cpu"))
        assert "filters" in rejected.value.hint
    with pytest.raises(UsageError, match="no position embeddings"):
        inspect_model(inspected_folder, "placeless", "positions")


def test_the_command_line(inspected_folder):
    arguments = [
        "inspect",
        "plain",
        "photos/val",
        "--figures",
        "filters",
        "features",
        "--out",
        "said",
        "--device",
        "cpu",
    ]
    result = run_cli(*arguments, cwd=inspected_folder)
    assert result.returncode == 0, result.stderr
    assert {path.name for path in (inspected_folder / "said").iterdir()} >= {
        "filters.png",
        "features.npz",
        "index.html",
        "inspect.json",
    }
    rejected = run_cli(
        "inspect",
        "plain",
        "photos/val",
        "--figures",
        "fourier",
        "--image-size",
        "16",
        "--device",
        "cpu",
        cwd=inspected_folder,
    )
    assert rejected.returncode == 2 and "larger --image-size" in rejected.stderr
