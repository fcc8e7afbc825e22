"""Contenders of every benchmark task. A contender is a library with settings whose throughput is measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from vitreous.apps.bench import generating as our_generating
from vitreous.apps.bench import ours
from vitreous.apps.bench.peers import generating, loaders, models, pictures, pretraining
from vitreous.apps.bench.pretraining import build_pretraining_step
from vitreous.apps.bench.work import DECODE_LIMIT, BenchmarkStep, Contender, Workload
from vitreous.system.machine import has_bf16
from vitreous.training.throughput import choose_fastest_matmul

TASKS = ("inference", "train", "mae", "dino", "dit", "sample", "loader", "memory", "predict")
PEAK_MATRIX_SIZE = {"cpu": 2048, "cuda": 8192}  # size of the matrices in the peak measurement


def list_contenders(task: str, device: str) -> list[Contender]:
    """Return the contenders of a task on a device, vitreous first, without settings that the device does not
    support."""
    supports_bf16 = has_bf16(device)
    table = {
        "inference": list_inference_contenders,
        "train": list_train_contenders,
        "mae": list_mae_contenders,
        "dino": list_dino_contenders,
        "dit": list_dit_contenders,
        "sample": list_sample_contenders,
        "loader": list_loader_contenders,
        "memory": list_memory_contenders,
        "predict": list_predict_contenders,
    }
    return [contender for contender in table[task](device) if supports_bf16 or "bf16" not in contender.settings]


def list_limit_contenders(task: str, device: str) -> list[Contender]:
    """Return contenders that measure the machine's limit for a task in the same race: JPEG decoding for `loader`,
    nothing for `memory`, and matmul throughput per precision for other tasks."""
    if task == "loader":
        return [Contender("limit", DECODE_LIMIT, ours.build_decode_step)]
    if task == "memory":
        return []
    precisions = ["fp32", "bf16"] if has_bf16(device) else ["fp32"]
    return [Contender("peak", precision, partial(build_matmul_step, precision=precision)) for precision in precisions]


def build_matmul_step(workload: Workload, precision: str) -> BenchmarkStep:
    """Build a step that multiplies square matrices with the fastest matmul of the device. The step returns its number
    of floating-point operations, two per multiply-add."""
    run, operations = choose_fastest_matmul(
        workload.device, precision, PEAK_MATRIX_SIZE.get(workload.device.split(":")[0], 2048)
    )

    @torch.inference_mode()
    def run_step() -> float:
        """Multiply matrices once; return the number of floating-point operations."""
        run()
        return operations

    return run_step


def vitreous_contender(settings: str, build: Callable[..., BenchmarkStep], **options: object) -> Contender:
    """Return vitreous with some settings as a contender. `settings` is their label, `options` are keyword arguments of
    `build`."""
    return Contender("vitreous", settings, partial(build, **options), is_ours=True)


def peer_contender(
    name: str, settings: str, build: Callable[..., BenchmarkStep], needs: str = "", **options: object
) -> Contender:
    """Return another library with some settings as a contender. `settings` is their label, `options` are keyword
    arguments of `build`. It needs the installed package `needs`, by default the one called `name`."""
    return Contender(name, settings, partial(build, **options), needs or name)


def list_inference_contenders(device: str) -> list[Contender]:
    """List the contenders of the task `inference`: preprocessed images to logits."""
    table = [
        vitreous_contender("default", ours.build_inference_step),
        vitreous_contender("--engine torch", ours.build_inference_step, engine="torch"),
        vitreous_contender("fp32", ours.build_inference_step, precision="fp32"),
        peer_contender("timm", "default (fp32)", models.build_peer_inference_step, peer="timm"),
        peer_contender("timm", "bf16", models.build_peer_inference_step, peer="timm", precision="bf16"),
        peer_contender(
            "timm",
            "best: bf16, compiled",
            models.build_peer_inference_step,
            peer="timm",
            precision="bf16",
            compiled=True,
        ),
        peer_contender("transformers", "default (fp32)", models.build_peer_inference_step, peer="transformers"),
        peer_contender("torchvision", "default (fp32)", models.build_peer_inference_step, peer="torchvision"),
    ]
    if device == "cpu":
        int8 = partial(ours.build_inference_step, engine="openvino", precision="int8")
        openvino = partial(ours.build_inference_step, engine="openvino")
        table += [
            Contender("vitreous", "--engine openvino", openvino, "openvino", is_ours=True),
            Contender("vitreous", "--engine openvino --precision int8", int8, "nncf", is_ours=True),
            peer_contender("onnxruntime", "fp32, by hand", models.build_onnxruntime_step, "onnxscript"),
            peer_contender(
                "onnxruntime", "int8 dynamic, by hand", models.build_onnxruntime_step, "onnxscript", quantised=True
            ),
            peer_contender("openvino", "fp32, by hand", models.build_openvino_step, precision="fp32"),
            peer_contender("openvino", "bf16, by hand", models.build_openvino_step, precision="bf16"),
            peer_contender("openvino", "int8, by hand", models.build_openvino_step, "nncf", precision="int8"),
        ]
    return table


def list_train_contenders(device: str) -> list[Contender]:
    """List the contenders of the task `train`: training steps of a classifier."""
    return [
        vitreous_contender("default", ours.build_train_step),
        vitreous_contender("fp32", ours.build_train_step, precision="fp32"),
        *list_peer_train_contenders("timm"),
        *list_peer_train_contenders("transformers"),
    ]


def list_peer_train_contenders(peer: str) -> list[Contender]:
    """List another library's contenders of the task `train`: default settings, and best settings in both
    precisions."""
    build = partial(models.build_peer_train_step, peer=peer)
    return [
        peer_contender(peer, "default (fp32)", build),
        peer_contender(peer, "bf16 autocast, fused AdamW", build, precision="bf16"),
        peer_contender(peer, "best: bf16 autocast, compiled", build, precision="bf16", compiled=True),
        peer_contender(peer, "fp32, compiled", build, compiled=True),
    ]


def list_mae_contenders(device: str) -> list[Contender]:
    """List the contenders of the task `mae`: MAE pre-training steps."""
    return [
        vitreous_contender("default", build_pretraining_step),
        vitreous_contender("fp32", build_pretraining_step, precision="fp32"),
        peer_contender("transformers", "default (fp32)", pretraining.build_transformers_mae_step),
        peer_contender(
            "transformers", "bf16 autocast, fused AdamW", pretraining.build_transformers_mae_step, precision="bf16"
        ),
        peer_contender(
            "transformers",
            "best: bf16 autocast, compiled",
            pretraining.build_transformers_mae_step,
            precision="bf16",
            compiled=True,
        ),
        peer_contender("transformers", "fp32, compiled", pretraining.build_transformers_mae_step, compiled=True),
    ]


def list_dino_contenders(device: str) -> list[Contender]:
    """List the contenders of the task `dino`: DINO pre-training steps with two global and eight local views per
    image."""
    return [
        vitreous_contender("default", build_pretraining_step),
        vitreous_contender("fp32", build_pretraining_step, precision="fp32"),
        peer_contender("lightly", "default (fp32), one view at a time", pretraining.build_lightly_dino_step),
        peer_contender(
            "lightly", "fp32, views of equal size batched", pretraining.build_lightly_dino_step, batch_views=True
        ),
        peer_contender(
            "lightly",
            "best: bf16 autocast, batched views, fused AdamW",
            pretraining.build_lightly_dino_step,
            batch_views=True,
            precision="bf16",
        ),
    ]


def list_dit_contenders(device: str) -> list[Contender]:
    """List the contenders of the task `dit`: DiT training steps."""
    return [
        vitreous_contender("default", our_generating.build_dit_train_step),
        vitreous_contender("fp32", our_generating.build_dit_train_step, precision="fp32"),
    ] + [
        peer_contender("diffusers", "default (fp32)", generating.build_diffusers_train_step),
        peer_contender(
            "diffusers", "bf16 autocast, fused AdamW", generating.build_diffusers_train_step, precision="bf16"
        ),
        peer_contender(
            "diffusers",
            "best: bf16 autocast, compiled",
            generating.build_diffusers_train_step,
            precision="bf16",
            compiled=True,
        ),
    ]


def list_sample_contenders(device: str) -> list[Contender]:
    """List the contenders of the task `sample`: sampling images from a DiT."""
    return [
        vitreous_contender("default", our_generating.build_dit_sampling_step),
        vitreous_contender("fp32", our_generating.build_dit_sampling_step, precision="fp32"),
    ] + [
        peer_contender("diffusers", "default (fp32)", generating.build_diffusers_sampling_step),
        peer_contender("diffusers", "bf16 autocast", generating.build_diffusers_sampling_step, precision="bf16"),
        peer_contender(
            "diffusers",
            "best: bf16 autocast, compiled",
            generating.build_diffusers_sampling_step,
            precision="bf16",
            compiled=True,
        ),
    ]


def list_loader_contenders(device: str) -> list[Contender]:
    """List the contenders of the task `loader`: loading photographs into training batches, from files or, for vitreous,
    also from a pack."""
    table = [
        vitreous_contender("default", ours.build_loader_step),
        vitreous_contender("--exact", ours.build_loader_step, exact=True),
        vitreous_contender("packed JPEG, short side 256", ours.build_loader_step, form="tar"),
        vitreous_contender("packed uint8, short side 256", ours.build_loader_step, form="uint8"),
    ]
    for name in ("torchvision", "timm", "webdataset", "datasets"):
        build = getattr(loaders, f"build_{name}_loader")
        table += [peer_contender(name, "default", build), peer_contender(name, "best", build, best=True)]
    return table


def list_memory_contenders(device: str) -> list[Contender]:
    """List the contenders of the task `memory`: turning small images in memory into training batches."""
    peers = [
        peer_contender("torchvision", "default", loaders.build_cifar_loader),
        peer_contender("torchvision", "best", loaders.build_cifar_loader, best=True),
    ]
    return [vitreous_contender("default", ours.build_memory_loader_step), *peers]


def list_predict_contenders(device: str) -> list[Contender]:
    """List the contenders of the task `predict`: image files to classes and probabilities, with default and with best
    settings."""
    return [
        vitreous_contender("default", ours.build_predict_step),
        vitreous_contender("--exact", ours.build_predict_step, exact=True),
        peer_contender("transformers", "default (pipeline)", pictures.build_transformers_predict_step),
        peer_contender(
            "transformers", "best: batches of 8, workers", pictures.build_transformers_predict_step, best=True
        ),
        peer_contender("timm", "default script with a DataLoader", pictures.build_timm_predict_step),
        peer_contender("timm", "best: batches of 32, one worker per core", pictures.build_timm_predict_step, best=True),
        peer_contender("timm", "best, compiled", pictures.build_timm_predict_step, best=True, compiled=True),
    ]
