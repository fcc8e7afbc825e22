"""Options of `evaluate` and `inspect`, each stated once: fields of the command line and keywords in Python. Needs no
PyTorch."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

from vitreous.config import OptionalPath
from vitreous.errors import UsageError, nearest

#: how `linear` fits its head: at the optimum, or by the steps of a publication
Probe = Literal["regression", "mae", "dino", "dinov2"]


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """What `vitreous inspect` shows, and of which images."""

    figures: tuple[str, ...] = ()
    """Which figures."""
    all: bool = False
    """Every figure that the model has."""
    data: str | None = None
    """A data set to take images from (default: the run's own)."""
    split: Literal["train", "val", "test"] | None = None
    """Which part of it (default: val)."""
    count: int = 128
    """Images that a mean is taken over; the paper's distance has 128."""
    image_size: tuple[int, ...] = ()
    """Pixels along a side, or height and width (default: the model's own)."""
    layers: tuple[int, ...] = ()
    """Blocks to look at, from 0, or from -1 backwards (default: all, or the last where only one is shown)."""
    heads: tuple[int, ...] = ()
    """Heads to show, from 0 (default: all)."""
    fusion: Literal["mean", "max", "min"] = "mean"
    """How rollout makes one map of all heads."""
    residual: float = 0.5
    """Share of the identity in each block's map for rollout; 0 leaves the residual path out."""
    discard: float = 0.0
    """Share of the smallest weights that rollout sets to zero in each block."""
    mass: float = 0.6
    """Share of a head's attention that segments keep."""
    of_class: str | None = None
    """The class whose gradient is taken (default: the one predicted)."""
    other: OptionalPath = None
    """Another model, to compare layers with."""
    batch_sizes: tuple[int, ...] = ()
    """Batches that cost tries (default: powers of two, as long as memory holds them)."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Numbers the model computes with; attention is always looked at in float32."""
    batch_size: int = 8
    """Images computed at a time."""
    seed: int = 0
    """Which images of the data are taken."""


@dataclass(frozen=True, kw_only=True)
class FeatureOptions:
    """What becomes of the features that are computed on the way."""

    cache: bool = True
    """Keep features in XDG_CACHE_HOME/vitreous/features for the next time."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(FeatureOptions):
    """What an evaluation does beside judging the head."""

    calibrate: bool = False
    """Fit a temperature to the validation images, and store it in the bundle: later answers are divided by it."""
    abstain: float | None = None
    """Tell what is gained by not answering where the highest probability is below this, above 0 to 1."""
    outliers: OptionalPath = None
    """Write a table to this file: path and score of each image, from the one least like the training images on."""
    against: OptionalPath = None
    """Other data, with or without labels: tell how well they are known from the judged images by that score."""
    suspects: OptionalPath = None
    """Write a table to this file: images whose label is probably wrong, the surest first."""
    boundary: bool = False
    """Judge class maps by the F-measure of their boundaries too: some ten milliseconds a class of an image."""
    tiles: bool = False
    """Look for objects in large images at their own resolution, by tiles that overlap."""
    report: OptionalPath = None
    """Where the page with all of it goes (default: report.html in the run's folder)."""


@dataclass(frozen=True)
class ProtocolOptions(FeatureOptions):
    """How to judge by a protocol instead of the head. Raises UsageError for values out of range and options that do not
    go together."""

    protocol: str
    _: KW_ONLY
    k: tuple[int, ...] = ()
    """Neighbours of knn (default: 10 20 100 200, as far as there are so many images)."""
    temperature: float = 0.07
    """Of knn: a neighbour of cosine s counts exp(s / temperature)."""
    shots: tuple[int, ...] = ()
    """Training images a class of fewshot (default: 1 5 10 25, as far as some class has so many)."""
    seeds: int = 3
    """Draws of those images."""
    l2: float | None = None
    """Penalty on the weights of fewshot (default: 1024), or of linear and vtab (default: the best on training images
    held out)."""
    labels: OptionalPath = None
    """File of real (real.json) or of objectnet (JSON or CSV: class, ImageNet's numbers)."""
    seed: int = 0
    """Which training images linear holds out, and the first draw of fewshot."""
    probe: Probe = "regression"
    """How linear fits its head: logistic regression, or by the steps that MAE, DINO or DINOv2 was published with."""
    epochs: float | None = None
    """Passes of a published probe over the training images (default: mae 90, of wide models 50; dino 100)."""
    steps: int | None = None
    """The same in steps (default: dinov2 12,500, at most 100 passes)."""
    probe_batch: int | None = None
    """Images of such a step, to which rates are in proportion (default: mae 16,384, others 1,024, at most all)."""
    probe_augment: bool = True
    """Crop and mirror its training images at random, as published; small or lettered images lose much by it."""

    def __post_init__(self) -> None:
        self.check_probe()
        if self.temperature <= 0 or (self.l2 is not None and self.l2 <= 0):
            raise UsageError("--temperature and --l2 are above 0")
        if min((*self.k, *self.shots, self.seeds)) < 1:
            raise UsageError("--k, --shots and --seeds are at least 1")

    def check_probe(self) -> None:
        """Raise UsageError for an unknown probe, and for options that do not go with the one asked for."""
        if self.probe not in (probes := get_args(Probe)):
            hint = nearest(self.probe, probes) or f"there are {', '.join(probes)}"
            raise UsageError(f"no probe {self.probe}", hint)
        named = [name for name in ("epochs", "steps", "probe_batch") if getattr(self, name) is not None]
        if self.probe == "regression":
            named += [] if self.probe_augment else ["no_probe_augment"]
            if named:
                problem = f"--{named[0].replace('_', '-')} is about heads that are trained by steps"
                raise UsageError(problem, "add --probe mae, dino or dinov2, or leave it out")
            return
        if self.protocol != "linear":
            raise UsageError(f"--probe {self.probe} is about --protocol linear, not {self.protocol}", "add it")
        if self.l2 is not None:
            raise UsageError(f"--probe {self.probe} has no penalty", "leave --l2 out, or --probe")
        if self.epochs is not None and self.steps is not None:
            raise UsageError("--epochs and --steps say the same thing", "use one of them")
        if (self.epochs is not None and self.epochs <= 0) or (self.steps is not None and self.steps < 1):
            raise UsageError("--epochs is above 0, --steps at least 1")
        if self.probe_batch is not None and self.probe_batch < 2:
            raise UsageError(f"--probe-batch is at least 2, not {self.probe_batch}")
