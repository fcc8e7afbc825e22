"""The paper's other models and ViT variants: exact parameter counts, names and costs."""

import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitreous.errors import UsageError
from vitreous.models.config import (
    AttentionConfig,
    BiTConfig,
    ConvStemConfig,
    DiTConfig,
    ImageTextConfig,
    StemConfig,
    SwinConfig,
    ViTConfig,
    transformer_config,
)
from vitreous.models.names import MODEL_NAMES, config_from_name, vit_config_from_name
from vitreous.models.vit import ViT
from vitreous.models.zoo import build_model, build_without_init, create_untrained_model

#: published parameter counts (official modules, or the formula of each paper's code), with 1000 classes unless the name
#: implies none
PARAMETER_COUNTS = {
    "R+ViT-Ti/16": 6_337_704,
    "R26+ViT-S/32": 36_431_912,
    "R26+ViT-B/32": 101_383_976,
    "R50+ViT-B/16": 98_659_112,
    "R50+ViT-B/32": 110_945_832,
    "R50+ViT-L/16": 316_483_624,
    "R50+ViT-L/32": 328_994_856,
    "DeiT-Ti/16-distilled": 5_910_800,
    "DeiT-S/16-distilled": 22_436_432,
    "DeiT-B/16-distilled": 87_338_192,
    "DeiT-III-S/16": 22_059_496,
    "DeiT-III-M/16": 38_849_512,
    "DeiT-III-B/16": 86_585_320,
    "DeiT-III-L/16": 304_374_760,
    "DeiT-III-H/14": 632_126_440,
    # the official files contain one more vector, the mask token
    "DINOv2-S/14": 22_056_576 - 384,
    "DINOv2-S/14-registers": 22_058_112 - 384,
    "DINOv2-B/14": 86_580_480 - 768,
    "DINOv2-L/14-registers": 304_372_736 - 1024,
    "DINOv2-g/14": 1_136_480_768 - 1536,
    "DINOv2-g/14-registers": 1_136_486_912 - 1536,
    "CLIP-B/32": 87_849_216,
    "CLIP-B/16": 86_192_640,
    "CLIP-L/14": 303_966_208,
    "SAM-B/16": 89_670_912,
    "SAM-L/16": 308_278_272,
    "SAM-H/16": 637_026_048,
    "ViT-G/14": 1_844_440_680,
}


def count_parameters(config):
    return sum(p.numel() for p in build_without_init(config).parameters())


@pytest.mark.parametrize("name", PARAMETER_COUNTS)
def test_parameter_counts_are_exact(name):
    assert count_parameters(config_from_name(name)) == PARAMETER_COUNTS[name]


def test_parameter_counts_at_other_sizes_and_heads():
    assert count_parameters(config_from_name("DeiT-B/16-distilled", 384)) == 87_630_032
    assert count_parameters(config_from_name("CLIP-L/14", 336)) == 304_293_888
    fixed = {"positions": {"kind": "sincos-big-vision"}, "pool": "mean", "class_token": False, "depth": 12}
    assert (
        sum(p.numel() for p in create_untrained_model("S/16", **fixed).parameters()) == 21_974_632
    )  # arXiv:2205.01580
    assert (
        sum(p.numel() for p in create_untrained_model("S/16", head={"representation": 384}, **fixed).parameters())
        == 22_122_472
    )


MODEL_NAME_ALIASES = {
    "dinov2_vitb14": "DINOv2-B/14",
    "dinov2_vits14_reg": "DINOv2-S/14-registers",
    "vit_giant_patch14_reg4_dinov2.lvd142m": "DINOv2-g/14-registers",
    "deit_base_distilled_patch16_384": "DeiT-B/16-distilled",
    "deit_tiny_patch16_224": "ViT-Ti/16",
    "deit3_small_patch16_224": "DeiT-III-S/16",
    "facebook/vit-mae-large": "ViT-L/16",
    "mae_vit_huge_patch14": "ViT-H/14",
    "openai/clip-vit-large-patch14": "CLIP-L/14",
    "vit_base_patch32_clip_224.openai": "CLIP-B/32",
    "facebook/sam-vit-huge": "SAM-H/16",
    "samvit_large_patch16.sa1b": "SAM-L/16",
    "vit_base_r50_s16_224": "R50+ViT-B/16",
    "vit_tiny_r_s16_p8_224": "R+ViT-Ti/16",
    "R50x1+ViT-B/16": "R50+ViT-B/16",
    "r26_s_32": "R26+ViT-S/32",
    "r50x2+b/16": "R50x2+ViT-B/16",
    "R101x1+ViT-L/32": "R101x1+ViT-L/32",
    "resnetv2_152x2_bit": "BiT-R152x2",
    "google/bit-50": "BiT-R50x1",
    "R101x3": "BiT-R101x3",
    "google/vit-large-patch32-384": "ViT-L/32",
    "vit_base_patch16_224.augreg_in21k": "ViT-B/16",
    "google/vit-base-patch16-224-in21k": "ViT-B/16",
    "conv+vit-s/16": "Conv+ViT-S/16",
    "Conv+Ti/8": "Conv+ViT-Ti/8",
    "conv+128x4/8": "Conv+ViT-128x4/8",
    "conv32-64-128-128+vit-128x4/8": "Conv+ViT-128x4/8",
    "Conv16-32-64+ViT-S/16": "Conv16-32-64+ViT-S/16",
    "conv16-32x1-64x2+s/16": "Conv16-32x1-64x2+ViT-S/16",
    "Conv16-32-64x0+ViT-S/16": "Conv16-32-64x0+ViT-S/16",
    "Conv16-32x1-64x0+ViT-S/16": "Conv16-32x1-64+ViT-S/16",
    "axial-vit-b/32": "Axial-ViT-B/32",
    "Axial-ViT-64x2/4": "Axial-ViT-64x2/4",
    "axialresnet-50": "AxialResNet-50",
    "ViT-G/14": "ViT-G/14",
    "so400m/14": "ViT-So400m/14",
}


@pytest.mark.parametrize("spelling", MODEL_NAME_ALIASES)
def test_names_of_other_libraries_are_recognised(spelling):
    assert config_from_name(spelling).name() == MODEL_NAME_ALIASES[spelling]


@pytest.mark.parametrize("wrong", ["R50+ViT-Q/16", "BiT-R51x1", "DINOv2-X/14", "SAM-B/17", "vit_base_patch16_siglip"])
def test_unknown_names_are_rejected(wrong):
    with pytest.raises(UsageError, match="unknown model"):
        config_from_name(wrong)
    with pytest.raises(UsageError, match="is not a ViT"):
        vit_config_from_name("BiT-R50x1")


def test_names_need_no_pytorch():
    code = (
        "import sys; from vitreous.models.names import config_from_name; config_from_name('R50+ViT-B/16'); sys.exit('torch' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"axial": True}, "without prefix tokens"),
        (
            {"axial": True, "class_token": False, "pool": "mean", "attention": {"kind": "rotary"}},
            "attention.kind=plain",
        ),
        (
            {"attention": {"window": 7, "kind": "rotary"}, "positions": {"kind": "none"}},
            "windows require attention.kind=plain",
        ),
        ({"attention": {"window": 7, "global_blocks": (2, 12)}}, "blocks from 0 to 11"),
        ({"neck": 8, "class_token": False, "pool": "mean"}, "attention.kind=decomposed"),
        ({"positions": {"at": "each", "kind": "none"}}, "require positions"),
        ({"pool": "distilled", "class_token": False}, "requires a class token"),
        ({"attention": {"inner_norm": True}}, "only for rotary attention"),
        ({"stem": StemConfig((3, 4, 9)), "patch": (8, 8)}, "not divisible by the stem's stride 16"),
        (
            {"stem": ConvStemConfig(widths=(8, 16, 32), blocks=(0, 0, 0)), "patch": (14, 14)},
            "not divisible by the stem's stride 4",
        ),
    ],
)
def test_invalid_configs_are_rejected(changes, message):
    with pytest.raises(UsageError, match=message):
        transformer_config(**changes)


def test_model_and_config_classes_must_match():
    with pytest.raises(UsageError, match=r"attention\.kind=decomposed is not supported by ViTConfig"):
        ViTConfig(attention=AttentionConfig(kind="decomposed"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'stem'"):
        ViTConfig(stem=StemConfig())  # type: ignore[call-arg]
    clip = transformer_config(width=32, depth=1, heads=2, first_norm=True, mlp={"hidden": 64})
    with pytest.raises(TypeError, match=r"CLIPConfig is the config of CLIP, not of ViT: use build_model\(config\)"):
        ViT(clip)
    assert type(build_model(clip)).__name__ == "CLIP" and type(ViT(clip.with_options(first_norm=False))) is ViT


def test_options_determine_the_model_family():
    plain = ViTConfig(class_token=False, pool="mean")
    hybrid = plain.with_options(stem=ConvStemConfig())
    assert hybrid.family == hybrid.with_options(depth=3).family == "hybrid" and hybrid.with_options(stem=None) == plain
    assert (
        plain.with_options(attention={"kind": "decomposed", "window": 7}).with_options(
            attention={"kind": "plain", "window": 0}
        )
        == plain
    )
    with pytest.raises(UsageError, match="no model family has all options stem and axial"):
        hybrid.with_options(axial=True)
    with pytest.raises(UsageError, match="unknown family vitt\n  did you mean vit"):
        transformer_config(family="vitt")


@pytest.mark.parametrize("widths,blocks", [((), ()), ((8, 16), (1,)), ((8, 0), (0, 0)), ((8, 16), (0, -1))])
def test_invalid_convolutional_stages_are_rejected(widths, blocks):
    with pytest.raises(UsageError, match="do not define convolutional stages"):
        ConvStemConfig(widths=widths, blocks=blocks)


def count_macs_by_hooks(config):
    """Multiply-adds counted by hooks from tensor shapes: linear layers, convolutions, attention products."""
    model, total = build_without_init(config), 0

    def linear(module, inputs, output):
        nonlocal total
        total += inputs[0].numel() * module.out_features

    def convolution(module, inputs, output):
        nonlocal total
        weight = module.weight
        total += output.numel() * weight.shape[1] * weight.shape[2] * weight.shape[3]

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(linear)
        elif hasattr(module, "weight") and module.weight is not None and module.weight.ndim == 4:
            module.register_forward_hook(convolution)
    products = []
    original = torch.nn.functional.scaled_dot_product_attention

    def attention(q, k, v, **rest):
        products.append(2 * q.numel() * k.shape[-2])
        return original(q, k, v, **rest)

    torch.nn.functional.scaled_dot_product_attention = attention
    try:
        model.eval()
        images = torch.empty(1, config.channels, *config.image, device="meta")
        model.classify(model.pool(model.features(images)))
    finally:
        torch.nn.functional.scaled_dot_product_attention = original
    return total + sum(products)


MODELS_WITH_MACS = [
    "ViT-S/16",
    "R26+ViT-S/32",
    "R+ViT-Ti/16",
    "Conv+ViT-Ti/16",
    "DeiT-Ti/16-distilled",
    "CLIP-B/32",
    "Axial-ViT-B/32",
    "DINOv2-S/14-registers",
]


@pytest.mark.parametrize("name", MODELS_WITH_MACS)
def test_macs_match_hook_counts(name):
    config = config_from_name(name, 224)
    assert config.macs() == count_macs_by_hooks(config)


@pytest.mark.parametrize(
    "name", ["ViT-S/16", "DeiT-Ti/16-distilled", "DINOv2-g/14", "ViT-Ti/16-rotary", "ViT-Ti/16-relative", "DINOv3-S/16"]
)
def test_computed_macs_exclude_unread_tokens(name):
    """Compared with PyTorch's operation count, two operations per multiply-add."""
    base, _, attention = name.rpartition("-")
    config = (
        vit_config_from_name(base).with_options(attention={"kind": attention})
        if attention in ("rotary", "relative")
        else vit_config_from_name(name)
    )
    with torch.device("meta"):
        model, images = build_model(config), torch.empty(1, 3, *config.image)
    flops = []
    for work in (model, lambda images: model.classify(model.pool(model.features(images)))):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            work(images)
        flops.append(counter.get_total_flops())
    assert flops[1] - flops[0] == 2 * (config.macs() - config.computed_macs()) > 0


def test_computed_macs_of_attention_pooling_match_the_operation_count():
    config = config_from_name("SigLIP-B/16", 224)
    with torch.device("meta"):
        model, images = build_model(config), torch.empty(1, 3, *config.image)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(images)
    assert counter.get_total_flops() == 2 * config.computed_macs() < 2 * config.macs()


def test_conv_stem_names_contain_unit_counts():
    assert [config_from_name(f"Conv8-16-12{end}+ViT-24x2/4", 32).stem.blocks for end in ("", "x0", "x3")] == [
        (0, 0, 1), (0, 0, 0), (0, 0, 3),
    ]  # fmt: skip
    assert config_from_name("Conv8x2-16-12x1+ViT-24x2/4", 32).stem == ConvStemConfig(
        widths=(8, 16, 12), blocks=(2, 0, 1)
    )


def test_conv_stem_macs_match_hook_counts():
    stem = ConvStemConfig(widths=(8, 16, 12), blocks=(2, 0, 1))
    config = transformer_config(
        image=(32, 48), patch=(8, 4), channels=2, width=24, depth=2, heads=3, stem=stem, mlp={"hidden": 48}
    )
    assert config.macs() == count_macs_by_hooks(config)


def test_window_macs_include_padding_and_position_tables():
    """Constant columns that a block appends to queries, keys and values to compute sums are not counted."""
    config = vit_config_from_name("SAM-B/16")
    tables = longer = 0
    for index in range(12):
        tokens, side = (64 * 64, 64) if index in config.attention.global_blocks else (70 * 70, 14)
        tables += tokens * 2 * side * 768
        longer += 2 * tokens * side**2 * 2 * side * 12
    assert config.macs() == count_macs_by_hooks(config) + tables - longer


@pytest.mark.parametrize(
    "changes", [{}, {"pool": "mean"}, {"mlp": {"hidden": 96}}, {"mlp": {"kind": "swiglu"}}, {"registers": 3}]
)
def test_activation_count_matches_tensors_saved_by_autograd(changes):
    """Compared with tensors saved for the backward pass, each storage once, without weights: within 10 %."""
    config = transformer_config(
        **{"image": (64, 64), "patch": (4, 4), "width": 64, "depth": 3, "heads": 4, "mlp": {"hidden": 256}, **changes}
    )
    model = build_model(config)
    parameter_pointers = {p.untyped_storage().data_ptr() for p in model.parameters()}
    tokens = model.add_positions(model.project(torch.randn(2, 3, 64, 64)))
    saved_bytes: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameter_pointers:
            saved_bytes[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.encode(tokens, all_tokens=False)
    assert sum(saved_bytes.values()) / 2 == pytest.approx(config.count_activations(device="cpu"), rel=0.1)
    assert output.requires_grad


def test_the_model_list_covers_the_paper():
    named = {"ViT-L/16", "ViT-H/14", "R50+ViT-L/32", "BiT-R152x4", "Axial-ViT-B/16", "AxialResNet-50"}
    assert named <= set(MODEL_NAMES)
    assert all(
        isinstance(config_from_name(name), ViTConfig | BiTConfig | SwinConfig | DiTConfig | ImageTextConfig)
        for name in MODEL_NAMES
    )


def test_classes_option_suggests_num_classes():
    with pytest.raises(UsageError, match="a ViT has no option classes") as caught:
        create_untrained_model("ViT-32x2/8", 32, classes=3)
    assert "num_classes" in caught.value.hint
