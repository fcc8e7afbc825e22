"""Training on image-text pairs: from a CSV file to a bundle with its tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import vitreous
from tests.conftest import make_folder, make_image, run_cli
from tests.reports.test_report import NoteListener
from vitreous.data.caption_tokenizer import train_tokenizer
from vitreous.data.pairs import Captions, PairSplit, PairTable
from vitreous.data.split import ArraySplit
from vitreous.errors import DataError, UsageError, WeightsError
from vitreous.evaluation.retrieval import MAX_RETRIEVAL_PAIRS, RetrievalEvaluator, measure_retrieval
from vitreous.models.config import ImageTextConfig, MlpConfig, TextConfig, ViTConfig
from vitreous.models.zoo import build_model
from vitreous.objectives.contrastive import ContrastiveConfig, ContrastiveObjective
from vitreous.recipes.contrastive import PAIR_VIEWS
from vitreous.tasks.intervals import wilson_interval
from vitreous.training.folder import RunFolder
from vitreous.weights.bundle import load_bundle

COLOURS = ("red", "green", "blue")
OPTIONS = {
    "model": "ViT-32x2/8",
    "image_size": 16,
    "batch_size": 8,
    "epochs": 2.0,
    "workers": 0,
    "device": "cpu",
    "precision": "fp32",
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A CSV file of 48 pairs."""
    home = tmp_path_factory.mktemp("pairs")
    rows = ["path,caption"]
    for index in range(48):
        make_image(index, (16, 16), index % 3).save(home / f"{index:02}.png")
        rows.append(f"{index:02}.png,a {COLOURS[index % 3]} picture of number {index}")
    (home / "pairs.csv").write_text("\n".join(rows) + "\n")
    return home / "pairs.csv"


@pytest.fixture(scope="module")
def siglip_run(pairs, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "siglip"
    listener = NoteListener()
    summary = vitreous.train(pairs, out=out, listener=listener, **OPTIONS)
    assert any("has captions: training on image-text pairs" in note for note in listener.notes)
    return out, summary


def test_bundle_has_the_tokenizer_of_the_run(siglip_run, pairs):
    out, summary = siglip_run
    run, bundle = RunFolder(out).run(), load_bundle(out / "model")
    assert run.recipe == "siglip" and isinstance(run.objective, ContrastiveConfig) and run.objective.loss == "sigmoid"
    assert (out / "tokenizer.json").read_bytes() == (out / "model" / "tokenizer.json").read_bytes()
    assert bundle.tokenizer is not None
    tokens = bundle.tokenizer.encode_texts(["a red picture of number 3", "a blue one"])
    texts = bundle.model.embed_texts(torch.from_numpy(tokens))
    assert texts.shape == (2, 32) and torch.allclose(texts.norm(dim=1), torch.ones(2))
    assert {"retrieval_r1", "image_to_text_r5", "text_to_image_r5"} <= summary["val"].keys()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    assert all(np.isfinite([line["train/scale"], line["train/bias"]]).all() for line in lines if "train/loss" in line)


def test_retrieval_is_evaluated_as_in_training(siglip_run, pairs, tmp_path):
    """The same recall as at the end of training; other data, and a bundle without its run, are evaluated too."""
    out, summary = siglip_run
    result = run_cli("evaluate", str(out), "--protocol", "retrieval", "--json")
    document = json.loads(result.stdout)
    recalls = {name: value for name, value in summary["val"].items() if name.endswith(("_r1", "_r5", "_r10"))}
    assert len(recalls) == 7 and document["split"] == "val" and document["val"]["primary"] == "retrieval_r1"
    assert {name: document["val"][name] for name in recalls} == pytest.approx(recalls)
    assert [row["direction"] for row in document["results"]] == ["image to text", "text to image"]
    low, high = document["results"][0]["interval"]["r1"]
    assert low <= document["results"][0]["r1"] <= high
    assert "retrieval" in (out / "evaluations.jsonl").read_text("utf-8")
    table = run_cli("evaluate", str(out / "model"), str(pairs), "--protocol", "retrieval").stdout
    assert "R@10" in table and "text to image" in table


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "--protocol retrieval"),
        (("--protocol", "retrieval", "--split", "test"), "has no test split"),
        (("FOLDER", "--protocol", "retrieval"), "has no captions"),
    ],
)
def test_unsuitable_evaluations_are_explained(siglip_run, tmp_path, arguments, message):
    out, _ = siglip_run
    make_folder(tmp_path / "classes", {"a": 2, "b": 2})
    arguments = [str(tmp_path / "classes") if word == "FOLDER" else word for word in arguments]
    result = run_cli("evaluate", str(out), *arguments)
    assert result.returncode in (2, 3) and message in result.stderr and "Traceback" not in result.stderr


def test_retrieval_needs_a_text_encoder(pairs, tmp_path):
    vitreous.save(vitreous.create("ViT-32x2/8", image_size=16, num_classes=0), tmp_path / "bundle")
    result = run_cli("evaluate", str(tmp_path / "bundle"), str(pairs), "--protocol", "retrieval")
    assert result.returncode == 2 and "no text encoder" in result.stderr


def test_training_continues_with_the_tokenizer_of_the_weights(siglip_run, pairs, tmp_path):
    out, _ = siglip_run
    options = {name: value for name, value in OPTIONS.items() if name not in ("model", "image_size")}
    vitreous.train(pairs, recipe="siglip", init=out, out=tmp_path / "more", listener=NoteListener(), **options)
    assert (tmp_path / "more" / "tokenizer.json").read_bytes() == (out / "tokenizer.json").read_bytes()
    (tmp_path / "more" / "model" / "tokenizer.json").unlink()
    with pytest.raises(WeightsError, match="tokenizer"):
        vitreous.train(pairs, recipe="siglip", init=tmp_path / "more" / "model", out=tmp_path / "x", **options)


def test_lit_keeps_the_image_encoder(pairs, tmp_path):
    model = build_model(ViTConfig(image=(16, 16), patch=(8, 8), classes=0, width=32, depth=2, heads=2))
    vitreous.save(model, tmp_path / "encoder")
    options = {name: value for name, value in OPTIONS.items() if name not in ("model", "image_size")}
    vitreous.train(
        pairs, recipe="lit", init=tmp_path / "encoder", out=tmp_path / "lit", listener=NoteListener(), **options
    )
    trained = load_bundle(tmp_path / "lit" / "model").model
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, trained.backbone.state_dict()[name]), name
    bias = float(trained.logit_bias.detach())
    assert bias != -2.71 and abs(bias + 2.71) < 0.1
    with pytest.raises(UsageError, match="needs initial weights"):
        vitreous.train(pairs, recipe="lit", out=tmp_path / "none", **OPTIONS)


def test_data_without_captions_are_refused(pairs, tmp_path):
    with pytest.raises(DataError, match="has no captions"):
        vitreous.train(pairs.parent, recipe="clip", out=tmp_path / "clip", listener=NoteListener(), **OPTIONS)


def test_check_describes_the_captions(pairs, siglip_run):
    result = run_cli("data", "check", str(pairs), "--workers", "0", "--json")
    document = json.loads(result.stdout)
    assert document["pairs"]["pairs"] == document["pairs"]["images"] == 48 and document["pairs"]["repeated"] == 0
    assert document["pairs"]["words"] == {"min": 6, "median": 6.0, "max": 6} and document["splits"].keys() == {"images"}


MODEL_CONFIG = ImageTextConfig(
    backbone=ViTConfig(image=(8, 8), patch=(4, 4), classes=0, width=16, depth=1, heads=1, mlp=MlpConfig(hidden=16)),
    text=TextConfig(
        vocabulary=32, length=4, width=16, depth=1, heads=1, hidden=16, embedding=16, pool="mean", end_id=31
    ),
    bias=True,
)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_loss_falls_on_one_batch(loss):
    torch.manual_seed(0)
    config = ContrastiveConfig(loss=loss, scale=10.0)
    model = build_model(MODEL_CONFIG)
    config.initialise(model)
    objective = ContrastiveObjective(model, config)
    batch = {"images": torch.randn(8, 3, 8, 8), "tokens": torch.randint(1, 31, (8, 4))}
    optimizer = torch.optim.Adam(objective.parameters(), 3e-3)
    losses = []
    for _ in range(60):
        outputs = objective(batch)
        optimizer.zero_grad()
        outputs["loss"].backward()
        optimizer.step()
        losses.append(float(outputs["loss"].detach()))
    assert losses[-1] < losses[0] / 2
    assert outputs.keys() == {"loss", *objective.logged}
    objective.is_idle = True
    assert float(objective(batch)["loss"].detach()) == 0


def test_unsupported_settings_are_refused():
    with pytest.raises(UsageError, match="unknown contrastive loss"):
        ContrastiveConfig(loss="hinge")
    with pytest.raises(UsageError, match="needs a model with a text encoder"):
        ContrastiveConfig().check(MODEL_CONFIG.backbone, (), PAIR_VIEWS)
    with pytest.raises(UsageError, match="needs a model with a bias"):
        ContrastiveConfig(loss="sigmoid").check(MODEL_CONFIG.with_options(bias=False), (), PAIR_VIEWS)


def test_recall_counts_equal_captions_and_all_captions_of_an_image():
    """Three images; the first has two captions, the others share one caption."""
    image_ids = np.array([7, 7, 8, 9])
    captions = np.array(["a", "b", "c", "c"])
    rows = np.eye(3, dtype=np.float32)
    images = rows[[0, 0, 1, 2]]
    texts = np.array([[0.9, 0, 0.1], [0.1, 0.9, 0], [0, 0.2, 0.9], [0, 0.2, 0.9]], np.float32)
    metrics, intervals = measure_retrieval(images, texts, image_ids, captions)
    # image 7 finds a; image 8 finds b, which is wrong; image 9 finds c
    assert metrics["image_to_text_r1"] == pytest.approx(2 / 3) and metrics["image_to_text_r5"] == 1
    # a finds 7; b finds 8, which is wrong; c finds 9
    assert metrics["text_to_image_r1"] == pytest.approx(2 / 3) and metrics["text_to_image_r5"] == 1
    assert metrics["retrieval_r1"] == pytest.approx(2 / 3)
    assert intervals["text_to_image_r1"] == wilson_interval(2, 3) and intervals["retrieval_r1"] is None
    assert metrics["image_to_text_r10"] == 1  # fewer than ten candidates


def test_recall_at_each_depth_equals_the_ranks_of_the_matches():
    generator = np.random.default_rng(0)
    images, texts = (generator.normal(size=(40, 8)).astype(np.float32) for _ in range(2))
    metrics, _ = measure_retrieval(images, texts, np.arange(40), np.array([f"text {i:02}" for i in range(40)]))
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (images, texts)]
    similarities = unit[0] @ unit[1].T
    for direction, scores in (("image_to_text", similarities), ("text_to_image", similarities.T)):
        ranks = (scores > np.diag(scores)[:, None]).sum(1)
        for depth in (1, 5, 10):
            assert metrics[f"{direction}_r{depth}"] == pytest.approx((ranks < depth).mean())


def test_large_splits_are_sampled():
    count = MAX_RETRIEVAL_PAIRS + 5
    images = ArraySplit(np.zeros((count, 1, 1), np.uint8), np.zeros((count, 0), np.float32))
    split = PairSplit(PairTable(images, np.arange(count), Captions(["x"] * count)), np.arange(count))
    assert len(RetrievalEvaluator().required_splits(split)[0]) == MAX_RETRIEVAL_PAIRS


def test_trained_tokenizer_depends_only_on_the_captions(tmp_path, monkeypatch):
    """Another process trains the same file; unknown characters are encoded as bytes."""
    captions = [f"A {colour} seven in the {place}" for colour in COLOURS for place in ("centre", "top left", "Ü")]
    script = "import sys; from vitreous.data.caption_tokenizer import train_tokenizer as t; print(t(sys.argv[1:]).path)"
    contents = []
    for name in ("one", "two"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        result = subprocess.run([sys.executable, "-c", script, *captions], capture_output=True, text=True, check=True)
        contents.append(Path(result.stdout.strip()).read_bytes())
    assert contents[0] == contents[1]
    trained = train_tokenizer(captions)
    assert trained.length == 8 and trained.vocabulary < 400
    assert train_tokenizer(captions) == trained
