"""The command `doctor`: describe the hardware and software of this machine, and time a training step."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

import torch

from vitreous.inference.engine_choice import list_engine_choices
from vitreous.models.names import vit_config_from_name
from vitreous.models.vit import ViT
from vitreous.nn.frozen import can_pack
from vitreous.objectives.supervised import SupervisedObjective
from vitreous.system.allocator import reserve_huge_pages
from vitreous.system.cores import ContentionMonitor
from vitreous.system.machine import (
    DTYPES,
    configure_process,
    describe_environment,
    has_bf16,
    has_fast_packed_matmul,
    pick_device,
    pick_precision,
)
from vitreous.system.native import load_native_library
from vitreous.training.flat import FlatParameters
from vitreous.training.optimizer import FlatOptimizer
from vitreous.training.run import OptimizerConfig
from vitreous.training.shards import Shards, choose_shard_count

BENCHMARK_SECONDS, BENCHMARK_BATCH_SIZE = 2.0, 16  # minimum duration and batch size of the timed training steps
MAX_LISTED_ENGINES = 8  # maximum number of stored engine choices in the report


def diagnose_machine(device: str = "auto") -> dict[str, Any]:
    """Report versions, devices, precisions, and the images/s of a training step of ViT-Ti/16 at 224 pixels with default
    settings.

    `other_load` is the share of the cores, 0 to 1, that other processes used during the measurement; None if it cannot
    be measured. Raises UsageError if the device does not exist.
    """
    device = pick_device(device)
    precision = pick_precision("auto", device)
    configure_process()
    config = vit_config_from_name("ViT-Ti/16")
    objective = SupervisedObjective(ViT(config))
    flat = FlatParameters(
        objective, DTYPES[precision], torch.device(device), shards=choose_shard_count(device, BENCHMARK_BATCH_SIZE)
    )
    optimizers, shards = FlatOptimizer(OptimizerConfig(), flat), Shards(objective, flat)
    images = torch.randn(BENCHMARK_BATCH_SIZE, 3, 224, 224, device=device, dtype=DTYPES[precision])
    batch = {"images": images, "labels": torch.zeros(BENCHMARK_BATCH_SIZE, dtype=torch.int64, device=device)}
    times, contention = [time.perf_counter()], ContentionMonitor()
    while len(times) < 3 or times[-1] - times[1] < BENCHMARK_SECONDS:  # the first step warms up
        flat.zero_grad()
        shards.backward(batch, 1.0)
        flat.collect()
        optimizers.step(0.0)
        flat.sync(len(times))
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(time.perf_counter())
    other_load = contention.measure()
    images_per_second = BENCHMARK_BATCH_SIZE * (len(times) - 2) / (times[-1] - times[1])
    return {
        **describe_environment(),
        "device": device,
        "bf16": has_bf16(device),
        "precision": precision,
        "matmul": "packed by oneDNN"
        if has_fast_packed_matmul(device) and can_pack(DTYPES[precision])
        else "PyTorch default",
        "native_kernels": load_native_library().note,
        "huge_pages": "on request" if reserve_huge_pages() else "system default",
        "engines": ["torch", *(["openvino"] if find_spec("openvino") else [])],
        "engine_choices": list_engine_choices()[:MAX_LISTED_ENGINES],
        "shards": choose_shard_count(device, BENCHMARK_BATCH_SIZE),
        "train_images_per_second": round(images_per_second, 1),
        "train_gflops": round(images_per_second * 6 * config.computed_macs() / 1e9, 1),
        "other_load": None if other_load is None else round(other_load, 2),
        "ok": True,
    }
