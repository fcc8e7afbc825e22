"""Hugging Face transformers' models as they lie in a folder: ViT and its kin, DINOv2, CLIP's and SAM's image encoders,
BiT.

The names are those of the files, which `from_pretrained` reads and `save_pretrained` writes, whatever they are in
memory. The config.json beside them says what shapes do not: heads, GELU, epsilon.
"""

from __future__ import annotations

from typing import Any

from vitreous.errors import WeightsError
from vitreous.models.config import BiTConfig, ModelConfig, ViTConfig
from vitreous.weights.measure import Size, bit_config, vit_config
from vitreous.weights.table import COPY, Format, Row, Shapes, count, only, row, table
from vitreous.weights.tensor_transforms import BARE_TOKEN, CONVOLUTION, PREFIX, SEPARATE, positions
from vitreous.weights.timm import resnet_blocks

GELU = {
    "gelu": "none",
    "gelu_python": "none",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "quick_gelu": "quick",
}
ACTS = {"none": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu"}

WORDS = {
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden": "intermediate_size",
    "channels": "num_channels",
    "registers": "num_register_tokens",
}
#: what only one of transformers' BiTs has, the one that is read
BIT_SAID = {
    "layer_type": "preactivation",
    "global_padding": None,
    "num_groups": 32,
    "embedding_dynamic_padding": False,
    "hidden_act": "relu",
}


#: model_type of a config.json -> the title of the format that its tensors are in
FAMILIES = {
    "vit": "transformers' ViT, DeiT, ViTMAE or I-JEPA",
    "deit": "transformers' ViT, DeiT, ViTMAE or I-JEPA",
    "vit_mae": "transformers' ViT, DeiT, ViTMAE or I-JEPA",
    "vit_msn": "transformers' ViT, DeiT, ViTMAE or I-JEPA",
    "ijepa": "transformers' ViT, DeiT, ViTMAE or I-JEPA",
    "dinov2": "transformers' DINOv2",
    "dinov2_with_registers": "transformers' DINOv2",
    "clip": "transformers' CLIP image encoder",
    "clip_vision_model": "transformers' CLIP image encoder",
    "sam": "transformers' SAM image encoder",
    "sam_vision_model": "transformers' SAM image encoder",
    "bit": "transformers' BiT",
}


def check_family(config: dict[str, Any], title: str = "") -> None:
    """Raise WeightsError for a config.json of transformers whose `model_type` is not read, or not that of the format's
    `title`.

    Others share names of tensors and compute otherwise, so tensors alone do not tell.
    """
    family = config.get("model_type")
    # timm's and open_clip's have types of their own
    if family is None or "architecture" in config or "model_cfg" in config:
        return
    if not isinstance(family, str) or family not in FAMILIES:
        raise WeightsError(
            f"config.json says model_type {str(family)[:40]}, a family that is not read",
            f"read are {', '.join(FAMILIES)}",
        )
    if title and FAMILIES[family] != title:
        raise WeightsError(
            f"config.json says model_type {family}, and the tensors are those of {title}", "download both again"
        )


def said_by(config: dict[str, Any]) -> dict[str, Any]:
    """What a config.json says of a model, in our words. Raises WeightsError for what cannot be meant or is not known
    here."""
    if config.get("model_type") == "bit":
        for name, usual in BIT_SAID.items():
            if config.get(name, usual) != usual:
                raise WeightsError(
                    f"config.json says {name} {str(config[name])[:40]}: another ResNet than BiT, which is not read"
                )
        return {}
    said: dict[str, Any] = {
        ours: whole(theirs, config[theirs]) for ours, theirs in WORDS.items() if config.get(theirs) is not None
    }
    if config.get("layer_norm_eps") is not None:
        eps = said["eps"] = config["layer_norm_eps"]
        if not isinstance(eps, float) or not 0 < eps < 1:
            raise WeightsError(
                f"config.json says layer_norm_eps {str(eps)[:40]}, which is no small number", "download it again"
            )
    if config.get("hidden_act") is not None:
        if str(config["hidden_act"]) not in GELU:
            raise WeightsError(
                f"config.json says hidden_act {str(config['hidden_act'])[:40]}, which is not computed here"
            )
        said["gelu"] = GELU[str(config["hidden_act"])]
    if config.get("qkv_bias") is not None:
        said["qkv_bias"] = config["qkv_bias"]
        if not isinstance(said["qkv_bias"], bool):
            raise WeightsError(
                f"config.json says qkv_bias {str(config['qkv_bias'])[:40]}, which is neither true nor false",
                "download it again",
            )
    for ours, theirs in (("image", "image_size"), ("patch", "patch_size")):
        size = config.get(theirs)
        if size is not None:
            sides = size if isinstance(size, list) and len(size) == 2 else [size, size]
            said[ours] = tuple(whole(theirs, side) for side in sides)
    return said


def whole(name: str, value: Any) -> int:
    """A number of a config.json. Raises WeightsError where it is not a whole one from 0 to a million."""
    if type(value) is not int or not 0 <= value <= 1_000_000:
        raise WeightsError(f"config.json says {name} {str(value)[:40]}, which is no whole number", "download it again")
    return value


def blocks(ours: str, theirs: str, first: str, second: str, mlp: tuple[str, str]) -> tuple[Row, ...]:
    """Rows of a block with separate queries, keys and values: names of its two norms and of the MLP's layers."""
    attended = f"{theirs}.attention.attention"
    parts = ("query", "key", "value")
    return (
        row(f"{ours}.attention.part.qkv.{{x}}", " ".join(f"{attended}.{part}.{{x}}" for part in parts), SEPARATE),
        *table(
            f"{ours}.attention.norm.{{x}} = {theirs}.{first}.{{x}}",
            f"{ours}.attention.part.out.{{x}} = {theirs}.attention.output.dense.{{x}}",
            f"{ours}.attention.scale = {theirs}.layer_scale1.lambda1",
            f"{ours}.mlp.norm.{{x}} = {theirs}.{second}.{{x}}",
            f"{ours}.mlp.part.fc1.{{x}} = {theirs}.{mlp[0]}.{{x}}",
            f"{ours}.mlp.part.fc2.{{x}} = {theirs}.{mlp[1]}.{{x}}",
            f"{ours}.mlp.scale = {theirs}.layer_scale2.lambda1",
        ),
    )


PREFIXES = only(
    ("embeddings.cls_token", "embeddings.distillation_token", "embeddings.register_tokens"),
    lambda c: (c.class_token, c.pool == "distilled", c.registers > 0),
)
COMMON = (
    row("projection.weight", "embeddings.patch_embeddings.projection.weight", CONVOLUTION),
    row("projection.bias", "embeddings.patch_embeddings.projection.bias", COPY),
    row("prefix", PREFIXES, PREFIX),
    row("slots position.table", "embeddings.position_embeddings", positions((1,))),
    *table("encoder.norm.{x} = layernorm.{x}"),
)
LAYER, OURS = "encoder.layer.{i}", "encoder.blocks.{i}"
VIT_ROWS = (
    *COMMON,
    *blocks(OURS, LAYER, "layernorm_before", "layernorm_after", ("intermediate.dense", "output.dense")),
    *table(
        "head.{x} = classifier.{x}",
        "head.label.{x} = cls_classifier.{x}",
        "head.teacher.{x} = distillation_classifier.{x}",
    ),
    *table("representation.{x} = pooler.dense.{x}"),
)


def configure(shapes: Shapes, said: dict[str, Any]) -> ViTConfig:
    """The config of a ViT, DeiT, MAE encoder, I-JEPA (the one without a class token) or DINOv2."""
    width, channels, *patch = shapes["embeddings.patch_embeddings.projection.weight"]
    dino = "encoder.layer.0.layer_scale1.lambda1" in shapes
    gated = "encoder.layer.0.mlp.weights_in.weight" in shapes
    wide = "encoder.layer.0.mlp.fc1.weight" if dino else "encoder.layer.0.intermediate.dense.weight"
    hidden = shapes["encoder.layer.0.mlp.weights_out.weight"][1] if gated else shapes[wide][0]
    distilled = "embeddings.distillation_token" in shapes and "distillation_classifier.weight" in shapes
    registers = shapes["embeddings.register_tokens"][1] if "embeddings.register_tokens" in shapes else 0
    if "embeddings.distillation_token" in shapes and not distilled:
        said = said | {"pool": "distilled", "classes": 0}
    head = "cls_classifier.weight" if distilled else "classifier.weight"
    known = head in shapes and not dino  # DINOv2's classifier reads class token and mean side by side
    class_token = "embeddings.cls_token" in shapes
    fields = {
        "channels": channels,
        "classes": shapes[head][0] if known else 0,
        "class_token": class_token,
        "pool": "distilled" if distilled else "class" if class_token else "mean",
        "registers": registers,
        "layer_scale": 1.0 if dino else None,
        "mlp": "swiglu" if gated else "gelu",
        "eps": 1e-6 if dino else 1e-12,
        "resize": "bicubic-antialias" if registers else "bicubic",
        "representation": shapes["pooler.dense.weight"][0]
        if "pooler.dense.weight" in shapes and known and not distilled
        else None,
    }
    depth = count(shapes, f"{LAYER}.attention.output.dense.weight")
    size = Size(width, depth, hidden, tuple(patch), shapes["embeddings.position_embeddings"][1])
    return vit_config(size, fields, said, (class_token + ("embeddings.distillation_token" in shapes),))


def describe(config: ViTConfig) -> dict[str, Any]:
    """The config.json of a ViT, DeiT or DINOv2, or of an I-JEPA: transformers' ViT whose head reads the mean of the
    patches."""
    kind = {"distilled": "deit", "mean": "ijepa"}.get(config.pool, "vit")
    if config.layer_scale is not None:
        kind = "dinov2_with_registers" if config.registers else "dinov2"
    names = {
        "vit": "ViT",
        "deit": "DeiT",
        "ijepa": "IJepa",
        "dinov2": "Dinov2",
        "dinov2_with_registers": "Dinov2WithRegisters",
    }
    task = "ForImageClassificationWithTeacher" if kind == "deit" else "ForImageClassification"
    task = task if config.classes else "Model"
    found = {
        "architectures": [names[kind] + task],
        "model_type": kind,
        **shape(config),
        "qkv_bias": config.qkv_bias,
        "id2label": {str(i): str(i) for i in range(config.classes)},
        "label2id": {str(i): i for i in range(config.classes)},
    }
    if kind.startswith("dinov2"):
        found |= {
            "mlp_ratio": mlp_ratio(config),
            "use_swiglu_ffn": config.mlp == "swiglu",
            "num_register_tokens": config.registers,
        }
    return found


def mlp_ratio(config: ViTConfig) -> int:
    """DINOv2's whole number for the MLP's width, of which the gated one has two thirds, up to a multiple of 8; 0 where
    there is none."""
    for ratio in range(1, 17):
        wide = config.width * ratio
        if config.hidden == ((int(wide * 2 / 3) + 7) // 8 * 8 if config.mlp == "swiglu" else wide):
            return ratio
    return 0


def shape(config: ViTConfig) -> dict[str, Any]:
    """What every config.json of a ViT says."""
    square = len(set(config.image)) == 1
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.hidden,
        "hidden_act": ACTS[config.gelu],
        "layer_norm_eps": config.eps,
        "image_size": config.image[0] if square else list(config.image),
        "patch_size": config.patch[0] if len(set(config.patch)) == 1 else list(config.patch),
        "num_channels": config.channels,
    }


def ordinary(config: Any) -> bool:
    """Whether it is a ViT with learned positions, whatever it pools, and nothing else that changes the names."""
    return (
        isinstance(config, ViTConfig)
        and len(config.image) == 2
        and not config.told
        and config.position == "learned"
        and config.stem is None
        and config.projection_bias
        and (config.head_bias or not config.classes)
        and config.norm == "tokens"
        and not config.first_norm
    )


def usual(config: Any) -> bool:
    """Whether it is one that pools a class token, which has a learned position."""
    return (
        ordinary(config)
        and config.class_token
        and config.positioned == config.prefix - config.registers
        and config.pool in ("class", "distilled")
    )


def averaged(config: Any) -> bool:
    """Whether it is one that pools the mean of its patches, which transformers calls I-JEPA (arXiv:2301.08243): no
    other token, squares."""
    return ordinary(config) and square(config) and not config.prefix and config.pool == "mean"


def square(config: Any) -> bool:
    """Whether images and patches are squares: others' code knows one length only."""
    return len(config.image) == 2 and len(set(config.image)) == len(set(config.patch)) == 1


VIT = Format(
    "huggingface",
    FAMILIES["vit"],
    ("embeddings.patch_embeddings.projection.weight", "encoder.layer.0.intermediate.dense.weight"),
    VIT_ROWS,
    configure,
    ignored=(r"decoder\..*", r"pooler\..*", r"embeddings\.mask_token"),
    strip=("vit.", "deit.", "ijepa."),
    holds=lambda c: (
        (usual(c) or averaged(c))
        and c.layer_scale is None
        and c.mlp == "gelu"
        and not c.registers
        and not c.representation
    ),
    prefix=lambda c: describe(c)["model_type"] + "." if c.classes else "",
    beside=("classifier", "cls_classifier", "distillation_classifier"),
    describe=describe,
)
DINOV2 = Format(
    "huggingface",
    "transformers' DINOv2",
    ("embeddings.patch_embeddings.projection.weight", "encoder.layer.0.layer_scale1.lambda1"),
    (
        *COMMON,
        row(
            "encoder.blocks.{i}.mlp.part.fc1.{x}",
            lambda c: (f"{LAYER}.mlp.{'weights_in' if c.mlp == 'swiglu' else 'fc1'}.{{x}}",),
            COPY,
        ),
        row(
            "encoder.blocks.{i}.mlp.part.fc2.{x}",
            lambda c: (f"{LAYER}.mlp.{'weights_out' if c.mlp == 'swiglu' else 'fc2'}.{{x}}",),
            COPY,
        ),
        *blocks(OURS, LAYER, "norm1", "norm2", ("-", "-")),
    ),
    configure,
    ignored=(r"classifier\..*", r"embeddings\.mask_token"),
    strip=("dinov2.", "dinov2_with_registers."),
    holds=lambda c: (
        usual(c)
        and square(c)
        and c.layer_scale is not None
        and c.pool == "class"
        and not c.classes
        and mlp_ratio(c) > 0
    ),
    adds=lambda c: {"embeddings.mask_token": (1, c.width)},
    describe=describe,
)

CLIP_LAYER = "encoder.layers.{i}"
CLIP = Format(
    "huggingface",
    "transformers' CLIP image encoder",
    ("embeddings.class_embedding", "embeddings.patch_embedding.weight", "encoder.layers.0.self_attn.q_proj.weight"),
    (
        row("projection.weight", "embeddings.patch_embedding.weight", CONVOLUTION),
        row("prefix", "embeddings.class_embedding", BARE_TOKEN),
        row("slots position.table", "embeddings.position_embedding.weight", positions(())),
        row(
            f"{OURS}.attention.part.qkv.{{x}}",
            " ".join(f"{CLIP_LAYER}.self_attn.{part}_proj.{{x}}" for part in "qkv"),
            SEPARATE,
        ),
        *table(
            "first_norm.{x} = pre_layrnorm.{x}",
            "pooled_norm.{x} = post_layernorm.{x}",
            f"{OURS}.attention.norm.{{x}} = {CLIP_LAYER}.layer_norm1.{{x}}",
            f"{OURS}.attention.part.out.{{x}} = {CLIP_LAYER}.self_attn.out_proj.{{x}}",
            f"{OURS}.mlp.norm.{{x}} = {CLIP_LAYER}.layer_norm2.{{x}}",
            f"{OURS}.mlp.part.fc1.{{x}} = {CLIP_LAYER}.mlp.fc1.{{x}}",
            f"{OURS}.mlp.part.fc2.{{x}} = {CLIP_LAYER}.mlp.fc2.{{x}}",
            "head.weight = visual_projection.weight",
        ),
    ),
    lambda shapes, said: configure_clip(shapes, said),
    ignored=(r"text_model\..*", r"text_projection\..*", r"logit_scale", r".*position_ids"),
    strip=("vision_model.",),
    holds=lambda c: clip_like(c),
    prefix=lambda c: "vision_model.",
    beside=("visual_projection",),
    describe=lambda c: {
        "architectures": ["CLIPVisionModelWithProjection" if c.classes else "CLIPVisionModel"],
        "model_type": "clip_vision_model",
        "projection_dim": c.classes or 512,
        **shape(c),
    },
)


def clip_like(config: ModelConfig) -> bool:
    """Whether it is CLIP's image encoder."""
    return (
        isinstance(config, ViTConfig)
        and square(config)
        and config.first_norm
        and config.qkv_bias
        and config.norm == "pooled"
        and not config.projection_bias
        and not config.registers
    )


def configure_clip(shapes: Shapes, said: dict[str, Any]) -> ViTConfig:
    """The config of CLIP's image encoder."""
    width, channels, *patch = shapes["embeddings.patch_embedding.weight"]
    fields = {
        "channels": channels,
        "classes": shapes["visual_projection.weight"][0] if "visual_projection.weight" in shapes else 0,
        **CLIP_FIELDS,
    }
    depth = count(shapes, f"{CLIP_LAYER}.layer_norm1.weight")
    size = Size(
        width,
        depth,
        shapes["encoder.layers.0.mlp.fc1.weight"][0],
        tuple(patch),
        shapes["embeddings.position_embedding.weight"][0],
    )
    return vit_config(size, fields, said, (1,))


CLIP_FIELDS = {
    "first_norm": True,
    "norm": "pooled",
    "gelu": "quick",
    "eps": 1e-5,
    "projection_bias": False,
    "head_bias": False,
    "resize": "bicubic",
}

BIT = Format(
    "huggingface",
    "transformers' BiT",
    ("embedder.convolution.weight", r"encoder.stages.0.layers.0.norm1.weight"),
    (
        *table(
            "head.{x} = classifier.1.{x}",
            "body.root.conv.weight = embedder.convolution.weight",
            "body.norm.{x} = norm.{x}",
            "body.stages.{s}.units.{j}.shortcut.conv.weight = encoder.stages.{s}.layers.{j}.downsample.conv.weight",
            *(
                f"body.stages.{{s}}.units.{{j}}.conv{n}.weight = encoder.stages.{{s}}.layers.{{j}}.conv{n}.weight"
                for n in (1, 2, 3)
            ),
            *(
                f"body.stages.{{s}}.units.{{j}}.norm{n}.{{x}} = encoder.stages.{{s}}.layers.{{j}}.norm{n}.{{x}}"
                for n in (1, 2, 3)
            ),
        ),
    ),
    lambda shapes, said: configure_bit(shapes, said),
    strip=("bit.",),
    holds=lambda c: isinstance(c, BiTConfig) and not c.axial,
    prefix=lambda c: "bit." if c.classes else "",
    beside=("classifier",),
    describe=lambda c: {
        "architectures": ["BitForImageClassification" if c.classes else "BitModel"],
        "model_type": "bit",
        "depths": list(c.blocks),
        "embedding_size": c.width * c.factor,
        "hidden_sizes": [4 * c.width * c.factor * 2**i for i in range(len(c.blocks))],
        "num_channels": c.channels,
        "layer_type": "preactivation",
        "id2label": {str(i): str(i) for i in range(c.classes)},
        "label2id": {str(i): i for i in range(c.classes)},
    },
)


def configure_bit(shapes: Shapes, said: dict[str, Any]) -> BiTConfig:
    """The config of a BiT."""
    blocks, classes = resnet_blocks(shapes, "encoder.stages.", ".layers."), shapes.get("classifier.1.weight", (0,))[0]
    return bit_config(shapes["embedder.convolution.weight"][:2], blocks, classes, "transformers", said)
