"""Pre-training steps of vitreous: MAE, and DINO with two global and eight local views."""

from __future__ import annotations

import torch
from torch import Tensor

from vitreous.apps.bench.work import Turn, Work
from vitreous.data.augmentation.views import GLOBAL, MultiCrop
from vitreous.models.names import configure_vit
from vitreous.models.zoo import create
from vitreous.nn.cuda_graphs import CapturedPasses
from vitreous.nn.encoder import compile_blocks
from vitreous.objectives.base import Objective, ObjectiveConfig, Progress, Setting
from vitreous.objectives.dino import DINOConfig
from vitreous.objectives.dinov2 import DINOv2Config
from vitreous.objectives.mae import MAEConfig
from vitreous.system.machine import DTYPES, pick_precision, settle_process
from vitreous.training.flat import Flat
from vitreous.training.optimizer import Optimizers
from vitreous.training.run import Optimizer
from vitreous.training.shards import Shards, default_shards

LOCAL = 6  # patches along a side of a local view: 96 pixels of 16, as published
PRETRAINING: dict[str, tuple[ObjectiveConfig, Optimizer, float]] = {  # objective, optimizer, stochastic depth
    "mae": (MAEConfig(), Optimizer(betas=(0.9, 0.95), clip=None), 0.0),
    "dino": (DINOConfig(), Optimizer(clip=3.0, clip_by="tensor"), 0.1),
    "dinov2": (DINOv2Config(), Optimizer(clip=3.0, clip_by="part"), 0.3),
}


def views_of(work: Work) -> MultiCrop:
    """The views of DINO, of the model's patch."""
    side = LOCAL * configure_vit(work.model).patch[0]
    return MultiCrop(local_image=(side, side))


def images_of(work: Work) -> dict[str, Tensor]:
    """Normalised noise, "images" (B, C, H, W); for DINO (B, 2, C, H, W), and "local" (B, 8, C, h, w)."""
    size, views = (3, work.image_size, work.image_size), views_of(work)
    if work.task == "mae":
        return {"images": torch.randn(work.batch_size, *size)}
    local = torch.randn(work.batch_size, views.locals, 3, *views.local_image)
    return {"images": torch.randn(work.batch_size, GLOBAL, *size), "local": local}


def objective_of(work: Work, dtype: torch.dtype = torch.float32) -> Objective:
    """The objective of a model with random weights."""
    config, _, drop_path = PRETRAINING[work.task]
    position = "sincos" if work.task == "mae" else "learned"
    model = create(
        work.model, work.image_size, 0, regularization={"drop_path": drop_path}, positions={"kind": position}
    )
    config.initialise(model)
    return config.build(model, Setting(dtype=dtype, views=views_of(work)))


def operations(work: Work) -> float:
    """Floating-point operations of a sample's step."""
    with torch.device("meta"):
        return objective_of(work).flops(Progress())


def pretrain(work: Work, precision: str = "auto", compiled: bool | None = None, graphs: bool = True) -> Turn:
    """Masks and targets, forward, backward, clipping, AdamW, teacher: a step of the loop."""
    settle_process()
    torch.manual_seed(0)
    _, optimizer, _ = PRETRAINING[work.task]
    dtype, device = DTYPES[pick_precision(precision, work.device)], torch.device(work.device)
    objective = objective_of(work, dtype).train()
    batch = {name: images.to(device) for name, images in images_of(work).items()}
    return steps(work, objective, optimizer=optimizer, dtype=dtype, batch=batch, compiled=compiled, graphs=graphs)


def steps(
    work: Work,
    objective: Objective,
    optimizer: Optimizer,
    dtype: torch.dtype,
    batch: dict[str, Tensor],
    compiled: bool | None = None,
    graphs: bool = True,
) -> Turn:
    """Return turns that are training steps of an objective on one batch, whose "images" (B, C, *image) are normalised
    float32; on a GPU with `compiled` blocks and CUDA graphs, as `train` has it."""
    count = default_shards(work.device, work.batch_size) if objective.config.splittable else 1
    flat = Flat(objective, dtype, torch.device(work.device), shards=count)
    if work.compiles if compiled is None else compiled:
        compile_blocks(objective)
    optimizers, compute = Optimizers(optimizer, flat), Shards(objective, flat)
    if work.compiles:
        compute.on_host = False
        compute.captured = CapturedPasses(work.device) if objective.capturable and graphs else None
    batch["positions"] = batch["samples"] = torch.arange(work.batch_size)

    def turn() -> float:
        with torch.no_grad():
            ready = objective.prepare(batch, Progress())
        flat.zero()
        compute.backward({name: v.to(dtype) if name in ("images", "local") else v for name, v in ready.items()}, 1.0)
        flat.collect()
        flat.clip(optimizer.clip, optimizer.clip_by)
        optimizers.step(1.0)
        flat.sync(1)
        with torch.no_grad():
            objective.after_step(Progress())
        return work.batch_size

    return turn
