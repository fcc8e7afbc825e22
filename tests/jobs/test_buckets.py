"""Generators trained at several sizes in one run: training, resuming, sampling and evaluation at each size."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitreous
from tests.conftest import run_cli
from tests.data.films import make_moving_square, write_clip
from tests.objectives.test_clips import StoppingListener
from vitreous.data.decoding.clips import open_clip
from vitreous.errors import UsageError
from vitreous.inference.open_model import open_generator
from vitreous.jobs.plan import plan_run
from vitreous.progress import NullListener
from vitreous.recipes.options import TrainOptions
from vitreous.training.batches import mean_sample_cost
from vitreous.training.folder import RunFolder, read_json_lines
from vitreous.training.ranks import Ranks
from vitreous.training.slices import rank_slices
from vitreous.weights.bundle import load_bundle

BUCKETS = ("4x16x16", "1x16x16", "1x12x24", "1x24x12")
RUN_OPTIONS: dict[str, Any] = {"workers": 0, "device": "cpu", "precision": "fp32", "batch_size": 6, "recipe": "sit"}
CLIP_OPTIONS = RUN_OPTIONS | {"model": "DiT-48x2/1x4x4-alternating", "buckets": BUCKETS}
SAMPLING_OPTIONS: dict[str, Any] = {"progress": False, "steps": 2, "device": "cpu", "precision": "fp32"}


def write_noise_images(folder, count, first=0):
    """Noise images with three alternating aspect ratios."""
    for index in range(count):
        height, width = ((16, 16), (12, 24), (24, 12))[index % 3]
        pixels = np.random.default_rng(first + index).integers(0, 255, (height, width, 3)).astype(np.uint8)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"picture{index}.png")


@pytest.fixture(scope="module")
def mixed_data(tmp_path_factory):
    """Clips and images of two classes, in two splits."""
    mixed_data = tmp_path_factory.mktemp("mixed")
    for split_index, (split, count) in enumerate((("train", 5), ("test", 6))):
        for right, name in enumerate(("left", "right")):
            for index in range(count):
                write_clip(
                    mixed_data / split / name / f"{index}.gif",
                    make_moving_square(100 * split_index + 2 * index + right, bool(right)),
                )
            write_noise_images(mixed_data / split / name, 9, 100 * split_index + right)
    return mixed_data


@pytest.fixture(scope="module")
def bucket_run(mixed_data, tmp_path_factory):
    """A run of clips and images in explicit buckets, and its notes."""
    out, notes = tmp_path_factory.mktemp("runs") / "run", StoppingListener()
    vitreous.train(mixed_data, out=out, steps=8, listener=notes, **CLIP_OPTIONS)
    return out, notes.notes


def test_buckets_are_logged_and_stored_with_the_model(bucket_run):
    out, notes = bucket_run
    assert [note for note in notes if "4x16x16 9, 1x16x16 6, 1x12x24 5, 1x24x12 6; evaluation uses 4x16x16" in note]
    preprocess = open_generator(out).preprocess
    assert preprocess.image == (4, 16, 16) and preprocess.buckets == (
        (4, 16, 16),
        (1, 16, 16),
        (1, 12, 24),
        (1, 24, 12),
    )
    summary = json.loads((out / "summary.json").read_text())
    assert summary["val"]["images"] == 1 and summary["val"]["denoising_error"] > 0  # one of the two is an image
    assert RunFolder(out).run().preprocess == preprocess


def test_sampling_at_each_bucket_size(bucket_run, tmp_path):
    for size, frames, shape in (("16x16", 4, (4, 16, 16)), ("24x12", 1, (1, 24, 12)), ("12x24", None, (1, 12, 24))):
        folder = tmp_path / f"{size}-{frames}"
        document = vitreous.sample(bucket_run[0], folder, size=size, frames=frames, **SAMPLING_OPTIONS)
        assert document["size"] == "x".join(map(str, shape)) and document["frames"] == shape[0]
        suffix = "gif" if shape[0] > 1 else "png"
        suffixes = sorted(path.suffix for path in folder.iterdir() if path.name != "samples.json")
        assert suffixes == [f".{suffix}"] * 2
        if suffix == "gif":
            clip = open_clip(folder / "left-00000.gif")
            assert (len(clip), *clip.size) == shape
        else:
            assert Image.open(folder / "right-00000.png").size == shape[:0:-1]
    assert vitreous.sample(bucket_run[0], tmp_path / "own.gif", **SAMPLING_OPTIONS)["size"] == "4x16x16"
    assert (
        vitreous.sample(bucket_run[0], tmp_path / "one.png", frames=1, count=4, **SAMPLING_OPTIONS)["size"] == "1x16x16"
    )
    assert Image.open(tmp_path / "one.png").size == (2 * 130 - 2, 2 * 144 - 2)
    notes = StoppingListener()
    document = vitreous.sample(
        bucket_run[0], tmp_path / "x.gif", listener=notes, **SAMPLING_OPTIONS | {"size": "20", "frames": 6}
    )
    assert document["size"] == "6x20x20" and open_clip(tmp_path / "x.gif").size[1] == 120
    assert any("was not trained at 6x20x20, but at 4x16x16, 1x16x16" in note for note in notes.notes)
    with pytest.raises(UsageError, match="has images with other settings"):
        vitreous.sample(bucket_run[0], tmp_path / "24x12-1", size="12x24", **SAMPLING_OPTIONS)


def test_evaluation_at_one_size_uses_the_nearest_images(bucket_run):
    options: dict[str, Any] = {"samples": 10, "steps": 2, "device": "cpu", "split": "test"}
    metrics = vitreous.evaluate(bucket_run[0], **options)["test"]
    assert metrics["size"] == "4x16x16" and metrics["images"] == 12 and metrics["dimensions"] == 4 * 16 * 16 * 3
    notes = StoppingListener()
    with pytest.raises(vitreous.errors.DataError, match="6 images are too few to compare with"):
        vitreous.evaluate(bucket_run[0], size="12x24", listener=notes, **options)
    assert any("evaluated at 1x12x24, against the 6 of 30 test images" in note for note in notes.notes)


def test_resumed_bucket_run_is_bit_identical(mixed_data, tmp_path):
    options: dict[str, Any] = CLIP_OPTIONS | {"steps": 8, "save_every": 2, "log_every": 1}
    vitreous.train(mixed_data, out=tmp_path / "whole", progress=False, **options)
    with pytest.raises(KeyError):
        vitreous.train(mixed_data, out=tmp_path / "stopped", listener=StoppingListener(24), **dict(options, workers=2))
    vitreous.train(out=tmp_path / "stopped", resume=True, progress=False)
    expected, resumed = (load_bundle(tmp_path / name / "model").model.state_dict() for name in ("whole", "stopped"))
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    vitreous.train(mixed_data, out=tmp_path / "stopped", resume=True, progress=False, buckets=BUCKETS)
    with pytest.raises(UsageError, match="buckets: "):
        vitreous.train(out=tmp_path / "stopped", resume=True, progress=False, buckets=("4x16x16",))


def test_a_single_bucket_learns_as_a_run_without_buckets(tmp_path):
    options: dict[str, Any] = CLIP_OPTIONS | {"steps": 5, "log_every": 1, "frames": 4, "buckets": None}
    clips = tmp_path / "clips"
    for right, name in enumerate(("left", "right")):
        for index in range(5):
            write_clip(clips / name / f"{index}.gif", make_moving_square(2 * index + right, bool(right)))
    losses = []
    for name, buckets in (("plain", None), ("one", ("4x16x16",))):
        vitreous.train(clips, out=tmp_path / name, progress=False, **dict(options, buckets=buckets))
        losses.append(
            [line["train/loss"] for line in read_json_lines(RunFolder(tmp_path / name).metrics) if "train/loss" in line]
        )
    assert len(losses[0]) == 5 and losses[0] == losses[1]


def test_image_generator_trains_at_native_aspect_ratios(tmp_path):
    write_noise_images(tmp_path / "flat", 30)
    notes, options = (
        StoppingListener(),
        RUN_OPTIONS | {"model": "DiT-48x1/4", "steps": 4, "buckets": (), "micro_batch": "2"},
    )
    vitreous.train(tmp_path / "flat", out=tmp_path / "run", listener=notes, **options)
    assert any(note.startswith("training images per bucket: 12x24 9, 16x16 9, 24x12 9;") for note in notes.notes)
    assert vitreous.sample(tmp_path / "run", tmp_path / "x.png", size="24x12", **SAMPLING_OPTIONS)["size"] == "24x12"
    assert Image.open(tmp_path / "x.png").size == (60, 120)


def test_ranks_share_batches_split_by_bucket(mixed_data, tmp_path):
    options = TrainOptions(str(mixed_data), steps=8, out=str(tmp_path / "x"), **CLIP_OPTIONS)
    _, run, inputs, _ = plan_run(options, NullListener())
    assert inputs.buckets is not None
    buckets = inputs.buckets

    def cut_into_ranks(start, stop):
        bucket_indices = buckets[np.arange(start, stop) % len(buckets)]
        return [start, *(start + 1 + np.flatnonzero(np.diff(bucket_indices))).tolist(), stop]

    for start in range(0, run.total, run.step_size):
        for world in (1, 2, 4):
            computed = [
                rank_slice
                for rank in range(world)
                for rank_slice in rank_slices(run, Ranks(rank, world), start, cut_into_ranks)
            ]
            assert sum(rank_slice.share for rank_slice in computed) == pytest.approx(1)
            positions = [
                position
                for rank_slice in computed
                if rank_slice.share
                for position in range(rank_slice.start, rank_slice.stop)
            ]
            assert sorted(positions) == list(range(start, min(start + run.step_size, run.total)))
            assert all(len({*buckets[np.arange(p.start, p.stop) % len(buckets)]}) == 1 for p in computed)
    costs = {
        size: run.model.__class__(**{**run.model.__dict__, "image": size}).macs() for size in run.preprocess.buckets
    }
    mean = np.mean([costs[run.preprocess.buckets[bucket]] for bucket in buckets])
    assert mean_sample_cost(run, inputs) == pytest.approx(mean / costs[run.model.image])


@pytest.mark.parametrize(("change", "problem"), [
    ({"recipe": None, "model": None}, "buckets needs a generative model"),
    ({"buckets": ("16x16",)}, "'16x16' is not a valid size"), ({"buckets": ("4x18x16",)}, "is not divisible by patch size"),
    ({"reproducible": True}, "reproducible=True cannot be combined with buckets"), ({"parallel": "fsdp"}, "fsdp"),
    ({"sampling": "balanced"}, "another sampling than even cannot be combined with buckets"),
    ({"micro_batch": "auto"}, "micro_batch='auto' does not support buckets"),
])  # fmt: skip
def test_options_incompatible_with_buckets_are_rejected(mixed_data, tmp_path, change, problem):
    with pytest.raises(UsageError, match=problem):
        vitreous.train(mixed_data, out=tmp_path / "run", steps=1, progress=False, **CLIP_OPTIONS | change)


@pytest.mark.parametrize(("size", "problem"), [
    ("big", "size cannot be big"), ("18x16", "size='18x16' is not a multiple"), ("16x16x16", "size cannot be"),
    ("0", "size cannot be 0"),
])  # fmt: skip
def test_invalid_sampling_sizes_are_rejected(bucket_run, tmp_path, size, problem):
    with pytest.raises(UsageError, match=problem):
        vitreous.sample(bucket_run[0], tmp_path / "x.png", size=size, **SAMPLING_OPTIONS)


def test_the_command_takes_sizes(bucket_run, tmp_path):
    words = ["sample", bucket_run[0], "--class", "left", "--size", "12x24", "--steps", "2", "--device", "cpu"]
    done = run_cli(*map(str, words), "--out", str(tmp_path / "x.png"))
    assert done.returncode == 0 and "1 image at 12x24 pixels" in done.stdout, done.stderr
