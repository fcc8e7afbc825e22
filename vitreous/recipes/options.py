"""The options of `train`, each stated once; an unset one (None) is derived from the data, the model and the machine.

`vitreous train --help`, the keywords of `vitreous.train` (`vitreous/keywords.py`), the fields of `Run` that options set
and the suggestions for names of other libraries are all read from the fields of `TrainOptions`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from tyro.conf import Positional, Suppress, arg

from vitreous.config import OptionalPath, Synonyms, marks_of
from vitreous.errors import UsageError
from vitreous.weights.options import WeightsOptions

FROM_SCRATCH = "none"  # the value of --init that refuses weights


@dataclass(frozen=True)
class RunField:
    """Marks an option, by `Annotated[type, RunField(path)]`, as the value of the field of `Run` at a dotted path, if it
    is set: if it is not its default. `none` is the value that stands for None there."""

    path: str
    none: Any = None


@dataclass(frozen=True)
class TrainOptions(WeightsOptions):
    """Train a Vision Transformer, judge it, and save it.

    Example: vitreous train photos/ --model ViT-S/16 --epochs 100 --out runs/photos

    Every other value of the run can be set by its path, as config.yaml has it: --optimizer.betas 0.9 0.95
    """

    data: Annotated[Positional[str], arg(metavar="DATA")] = ""
    """`digits`, a folder with train/, val/, test/ of CLASS/*, a folder of CLASS/*, or a CSV file path[,label][,split]
    or path,VALUE...[,split]; with --resume a run folder, or none: a run knows its data."""
    _: KW_ONLY
    recipe: str | None = None
    """A recipe by name; `vitreous recipes` lists them (default: one that suits the data)."""
    model: str | None = None
    """ViT-B/16, R50+ViT-B/16, BiT-R50x1, vit_base_patch16_224, ViT-WIDTHxDEPTH/PATCH; see `vitreous models`
    (default: from the recipe)."""
    init: Annotated[
        OptionalPath, RunField("init", none=FROM_SCRATCH), Synonyms("pretrained", "weights", "initial_checkpoint")
    ] = None
    """Weights to start from: a run folder, a bundle, a file or folder of a known format, a name of
    `vitreous models --weights`, hf:org/name, timm:name; `none`: from scratch (default: published weights for fewer than
    2,000 photographs, if they are in the cache or can be downloaded, else none)."""
    out: Annotated[OptionalPath, Synonyms("output_dir", "output", "project")] = None
    """The run folder to make (default: runs/DATE-MODEL-DATA)."""
    resume: Annotated[bool, Synonyms("checkpoint")] = False
    """Continue a run, as in `train --resume runs/a`, which is short for --resume --out runs/a (default:
    runs/latest)."""
    override: bool = False
    """With --resume: go on with other settings than the run began with."""
    allow_data_change: bool = False
    """With --resume: go on though the data are not what they were."""
    config: OptionalPath = None
    """A config.yaml to take every value from; options given beside it win."""
    dry_run: bool = False
    """Print the plan (model, memory, time) and train nothing."""
    world: int | None = None
    """With --dry-run: plan for so many devices of the kind --device (a100, h100, h200, b200, mi300x), by count and by
    data sheets (default: for this machine, by a few timed steps)."""
    images: int | None = None
    """With --world: training images that the data stand for (default: as many as they are)."""
    image_size: Annotated[int | None, Synonyms("img_size", "imgsz", "input_size")] = None
    """Side of the model's input, pixels (default: from the recipe, the weights or the model's name)."""
    patch_size: int | None = None
    """Side of a patch, pixels (default: from the model's name)."""
    native_aspect: bool = False
    """Keep every picture's own aspect ratio instead of cutting squares: each has about --tokens patches, and the model
    is judged and used so (NaViT)."""
    tokens: Annotated[str | None, arg(metavar="N|LOW-HIGH")] = None
    """With --native-aspect: patches of a picture, at most; 64-256: in training any number between, drawn for each
    picture (default: as many as the model's own square has)."""
    frames: int | None = None
    """Frames of a clip that the model sees (default: from the weights, else 8)."""
    stride: int | None = None
    """Frames of a clip from one that is seen to the next; 0: they are spread over the whole clip (default: from the
    weights, else 0)."""
    buckets: Annotated[tuple[str, ...] | None, arg(metavar="[SIZE...]")] = None
    """Train a model that makes images at several sizes, each image at the nearest: 64x48, of clips 8x64x48; alone:
    sizes that suit the data. A folder may hold clips and pictures (default: one size)."""
    epochs: Annotated[float | None, RunField("epochs"), Synonyms("num_epochs", "num_train_epochs")] = None
    """Passes over the training images (default: from the recipe)."""
    steps: int | None = None
    """Optimiser steps, instead of --epochs."""
    batch_size: Annotated[int | None, RunField("batch_size"), Synonyms("batch")] = None
    """Images of one forward pass, over all devices (default: from the recipe)."""
    accumulate: Annotated[int | None, RunField("accumulate")] = None
    """Batches to an optimiser step (default: from the recipe)."""
    micro_batch: str | None = None
    """Images that a device computes at a time, or `auto` for what its memory holds; batch and schedule stay (default:
    all at once)."""
    recompute: Annotated[bool, RunField("recompute")] = False
    """Gradient checkpointing: less memory, a third more work."""
    optimizer: Annotated[
        Literal["adamw", "sgd", "lamb", "lars", "muon"] | None, RunField("optimizer.name"), Synonyms("opt")
    ] = None
    """Muon moves the matrices of the blocks, and AdamW the rest (default: from the recipe)."""
    lr: Annotated[
        float | None, RunField("optimizer.lr"), Synonyms("learning_rate", "lr0"), arg(aliases=["--learning-rate"])
    ] = None
    """Peak learning rate (default: from the recipe)."""
    weight_decay: Annotated[float | None, RunField("optimizer.weight_decay")] = None
    """Decoupled weight decay of matrices, multiplied by the learning rate (default: from the recipe)."""
    warmup_steps: Annotated[int | None, RunField("schedule.warmup_steps"), Synonyms("warmup")] = None
    """Steps of linear warm-up (default: from the recipe)."""
    decay: Annotated[Literal["cosine", "linear", "constant", "rsqrt", "steps"] | None, RunField("schedule.decay")] = (
        None
    )
    """Shape of the learning rate after the warm-up (default: from the recipe)."""
    cooldown_steps: Annotated[int | None, RunField("schedule.cooldown_steps")] = None
    """Steps at the end in which the learning rate is also multiplied by a line that falls to 0 (default: from the
    recipe)."""
    layer_decay: Annotated[float | None, RunField("optimizer.layer_decay")] = None
    """Factor of the learning rate from one block to the one before it (default: from the recipe)."""
    last_blocks: Annotated[int | None, RunField("tune.last_blocks")] = None
    """Train the head and the last K blocks alone; 0: a frozen backbone (default: all blocks)."""
    lora: Annotated[int | None, RunField("tune.lora_rank")] = None
    """Train adapters of this rank (LoRA) and the head alone; needs the extra lora (default: no adapters)."""
    loss: Annotated[
        Literal["softmax", "sigmoid", "binary", "mse", "l1", "huber"] | None, RunField("objective.loss")
    ] = None
    """sigmoid: each class a question of its own, for images with several labels; mse, l1, huber: of values, which
    regression learns (default: from the recipe and the labels)."""
    class_weights: Literal["even", "balanced"] | None = None
    """balanced: rare classes weigh more in the loss, in segmentation classes of few pixels (default: from the
    recipe)."""
    sampling: Annotated[Literal["even", "balanced", "repeat-factor"] | None, RunField("data.sampling")] = None
    """balanced: every class is shown as often as any other; repeat-factor: images of rare classes are shown more often,
    as LVIS has it (default: from the recipe)."""
    clip_grad: Annotated[float | None, RunField("optimizer.clip")] = None
    """Largest norm of the gradient (default: from the recipe)."""
    ema: Annotated[float | None, RunField("ema", none=0)] = None
    """Decay of the averaged weights, which are then judged and saved; 0 for none (default: from the recipe)."""
    ema_warmup: Annotated[bool | None, RunField("ema_warmup")] = None
    """Use less of --ema in the first steps, so that the average forgets the initial weights (default: from the recipe;
    yes in runs of less than half of its steps)."""
    label_smoothing: Annotated[float | None, RunField("objective.smoothing"), Synonyms("smoothing")] = None
    """Share of the target given to all classes alike (default: from the recipe)."""
    drop_path: Annotated[float | None, RunField("model.regularization.drop_path")] = None
    """Stochastic depth of the last block (default: from the recipe)."""
    dropout: Annotated[float | None, RunField("model.regularization.dropout")] = None
    """Dropout, as the paper places it (default: from the recipe)."""
    patch_dropout: Annotated[float | None, RunField("objective.patch_dropout")] = None
    """Share of the patches left out in the first part of the training: faster, and a regulariser (default: from the
    recipe)."""
    progressive: Annotated[float | None, RunField("objective.progressive")] = None
    """Side of the first pictures as a share of the model's; they grow to it: faster (default: from the recipe)."""
    mixup: Annotated[float | None, RunField("views.mixup")] = None
    """Alpha of MixUp; 0 for none (default: from the recipe)."""
    cutmix: Annotated[float | None, RunField("views.cutmix")] = None
    """Alpha of CutMix; 0 for none (default: from the recipe)."""
    rand_augment: Annotated[int | None, RunField("views.rand_layers")] = None
    """Operations of RandAugment to a picture; 0 for none (default: from the recipe)."""
    erase: Annotated[float | None, RunField("views.erase")] = None
    """Probability of random erasing (default: from the recipe)."""
    bad_images: Literal["stop", "skip"] = "stop"
    """What to do about images that cannot be read."""
    workers: Annotated[int | None, RunField("data.workers"), Synonyms("num_workers")] = None
    """Processes that decode images (default: by their cost, the model and the cores)."""
    seed: Annotated[int | None, RunField("seed")] = None
    """Seed of weights, order and augmentation (default: 0)."""
    split_seed: Annotated[int | None, RunField("data.split_seed")] = None
    """Seed of the split, where the data have none (default: 0)."""
    group_by: Annotated[str | None, RunField("data.group_by"), arg(metavar="COLUMN|REGEX")] = None
    """Keep groups together in splits: the column of a CSV file that names them (`group` needs no naming), or a regular
    expression for the paths, as 'patient(\\d+)'."""
    targets: Annotated[tuple[str, ...] | None, arg(metavar="COLUMN...")] = None
    """Learn values: the columns of numbers of a CSV or Parquet file that hold them (default: where a file has no column
    of labels, all columns of numbers)."""
    axes: Annotated[Literal[1, 2, 3] | None, RunField("data.axes")] = None
    """What .npy files and TIFF stacks are, where they could be either: 1 signals, 2 pictures, 3 volumes (default: as
    their endings and shapes say)."""
    ignore_index: Annotated[int | None, RunField("data.ignore_index")] = None
    """The number of pixels without a class in class maps, besides 255 (default: 255 alone)."""
    exclude: Annotated[OptionalPath, RunField("data.exclude")] = None
    """A list of training images to leave out, as `vitreous data dedup` writes it."""
    exact: Annotated[bool, RunField("data.exact")] = False
    """Decode photographs whole, also where a crop shrinks them to less than half; slower."""
    device: str | None = None
    """auto, cpu, cuda, cuda:1 or mps (default: auto)."""
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp16"] | None, Synonyms("amp")] = None
    """Numbers to compute with; weights are kept in fp32 (default: auto, bf16 where the device computes with it)."""
    compile: Annotated[bool | None, RunField("compile")] = None
    """Compile the blocks of the model with torch.compile (default: on a GPU, where the run is long enough to gain by
    it)."""
    shards: Annotated[int | None, RunField("shards")] = None
    """Parts of a batch computed side by side on a CPU (default: one a core, at most 8)."""
    reproducible: Annotated[bool, RunField("reproducible")] = False
    """The same bits with 1, 2 or 4 processes, and across a change; slower."""
    timeout: Annotated[float | None, RunField("timeout")] = None
    """Seconds that processes wait for each other before they give up (default: 300)."""
    parallel: Annotated[Literal["ddp", "fsdp"] | None, RunField("parallel")] = None
    """Under torchrun: the whole model in each process, or a share of it (default: ddp, the whole)."""
    skip_steps: Annotated[int | None, RunField("skip_steps")] = None
    """Steps that are not finite that may be left out before the run stops (default: 0)."""
    lr_grid: tuple[float, ...] | None = None
    """Choose the learning rate on held-out training images, then train on all of them; alone: the paper's grid."""
    ray: str | None = None
    """With --lr-grid: the Ray cluster that makes the trials (`auto`, HOST:PORT; `local` starts one here); all its
    machines see --out."""
    log_every: Annotated[int | None, RunField("log_every")] = None
    """Steps between two lines of metrics (default: by the length of the run)."""
    evaluate_every: Annotated[int | None, RunField("evaluate_every")] = None
    """Steps between two evaluations on the validation split (default: a sixth of the run, or a twentieth
    with --keep-best or --early-stop)."""
    save_every: Annotated[int | None, RunField("save_every")] = None
    """Steps between two checkpoints (default: a sixth of the run)."""
    keep_best: Annotated[bool, RunField("keep_best")] = False
    """Save the weights of the best evaluation on the validation split, by its leading figure, and evaluate 20 times
    (default: so where labels are learned and there is such a split, of 6 evaluations)."""
    keep_last: bool = False
    """Save the weights of the last step, whatever the evaluations say."""
    early_stop: Annotated[int | None, RunField("early_stop")] = None
    """Stop after so many evaluations in a row that were not better than the best (default: train to the end)."""
    stop_on_collapse: Annotated[bool, RunField("stop_on_collapse")] = False
    """Without labels: stop at the first alarm of a collapse, with a checkpoint and exit code 7 (default: warn only)."""
    keep: Annotated[int | None, RunField("keep")] = None
    """Checkpoints to keep (default: 2)."""
    log_to: tuple[Literal["tensorboard", "wandb", "mlflow", "none"], ...] = ()
    """Programs that get a copy of metrics, config, pictures and model (docs/trackers.md); each needs the extra of its
    name. A resumed run goes on with its own; `none` ends that."""
    log_timeout: float = 10.0
    """Seconds that the run waits at its end for what --log-to still has to send."""
    live: bool = False
    """Curves in the terminal while the run trains; elsewhere a line for each evaluation."""
    settings: Suppress[dict[str, list[str]]] = field(default_factory=dict)
    """Anything else of the run, by its path: `--optimizer.betas 0.9 0.95`."""

    def run_fields(self) -> dict[str, Any]:
        """Return the fields of `Run` that the options set, by their dotted paths."""
        paths = run_field_marks()
        given = {name: getattr(self, name) for name in paths if getattr(self, name) != getattr(TrainOptions, name)}
        return {paths[name].path: None if value == paths[name].none else value for name, value in given.items()}

    def check_data(self) -> None:
        """Raise UsageError where no data set is named and no run says which."""
        if not self.data and not self.resume:
            raise UsageError("no data set is named", "vitreous train DATA: `digits`, a folder of images or a CSV file")


@cache
def run_field_marks() -> dict[str, RunField]:
    """Return the options that set one field of `Run`, with their marks."""
    of_weights = {"resize": RunField("model.positions.resize"), "source_size": RunField("init_source_size")}
    return of_weights | marks_of(TrainOptions, RunField)
