"""Settings for training at native aspect ratio (NaViT, arXiv:2307.06304)."""

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


def parse_token_range(text: str) -> tuple[int, int]:
    """Parse --tokens: `256`, or `64-256` for any number between. Raises UsageError for anything else."""
    low, _, high = text.partition("-")
    if not low.isdecimal() or not (high.isdecimal() or text == low) or int(low) > int(high or low):
        raise UsageError(f"invalid --tokens: {text}", "give a number of patches, 256, or a range, 64-256")
    for budget in (low, high or low):
        check_token_budget(int(budget))
    return int(low), int(high or low)


def check_native_aspect_options(options: TrainOptions) -> None:
    """Raise UsageError for conflicting options of native aspect ratio."""
    if options.tokens is not None and not options.native_aspect:
        raise UsageError("--tokens needs --native-aspect", "add --native-aspect, or leave it out")
    if options.native_aspect and options.image_size is not None:
        problem = "--image-size sets one size for all images, but --native-aspect has none"
        raise UsageError(problem, "set the number of patches: --tokens 256")
    if options.tokens is not None:
        parse_token_range(options.tokens)


def set_square_image(model: ModelConfig, options: TrainOptions) -> ModelConfig:
    """Set the image size of a new model to the largest square with the requested number of tokens; positions are
    resized from its grid. Raises UsageError for a model that does not support several image sizes."""
    check_can_pack(model)
    if options.tokens is None:
        return model
    side = math.isqrt(parse_token_range(options.tokens)[1])
    return model.with_options(image=tuple(side * pixels for pixels in model.patch))


def use_native_aspect(run: Run, options: TrainOptions, note: Callable[[str], None]) -> Run:
    """Set the run to native aspect ratio, with the requested number of tokens, or that of the model's image size.

    Raises UsageError as `Run` does, and for views that produce images of one size.
    """
    if not options.native_aspect:
        if run.preprocess.stacks:
            return run
        note("images are cropped to squares, unlike in the weights; --native-aspect keeps the aspect ratio")
        return replace(run, preprocess=run.preprocess.with_one_size("crop"))
    num_tokens = math.prod(run.model.grid)
    low, high = parse_token_range(options.tokens) if options.tokens is not None else (num_tokens, num_tokens)
    if not isinstance(run.views, Augment):
        raise UsageError(f"{run.objective.name} needs images of one size", "leave --native-aspect out")
    preprocess = NativePreprocess.from_preprocess(run.preprocess, high, run.model.patch)
    return replace(run, preprocess=preprocess, views=replace(run.views, fewest_tokens=low if low < high else 0))
