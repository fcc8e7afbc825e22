"""The verb `doctor`: what this machine has, and how fast it takes a training step."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

import torch

from vitreous.inference.engine_choice import list_choices
from vitreous.models.names import configure_vit
from vitreous.models.vit import ViT
from vitreous.nn.frozen import can_pack
from vitreous.objectives.supervised import Supervised
from vitreous.system.allocator import reserve_huge_pages
from vitreous.system.cores import Neighbours
from vitreous.system.machine import DTYPES, environment, has_bf16, packs, pick_device, pick_precision, settle_process
from vitreous.system.native import native
from vitreous.training.flat import Flat
from vitreous.training.optimizer import Optimizers
from vitreous.training.run import Optimizer
from vitreous.training.shards import Shards, default_shards

SECONDS, BATCH = 2.0, 16
SHOWN_CHOICES = 8  # measured engines that are listed


def examine(device: str = "auto") -> dict[str, Any]:
    """Versions, devices, precisions, and the images a second of a ViT-Ti/16 training step at 224 pixels, as a run takes
    it.

    `other_work` is the share of the cores, 0 to 1, that other processes took meanwhile; None where that cannot be read.

    Raises UsageError for a device that is not there.
    """
    device = pick_device(device)
    precision = pick_precision("auto", device)
    settle_process()
    config = configure_vit("ViT-Ti/16")
    objective = Supervised(ViT(config))
    flat = Flat(objective, DTYPES[precision], torch.device(device), shards=default_shards(device, BATCH))
    optimizers, shards = Optimizers(Optimizer(), flat), Shards(objective, flat)
    images = torch.randn(BATCH, 3, 224, 224, device=device, dtype=DTYPES[precision])
    batch = {"images": images, "labels": torch.zeros(BATCH, dtype=torch.int64, device=device)}
    times, neighbours = [time.perf_counter()], Neighbours()
    while len(times) < 3 or times[-1] - times[1] < SECONDS:  # the first step warms up
        flat.zero()
        shards.backward(batch, 1.0)
        flat.collect()
        optimizers.step(0.0)
        flat.sync(len(times))
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(time.perf_counter())
    others = neighbours.measure()
    rate = BATCH * (len(times) - 2) / (times[-1] - times[1])
    return {
        **environment(),
        "device": device,
        "bf16": has_bf16(device),
        "precision": precision,
        "products": "packed by oneDNN" if packs(device) and can_pack(DTYPES[precision]) else "PyTorch's own",
        "kernels": native().note,
        "huge_pages": "on request" if reserve_huge_pages() else "the system's own choice",
        "engines": ["torch", *(["openvino"] if find_spec("openvino") else [])],
        "engine_choices": list_choices()[:SHOWN_CHOICES],
        "shards": default_shards(device, BATCH),
        "train_images_per_second": round(rate, 1),
        "train_gflops": round(rate * 6 * config.computed_macs() / 1e9, 1),
        "other_work": None if others is None else round(others, 2),
        "ok": True,
    }
