"""The options of `train`, defined once. Unset options (None) are derived from the data, the model and the machine.

The fields of `TrainOptions` define `vitreous train --help`, the keywords of `vitreous.train` (`vitreous/keywords.py`),
the fields of `Run` that options set, and the suggestions for option names of other libraries.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import Positional, Suppress, arg

from vitreous.config import OptionAliases, OptionalPath, get_field_markers
from vitreous.errors import UsageError
from vitreous.weights.options import WeightsOptions

INIT_FROM_SCRATCH = "none"  # value of --init that disables initial weights


@dataclass(frozen=True)
class RunField:
    """Marks an option, by `Annotated[type, RunField(path)]`, as the value of the field of `Run` at a dotted path.
    Options with their default value do not set the field. `none` is the option value that sets the field to None."""

    path: str
    none: Any = None


@dataclass(frozen=True)
class TrainOptions(WeightsOptions):
    """Train a Vision Transformer, evaluate it, and save it.

    Example: vitreous train photos/ --model ViT-S/16 --epochs 100 --out runs/photos

    Any other field of config.yaml can be set by its path: --optimizer.betas 0.9 0.95
    """

    COMMON: ClassVar[tuple[str, ...]] = (
        "model",
        "init",
        "recipe",
        "image_size",
        "epochs",
        "batch_size",
        "lr",
        "out",
        "resume",
        "dry_run",
    )
    SECTIONS: ClassVar[dict[str, str]] = {
        "recipe": "Model and recipe",
        "out": "Run folder",
        "image_size": "Model input",
        "epochs": "Length and batch size",
        "optimizer": "Optimiser and schedule",
        "last_blocks": "Fine-tuning",
        "loss": "Loss and sampling",
        "label_smoothing": "Regularisation and augmentation",
        "bad_images": "Data",
        "device": "Device and processes",
        "lr_grid": "Learning rate search",
        "log_every": "Logging, evaluation and checkpoints",
    }

    data: Annotated[Positional[str], arg(metavar="DATA")] = ""
    """`digits`, a folder with train/, val/, test/ of CLASS/*, a folder of CLASS/*, or a CSV file: path[,label][,split]
    or path,VALUE...[,split]. With --resume: a run folder, or nothing."""
    _: KW_ONLY
    recipe: str | None = None
    """Name of a recipe; `vitreous recipes` lists them (default: chosen from the data)."""
    model: str | None = None
    """Model name: ViT-B/16, R50+ViT-B/16, BiT-R50x1, vit_base_patch16_224, ViT-WIDTHxDEPTH/PATCH; see `vitreous models`
    (default: from the recipe)."""
    init: Annotated[
        OptionalPath,
        RunField("init", none=INIT_FROM_SCRATCH),
        OptionAliases("pretrained", "weights", "initial_checkpoint"),
    ] = None
    """Initial weights: a run folder, a bundle, a file or folder of a supported format, a name listed by `vitreous
    models --weights`, hf:org/name or timm:name; `none` trains from scratch (default: published weights for fewer than
    2,000 photographs if they are cached or can be downloaded, else none)."""
    out: Annotated[OptionalPath, OptionAliases("output_dir", "output", "project")] = None
    """Run folder to create (default: runs/DATE-MODEL-DATA)."""
    resume: Annotated[bool, OptionAliases("checkpoint")] = False
    """Continue a run: `train --resume runs/a` is short for --resume --out runs/a (default: runs/latest)."""
    override: bool = False
    """With --resume: allow settings that differ from those of the run."""
    allow_data_change: bool = False
    """With --resume: allow a dataset that has changed since the run started."""
    config: OptionalPath = None
    """Read all values from this config.yaml; options on the command line take precedence."""
    dry_run: bool = False
    """Print the plan (model, memory, time) without training."""
    world: int | None = None
    """With --dry-run: estimate for this many devices of the type --device (a100, h100, h200, b200, mi300x), from spec
    sheets (default: this machine, measured with a few steps)."""
    images: int | None = None
    """With --world: number of training images to assume (default: the dataset's)."""
    image_size: Annotated[int | None, OptionAliases("img_size", "imgsz", "input_size")] = None
    """Height and width of the model input in pixels (default: from the recipe, the weights or the model name)."""
    patch_size: int | None = None
    """Height and width of a patch in pixels (default: from the model name)."""
    native_aspect: bool = False
    """Keep the aspect ratio of each image instead of cropping a square; each image has about --tokens patches (NaViT).
    The model is evaluated and used in the same way."""
    tokens: Annotated[str | None, arg(metavar="N|LOW-HIGH")] = None
    """With --native-aspect: maximum number of patches per image. A range such as 64-256 draws a number for each
    training image (default: as many as the model's square input has)."""
    frames: int | None = None
    """Frames per clip (default: from the weights, else 8)."""
    stride: int | None = None
    """Frames from one sampled frame to the next; 0 spreads the frames over the whole clip (default: from the weights,
    else 0)."""
    buckets: Annotated[tuple[str, ...] | None, arg(metavar="[SIZE...]")] = None
    """Train a generative model at several sizes; each image is assigned to the nearest: 64x48, for clips 8x64x48.
    Without values: sizes chosen from the data, which may mix clips and images (default: one size)."""
    epochs: Annotated[float | None, RunField("epochs"), OptionAliases("num_epochs", "num_train_epochs")] = None
    """Passes over the training images (default: from the recipe)."""
    steps: int | None = None
    """Optimiser steps, instead of --epochs."""
    batch_size: Annotated[int | None, RunField("batch_size"), OptionAliases("batch")] = None
    """Images per forward pass, over all devices (default: from the recipe)."""
    accumulate: Annotated[int | None, RunField("accumulate")] = None
    """Batches per optimiser step: gradient accumulation (default: from the recipe)."""
    micro_batch: str | None = None
    """Images that a device computes at a time, or `auto` for as many as its memory holds. The batch size and the
    schedule do not change (default: the whole batch)."""
    recompute: Annotated[bool, RunField("recompute")] = False
    """Gradient checkpointing: less memory for about a third more compute."""
    optimizer: Annotated[
        Literal["adamw", "sgd", "lamb", "lars", "muon"] | None, RunField("optimizer.name"), OptionAliases("opt")
    ] = None
    """Optimiser; muon applies Muon to the weight matrices of the blocks and AdamW to all other parameters (default:
    from the recipe)."""
    lr: Annotated[
        float | None, RunField("optimizer.lr"), OptionAliases("learning_rate", "lr0"), arg(aliases=["--learning-rate"])
    ] = None
    """Peak learning rate (default: from the recipe)."""
    weight_decay: Annotated[float | None, RunField("optimizer.weight_decay")] = None
    """Decoupled weight decay of weight matrices, multiplied by the learning rate (default: from the recipe)."""
    warmup_steps: Annotated[int | None, RunField("schedule.warmup_steps"), OptionAliases("warmup")] = None
    """Steps of linear warm-up (default: from the recipe)."""
    decay: Annotated[Literal["cosine", "linear", "constant", "rsqrt", "steps"] | None, RunField("schedule.decay")] = (
        None
    )
    """Learning rate schedule after the warm-up (default: from the recipe)."""
    cooldown_steps: Annotated[int | None, RunField("schedule.cooldown_steps")] = None
    """Steps at the end during which the learning rate is also multiplied by a factor that falls linearly to 0 (default:
    from the recipe)."""
    layer_decay: Annotated[float | None, RunField("optimizer.layer_decay")] = None
    """Factor of the learning rate from each block to the block before it (default: from the recipe)."""
    clip_grad: Annotated[float | None, RunField("optimizer.clip")] = None
    """Maximum gradient norm (default: from the recipe)."""
    ema: Annotated[float | None, RunField("ema", none=0)] = None
    """Decay of the exponential moving average of the weights, which is evaluated and saved; 0 for none (default: from
    the recipe)."""
    ema_warmup: Annotated[bool | None, RunField("ema_warmup")] = None
    """Use a smaller decay in the first steps, so that the average forgets the initial weights (default: from the
    recipe; on if the run is shorter than half of the recipe's)."""
    last_blocks: Annotated[int | None, RunField("tune.last_blocks")] = None
    """Train only the head and the last K blocks; 0 freezes the whole backbone (default: all blocks)."""
    lora: Annotated[int | None, RunField("tune.lora_rank")] = None
    """Train only LoRA adapters of this rank and the head, or the heads of a self-supervised objective; needs the extra
    lora (default: no adapters)."""
    teacher: Annotated[OptionalPath, RunField("objective.teacher")] = None
    """Distillation: weights of the frozen teacher, as for --init; with --recipe distil, distil-features or dinov2
    (default: none)."""
    loss: Annotated[
        Literal["softmax", "sigmoid", "binary", "mse", "l1", "huber"] | None, RunField("objective.loss")
    ] = None
    """sigmoid: an independent binary loss for each class, for multi-label data. mse, l1, huber: regression (default:
    from the recipe and the labels)."""
    class_weights: Literal["even", "balanced"] | None = None
    """balanced: weight the loss by inverse class frequency; for segmentation, by pixels (default: from the recipe)."""
    sampling: Annotated[Literal["even", "balanced", "repeat-factor"] | None, RunField("data.sampling")] = None
    """balanced: sample all classes equally often. repeat-factor: repeat images of rare classes as in LVIS (default:
    from the recipe)."""
    label_smoothing: Annotated[float | None, RunField("objective.smoothing"), OptionAliases("smoothing")] = None
    """Share of the target probability that is spread over all classes (default: from the recipe)."""
    drop_path: Annotated[float | None, RunField("model.regularization.drop_path")] = None
    """Stochastic depth rate of the last block (default: from the recipe)."""
    dropout: Annotated[float | None, RunField("model.regularization.dropout")] = None
    """Dropout rate, placed as in the ViT paper (default: from the recipe)."""
    patch_dropout: Annotated[float | None, RunField("objective.patch_dropout")] = None
    """Share of the patches dropped in the first part of training: faster, and a regulariser (default: from the
    recipe)."""
    progressive: Annotated[float | None, RunField("objective.progressive")] = None
    """Size of the first training images relative to the model input; it grows to 1 during training, which is faster
    (default: from the recipe)."""
    mixup: Annotated[float | None, RunField("views.mixup")] = None
    """MixUp alpha; 0 for none (default: from the recipe)."""
    cutmix: Annotated[float | None, RunField("views.cutmix")] = None
    """CutMix alpha; 0 for none (default: from the recipe)."""
    rand_augment: Annotated[int | None, RunField("views.rand_layers")] = None
    """RandAugment operations per image; 0 for none (default: from the recipe)."""
    erase: Annotated[float | None, RunField("views.erase")] = None
    """Probability of random erasing (default: from the recipe)."""
    bad_images: Literal["stop", "skip"] = "stop"
    """Stop at unreadable images, or skip them."""
    workers: Annotated[int | None, RunField("data.workers"), OptionAliases("num_workers")] = None
    """Processes that decode images (default: chosen from decoding cost, model and cores)."""
    seed: Annotated[int | None, RunField("seed")] = None
    """Seed of weights, data order and augmentation (default: 0)."""
    split_seed: Annotated[int | None, RunField("data.split_seed")] = None
    """Seed of the validation split if the dataset has none (default: 0)."""
    group_by: Annotated[str | None, RunField("data.group_by"), arg(metavar="COLUMN|REGEX")] = None
    """Keep groups of images in one split: a column of a CSV file (a column named `group` is used without this option),
    or a regular expression for paths, such as 'patient(\\d+)'."""
    targets: Annotated[tuple[str, ...] | None, arg(metavar="COLUMN...")] = None
    """Regression: numeric columns of a CSV or Parquet file to predict (default: all numeric columns if the file has no
    label column)."""
    axes: Annotated[Literal[1, 2, 3] | None, RunField("data.axes")] = None
    """How to read .npy files and TIFF stacks that are ambiguous: 1 signals, 2 images, 3 volumes (default: from file
    names and shapes)."""
    ignore_index: Annotated[int | None, RunField("data.ignore_index")] = None
    """Value of ignored pixels in index masks, in addition to 255 (default: 255 only)."""
    exclude: Annotated[OptionalPath, RunField("data.exclude")] = None
    """List of training images to exclude, as written by `vitreous data dedup`."""
    exact: Annotated[bool, RunField("data.exact")] = False
    """Decode JPEG files at full resolution, even if a crop is downscaled by more than two; slower."""
    device: str | None = None
    """auto, cpu, cuda, cuda:1 or mps (default: auto)."""
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp16"] | None, OptionAliases("amp")] = None
    """Compute dtype; weights are kept in fp32 (default: auto, which is bf16 if the device supports it)."""
    compile: Annotated[bool | None, RunField("compile")] = None
    """Compile the blocks with torch.compile (default: on GPUs, if the run is long enough to benefit)."""
    shards: Annotated[int | None, RunField("shards")] = None
    """Shards of a batch that are computed in parallel on a CPU (default: one per core, at most 8)."""
    reproducible: Annotated[bool, RunField("reproducible")] = False
    """Bit-identical results with 1, 2 or 4 processes, also if the number changes on --resume; slower."""
    timeout: Annotated[float | None, RunField("timeout")] = None
    """Seconds that processes wait for each other before the run fails (default: 300)."""
    parallel: Annotated[Literal["ddp", "fsdp"] | None, RunField("parallel")] = None
    """Under torchrun: ddp replicates the model in each process, fsdp shards it (default: ddp)."""
    skip_steps: Annotated[int | None, RunField("skip_steps")] = None
    """Number of non-finite steps to skip before the run stops (default: 0)."""
    lr_grid: tuple[float, ...] | None = None
    """Select the learning rate on held-out training images, then train on all of them. Without values: the grid of the
    ViT paper."""
    ray: str | None = None
    """With --lr-grid: Ray cluster that runs the trials: `auto`, HOST:PORT, or `local` to start one here. All its
    machines need access to --out."""
    log_every: Annotated[int | None, RunField("log_every")] = None
    """Steps between two log lines (default: from the length of the run)."""
    evaluate_every: Annotated[int | None, RunField("evaluate_every")] = None
    """Steps between two evaluations on the validation split (default: a sixth of the run, or a twentieth with
    --keep-best or --early-stop)."""
    save_every: Annotated[int | None, RunField("save_every")] = None
    """Steps between two checkpoints (default: a sixth of the run)."""
    keep_best: Annotated[bool, RunField("keep_best")] = False
    """Save the weights of the best evaluation on the validation split, by its first metric, and evaluate 20 times
    (default: on for labelled data with a validation split, with 6 evaluations)."""
    keep_last: bool = False
    """Save the weights of the last step, even if an earlier evaluation was better."""
    early_stop: Annotated[int | None, RunField("early_stop")] = None
    """Stop after this many evaluations without a new best (default: train to the end)."""
    drift_guard: Annotated[float | None, RunField("drift_guard")] = None
    """Self-supervised objectives: stop and keep the best checkpoint if k-NN accuracy, or RankMe without labels, falls
    by more than this share of its initial value; 0 for none (default: 0.1 with --init, none from scratch)."""
    drift_patience: Annotated[int | None, RunField("drift_patience")] = None
    """Consecutive evaluations below the limit of --drift-guard after which the run stops (default: 2)."""
    stop_on_collapse: Annotated[bool, RunField("stop_on_collapse")] = False
    """Self-supervised objectives: at the first sign of representation collapse, save a checkpoint and stop with exit
    code 7 (default: only warn)."""
    keep: Annotated[int | None, RunField("keep")] = None
    """Number of checkpoints to keep (default: 2)."""
    log_to: tuple[Literal["tensorboard", "wandb", "mlflow", "none"], ...] = ()
    """Trackers that receive metrics, config, images and model, see docs/guides/trackers.md. Each needs the extra of its
    name. A resumed run continues with its trackers; `none` turns them off."""
    log_timeout: float = 10.0
    """Seconds to wait for trackers at the end of the run."""
    live: bool = False
    """Draw curves in the terminal during training; without a terminal, print one line per evaluation."""
    settings: Suppress[dict[str, list[str]]] = field(default_factory=dict)
    """Any other field of the run by its path: `--optimizer.betas 0.9 0.95`."""

    def collect_run_fields(self) -> dict[str, Any]:
        """Return the values of the fields of `Run` that the options set, by their dotted paths."""
        paths = get_run_field_options()
        changed = {name: getattr(self, name) for name in paths if getattr(self, name) != getattr(TrainOptions, name)}
        return {paths[name].path: None if value == paths[name].none else value for name, value in changed.items()}

    @property
    def sets_teacher(self) -> bool:
        """Whether the options set a frozen teacher."""
        return self.teacher is not None or "objective.teacher" in self.settings

    def require_data_source(self) -> None:
        """Raise UsageError if neither a dataset nor a run to resume is set."""
        if not self.data and not self.resume:
            raise UsageError("no dataset is given", "give DATA: `digits`, a folder of images or a CSV file")


@cache
def get_run_field_options() -> dict[str, RunField]:
    """Return the options that set a field of `Run`, by name, with their `RunField`."""
    weights_fields = {"resize": RunField("model.positions.resize"), "source_size": RunField("init_source_size")}
    return weights_fields | get_field_markers(TrainOptions, RunField)
