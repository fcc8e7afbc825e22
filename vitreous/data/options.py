"""Which data a run trains on, as its config.yaml has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DataOptions:
    """Where the images are. `cache` keeps the training pictures in memory; `classes` is the order of the logits."""

    source: str
    classes: tuple[str, ...]
    images: int  # of the training split, after unreadable ones were dropped
    fingerprint: str
    split_seed: int = 0
    # share of all training images that is `val`; 0: all train; none: the splits as the data have them
    hold_out: float | None = None
    # what names the group of an image, none of which is in `train` and in `val`: `group`, or an expression
    group_by: str | None = None
    axes: Literal[1, 2, 3] | None = None  # files are signals, pictures or volumes; None: as they can be told
    ignore_index: int | None = None  # in class maps: the number of pixels without a class, beside 255
    # the list of training images that are left out; the run keeps their names in excluded.json
    exclude: str | None = None
    exact: bool = False  # a photograph is never decoded at a lower resolution for a crop that shrinks it
    bad_images: Literal["stop", "skip"] = "stop"
    # names of the values that images have in the place of classes: columns of a table
    targets: tuple[str, ...] = ()
    cache: bool = False
    workers: int = 0
    # balanced: every class as often as any other; repeat-factor: images of a class that a share f of the images has are
    # shown sqrt(repeat_threshold / f) times as often, if that is above 1 (LVIS, arXiv:1908.03195)
    sampling: Literal["even", "balanced", "repeat-factor"] = "even"
    repeat_threshold: float = 0.001
    repeats: int = 1  # times that an epoch shows a picture, of a share 1 / repeats of them (arXiv:1902.05509)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs of a head: targets or classes."""
        return self.targets or self.classes
