"""Diffusion of vitreous: a training step of DiT, and images sampled from it."""

from __future__ import annotations

from typing import Any

import torch

from vitreous.apps.bench.pretraining import steps
from vitreous.apps.bench.work import Turn, Work
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.generation.process import Diffusion
from vitreous.generation.settings import SamplingOptions
from vitreous.inference.image_sampler import ImageSampler
from vitreous.models.dit import DiT
from vitreous.models.names import configure
from vitreous.objectives.base import Setting
from vitreous.objectives.diffusion import DiffusionConfig
from vitreous.system.machine import DTYPES, pick_precision, settle_process
from vitreous.training.run import Optimizer

OPTIMIZER = Optimizer(lr=1e-4, weight_decay=0.0, clip=None)  # as published
STEPS, GUIDANCE = 10, 1.5  # of an image; an answer for the class and one for none


def config_of(work: Work) -> Any:
    """The config of the work's model, with the variance learned as published."""
    return configure(work.model, work.image_size)


def model_of(work: Work) -> Any:
    """A DiT with random weights: of a fresh one most gradients are 0."""
    torch.manual_seed(0)
    model = DiT(config_of(work))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model


def train(work: Work, precision: str = "auto", compiled: bool | None = None, graphs: bool = True) -> Turn:
    """Noise, forward, backward, AdamW: a step of the loop."""
    settle_process()
    dtype, config = DTYPES[pick_precision(precision, work.device)], config_of(work)
    classes = tuple(map(str, range(config.classes)))
    objective = DiffusionConfig().build(model_of(work), Setting(classes=classes, dtype=dtype)).train()
    images = torch.randn(work.batch_size, config.channels, *config.image)
    batch = {"images": images, "labels": torch.arange(work.batch_size) % config.classes}
    batch = {name: part.to(work.device) for name, part in batch.items()}
    return steps(work, objective, optimizer=OPTIMIZER, dtype=dtype, batch=batch, compiled=compiled, graphs=graphs)


def sample(work: Work, precision: str = "auto") -> Turn:
    """Images by DDIM in `STEPS` steps with guidance, from noise to pixels."""
    config = config_of(work)
    middle = (0.5,) * config.channels
    preprocess = ImagePreprocess(config.image, config.channels, middle, middle)
    sampler = ImageSampler(
        model_of(work).eval(),
        Diffusion(),
        classes=config.classes,
        preprocess=preprocess,
        device=work.device,
        precision=precision,
    )
    labels, numbers = torch.arange(work.batch_size) % config.classes, torch.arange(work.batch_size)

    def turn() -> float:
        sampler.sample(labels, numbers, SamplingOptions(GUIDANCE, steps=STEPS))
        return work.batch_size

    return turn
