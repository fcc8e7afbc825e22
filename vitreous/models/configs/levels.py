"""Which maps of features a backbone gives, stride by stride."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple


class Level(NamedTuple):
    """A map of a backbone: the pixels per axis that a place of it stands for, and its channels."""

    patch: tuple[int, ...]
    width: int

    @property
    def stride(self) -> int:
        """Pixels to a place along the first axis, by which a map is asked for."""
        return self.patch[0]

    def grid_of(self, image: tuple[int, ...]) -> tuple[int, ...]:
        """Places per axis of the map of an image of these sides, in pixels: a remainder is a place too."""
        return tuple(-(-side // p) for side, p in zip(image, self.patch, strict=True))


class Leveled:
    """What configs of backbones share: their maps by stride, which `features_at` of the model gives.

    `has_stages` says whether dense heads read these maps, each with its own channels; else they read one grid after
    several blocks.
    """

    has_stages: ClassVar[bool] = False

    @property
    def levels(self) -> tuple[Level, ...]:
        """The maps, the finest first."""
        raise NotImplementedError

    @property
    def strides(self) -> tuple[int, ...]:
        """The stride of each map, in pixels along the first axis, the finest first."""
        return tuple(level.stride for level in self.levels)

    def unread(self, strides: Sequence[int]) -> tuple[str, ...]:
        """The names of parts of the model that no map of these strides depends on, beside last norms and heads."""
        return ()

    def level_at(self, stride: int) -> Level:
        """The map of a stride. Raises ValueError for a stride of no map."""
        self.check_strides([stride])
        return self.levels[self.strides.index(stride)]

    def check_strides(self, strides: Sequence[int]) -> None:
        """Raise ValueError for no strides, and for one of no map."""
        if not strides or not set(strides) <= set(self.strides):
            raise ValueError(f"strides {tuple(strides)} are not among {self.strides}, those of the model's maps")
