"""Image encoders with text encoders: parameter counts, names, the contract of image models, text pooling, logits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests import contracts
from tests.nn.test_frozen import assert_fast_paths_match
from vitreous.config import from_builtins, to_builtins
from vitreous.errors import UsageError
from vitreous.models.configs.image_text import ImageTextConfig
from vitreous.models.configs.text import TextConfig
from vitreous.models.image_text import ImageTextModel
from vitreous.models.names import config_from_name
from vitreous.models.text import TextEncoder
from vitreous.models.zoo import build_model, build_without_init
from vitreous.nn.frozen import freeze_for_inference

#: of OpenAI's CLIP, big_vision's models, open_clip's EVA-02-CLIP and the authors' PE-Core (open_clip's without the biases
#: of its heads), t and b included
PARAMETER_COUNTS = {
    ("CLIP-B/32-text", None): 151_277_313,
    ("CLIP-B/16-text", None): 149_620_737,
    ("CLIP-L/14-text", None): 427_616_513,
    ("SigLIP-B/16-text", None): 203_155_970,
    ("SigLIP-So400m/14-text", None): 877_960_498,
    ("SigLIP2-B/16-text", None): 375_187_970,
    ("SigLIP2-So400m/14-text", None): 1_136_008_498,
    ("SigLIP2-B/16-text", 256): 375_234_050,  # NaFlex
    ("EVA02-CLIP-B/16-text", None): 149_691_137,
    ("EVA02-CLIP-L/14-text", None): 427_755_457,
    ("PE-Core-Ti/16-text", None): 69_546_113 - 512,
    ("PE-Core-S/16-text", None): 87_188_225 - 512,
    ("PE-Core-B/16-text", None): 447_660_545 - 1024,
    ("PE-Core-L/14-text", None): 671_138_817 - 1024,
    ("PE-Core-G/14-text", None): 2_419_267_841 - 1280,
    ("SigLIP-B/16", None): 92_884_224,
    ("SigLIP-L/16", None): 315_956_224,
    ("SigLIP-So400m/14", None): 428_225_600,
    ("SigLIP-So400m/16", None): 427_888_064,
    ("SigLIP-gopt/16", 384): 1_163_659_776,
    ("SigLIP-B/16", 256): 92_930_304,
}
SMALL_IMAGE = {"image": (16, 16), "patch": (4, 4), "width": 24, "depth": 2, "heads": 3, "mlp": {"hidden": 48}}
SMALL_TEXT = {"vocabulary": 30, "length": 9, "width": 20, "depth": 2, "heads": 2, "hidden": 40, "end_id": 29}
CONFIGS = {
    "CLIP": config_from_name("CLIP-B/32-text").with_options(
        backbone=SMALL_IMAGE | {"classes": 12}, text=SMALL_TEXT | {"embedding": 12}
    ),
    "SigLIP": config_from_name("SigLIP-B/16-text").with_options(
        backbone=SMALL_IMAGE, text=SMALL_TEXT | {"embedding": 24, "end_id": 1}
    ),
}


def build_random_model(name: str, **changes) -> ImageTextModel:
    torch.manual_seed(0)
    model = build_model(CONFIGS[name].with_options(**changes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def draw_tokens(count: int = 4, length: int = 9) -> torch.Tensor:
    return torch.randint(2, 29, (count, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("name", "size"), PARAMETER_COUNTS)
def test_parameter_counts_are_exact(name, size):
    model = build_without_init(config_from_name(name, size))
    assert sum(p.numel() for p in model.parameters()) == PARAMETER_COUNTS[name, size]


@pytest.mark.parametrize("name", ImageTextConfig.preset_names)
def test_names_are_parsed_and_formatted(name):
    config = config_from_name(name)
    assert config.name() == name and config_from_name(name.lower()) == config
    assert from_builtins(ImageTextConfig, to_builtins(config)) == config
    assert config_from_name(name, 2 * config.image[0]).name() == name
    assert config.encoder.name() == name.removesuffix("-text").replace("SigLIP2", "SigLIP")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("promise", [p for p in contracts.ALL_CONTRACTS if p is not contracts.check_all_gradients])
def test_contract_as_a_model_of_images(name, promise):
    model = build_random_model(name)
    if promise is contracts.check_skipping_unused_tokens_is_exact:
        model = model.image  # the gradients of the text encoder are None
    promise(model, torch.randn(3, 3, 16, 16))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_the_formula_and_reach_every_parameter(name):
    model = build_random_model(name)
    images, tokens = torch.randn(3, 3, 16, 16), draw_tokens()
    x, y = model.embed_images(images), model.embed_texts(tokens)
    assert torch.allclose(x.norm(dim=1), torch.ones(3)) and torch.allclose(y.norm(dim=1), torch.ones(4))
    bias = 0.0 if model.logit_bias is None else model.logit_bias.item()
    expected = torch.tensor(
        [[math.exp(model.log_scale.item()) * float(a @ b) + bias for b in y.detach()] for a in x.detach()]
    )
    logits = model.compute_logits(x, y)
    assert torch.allclose(logits, expected, atol=1e-5)
    logits.sin().sum().backward()
    unused = {"text.embedding.weight"}  # tokens that do not occur
    assert not [n for n, p in model.named_parameters() if n not in unused and (p.grad is None or not p.grad.any())]


def test_initial_temperature_and_bias():
    clip, siglip = (ImageTextModel(config) for config in CONFIGS.values())
    assert clip.log_scale.item() == pytest.approx(math.log(1 / 0.07)) and clip.logit_bias is None
    assert siglip.log_scale.item() == pytest.approx(math.log(10)) and siglip.logit_bias.item() == -10


@pytest.mark.parametrize("name", CONFIGS)
def test_images_of_many_sizes_equal_each_image_alone(name):
    model = build_random_model(name)
    model.any_size = True
    images = [torch.randn(3, 16, 16), torch.randn(3, 8, 20), torch.randn(3, 24, 4), torch.randn(3, 8, 20)]
    alone = torch.cat([model.embed_images(image[None]) for image in images])
    assert torch.allclose(model.embed_images(images), alone, atol=1e-5)


def test_causal_text_ends_at_its_largest_id():
    encoder = TextEncoder(CONFIGS["CLIP"].text).eval()
    tokens = torch.tensor([[5, 7, 29, 0, 0], [5, 7, 29, 29, 29], [5, 7, 29, 3, 4]])
    assert torch.allclose(encoder(tokens), encoder(tokens[:1, :3]).expand(3, -1), atol=1e-6)
    assert torch.equal(encoder.pool(encoder.encode(tokens), tokens), encoder.encode(tokens)[:, 2])


def test_bidirectional_text_depends_on_its_padding():
    encoder = TextEncoder(CONFIGS["SigLIP"].text).eval()
    tokens = draw_tokens(2)
    padded = torch.cat([tokens[:, :5], torch.ones(2, 4, dtype=torch.int64)], 1)
    assert not torch.allclose(encoder(padded), encoder(torch.cat([padded[:, :8], padded[:, :1]], 1)))
    with pytest.raises(ValueError, match="exactly 9 tokens per text, got 5"):
        encoder(tokens[:, :5])


def test_mean_over_tokens_without_padding():
    encoder = TextEncoder(TextConfig(**SMALL_TEXT, pool="mean", projection=False, embedding=20)).eval()
    tokens = torch.tensor([[5, 7, 29, 0, 0]])
    assert torch.allclose(encoder(tokens), encoder.encode(tokens)[:, :3].mean(1), atol=1e-6)


@pytest.mark.parametrize("tokens", [torch.zeros(3, 10, dtype=torch.int64), torch.zeros(3), torch.zeros(1, 2, 3).long()])
def test_tokens_of_another_shape_are_rejected(tokens):
    with pytest.raises(ValueError, match=r"expected at most 9 tokens|expected token ids \(B, N\)"):
        TextEncoder(CONFIGS["CLIP"].text)(tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": {"embedding": 10}}, "the image encoder outputs 12 channels, but the text encoder 10"),
        ({"text": {"heads": 3}}, "text.width 20 is not divisible by 3 heads"),
        ({"text": {"depth": 0}}, "at least 1"),
        ({"text": {"projection": False}}, "without a projection"),
        ({"text": {"pad_id": 30}}, "must be ids of a vocabulary of 30"),
    ],
)
def test_configs_that_do_not_fit_are_rejected(changes, message):
    with pytest.raises(UsageError, match=message):
        CONFIGS["CLIP"].with_options(**changes)


def test_layers_of_both_encoders_end_at_the_same_index():
    config = CONFIGS["CLIP"].with_options(text={"depth": 3})
    names = {
        "backbone.projection.weight": 0,
        "backbone.encoder.blocks.1.attention.norm.weight": 2,
        "backbone.head.weight": 3,
        "text.embedding.weight": 0,
        "text.positions": 0,
        "text.encoder.blocks.0.attention.norm.weight": 1,
        "text.encoder.blocks.2.attention.norm.weight": 2,
        "text.projection.weight": 3,
        "log_scale": 3,
    }
    assert {name: config.parameter_layer(name) for name in names} == names


def test_embeddings_are_those_of_the_formula():
    """The image embedding of CLIP is the projected class token, that of SigLIP the output of attention pooling."""
    images = torch.randn(2, 3, 16, 16)
    for name in CONFIGS:
        model = build_random_model(name)
        vit = model.image
        pooled = vit.pool(vit.features(images))
        expected = F.normalize(pooled @ vit.head.weight.T if name == "CLIP" else pooled)
        assert torch.allclose(model.embed_images(images), expected, atol=1e-5)


@torch.inference_mode()
def test_both_encoders_match_after_freezing_for_inference():
    model = build_random_model("CLIP")
    model.any_size = True
    assert_fast_paths_match(model, torch.randn(3, 3, 16, 16), torch.randn(2, 3, 8, 24))
    for model in map(build_random_model, CONFIGS):
        frozen, images, tokens = freeze_for_inference(model), torch.randn(2, 3, 16, 16), draw_tokens()
        assert torch.allclose(frozen.embed_texts(tokens), model.embed_texts(tokens), atol=1e-5)
        assert torch.allclose(frozen.embed_images(images), model.embed_images(images), atol=1e-5)
