"""Features shared by models of all families: image checks, the repr, and methods of timm and DINOv2."""

from __future__ import annotations

import pytest
import torch

import vitreous
from vitreous.errors import UsageError

IMAGE_SIZE = 32
SMALL_MODEL_NAMES = {"vit": "ViT-32x2/8", "swin": "Swin-32x2-2/2", "dit": "DiT-64x2/4"}


def create_small_model(name: str = "vit", **changes):
    return vitreous.create(SMALL_MODEL_NAMES[name], image_size=IMAGE_SIZE, num_classes=3, **changes).eval()


def test_invalid_images_are_rejected_with_a_fix():
    model, images = create_small_model(), torch.rand(2, 3, IMAGE_SIZE, IMAGE_SIZE)
    cases = [
        (images[0], ValueError, r"expected images (B, 3, 32, 32), got (3, 32, 32); add a batch axis: images[None]"),
        (images.movedim(1, -1), ValueError, "got (2, 32, 32, 3); put channels first: images.movedim(-1, 1)"),
        (images[0].movedim(0, -1), ValueError, "add a batch axis: images.movedim(-1, 0)[None]"),
        (images[:, :1], ValueError, "the model takes 3 channels, the images have 1"),
        (images[:, :1], ValueError, "vitreous.create(…, channels=1)"),
        (torch.rand(32, 32), ValueError, "got (32, 32); pass 4 axes"),
        ((images * 255).byte(), TypeError, "expected floats, got torch.uint8: scale to [0, 1] and normalise"),
        (images.double(), TypeError, "expected torch.float32, got torch.float64: use images.float()"),
        (images.numpy(), TypeError, "a torch.Tensor, got numpy.ndarray"),
        (images[..., :30], UsageError, "image size 32x30 is not divisible by patch size 8\n  use image_size=32"),
    ]
    for wrong, error, message in cases:
        with pytest.raises(error) as caught:
            model(wrong)
        assert message in str(caught.value)


@pytest.mark.parametrize("family", ["swin", "dit"])
def test_every_family_checks_images(family):
    model = create_small_model(family)
    more = (torch.rand(2),) if family == "dit" else ()
    with pytest.raises(ValueError, match="add a batch axis"):
        model(torch.rand(model.config.channels, IMAGE_SIZE, IMAGE_SIZE), *more)


def test_repr_is_a_short_summary():
    assert repr(create_small_model()).splitlines() == [
        "ViT-32x2/8 (ViT)",
        "  parameters: 32,323 (float32, cpu, evaluation mode)",
        "  input: images (B, 3, 32, 32), floats, normalised",
        "  blocks: 2, patches of 8 pixels",
        "  features: (B, 32)",
        "  classes: 3",
    ]
    for name in ("ViT-B/16", "Swin-T/4", "BiT-R50x1", "DiT-S/4"):
        with torch.device("meta"):
            assert len(repr(vitreous.create(name)).splitlines()) <= 10


def test_attributes_of_other_libraries_suggest_the_vitreous_equivalent(tmp_path):
    model = create_small_model()
    for name, ours in {
        "default_cfg": "vitreous.load(RUN).card.preprocess",
        "pretrained_cfg": "vitreous.load(RUN).card.preprocess",
        "save_pretrained": "vitreous.save(model, FOLDER)",
        "feature_info": "model.config.levels",
    }.items():
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match=f"ViT has no {name}") as caught:
            getattr(model, name)
        assert ours in str(caught.value)
    with pytest.raises(AttributeError, match=r"use vitreous\.create\(weights='hf:ORG/NAME'\)"):
        type(model).from_pretrained("google/vit-base-patch16-224")
    with pytest.raises(TypeError, match=r"takes images, not pixel_values: model\(images\) returns the logits"):
        model(pixel_values=torch.rand(1, 3, IMAGE_SIZE, IMAGE_SIZE))
    with pytest.raises(AttributeError, match=r"use vitreous\.create\(NAME\)"):
        vitreous.create_model("ViT-B/16")
    with pytest.raises(UsageError, match=r"no option features_only\n  use model\.features_at"):
        vitreous.create("ViT-B/16", features_only=True)


def test_mixin_from_pretrained_is_not_overridden():
    class Mixin:
        @classmethod
        def from_pretrained(cls, name, revision=None):
            return cls, name, revision

    class Mixed(vitreous.ViT, Mixin):
        pass

    assert Mixed.from_pretrained("a", revision="b") == (Mixed, "a", "b")


@pytest.fixture(scope="module")
def timm_pair(tmp_path_factory):
    """A timm ViT with perturbed weights, and our model with the same weights."""
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(0)
    sizes = {"img_size": IMAGE_SIZE, "patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 1}
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=5, **sizes).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    file = tmp_path_factory.mktemp("timm") / "model.safetensors"
    save_file(theirs.state_dict(), file)
    return theirs, vitreous.create(weights=file, image_size=IMAGE_SIZE).eval()


def test_features_match_timm(timm_pair):
    theirs, ours = timm_pair
    images = torch.randn(2, 3, IMAGE_SIZE, IMAGE_SIZE)
    tokens = ours.forward_features(images)
    torch.testing.assert_close(tokens, theirs.forward_features(images), atol=1e-5, rtol=1e-4)
    # the forward pass computes less of the last block
    torch.testing.assert_close(ours.forward_head(tokens), ours(images))
    torch.testing.assert_close(ours.forward_head(tokens, pre_logits=True), theirs.forward_head(tokens, pre_logits=True))
    assert (ours.num_features, ours.num_classes) == (theirs.num_features, theirs.num_classes) == (64, 5)


@pytest.mark.parametrize("indices", [None, 2, [0, 2], [-1], [2, 0]])
@pytest.mark.parametrize("options", [{}, {"norm": True}, {"output_fmt": "NLC"}, {"intermediates_only": True}])
def test_intermediates_match_timm(timm_pair, indices, options):
    images = torch.randn(2, 3, IMAGE_SIZE, IMAGE_SIZE)
    expected, result = (model.forward_intermediates(images, indices, **options) for model in timm_pair)
    if not options.get("intermediates_only"):
        torch.testing.assert_close(result[0], expected[0], atol=1e-5, rtol=1e-4)
        expected, result = expected[1], result[1]
    if indices == [2, 0]:  # timm returns the order of the blocks, vitreous that of the indices
        expected = expected[::-1]
    assert [x.shape for x in result] == [x.shape for x in expected]
    for features, expected_features in zip(result, expected, strict=True):
        torch.testing.assert_close(features, expected_features, atol=1e-5, rtol=1e-4)


def test_intermediate_layers_match_the_dinov2_api(timm_pair):
    _, ours = timm_pair
    images = torch.randn(2, 3, IMAGE_SIZE, IMAGE_SIZE)
    tokens = ours.features(images)
    (last,) = ours.get_intermediate_layers(images)
    assert torch.equal(last, tokens[:, 1:]) and last.shape == (2, 16, 64)
    two = ours.get_intermediate_layers(images, n=2, reshape=True, return_class_token=True)
    assert [(x.shape, token.shape) for x, token in two] == [((2, 64, 4, 4), (2, 64))] * 2
    assert torch.equal(two[1][1], tokens[:, 0])
    with pytest.raises(ValueError, match="has no class token"):
        create_small_model("swin").get_intermediate_layers(
            torch.rand(1, 3, IMAGE_SIZE, IMAGE_SIZE), return_class_token=True
        )


def test_staged_models_return_one_map_per_stage():
    model, images = create_small_model("swin"), torch.rand(1, 3, IMAGE_SIZE, IMAGE_SIZE)
    features, maps = model.forward_intermediates(images, norm=True)
    assert [tuple(x.shape) for x in maps] == [(1, 32, 16, 16), (1, 64, 8, 8)]
    assert torch.equal(maps[-1].flatten(2).mT, features)


def test_invalid_block_indices_are_rejected():
    model, images = create_small_model(), torch.rand(1, 3, IMAGE_SIZE, IMAGE_SIZE)
    with pytest.raises(ValueError, match="there is no block 2: use -2 to 1"):
        model.forward_intermediates(images, [2])
    with pytest.raises(ValueError, match="cannot take the last 3 of 2 blocks: use 1 to 2"):
        model.get_intermediate_layers(images, 3)
    with pytest.raises(ValueError, match="output_fmt must be 'NCHW' or 'NLC', got 'NHWC'"):
        model.forward_intermediates(images, output_fmt="NHWC")


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_reset_classifier_replaces_the_head(name):
    model, images = create_small_model(name), torch.rand(1, 3, IMAGE_SIZE, IMAGE_SIZE)
    pooled = model.pool(model.features(images))
    model.reset_classifier(7)
    assert torch.equal(model(images), torch.zeros(1, 7)) and model.config.classes == model.num_classes == 7
    model.reset_classifier(0)
    torch.testing.assert_close(model(images), pooled)
    with pytest.raises(UsageError, match="does not classify images"):
        create_small_model("dit").reset_classifier(3)


def test_gradient_checkpointing_does_not_change_gradients():
    model, images = create_small_model().train(), torch.rand(2, 3, IMAGE_SIZE, IMAGE_SIZE)
    torch.nn.init.normal_(model.head.weight)
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(images).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        assert model.encoder.recompute is enable
    assert all(map(torch.equal, *gradients))


def test_patch_size_can_be_combined_with_image_size():
    config = vitreous.create("ViT-32x2/8", image_size=30, patch_size=6).config
    assert (config.image, config.patch, config.grid) == ((30, 30), (6, 6), (5, 5))
