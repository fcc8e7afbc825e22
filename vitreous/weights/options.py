"""What a user says of weights that their files do not tell. Needs no PyTorch."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, ClassVar, get_args

from tyro.conf import arg

from vitreous.errors import UsageError, suggest_nearest
from vitreous.models.config import PositionResize
from vitreous.nn.sizes import check_token_budget


@dataclass(frozen=True)
class WeightsSource(os.PathLike[str]):
    """A path or name of weights, as `open_weights` takes it, with what is known of them beside their files.

    `resize` is the rule by which their positions are resized, a row of `nn.grid.RESIZE_MODES`. `source_size` is the
    size of the images that the positions are for, in pixels: one side of a square, height and width, or frames, height
    and width. `native_aspect`: the model is to be asked about pictures at their own aspect ratio, of at most so many
    `tokens` (patches), None for as many as it was trained with. Raises UsageError for other values.
    """

    path: str
    resize: PositionResize | None = None
    source_size: int | tuple[int, ...] | None = None
    native_aspect: bool = False
    _: KW_ONLY
    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None:
            check_token_budget(self.tokens)
        if self.resize is not None and self.resize not in (known := get_args(PositionResize)):
            raise UsageError(
                f"no rule {self.resize} to resize positions",
                suggest_nearest(self.resize, known) or f"use one of {', '.join(known)}",
            )
        if self.source_size is not None and (len(self.sides) not in (1, 2, 3) or min(self.sides) < 1):
            raise UsageError("--source-size takes one side or height and width, in pixels, of clips frames before them")

    def __fspath__(self) -> str:
        return self.path

    def __str__(self) -> str:
        return self.path

    @property
    def sides(self) -> tuple[int, ...]:
        """The numbers of `source_size`."""
        return (
            ()
            if self.source_size is None
            else (self.source_size,)
            if isinstance(self.source_size, int)
            else tuple(self.source_size)
        )

    @property
    def fields(self) -> dict[str, Any]:
        """The same as fields of `ViTConfig` by their dotted paths: those that were given."""
        given: dict[str, Any] = {} if self.resize is None else {"positions.resize": self.resize}
        sides = self.sides if len(self.sides) == 3 else (*self.sides[:1], *self.sides[-1:])
        return given | ({"image": sides} if sides else {})

    @property
    def words(self) -> list[str]:
        """The same as words of a command."""
        given = [] if self.resize is None else ["--resize", self.resize]
        given += ["--source-size", *map(str, self.sides)] if self.sides else []
        given += ["--native-aspect"] * self.native_aspect
        return given + ([] if self.tokens is None else ["--tokens", str(self.tokens)])


def get_source_fields(source: str | os.PathLike[str]) -> dict[str, Any]:
    """What a source of weights says of them beside their files: fields of `ViTConfig`."""
    return source.fields if isinstance(source, WeightsSource) else {}


def get_source_options(source: str | os.PathLike[str]) -> list[str]:
    """The options of a command that say the same."""
    return source.words if isinstance(source, WeightsSource) else []


@dataclass(frozen=True, kw_only=True)
class WeightsOptions:
    """Options of every verb that reads weights; docs/weights.md has a table of what each format tells."""

    SECTIONS: ClassVar[dict[str, str]] = {"resize": "Weights"}

    resize: PositionResize | None = None
    """How position embeddings are resized to another grid (default: as in the source of the weights)."""
    source_size: Annotated[tuple[int, ...] | None, arg(metavar="PIXELS...")] = None
    """Image size in pixels for which the position embeddings were trained: one number, or height and width; for clips,
    frames first (default: read from the file)."""

    def source(self, path: str) -> str | WeightsSource:
        """The weights at a path, with these options."""
        source = WeightsSource(path, self.resize, self.source_size)
        return source if source.words else path


@dataclass(frozen=True, kw_only=True)
class InferenceWeightsOptions(WeightsOptions):
    """Options of every verb that asks a model about pictures."""

    SECTIONS: ClassVar[dict[str, str]] = {"native_aspect": "Native aspect ratio"}

    native_aspect: bool = False
    """Keep the aspect ratio of each image instead of cropping or squashing it, for ViTs that add positions at the
    input. Models trained with --native-aspect always do."""
    tokens: int | None = None
    """With --native-aspect: maximum number of patches per image (default: as in training)."""

    def source(self, path: str) -> str | WeightsSource:
        """The weights at a path, with these options. Raises UsageError for too few tokens."""
        source = WeightsSource(path, self.resize, self.source_size, self.native_aspect, tokens=self.tokens)
        return source if source.words else path
