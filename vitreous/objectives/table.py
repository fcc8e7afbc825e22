"""The one table of objectives: the `name` in a run's config -> the config's class."""

from __future__ import annotations

from vitreous.objectives.base import ObjectiveConfig
from vitreous.objectives.supervised import SupervisedConfig

OBJECTIVES: dict[str, type[ObjectiveConfig]] = {"supervised": SupervisedConfig}
