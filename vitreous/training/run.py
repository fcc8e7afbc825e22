"""A run as frozen values: every number that decides what a training run does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vitreous.data.augment import Augment
from vitreous.data.preprocess import Preprocess
from vitreous.errors import UsageError
from vitreous.models.config import ModelConfig, ViTConfig


@dataclass(frozen=True)
class DataOptions:
    """Where the images are. `cache` keeps the training pictures in memory; `classes` is the order of the logits."""

    source: str
    classes: tuple[str, ...]
    images: int  # of the training split, after unreadable ones were dropped
    fingerprint: str
    split_seed: int = 0
    bad_images: Literal["stop", "skip"] = "stop"
    cache: bool = False
    workers: int = 0


@dataclass(frozen=True)
class Optimizer:
    """How weights move. Decay is decoupled, multiplied by the current learning rate, and acts on matrices alone.

    `matrix_lr` is the learning rate of Muon, which moves the matrices of the blocks; AdamW with `lr` moves the rest.
    """

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    lr: float = 1e-3
    matrix_lr: float = 0.02
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9
    weight_decay: float = 0.05
    clip: float | None = 1.0  # of the global gradient norm


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up from 0, then `decay` to `end` times the base rate (arXiv:2010.11929, Tables 3 and 4)."""

    warmup_steps: int = 0
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    end: float = 0.0


@dataclass(frozen=True)
class Run:
    """Everything that a training run needs to know; `config.yaml` in its folder.

    `batch_size` counts the images of one forward pass over all devices, `accumulate` such batches make an optimiser step.
    The run sees epochs x images pictures exactly; the last step may be smaller. Raises UsageError for what cannot work.
    """

    data: DataOptions
    model: ModelConfig
    preprocess: Preprocess
    augment: Augment = field(default_factory=Augment)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    init: str | None = None
    mimetic: bool = False  # attention matrices that start out as trained ones look (arXiv:2305.09828)
    smoothing: float = 0.0
    patch_dropout: float = 0.0  # share of the patches left out, in the first `patch_dropout_until` of the run
    patch_dropout_until: float = 0.7
    progressive: float = 1.0  # side of the first pictures as a share of the model's; grows until `progressive_until` of the run
    progressive_until: float = 0.7
    batch_size: int = 128
    accumulate: int = 1
    epochs: float = 30.0
    ema: float | None = None  # decay of the averaged copy of the weights, which is then what is judged and saved
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    shards: int = 1  # parts of a batch that are computed side by side on a CPU, each with a share of the cores
    device: str = "cpu"
    seed: int = 0
    log_every: int = 20  # steps
    evaluate_every: int = 500
    save_every: int = 500
    keep: int = 2  # checkpoints

    def __post_init__(self) -> None:
        whole = {
            name: getattr(self, name)
            for name in ("batch_size", "accumulate", "log_every", "evaluate_every", "save_every", "keep", "shards")
        }
        for name, value in whole.items():
            if value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}")
        if self.epochs <= 0 or self.optimizer.lr < 0 or self.schedule.warmup_steps < 0:
            raise UsageError("epochs must be above 0, learning rate and warm-up steps not below 0")
        if self.ema is not None and not 0 <= self.ema < 1:
            raise UsageError(f"ema must be at least 0 and below 1, not {self.ema}")
        if self.shards > 1 and (self.compile or self.model.dropout or self.model.drop_path):
            raise UsageError(f"{self.shards} shards go with neither compile, dropout nor drop_path", "use --shards 1")
        if not 0 <= self.patch_dropout < 1:
            raise UsageError(f"patch_dropout must be at least 0 and below 1, not {self.patch_dropout}")
        if (not isinstance(self.model, ViTConfig) or self.model.on_grid) and (self.patch_dropout or self.mimetic):
            raise UsageError("patch dropout and mimetic initialisation are for ViTs whose blocks see every patch", "leave them out")
        if not 0 < self.progressive <= 1 or (self.progressive < 1 and len(self.model.image) != 2):
            raise UsageError(f"progressive must be above 0 and at most 1 (1 for other than pictures), not {self.progressive}")
        if self.model.classes != len(self.data.classes):
            raise UsageError(f"the model has {self.model.classes} classes, the data {len(self.data.classes)}")
        batches = -(-self.data.images // self.batch_size)
        if self.accumulate > batches:
            raise UsageError(
                f"--accumulate {self.accumulate} with {batches} batches an epoch gives no optimiser step",
                f"use --accumulate {batches} or a smaller --batch-size",
            )

    @property
    def total(self) -> int:
        """Pictures that the whole run sees."""
        return max(1, round(self.epochs * self.data.images))

    @property
    def step_size(self) -> int:
        """Pictures of one optimiser step."""
        return self.batch_size * self.accumulate

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole run."""
        return -(-self.total // self.step_size)
