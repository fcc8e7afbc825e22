"""Cases of `gpu.py` that measure possible improvements: float8 products, attention kernels, FSDP2."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitreous.apps.bench import ours
from vitreous.apps.bench.race import run_steps_for
from vitreous.apps.bench.work import Workload
from vitreous.models.zoo import create_untrained_model
from vitreous.nn.encoder import compile_blocks
from vitreous.objectives.supervised import SupervisedObjective
from vitreous.system.cores import synchronize_device
from vitreous.training.optimizer import FlatOptimizer
from vitreous.training.ranks import Ranks
from vitreous.training.run import OptimizerConfig
from vitreous.training.sharded import ShardedParameters
from vitreous.training.shards import Shards
from vitreous.training.throughput import measure_peak_flops

Row = dict[str, Any]
#: model -> (rows, inputs, outputs) of matrix products: queries, keys and values, and both of the MLP, at 256 images
PRODUCT_SHAPES = {
    "ViT-B/16": [(50432, 768, 2304), (50432, 768, 3072), (50432, 3072, 768)],
    "ViT-L/16": [(25216, 1024, 3072), (25216, 1024, 4096), (25216, 4096, 1024)],
}


def limit_cases(device: str, tiny: bool) -> list[tuple[str, str, Callable[[], Row]]]:
    """Return (work, contender, function) of each case; the function measures it and returns the metrics."""
    cases: list[tuple[str, str, Callable[[], Row]]] = []
    for model, shapes in PRODUCT_SHAPES.items():
        for rows, inputs, outputs in shapes:
            shape = (64, 64, 64) if tiny else (rows, inputs, outputs)
            name = f"product of {rows} x {inputs} by {inputs} x {outputs} ({model})"
            cases.append((name, "bf16", partial(bf16_product, device, shape)))
            if device.startswith("cuda"):
                cases.append((name, "float8, quantised in advance", partial(fp8_product, device, shape)))
    for tokens in (197, 785):
        shape = (2, 2, 16, 8) if tiny else (256 if tokens < 500 else 64, 12, tokens, 64)
        name = f"attention, {shape[0]} x 12 heads of {tokens} tokens, forward and backward"
        cases.append((name, "default", partial(time_attention, device, shape, None)))
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            backend = SDPBackend.MATH if tiny else backend
            cases.append((name, backend.name.lower(), partial(time_attention, device, shape, backend)))
    work = Workload(
        "train", "ViT-64x2/16" if tiny else "ViT-L/16", 32 if tiny else 224, 4 if tiny else 64, device=device
    )
    cases.append((f"{work.title()}, one process", "flat vectors", partial(time_plain_step, work)))
    cases.append((f"{work.title()}, one process", "FSDP2, world size 1", partial(sharded_step, work)))
    step = Workload(
        "train", "ViT-64x2/16" if tiny else "ViT-B/16", 32 if tiny else 224, 4 if tiny else 256, device=device
    )
    cases.insert(0, (step.title(), "vitreous, slowest kernels", partial(profile_step, step)))
    return cases


def profile_step(work: Workload, steps: int = 3, shown: int = 16) -> Row:
    """Profile a default training step; return the slowest kernels with their milliseconds and calls per step."""
    run_step = ours.build_train_step(work, compiled=work.device != "cpu")
    for _ in range(5):
        run_step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if work.device != "cpu":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            run_step()
        synchronize_device(work.device)
    events = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    table = [
        f"{event.key[:70]}: {event.self_device_time_total / steps / 1000:.2f} ms, {event.count / steps:.0f} calls"
        for event in events[:shown]
    ]
    return {"kernel_milliseconds": total / steps / 1000, "kernels": table}


def timed_flops(run: Callable[[], Any], flops: float, device: str) -> Row:
    """Time a function of `flops` operations; return its TFLOP/s, and their share of the bfloat16 peak."""

    def run_step() -> float:
        run()
        return 1.0

    run_steps_for(0.02, run_step, device)
    units, seconds = run_steps_for(0.1, run_step, device)
    flops_per_second = units * flops / seconds
    return {"tflops": flops_per_second / 1e12, "share_of_peak": flops_per_second / measure_peak_flops(device, "bf16")}


def bf16_product(device: str, shape: tuple[int, int, int]) -> Row:
    """Time a bfloat16 matrix product with a bias; `shape` is (rows, inputs, outputs)."""
    rows, inputs, outputs = shape
    x, weight, bias = (
        torch.randn(size, device=device, dtype=torch.bfloat16)
        for size in ((rows, inputs), (outputs, inputs), (outputs,))
    )
    with torch.inference_mode():
        return timed_flops(lambda: F.linear(x, weight, bias), 2.0 * rows * inputs * outputs, device)


def fp8_product(device: str, shape: tuple[int, int, int]) -> Row:
    """Time a float8 (e4m3) matrix product with one scale per tensor; quantisation is not included in the time."""
    rows, inputs, outputs = shape
    x, weight = (
        torch.randn(size, device=device).to(torch.float8_e4m3fn) for size in ((rows, inputs), (outputs, inputs))
    )
    scale = torch.ones((), device=device)
    scaled_mm = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    product = partial(scaled_mm, x, weight.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    with torch.inference_mode():
        return timed_flops(product, 2.0 * rows * inputs * outputs, device)


def time_attention(device: str, shape: tuple[int, ...], backend: SDPBackend | None) -> Row:
    """Time a forward and backward pass of attention with one kernel, or with the kernel that PyTorch selects.

    `shape` is (batch, heads, tokens, channels). Queries, keys and values are slices of one tensor, as in a model.
    """
    batch, heads, tokens, size = shape
    qkv = torch.randn(batch, tokens, 3, heads, size, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(batch, heads, tokens, size, device=device, dtype=torch.bfloat16)

    def run() -> None:
        q, k, v = (tensor.transpose(1, 2) for tensor in qkv.unbind(2))
        with sdpa_kernel(backend) if backend else nullcontext():
            F.scaled_dot_product_attention(q, k, v).backward(grad)
        qkv.grad = None

    return timed_flops(run, 3.5 * 4.0 * batch * heads * tokens * tokens * size, device)


def time_plain_step(work: Workload) -> Row:
    """Time a training step whose parameters are in flat vectors, with compiled blocks."""
    return timed_images(ours.build_train_step(work, compiled=work.device != "cpu"), work)


def timed_images(run_step: Callable[[], float], work: Workload) -> Row:
    """Return the throughput of a step in images/s, and the peak memory in bytes."""
    from vitreous.system.cores import get_peak_memory

    for _ in range(3):
        run_step()
    units, seconds = run_steps_for(0.1 if work.device == "cpu" else 0.8, run_step, work.device)
    return {"images_per_second": units / seconds, "memory_bytes": get_peak_memory(work.device)}


def sharded_step(work: Workload) -> Row:
    """Time a training step with FSDP2 in a group of one process."""
    import torch.distributed as dist

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    is_cuda = work.device.startswith("cuda")
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo")
    try:
        objective = SupervisedObjective(create_untrained_model(work.model, work.image_size, ours.NUM_CLASSES))
        dtype = torch.bfloat16 if is_cuda else torch.float32
        flat = ShardedParameters(objective, dtype, torch.device(work.device), Ranks(0, 1, 0, True))
        if is_cuda:
            compile_blocks(objective)
        optimizers, compute = FlatOptimizer(OptimizerConfig(), flat), Shards(objective, flat)
        compute.on_host = not is_cuda
        images = torch.randn(work.batch_size, 3, work.image_size, work.image_size, device=work.device).to(dtype)
        batch = {"images": images, "labels": torch.zeros(work.batch_size, dtype=torch.int64, device=work.device)}
        run_step = ours.make_batch_step(flat, compute, optimizers, batch, work.batch_size)
        return timed_images(run_step, work)
    finally:
        dist.destroy_process_group()
