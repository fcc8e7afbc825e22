"""Small models of other libraries with random parameters, as references for our features and logits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vitreous.models.zoo import Model
from vitreous.weights.adopt import open_weights

ERROR_LIMIT = 1e-5  # relative, both in float32
IMAGE_SIZE, OBLONG_SIZE = (32, 32), (48, 40)


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Randomise every parameter, norms and layer scales included, at a scale that keeps outputs near one."""
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=draw)
        if parameter.ndim > 1:
            parameter.data = noise * min(0.5, parameter[0].numel() ** -0.5)
        else:
            parameter.data = 0.2 * noise if name.endswith("bias") else 0.8 + 0.2 * noise
    return model.eval()


@dataclass
class Peer:
    """A reference model: its features and logits, input sizes, and settings that its file does not contain.

    `save` overrides how the model is saved; the default is a safetensors state dict.
    """

    model: nn.Module
    features: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor] | None = None
    sizes: tuple[tuple[int, int], ...] = (IMAGE_SIZE, OBLONG_SIZE)
    settings: dict[str, Any] = field(default_factory=dict)
    save: Callable[[Path], Path] | None = None

    def file(self, folder: Path) -> Path:
        """Save the model and return the file or folder."""
        if self.save:
            return self.save(folder)
        save_file(
            {name: tensor.contiguous() for name, tensor in self.model.state_dict().items()}, folder / "peer.safetensors"
        )
        return folder / "peer.safetensors"


def open_model(path: Path, settings: dict[str, Any] | None = None) -> Model:
    """Open a file or folder as our model."""
    return open_weights(path, settings).build_bundle().model


def make_images(size: tuple[int, int], count: int = 2, channels: int = 3) -> Tensor:
    """Return the same noise images (count, channels, height, width) in each call."""
    return torch.randn(count, channels, *size, generator=torch.Generator().manual_seed(size[0] * 1000 + size[1]))


@torch.inference_mode()
def compute_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference relative to the largest value; fail if `b` is constant or out of range."""
    assert a.shape == b.shape
    assert 0.05 < b.abs().max() < 100
    assert b.std() > 0.01
    return ((a - b).abs().max() / b.abs().max()).item()


@torch.inference_mode()
def check_agreement(ours: Model, peer: Peer, limit: float = ERROR_LIMIT) -> float:
    """Check features, and logits if the model has a head, at all sizes; return the largest difference."""
    max_difference = 0.0
    for size in peer.sizes:
        batch = make_images(size, channels=ours.config.channels).to(next(ours.parameters()).dtype)
        max_difference = max(max_difference, compute_difference(ours.features(batch), peer.features(batch)))
        if peer.logits:
            max_difference = max(max_difference, compute_difference(ours(batch), peer.logits(batch)))
    assert max_difference <= limit, max_difference
    return max_difference


def make_timm_peer(model: nn.Module, heads: int | None = 4, **options: Any) -> Peer:
    """Return the peer of a timm ViT or ResNet."""
    settings = options.pop("settings", {}) | ({"heads": heads} if heads else {})
    return Peer(randomise(model), model.forward_features, model, settings=settings, **options)  # type: ignore[arg-type]


def make_timm_vit(**options: Any) -> Peer:
    """Return a three-block ViT of timm."""
    from timm.models.vision_transformer import VisionTransformer

    outside = {key: options.pop(key) for key in ("settings", "sizes") if key in options}
    small: dict[str, Any] = {
        "img_size": IMAGE_SIZE,
        "patch_size": 8,
        "embed_dim": 48,
        "depth": 3,
        "num_heads": 4,
        "mlp_ratio": 2,
    }
    return make_timm_peer(
        VisionTransformer(**(small | {"num_classes": 7, "dynamic_img_size": True} | options)), **outside
    )


def make_timm_distilled() -> Peer:
    """Return a distilled DeiT of timm."""
    from timm.models.deit import VisionTransformerDistilled

    model = VisionTransformerDistilled(
        img_size=IMAGE_SIZE, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=7, dynamic_img_size=True
    )
    return make_timm_peer(model)


def make_timm_hybrid(
    blocks: tuple[int, ...], patch: int, image: tuple[int, int], oblong: tuple[int, int], **options: Any
) -> Peer:
    """Return a timm hybrid whose ResNet has half the width."""
    from timm.layers import HybridEmbed, StdConv2dSame
    from timm.models.resnetv2 import ResNetV2, create_resnetv2_stem
    from timm.models.vision_transformer import VisionTransformer

    conv = partial(StdConv2dSame, eps=1e-8)
    if blocks:
        channels = tuple(128 * 2**i for i in range(len(blocks)))
        resnet_options: dict[str, Any] = {
            "channels": channels,
            "stem_chs": 32,
            "stem_type": "same",
            "preact": False,
            "conv_layer": conv,
        }
        backbone = ResNetV2(blocks, num_classes=0, global_pool="", **resnet_options)
    else:
        backbone = create_resnetv2_stem(3, 32, stem_type="same", preact=False, conv_layer=conv)
    settings = options.pop("settings", {})
    small: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 7, "dynamic_img_size": True}
    model = VisionTransformer(
        img_size=image, patch_size=patch, embed_layer=partial(HybridEmbed, backbone=backbone), **(small | options)
    )  # type: ignore[arg-type]
    return make_timm_peer(model, sizes=(image, oblong), settings=settings)


def make_timm_bit(blocks: tuple[int, ...] = (2, 1, 1)) -> Peer:
    """Return a timm BiT of half the width."""
    from timm.layers import StdConv2d
    from timm.models.resnetv2 import ResNetV2

    channels = tuple(128 * 2**i for i in range(len(blocks)))
    conv = partial(StdConv2d, eps=1e-8)
    model = ResNetV2(blocks, channels, num_classes=7, stem_chs=32, stem_type="fixed", conv_layer=conv)  # type: ignore[arg-type]
    peer = make_timm_peer(model, heads=None, sizes=((64, 64), (96, 56)))
    peer.features = lambda x: model.forward_features(x).flatten(2).transpose(1, 2)
    return peer


def make_timm_sam(image: int = 64, window: int = 3, **options: Any) -> Peer:
    """Return SAM's image encoder from timm."""
    from timm.models.vision_transformer_sam import VisionTransformerSAM

    small: dict[str, Any] = {
        "patch_size": 8,
        "embed_dim": 48,
        "depth": 4,
        "num_heads": 4,
        "neck_chans": 24,
        "global_attn_indexes": (1, 3),
    }
    model = VisionTransformerSAM(
        img_size=image, window_size=window, use_rel_pos=True, num_classes=0, **(small | options)
    )
    peer = make_timm_peer(model, sizes=((image, image),))
    peer.features = lambda x: model.forward_features(x).flatten(2).transpose(1, 2)
    return peer


SMALL_CONFIG: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def make_transformers_peer(
    model: nn.Module, logits: bool, sizes: tuple[tuple[int, int], ...] = (IMAGE_SIZE, OBLONG_SIZE), **options: Any
) -> Peer:
    """Return the peer of a transformers model, saved as a folder; `options` are passed to its forward."""
    randomise(model)

    def save(folder: Path) -> Path:
        model.save_pretrained(folder / "peer")  # type: ignore[operator]
        return folder / "peer"

    def features(x: Tensor) -> Tensor:
        return getattr(model, getattr(model, "base_model_prefix", ""), model)(x, **options).last_hidden_state

    return Peer(model, features, (lambda x: model(x, **options).logits) if logits else None, sizes, save=save)


def make_transformers_vit(classes: int = 7, **options: Any) -> Peer:
    """Return a ViT of transformers, with a classifier or without a head."""
    import transformers

    config = transformers.ViTConfig(**(SMALL_CONFIG | {"intermediate_size": 96} | options), num_labels=max(1, classes))
    model = transformers.ViTForImageClassification(config) if classes else transformers.ViTModel(config)
    return make_transformers_peer(model, bool(classes), interpolate_pos_encoding=True)


def make_transformers_deit() -> Peer:
    """Return a transformers DeiT with a teacher head."""
    import transformers

    model = transformers.DeiTForImageClassificationWithTeacher(
        transformers.DeiTConfig(**SMALL_CONFIG, intermediate_size=96, num_labels=7)
    )
    return make_transformers_peer(model, True, interpolate_pos_encoding=True)


def make_transformers_mae() -> Peer:
    """Return the encoder of a transformers MAE, without masking and shuffling."""
    import transformers

    decoder = {
        "decoder_hidden_size": 32,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 32,
    }
    model = transformers.ViTMAEForPreTraining(
        transformers.ViTMAEConfig(**SMALL_CONFIG, **decoder, intermediate_size=96, mask_ratio=0.0)
    )
    peer = make_transformers_peer(model, False)

    def features(x: Tensor) -> Tensor:
        order = torch.arange(x.shape[2] * x.shape[3] // 64).expand(len(x), -1) / 1000
        return model.vit(x, noise=order, interpolate_pos_encoding=True).last_hidden_state

    peer.features = features
    return peer


def make_transformers_dinov2(registers: int = 0, swiglu: bool = False, **options: Any) -> Peer:
    """Return a DINOv2 of transformers."""
    import transformers

    values = SMALL_CONFIG | {"mlp_ratio": 4, "use_swiglu_ffn": swiglu} | options
    if registers:
        config = transformers.Dinov2WithRegistersConfig(**values, num_register_tokens=registers)
        return make_transformers_peer(transformers.Dinov2WithRegistersModel(config), False)
    return make_transformers_peer(transformers.Dinov2Model(transformers.Dinov2Config(**values)), False)


def make_transformers_clip(projected: bool = True, **options: Any) -> Peer:
    """Return CLIP's image encoder from transformers."""
    import transformers

    config = transformers.CLIPVisionConfig(**(SMALL_CONFIG | {"intermediate_size": 96, "projection_dim": 24} | options))
    model = (transformers.CLIPVisionModelWithProjection if projected else transformers.CLIPVisionModel)(config)
    peer = make_transformers_peer(model, False)
    peer.features = lambda x: model(x, interpolate_pos_encoding=True).last_hidden_state
    if projected:
        peer.logits = lambda x: model(x, interpolate_pos_encoding=True).image_embeds
    else:
        peer.logits = lambda x: model(x, interpolate_pos_encoding=True).pooler_output
    return peer


def make_transformers_sam(image: int = 64, window: int = 3, **options: Any) -> Peer:
    """Return SAM's image encoder from transformers."""
    import transformers

    values = SMALL_CONFIG | {
        "image_size": image,
        "window_size": window,
        "num_hidden_layers": 4,
        "global_attn_indexes": [1, 3],
        "mlp_dim": 96,
    }
    config = transformers.SamVisionConfig(**(values | {"output_channels": 24, "num_pos_feats": 12} | options))
    model = transformers.SamVisionModel(config)
    peer = make_transformers_peer(model, False, ((image, image),))
    peer.features = lambda x: model(x).last_hidden_state.flatten(2).transpose(1, 2)
    return peer


def make_transformers_bit(blocks: tuple[int, ...] = (2, 1, 1), classes: int = 7, **options: Any) -> Peer:
    """Return a BiT of transformers."""
    import transformers

    sizes = [128 * 2**i for i in range(len(blocks))]
    config = transformers.BitConfig(
        embedding_size=32, hidden_sizes=sizes, depths=list(blocks), num_labels=max(1, classes), **options
    )
    model = transformers.BitForImageClassification(config) if classes else transformers.BitModel(config)
    peer = make_transformers_peer(model, bool(classes), ((64, 64), (96, 56)))
    body = model.bit if classes else model
    peer.features = lambda x: body(x).last_hidden_state.flatten(2).transpose(1, 2)
    return peer


def make_torchvision_vit(representation: int | None = None, **options: Any) -> Peer:
    """Return a ViT of torchvision, which accepts only its native size."""
    from torchvision.models import VisionTransformer

    values: dict[str, Any] = {
        "image_size": 32,
        "patch_size": 8,
        "num_layers": 3,
        "num_heads": 4,
        "hidden_dim": 48,
        "mlp_dim": 96,
    }
    model = VisionTransformer(**(values | {"num_classes": 7} | options), representation_size=representation)

    def features(x: Tensor) -> Tensor:
        tokens = model._process_input(x)
        return model.encoder(torch.cat([model.class_token.expand(len(x), -1, -1), tokens], 1))

    size = (model.image_size, model.image_size)
    return Peer(randomise(model), features, model, (size,), {"heads": values["num_heads"]} if not options else {})


def rename_tensors(peer: Peer, *names: tuple[str, str], **changes: Any) -> Peer:
    """Return the same model, saved with renamed tensors.

    `names` are pairs (regular expression, replacement); `changes` are fields of the peer.
    """

    def save(folder: Path) -> Path:
        state = peer.model.state_dict()
        for old, new in names:
            state = {re.sub(old, new, name): tensor for name, tensor in state.items()}
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "peer.safetensors")
        return folder / "peer.safetensors"

    return replace(peer, save=save, **changes)
