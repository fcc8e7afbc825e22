"""Short training sessions of every objective on 32 synthetic images in memory, through the training loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.objectives.test_distillation import CLASSES, make_teacher_bundle
from vitreous.data.augmentation.augment import Augment
from vitreous.data.augmentation.views import MultiCrop
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.options import DataOptions
from vitreous.data.split import ArraySplit
from vitreous.models.config import DiTConfig, MlpConfig, PositionConfig, ViTConfig
from vitreous.objectives.diffusion import DiffusionConfig
from vitreous.objectives.dino import DINOConfig
from vitreous.objectives.dinov2 import DINOv2Config
from vitreous.objectives.dinov3 import DINOv3Config
from vitreous.objectives.distillation import DistillationConfig
from vitreous.objectives.flow import FlowConfig
from vitreous.objectives.mae import MAEConfig
from vitreous.objectives.masked import MaskedPatchesConfig
from vitreous.objectives.regression import RegressionConfig
from vitreous.training.batches import RunInputs
from vitreous.training.folder import RunFolder
from vitreous.training.loop import run_training_loop
from vitreous.training.run import OptimizerConfig, RampConfig, Run, ScheduleConfig
from vitreous.training.session import Session

NUM_IMAGES = 32
TARGET_NAMES = ("red", "blue")
MODEL_CONFIG = ViTConfig(
    image=(16, 16),
    patch=(4, 4),
    classes=0,
    width=32,
    depth=2,
    heads=2,
    mlp=MlpConfig(hidden=64),
    positions=PositionConfig(kind="sincos"),
)
HEAD_OPTIONS = {"prototypes": 32, "head_width": 24, "bottleneck": 16, "frozen": 0.1}
PATCH_HEAD_OPTIONS: dict[str, Any] = {"centring": "sinkhorn", "patch_prototypes": 24, "patch_bottleneck": 8}
GRAM_OPTIONS: dict[str, Any] = {"local_weight": 0.5, "gram_weight": 2.0, "gram_start": 0.2, "gram_refresh": 0.25}
#: objective config of each session; a TEACHER placeholder is replaced by a teacher
OBJECTIVE_CONFIGS = {
    "mean-colour": MaskedPatchesConfig(),
    "small-colours": MaskedPatchesConfig(target="small-colours"),
    "pixels": MaskedPatchesConfig(target="pixels"),
    "mae": MAEConfig(decoder_width=16, decoder_depth=1, decoder_heads=2),
    "dino": DINOConfig(**HEAD_OPTIONS),
    "dinov2": DINOv2Config(**HEAD_OPTIONS),
    "dinov2-sinkhorn": DINOv2Config(**HEAD_OPTIONS, **PATCH_HEAD_OPTIONS),
    "dinov3": DINOv3Config(**HEAD_OPTIONS, **PATCH_HEAD_OPTIONS, **GRAM_OPTIONS),
    "hard": DistillationConfig(smoothing=0.1),
    "soft": DistillationConfig(kind="soft", temperature=2.0),
    "diffusion": DiffusionConfig(),
    "flow": FlowConfig(times="logit-normal"),
    "values": RegressionConfig(loss="huber"),
}
GENERATOR_CONFIG = DiTConfig(
    image=(16, 16), patch=(4, 4), channels=3, classes=3, width=32, depth=2, heads=2, hidden=64, learned_variance=False
)
MODEL_CONFIGS = {
    "hard": replace(MODEL_CONFIG, classes=3, pool="distilled"),
    "soft": replace(MODEL_CONFIG, classes=3),
    "diffusion": replace(GENERATOR_CONFIG, learned_variance=True),
    "flow": GENERATOR_CONFIG,
    "values": replace(MODEL_CONFIG, classes=2),
}
TEACHER_SCHEDULES = {
    "weight_decay": RampConfig(0.04, 0.4),
    "momentum": RampConfig(0.95, 1.0),
    "teacher_temperature": RampConfig(0.1, 0.12, "linear", 10),
}


def make_image_split() -> ArraySplit:
    """Return 32 images of four coloured squares with one of four stripe patterns; the patterns are the labels.

    Masked patches are predictable from visible ones: a square covers several patches, a stripe period is one patch.
    """
    generator = np.random.default_rng(0)
    colours = generator.integers(40, 216, (NUM_IMAGES, 2, 2, 3)).repeat(8, 1).repeat(8, 2)
    patterns = np.arange(NUM_IMAGES) % 4
    row, column = np.mgrid[:16, :16]
    stripes = np.stack([row, column, row + column, row - column])[patterns] % 4 * 24 - 36
    pixels = (colours + stripes[..., None]).clip(0, 255).astype(np.uint8)
    return ArraySplit(pixels, (patterns % 3).astype(np.int64))


def add_colour_values(split: ArraySplit) -> ArraySplit:
    """Return the images with the mean red and blue as regression labels, some of them missing."""
    values = split.pixels.mean((1, 2))[:, [0, 2]]
    values[::5, 0], values[1::3, 1] = np.nan, np.nan
    return ArraySplit(split.pixels, values)


def create_session(name: str, home: Path, **changes: Any) -> tuple[Session, Any]:
    """Return a session of an objective in `OBJECTIVE_CONFIGS` and its state: 20 steps of 8 images.

    `changes` are fields of the run.
    """
    split, objective = make_image_split(), OBJECTIVE_CONFIGS[name]
    distilled = isinstance(objective, DistillationConfig)
    if distilled:
        make_teacher_bundle().save(home / "teacher")
        objective = replace(objective, teacher=str(home / "teacher"))
    labelled = distilled or objective.generates
    if objective.of_values:
        split = add_colour_values(split)
        objective = objective.fitted(split.labels)
    elif not labelled:
        split = ArraySplit(split.pixels, np.zeros((NUM_IMAGES, 0), np.float32))
    crops = isinstance(objective, (DINOConfig, DINOv2Config))
    run = Run(
        data=DataOptions(
            "synthetic",
            CLASSES if labelled else (),
            NUM_IMAGES,
            "",
            cache=True,
            targets=TARGET_NAMES if objective.of_values else (),
        ),
        model=MODEL_CONFIGS.get(name, MODEL_CONFIG),
        preprocess=ImagePreprocess((16, 16)),
        views=MultiCrop(locals=2, local_image=(8, 8), blur=(0.0, 0.0, 0.0)) if crops else Augment(flip=0.5),
        optimizer=OptimizerConfig(
            lr=2e-3, clip=3.0, clip_by="tensor" if name == "dino" else "part" if crops else "all"
        ),
        schedule=ScheduleConfig(2),
        objective=objective,
        schedules=TEACHER_SCHEDULES if crops else {},
        batch_size=8,
        epochs=5.0,
    )
    run = replace(run, **changes)
    cached = torch.from_numpy(split.pixels.transpose(0, 3, 1, 2).copy())
    session = Session(run, RunInputs(split, None, cached), RunFolder(home))
    return session, session.build()


def collect_losses(session: Session, state: Any) -> list[float]:
    """Return the loss of every step."""
    losses: list[float] = []
    run_training_loop(
        state, session.batches(state), [(1, lambda s: (losses.append(s.losses), setattr(s, "losses", 0.0)))]
    )
    return losses
