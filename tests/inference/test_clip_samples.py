"""Generated clips: training, GIF and MP4 files, other lengths, resumed jobs, evaluation and errors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitreous
from tests.conftest import run_cli
from tests.data.films import write_moves
from tests.objectives.test_clips import StoppingListener
from vitreous.data.decoding.clips import open_clip
from vitreous.errors import UsageError
from vitreous.inference import image_grid as clip_files
from vitreous.inference.generators import build_generator_predictor
from vitreous.inference.open_model import open_generator
from vitreous.inference.samples import Generator, SampleOptions
from vitreous.training.folder import RunFolder
from vitreous.weights.bundle import load_bundle

MODEL_NAME = "DiT-48x2/2x4x4-alternating"
RUN_OPTIONS = {"model": MODEL_NAME, "frames": 4, "workers": 0, "device": "cpu", "precision": "fp32", "batch_size": 4}
SAMPLING_OPTIONS = {"progress": False, "steps": 2, "device": "cpu", "precision": "fp32"}


@pytest.fixture(scope="module")
def moving_squares(tmp_path_factory):
    """GIF files of squares that move left or right, in three splits."""
    moving_squares = tmp_path_factory.mktemp("clips")
    for split_index, (name, count) in enumerate((("train", 6), ("val", 2), ("test", 6))):
        write_moves(moving_squares / name, count, (".gif",), first=100 * split_index)
    return moving_squares


@pytest.fixture(scope="module")
def clip_generator_run(moving_squares, tmp_path_factory):
    """A run of three steps, and its notes."""
    out, notes = tmp_path_factory.mktemp("runs") / "run", StoppingListener()
    vitreous.train(moving_squares, out=out, recipe="sit", steps=3, listener=notes, **RUN_OPTIONS)
    return out, notes.notes


def test_generator_recipe_trains_on_clips_without_flips(clip_generator_run):
    out, notes = clip_generator_run
    assert any(note.startswith("the data are 28 clips") for note in notes)
    settings, bundle = RunFolder(out).run(), open_generator(out)
    assert settings.views.flip == 0 and settings.preprocess.is_animated and settings.objective.name == "flow"
    assert bundle.model.config.name() == MODEL_NAME and bundle.model.config.image == (4, 16, 16)
    assert bundle.task.classes == ("left", "right")
    assert json.loads((out / "summary.json").read_text())["val"]["denoising_error"] > 0
    # four clips per class, one row of four frames each
    assert Image.open(out / "samples.png").size == (4 * 130 - 2, 8 * 130 - 2)
    page = (out / "report.html").read_text()
    assert "Generated clips" in page and "One clip per row, 4 frames each, " in page


def test_resumed_clip_generator_run_is_bit_identical(moving_squares, tmp_path):
    options = {**RUN_OPTIONS, "recipe": "dit", "steps": 4, "save_every": 2, "log_every": 1}
    vitreous.train(moving_squares, out=tmp_path / "whole", progress=False, **options)
    with pytest.raises(KeyError):
        vitreous.train(moving_squares, out=tmp_path / "stopped", listener=StoppingListener(12), **options)
    vitreous.train(out=tmp_path / "stopped", resume=True, progress=False)
    expected, resumed = (load_bundle(tmp_path / name / "model").model.state_dict() for name in ("whole", "stopped"))
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_clip_generator_starts_from_clip_weights_only(moving_squares, clip_generator_run, tmp_path):
    notes, options = (
        StoppingListener(),
        {name: value for name, value in RUN_OPTIONS.items() if name not in ("model", "frames")},
    )
    vitreous.train(
        moving_squares,
        out=tmp_path / "more",
        recipe="sit",
        init=str(clip_generator_run[0]),
        steps=1,
        listener=notes,
        **options,
    )
    assert open_generator(tmp_path / "more").model.config == open_generator(clip_generator_run[0]).model.config
    assert any("new 0, unused 0" in note for note in notes.notes)
    with pytest.raises(UsageError, match="are for clips, but the data are images"):
        vitreous.train("digits", out=tmp_path / "run", recipe="sit", init=str(clip_generator_run[0]), progress=False)


def test_generated_clip_is_independent_of_batch_and_moves(clip_generator_run):
    generator = Generator(open_generator(clip_generator_run[0]), "cpu", "fp32")
    options = SampleOptions(steps=2, seed=5, guidance=2.0)
    together = list(generator.generate([(0, 0), (1, 0), (1, 1), (0, 3)], options))
    assert [clip.image.shape for clip in together] == [(4, 16, 16, 3)] * 4 and len(together[0].to_pil_frames) == 4
    for clip, pair in zip(together, ((0, 0), (1, 0), (1, 1), (0, 3)), strict=True):
        (alone,) = generator.generate([pair], options)
        assert np.abs(alone.image.astype(int) - clip.image).max() <= 1
    assert not np.array_equal(together[1].image, together[2].image)
    assert not np.array_equal(together[0].image[0], together[0].image[1])


def test_gif_folder_is_resumed(clip_generator_run, tmp_path):
    folder = tmp_path / "many"
    document = vitreous.sample(clip_generator_run[0], folder, count=4, **SAMPLING_OPTIONS)
    assert document["frames"] == 4 and len(document["files"]) == 4
    names = [f"{name}-0000{index}.gif" for name in ("left", "right") for index in range(2)]
    assert sorted(path.name for path in folder.glob("*.gif")) == names
    clip = open_clip(folder / "right-00001.gif")
    assert (len(clip), clip.size) == (4, (16, 16)) and clip.times == pytest.approx([0, 0.1, 0.2, 0.3])
    stamp = (folder / names[0]).stat().st_mtime_ns
    (folder / names[1]).unlink()
    vitreous.sample(clip_generator_run[0], folder, count=6, frames=4, **SAMPLING_OPTIONS)
    assert (folder / names[0]).stat().st_mtime_ns == stamp and len(list(folder.glob("*.gif"))) == 6
    with pytest.raises(UsageError, match="has images with other settings"):
        vitreous.sample(clip_generator_run[0], folder, frames=6, **SAMPLING_OPTIONS)


def test_clip_grids_are_written_as_gif_mp4_and_png(clip_generator_run, tmp_path):
    for suffix, size in (("gif", (286, 388)), ("mp4", (286, 388))):
        vitreous.sample(clip_generator_run[0], tmp_path / f"grid.{suffix}", count=6, **SAMPLING_OPTIONS)
        clip = open_clip(tmp_path / f"grid.{suffix}")
        assert (len(clip), clip.size) == (4, size), suffix
    clips = (open_clip(tmp_path / f"grid.{suffix}").read_frames(np.arange(4)) for suffix in ("gif", "mp4"))
    gif, mp4 = (
        clip @ np.array([0.299, 0.587, 0.114]) for clip in clips
    )  # yuv420p stores only brightness at full resolution
    assert all(
        np.corrcoef(gif_frame.ravel(), mp4_frame.ravel())[0, 1] > 0.9
        for gif_frame, mp4_frame in zip(gif, mp4, strict=True)
    )
    vitreous.sample(clip_generator_run[0], tmp_path / "grid.png", count=6, **SAMPLING_OPTIONS)
    assert Image.open(tmp_path / "grid.png").size == (4 * 130 - 2, 6 * 144 - 2)


def test_clips_are_sampled_at_other_lengths(clip_generator_run, tmp_path):
    assert (
        vitreous.sample(clip_generator_run[0], tmp_path / "long.gif", classes=("left",), frames=10, **SAMPLING_OPTIONS)[
            "frames"
        ]
        == 10
    )
    assert len(open_clip(tmp_path / "long.gif")) == 10
    with pytest.raises(UsageError, match="frames=5 is not a multiple of the 2 frames of a patch") as failure:
        vitreous.sample(clip_generator_run[0], tmp_path / "odd.gif", frames=5, **SAMPLING_OPTIONS)
    assert failure.value.hint == "use --frames 4"
    with pytest.raises(UsageError, match="frames must be 1 to 4,096, not 0"):
        SampleOptions(frames=0)


def test_mp4_sizes_are_padded_to_even_numbers(tmp_path):
    frames = [Image.new("L", (7, 5), grey) for grey in (0, 128, 255)]
    clip_files.write_clip(tmp_path / "clip", ".mp4", frames)
    clip = open_clip(tmp_path / "clip")
    pixels = clip.read_frames(np.arange(3))
    assert (len(clip), clip.size) == (3, (6, 8))
    assert [round(float(frame[:4, :6].mean())) for frame in pixels] == pytest.approx([0, 128, 255], abs=12)


def test_mp4_without_pyav_names_the_package_to_install(clip_generator_run, tmp_path, monkeypatch):
    monkeypatch.setattr(clip_files, "find_spec", lambda name: None)
    with pytest.raises(vitreous.errors.ResourceError, match="need PyAV") as failure:
        vitreous.sample(clip_generator_run[0], tmp_path / "x.mp4", **SAMPLING_OPTIONS)
    assert "pip install 'vitreous[video]'" in failure.value.hint and not (tmp_path / "x.mp4").exists()


def test_generated_clips_are_evaluated_on_pixels_and_features(moving_squares, clip_generator_run, tmp_path):
    options: dict[str, Any] = {"samples": 10, "steps": 2}
    metrics = vitreous.evaluate(clip_generator_run[0], device="cpu", **options)["test"]
    assert (
        metrics["dimensions"] == 4 * 16 * 16 * 3 and metrics["frechet_distance"] > metrics["frechet_distance_of_train"]
    )
    run_options = {name: value for name, value in RUN_OPTIONS.items() if name != "model"}
    vitreous.train(
        moving_squares, out=tmp_path / "reader", model="ViViT-32x1/8x2", steps=2, progress=False, **run_options
    )
    metrics = vitreous.evaluate(clip_generator_run[0], device="cpu", features=str(tmp_path / "reader"), **options)[
        "test"
    ]
    assert metrics["dimensions"] == 32 and 0 <= metrics["classifier_accuracy"] <= 1
    vitreous.save(vitreous.create("ViT-32x1/8", 16, 2), tmp_path / "flat")
    with pytest.raises(UsageError, match="flat needs images, not clips"):
        vitreous.evaluate(clip_generator_run[0], device="cpu", features=str(tmp_path / "flat"), **options)


@pytest.mark.parametrize(
    ("model", "message"),
    [("DiT-48x2/4", "is for images, but the data are clips"), ("ViViT-48x2/4x2", "does not support the recipe sit")],
)
def test_models_other_than_clip_generators_are_rejected(moving_squares, tmp_path, model, message):
    with pytest.raises(UsageError, match=message) as failure:
        vitreous.train(
            moving_squares, out=tmp_path / "run", recipe="sit", progress=False, **RUN_OPTIONS | {"model": model}
        )
    assert "--model DiT-" in failure.value.hint


def test_options_unsupported_for_clip_generators_are_rejected(moving_squares, clip_generator_run, tmp_path):
    with pytest.raises(UsageError, match="does not support classification of clips"):
        vitreous.train(moving_squares, out=tmp_path / "run", progress=False, **RUN_OPTIONS)
    with pytest.raises(UsageError, match="inpaint is for image models, not for clips"):
        vitreous.sample(clip_generator_run[0], tmp_path / "x", inpaint="a.png", mask="b.png", **SAMPLING_OPTIONS)
    with pytest.raises(UsageError, match="generates clips, but a server returns images"):
        build_generator_predictor(load_bundle(clip_generator_run[0] / "model"))


def test_image_generators_reject_clip_output(tmp_path):
    vitreous.train("digits", recipe="sit", model="DiT-32x1/4", steps=1, out=tmp_path / "run", progress=False)
    for out in ("x.gif", "x.mp4"):
        with pytest.raises(UsageError, match="is for clips, but the model generates images"):
            vitreous.sample(tmp_path / "run", tmp_path / out, **SAMPLING_OPTIONS)
    with pytest.raises(UsageError, match="frames is for models of clips"):
        vitreous.sample(tmp_path / "run", tmp_path / "x.png", frames=4, **SAMPLING_OPTIONS)


def test_sample_command_prints_the_number_of_frames(clip_generator_run, tmp_path):
    words = [
        "sample",
        clip_generator_run[0],
        "--class",
        "left",
        "--count",
        "2",
        "--frames",
        "6",
        "--steps",
        "2",
        "--device",
        "cpu",
    ]
    done = run_cli(*map(str, words), "--out", str(tmp_path / "clips"))
    assert done.returncode == 0 and "2 clips of 6 frames" in done.stdout, done.stderr
    assert len(open_clip(tmp_path / "clips" / "left-00001.gif")) == 6
