"""From what the user said to a complete `Run`: every number that was left out is chosen here, once, and stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vitreous.config import set_paths
from vitreous.data.augment import Augment
from vitreous.data.preprocess import HALF, Preprocess
from vitreous.data.sources import Data
from vitreous.errors import UsageError
from vitreous.machine import default_workers, pick_device, pick_precision
from vitreous.models.config import ModelConfig, ViTConfig
from vitreous.models.cost import macs
from vitreous.models.names import configure, name_of
from vitreous.nn.sizes import nearby
from vitreous.recipes.options import TrainOptions
from vitreous.training.run import DataOptions, Optimizer, Run, Schedule
from vitreous.training.shards import default_shards
from vitreous.weights.adopt import Start

SMALL = 64  # pixels: up to this side, pictures are taken as they are
COMPILE_GAIN = 3e17  # FLOPs of a run on a GPU from which a compilation of a minute or two pays for itself


@dataclass(frozen=True)
class Facts:
    """What the data say: how many training images, their size (height, width) and channels."""

    images: int
    size: tuple[int, int]
    channels: int


def derive(options: TrainOptions, data: Data, facts: Facts, start: Start | None = None) -> Run:
    """The run that the options ask for on this data; `start` is what the weights to begin from are, if any.

    Raises UsageError for options that do not go together or a size that no patch divides.
    """
    if options.epochs is not None and options.steps is not None:
        raise UsageError("--epochs and --steps say the same thing", "use one of them")
    device = pick_device(options.device or "auto")
    model = architecture(options, facts, len(data.classes), start.config if start else None)
    recipe = digits if data.name == "digits" and start is None else small if max(model.image) <= SMALL and start is None else photos
    base = recipe(model, facts, options)
    run = replace(
        base,
        data=replace(base.data, source=data.name, classes=data.classes, fingerprint=data.fingerprint()),
        device=device,
        precision=pick_precision(options.precision or "auto", device),  # type: ignore[arg-type]
    )
    if start is not None and start.preprocess is not None:
        run = replace(run, preprocess=replace(start.preprocess, image=run.preprocess.image))
    run = apply(run, options)
    if options.compile is None and device.startswith("cuda"):
        run = replace(run, compile=6 * macs(run.model) * run.total > COMPILE_GAIN)
    if options.shards is None and not (run.compile or run.model.dropout or run.model.drop_path):
        run = replace(run, shards=default_shards(device, run.batch_size))
    return periods(run, options)


def architecture(options: TrainOptions, facts: Facts, classes: int, start: ModelConfig | None) -> ModelConfig:
    """The model: as named, as the weights have it, or as suits the pictures.

    Raises UsageError for a --model that is not that of the weights, and a --patch-size for what has none of its own.
    """
    native = facts.size if max(facts.size) <= SMALL else None
    if start is not None:
        if options.model and name_of(configure(options.model)) != name_of(start):
            raise UsageError(f"--model {options.model} does not fit the weights of --init {options.init}", "leave --model out")
        image = (options.image_size,) * 2 if options.image_size else start.image
        changes = {"representation": None, "head_bias": True} if isinstance(start, ViTConfig) else {}
        return replace(start, image=image, classes=classes, **changes)  # type: ignore[arg-type]
    name = options.model or ("ViT-Ti/16" if native is None else "ViT-64x6/2" if max(native) <= 16 else "ViT-128x6/4")
    model = configure(name)
    fixed = not isinstance(model, ViTConfig) or model.stem is not None
    if fixed and options.patch_size:
        raise UsageError(f"{name} has no patches to choose a size for", "leave --patch-size out")
    patch = (options.patch_size,) * 2 if options.patch_size else model.patch
    image = (options.image_size,) * 2 if options.image_size else nearby(native or (224, 224), patch)
    model = replace(model, image=image, classes=classes, channels=facts.channels)  # type: ignore[arg-type]
    if isinstance(model, ViTConfig):
        model = replace(model, patch=patch, head_bias=True)
        if native is not None and model.pool == "class":  # small data: mean pooling learns faster than a class token
            model = replace(model, pool="mean", class_token=False)
    of_model = {path.partition(".")[2]: words for path, words in options.settings.items() if path.startswith("model.")}
    return set_paths(model, of_model, "model.")


def common(model: ModelConfig, facts: Facts, options: TrainOptions) -> dict[str, Any]:
    """What every recipe starts from."""
    return {
        "data": DataOptions("", tuple(map(str, range(model.classes))), facts.images, ""),
        "model": model,
        "preprocess": Preprocess(
            image=(model.image[0], model.image[1]), channels=model.channels, mean=HALF[0][: model.channels], std=HALF[1][: model.channels]
        ),
    }


def sees_all(model: ModelConfig) -> bool:
    """Whether it is a ViT each of whose blocks sees every patch."""
    return isinstance(model, ViTConfig) and not model.on_grid


def digits(model: ModelConfig, facts: Facts, options: TrainOptions) -> Run:
    """`vitreous train digits`: the embedded set, a minute on two cores. Figures: benchmarks/README.md."""
    return Run(
        **common(model, facts, options),
        augment=Augment(shift=0.125, rotate=12, zoom=0.12, border="zeros"),
        optimizer=Optimizer("muon", lr=3e-3, matrix_lr=0.02, betas=(0.9, 0.95), weight_decay=0.05),
        schedule=Schedule(warmup_steps=50),
        mimetic=sees_all(model),
        smoothing=0.1,
        batch_size=128,
        epochs=100,
        ema=0.99,
    )


def small(model: ModelConfig, facts: Facts, options: TrainOptions) -> Run:
    """Pictures up to 64 pixels from scratch, as CIFAR. Figures: benchmarks/README.md."""
    batch = max(1, min(128, facts.images // 4))
    epochs = round(min(300.0, max(10.0, 4.5e5 / facts.images)), 1)
    steps = max(1, round(epochs * facts.images / batch))
    return Run(
        **common(model, facts, options),
        augment=Augment(shift=0.0625, flip=0.5),
        optimizer=Optimizer("muon", lr=2e-3, matrix_lr=0.007, betas=(0.9, 0.95), weight_decay=0.05),
        schedule=Schedule(warmup_steps=round(0.05 * steps)),
        mimetic=sees_all(model),
        smoothing=0.05,
        patch_dropout=0.5 * sees_all(model),
        batch_size=batch,
        epochs=epochs,
        ema=0.998,
    )


def photos(model: ModelConfig, facts: Facts, options: TrainOptions) -> Run:
    """Photographs, from scratch or from weights. The rate follows the batch: lr = 1e-3 x batch / 1024 from scratch, a tenth
    of it from weights, never below 1e-5 (DeiT's linear rule, arXiv:2012.12877)."""
    started = options.init is not None
    batch = max(1, min(64, facts.images // 4))
    epochs = min(100.0, max(5.0, (2e4 if started else 1e5) / facts.images))
    steps = max(1, round(epochs * facts.images / batch))
    size = (options.batch_size or batch) * (options.accumulate or 1)
    return Run(
        **common(model, facts, options),
        augment=Augment(crop=(0.3 if started else 0.2, 1.0), flip=0.5, rand_layers=0 if started else 2),
        optimizer=Optimizer("adamw", lr=max(1e-5, (1e-4 if started else 1e-3) * max(size, 64) / 256), weight_decay=0.05),
        schedule=Schedule(warmup_steps=round(0.05 * steps)),
        mimetic=not started and sees_all(model),
        smoothing=0.1,
        batch_size=batch,
        epochs=epochs,
        ema=0.998 if steps > 1000 else None,
    )


#: option -> path in the run, for options that set one value as it is
PATHS = {
    "batch_size": "batch_size",
    "accumulate": "accumulate",
    "epochs": "epochs",
    "optimizer": "optimizer.name",
    "lr": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "clip_grad": "optimizer.clip",
    "warmup_steps": "schedule.warmup_steps",
    "decay": "schedule.decay",
    "label_smoothing": "smoothing",
    "drop_path": "model.drop_path",
    "dropout": "model.dropout",
    "patch_dropout": "patch_dropout",
    "progressive": "progressive",
    "mixup": "augment.mixup",
    "cutmix": "augment.cutmix",
    "rand_augment": "augment.rand_layers",
    "erase": "augment.erase",
    "init": "init",
    "seed": "seed",
    "workers": "data.workers",
    "split_seed": "data.split_seed",
    "compile": "compile",
    "shards": "shards",
    "log_every": "log_every",
    "evaluate_every": "evaluate_every",
    "save_every": "save_every",
    "keep": "keep",
}


def apply(run: Run, options: TrainOptions) -> Run:
    """The run with every option that was given set, and every `--path.to.field` after them."""
    plain: dict[str, Any] = {path: getattr(options, name) for name, path in PATHS.items() if getattr(options, name) is not None}
    if options.ema is not None:
        plain["ema"] = options.ema or None
    if options.device is not None:
        plain["device"] = pick_device(options.device)
    if options.precision is not None:
        plain["precision"] = pick_precision(options.precision, plain.get("device", run.device))
    for path in sorted(plain, key=lambda p: p != "batch_size"):
        run = put(run, path, plain[path])
    if options.steps is not None:
        run = replace(run, epochs=options.steps * run.step_size / run.data.images)
    if options.warmup_steps is None and (options.epochs or options.steps or options.batch_size or options.accumulate):
        run = replace(run, schedule=replace(run.schedule, warmup_steps=round(0.05 * run.steps)))
    return set_paths(run, options.settings)


def put(run: Run, path: str, value: Any) -> Run:
    """A copy of the run with one field, at a dotted path, set."""
    head, _, rest = path.partition(".")
    return replace(run, **{head: replace(getattr(run, head), **{rest: value}) if rest else value})


def periods(run: Run, options: TrainOptions) -> Run:
    """How often to log, evaluate and save: by the length of the run, unless said."""
    chosen = {
        "log_every": options.log_every or max(1, min(50, run.steps // 20)),
        "evaluate_every": options.evaluate_every or max(1, run.steps // 6),
        "save_every": options.save_every or max(1, run.steps // 6),
    }
    workers = options.workers if options.workers is not None else 0 if run.data.cache else default_workers()
    return replace(run, **chosen, data=replace(run.data, workers=workers))
