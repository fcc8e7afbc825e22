"""The buckets of a run: chosen for its training samples or named, and which of them each sample is read at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from vitreous.data.buckets import assign, choose_buckets, parse_buckets, rows_at_own_size
from vitreous.data.modalities.base import Preprocess
from vitreous.data.split import Data, Split
from vitreous.errors import UsageError
from vitreous.inference.sample_sizes import written
from vitreous.recipes.derive import objective_of
from vitreous.recipes.options import TrainOptions
from vitreous.training.run import Run

Note = Callable[[str], None]


def check_buckets(options: TrainOptions, opened: Data) -> None:
    """Raise UsageError for `--buckets` of a run that makes no images, and of data of one size."""
    kind = objective_of(options)
    if not kind.generates:
        problem = f"--buckets is for models that make images, and {options.recipe or 'this'} trains others"
        raise UsageError(problem, "leave it out, or use --recipe sit or dit")
    if opened.latents is not None:
        raise UsageError(f"{opened.name} has latents, which were packed at one size", "leave --buckets out")


def with_buckets(run: Run, options: TrainOptions, forms: np.ndarray, note: Note) -> Run:
    """The run with the buckets that are named, or else those that suit training samples of these forms (n, 3); its
    own size is the one that most pictures, or frames, are read at. Raises UsageError for sizes that cannot be."""
    image, patch, stride = run.model.image, run.model.patch, run.preprocess.stride
    seen = forms[forms[:, 0] > 0]
    buckets = parse_buckets(options.buckets or (), len(image)) or choose_buckets(seen, image, patch, stride)
    run = replace(run, preprocess=run.preprocess.with_buckets(buckets))  # refuses what does not go with them
    counts = np.bincount(assign(seen, buckets, stride), minlength=len(buckets))
    own = buckets[int((counts * [size[0] if len(size) == 3 else 1 for size in buckets]).argmax())]
    listed = ", ".join(f"{written(size)} {count:,}" for size, count in zip(buckets, counts.tolist(), strict=True))
    note(f"buckets, and training images in each: {listed}; {written(own)} is what is judged")
    if len(image) == 3 and patch[0] > 1 and (seen[:, 0] == 1).any():
        note(f"a picture is shown as {patch[0]} equal frames: --model {replaced_patch(run)} has patches of one")
    model = run.model.with_options(image=own)
    return replace(run, model=model, preprocess=run.preprocess.with_image(own))


def replaced_patch(run: Run) -> str:
    """The name of the run's model with patches of one frame."""
    return run.model.with_options(patch=(1, *run.model.patch[1:])).name()


def judged_at(split: Split, preprocess: Preprocess, workers: int) -> Split | None:
    """The samples of a split that are read at the size which is judged; None where there are none."""
    rows = rows_at_own_size(split, preprocess, workers)
    return split.take(rows) if len(rows) else None
