"""Image weights initialise clip models: a single frame or a constant clip gives the image model's outputs."""

import pytest
import torch

from tests.weights import peers
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import WeightsError
from vitreous.models.config import VideoConfig, transformer_config
from vitreous.models.configs.video import ARRANGEMENTS
from vitreous.models.zoo import build_model
from vitreous.tasks.features import FeatureExtraction
from vitreous.weights.adopt import PretrainedWeights, load_pretrained_weights
from vitreous.weights.inflation import inflate_kernel

SMALL_CONFIG = {"classes": 4, "width": 32, "depth": 2, "heads": 2, "mlp": {"hidden": 64}}
MEAN_POOLING = {"class_token": False, "pool": "mean"}


def make_weights_source(config):
    """Return a random model with this config, and its weights as a source."""
    model = peers.randomise(build_model(config))
    preprocess = ImagePreprocess((config.image[-2], config.image[-1]))
    return model, PretrainedWeights("somewhere", "a bundle", config, preprocess, FeatureExtraction(), model.state_dict)


def clip_config(frames, **changes):
    return VideoConfig().with_options(
        **(SMALL_CONFIG | {"image": (frames, 16, 24), "patch": (3, 8, 8), "temporal_depth": 1} | changes)
    )


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("position", ["learned", "space-time"])
@pytest.mark.parametrize("inflate", ["central", "average"])
def test_one_slot_clips_match_the_image_model(arrangement, position, inflate):
    """Central inflation on any clip, average inflation on a constant clip."""
    image, source = make_weights_source(transformer_config(**SMALL_CONFIG, image=(16, 24), patch=(8, 8), registers=1))
    model = build_model(
        clip_config(3, arrangement=arrangement, positions={"kind": position}, inflate=inflate, registers=1)
    )
    report = load_pretrained_weights(model, source)
    assert f"patches 8 -> 3x8x8 ({inflate} inflation)" in report.text()
    assert all(name.startswith(("position.time", "temporal.")) or ".time." in name for name in report.initialised)
    x = torch.randn(2, 3, 3, 16, 24)
    x = x if inflate == "central" else x[:, :, :1].expand(-1, -1, 3, -1, -1)
    with torch.inference_mode():
        assert peers.compute_difference(model.eval()(x), image(x[:, :, 1])) <= 1e-5
        assert peers.compute_difference(model.features(x), image.features(x[:, :, 1])) <= 1e-5


@pytest.mark.parametrize("arrangement", ["factorised-encoder", "factorised-attention"])
def test_untrained_longer_clips_match_the_mean_of_their_frames(arrangement):
    image, source = make_weights_source(
        transformer_config(**SMALL_CONFIG, image=(16, 24), patch=(8, 8), positions={"kind": "sincos"})
    )
    model = build_model(clip_config(12, arrangement=arrangement))
    load_pretrained_weights(model, source)
    x = torch.randn(2, 3, 12, 16, 24)
    with torch.inference_mode():
        frames = torch.stack([image(x[:, :, t]) for t in range(1, 12, 3)])
        assert peers.compute_difference(model.eval()(x), frames.mean(0)) <= 1e-5


@pytest.mark.parametrize("inflate", ["central", "average"])
def test_clip_tokens_match_the_tokens_of_the_frames(inflate):
    """Compare projection and positions only, for every slot, at another image size."""
    image, source = make_weights_source(
        transformer_config(**SMALL_CONFIG, **MEAN_POOLING, image=(24, 24), patch=(8, 8))
    )
    model = build_model(clip_config(6, **MEAN_POOLING, inflate=inflate))
    assert "positions resized 3 -> 2x2x3" in load_pretrained_weights(model, source).text()
    x = torch.randn(2, 3, 6, 16, 24)
    x = x if inflate == "central" else x[:, :, 1::3].repeat_interleave(3, 2)
    with torch.inference_mode():
        tokens = model.eval().add_positions(model.project(x)).unflatten(1, (2, -1))
        for slot in range(2):
            expected = image.add_positions(image.project(x[:, :, 3 * slot + 1]))
            assert peers.compute_difference(tokens[:, slot], expected) <= 1e-5


def test_volumes_start_from_image_weights():
    image, source = make_weights_source(transformer_config(**SMALL_CONFIG, image=(16, 24), patch=(8, 8)))
    model = build_model(transformer_config(**SMALL_CONFIG, image=(4, 16, 24), patch=(4, 8, 8)))
    assert not load_pretrained_weights(model, source).initialised
    x = torch.randn(2, 3, 4, 16, 24)
    with torch.inference_mode():
        assert peers.compute_difference(model.eval()(x), image(x[:, :, 2])) <= 1e-5
    with pytest.raises(WeightsError):
        load_pretrained_weights(build_model(source.config), make_weights_source(model.config)[1])


def test_key_biases_can_be_added_or_dropped_without_changing_outputs():
    config = clip_config(3, **MEAN_POOLING)
    for before, after in ((False, True), (True, False)):
        first, source = make_weights_source(
            VideoConfig().with_options(**vars(config)).with_options(attention={"key_bias": not before})
        )
        second = build_model(VideoConfig().with_options(**vars(config)).with_options(attention={"key_bias": not after}))
        load_pretrained_weights(second, source)
        x = torch.randn(2, 3, 3, 16, 24)
        with torch.inference_mode():
            assert peers.compute_difference(second.eval()(x), first(x)) <= 1e-5


def test_inflated_kernels_are_central_or_averaged():
    weight = torch.arange(2.0 * 3 * 4).view(2, 12)  # D = 2, C = 3, patches of 2 x 2
    central = inflate_kernel(weight, 3, (2, 2), 2).view(2, 3, 2, 4)
    assert torch.equal(central[:, :, 1], weight.view(2, 3, 4)) and not central[:, :, 0].any()
    average = inflate_kernel(weight, 3, (2, 2), 2, "average").view(2, 3, 2, 4)
    assert torch.equal(average, weight.view(2, 3, 1, 4).expand(-1, -1, 2, -1) / 2)
    with pytest.raises(ValueError, match="central or average"):
        inflate_kernel(weight, 3, (2, 2), 2, "first")
