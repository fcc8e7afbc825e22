"""Benchmark steps of vitreous for pre-training: MAE, and DINO with two global and eight local views."""

from __future__ import annotations

import torch
from torch import Tensor

from vitreous.apps.bench.work import BenchmarkStep, Workload
from vitreous.data.augmentation.views import NUM_GLOBAL_VIEWS, MultiCrop
from vitreous.models.names import vit_config_from_name
from vitreous.models.zoo import create_untrained_model
from vitreous.nn.cuda_graphs import CudaGraphRunner
from vitreous.nn.encoder import compile_blocks
from vitreous.objectives.base import Objective, ObjectiveConfig, ObjectiveSetting, TrainingProgress
from vitreous.objectives.dino import DINOConfig
from vitreous.objectives.dinov2 import DINOv2Config
from vitreous.objectives.mae import MAEConfig
from vitreous.system.machine import DTYPES, configure_process, pick_precision
from vitreous.training.flat import FlatParameters
from vitreous.training.optimizer import FlatOptimizer
from vitreous.training.run import OptimizerConfig
from vitreous.training.shards import Shards, choose_shard_count

LOCAL_VIEW_PATCHES = 6  # patches along a side of a local view: 96 pixels of 16, as published
PRETRAINING_CONFIGS: dict[
    str, tuple[ObjectiveConfig, OptimizerConfig, float]
] = {  # by task: objective, optimiser, rate of stochastic depth
    "mae": (MAEConfig(), OptimizerConfig(betas=(0.9, 0.95), clip=None), 0.0),
    "dino": (DINOConfig(), OptimizerConfig(clip=3.0, clip_by="tensor"), 0.1),
    "dinov2": (DINOv2Config(), OptimizerConfig(clip=3.0, clip_by="part"), 0.3),
}


def make_multi_crop(workload: Workload) -> MultiCrop:
    """Return DINO's multi-crop augmentation, with local views of `LOCAL_VIEW_PATCHES` patches per side."""
    view_size = LOCAL_VIEW_PATCHES * vit_config_from_name(workload.model).patch[0]
    return MultiCrop(local_image=(view_size, view_size))


def make_pretraining_batch(workload: Workload) -> dict[str, Tensor]:
    """Create a batch of normal noise in place of the loader's batch. MAE: "images" (B, C, H, W). DINO: "images" (B, 2,
    C, H, W), the global views, and "local" (B, 8, C, h, w), the local views."""
    size, views = (3, workload.image_size, workload.image_size), make_multi_crop(workload)
    if workload.task == "mae":
        return {"images": torch.randn(workload.batch_size, *size)}
    local_views = torch.randn(workload.batch_size, views.locals, 3, *views.local_image)
    return {"images": torch.randn(workload.batch_size, NUM_GLOBAL_VIEWS, *size), "local": local_views}


def build_random_objective(workload: Workload, dtype: torch.dtype = torch.float32) -> Objective:
    """Build the workload's pre-training objective around a model with random weights."""
    config, _, drop_path = PRETRAINING_CONFIGS[workload.task]
    position = "sincos" if workload.task == "mae" else "learned"
    model = create_untrained_model(
        workload.model, workload.image_size, 0, regularization={"drop_path": drop_path}, positions={"kind": position}
    )
    config.initialise(model)
    return config.build(model, ObjectiveSetting(dtype=dtype, views=make_multi_crop(workload)))


def count_sample_flops(workload: Workload) -> float:
    """Count the floating-point operations of a pre-training step per sample. A sample of DINO is an image with all its
    views."""
    with torch.device("meta"):
        return build_random_objective(workload).flops(TrainingProgress())


def build_pretraining_step(
    workload: Workload, precision: str = "auto", compiled: bool | None = None, graphs: bool = True
) -> BenchmarkStep:
    """Build a pre-training step: masks and targets, forward, backward, clipping, AdamW, teacher update. `compiled` and
    `graphs` are those of `make_objective_step`."""
    configure_process()
    torch.manual_seed(0)
    _, optimizer, _ = PRETRAINING_CONFIGS[workload.task]
    dtype, device = DTYPES[pick_precision(precision, workload.device)], torch.device(workload.device)
    objective = build_random_objective(workload, dtype).train()
    batch = {name: images.to(device) for name, images in make_pretraining_batch(workload).items()}
    return make_objective_step(
        workload, objective, optimizer=optimizer, dtype=dtype, batch=batch, compiled=compiled, graphs=graphs
    )


def make_objective_step(
    workload: Workload,
    objective: Objective,
    optimizer: OptimizerConfig,
    dtype: torch.dtype,
    batch: dict[str, Tensor],
    compiled: bool | None = None,
    graphs: bool = True,
) -> BenchmarkStep:
    """Return a training step of an objective on one batch, whose "images" (B, C, *image) are normalised float32. On a
    GPU, it uses compiled blocks and CUDA graphs, as `vitreous train` does; `compiled` and `graphs` override this."""
    num_shards = choose_shard_count(workload.device, workload.batch_size) if objective.config.can_split_batch else 1
    flat_parameters = FlatParameters(objective, dtype, torch.device(workload.device), shards=num_shards)
    if workload.uses_compile if compiled is None else compiled:
        compile_blocks(objective)
    optimizers, compute = FlatOptimizer(optimizer, flat_parameters), Shards(objective, flat_parameters)
    if workload.uses_compile:
        compute.on_host = False
        compute.captured = CudaGraphRunner(workload.device) if objective.capturable and graphs else None
    batch["positions"] = batch["samples"] = torch.arange(workload.batch_size)

    def run_step() -> float:
        """Run one training step; return the number of samples."""
        with torch.no_grad():
            prepared = objective.prepare(batch, TrainingProgress())
        flat_parameters.zero_grad()
        compute.backward({name: v.to(dtype) if name in ("images", "local") else v for name, v in prepared.items()}, 1.0)
        flat_parameters.collect()
        flat_parameters.clip(optimizer.clip, optimizer.clip_by)
        optimizers.step(1.0)
        flat_parameters.sync(1)
        with torch.no_grad():
            objective.after_step(TrainingProgress())
        return workload.batch_size

    return run_step
