"""Attention figures over time, for models with joint and with factorised attention."""

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.films import make_grey_frames, write_clip, write_moves
from tests.inference.test_clips import save_video_model
from vitreous.data.modalities.clips import ClipPreprocess
from vitreous.data.sources import open_data
from vitreous.errors import DataError, UsageError
from vitreous.inspection.rollout import compute_rollout
from vitreous.progress import NullListener
from vitreous.reports.figures.subject import FigureContext, InspectOptions
from vitreous.reports.inspect import inspect
from vitreous.weights.bundle import load_bundle

VIVIT_VARIANTS = ["", "-factorised-encoder", "-factorised-attention", "-factorised-dot-product"]


@pytest.mark.parametrize("arrangement", VIVIT_VARIANTS)
def test_clip_figures_show_attention_in_every_frame(tmp_path, arrangement):
    clips = write_moves(tmp_path / "clips", 1)
    run = save_video_model(tmp_path / "model", f"ViViT-64x2/4x2{arrangement}")
    document = inspect(run, clips, tmp_path / "out", figures=["clips", "distance"], device="cpu", precision="fp32")
    figure = next(entry for entry in document["figures"] if entry["name"] == "clips")
    maps = np.load(tmp_path / "out/clips.npz")["maps"]
    assert maps.shape == (2, 2, 4, 4) and (maps >= 0).all() and len(document["images"]) == 2
    if arrangement:
        sums = maps.sum((2, 3))  # for each slot, in addition to its class token
        assert (sums > 0.5).all() and (sums < 1).all() and "within each slot" in figure["caption"]
    else:
        bundle = load_bundle(run)
        pixels = [bundle.preprocess.to_tensor(bundle.preprocess.decode(name)) for name in document["images"]]
        rollout = compute_rollout(bundle.model, bundle.preprocess.normalise(torch.stack(pixels)))
        np.testing.assert_allclose(maps, rollout.maps[:, -1], atol=1e-6)
    with Image.open(tmp_path / "out" / figure["gif"]) as animation:
        assert animation.n_frames == 4 and animation.size == (2 * 224 + 2, 2 * 224 + 2)
        first = np.asarray(animation.convert("RGB"))
        animation.seek(3)
        assert not np.array_equal(first, np.asarray(animation.convert("RGB")))
    assert "data:image/gif;base64" in (tmp_path / "out/index.html").read_text()


def test_image_figures_are_rejected_for_clips_and_vice_versa(tmp_path):
    run = save_video_model(tmp_path / "model", "ViViT-32x2/4x2")
    with pytest.raises(
        UsageError, match=r"figure rollout is not available for models of clips\n.*clips, similarity, cost"
    ):
        inspect(run, figures=["rollout"])
    Image.new("RGB", (16, 16)).save(tmp_path / "picture.png")
    with pytest.raises(DataError, match="no clips in"):
        inspect(run, tmp_path, figures=["clips"])
    from vitreous import create, save

    save(create("ViT-32x1/8", 16, 2), tmp_path / "flat")
    with pytest.raises(UsageError, match="figure clips is not available for models of images"):
        inspect(tmp_path / "flat", figures=["clips"])


def test_image_size_applies_to_frames(tmp_path):
    run = save_video_model(tmp_path / "model", "ViViT-32x2/4x2")
    clips = write_moves(tmp_path / "clips", 1, (".gif",))
    options = {"figures": ["clips"], "image_size": (24,), "device": "cpu"}
    assert inspect(run, clips, tmp_path / "out", **options)["image_size"] == [4, 24, 24]
    assert load_bundle(run).preprocess == ClipPreprocess((4, 16, 16))
    assert np.load(tmp_path / "out/clips.npz")["maps"].shape == (2, 2, 6, 6)


def test_only_the_labelled_segment_of_a_video_is_shown(tmp_path):
    write_clip(tmp_path / "film.gif", np.concatenate([make_grey_frames(5), make_grey_frames(5) + 100]))  # ten frames/s
    rows = ["path,label,split,start,end", "film.gif,dark,train,,0.5", "film.gif,light,train,0.5,"]
    (tmp_path / "parts.csv").write_text("\n".join([*rows, *(row.replace("train", "val") for row in rows[1:])]) + "\n")
    bundle = load_bundle(save_video_model(tmp_path / "model", "ViViT-32x2/4x2"))
    scene = FigureContext(
        "", bundle, InspectOptions(), bundle.preprocess, device="cpu", images=(), listener=NullListener()
    )
    clips = dict(scene.iterate_readable(open_data(tmp_path / "parts.csv").split("train")))
    assert len(clips) == 2 and all(clip.pixels.shape == (3, 4, 16, 16) for clip in clips.values())
    assert clips[0].pixels.max() < 100 <= clips[1].pixels.min()
