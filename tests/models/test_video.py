"""Video models: every arrangement fulfils the model contract, and a clip of one time slot equals an image."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests import contracts
from tests.nn.test_frozen import assert_fast_paths_match
from vitreous.errors import UsageError
from vitreous.models.config import VideoConfig, transformer_config
from vitreous.models.configs.video import ARRANGEMENTS
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model, build_without_init, create_untrained_model
from vitreous.nn.position import SinusoidPosition, SpaceTimePosition

SMALL_OPTIONS = {"classes": 5, "width": 24, "depth": 2, "heads": 2, "mlp": {"hidden": 48}}
CLIP_OPTIONS = SMALL_OPTIONS | {"image": (6, 8, 12), "patch": (2, 4, 4), "temporal_depth": 1}
MEAN_POOL_OPTIONS = {"pool": "mean", "class_token": False}
MODEL_OPTIONS = {
    "joint": {},
    "joint, VideoMAE's": {
        **MEAN_POOL_OPTIONS,
        "norm": {"final": "pooled"},
        "positions": {"kind": "sinusoid"},
        "attention": {"key_bias": False},
    },
    "joint, rotary": {"attention": {"kind": "rotary"}, "positions": {"kind": "none"}},
    "joint, sines": {"positions": {"kind": "sincos"}},
    "encoder": {"arrangement": "factorised-encoder", "positions": {"kind": "space-time"}, "registers": 1},
    "encoder, mean": {"arrangement": "factorised-encoder", **MEAN_POOL_OPTIONS},
    "attention": {"arrangement": "factorised-attention", "positions": {"kind": "space-time"}},
    "attention, mean after norm": {
        "arrangement": "factorised-attention",
        **MEAN_POOL_OPTIONS,
        "norm": {"final": "pooled"},
    },
    "heads": {"arrangement": "factorised-dot-product"},
    "heads, mean of normed tokens": {
        "arrangement": "factorised-dot-product",
        "pool": "mean",
        "attention": {"key_bias": False},
    },
    "heads, attention pooling": {"arrangement": "factorised-dot-product", "pool": "attention"},
}
FACTORISED_ARRANGEMENTS = [name for name in ARRANGEMENTS if name != "joint"]


def build_random_video_model(changes, seed=0):
    torch.manual_seed(seed)
    return contracts.randomise(build_model(VideoConfig().with_options(**(CLIP_OPTIONS | changes)))).eval()


def make_clips(model, count=2, scale=(1, 1, 1)):
    size = (side * by for side, by in zip(model.config.image, scale, strict=True))
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODEL_OPTIONS)
def test_model_contract(name):
    for promise in contracts.ALL_CONTRACTS:
        model = build_random_video_model(MODEL_OPTIONS[name])
        promise(model, make_clips(model))
    model.any_size = True
    contracts.check_other_image_sizes(model, make_clips(model, 2, (2, 2, 2)), make_clips(model, 2, (3, 1, 2)))


@pytest.mark.processor
@pytest.mark.parametrize("name", MODEL_OPTIONS)
def test_frozen_models_match(name):
    model = build_random_video_model(MODEL_OPTIONS[name])
    model.any_size = True
    assert_fast_paths_match(model, make_clips(model), make_clips(model, 2, (1, 2, 1)))


def image_model(changes):
    torch.manual_seed(3)
    settings = SMALL_OPTIONS | {"image": (8, 12), "patch": (4, 4)} | changes
    return contracts.randomise(build_model(transformer_config(**settings))).eval()


def build_video_from_image_model(image, arrangement, frames, **changes):
    """The video model with the weights of an image model, and new weights for time; patches span one frame."""
    options = {name: getattr(image.config, name) for name in ("class_token", "pool", "norm", "registers")}
    model = build_model(
        VideoConfig().with_options(
            **SMALL_OPTIONS, image=(frames, 8, 12), patch=(1, 4, 4), arrangement=arrangement, **options, **changes
        )
    )
    state = model.state_dict()
    for name, tensor in image.state_dict().items():
        target = name if name in state else name.replace("position.table", "position.space.table")
        state[target] = tensor.expand(state[target].shape)
    model.load_state_dict(state)
    return model.eval()


POOLING_OPTIONS = {
    "class": {},
    "registers": {"registers": 2},
    "mean": MEAN_POOL_OPTIONS,
    "mean, norm after": {**MEAN_POOL_OPTIONS, "norm": {"final": "pooled"}},
    "attention": {"pool": "attention"},
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("pool", POOLING_OPTIONS)
def test_single_frame_clip_matches_the_image_model(arrangement, pool):
    image = image_model(POOLING_OPTIONS[pool])
    for position in ("learned", "space-time"):
        model, x = (
            build_video_from_image_model(image, arrangement, 1, positions={"kind": position}),
            torch.randn(2, 3, 8, 12),
        )
        torch.testing.assert_close(model(x[:, :, None]), image(x), rtol=0, atol=1e-5)
        torch.testing.assert_close(model.features(x[:, :, None]), image.features(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("arrangement", ["factorised-encoder", "factorised-attention"])
@pytest.mark.parametrize("pool", ["class", "registers", "mean"])
def test_initial_temporal_layers_average_frame_logits(arrangement, pool):
    """Before training, logits are the mean of the image model's logits of the frames."""
    image = image_model(POOLING_OPTIONS[pool])
    model, x = (
        build_video_from_image_model(image, arrangement, 3, positions={"kind": "space-time"}),
        torch.randn(2, 3, 3, 8, 12),
    )
    frames = torch.stack([image(x[:, :, t]) for t in range(3)], 1).mean(1)
    torch.testing.assert_close(model(x), frames, rtol=0, atol=1e-5)
    drawn = build_video_from_image_model(image, arrangement, 3, temporal_zero=False, positions={"kind": "space-time"})
    assert (drawn(x) - frames).abs().max() > 1e-2


@pytest.mark.parametrize("name", MODEL_OPTIONS)
def test_without_positions_frame_order_is_irrelevant(name):
    """A clip with reversed time slots gives the same output."""
    model = build_random_video_model(
        MODEL_OPTIONS[name] | {"positions": {"kind": "none"}, "attention": {"kind": "plain"}}
    )
    x = make_clips(model).unflatten(2, (3, 2))
    torch.testing.assert_close(model(x.flip(2).flatten(2, 3)), model(x.flatten(2, 3)), rtol=0, atol=1e-4)


def count_macs_by_operations(config, work):
    """Multiply-adds of a pass of a model of this config, by PyTorch's operation count."""
    with torch.device("meta"):
        model, x = build_model(config), torch.empty(1, 3, *config.image)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        work(model, x)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("name", [name for name in MODEL_OPTIONS if "attention pooling" not in name])
@pytest.mark.parametrize("frames", [2, 6])
def test_macs_match_the_operation_count(name, frames):
    config = VideoConfig().with_options(**(CLIP_OPTIONS | {"image": (frames, 8, 12)} | MODEL_OPTIONS[name]))
    counted = count_macs_by_operations(config, lambda model, x: model.classify(model.pool(model.features(x))))
    assert counted == config.macs()
    assert count_macs_by_operations(config, lambda model, x: model(x)) == config.computed_macs()


def test_parameter_counts_match_the_papers():
    """VideoMAE, fine-tuned and pre-trained (arXiv:2203.12602), exactly; ViViT-B's four models as rounded in Table 2 of
    arXiv:2103.15691."""
    counts = {"S": 22_033_936, "B": 86_534_800, "L": 304_270_736}
    for size, count in counts.items():
        config = replace(config_from_name(f"VideoMAE-{size}/16x2"), classes=400)
        assert sum(p.numel() for p in build_without_init(config).parameters()) == count
    encoder = config_from_name("VideoMAE-B/16x2").with_options(classes=0, norm={"final": "tokens"})
    assert sum(p.numel() for p in build_without_init(encoder).parameters()) == 86_227_200
    for name, millions in zip(ARRANGEMENTS, (88.9, 115.1, 117.3, 88.9), strict=True):
        config = replace(config_from_name(f"ViViT-B/16x2-{name}".removesuffix("-joint")), classes=400)
        count = sum(p.numel() for p in build_without_init(config).parameters())
        assert count / 1e6 == pytest.approx(millions, abs=0.1), name


@pytest.mark.parametrize(
    "name",
    ["ViViT-B/16x2", "ViViT-L/16x2-factorised-encoder", "ViViT-128x6/8x2", "ViViT-64x2/8x4x2", "VideoMAE-H/16x2"],
)
def test_model_names_round_trip(name):
    config = config_from_name(name.lower())
    assert isinstance(config, VideoConfig) and config.name() == name
    assert config_from_name(name, 64).image == (config.image[0], 64, 64)
    assert config_from_name(name, (8, 64, 48)).image == (8, 64, 48)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"image": (32, 32), "patch": (8, 8)}, "must have 3 axes"),
        ({"arrangement": "factorised-attention", "attention": {"kind": "rotary"}}, "requires attention.kind=plain"),
        ({"arrangement": "factorised-encoder", "temporal_depth": 0}, "temporal_depth of at least 1"),
        ({"arrangement": "factorised-dot-product", "heads": 3}, "heads must be even"),
        ({"attention": {"kind": "rotary"}, "heads": 6}, "even number of channels per head"),
        ({"attention": {"qkv_bias": False, "key_bias": False}}, "qkv_bias=True"),
    ],
)
def test_invalid_configs_are_rejected(changes, message):
    with pytest.raises(UsageError, match=message):
        VideoConfig().with_options(**(CLIP_OPTIONS | changes))
    with pytest.raises(UsageError, match="unknown model"):
        config_from_name("ViViT-B/16x0")


@pytest.mark.parametrize(
    ("image", "hint"),
    [
        ((7, 32, 32), "use --frames 8"),
        ((1, 32, 32), "use --frames 2"),
        ((8, 30, 30), "use --image-size 32"),
        ((7, 30, 30), "use --frames 8 and --image-size 32"),
    ],
)
def test_hints_of_indivisible_sizes_name_the_option_of_each_axis(image, hint):
    with pytest.raises(UsageError) as caught:
        config_from_name("ViViT-64x6/4x2").with_options(image=image)
    assert caught.value.hint == hint


def test_layer_indices_of_temporal_layers():
    config = config_from_name("ViViT-B/16x2-factorised-encoder")
    layers = {
        "position.time.table": 0,
        "encoder.blocks.3.attention.norm.weight": 4,
        "temporal.blocks.0.mlp.norm.bias": 13,
    }
    layers |= {"encoder.blocks.3.time.norm.weight": 4, "head.bias": 13}
    for name, layer in layers.items():
        assert config.parameter_layer(name) == layer


def test_space_time_and_sinusoid_positions():
    apart = SpaceTimePosition((2, 3, 4), 8)
    torch.nn.init.normal_(apart.time.table)
    table = apart.read((2, 3, 4))
    assert torch.equal(table[1, 2, 3], apart.time.table[1] + apart.space.table[2, 3])
    assert apart.read((4, 6, 5)).shape == (4, 6, 5, 8)
    line = SinusoidPosition(6).read((2, 3, 4)).flatten(0, 2)
    angles = [17 / 10000 ** (2 * i / 6) for i in range(3)]
    expected = [f(angle) for angle in angles for f in (math.sin, math.cos)]
    assert line[17].tolist() == pytest.approx(expected, abs=1e-6)


def test_arrangement_option_creates_a_video_model():
    model = create_untrained_model("ViT-32x1/4x8x8", (8, 16, 16), 3, arrangement="factorised-attention")
    assert isinstance(model.config, VideoConfig) and model(torch.zeros(1, 3, 8, 16, 16)).shape == (1, 3)
