"""Size buckets of a generative run: choose or parse the bucket sizes, and assign each sample to its nearest bucket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from vitreous.data.buckets import choose_buckets, find_nearest_buckets, find_samples_at_model_size, parse_buckets
from vitreous.data.modalities.base import Preprocess
from vitreous.data.split import Data, Split
from vitreous.errors import UsageError
from vitreous.inference.sample_sizes import format_sample_size
from vitreous.recipes.derive import get_objective_config
from vitreous.recipes.options import TrainOptions
from vitreous.training.run import Run

NoteCallback = Callable[[str], None]


def check_buckets(options: TrainOptions, dataset: Data) -> None:
    """Raise UsageError for `--buckets` if the recipe does not train a generative model, or if the dataset contains
    latents, which all have the same size."""
    objective = get_objective_config(options)
    if not objective.generates:
        recipe_name = f"the recipe {options.recipe}" if options.recipe else "the default recipe"
        problem = f"--buckets needs a generative model, which {recipe_name} does not train"
        raise UsageError(problem, "leave --buckets out, or use --recipe sit or dit")
    if dataset.latents is not None:
        raise UsageError(f"{dataset.name} contains latents, which all have the same size", "leave --buckets out")


def set_run_buckets(run: Run, options: TrainOptions, forms: np.ndarray, note: NoteCallback) -> Run:
    """Return the run with the buckets of the options, or with buckets chosen for the forms (n, 3) of its training
    samples: frames, height and width, 0 frames for an unreadable sample.

    The model size becomes the bucket with the most images or frames. `note` receives the number of images per bucket.
    Raises UsageError for invalid sizes.
    """
    image, patch, stride = run.model.image, run.model.patch, run.preprocess.stride
    valid_forms = forms[forms[:, 0] > 0]
    buckets = parse_buckets(options.buckets or (), len(image)) or choose_buckets(valid_forms, image, patch, stride)
    run = replace(run, preprocess=run.preprocess.with_buckets(buckets))  # raises UsageError for unsupported sizes
    counts = np.bincount(find_nearest_buckets(valid_forms, buckets, stride), minlength=len(buckets))
    evaluation_size = buckets[int((counts * [size[0] if len(size) == 3 else 1 for size in buckets]).argmax())]
    counts_text = ", ".join(
        f"{format_sample_size(size)} {count:,}" for size, count in zip(buckets, counts.tolist(), strict=True)
    )
    note(f"training images per bucket: {counts_text}; evaluation uses {format_sample_size(evaluation_size)}")
    if len(image) == 3 and patch[0] > 1 and (valid_forms[:, 0] == 1).any():
        note(
            f"an image becomes {patch[0]} equal frames, the depth of a patch; use --model "
            f"{name_single_frame_model(run)} for patches of 1 frame"
        )
    model = run.model.with_options(image=evaluation_size)
    return replace(run, model=model, preprocess=run.preprocess.with_image(evaluation_size))


def name_single_frame_model(run: Run) -> str:
    """Return the name of the run's model with patches of a single frame."""
    return run.model.with_options(patch=(1, *run.model.patch[1:])).name()


def select_evaluated_samples(split: Split, preprocess: Preprocess, workers: int) -> Split | None:
    """Return the samples of a split whose bucket is the size at which the model is evaluated; None if there are
    none."""
    samples = find_samples_at_model_size(split, preprocess, workers)
    return split.take(samples) if len(samples) else None
