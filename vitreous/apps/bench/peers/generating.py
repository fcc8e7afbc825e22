"""Benchmark steps of diffusers: training its DiT in plain PyTorch, and sampling with its DDIM scheduler."""
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from __future__ import annotations

from typing import Any

import torch

from vitreous.apps.bench.generating import DIT_OPTIMIZER, GUIDANCE_SCALE, SAMPLING_STEPS, configure_generator
from vitreous.apps.bench.peers.pretraining import autocast_context
from vitreous.apps.bench.work import BenchmarkStep, Workload


def build_diffusers_dit(workload: Workload) -> Any:
    """Build diffusers' DiT with the shape of the workload's model and random weights."""
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    config = configure_generator(workload)
    model: Any = DiTTransformer2DModel(
        num_attention_heads=config.heads,
        attention_head_dim=config.width // config.heads,
        in_channels=config.channels,
        out_channels=config.out_channels,
        num_layers=config.depth,
        sample_size=config.image[0],
        patch_size=config.patch[0],
        num_embeds_ada_norm=config.classes,
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model.to(workload.device)


def build_diffusers_train_step(workload: Workload, precision: str = "fp32", compiled: bool = False) -> BenchmarkStep:
    """Build a training step as in diffusers' examples: noise from its scheduler, squared error of the predicted noise,
    AdamW."""
    from diffusers import DDPMScheduler

    config, model = configure_generator(workload), build_diffusers_dit(workload).train()
    fused = precision == "bf16" or compiled
    optimizer = torch.optim.AdamW(model.parameters(), DIT_OPTIMIZER.lr, weight_decay=0.0, fused=fused or None)
    scheduler: Any = DDPMScheduler(1000)
    images = torch.randn(workload.batch_size, config.channels, *config.image, device=workload.device)
    labels = torch.arange(workload.batch_size, device=workload.device) % config.classes
    forward = torch.compile(model) if compiled else model

    def run_step() -> float:
        """Run one training step; return the number of images."""
        optimizer.zero_grad()
        noise, time = torch.randn_like(images), torch.randint(1000, (workload.batch_size,), device=workload.device)
        noisy = scheduler.add_noise(images, noise, time)
        with autocast_context(workload, precision):
            output = forward(noisy, timestep=time, class_labels=labels).sample
        (output[:, : config.channels].float() - noise).square().mean().backward()
        optimizer.step()
        return workload.batch_size

    return run_step


def build_diffusers_sampling_step(workload: Workload, precision: str = "fp32", compiled: bool = False) -> BenchmarkStep:
    """Build a benchmark step: sample a batch by DDIM in as many steps as vitreous. As in diffusers, each computes the
    conditional and the unconditional output in one batch."""
    from diffusers import DDIMScheduler

    config, model = configure_generator(workload), build_diffusers_dit(workload).eval()
    scheduler: Any = DDIMScheduler(1000, clip_sample=False)
    labels = torch.arange(workload.batch_size, device=workload.device) % config.classes
    guidance_labels = torch.cat([labels, torch.full_like(labels, config.classes)])
    forward = torch.compile(model) if compiled else model

    @torch.inference_mode()
    def run_step() -> float:
        """Sample one batch; return the number of images."""
        scheduler.set_timesteps(SAMPLING_STEPS)
        noisy = torch.randn(workload.batch_size, config.channels, *config.image, device=workload.device)
        for time in scheduler.timesteps:
            with autocast_context(workload, precision):
                times = time.expand(2 * workload.batch_size).to(workload.device)
                output = forward(noisy.repeat(2, 1, 1, 1), timestep=times, class_labels=guidance_labels).sample
            conditional, unconditional = output[:, : config.channels].float().chunk(2)
            noisy = scheduler.step(
                unconditional + GUIDANCE_SCALE * (conditional - unconditional), time, noisy
            ).prev_sample
        return workload.batch_size

    return run_step
