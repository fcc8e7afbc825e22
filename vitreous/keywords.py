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
    inner_norm: bool
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
