"""Pre-training steps of other libraries: transformers' ViTMAE, and DINO with lightly's modules and timm's ViT."""
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.apps.bench.pretraining import PRETRAINING_CONFIGS, make_pretraining_batch
from vitreous.apps.bench.work import BenchmarkStep, Workload
from vitreous.models.names import vit_config_from_name
from vitreous.objectives.heads import HeadOptions

TEACHER_MOMENTUM = 0.996


def build_adamw(workload: Workload, parameters: Any, fused: bool) -> torch.optim.Optimizer:
    """Build PyTorch's AdamW with the hyperparameters that vitreous uses for the workload's task."""
    options = PRETRAINING_CONFIGS[workload.task][1]
    return torch.optim.AdamW(
        parameters, options.lr, options.betas, weight_decay=options.weight_decay, fused=fused or None
    )


def autocast_context(workload: Workload, precision: str) -> Any:
    """Return the context manager of the forward pass: bfloat16 autocast if `precision` is bf16, else none."""
    return torch.autocast(workload.device, torch.bfloat16) if precision == "bf16" else nullcontext()


def build_transformers_mae_step(workload: Workload, precision: str = "fp32", compiled: bool = False) -> BenchmarkStep:
    """Build a training step of transformers' ViTMAEForPreTraining, as in the example of transformers."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    torch.manual_seed(0)
    shape = vit_config_from_name(workload.model, workload.image_size)
    sizes = {"hidden_size": shape.width, "num_hidden_layers": shape.depth, "num_attention_heads": shape.heads}
    grid: dict[str, Any] = {"image_size": workload.image_size, "patch_size": shape.patch[0], "norm_pix_loss": True}
    model: Any = ViTMAEForPreTraining(ViTMAEConfig(**sizes, intermediate_size=shape.mlp.hidden, **grid))
    model = model.to(workload.device).train()
    optimizer = build_adamw(workload, model.parameters(), precision == "bf16" or compiled)
    images = make_pretraining_batch(workload)["images"].to(workload.device)
    forward = torch.compile(model) if compiled else model

    def run_step() -> float:
        """Run one training step; return the number of images."""
        optimizer.zero_grad()
        with autocast_context(workload, precision):
            loss = forward(images).loss
        loss.backward()
        optimizer.step()
        return workload.batch_size

    return run_step


def build_lightly_dino_step(workload: Workload, precision: str = "fp32", batch_views: bool = False) -> BenchmarkStep:
    """Build a DINO training step in plain PyTorch, with lightly's head, loss and moving average, and timm's ViT.

    Views go through the student one at a time, as in lightly's example. With `batch_views`, views of the same size are
    one batch.
    """
    from lightly.loss import DINOLoss
    from lightly.models.modules import DINOProjectionHead
    from lightly.models.utils import update_momentum
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    shape, (config, options, drop_path) = (
        vit_config_from_name(workload.model, workload.image_size),
        PRETRAINING_CONFIGS[workload.task],
    )
    sizes: dict[str, Any] = {"embed_dim": shape.width, "depth": shape.depth, "num_heads": shape.heads, "num_classes": 0}
    assert isinstance(config, HeadOptions)
    num_prototypes = config.prototypes

    def build_network(drop_path_rate: float) -> nn.Module:
        """Build timm's ViT with lightly's DINO head."""
        backbone = VisionTransformer(
            workload.image_size, shape.patch[0], **sizes, drop_path_rate=drop_path_rate, dynamic_img_size=True
        )
        return nn.Sequential(backbone, DINOProjectionHead(shape.width, 2048, 256, num_prototypes)).to(workload.device)

    student, teacher = build_network(drop_path).train(), build_network(0.0).requires_grad_(False).eval()
    teacher.load_state_dict(student.state_dict())  # modules with weight norm do not support deepcopy
    criterion, optimizer = (
        DINOLoss(num_prototypes).to(workload.device),
        build_adamw(workload, student.parameters(), precision == "bf16"),
    )
    global_views, local_views = (
        images.transpose(0, 1).contiguous().to(workload.device) for images in make_pretraining_batch(workload).values()
    )

    def run_step() -> float:
        """Run one training step; return the number of images."""
        update_momentum(student, teacher, TEACHER_MOMENTUM)
        optimizer.zero_grad()
        with autocast_context(workload, precision):
            targets = forward_views(teacher, global_views, batch_views)
            loss = criterion(
                targets,
                forward_views(student, global_views, batch_views) + forward_views(student, local_views, batch_views),
            )
        loss.backward()
        for parameter in student.parameters():
            if parameter.grad is not None:
                nn.utils.clip_grad_norm_(parameter, options.clip or 0.0)
        optimizer.step()
        return workload.batch_size

    return run_step


def forward_views(model: Callable[[Tensor], Tensor], views: Tensor, is_batched: bool) -> list[Tensor]:
    """Compute a model's outputs for (V, B, C, h, w) views: V tensors (B, K). If `is_batched`, all views are one
    batch."""
    if is_batched:
        return list(model(views.flatten(0, 1)).chunk(len(views)))
    return [model(view) for view in views]
