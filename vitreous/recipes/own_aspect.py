"""Settings of runs that train at the native aspect ratio of images (NaViT, arXiv:2307.06304)."""

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
    """Parse --tokens: `256` for a maximum number of patches, or `64-256` for a random number per image. Returns the
    lowest and the highest number. Raises UsageError for other texts."""
    low, _, high = text.partition("-")
    if not low.isdecimal() or not (high.isdecimal() or text == low) or int(low) > int(high or low):
        raise UsageError(f"invalid --tokens {text}", "give a number of patches such as 256, or a range such as 64-256")
    for budget in (low, high or low):
        check_token_budget(int(budget))
    return int(low), int(high or low)


def check_native_aspect_options(options: TrainOptions) -> None:
    """Raise UsageError for options that cannot be combined with --native-aspect, or that require it."""
    if options.tokens is not None and not options.native_aspect:
        raise UsageError("--tokens needs --native-aspect", "add --native-aspect, or leave --tokens out")
    if options.native_aspect and options.image_size is not None:
        problem = "--image-size cannot be combined with --native-aspect, which keeps the sizes of images"
        raise UsageError(problem, "set the number of patches instead: --tokens 256")
    if options.tokens is not None:
        parse_token_range(options.tokens)


def set_square_image(model: ModelConfig, options: TrainOptions) -> ModelConfig:
    """Return a new model whose image size is the largest square with the requested number of patches. Positions are
    resized from its grid to the grid of each image. Raises UsageError if the model does not support several image
    sizes."""
    check_can_pack(model)
    if options.tokens is None:
        return model
    side = math.isqrt(parse_token_range(options.tokens)[1])
    return model.with_options(image=tuple(side * pixels for pixels in model.patch))


def use_native_aspect(run: Run, options: TrainOptions, note: Callable[[str], None]) -> Run:
    """Return the run at native aspect ratio, with the requested number of patches, or that of the model's image size.

    If --native-aspect is not set, images are cropped to squares; `note` receives a message if the weights were trained
    otherwise. Raises UsageError for options that native aspect ratio does not support.
    """
    if not options.native_aspect:
        if run.preprocess.stacks:
            return run
        note("images are cropped to squares, but the weights were trained at native aspect ratio: add --native-aspect")
        return replace(run, preprocess=run.preprocess.with_one_size("crop"))
    num_tokens = math.prod(run.model.grid)
    low, high = parse_token_range(options.tokens) if options.tokens is not None else (num_tokens, num_tokens)
    if not isinstance(run.views, Augment):
        raise UsageError(f"{run.objective.name} needs images of one size", "leave --native-aspect out")
    preprocess = NativePreprocess.from_preprocess(run.preprocess, high, run.model.patch)
    return replace(run, preprocess=preprocess, views=replace(run.views, fewest_tokens=low if low < high else 0))
