"""Derive a complete `Run` from the user's options: choose every unset value from the data, the model and the
machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from vitreous.config import change_fields, nest_paths, set_dotted_paths
from vitreous.data.augmentation.volumes import VolumeViews
from vitreous.data.modalities.base import Preprocess
from vitreous.data.split import Data
from vitreous.errors import UsageError
from vitreous.models.config import ModelConfig
from vitreous.models.names import MAX_SMALL_IMAGE_SIDE
from vitreous.objectives.base import ObjectiveConfig
from vitreous.objectives.supervised import SupervisedConfig
from vitreous.recipes.architecture import choose_architecture
from vitreous.recipes.fit_to_data import describe_small_settings, fit_objective_to_labels
from vitreous.recipes.names import DEFAULT_RECIPE_NAMES
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.own_aspect import check_native_aspect_options, use_native_aspect
from vitreous.recipes.recipe import MIN_SCRATCH_IMAGES, DatasetInfo, Recipe
from vitreous.recipes.registry import RECIPES, count_reference_steps, get_recipe
from vitreous.system.cores import default_worker_count
from vitreous.system.machine import pick_device, pick_precision
from vitreous.training.run import Run
from vitreous.training.shards import choose_shard_count
from vitreous.weights.adopt import WeightsInfo
from vitreous.weights.published import find_published_name

__all__ = ["DatasetInfo", "apply_train_options", "derive_run_config"]

VOLUME_SCALING_THRESHOLD = 1.25  # volumes larger than this multiple of the model input are scaled down
MIN_COMPILE_FLOPS = 1e17  # GPU runs with fewer FLOPs do not benefit from compilation (about 20 s, then 8 % faster)
REPRODUCIBLE_SHARDS = 4  # shards of a step; the sum of their gradients is the same for 1, 2 and 4 processes

DRIFT_LIMIT = 0.1  # drift guard of self-supervised runs from weights

NoteCallback = Callable[[str], None]


def derive_run_config(
    options: TrainOptions,
    data: Data,
    dataset_info: DatasetInfo,
    start: WeightsInfo | None = None,
    note: NoteCallback = lambda text: None,
) -> Run:
    """Build the run that the options define on a dataset. `start` describes the initial weights, None without weights.

    `note` receives messages about adapted hyperparameters. Raises UsageError for conflicting options, an unknown
    recipe, missing weights of a recipe, or an image size that is not divisible by the patch size.
    """
    if options.epochs is not None and options.steps is not None:
        raise UsageError("--epochs and --steps exclude each other", "use one of them")
    check_native_aspect_options(options)
    requested = get_recipe(options.recipe) if options.recipe else None
    if requested is not None and requested.from_weights and start is None:
        raise UsageError(f"{requested.name} needs initial weights", "set them with --init")
    device = pick_device(options.device or "auto")
    objective_config = get_objective_config(options)
    outputs = len(objective_config.output_names(data.classes, data.targets))
    model = choose_architecture(options, dataset_info, outputs, start.config if start else None, requested)
    recipe = requested or choose_default_recipe(data, model, start, dataset_info)
    recipe_run = recipe.make(model, dataset_info, options)
    run = replace(
        recipe_run,
        recipe=recipe.name,
        data=replace(
            recipe_run.data,
            source=data.name,
            classes=data.classes,
            targets=data.targets,
            fingerprint=data.fingerprint(),
        ),
        device=device,
        precision=pick_precision(options.precision or "auto", device),
    )
    if start is not None and start.preprocess is not None:
        run = replace(run, preprocess=merge_preprocess(run.preprocess, start.preprocess, recipe))
    if adapt_run := RUN_ADAPTERS.get(dataset_info.template.form):
        run = adapt_run(run, options, dataset_info, start, note)
    if start is not None and run.objective.guards_drift:
        run = replace(run, drift_guard=DRIFT_LIMIT)
    run = use_native_aspect(run, options, note)
    run = apply_train_options(scale_batch(run, recipe, options, note), options)
    reference_steps = count_reference_steps(recipe, recipe_run)
    run = limit_warmup(run, recipe, reference_steps, options, note)
    run = enable_ema_warmup(run, recipe, reference_steps, options, note)
    run = replace(run, objective=fit_objective_to_labels(run.objective, data, options, dataset_info))
    if options.compile is None and device.startswith("cuda") and not run.reproducible and run.preprocess.stacks:
        run = replace(run, compile=6 * run.model.macs() * run.total > MIN_COMPILE_FLOPS)
    if options.shards is None and run.reproducible:
        run = replace(run, shards=REPRODUCIBLE_SHARDS)
    elif options.shards is None and run.can_split_batch and not (run.compile or run.draws_in_forward):
        run = replace(run, shards=choose_shard_count(device, run.batch_size, run.objective.shard_images))
    if settings := describe_small_settings(run, dataset_info, options):
        note(settings)
    return choose_intervals(run, options)


def adapt_run_to_clips(
    run: Run, options: TrainOptions, dataset_info: DatasetInfo, start: WeightsInfo | None, note: NoteCallback
) -> Run:
    """Return the run with the requested frame stride and without horizontal flips, because the direction of motion may
    distinguish classes. `note` receives a message if flips are disabled."""
    stride = run.preprocess.stride if options.stride is None else options.stride
    if getattr(run.views, "flip", 0.0) and "views.flip" not in options.settings:
        run = replace(run, views=replace(run.views, flip=0.0))  # type: ignore[type-var]
        note("clips are not mirrored because motion directions may matter; use --views.flip 0.5 to mirror half of them")
    return replace(run, preprocess=run.preprocess.adjust(stride=stride))


def adapt_run_to_arrays(
    run: Run, options: TrainOptions, dataset_info: DatasetInfo, start: WeightsInfo | None, note: NoteCallback
) -> Run:
    """Return the run with preprocessing and views for volumes or signals.

    Volumes larger than the model input are scaled to it, unless the weights or `--preprocess.fit` set something else;
    `note` receives a message. Signals are cropped. Runs that segment voxels are unchanged, because their recipe sets
    the views.
    """
    if run.objective.annotated:
        return run
    weights_preprocess = start.preprocess if start is not None else None
    default_preprocess = dataset_info.template.for_model(run.model.image, dataset_info.channels)
    preprocess: Any = (
        default_preprocess.continue_from(weights_preprocess) if weights_preprocess is not None else default_preprocess
    )
    is_large = any(
        data_length > VOLUME_SCALING_THRESHOLD * model_length
        for data_length, model_length in zip(dataset_info.size, run.model.image, strict=True)
    )
    if (
        weights_preprocess is None
        and is_large
        and len(dataset_info.size) == 3
        and "preprocess.fit" not in options.settings
    ):
        preprocess = preprocess.adjust(fit="squash")
        data_size, model_size = (" x ".join(map(str, size)) for size in (dataset_info.size, run.model.image))
        note(f"volumes of {data_size} are scaled to {model_size}; use --preprocess.fit crop for a centre crop")
    if rule := options.settings.get("preprocess.standardise"):
        preprocess = set_dotted_paths(preprocess, {"standardise": rule}, "preprocess.")
    # intensity changes in standard deviations, only for standardised inputs
    intensity_change = 0.1 if preprocess.is_standardised else 0.0
    views = VolumeViews(
        scale=(1.0, 1.0),
        rotate=0.0,
        contrast=intensity_change,
        shift=intensity_change,
        gamma=0.0,
        noise=intensity_change,
        translate=0.1,
        border="zeros",
    )
    return replace(run, preprocess=preprocess, views=views)


#: sample format (`Preprocess.form`) -> function that adapts a recipe's run to it
RUN_ADAPTERS = {"clips": adapt_run_to_clips, "arrays": adapt_run_to_arrays}


def get_objective_config(options: TrainOptions) -> type[ObjectiveConfig]:
    """Return the class of the objective config of the options' recipe; supervised learning if no recipe is set."""
    return get_recipe(options.recipe).objective if options.recipe else SupervisedConfig


def advise_weights(run: Run) -> str:
    """Return advice to use pre-trained weights for a run from scratch on few photographs; "" for any other run and for
    generative models, which cannot start from the weights of a classifier."""
    if (
        run.init
        or run.objective.generates
        or not run.preprocess.is_browsable
        or max(run.model.image[-2:]) <= MAX_SMALL_IMAGE_SIDE
        or run.data.images >= MIN_SCRATCH_IMAGES
    ):
        return ""
    source = find_published_name(run.model.name()) or find_published_name("ViT-S/16")
    noun = run.preprocess.noun if run.preprocess.is_animated else "photographs"
    return (
        f"{run.data.images:,} {noun} are few for training a Vision Transformer from scratch; start from published "
        f"weights, for example --init {source} (`vitreous models --weights` lists them), or from a file of weights"
    )


def choose_default_recipe(
    data: Data, model: ModelConfig, start: WeightsInfo | None, dataset_info: DatasetInfo
) -> Recipe:
    """Return the default recipe for the data, the model and the initial weights, if any."""
    if start is not None:
        return RECIPES["finetune" if start.classifies else "finetune-encoder"]
    is_small = not dataset_info.template.is_browsable or max(model.image[-2:]) <= MAX_SMALL_IMAGE_SIDE
    return RECIPES["digits" if data.name == "digits" else "small" if is_small else "photos"]


def merge_preprocess(recipe_preprocess: Preprocess, weights: Preprocess, recipe: Recipe) -> Preprocess:
    """Merge the preprocessing of the recipe with that of the initial weights. Default recipes continue with the
    preprocessing of the weights; published recipes take only its mean and standard deviation."""
    if recipe.name in DEFAULT_RECIPE_NAMES:
        return recipe_preprocess.continue_from(weights)
    return recipe_preprocess.with_moments(weights)


def scale_batch(run: Run, recipe: Recipe, options: TrainOptions, note: NoteCallback) -> Run:
    """Set the batch size and accumulation of the options, and scale the learning rate by the recipe's rule.

    A batch size that is not set is limited to the number of training images. A recipe's length in steps is kept, and so
    is its warm-up in epochs. A learning rate that the user set is not changed. `note` receives messages about the
    changes.
    """
    old_batch, batch, accumulate = (
        run.step_size,
        options.batch_size or run.batch_size,
        options.accumulate or run.accumulate,
    )
    if options.batch_size is None and batch > run.data.images:
        note(f"batch {batch} -> {run.data.images}: the training set has {run.data.images} images")
        batch = run.data.images
    new_batch = batch * accumulate
    if new_batch == old_batch:
        return replace(run, batch_size=batch, accumulate=accumulate)
    steps, warmup = run.steps, run.schedule.warmup_steps
    run = replace(run, batch_size=batch, accumulate=accumulate)
    if recipe.by_steps:
        run = replace(run, epochs=steps * new_batch / run.data.images)
    if recipe.warmup_in_epochs:
        run = replace(run, schedule=replace(run.schedule, warmup_steps=round(warmup * old_batch / new_batch)))
    batch_ratio = max(new_batch, recipe.floor) / max(old_batch, recipe.floor)
    factor = {"linear": batch_ratio, "sqrt": batch_ratio**0.5, "fixed": 1.0}[recipe.lr_scaling]
    if factor == 1 or options.lr is not None or "optimizer.lr" in options.settings:
        return run
    old_optimizer = run.optimizer
    new_optimizer = replace(old_optimizer, lr=old_optimizer.lr * factor, matrix_lr=old_optimizer.matrix_lr * factor)
    note(
        f"learning rate {old_optimizer.lr:.4g} -> {new_optimizer.lr:.4g}: batch {old_batch} -> {new_batch}, "
        f"{recipe.lr_scaling} scaling rule of {recipe.name}"
    )
    return replace(run, optimizer=new_optimizer)


def limit_warmup(run: Run, recipe: Recipe, reference_steps: int, options: TrainOptions, note: NoteCallback) -> Run:
    """Limit the warm-up to 10 % of the run if the run has less than half of the recipe's steps on its reference data.

    `note` receives a message about the change. A warm-up that the user set is kept.
    """
    is_requested = options.warmup_steps is not None or "schedule.warmup_steps" in options.settings
    warmup, max_warmup = run.schedule.warmup_steps, run.steps // 10
    if is_requested or recipe.name in DEFAULT_RECIPE_NAMES or run.steps >= reference_steps / 2 or warmup <= max_warmup:
        return run
    note(
        f"warm-up {warmup} -> {max_warmup} steps: a tenth of the run, which has fewer steps than {recipe.name} "
        f"({reference_steps})"
    )
    return replace(run, schedule=replace(run.schedule, warmup_steps=max_warmup))


def enable_ema_warmup(run: Run, recipe: Recipe, reference_steps: int, options: TrainOptions, note: NoteCallback) -> Run:
    """Enable EMA warm-up if the run has less than half of the recipe's steps on its reference data.

    Otherwise the average would keep much of the initial weights: 90 % after 1,000 steps with a decay of 0.9999. `note`
    receives a message about the change. A value that the user set is kept.
    """
    if run.ema is None or run.ema_warmup or options.ema_warmup is not None or run.steps >= reference_steps / 2:
        return run
    note(f"EMA warm-up is on: the run has fewer steps than {recipe.name} ({reference_steps})")
    return replace(run, ema_warmup=True)


def apply_train_options(run: Run, options: TrainOptions) -> Run:
    """Set every option that is set in the run, and then every `--path.to.field`."""
    values = options.collect_run_fields()
    if options.keep_last:
        values["keep_best"] = False
    if options.device is not None:
        values["device"] = pick_device(options.device)
    if options.micro_batch not in (None, "auto"):
        values["micro_batch"] = parse_micro_batch(options.micro_batch)
    if options.precision is not None:
        values["precision"] = pick_precision(options.precision, values.get("device", run.device))
    run = set_run_fields(run, values)
    if options.steps is not None:
        run = replace(run, epochs=options.steps * run.step_size / run.data.images)
    is_default_recipe = run.recipe in ("", *DEFAULT_RECIPE_NAMES)  # the warm-up of these is 5 % of the run
    if (
        is_default_recipe
        and options.warmup_steps is None
        and (options.epochs or options.steps or options.batch_size or options.accumulate)
    ):
        run = replace(run, schedule=replace(run.schedule, warmup_steps=round(0.05 * run.steps)))
    return set_dotted_paths(run, options.settings)


def parse_micro_batch(text: str | None) -> int:
    """Parse a numeric --micro-batch. Raises UsageError if it is not a number above 0."""
    if not (text or "").isdecimal() or int(text or "") < 1:
        raise UsageError(f"invalid --micro-batch {text}", "give a number of images, or auto")
    return int(text or "")


def set_run_fields(run: Run, values: dict[str, Any]) -> Run:
    """Return a copy of the run with the values of fields, given by their dotted paths. Raises UsageError for a field
    that does not exist."""
    top_level: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        head, _, name = path.partition(".")
        (nested.setdefault(head, {}) if name else top_level)[name or head] = value
    for head, changes in nested.items():
        group = getattr(run, head)
        paths = group.option_paths() if isinstance(group, ModelConfig) else [field.name for field in fields(group)]
        if unknown := changes.keys() - set(paths):
            group_name = vars(group).get("name") or type(group).__name__
            path = f"{head}.{min(unknown)}"
            raise UsageError(f"{path} is not a setting of {group_name}", f"leave {path} out")
        top_level[head] = change_fields(group, nest_paths(changes))
    return replace(run, **top_level)


def choose_intervals(run: Run, options: TrainOptions) -> Run:
    """Set the intervals of logging, evaluation and checkpoints from the length of the run, and the number of workers,
    unless they are set."""
    num_evaluations = (
        20 if run.keep_best or run.early_stop or run.drift_guard else 6
    )  # default number of evaluations per run
    intervals = {
        "log_every": options.log_every or max(1, min(50, run.steps // 20)),
        "evaluate_every": options.evaluate_every or max(1, run.steps // num_evaluations),
        "save_every": options.save_every or max(1, run.steps // 6),
    }
    workers = options.workers if options.workers is not None else 0 if run.data.cache else default_worker_count()
    return replace(run, **intervals, data=replace(run.data, workers=workers))
