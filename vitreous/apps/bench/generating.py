"""Benchmark steps of vitreous for diffusion: training a DiT, and sampling from it."""

from __future__ import annotations

from typing import Any

import torch

from vitreous.apps.bench.pretraining import make_objective_step
from vitreous.apps.bench.work import BenchmarkStep, Workload
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.generation.process import Diffusion
from vitreous.generation.settings import SamplingOptions
from vitreous.inference.image_sampler import ImageSampler
from vitreous.models.dit import DiT
from vitreous.models.names import config_from_name
from vitreous.objectives.base import ObjectiveSetting
from vitreous.objectives.diffusion import DiffusionConfig
from vitreous.system.machine import DTYPES, configure_process, pick_precision
from vitreous.training.run import OptimizerConfig

DIT_OPTIMIZER = OptimizerConfig(lr=1e-4, weight_decay=0.0, clip=None)  # published for DiT (arXiv:2212.09748)
SAMPLING_STEPS, GUIDANCE_SCALE = 10, 1.5  # each step computes a conditional and an unconditional output


def configure_generator(workload: Workload) -> Any:
    """Return the config of the workload's DiT. Its output includes variances, as published."""
    return config_from_name(workload.model, workload.image_size)


def build_random_dit(workload: Workload) -> Any:
    """Build the workload's DiT with normally distributed weights (std 0.02). In a newly initialised DiT, most gradients
    would be 0."""
    torch.manual_seed(0)
    model = DiT(configure_generator(workload))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model


def build_dit_train_step(
    workload: Workload, precision: str = "auto", compiled: bool | None = None, graphs: bool = True
) -> BenchmarkStep:
    """Build a DiT training step on one batch of random images: noise, forward, backward, AdamW. `compiled` and `graphs`
    are those of `make_objective_step`."""
    configure_process()
    dtype, config = DTYPES[pick_precision(precision, workload.device)], configure_generator(workload)
    classes = tuple(map(str, range(config.classes)))
    objective = (
        DiffusionConfig().build(build_random_dit(workload), ObjectiveSetting(classes=classes, dtype=dtype)).train()
    )
    images = torch.randn(workload.batch_size, config.channels, *config.image)
    batch = {"images": images, "labels": torch.arange(workload.batch_size) % config.classes}
    batch = {name: tensor.to(workload.device) for name, tensor in batch.items()}
    return make_objective_step(
        workload, objective, optimizer=DIT_OPTIMIZER, dtype=dtype, batch=batch, compiled=compiled, graphs=graphs
    )


def build_dit_sampling_step(workload: Workload, precision: str = "auto") -> BenchmarkStep:
    """Build a sampling step, from noise to pixels: DDIM with `SAMPLING_STEPS` steps and classifier-free guidance."""
    config = configure_generator(workload)
    half_moments = (0.5,) * config.channels
    preprocess = ImagePreprocess(config.image, config.channels, half_moments, half_moments)
    sampler = ImageSampler(
        build_random_dit(workload).eval(),
        Diffusion(),
        classes=config.classes,
        preprocess=preprocess,
        device=workload.device,
        precision=precision,
    )
    labels, image_indices = torch.arange(workload.batch_size) % config.classes, torch.arange(workload.batch_size)

    def run_step() -> float:
        """Sample one batch; return the number of images."""
        sampler.sample(labels, image_indices, SamplingOptions(GUIDANCE_SCALE, steps=SAMPLING_STEPS))
        return workload.batch_size

    return run_step
