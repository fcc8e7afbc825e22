"""The buckets of a run: chosen for its training samples or named, and which of them each sample is read at."""

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


def check_buckets(options: TrainOptions, opened: Data) -> None:
    """Raise UsageError for `--buckets` of a run that makes no images, and of data of one size."""
    kind = get_objective_config(options)
    if not kind.generates:
        problem = f"--buckets is for models that make images, and {options.recipe or 'this'} trains others"
        raise UsageError(problem, "leave it out, or use --recipe sit or dit")
    if opened.latents is not None:
        raise UsageError(f"{opened.name} has latents, which were packed at one size", "leave --buckets out")


def set_run_buckets(run: Run, options: TrainOptions, forms: np.ndarray, note: NoteCallback) -> Run:
    """The run with the buckets that are named, or else those that suit training samples of these forms (n, 3); its
    own size is the one that most pictures, or frames, are read at. Raises UsageError for sizes that cannot be."""
    image, patch, stride = run.model.image, run.model.patch, run.preprocess.stride
    seen = forms[forms[:, 0] > 0]
    buckets = parse_buckets(options.buckets or (), len(image)) or choose_buckets(seen, image, patch, stride)
    run = replace(run, preprocess=run.preprocess.with_buckets(buckets))  # refuses what does not go with them
    counts = np.bincount(find_nearest_buckets(seen, buckets, stride), minlength=len(buckets))
    own = buckets[int((counts * [size[0] if len(size) == 3 else 1 for size in buckets]).argmax())]
    listed = ", ".join(
        f"{format_sample_size(size)} {count:,}" for size, count in zip(buckets, counts.tolist(), strict=True)
    )
    note(f"buckets, and training images in each: {listed}; {format_sample_size(own)} is what is judged")
    if len(image) == 3 and patch[0] > 1 and (seen[:, 0] == 1).any():
        note(
            f"a picture is shown as {patch[0]} equal frames: --model {name_single_frame_model(run)} has patches of one"
        )
    model = run.model.with_options(image=own)
    return replace(run, model=model, preprocess=run.preprocess.with_image(own))


def name_single_frame_model(run: Run) -> str:
    """The name of the run's model with patches of one frame."""
    return run.model.with_options(patch=(1, *run.model.patch[1:])).name()


def select_evaluated_samples(split: Split, preprocess: Preprocess, workers: int) -> Split | None:
    """The samples of a split that are read at the size which is judged; None where there are none."""
    rows = find_samples_at_model_size(split, preprocess, workers)
    return split.take(rows) if len(rows) else None
