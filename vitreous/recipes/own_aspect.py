"""Training on pictures at their own aspect ratio (NaViT, arXiv:2307.06304): what the options say of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from vitreous.data.augmentation.augment import Augment
from vitreous.data.modalities.native import NativePreprocess
from vitreous.errors import UsageError
from vitreous.models.config import ModelConfig
from vitreous.models.packed import check_can_pack
from vitreous.nn.sizes import check_token_budget
from vitreous.recipes.options import TrainOptions
from vitreous.training.run import Run


def parse_token_range(words: str) -> tuple[int, int]:
    """What --tokens says: `256`, or `64-256` for any number between. Raises UsageError for anything else."""
    low, _, high = words.partition("-")
    if not low.isdecimal() or not (high.isdecimal() or words == low) or int(low) > int(high or low):
        raise UsageError(f"--tokens cannot be {words}", "give a number of patches, as 256, or two, as 64-256")
    for number in (low, high or low):
        check_token_budget(int(number))
    return int(low), int(high or low)


def check_native_aspect_options(options: TrainOptions) -> None:
    """Raise UsageError for options of pictures at their own aspect that do not go together."""
    if options.tokens is not None and not options.native_aspect:
        raise UsageError("--tokens is about pictures at their own aspect ratio", "add --native-aspect, or leave it out")
    if options.native_aspect and options.image_size is not None:
        problem = "--image-size is one size for all pictures, and with --native-aspect each has its own"
        raise UsageError(problem, "say how many patches a picture has: --tokens 256")
    if options.tokens is not None:
        parse_token_range(options.tokens)


def set_square_image(model: ModelConfig, options: TrainOptions) -> ModelConfig:
    """The model of a fresh run, whose own image is the largest square of so many tokens as were asked for: positions
    are resized from its grid. Raises UsageError for a model that cannot take pictures of many sizes."""
    check_can_pack(model)
    if options.tokens is None:
        return model
    side = math.isqrt(parse_token_range(options.tokens)[1])
    return model.with_options(image=tuple(side * pixels for pixels in model.patch))


def use_native_aspect(run: Run, options: TrainOptions, note: Callable[[str], None]) -> Run:
    """The run on pictures at their own aspect, of as many tokens as were asked for, or as the model's own image has.

    Raises UsageError as `Run` does, and for views that make pictures of one size.
    """
    if not options.native_aspect:
        if run.preprocess.stacks:
            return run
        note("pictures are cut to squares, other than for the weights: --native-aspect keeps their aspect ratio")
        return replace(run, preprocess=run.preprocess.with_one_size("crop"))
    own = math.prod(run.model.grid)
    low, high = parse_token_range(options.tokens) if options.tokens is not None else (own, own)
    if not isinstance(run.views, Augment):
        raise UsageError(f"{run.objective.name} takes pictures of one size", "leave --native-aspect out")
    preprocess = NativePreprocess.of(run.preprocess, high, run.model.patch)
    return replace(run, preprocess=preprocess, views=replace(run.views, fewest_tokens=low if low < high else 0))
