"""Estimate a run on many devices: memory per device, network traffic per step, and time per step.

Nothing is executed. Bytes of memory and of the network are derived from `training.flat`, `training.sharded` and
`training.compute`, and `benchmarks/scaling.py` measures them. Seconds are derived from the devices' data sheets and an
assumed utilisation. In formulas n is the number of trainable parameters, b the bytes per value in the run's precision,
W the number of devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from vitreous.errors import ResourceError
from vitreous.objectives.base import Objective, TrainingProgress
from vitreous.system.machine import DTYPES, get_free_memory
from vitreous.system.native import load_native_library
from vitreous.training.groups import choose_group_kind
from vitreous.training.run import Run
from vitreous.training.sharded import has_trainable_parameters

DEFAULT_UTILISATION = 0.45  # assumed share of peak FLOP/s in training


@dataclass(frozen=True)
class Accelerator:
    """The data sheet of a device.

    Args:
        flops: peak dense bfloat16 FLOP/s.
        memory: memory in bytes.
        bandwidth: memory bandwidth in bytes/s.
        link: bandwidth to devices of the same machine in bytes/s.
        network: bandwidth to other machines in bytes/s, per device.
        together: devices per machine.
    """

    flops: float
    memory: float
    bandwidth: float
    link: float
    network: float
    together: int = 8


#: `network`: the manufacturers' servers have one port of 200 or 400 Gbit/s per device
ACCELERATORS = {
    "a100": Accelerator(312e12, 80e9, 2.039e12, link=300e9, network=25e9),
    "h100": Accelerator(989e12, 80e9, 3.35e12, link=450e9, network=50e9),
    "h200": Accelerator(989e12, 141e9, 4.8e12, link=450e9, network=50e9),
    "b200": Accelerator(2250e12, 180e9, 8e12, link=900e9, network=50e9),
    "mi300x": Accelerator(1307e12, 192e9, 5.3e12, link=448e9, network=50e9),
}


class ObjectiveSizes(NamedTuple):
    """Numbers of parameters of an objective, which determine memory and traffic.

    Args:
        trainable: trainable parameters.
        matrices: those of them in matrices of blocks, which Muon trains.
        frozen: frozen parameters of the model.
        held_bytes: bytes of all other state, such as a teacher and buffers.
        shipped: frozen parameters and buffers of the deployed model.
        blocks: trainable parameters of each block, which FSDP gathers one block at a time.
        root: trainable parameters outside of blocks, which FSDP keeps gathered.
    """

    trainable: int
    matrices: int
    frozen: int
    held_bytes: int
    shipped: int
    blocks: tuple[int, ...]
    root: int


def measure_sizes(objective: Objective) -> ObjectiveSizes:
    """Count the parameters of an objective. It may be on any device, including `meta`."""
    parameters = dict(objective.named_parameters())
    trainable = {name: p.numel() for name, p in parameters.items() if p.requires_grad}
    static = {id(p) for p in objective.frozen_parameters()}
    tensors = [*parameters.values(), *objective.buffers()]
    state_bytes = sum(t.numel() * t.element_size() for t in tensors if not t.requires_grad and id(t) not in static)
    deployed = objective.deployed_model()
    shipped = [t for t in (*deployed.parameters(), *deployed.buffers()) if not t.requires_grad]
    blocks = []
    for name, module in objective.named_modules():
        if name.endswith("blocks") and isinstance(module, nn.ModuleList) and has_trainable_parameters(module):
            blocks += [sum(p.numel() for p in block.parameters() if p.requires_grad) for block in module]
    return ObjectiveSizes(
        trainable=sum(trainable.values()),
        matrices=sum(size for name, size in trainable.items() if choose_group_kind(name, parameters[name]) == "matrix"),
        frozen=sum(p.numel() for p in parameters.values() if id(p) in static),
        held_bytes=state_bytes,
        shipped=sum(t.numel() for t in shipped),
        blocks=tuple(blocks),
        root=sum(trainable.values()) - sum(blocks),
    )


def count_device_images(run: Run, world: int) -> int:
    """Return the number of images that a device computes at a time: its share of the batch, or the micro-batch."""
    rank_batch = -(-run.batch_size // world)
    return min(rank_batch, run.micro_batch or rank_batch)


def count_memory(run: Run, sizes: ObjectiveSizes, world: int, device: str = "cuda") -> dict[str, int | None]:
    """Estimate the memory of each of `world` devices in bytes, by purpose. `peak_bytes` is the maximum at any time.

    Activations exist until the end of the backward pass, the float32 sum of gradients after it. `activations_bytes` and
    `peak_bytes` are None if there is no formula for the model's activations (`models.cost.activations`).
    """
    fsdp, b, n = run.parallel == "fsdp", DTYPES[run.precision].itemsize, sizes.trainable
    share = -(-n // world) if fsdp else n
    is_distributed = world > 1 or fsdp
    moments = {"sgd": 4 * n, "lars": 4 * n, "muon": 4 * sizes.matrices + 8 * (n - sizes.matrices)}
    overlapped = (
        is_distributed and not fsdp and run.accumulate == 1 and run.micro_batch is None and not run.reproducible
    )
    largest = max(sizes.blocks, default=0)
    memory: dict[str, int | None] = {
        "master_weights_bytes": 4 * share,
        "working_copy_bytes": (b * share if fsdp or b < 4 else 0) + (b + 4 * (b < 4)) * sizes.frozen,
        "ema_bytes": 4 * share if run.ema is not None else 0,
        "optimizer_state_bytes": moments.get(run.optimizer.name, 8 * n) * share // n,
        "other_state_bytes": sizes.held_bytes + 4 * max(0, sizes.shipped - sizes.frozen),
        # DDP copies gradients into buckets; FSDP keeps a shard
        "gradients_bytes": b * (share if fsdp else n * (2 if overlapped else 1)),
        "gradient_sum_bytes": 4 * share if fsdp or b < 4 else 0,
        # weights of two blocks at a time, all weights outside of blocks, and gradients of two blocks in transit
        "gathered_weights_bytes": b * (sizes.root + 4 * largest) if fsdp else 0,
        "activations_bytes": count_activation_bytes(run, count_device_images(run, world), device),
    }
    resident = sum(value or 0 for name, value in memory.items() if name not in TRANSIENT_MEMORY)
    transient = {name: memory[name] or 0 for name in TRANSIENT_MEMORY}
    backward = transient["activations_bytes"] + transient["gathered_weights_bytes"]
    is_activation_known = memory["activations_bytes"] is not None
    return memory | {
        "peak_bytes": resident + max(backward, transient["gradient_sum_bytes"]) if is_activation_known else None
    }


#: purposes of memory that is in use only during a phase of the step
TRANSIENT_MEMORY = ("activations_bytes", "gradient_sum_bytes", "gathered_weights_bytes")


def count_activation_bytes(run: Run, images: int, device: str) -> int | None:
    """Return the bytes of the activations of `images` images that are stored for the backward pass. None without a
    formula, for example for objectives that process crops or subsets of patches.

    Generative models on a CPU in bfloat16 also store attention probabilities (`nn.attention.MaterializedAttention`).
    """
    has_whole_images = run.objective.labelled or run.objective.generates
    num_activations = run.model.count_activations(device=device) if has_whole_images else None
    if num_activations is None:
        return None
    depth, tokens = run.model.depth, run.model.prefix + math.prod(run.model.grid)
    if run.objective.generates and device == "cpu" and run.precision == "bf16" and not load_native_library().tiles:
        num_activations += depth * run.model.head_count_field()["heads"] * tokens**2
    if run.recompute:  # the blocks' inputs, and the activations of one block
        num_activations = num_activations // depth + depth * tokens * run.model.width
    return images * num_activations * DTYPES[run.precision].itemsize


def check_activation_memory(run: Run, world: int) -> None:
    """Raise ResourceError if the activations of a step cannot fit into the free memory of a device. Runs without a
    formula are not checked."""
    needed = count_activation_bytes(run, count_device_images(run, world), run.device)
    free = get_free_memory(run.device)
    if needed and free and needed > free:
        problem = f"a step needs about {needed / 2**30:.0f} GiB for activations, but {free / 2**30:.0f} GiB are free"
        raise ResourceError(problem, "use --micro-batch auto, --recompute, or a smaller --image-size")


def count_traffic(run: Run, sizes: ObjectiveSizes, world: int) -> int:
    """Return the bytes that a device sends in an optimiser step with ring algorithms: 2 (W - 1) / W of all-reduced
    data, (W - 1) / W of gathered or scattered data.

    DDP all-reduces gradients once per step: in the run's precision if it overlaps with the only backward pass, else in
    float32. FSDP gathers the weights of blocks twice for each micro-batch, for the forward and for the backward pass.
    It gathers weights outside of blocks once, and scatters the gradients once per step.
    """
    b, n = DTYPES[run.precision].itemsize, sizes.trainable
    passes = run.accumulate * math.ceil(math.ceil(run.batch_size / world) / count_device_images(run, world))
    if run.parallel == "fsdp":
        gathered = passes * b * (2 * sum(sizes.blocks) + sizes.root)
        return round((gathered + b * n) * (world - 1) / world)
    overlapped = run.accumulate == 1 and run.micro_batch is None and not run.reproducible
    return round(2 * (b if overlapped else 4) * n * (world - 1) / world)


def forecast_step(
    run: Run,
    sizes: ObjectiveSizes,
    world: int,
    device: Accelerator,
    flops: float,
    utilisation: float = DEFAULT_UTILISATION,
) -> dict[str, float]:
    """Estimate the seconds of an optimiser step on `world` devices.

    Returns `compute`, `update`, `total_communication` (the whole exchange of gradients and weights), and
    `communication` (the part of it that does not overlap with compute).

    `flops` are the FLOPs of one image's training step. All devices of a machine send to other machines in parallel, so
    a ring is as fast as their network ports together, or as the links within a machine. DDP communicates during the
    backward pass, two thirds of the compute; FSDP communicates during all of it.
    """
    images = run.step_size / world
    compute = images * flops * (4 / 3 if run.recompute else 1) / (utilisation * device.flops)
    ring_bandwidth = device.link if world <= device.together else min(device.link, device.network * device.together)
    communication = count_traffic(run, sizes, world) / ring_bandwidth if world > 1 else 0.0
    overlap = compute * (1.0 if run.parallel == "fsdp" else 2 / 3)
    device_parameters = sizes.trainable / (world if run.parallel == "fsdp" else 1)
    bytes_per_parameter = 4 + 8 + 16 + DTYPES[run.precision].itemsize + 8 * (run.ema is not None)
    return {
        "compute": compute,
        "communication": max(0.0, communication - overlap),
        "update": device_parameters * bytes_per_parameter / device.bandwidth,
        "total_communication": communication,
    }


def forecast_run(
    run: Run, objective: Objective, world: int, name: str, image_bytes: float | None = None
) -> dict[str, object]:
    """Estimate a run on `world` devices of the type `name` in ACCELERATORS: memory, bytes per step, images/s, hours,
    and the bottleneck. `image_bytes` is the mean size of an image file, for the reading bandwidth."""
    device, sizes = ACCELERATORS[name], measure_sizes(objective)
    flops = objective.flops(TrainingProgress(0, 0, run.total))
    memory, seconds = count_memory(run, sizes, world), forecast_step(run, sizes, world, device, flops)
    step = seconds["compute"] + seconds["communication"] + seconds["update"]
    images_per_second, machines = run.step_size / step, -(-world // device.together)
    peak = memory["peak_bytes"]
    bottleneck = max(("compute", "communication", "update"), key=lambda phase: seconds[phase])
    if peak is not None and peak > device.memory:
        bottleneck = f"memory: {peak / 1e9:.0f} of {device.memory / 1e9:.0f} GB"
    return {
        "parameters": sizes.trainable + sizes.frozen,
        "devices": f"{world:,} x {name}, {machines:,} machines" if machines > 1 else f"{world} x {name}",
        "parallel": run.parallel,
        "micro_batch_size": count_device_images(run, world),
        **memory,
        "communication_per_step_bytes": count_traffic(run, sizes, world),
        "seconds_per_step": round_to_three_digits(step),
        "compute_seconds": round_to_three_digits(seconds["compute"]),
        "communication_seconds": round_to_three_digits(seconds["total_communication"]),
        "exposed_communication_seconds": round_to_three_digits(seconds["communication"]),
        "update_seconds": round_to_three_digits(seconds["update"]),
        "images_per_second": round(images_per_second),
        "images_per_second_per_machine": round(images_per_second / machines),
        "read_per_second_per_machine_bytes": None
        if image_bytes is None
        else round(images_per_second / machines * image_bytes),
        "hours": round_to_three_digits(step * run.steps / 3600),
        "exaflops": round_to_three_digits(flops * run.total / 1e18),
        "assumed_utilisation": DEFAULT_UTILISATION,
        "bottleneck": bottleneck,
    }


def round_to_three_digits(value: float) -> float:
    """Round to three significant digits."""
    return float(f"{value:.3g}")
