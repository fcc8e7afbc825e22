"""Types of the keyword options of the public functions, such as `vitreous.train(DATA, **options)`, and of model names.

They are for type checkers and editors; at run time, dataclasses check the same values. Most types are generated from
these dataclasses: run `python -m tests.keywords` after an option or a model is added. A tuple field also accepts a list
or a single value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

if TYPE_CHECKING:
    from vitreous.models.config import (
        AttentionConfig,
        ConvStemConfig,
        HeadConfig,
        MlpConfig,
        NormConfig,
        NumericsName,
        PositionConfig,
        PositionResize,
        RegularizationConfig,
        RotaryConfig,
        StemConfig,
        SwinAttentionConfig,
        SwinMlpConfig,
        SwinNormConfig,
        SwinPositionConfig,
    )
    from vitreous.models.configs.adapter import AdapterNorm, TokenSource
    from vitreous.models.configs.detector import DetectionHeads, ScoreActivation
    from vitreous.models.configs.swin import WindowPadding
    from vitreous.models.configs.video import Arrangement

PathLike: TypeAlias = str | os.PathLike[str]


class PositionKeywords(TypedDict, total=False):
    """Fields of the group `positions` of a model's config."""

    kind: Literal["learned", "axes", "factorised", "sincos", "sincos-big-vision", "none", "space-time", "sinusoid"]
    at: Literal["input", "each", "shared"]
    slots: int
    resize: PositionResize


class AttentionKeywords(TypedDict, total=False):
    """Fields of the group `attention` of a model's config."""

    kind: Literal["plain", "relative", "rotary", "decomposed"]
    window: int
    global_blocks: tuple[int, ...]
    qkv_bias: bool
    key_bias: bool
    out_bias: bool
    qk_norm: bool
    pretrained_window: tuple[int, ...]
    pad: WindowPadding


class RotaryKeywords(TypedDict, total=False):
    """Fields of the group `rotary` of a model's config."""

    base: float
    coordinates: Literal["index", "reference", "centred"]
    reference: int
    offset: int
    rounded: bool
    register_base: float
    rescale: float


class MlpKeywords(TypedDict, total=False):
    """Fields of the group `mlp` of a model's config."""

    hidden: int
    kind: Literal["gelu", "swiglu"]
    gelu: Literal["none", "tanh", "quick"]
    bias: bool
    norm: bool
    ratio: float


class NormKeywords(TypedDict, total=False):
    """Fields of the group `norm` of a model's config."""

    final: Literal["tokens", "pooled", "none"]
    eps: float
    layer_scale: float | None
    kind: Literal["layer", "rms"]
    patches: bool


class HeadKeywords(TypedDict, total=False):
    """Fields of the group `head` of a model's config."""

    kind: Literal["linear", "cosine"]
    representation: int | None
    bias: bool
    pool_heads: int
    pool_hidden: int


class RegularizationKeywords(TypedDict, total=False):
    """Fields of the group `regularization` of a model's config."""

    dropout: float
    drop_path: float
    drop_path_rises: bool


class ModelKeywords(TypedDict, total=False):
    """Keywords of `vitreous.create`: fields of all model configs, and the names that timm has for them."""

    patch: tuple[int, ...]
    width: int
    depth: int
    heads: int | tuple[int, ...] | DetectionHeads
    hidden: int
    class_token: bool
    registers: int
    pool: Literal["class", "mean", "attention", "distilled"]
    projection_bias: bool
    positions: PositionKeywords | PositionConfig | SwinPositionConfig
    attention: AttentionKeywords | AttentionConfig | SwinAttentionConfig
    rotary: RotaryKeywords | RotaryConfig
    mlp: MlpKeywords | MlpConfig | SwinMlpConfig
    norm: NormKeywords | NormConfig | SwinNormConfig | AdapterNorm
    head: HeadKeywords | HeadConfig
    regularization: RegularizationKeywords | RegularizationConfig
    eps: float
    stem: StemConfig | ConvStemConfig
    conv_blocks: tuple[int, ...]
    position_grid: tuple[int, ...]
    neck: int
    arrangement: Arrangement | Literal["alternating"]
    temporal_depth: int
    temporal_zero: bool
    pooled_eps: float | None
    inflate: Literal["central", "average"]
    blocks: tuple[int, ...]
    factor: int
    numerics: NumericsName
    axial: bool
    version: Literal[1, 2]
    patch_size: int | tuple[int, ...]
    learned_variance: bool
    qk_norm: bool
    time_shift: Literal[0, 1]
    ratio: float
    points: int
    interactions: int
    prior: int
    token_source: TokenSource
    head_width: int
    head_dropout: float
    masks: bool
    finest: int
    anchor: float
    round_anchors: bool
    agnostic: bool
    scores: ScoreActivation
    proposals: int
    detections: int
    nms: float
    threshold: float
    first_norm: bool
    img_size: int | tuple[int, ...]
    in_chans: int
    in_channels: int
    drop_path_rate: float
    drop_rate: float
    embed_dim: int
    num_heads: int
    reg_tokens: int
    init_values: float | None
    pretrained_path: PathLike
    checkpoint_path: PathLike
    global_pool: Literal["token", "avg", "map"]
    pretrained: Literal[False]


class SegmentKeywords(TypedDict, total=False):
    """Keywords of `vitreous.load(RUN).segment`."""

    bad_images: Literal["stop", "skip"]
    keep_images: bool


class DetectKeywords(SegmentKeywords, total=False):
    """Keywords of `vitreous.load(RUN).detect`."""

    threshold: float
    tiles: bool


class PredictKeywords(TypedDict, total=False):
    """Keywords of `vitreous.load(RUN).predict`."""

    top: int | None
    bad_images: Literal["stop", "skip"]
    on_images: Callable[[int], None]
    threshold: float | None
    abstain: float | None


# The code below is generated by `python -m tests.keywords`.
# fmt: off
#: names that `vitreous models` lists, by the class of their models, also in lower case
ViTName: TypeAlias = Literal[
    "ViT-Ti/8", "vit-ti/8", "ViT-Ti/14", "vit-ti/14", "ViT-Ti/16", "vit-ti/16", "ViT-Ti/32", "vit-ti/32", "ViT-S/8",
    "vit-s/8", "ViT-S/14", "vit-s/14", "ViT-S/16", "vit-s/16", "ViT-S/32", "vit-s/32", "ViT-M/8", "vit-m/8", "ViT-M/14",
    "vit-m/14", "ViT-M/16", "vit-m/16", "ViT-M/32", "vit-m/32", "ViT-B/8", "vit-b/8", "ViT-B/14", "vit-b/14",
    "ViT-B/16", "vit-b/16", "ViT-B/32", "vit-b/32", "ViT-L/8", "vit-l/8", "ViT-L/14", "vit-l/14", "ViT-L/16",
    "vit-l/16", "ViT-L/32", "vit-l/32", "ViT-H/8", "vit-h/8", "ViT-H/14", "vit-h/14", "ViT-H/16", "vit-h/16",
    "ViT-H/32", "vit-h/32", "ViT-g/8", "vit-g/8", "ViT-g/14", "vit-g/14", "ViT-g/16", "vit-g/16", "ViT-g/32",
    "vit-g/32", "ViT-G/8", "ViT-G/14", "ViT-G/16", "ViT-G/32", "ViT-So400m/8", "vit-so400m/8", "ViT-So400m/14",
    "vit-so400m/14", "ViT-So400m/16", "vit-so400m/16", "ViT-So400m/32", "vit-so400m/32", "DeiT-Ti/16-distilled",
    "deit-ti/16-distilled", "DeiT-S/16-distilled", "deit-s/16-distilled", "DeiT-B/16-distilled", "deit-b/16-distilled",
    "DeiT-III-S/16", "deit-iii-s/16", "DeiT-III-M/16", "deit-iii-m/16", "DeiT-III-B/16", "deit-iii-b/16",
    "DeiT-III-L/16", "deit-iii-l/16", "DeiT-III-H/14", "deit-iii-h/14", "DINO-S/16", "dino-s/16", "DINO-S/8",
    "dino-s/8", "DINO-B/16", "dino-b/16", "DINO-B/8", "dino-b/8", "DINOv2-S/14", "dinov2-s/14", "DINOv2-B/14",
    "dinov2-b/14", "DINOv2-L/14", "dinov2-l/14", "DINOv2-S/14-registers", "dinov2-s/14-registers",
    "DINOv2-B/14-registers", "dinov2-b/14-registers", "DINOv2-L/14-registers", "dinov2-l/14-registers", "DINOv2-g/14",
    "dinov2-g/14", "DINOv2-g/14-registers", "dinov2-g/14-registers", "DINOv2-L/14-swiglu", "dinov2-l/14-swiglu",
    "DINOv3-S/16", "dinov3-s/16", "DINOv3-B/16", "dinov3-b/16", "DINOv3-L/16", "dinov3-l/16", "DINOv3-S+/16",
    "dinov3-s+/16", "DINOv3-H+/16", "dinov3-h+/16", "DINOv3-7B/16", "dinov3-7b/16", "MAE-B/16", "mae-b/16", "MAE-L/16",
    "mae-l/16", "MAE-H/14", "mae-h/14", "TIPSv2-B/14", "tipsv2-b/14", "TIPSv2-L/14", "tipsv2-l/14", "TIPSv2-So400m/14",
    "tipsv2-so400m/14", "EVA02-Ti/14", "eva02-ti/14", "EVA02-S/14", "eva02-s/14", "EVA02-B/14", "eva02-b/14",
    "EVA02-L/14", "eva02-l/14", "AIMv2-L/14", "aimv2-l/14", "AIMv2-H/14", "aimv2-h/14", "AIMv2-1B/14", "aimv2-1b/14",
    "AIMv2-3B/14", "aimv2-3b/14", "ViT-5-S/16", "vit-5-s/16", "ViT-5-B/16", "vit-5-b/16", "ViT-5-L/16", "vit-5-l/16",
    "SigLIP-B/16", "siglip-b/16", "SigLIP-B/32", "siglip-b/32", "SigLIP-L/16", "siglip-l/16", "SigLIP-So400m/14",
    "siglip-so400m/14", "SigLIP-So400m/16", "siglip-so400m/16", "SigLIP-gopt/16", "siglip-gopt/16", "R+ViT-Ti/16",
    "r+vit-ti/16", "R26+ViT-S/32", "r26+vit-s/32", "R26+ViT-B/32", "r26+vit-b/32", "R50+ViT-B/16", "r50+vit-b/16",
    "R50+ViT-B/32", "r50+vit-b/32", "R50+ViT-L/16", "r50+vit-l/16", "R50+ViT-L/32", "r50+vit-l/32", "Conv+ViT-128x4/8",
    "conv+vit-128x4/8", "Conv32-128x1-256x1-256+ViT-128x4/8", "conv32-128x1-256x1-256+vit-128x4/8", "Conv+ViT-Ti/16",
    "conv+vit-ti/16", "Conv+ViT-S/16", "conv+vit-s/16", "CLIP-B/32", "clip-b/32", "CLIP-B/16", "clip-b/16", "CLIP-L/14",
    "clip-l/14", "PE-Core-Ti/16", "pe-core-ti/16", "PE-Core-S/16", "pe-core-s/16", "PE-Core-B/16", "pe-core-b/16",
    "PE-Core-L/14", "pe-core-l/14", "PE-Core-G/14", "pe-core-g/14", "PE-Spatial-B/16", "pe-spatial-b/16",
    "PE-Spatial-L/14", "pe-spatial-l/14", "SAM-B/16", "sam-b/16", "SAM-L/16", "sam-l/16", "SAM-H/16", "sam-h/16",
    "ViTDet-B/16", "vitdet-b/16", "ViTDet-L/16", "vitdet-l/16", "ViTDet-H/16", "vitdet-h/16", "Axial-ViT-B/16",
    "axial-vit-b/16", "Axial-ViT-B/32", "axial-vit-b/32", "ViViT-B/16x2", "vivit-b/16x2",
    "ViViT-B/16x2-factorised-encoder", "vivit-b/16x2-factorised-encoder", "ViViT-B/16x2-factorised-attention",
    "vivit-b/16x2-factorised-attention", "ViViT-B/16x2-factorised-dot-product", "vivit-b/16x2-factorised-dot-product",
    "ViViT-L/16x2", "vivit-l/16x2", "ViViT-L/16x2-factorised-encoder", "vivit-l/16x2-factorised-encoder",
    "ViViT-L/16x2-factorised-attention", "vivit-l/16x2-factorised-attention", "ViViT-L/16x2-factorised-dot-product",
    "vivit-l/16x2-factorised-dot-product", "VideoMAE-S/16x2", "videomae-s/16x2", "VideoMAE-B/16x2", "videomae-b/16x2",
    "VideoMAE-L/16x2", "videomae-l/16x2", "VideoMAE-H/16x2", "videomae-h/16x2"
]

SwinName: TypeAlias = Literal[
    "Swin-T/4", "swin-t/4", "Swin-S/4", "swin-s/4", "Swin-B/4", "swin-b/4", "Swin-L/4", "swin-l/4", "Swin-B/4-window12",
    "swin-b/4-window12", "Swin-L/4-window12", "swin-l/4-window12", "SwinV2-T/4", "swinv2-t/4", "SwinV2-T/4-window16",
    "swinv2-t/4-window16", "SwinV2-S/4", "swinv2-s/4", "SwinV2-S/4-window16", "swinv2-s/4-window16", "SwinV2-B/4",
    "swinv2-b/4", "SwinV2-B/4-window16", "swinv2-b/4-window16", "SwinV2-B/4-window12", "swinv2-b/4-window12",
    "SwinV2-B/4-window12to16", "swinv2-b/4-window12to16", "SwinV2-B/4-window12to24", "swinv2-b/4-window12to24",
    "SwinV2-L/4-window12", "swinv2-l/4-window12", "SwinV2-L/4-window12to16", "swinv2-l/4-window12to16",
    "SwinV2-L/4-window12to24", "swinv2-l/4-window12to24"
]

BiTName: TypeAlias = Literal[
    "BiT-R50x1", "bit-r50x1", "BiT-R50x2", "bit-r50x2", "BiT-R50x3", "bit-r50x3", "BiT-R101x1", "bit-r101x1",
    "BiT-R101x3", "bit-r101x3", "BiT-R152x1", "bit-r152x1", "BiT-R152x2", "bit-r152x2", "BiT-R152x4", "bit-r152x4",
    "BiT-R200x3", "bit-r200x3", "AxialResNet-50", "axialresnet-50"
]

DiTName: TypeAlias = Literal[
    "DiT-S/2", "dit-s/2", "DiT-S/4", "dit-s/4", "DiT-S/8", "dit-s/8", "DiT-B/2", "dit-b/2", "DiT-B/4", "dit-b/4",
    "DiT-B/8", "dit-b/8", "DiT-L/2", "dit-l/2", "DiT-L/4", "dit-l/4", "DiT-L/8", "dit-l/8", "DiT-XL/2", "dit-xl/2",
    "DiT-XL/4", "dit-xl/4", "DiT-XL/8", "dit-xl/8"
]

# fmt: on


class LoaderKeywords(TypedDict, total=False):
    """Fields of `TrainOptions` that are keywords of `vitreous.create_loader`, in addition to its parameters."""

    resize: PositionResize | None
    source_size: int | Sequence[int] | None
    recipe: str | None
    model: str | None
    init: PathLike | None
    out: PathLike | None
    resume: bool
    override: bool
    allow_data_change: bool
    config: PathLike | None
    dry_run: bool
    world: int | None
    images: int | None
    image_size: int | None
    patch_size: int | None
    native_aspect: bool
    tokens: str | None
    frames: int | None
    stride: int | None
    buckets: str | Sequence[str] | None
    epochs: float | None
    steps: int | None
    accumulate: int | None
    micro_batch: str | None
    recompute: bool
    optimizer: Literal["adamw", "sgd", "lamb", "lars", "muon"] | None
    lr: float | None
    weight_decay: float | None
    warmup_steps: int | None
    decay: Literal["cosine", "linear", "constant", "rsqrt", "steps"] | None
    cooldown_steps: int | None
    layer_decay: float | None
    clip_grad: float | None
    ema: float | None
    ema_warmup: bool | None
    last_blocks: int | None
    lora: int | None
    teacher: PathLike | None
    loss: Literal["softmax", "sigmoid", "binary", "mse", "l1", "huber"] | None
    class_weights: Literal["even", "balanced"] | None
    sampling: Literal["even", "balanced", "repeat-factor"] | None
    label_smoothing: float | None
    drop_path: float | None
    dropout: float | None
    patch_dropout: float | None
    progressive: float | None
    mixup: float | None
    cutmix: float | None
    rand_augment: int | None
    erase: float | None
    bad_images: Literal["stop", "skip"]
    split_seed: int | None
    group_by: str | None
    targets: str | Sequence[str] | None
    axes: Literal[1, 2, 3] | None
    ignore_index: int | None
    exclude: PathLike | None
    exact: bool
    device: str | None
    precision: Literal["auto", "fp32", "bf16", "fp16"] | None
    compile: bool | None
    shards: int | None
    reproducible: bool
    timeout: float | None
    parallel: Literal["ddp", "fsdp"] | None
    skip_steps: int | None
    lr_grid: float | Sequence[float] | None
    ray: str | None
    log_every: int | None
    evaluate_every: int | None
    save_every: int | None
    keep_best: bool
    keep_last: bool
    early_stop: int | None
    drift_guard: float | None
    drift_patience: int | None
    stop_on_collapse: bool
    keep: int | None
    log_to: (
        Literal["tensorboard", "wandb", "mlflow", "none"] | Sequence[Literal["tensorboard", "wandb", "mlflow", "none"]]
    )
    log_timeout: float
    live: bool
    settings: dict[str, list[str]]


class TrainKeywords(LoaderKeywords, total=False):
    """Fields of `TrainOptions`: keywords of `vitreous.train`."""

    batch_size: int | None
    workers: int | None
    seed: int | None


class ComputeKeywords(TypedDict, total=False):
    """Fields of `InferenceOptions`: keywords of `vitreous.load`."""

    device: str
    precision: Literal["auto", "fp32", "bf16", "int8"]
    engine: Literal["auto", "torch", "compiled", "openvino"]
    merge_tokens: int
    clip_views: str


class EvaluateKeywords(ComputeKeywords, total=False):
    """Fields of the options of evaluations, protocols and generated images: keywords of `vitreous.evaluate`."""

    cache: bool
    calibrate: bool
    abstain: float | None
    outliers: PathLike | None
    against: PathLike | None
    suspects: PathLike | None
    boundary: bool
    tiles: bool
    zero_shot: bool
    templates: str | Sequence[str]
    class_labels: PathLike | None
    report: PathLike | None
    k: int | Sequence[int]
    temperature: float
    shots: int | Sequence[int]
    seeds: int
    l2: float | None
    labels: PathLike | None
    seed: int
    probe: Literal["regression", "mae", "dino", "dinov2"]
    epochs: float | None
    steps: int | None
    probe_batch: int | None
    probe_augment: bool
    heads: (
        Literal["knn", "linear", "blocks", "attentive", "fewshot"]
        | Sequence[Literal["knn", "linear", "blocks", "attentive", "fewshot"]]
    )
    lr: float | Sequence[float]
    weight_decay: float | Sequence[float]
    out: PathLike | None
    guidance: float
    interval: tuple[float, float]
    guided_channels: int | None
    sampler: str | None
    samples: int
    features: str
    reference: PathLike | None
    vae: PathLike | None
    size: str | None
    frames: int | None


class InspectKeywords(TypedDict, total=False):
    """Fields of `InspectOptions`: keywords of `vitreous.inspect`."""

    figures: str | Sequence[str]
    all: bool
    data: str | None
    split: Literal["train", "val", "test"] | None
    count: int
    image_size: int | Sequence[int]
    layers: int | Sequence[int]
    heads: int | Sequence[int]
    fusion: Literal["mean", "max", "min"]
    residual: float
    discard: float
    mass: float
    of_class: str | None
    other: PathLike | None
    batch_sizes: int | Sequence[int]
    device: str
    precision: Literal["auto", "fp32", "bf16"]
    batch_size: int
    seed: int


class SampleKeywords(TypedDict, total=False):
    """Fields of `SampleOptions`: keywords of `vitreous.sample`."""

    guidance: float
    interval: tuple[float, float]
    guided_channels: int | None
    sampler: str | None
    steps: int | None
    seed: int
    classes: str | Sequence[str]
    count: int | None
    to_seed: int | None
    inpaint: PathLike | None
    mask: PathLike | None
    vae: PathLike | None
    size: str | None
    frames: int | None
    device: str
    precision: str
