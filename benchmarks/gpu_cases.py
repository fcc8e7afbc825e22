"""The timed cases of `gpu.py`: models, objectives, batch sizes, and the libraries they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import vitdet

from vitreous.apps.bench import generating, ours
from vitreous.apps.bench import pretraining as pretraining_steps
from vitreous.apps.bench.peers import generating as generating_peers
from vitreous.apps.bench.peers import models, pretraining
from vitreous.apps.bench.work import BenchmarkStep, Workload
from vitreous.inference.engine import TorchEngine
from vitreous.models.names import config_from_name
from vitreous.nn.encoder import compile_blocks
from vitreous.objectives.base import ObjectiveSetting, TrainingProgress

BuildStep = Callable[[Workload], BenchmarkStep]


@dataclass(frozen=True)
class BenchmarkCase:
    """A library with its settings at a workload. `compiles`: it uses torch.compile."""

    work: Workload
    name: str
    settings: str
    build: BuildStep
    compiles: bool = False

    @property
    def label(self) -> str:
        """Return library and settings: `vitreous, default`."""
        return f"{self.name}, {self.settings}"

    def flops(self, executed: bool = False) -> float:
        """Return the floating-point operations per image, two per multiply-add; 0 if they are not counted for the task.

        `executed` omits the operations of the last block that vitreous skips, because the head uses only one token.
        """
        config = config_from_name(self.work.model, self.work.image_size)
        if self.work.task in ("inference", "train"):
            passes = 1 if self.work.task == "inference" else 3
            return 2 * passes * (config.computed_macs() if executed and self.name == "vitreous" else config.macs())
        if self.work.task in pretraining_steps.PRETRAINING_CONFIGS:
            return pretraining_steps.count_sample_flops(self.work)
        if self.work.task == "dit":
            with torch.device("meta"):
                model = generating.build_random_dit(self.work)
                classes = tuple(map(str, range(model.config.classes)))
                return (
                    generating.DiffusionConfig()
                    .build(model, ObjectiveSetting(classes=classes))
                    .flops(TrainingProgress())
                )
        return 0.0


def training_cases(device: str, tiny: bool) -> list[BenchmarkCase]:
    """Return the cases of supervised training steps of plain ViTs at 224 pixels in bfloat16."""
    sizes = [("ViT-B/16", 224, (256, 64, 512)), ("ViT-L/16", 224, (128,))]
    cases: list[BenchmarkCase] = []
    timm = partial(models.build_peer_train_step, peer="timm", precision="bf16", compiled=True)
    for model, size, batches in [("ViT-64x2/16", 32, (4,))] if tiny else sizes:
        for batch in batches:
            work = Workload("train", model, size, batch, device=device)
            cases.append(
                BenchmarkCase(
                    work,
                    "vitreous",
                    "default: compiled blocks, CUDA graph",
                    partial(ours.build_train_step, compiled=True),
                    True,
                )
            )
            cases.append(BenchmarkCase(work, "timm", "bf16 autocast, compiled", timm, True))
            if batch < 512:
                graphs = partial(timm, mode="reduce-overhead")
                cases.append(BenchmarkCase(work, "timm", "bf16 autocast, compiled with CUDA graphs", graphs, True))
            if (model, batch) != (sizes[0][0], 256) and not tiny:
                continue
            cases += [
                BenchmarkCase(
                    work,
                    "vitreous",
                    "compiled blocks",
                    partial(ours.build_train_step, compiled=True, graphs=False),
                    True,
                ),
                BenchmarkCase(work, "vitreous", "CUDA graph", partial(ours.build_train_step, compiled=False)),
                BenchmarkCase(work, "vitreous", "eager", partial(ours.build_train_step, compiled=False, graphs=False)),
                BenchmarkCase(work, "vitreous", "compiled as a whole, CUDA graph", build_whole_graph_step, True),
                BenchmarkCase(work, "vitreous", "default, cuDNN attention", train_with_cudnn, True),
                BenchmarkCase(
                    work, "timm", "bf16 autocast", partial(models.build_peer_train_step, peer="timm", precision="bf16")
                ),
            ]
    return cases


def build_whole_graph_step(work: Workload) -> BenchmarkStep:
    """Build a training step in which the whole objective is one compiled graph, instead of compiled blocks."""
    shards = ours.Shards
    ours.Shards = lambda objective, flat: shards(objective, flat, torch.compile(objective))
    try:
        return ours.build_train_step(work, compiled=False)
    finally:
        ours.Shards = shards


def train_with_cudnn(work: Workload) -> BenchmarkStep:
    """Build a default training step with the attention kernel of cuDNN; `gpu.reset_compiler` restores the default."""
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    return ours.build_train_step(work, compiled=work.device != "cpu")


def inference_cases(device: str, tiny: bool) -> list[BenchmarkCase]:
    """Return the cases of forward passes in bfloat16, from uint8 images on the host and on the device."""
    cases: list[BenchmarkCase] = []
    for model, size, batch in [("ViT-64x2/16", 32, 2)] if tiny else [("ViT-B/16", 224, 256), ("ViT-B/16", 224, 1)]:
        work = Workload("inference", model, size, batch, device=device)
        cases += [
            BenchmarkCase(work, "vitreous", "--engine torch: CUDA graph", build_device_step),
            BenchmarkCase(
                work,
                "vitreous",
                "--engine torch, from the host and back",
                partial(ours.build_inference_step, engine="torch"),
            ),
            BenchmarkCase(
                work,
                "vitreous",
                "--engine compiled: compiled blocks, CUDA graph",
                partial(build_device_step, compiled=True),
                True,
            ),
            BenchmarkCase(
                work, "timm", "bf16", partial(models.build_peer_inference_step, peer="timm", precision="bf16")
            ),
            BenchmarkCase(
                work,
                "timm",
                "bf16, compiled",
                partial(timm_compiled, mode="reduce-overhead" if batch == 1 else None),
                True,
            ),
        ]
    return cases


def timm_compiled(work: Workload, mode: str | None) -> BenchmarkStep:
    """Build a forward pass of timm's model in bfloat16, compiled; `mode` is that of torch.compile."""
    return models.build_peer_inference_step(work, "timm", "bf16", True, mode).turn


def build_device_step(work: Workload, compiled: bool = False) -> BenchmarkStep:
    """Build a forward pass of the default engine on uint8 images on the device, without copying logits to the host."""
    engine = TorchEngine(*ours.build_random_classifier(work), work.device)
    if compiled:
        compile_blocks(engine.model)
    pixels = ours.make_noise_images(work, work.batch_size, 0).to(work.device)

    def run_step() -> float:
        engine.forward_chunk(pixels)
        return work.batch_size

    return run_step


def objective_cases(device: str, tiny: bool) -> list[BenchmarkCase]:
    """Return the cases of training steps of other objectives and model families, each with a peer if there is one."""

    def build_workload(task: str, model: str, batch: int, size: int = 224) -> Workload:
        tiny_models = {"dit": "DiT-64x2/2"}
        return (
            Workload(task, tiny_models.get(task, "ViT-64x2/16"), 32, 4, device=device)
            if tiny
            else Workload(task, model, size, batch, device=device)
        )

    if tiny:
        shrink_heads()
    mae, dino = build_workload("mae", "ViT-B/16", 256), build_workload("dino", "ViT-S/16", 64)
    dinov2, dit = build_workload("dinov2", "ViT-S/16", 64), build_workload("dit", "DiT-B/2", 256, 32)
    swin = Workload(
        "train", "Swin-32x2-2/2-window2" if tiny else "Swin-T/4", 32 if tiny else 224, 4 if tiny else 128, device=device
    )
    dense = Workload("vitdet", "ViTDet-B/16", 128 if tiny else 1024, 1 if tiny else 4, device=device)
    return [
        *make_vitreous_cases(mae, pretraining_steps.build_pretraining_step),
        BenchmarkCase(
            mae,
            "transformers",
            "bf16 autocast, compiled",
            partial(pretraining.build_transformers_mae_step, precision="bf16", compiled=True),
            True,
        ),
        *make_vitreous_cases(dino, pretraining_steps.build_pretraining_step),
        BenchmarkCase(
            dino,
            "lightly",
            "bf16 autocast, views together",
            partial(pretraining.build_lightly_dino_step, batch_views=True, precision="bf16"),
        ),
        *make_vitreous_cases(dinov2, pretraining_steps.build_pretraining_step),
        *make_vitreous_cases(dit, generating.build_dit_train_step),
        BenchmarkCase(
            dit,
            "diffusers",
            "bf16 autocast, compiled",
            partial(generating_peers.build_diffusers_train_step, precision="bf16", compiled=True),
            True,
        ),
        *make_vitreous_cases(swin, ours.build_train_step),
        BenchmarkCase(
            swin,
            "timm",
            "bf16 autocast, compiled",
            partial(models.build_peer_train_step, peer="timm", precision="bf16", compiled=True),
            True,
        ),
        BenchmarkCase(dense, "vitreous", "compiled blocks", partial(detection_backbone, is_ours=True), True),
        BenchmarkCase(dense, "vitreous", "eager", partial(detection_backbone, is_ours=True, compiled=False)),
        BenchmarkCase(
            dense, "plain modules", "bf16 autocast, compiled", partial(detection_backbone, is_ours=False), True
        ),
    ]


def shrink_heads() -> None:
    """Replace decoders and heads of the self-supervised objectives of `vitreous.apps.bench` by small ones, for a
    CPU."""
    table = pretraining_steps.PRETRAINING_CONFIGS
    small_head = {"prototypes": 64, "head_width": 64, "bottleneck": 32}
    small_settings = {
        "mae": {"decoder_width": 32, "decoder_depth": 1, "decoder_heads": 2},
        "dino": small_head,
        "dinov2": small_head,
    }
    for name, changes in small_settings.items():
        config, *others = table[name]
        table[name] = (config.with_options(**changes), *others)  # type: ignore[assignment]


def make_vitreous_cases(work: Workload, build: Callable[..., BenchmarkStep]) -> list[BenchmarkCase]:
    """Return the cases of vitreous with default settings and without compilation."""
    return [
        BenchmarkCase(work, "vitreous", "default: compiled blocks, CUDA graph", partial(build, compiled=True), True),
        BenchmarkCase(work, "vitreous", "eager", partial(build, compiled=False, graphs=False)),
    ]


def detection_backbone(work: Workload, is_ours: bool, compiled: bool = True) -> BenchmarkStep:
    """Build a forward and backward pass of ViTDet's backbone: vitreous in bfloat16, or plain modules in autocast."""
    config: Any = config_from_name(work.model, work.image_size)
    dtype = torch.bfloat16 if is_ours else torch.float32
    model: Any = (
        (vitdet.build_random_backbone(config) if is_ours else vitdet.PlainViTDet(config)).to(work.device, dtype).train()
    )
    images = torch.randn(work.batch_size, 3, *config.image, device=work.device, dtype=dtype)
    forward = (lambda: model.features_at(images, config.strides)[0]) if is_ours else None
    if is_ours and compiled:
        compile_blocks(model)
    if forward is None:
        compiled_model = torch.compile(model) if compiled else model
        forward = lambda: compiled_model(images)  # noqa: E731
    context = nullcontext() if is_ours else torch.autocast(work.device.split(":")[0], torch.bfloat16)

    def run_step() -> float:
        model.zero_grad()
        with context:
            loss = forward().float().square().mean()
        loss.backward()
        return work.batch_size

    return run_step


SECTIONS: dict[str, Callable[[str, bool], list[BenchmarkCase]]] = {
    "training": training_cases,
    "inference": inference_cases,
    "objectives": objective_cases,
}
