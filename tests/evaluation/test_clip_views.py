"""Several views per clip: their positions, averaged logits, and one view as the default."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import vitreous
from tests.data.films import write_clip, write_moves
from vitreous.data.clip_views import ClipViews, parse_clip_views
from vitreous.data.decoding.clips import ArrayClip, open_clip
from vitreous.data.loader import EvalLoader
from vitreous.data.modalities.clips import ClipPreprocess
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.sources import open_data
from vitreous.errors import UsageError
from vitreous.inference.engine import InferenceOptions, compute_split_logits, make_engine
from vitreous.weights.bundle import load_bundle

CPU_OPTIONS = {"device": "cpu", "precision": "fp32"}


def make_index_clip(count: int, height: int, width: int) -> ArrayClip:
    """A clip whose pixels contain their position: (frame, row, column) in red, green and blue."""
    positions = np.meshgrid(*map(np.arange, (count, height, width)), indexing="ij")
    return ArrayClip(np.stack(positions, -1).astype(np.uint8), "numbered")


@pytest.mark.parametrize(("stride", "times", "frames"), [
    (0, 1, [[2, 7, 12, 17]]), (0, 2, [[1, 6, 11, 16], [3, 8, 13, 18]]), (3, 1, [[5, 8, 11, 14]]),
    (3, 3, [[0, 3, 6, 9], [5, 8, 11, 14], [10, 13, 16, 19]]), (30, 2, [[0, 19, 19, 19]] * 2),
])  # fmt: skip
def test_temporal_views_are_spaced_evenly(stride, times, frames):
    views = ClipViews(times, 1).read_views(make_index_clip(20, 8, 8), ClipPreprocess((4, 8, 8), stride=stride))
    assert views.shape == (times, 3, 4, 8, 8) and views[:, 0, :, 0, 0].tolist() == frames


@pytest.mark.parametrize(("size", "axis"), [((8, 20), 2), ((24, 8), 1)])
def test_crops_follow_the_longer_side_and_include_the_default(size, axis):
    clip, preprocess = make_index_clip(6, *size), ClipPreprocess((2, 8, 8))
    views = ClipViews(1, 3).read_views(clip, preprocess)
    starts = views[:, axis, 0, 0, 0].tolist()
    assert starts == [0, (max(size) - 8) // 2, max(size) - 8]
    default_crop = preprocess.to_tensor(preprocess.decode(clip)).numpy()
    assert np.array_equal(views[1], default_crop) and np.array_equal(
        ClipViews(1, 1).read_views(clip, preprocess)[0], default_crop
    )
    square = ClipViews(1, 3).read_views(make_index_clip(6, 12, 12), preprocess)
    assert np.array_equal(square[0], square[2])  # no pixels are left over


@pytest.fixture(scope="module")
def clip_run(tmp_path_factory):
    """A run of wide clips, one step long, and its data."""
    folder = write_moves(tmp_path_factory.mktemp("clips"), 8, (".gif", ""))
    wide = np.random.default_rng(0).integers(0, 255, (9, 16, 40, 3)).astype(np.uint8)
    write_clip(folder / "left" / "wide.gif", wide)
    out = folder.parent / "run"
    options = {
        "steps": 4,
        "frames": 4,
        "batch_size": 8,
        "lr": 1e-2,
        "workers": 0,
        "model": "ViViT-32x2/8x2",
        **CPU_OPTIONS,
    }
    vitreous.train(str(folder), out=str(out), image_size=16, **options)
    return out, folder


def test_view_logits_are_averaged_and_one_view_is_the_default(clip_run):
    bundle, split = load_bundle(clip_run[0] / "model"), open_data(clip_run[1]).split("train")
    engine, views = make_engine(bundle.model, bundle.preprocess, InferenceOptions(**CPU_OPTIONS)), ClipViews(3, 3)
    logits, bad = compute_split_logits(engine, EvalLoader(split, bundle.preprocess, views=views), batch_size=10)
    assert not bad
    for sample in (0, len(split) - 1):
        alone = engine(torch.from_numpy(views.read_views(split.open_clip(sample), bundle.preprocess)))  # type: ignore[attr-defined]
        assert np.allclose(alone.mean(0).numpy(), logits[sample], atol=1e-5) and alone.std() > 1e-4
    plain = vitreous.evaluate(str(clip_run[0]), split="train", workers=0, clip_views="1x1", **CPU_OPTIONS)
    assert plain["clip_views"] == "1x1"
    nine_views = vitreous.evaluate(str(clip_run[0]), split="train", workers=0, clip_views="3x3", **CPU_OPTIONS)
    labels = torch.from_numpy(split.labels)
    nll = torch.nn.functional.cross_entropy(
        torch.from_numpy(logits).double() / bundle.classification.temperature, labels
    ).item()
    assert nine_views["train"]["nll"] == pytest.approx(nll, abs=1e-4) and nine_views["train"] != plain["train"]
    assert nine_views["clip_views"] == "3x3"
    lines = (clip_run[0] / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["clip_views"] for line in lines] == ["1x1", "3x3"]
    page = next(path for path in clip_run[0].glob("report-train.html")).read_text()
    assert "averaged over 3x3 views per clip (temporal × spatial crops)" in page and "--clip-views 3x3" in page


def test_predict_and_embed_average_over_views(clip_run):
    plain, again, six_views = (vitreous.load(clip_run[0], **CPU_OPTIONS, **more)
                             for more in ({}, {"clip_views": "1x1"}, {"clip_views": "2x3"}))  # fmt: skip
    clips = [str(clip_run[1] / "left" / name) for name in ("wide.gif", "clip0.gif", "clip1")]
    assert plain.predict(clips) == again.predict(clips) != six_views.predict(clips)
    bundle = load_bundle(clip_run[0] / "model")
    view_pixels = ClipViews(2, 3).read_views(open_clip(clips[0]), bundle.preprocess)
    logits = six_views.engine.logits(view_pixels).mean(0).astype(np.float64) / bundle.classification.temperature
    prediction = six_views.predict(clips[0], top=2)
    expected = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    assert prediction.probabilities == pytest.approx(sorted(expected, reverse=True), abs=1e-6)
    assert np.allclose(six_views.embed(clips)[0], six_views.engine.features(view_pixels).mean(0), atol=1e-6)


@pytest.mark.parametrize(("words", "problem"), [
    ("4", "is not SETSxCROPS"), ("0x3", "is not SETSxCROPS"), ("20x6", "at most 100 views"),
    ("4x3x2", "is not SETSxCROPS"),
])  # fmt: skip
def test_invalid_view_strings_are_rejected(words, problem):
    with pytest.raises(UsageError, match=problem):
        parse_clip_views(words, ClipPreprocess((4, 8, 8)))


def test_unsupported_clip_views_are_rejected(clip_run, tmp_path):
    with pytest.raises(UsageError, match="model is for images"):
        parse_clip_views("4x3", ImagePreprocess((8, 8)))
    with pytest.raises(UsageError, match="whole frames, not crops\n  use 4x1"):
        parse_clip_views("4x3", ClipPreprocess((4, 8, 8), fit="squash"))
    with pytest.raises(UsageError, match="clip_views='2x1' is only for predictions and embeddings of video models"):
        vitreous.evaluate(str(clip_run[0]), protocol="knn", clip_views="2x1", **CPU_OPTIONS)
    with pytest.raises(UsageError, match="suspects uses the features of one view"):
        vitreous.evaluate(str(clip_run[0]), suspects=str(tmp_path / "x.csv"), clip_views="2x1", **CPU_OPTIONS)
