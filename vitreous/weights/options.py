"""User settings for foreign weights that their files lack. Does not import PyTorch."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, Any, ClassVar, get_args

from tyro.conf import arg

from vitreous.errors import UsageError, suggest_nearest
from vitreous.models.config import PositionResize
from vitreous.nn.sizes import check_token_budget


@dataclass(frozen=True)
class WeightsSource(os.PathLike[str]):
    """A path or name of weights, as for `open_weights`, with settings that its files lack.

    `resize` is the position resize rule, an entry of `nn.grid.RESIZE_MODES`. `source_size` is the image size for which
    the positions were trained, in pixels: one number for a square, height and width, or frames, height and width.
    `native_aspect`: run the model at the native aspect ratio of images, with at most `tokens` patches (None: as many as
    in training). `labels`: classes of a zero-shot classifier, texts or a .txt file, for weights with a text encoder;
    `templates` and `multilabel` as in `weights.zero_shot.ZeroShotLabels`; `class_names`: names of the classes if they
    differ from their labels. Raises UsageError for other values.
    """

    path: str
    resize: PositionResize | None = None
    source_size: int | tuple[int, ...] | None = None
    native_aspect: bool = False
    _: KW_ONLY
    tokens: int | None = None
    labels: tuple[str, ...] | None = None
    templates: tuple[str, ...] = ()
    multilabel: bool = False
    class_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None:
            check_token_budget(self.tokens)
        if self.resize is not None and self.resize not in (rules := get_args(PositionResize)):
            raise UsageError(
                f"unknown position resize rule {self.resize}",
                suggest_nearest(self.resize, rules) or f"use one of {', '.join(rules)}",
            )
        if self.source_size is not None and (
            len(self.source_image_size) not in (1, 2, 3) or min(self.source_image_size) < 1
        ):
            raise UsageError(
                f"--source-size cannot be {' '.join(map(str, self.source_image_size)) or 'empty'}",
                "use one number, or height and width, in pixels of at least 1; for clips, frames first",
            )

    def __fspath__(self) -> str:
        return self.path

    def __str__(self) -> str:
        return self.path

    @property
    def source_image_size(self) -> tuple[int, ...]:
        """Return `source_size` as a tuple, () if it is not set."""
        return (
            ()
            if self.source_size is None
            else (self.source_size,)
            if isinstance(self.source_size, int)
            else tuple(self.source_size)
        )

    @property
    def to_config_fields(self) -> dict[str, Any]:
        """Return the set options as config fields of a `ViTConfig`, by dotted path."""
        settings: dict[str, Any] = {} if self.resize is None else {"positions.resize": self.resize}
        image_size = (
            self.source_image_size
            if len(self.source_image_size) == 3
            else (*self.source_image_size[:1], *self.source_image_size[-1:])
        )
        return settings | ({"image": image_size} if image_size else {})

    @property
    def to_command_options(self) -> list[str]:
        """Return the set options as words of a command, such as ["--resize", "bicubic"]."""
        arguments = [] if self.resize is None else ["--resize", self.resize]
        arguments += ["--source-size", *map(str, self.source_image_size)] if self.source_image_size else []
        arguments += ["--native-aspect"] * self.native_aspect
        arguments += [] if self.tokens is None else ["--tokens", str(self.tokens)]
        if self.labels is not None:  # `evaluate` takes the labels from the dataset
            arguments += ["--labels", *self.labels] if self.class_names is None else ["--zero-shot"]
            arguments += ["--templates", *self.templates] if self.templates else []
            arguments += ["--multilabel"] * (self.multilabel and self.class_names is None)
        return arguments


def get_source_fields(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the options of a `WeightsSource` as config fields by dotted path; {} for a plain path."""
    return source.to_config_fields if isinstance(source, WeightsSource) else {}


def get_source_options(source: str | os.PathLike[str]) -> list[str]:
    """Return the options of a `WeightsSource` as words of a command; [] for a plain path."""
    return source.to_command_options if isinstance(source, WeightsSource) else []


def get_label_source(source: str | os.PathLike[str]) -> WeightsSource | None:
    """Return a `WeightsSource` with labels of a zero-shot classifier; None for other sources."""
    return source if isinstance(source, WeightsSource) and source.labels is not None else None


@dataclass(frozen=True, kw_only=True)
class WeightsOptions:
    """Options of all verbs that read weights; docs/reference/weights.md lists the settings of each format."""

    SECTIONS: ClassVar[dict[str, str]] = {"resize": "Weights"}

    resize: PositionResize | None = None
    """How position embeddings are resized to another grid (default: as in the source of the weights)."""
    source_size: Annotated[tuple[int, ...] | None, arg(metavar="PIXELS...")] = None
    """Image size in pixels for which the position embeddings were trained: one number, or height and width; for clips,
    frames first (default: read from the file)."""

    def source(self, path: str) -> str | WeightsSource:
        """Return the path as a `WeightsSource` with these options, or unchanged if none is set."""
        source = WeightsSource(path, self.resize, self.source_size)
        return source if source.to_command_options else path


@dataclass(frozen=True, kw_only=True)
class InferenceWeightsOptions(WeightsOptions):
    """Options of every verb that runs a model on images: those of its weights, and native aspect ratios."""

    SECTIONS: ClassVar[dict[str, str]] = {"native_aspect": "Native aspect ratio"}

    native_aspect: bool = False
    """Keep the aspect ratio of each image instead of cropping or squashing it, for ViTs that add positions at the
    input. Models trained with --native-aspect always do."""
    tokens: int | None = None
    """With --native-aspect: maximum number of patches per image (default: as in training)."""

    def source(self, path: str) -> str | WeightsSource:
        """Return the path as a `WeightsSource` with these options, or unchanged if none is set. Raises UsageError for
        too few tokens."""
        source = WeightsSource(path, self.resize, self.source_size, self.native_aspect, tokens=self.tokens)
        return source if source.to_command_options else path


@dataclass(frozen=True, kw_only=True)
class ZeroShotOptions(WeightsOptions):
    """Options that make a zero-shot classifier of weights with a text encoder, such as CLIP or SigLIP."""

    SECTIONS: ClassVar[dict[str, str]] = {"labels": "Zero-shot classification"}

    labels: Annotated[tuple[str, ...], arg(metavar="LABEL...")] = ()
    """Classes as texts, such as --labels "cat" "dog", or a .txt file with one per line; for models with a text
    encoder."""
    templates: Annotated[tuple[str, ...], arg(metavar="TEMPLATE...")] = ()
    """Prompts of a label: none, photo, this-is, openai (80), openai-7, or texts such as 'a sketch of a {}.' (default:
    this-is for SigLIP, else photo)."""
    multilabel: bool = False
    """Score labels independently by a sigmoid, as SigLIP was trained, instead of a softmax over all."""

    def source(self, path: str) -> str | WeightsSource:
        """Return the path as a `WeightsSource` with these options, or unchanged if none is set. Raises UsageError for
        templates or `multilabel` without labels."""
        source = super().source(path)
        if not self.labels:
            if name := next((name for name in ("templates", "multilabel") if getattr(self, name)), None):
                raise UsageError(f"--{name} is for zero-shot classification", f"add --labels, or leave --{name} out")
            return source
        source = source if isinstance(source, WeightsSource) else WeightsSource(path)
        return replace(source, labels=self.labels, templates=self.templates, multilabel=self.multilabel)
