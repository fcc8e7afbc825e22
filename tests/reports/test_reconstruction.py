"""Reconstructions of self-supervised runs by `inspect --figures reconstruction`, and their report pages."""

from __future__ import annotations

import os
import re
import shutil

import numpy as np
import pytest
import torch

import vitreous
from tests.conftest import make_folder, make_image, run_cli
from tests.reports.test_report import NoteListener
from vitreous.errors import UsageError, WeightsError
from vitreous.reports.figures.reconstruction import HIDDEN_PATCH_GREY, load_restoring_objective
from vitreous.reports.learned import read_learned_images, write_learned_images
from vitreous.reports.pages.report import write_report
from vitreous.training.folder import RunFolder
from vitreous.weights.adopt import open_weights

pytestmark = pytest.mark.drawn

TRAIN_OPTIONS = {
    "model": "ViT-16x1/4",
    "image_size": 16,
    "precision": "fp32",
    "batch_size": 16,
    "epochs": 2.0,
    "workers": 0,
    "device": "cpu",
}
RUN_SETTINGS = {
    "mae": ("mae", {"decoder_width": ["16"], "decoder_heads": ["2"], "decoder_depth": ["1"]}),
    "pixels": (
        "mae",
        {"decoder_width": ["16"], "decoder_heads": ["2"], "decoder_depth": ["1"], "normalise": ["false"]},
    ),
    "mean-colour": ("masked-patches", {}),
    "small-colours": ("masked-patches", {"target": ["small-colours"]}),
    "dino": ("dino", {"prototypes": ["16"], "head_width": ["16"], "bottleneck": ["8"]}),
}


@pytest.fixture(scope="module")
def pretrained_runs(tmp_path_factory):
    """Return a folder of 24 unlabelled images, and a short run for each of `RUN_SETTINGS`."""
    pretrained_runs = tmp_path_factory.mktemp("restored")
    (pretrained_runs / "photos").mkdir()
    for index in range(24):
        make_image(index, (16, 16), index % 3).save(pretrained_runs / "photos" / f"{index}.png")
    for name, (recipe, settings) in RUN_SETTINGS.items():
        objective_options = {f"objective.{key}": value for key, value in settings.items()}
        vitreous.train(
            str(pretrained_runs / "photos"),
            recipe=recipe,
            out=str(pretrained_runs / name),
            settings=objective_options,
            **TRAIN_OPTIONS,
        )
    return pretrained_runs


@pytest.mark.parametrize("name", ["mae", "pixels", "mean-colour", "small-colours"])
def test_only_predicted_patches_change(pretrained_runs, name, tmp_path):
    document = vitreous.inspect(str(pretrained_runs / name), figures=["reconstruction"], out=tmp_path, device="cpu")
    (figure,) = document["figures"]
    arrays = np.load(tmp_path / figure["npz"])
    image, visible, restored = (arrays[array_name].astype(int) for array_name in ("image", "seen", "restored"))
    predicted = arrays["predicted"].repeat(4, 1).repeat(4, 2)
    assert image.shape == visible.shape == restored.shape == (2, 16, 16, 3)
    assert (restored[~predicted] == image[~predicted]).all() and (visible[~predicted] == image[~predicted]).all()
    patches = np.abs(restored - image).reshape(2, 4, 4, 4, 4, 3).sum((2, 4, 5))
    assert ((patches > 0) == arrays["predicted"]).mean() > 0.9
    share = 0.75 if RUN_SETTINGS[name][0] == "mae" else 0.5
    assert arrays["predicted"].mean() == share
    hidden = (visible == HIDDEN_PATCH_GREY).all(-1)
    assert (hidden == predicted).all() if share == 0.75 else (predicted[hidden].all() and hidden.mean() > 0.25)
    assert ("true mean" in figure["caption"] or "std of the original patch" in figure["caption"]) == (name == "mae")
    assert (tmp_path / figure["png"]).read_bytes().startswith(b"\x89PNG")


def test_predicted_colours_are_painted_in_place(pretrained_runs):
    objective = load_restoring_objective(pretrained_runs / "small-colours")
    logits = torch.zeros(1, 1, 16, 512)
    logits[0, 0, 1, 0o705] = 1.0  # second patch of the first row: full red, no green, blue level 5
    mean, std = (torch.tensor(values)[:, None, None] for values in objective.setting.normalisation)
    patch = objective.paint(logits.flatten(2)).unflatten(-1, (3, 4, 4))[0, 0] * std + mean
    assert torch.allclose(patch[:, 0, 1], (torch.tensor([7.0, 0.0, 5.0]) + 0.5) / 8, atol=1e-6)
    assert torch.allclose(patch[:, 1, 0], torch.full((3,), 0.5 / 8), atol=1e-6)


def test_named_images_are_reconstructed_reproducibly(pretrained_runs, tmp_path):
    photo = str(pretrained_runs / "photos" / "3.png")
    inspect_options = {"figures": ["reconstruction"], "device": "cpu"}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        vitreous.inspect(str(pretrained_runs / "mae"), photo, out=tmp_path / name, seed=seed, **inspect_options)
    a, b, c = (np.load(tmp_path / name / "reconstruction.npz") for name in "abc")
    assert (a["restored"] == b["restored"]).all() and not (a["predicted"] == c["predicted"]).all()


def test_runs_without_reconstruction_are_rejected(pretrained_runs, tmp_path):
    result = run_cli(
        "inspect", str(pretrained_runs / "dino"), "--figures", "reconstruction", "--out", str(tmp_path / "x")
    )
    assert result.returncode == 2 and "was trained with dino, which does not reconstruct images" in result.stderr
    assert "--recipe mae" in result.stderr and "Traceback" not in result.stderr
    with pytest.raises(UsageError, match="image_size"):
        vitreous.inspect(str(pretrained_runs / "mae"), figures=["reconstruction"], image_size=[32], out=tmp_path / "y")
    vitreous.save(vitreous.create("ViT-16x1/4", 16, 0), tmp_path / "bare")
    with pytest.raises(UsageError, match="no decoder"):
        load_restoring_objective(tmp_path / "bare")


def test_bundles_reconstruct_images_and_damaged_decoders_are_rejected(pretrained_runs, tmp_path):
    shutil.copytree(pretrained_runs / "mae" / "model", tmp_path / "bundle")
    token = load_restoring_objective(pretrained_runs / "mae").decoder.mask_token
    assert torch.equal(load_restoring_objective(tmp_path / "bundle").decoder.mask_token, token)
    file = tmp_path / "bundle" / "objective.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    # loading the encoder does not read the decoder
    assert open_weights(tmp_path / "bundle").build_bundle().model is not None
    with pytest.raises(WeightsError, match="was modified"):
        load_restoring_objective(tmp_path / "bundle")
    file.unlink()
    with pytest.raises(WeightsError, match="is missing"):
        load_restoring_objective(tmp_path / "bundle")


def test_the_page_of_mae_shows_reconstructions_and_no_empty_tables(pretrained_runs):
    page = (pretrained_runs / "mae" / "report.html").read_text()
    learned = read_learned_images(pretrained_runs / "mae")
    assert [len(row["images"]) for row in learned["reconstructions"]["rows"]] == [3, 3]  # two images were held out
    assert learned["neighbours"]["candidates"] == 22 and len(learned["neighbours"]["rows"][0]["neighbours"]) == 6
    for heading in ("Reconstructions", "Attention", "Nearest training images", "Training curves", "Data"):
        assert f"<h2>{heading}</h2>" in page, heading
    for heading in ("Metrics per class", "Confusion matrix", "Calibration", "Highest-loss images", "Warnings"):
        assert f"<h2>{heading}</h2>" not in page, heading
    image_uris = [uri for row in learned["reconstructions"]["rows"] for uri in row["images"]]
    assert len(set(image_uris)) == 6 and all(uri in page for uri in image_uris)
    assert "RankMe" in page and "k-NN" not in page and "vitreous embed" in page and "<td>classes</td>" not in page
    chart_labels = re.findall(r'<svg role="img" aria-label="([^"]*)"', page)
    assert {"Training loss", "Validation RankMe", "Std of validation features", "Learning rate"} == set(chart_labels)


def test_the_page_of_dino_shows_entropies_and_no_reconstructions(pretrained_runs):
    page, learned = (
        (pretrained_runs / "dino" / "report.html").read_text(),
        read_learned_images(pretrained_runs / "dino"),
    )
    assert learned["reconstructions"] is None and "Reconstructions" not in page
    heads = learned["attention"]["heads"]
    assert [len(row["images"]) for row in learned["attention"]["rows"]] == [1 + heads] * 2 and heads >= 1
    assert f"Attention from {learned['attention']['readout']} to the patches" in page
    for title in ("Entropy of teacher targets", "Entropy of the mean target", "Std of training features"):
        assert title in page, title
    assert "0 to ln K" in page


def test_the_page_shows_labels_of_neighbours_and_warnings(tmp_path, monkeypatch):
    monkeypatch.setattr("vitreous.objectives.unlabelled.MIN_RANKME", 1e9)
    photos = make_folder(tmp_path / "photos", {"train": 6, "val": 2}, size=(16, 16))
    objective_options = {f"objective.{key}": value for key, value in RUN_SETTINGS["mae"][1].items()}
    vitreous.train(str(photos), recipe="mae", out=str(tmp_path / "run"), settings=objective_options, **TRAIN_OPTIONS)
    page, learned = (tmp_path / "run" / "report.html").read_text(), read_learned_images(tmp_path / "run")
    assert learned["neighbours"]["rows"][0]["label"] in RunFolder(tmp_path / "run").run().data.classes
    assert "<h2>Warnings</h2>" in page and "Features vary along one direction only" in page and "--lr" in page
    assert "k-NN top-1" in page and "Validation k-NN top-1" in page and "--protocol knn" in page


def test_a_run_whose_images_are_gone_still_has_a_page(pretrained_runs, tmp_path):
    shutil.copytree(pretrained_runs / "mae", tmp_path / "mae")
    os.remove(tmp_path / "mae" / "learned.json")
    config = tmp_path / "mae" / "config.yaml"
    config.write_text(config.read_text().replace(str(pretrained_runs / "photos"), str(tmp_path / "nowhere")))
    listener = NoteListener()
    write_learned_images(RunFolder(tmp_path / "mae"), listener)
    assert "no images of learned features" in listener.notes[-1]
    write_report(tmp_path / "page.html", RunFolder(tmp_path / "mae"))
    assert "<h2>Training curves</h2>" in (tmp_path / "page.html").read_text()
