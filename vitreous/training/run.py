"""The config of a training run: immutable values that determine the run completely."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from vitreous.config import TaggedUnion, to_builtins
from vitreous.data.augmentation.augment import Augment, ViewAugmentation
from vitreous.data.augmentation.views import VIEW_CLASSES
from vitreous.data.augmentation.volumes import VolumeViews
from vitreous.data.modalities.table import AnyPreprocess
from vitreous.data.options import DataOptions
from vitreous.errors import UsageError
from vitreous.models.config import ModelConfig
from vitreous.models.packed import check_can_pack
from vitreous.nn.sizes import format_size, nearest_divisible_size
from vitreous.objectives.base import ObjectiveConfig, ObjectiveSetting
from vitreous.objectives.supervised import SupervisedConfig
from vitreous.objectives.table import OBJECTIVES
from vitreous.system.machine import DTYPES
from vitreous.system.notebook import format_html_table, list_config_settings

#: rule that selects the parameters with weight decay; `OptimizerConfig` describes each rule
DecayRule = Literal["matrices", "multi-axis", "mmdet", "vitdet", "all"]


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimiser and its hyperparameters. Weight decay is decoupled and multiplied by the current learning rate.

    `decay_on` selects the parameters with weight decay:

    | rule | parameters | used by |
    |---|---|---|
    | `matrices` | weights of linear layers and convolutions | timm, DeiT, MAE's fine-tuning, big_vision |
    | `multi-axis` | as `matrices`, and tokens, positions and prototype lengths | DINO, DINOv2, MAE, ViT-Adapter |
    | `mmdet` | all except norms of backbone and pyramid, and positions | Swin's detection and segmentation code |
    | `vitdet` | all except LayerNorms of the ViT, and absolute positions | detectron2's ViTDet |
    | `all` | all | flax's Adam (arXiv:2010.11929, B.1), detectron2's ViTDet-H |

    `sgd` uses `momentum`; `lamb` is arXiv:1904.00962, `lars` arXiv:1708.03888. `matrix_lr` is the learning rate of
    Muon, which trains the matrices of the blocks and the convolutions; AdamW with `lr` trains the other parameters.
    `layer_decay` d multiplies the learning rate of block i of L by d^(L - i), and of parameters before the blocks by
    d^(L + 1). Each (text, factor) of `rates` multiplies the learning rates of parameters whose name contains the text.
    """

    name: Literal["adamw", "sgd", "lamb", "lars", "muon"] = "adamw"
    lr: float = 1e-3
    matrix_lr: float = 0.02
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9
    weight_decay: float = 0.05
    decay_on: DecayRule = "matrices"
    clip: float | None = 1.0  # limit of the gradient's norm; None: no clipping
    # unit whose norm is limited: the whole gradient, each tensor (DINO), or each submodule of the objective (DINOv2)
    clip_by: Literal["all", "tensor", "part"] = "all"
    layer_decay: float = 1.0
    rates: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning-rate schedule: linear warm-up from 0, then decay to `end` times the base learning rate
    (arXiv:2010.11929, Tables 3 and 4).

    `steps` divides the learning rate by 10 at each of the `milestones`, fractions of the run (arXiv:1912.11370).
    `rsqrt` divides it by the square root of the step, in units of `timescale` (arXiv:2106.04560). In the last
    `cooldown_steps` the learning rate is multiplied by a factor that falls linearly to 0.
    """

    warmup_steps: int = 0
    decay: Literal["cosine", "linear", "constant", "rsqrt", "steps"] = "cosine"
    end: float = 0.0
    milestones: tuple[float, ...] = (0.3, 0.6, 0.9)
    timescale: int = 10_000  # steps
    cooldown_steps: int = 0
    # whether the last warm-up step has the base learning rate, as in numpy.linspace; otherwise the step after it has
    warmup_includes_base: bool = False


@dataclass(frozen=True)
class RampConfig:
    """A hyperparameter that changes from `start` to `end` during a run, such as a teacher's momentum, a temperature or
    the weight decay.

    It reaches `end` after `steps` optimiser steps; 0: at the end of the run. The curve `cosine` begins and ends slowly.
    With `includes_end` the last of these steps has the value `end`, as in numpy.linspace; otherwise the step after it
    has.
    """

    start: float
    end: float
    curve: Literal["cosine", "linear"] = "cosine"
    steps: int = 0
    includes_end: bool = False


@dataclass(frozen=True)
class FineTuneConfig:
    """Which parameters are trained: all, the head and the `last_blocks` (0: only the head), or low-rank adapters.

    LoRA (arXiv:2106.09685) adds an adapter, the product of two matrices of rank `lora_rank`, to every linear layer
    whose name ends in one of `lora_targets`; the head is trained too. The bundle contains standard weights, with the
    products added.
    """

    last_blocks: int | None = None
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = ("qkv",)


@dataclass(frozen=True)
class Run:
    """The complete config of a training run; `config.yaml` in its folder.

    `batch_size` is the number of images of one forward pass over all devices; `accumulate` such batches make an
    optimiser step. `micro_batch` limits the number of images that a device computes at a time, which affects only
    memory and rounding. The run processes exactly epochs x images samples; the last step may be smaller. `reproducible`
    splits each step into `shards` and adds their gradients in order. Results are then bit-identical for any number of
    processes that divides `shards`. Raises UsageError for invalid combinations.
    """

    data: DataOptions
    model: ModelConfig
    preprocess: AnyPreprocess
    objective: Annotated[ObjectiveConfig, TaggedUnion(OBJECTIVES)] = field(default_factory=SupervisedConfig)
    views: Annotated[ViewAugmentation, TaggedUnion(VIEW_CLASSES)] = field(default_factory=Augment)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    # scheduled hyperparameters by name: weight_decay, ema, and those of the objective
    schedules: dict[str, RampConfig] = field(default_factory=dict)
    tune: FineTuneConfig = field(default_factory=FineTuneConfig)
    recipe: str = ""  # name of the recipe that set the defaults of these values
    init: str | None = None  # pre-trained weights to start from: a path or a name; None: random weights
    # image size in pixels for which the weights of `init` were trained, if their file does not contain it
    init_source_size: tuple[int, ...] | None = None
    batch_size: int = 128
    accumulate: int = 1
    epochs: float = 30.0
    ema: float | None = None  # decay of the averaged weights, which are then evaluated and saved
    # the decay at step n is min(ema, (1 + n) / (10 + n)), so that the average forgets the initial weights; else `ema`
    ema_warmup: bool = True
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: bool = False
    # recompute a block's activations in the backward pass: less memory, a third more compute
    recompute: bool = False
    micro_batch: int | None = None  # maximum number of images that a device computes at a time
    shards: int = 1  # shards of a batch that a CPU computes in parallel, each with a share of the cores
    reproducible: bool = False
    # with several processes, each has the whole model (DDP) or a shard of it (FSDP2)
    parallel: Literal["ddp", "fsdp"] = "ddp"
    timeout: float = 300.0  # seconds until processes that wait for each other fail
    skip_steps: int = 0  # maximum number of steps skipped for a non-finite loss or gradient
    device: str = "cpu"
    seed: int = 0
    log_every: int = 20  # steps between two log lines
    evaluate_every: int = 500  # steps between two evaluations
    save_every: int = 500  # steps between two checkpoints
    keep: int = 2  # number of checkpoints that are kept
    # save the weights of the best evaluation on `val` as the bundle instead of the last weights
    keep_best: bool = False
    early_stop: int | None = None  # evaluations without improvement after which the run ends
    # share of the initial k-NN accuracy or RankMe by which features may fall before a self-supervised run ends; 0: any
    drift_guard: float = 0.0
    drift_patience: int = 2  # consecutive evaluations below this limit after which the run ends
    stop_on_collapse: bool = False  # end a self-supervised run at the first collapse warning, with exit code 7

    def __post_init__(self) -> None:
        integers = {
            name: getattr(self, name)
            for name in ("batch_size", "accumulate", "log_every", "evaluate_every", "save_every", "keep", "shards")
        }
        for name, value in integers.items():
            if value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}")
        if (
            self.epochs <= 0
            or self.schedule.warmup_steps < 0
            or self.schedule.cooldown_steps < 0
            or self.skip_steps < 0
        ):
            raise UsageError(
                "epochs must be above 0, and warmup_steps, cooldown_steps and skip_steps must be at least 0, not "
                f"{self.epochs:g}, {self.schedule.warmup_steps}, {self.schedule.cooldown_steps} and {self.skip_steps}"
            )
        if self.optimizer.lr <= 0:
            raise UsageError(f"the learning rate must be above 0, not {self.optimizer.lr}", "use a --lr above 0")
        if self.early_stop is not None and self.early_stop < 1:
            raise UsageError(
                f"early_stop must be at least 1, not {self.early_stop}", "remove early_stop to train to the end"
            )
        if self.stop_on_collapse and not self.objective.ships_features:
            problem = f"--stop-on-collapse requires a self-supervised objective, not {self.objective.name}"
            raise UsageError(problem, "remove --stop-on-collapse, or use --recipe mae, dino or dinov2")
        self.check_drift_guard()
        if self.micro_batch is not None and self.micro_batch < 1:
            raise UsageError(f"micro_batch must be at least 1, not {self.micro_batch}")
        if self.ema is not None and not 0 <= self.ema < 1:
            raise UsageError(f"ema must be at least 0 and below 1, not {self.ema}")
        if self.shards > 1 and (self.compile or (self.draws_in_forward and not self.reproducible)):
            raise UsageError(
                f"{self.shards} shards cannot be combined with compile, dropout or drop_path", "use --shards 1"
            )
        if not self.can_split_batch and (self.shards > 1 or self.micro_batch or self.reproducible):
            cause = f"the objective {self.objective.name}"
            cause = cause if not self.objective.can_split_batch else f"the batch norms of {self.model.name()}"
            raise UsageError(
                f"a batch cannot be split, because its samples depend on each other in {cause}",
                "remove --shards, --micro-batch and --reproducible",
            )
        if self.batch_size < self.objective.least_batch:
            raise UsageError(
                f"batch size {self.batch_size} is too small: {self.objective.name} compares the images of a batch",
                f"use --batch-size {self.objective.least_batch} or more",
            )
        if self.model.generates_images and not self.objective.generates:
            raise UsageError(
                f"{self.objective.name} cannot train a generative model",
                "use --recipe dit or sit, or another --model or --init",
            )
        self.objective.check(self.model, self.data.outputs, self.views)
        if isinstance(self.views, VolumeViews) and self.preprocess.form != "arrays":
            raise UsageError("volume views require volumes or signals", "remove --views.name")
        if self.preprocess.has_buckets:
            self.check_buckets()
        if not self.preprocess.stacks or getattr(self.views, "fewest_tokens", 0):
            self.check_own_aspect()
        batches = -(-self.data.images // self.batch_size)
        if self.accumulate > batches:
            raise UsageError(
                f"--accumulate {self.accumulate} is above the {batches} batches of an epoch",
                f"use --accumulate {batches} or a smaller --batch-size",
            )

    def _repr_html_(self) -> str:
        title = f"{self.model.name()} on {self.data.source}, {self.steps:,} steps"
        return format_html_table(list_config_settings(to_builtins(self)), ("setting", "value"), title)

    def check_drift_guard(self) -> None:
        """Raise UsageError for invalid values of the drift guard, and for an objective that does not train features."""
        if not 0 <= self.drift_guard < 1 or self.drift_patience < 1:
            values = f"{self.drift_guard:g} and {self.drift_patience}"
            raise UsageError(
                f"drift_guard must be at least 0 and below 1, and drift_patience at least 1, not {values}",
                "use --drift-guard 0.1, or 0 for none",
            )
        if self.drift_guard and not self.objective.ships_features:
            problem = f"--drift-guard requires a self-supervised objective, not {self.objective.name}"
            raise UsageError(problem, "remove --drift-guard, or use --early-stop")

    def check_buckets(self) -> None:
        """Raise UsageError for options that cannot be combined with buckets of image sizes."""
        if not self.objective.generates:
            raise UsageError(
                f"buckets require a generative model, which {self.objective.name} does not train",
                "remove --buckets, or use --recipe sit or dit",
            )
        if self.reproducible or self.data.sampling != "even" or self.data.repeats > 1:
            option = "--reproducible" if self.reproducible else "another --sampling than even"
            raise UsageError(f"{option} cannot be combined with buckets", "remove one of them")
        for size in self.preprocess.buckets:
            if any(length % patch for length, patch in zip(size, self.model.patch, strict=True)):
                raise UsageError(
                    f"bucket size {format_size(size)} is not divisible by patch size {format_size(self.model.patch)}",
                    f"use {'x'.join(map(str, nearest_divisible_size(size, self.model.patch)))}",
                )

    def check_own_aspect(self) -> None:
        """Raise UsageError for options that cannot be combined with images at native aspect ratio, whose sizes
        differ."""
        views, tokens = self.views, self.max_image_tokens
        if not (self.objective.takes_own_aspect and isinstance(views, Augment)):
            hint = "remove --native-aspect, or train a classifier"
            raise UsageError(f"{self.objective.name} requires images of one size", hint)
        check_can_pack(self.model)
        self.preprocess.check_patch(self.model.patch)
        if views.fewest_tokens > tokens:
            problem = f"views.fewest_tokens {views.fewest_tokens} is above the maximum of {tokens} tokens per image"
            raise UsageError(problem, "use --native-aspect --tokens LOW-HIGH")
        conflicts = {
            "--mixup and --cutmix": bool(views.mixup or views.cutmix) and "--mixup 0 --cutmix 0",
            "a simple crop": views.crop_style == "simple" and "--views.crop-style torchvision",
            "stochastic depth": self.model.regularization.drop_path > 0 and "--drop-path 0",
            "progressive resolution": getattr(self.objective, "progressive", 1.0) < 1
            and "--progressive 1, and --tokens LOW-HIGH for several resolutions",
            "--compile": self.compile and "--no-compile",
        }
        for name, hint in conflicts.items():
            if hint:
                raise UsageError(f"{name} cannot be combined with --native-aspect", f"use {hint}")

    def objective_setting(self, multilabel: bool) -> ObjectiveSetting:
        """Return the values for which the run's objective is built, such as seed, classes and views. `multilabel`:
        whether images have several labels."""
        normalisation, repeats = (self.preprocess.mean, self.preprocess.std), self.data.repeats
        dtype = DTYPES[self.precision]
        return ObjectiveSetting(
            self.seed,
            self.data.classes,
            self.data.targets,
            multilabel=multilabel,
            views=self.views,
            repeats=repeats,
            dtype=dtype,
            normalisation=normalisation,
            tokens=self.mean_tokens,
        )

    @property
    def can_split_batch(self) -> bool:
        """Whether a batch may be computed in chunks, because its samples are independent of each other."""
        return self.objective.can_split_batch and not self.model.batch_norm

    @property
    def draws_in_forward(self) -> bool:
        """Whether a forward pass in training draws random numbers, for example for dropout or stochastic depth."""
        noise = self.model.regularization
        return bool(noise.dropout or noise.drop_path or self.tune.lora_dropout or self.objective.draws_in_forward)

    @property
    def max_image_tokens(self) -> int:
        """Maximum number of patches of an image at native aspect ratio; 0 if all images have the model's size."""
        return 0 if self.preprocess.stacks else self.preprocess.count_tokens(self.model.grid)

    @property
    def mean_tokens(self) -> int:
        """Mean of the smallest and largest token limits of training images at native aspect ratio; 0 if all images have
        the model's size."""
        max_tokens = self.max_image_tokens
        return (getattr(self.views, "fewest_tokens", 0) or max_tokens) + max_tokens >> 1

    @property
    def total(self) -> int:
        """Number of training samples of the whole run."""
        return max(1, round(self.epochs * self.data.images))

    @property
    def step_size(self) -> int:
        """Number of training samples of one optimiser step."""
        return self.batch_size * self.accumulate

    @property
    def steps(self) -> int:
        """Number of optimiser steps of the whole run."""
        return -(-self.total // self.step_size)
