"""Data options of a run, as stored in its config.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DataOptions:
    """The training data of a run. `source` is the name or path of the dataset; `classes` is the order of the logits;
    `cache` keeps the training images in memory."""

    source: str
    classes: tuple[str, ...]
    images: int  # number of training images, without unreadable ones
    fingerprint: str  # SHA-256 of `Data.fingerprint`, for detecting changed data
    split_seed: int = 0
    # share of all training images that is held out as `val`; 0: none; None: the splits as opened
    hold_out: float | None = None
    # table column, or regular expression for paths, that defines the groups, which are not divided between splits
    group_by: str | None = None
    axes: Literal[1, 2, 3] | None = None  # axes of a file: signals (1), images (2) or volumes (3); None: detected
    ignore_index: int | None = None  # ignored index in class maps, in addition to 255
    # exclusion list of training images; the run stores their names in excluded.json
    exclude: str | None = None
    exact: bool = False  # never decode a JPEG at reduced resolution for a crop that is downscaled
    bad_images: Literal["stop", "skip"] = "stop"
    # names of regression targets: columns of a table
    targets: tuple[str, ...] = ()
    cache: bool = False
    workers: int = 0
    # balanced: every class equally often; repeat-factor: an image whose rarest class occurs on a share f of the images
    # is shown sqrt(repeat_threshold / f) times as often, if that is above 1 (LVIS, arXiv:1908.03195)
    sampling: Literal["even", "balanced", "repeat-factor"] = "even"
    repeat_threshold: float = 0.001
    repeats: int = 1  # views of an image per epoch of 1 / repeats of the images (arXiv:1902.05509)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs of the model's head: regression targets, or else classes."""
        return self.targets or self.classes
