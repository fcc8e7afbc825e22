"""Options of `evaluate` and `inspect`, defined once for the command line and for Python keywords. Does not import
PyTorch."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal, get_args

from vitreous.config import OptionalPath
from vitreous.errors import UsageError, suggest_nearest

#: training of the `linear` head: logistic regression to the optimum, or a published schedule
Probe = Literal["regression", "mae", "dino", "dinov2"]

#: options that only apply to --protocol heads
HEADS_PROTOCOL_OPTIONS = ("heads", "lr", "weight_decay", "out")
#: heads on frozen features (`--heads`); on class maps, only knn and linear
FrozenHead = Literal["knn", "linear", "blocks", "attentive", "fewshot"]


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Figures, images and settings of `vitreous inspect`."""

    SECTIONS: ClassVar[dict[str, str]] = {
        "figures": "Figures",
        "data": "Images",
        "layers": "Settings of figures",
        "device": "Device",
    }

    figures: tuple[str, ...] = ()
    """Names of the figures."""
    all: bool = False
    """Draw every figure that the model supports."""
    data: str | None = None
    """Dataset to take images from (default: the run's dataset)."""
    split: Literal["train", "val", "test"] | None = None
    """Split to take images from (default: val)."""
    count: int = 128
    """Number of images to average over; the ViT paper's attention distance uses 128."""
    image_size: tuple[int, ...] = ()
    """Image size in pixels: one number, or height and width (default: the model's)."""
    layers: tuple[int, ...] = ()
    """Blocks to show, counted from 0, or from -1 backwards (default: all, or the last if a figure shows one)."""
    heads: tuple[int, ...] = ()
    """Heads to show, counted from 0 (default: all)."""
    fusion: Literal["mean", "max", "min"] = "mean"
    """How attention rollout combines the heads of a block."""
    residual: float = 0.5
    """Weight of the identity matrix in each block of attention rollout; 0 ignores the residual path."""
    discard: float = 0.0
    """Share of the smallest attention weights that rollout sets to zero in each block."""
    mass: float = 0.6
    """Share of a head's attention that the patches kept by `segments` hold."""
    of_class: str | None = None
    """Class whose gradient is used (default: the predicted class)."""
    other: OptionalPath = None
    """Second model, whose layers `similarity` compares with those of the first."""
    batch_sizes: tuple[int, ...] = ()
    """Batch sizes for the cost figure (default: powers of two until memory is full)."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute dtype; attention is always computed in fp32."""
    batch_size: int = 8
    """Images per forward pass."""
    seed: int = 0
    """Seed for the choice of images."""


@dataclass(frozen=True, kw_only=True)
class FeatureOptions:
    """Options of evaluations that use the features of a model."""

    SECTIONS: ClassVar[dict[str, str]] = {"cache": "Protocols on features"}

    cache: bool = True
    """Cache features in XDG_CACHE_HOME/vitreous/features."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(FeatureOptions):
    """Additional outputs of an evaluation of the head."""

    SECTIONS: ClassVar[dict[str, str]] = {"calibrate": "Predictions and report"}

    calibrate: bool = False
    """Fit a softmax temperature on the validation split and store it in the bundle; later predictions use it."""
    abstain: float | None = None
    """Report accuracy and coverage when predictions below this confidence are rejected (0 to 1)."""
    outliers: OptionalPath = None
    """Write path and outlier score of each image to this file, most unusual first, compared with the training
    images."""
    against: OptionalPath = None
    """Second dataset, with or without labels: report how well the outlier score separates it from the evaluated
    images."""
    suspects: OptionalPath = None
    """Write probable label errors to this file, most probable first."""
    boundary: bool = False
    """Segmentation: also compute the boundary F-measure (about 10 ms per class and image)."""
    tiles: bool = False
    """Detection: process large images in overlapping tiles at full resolution."""
    zero_shot: bool = False
    """Classify with the text encoder: the class names of the dataset are the labels, underscores replaced by spaces."""
    templates: tuple[str, ...] = ()
    """zero-shot: prompts of a label: none, photo, this-is, openai (80), openai-7, or texts such as 'a sketch of a {}.'
    (default: this-is for SigLIP, else photo)."""
    class_labels: OptionalPath = None
    """zero-shot: CSV file with the label of each class, in lines `class,label`."""
    report: OptionalPath = None
    """Path of the HTML report (default: report.html in the run folder)."""


@dataclass(frozen=True)
class ProtocolOptions(FeatureOptions):
    """Settings of an evaluation by a protocol instead of the head. Raises UsageError for values out of range and
    conflicting options."""

    protocol: str
    _: KW_ONLY
    k: tuple[int, ...] = ()
    """knn: numbers of neighbours (default: 10 20 100 200, up to the number of images)."""
    temperature: float = 0.07
    """knn: a neighbour with cosine similarity s has weight exp(s / temperature)."""
    shots: tuple[int, ...] = ()
    """fewshot: training images per class (default: 1 5 10 25, up to the size of the largest class)."""
    seeds: int = 3
    """fewshot: number of random draws."""
    l2: float | None = None
    """L2 penalty of the classifier (default: 1024 for fewshot; for linear and vtab selected on held-out training
    images)."""
    labels: OptionalPath = None
    """File with the labels of real (real.json) or objectnet (JSON or CSV: class, ImageNet indices)."""
    seed: int = 0
    """Seed of the held-out images of linear, and of the first draw of fewshot."""
    probe: Probe = "regression"
    """linear: logistic regression, or the training schedule published with MAE, DINO or DINOv2."""
    epochs: float | None = None
    """Epochs of a published schedule (default: mae 90, for wide models 50; dino 100), or of heads (default: 10, at
    least 300 steps)."""
    steps: int | None = None
    """Steps of a published schedule or of heads, instead of --epochs (default: dinov2 12,500, at most 100 epochs)."""
    probe_batch: int | None = None
    """Batch size of a published schedule; the learning rate scales with it (default: mae 16,384, others 1,024, at most
    all images)."""
    probe_augment: bool = True
    """Random crops and flips in a published schedule. Turn off for small images or text."""
    heads: tuple[FrozenHead, ...] = ()
    """heads: the heads to fit (default: all that model and data support)."""
    lr: tuple[float, ...] = ()
    """heads: learning rates to choose from (default: 0.001 0.003 0.01 0.03)."""
    weight_decay: tuple[float, ...] = ()
    """heads: weight decays to choose from (default: 0 3)."""
    out: OptionalPath = None
    """heads: write the encoder with its linear head to this folder, as a bundle."""

    def __post_init__(self) -> None:
        self.check_probe()
        self.check_heads()
        if self.temperature <= 0 or (self.l2 is not None and self.l2 <= 0):
            option = "temperature" if self.temperature <= 0 else "l2"
            raise UsageError(f"--{option} must be above 0, not {getattr(self, option):g}")
        for option, counts in (("k", self.k), ("shots", self.shots), ("seeds", (self.seeds,))):
            if counts and min(counts) < 1:
                raise UsageError(f"--{option} must be at least 1, not {min(counts)}")

    def check_probe(self) -> None:
        """Raise UsageError for an unknown probe, and for options that conflict with the selected one."""
        if self.probe not in (probes := get_args(Probe)):
            hint = suggest_nearest(self.probe, probes) or f"use {', '.join(probes)}"
            raise UsageError(f"unknown probe {self.probe}", hint)
        self.check_length()
        schedule_options = [name for name in ("epochs", "steps", "probe_batch") if getattr(self, name) is not None]
        if self.probe == "regression":
            if self.protocol == "heads":
                schedule_options = [name for name in schedule_options if name == "probe_batch"]
            schedule_options += [] if self.probe_augment else ["no_probe_augment"]
            if schedule_options:
                problem = f"--{schedule_options[0].replace('_', '-')} is for published training schedules"
                raise UsageError(problem, "add --probe mae, dino or dinov2, or leave it out")
            return
        if self.protocol != "linear":
            raise UsageError(
                f"--probe {self.probe} is for --protocol linear, not {self.protocol}", "add --protocol linear"
            )
        if self.l2 is not None:
            raise UsageError(f"--probe {self.probe} has no L2 penalty", "leave out --l2 or --probe")
        if self.probe_batch is not None and self.probe_batch < 2:
            raise UsageError(f"--probe-batch must be at least 2, not {self.probe_batch}")

    def check_length(self) -> None:
        """Raise UsageError for both --epochs and --steps, and for values out of range."""
        if self.epochs is not None and self.steps is not None:
            raise UsageError("--epochs and --steps exclude each other", "use one of them")
        if self.epochs is not None and self.epochs <= 0:
            raise UsageError(f"--epochs must be above 0, not {self.epochs:g}")
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"--steps must be at least 1, not {self.steps}")

    def check_heads(self) -> None:
        """Raise UsageError for an unknown head, for values out of range, and for options of --protocol heads with
        another protocol."""
        names = [name for name in HEADS_PROTOCOL_OPTIONS if getattr(self, name)]
        if names and self.protocol != "heads":
            option = names[0].replace("_", "-")
            raise UsageError(f"--{option} is for --protocol heads, not {self.protocol}", "add --protocol heads")
        for name in self.heads:
            if name not in (heads := get_args(FrozenHead)):
                raise UsageError(f"unknown head {name}", suggest_nearest(name, heads) or f"use {', '.join(heads)}")
        if min(self.lr, default=1.0) <= 0:
            raise UsageError(f"--lr must be above 0, not {min(self.lr):g}")
        if min(self.weight_decay, default=0.0) < 0:
            raise UsageError(f"--weight-decay must be at least 0, not {min(self.weight_decay):g}")
