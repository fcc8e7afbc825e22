"""Search for the largest micro-batch that fits a device's memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import torch

from vitreous.data.batch import Batch
from vitreous.errors import ResourceError, UsageError, is_out_of_memory
from vitreous.system.machine import DTYPES, get_free_memory
from vitreous.training.batches import RunInputs, prepare_batches
from vitreous.training.folder import RunFolder
from vitreous.training.loop import TrainingState
from vitreous.training.ranks import Ranks
from vitreous.training.run import Run
from vitreous.training.session import Session
from vitreous.training.shards import Shards
from vitreous.training.slices import StepSlice

ACTIVATION_MEMORY_SHARE = 0.8  # share of a CPU's free memory that the estimated activations may use


def find_micro_batch(run: Run, inputs: RunInputs, folder: RunFolder, ranks: Ranks, note: Callable[[str], None]) -> Run:
    """Return the run with the largest micro-batch that fits the memory, the same for all processes.

    The search starts with a process's share of the batch and halves it until it fits. Batch size, accumulation,
    schedule and augmentation do not change, because a micro-batch affects only rounding. A CPU does not report
    out-of-memory reliably, so an estimate of the activations limits the micro-batch there. `note` receives a message if
    batches are split. Raises ResourceError if a single image does not fit, UsageError for images of several sizes.
    """
    if run.preprocess.has_buckets:
        problem = "--micro-batch auto does not support --buckets, whose images differ in size"
        raise UsageError(problem, "set --micro-batch to a number of images")
    rank_batch = -(-run.batch_size // ranks.world)
    size, max_images = rank_batch, estimate_max_images(run)
    while size > max_images:
        size = -(-size // 2)
    session = Session(run, inputs, folder, ranks=ranks)
    state = session.build()
    shards = Shards(state.objective, state.flat)
    state.objective.train()
    while not can_compute_batch(session, state, shards, size):
        if size == 1:
            raise ResourceError(
                "a single image does not fit into memory", "use a smaller model or --image-size, or --recompute"
            )
        size = -(-size // 2)
    size = -int(ranks.all_reduce_max([-size], session.device)[0])  # the minimum over processes
    del session, state, shards
    gc.collect()
    if size < rank_batch:
        count = -(-rank_batch // size)
        note(f"{size} images fit into memory: batches of {rank_batch} are split into {count} micro-batches")
    return replace(run, micro_batch=size if size < rank_batch else None)


def can_compute_batch(session: Session, state: TrainingState, shards: Shards, size: int) -> bool:
    """Return whether a forward and backward pass over `size` samples succeeds without running out of memory."""
    try:
        shards.backward(load_first_batch(session, state, size), 0.0)
    except RuntimeError as error:  # includes torch.OutOfMemoryError
        if not is_out_of_memory(error):
            raise
        gc.collect()
        if session.device.startswith("cuda"):
            torch.cuda.empty_cache()
        return False
    return True


def load_first_batch(session: Session, state: TrainingState, size: int) -> Batch:
    """Load the first `size` samples of the training stream, prepared as for a training step."""
    steps = [[StepSlice(0, size, 1.0)]]
    return next(prepare_batches(session.run, session.loader, state.objective, session.device, steps))[1]


def estimate_max_images(run: Run) -> float:
    """Estimate the number of images whose activations fit a CPU's free memory. Returns infinity for other devices and
    for models without an estimate."""
    num_activations, free = run.model.count_activations(device=run.device), get_free_memory(run.device)
    if run.device != "cpu" or not num_activations or not free:
        return float("inf")
    share = 1 / max(1, run.model.depth) if run.recompute else 1.0
    return max(1.0, ACTIVATION_MEMORY_SHARE * free / (num_activations * DTYPES[run.precision].itemsize * share))
