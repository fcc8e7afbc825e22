"""Save and restore the state of a run.

    state.json               counters (`loop.TrainingCounters`) and other values required to continue
    model, ema, optimizer    tensors by name: three files, or with FSDP one file of shards from every process
                             (`weights.sharded`)
    frozen                   tensors that the optimiser does not update, if any: frozen parameters, and the
                             objective's state (a teacher, a centre) in its dtype

The main process writes and publishes checkpoints. With FSDP all processes write in the background, and the main process
publishes the checkpoint when they have finished.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vitreous.errors import ResourceError, WeightsError
from vitreous.system.disk import write_text_atomic
from vitreous.training.checkpoint import CheckpointStore, find_damage
from vitreous.training.loop import TrainingCounters, TrainingState
from vitreous.training.sharded import ShardedParameters, create_cpu_group
from vitreous.weights.sharded import load_checkpoint_tensors

CHECKPOINT_FORMAT = 2
CHECKPOINT_STATE_FILE = "state.json"
MAX_SAVE_FAILURES = 3  # consecutive failed checkpoints after which the run stops


class Checkpointer:
    """Saves and restores the checkpoints of a run in progress. `note` receives messages for the user."""

    def __init__(self, store: CheckpointStore, note: Callable[[str], None]) -> None:
        self.store, self.note = store, note
        self.failures = 0
        self.saved = -1  # number of samples at the last checkpoint that was written, or whose writing has begun
        self.pinned: int | None = None  # step of a checkpoint that is never removed
        self.group: Any = None  # process group for writing in the background
        # the checkpoint that is written in the background: its result, step and temporary folder
        self.writing: tuple[Future, int, Path] | None = None

    def save(self, state: TrainingState, extra: dict[str, Any]) -> None:
        """Save a checkpoint of the current step, unless it exists. `extra` is added to state.json.

        If it cannot be written, a message is printed and training continues; the third consecutive failure raises
        ResourceError.
        """
        if self.saved == state.images:
            return  # replacing the checkpoint would leave a moment without one
        state.read_metrics()
        state_json = json.dumps(
            {
                "format": CHECKPOINT_FORMAT,
                **collect_counters(state),
                **extra,
                "threads": torch.get_num_threads(),
                "world_size": state.ranks.world,
                "deployed_model": next(iter(state.flat.shipped.values()), "model.").partition(".")[0],
            }
        )
        if isinstance(state.flat, ShardedParameters):
            self.publish_pending(state.ranks.is_main)
        with self.tolerate_write_errors():
            if isinstance(state.flat, ShardedParameters):
                self.begin(state, state_json)
            elif state.ranks.is_main:
                self.write(state, state_json)
            self.saved = state.images

    @contextmanager
    def tolerate_write_errors(self) -> Iterator[None]:
        """Print a message if the block cannot write a checkpoint, and continue. The third consecutive failure is
        raised."""
        try:
            yield
            self.failures = 0
        except ResourceError as error:
            self.failures += 1
            if self.failures >= MAX_SAVE_FAILURES:
                raise
            self.note(f"{error.message}; training continues ({self.failures} of {MAX_SAVE_FAILURES} failures)")

    def write(self, state: TrainingState, text: str) -> None:
        """Write all tensors and the text of state.json as a checkpoint, in this process."""
        sections = collect_tensors(state)
        writers = {
            f"{section}.safetensors": lambda path, tensors=tensors: write_tensors(tensors, path)
            for section, tensors in sections.items()
        }
        size = sum(
            tensor.numel() * tensor.element_size() for tensors in sections.values() for tensor in tensors.values()
        )
        self.store.save(
            state.step,
            {**writers, CHECKPOINT_STATE_FILE: lambda path: write_text_atomic(path, text)},
            size,
            self.pinned,
        )

    def begin(self, state: TrainingState, text: str) -> None:
        """Start writing a copy of every process's shards in the background. `text` is the content of state.json;
        `publish_pending` publishes the checkpoint. Raises ResourceError if the temporary folder cannot be created."""
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import async_save

        flat, ranks = state.flat, state.ranks
        assert isinstance(flat, ShardedParameters)
        self.group = self.group or create_cpu_group()
        folder_text, failure = (
            "",
            ResourceError("the main process could not start a checkpoint", "free some disk space"),
        )
        try:
            folder_text = str(self.store.begin(state.step, 16 * flat.length * ranks.world)) if ranks.is_main else ""
        except ResourceError as error:
            failure = error
        if not (broadcast_folder := ranks.broadcast_text(folder_text)):
            raise failure
        temporary = Path(broadcast_folder)
        tensors: dict[str, Tensor] = {}
        for section, views in collect_tensors(state).items():
            copies = {name: view.detach().cpu().clone() for name, view in views.items()}
            sliced = {
                name: copied for name, copied in copies.items() if section != "frozen" and not name.startswith("step/")
            }
            tensors |= {f"{section}/{name}": piece for name, piece in (copies | flat.to_dtensors(sliced)).items()}
        if ranks.is_main:
            write_text_atomic(temporary / CHECKPOINT_STATE_FILE, text)
        writer = HuggingFaceStorageWriter(str(temporary), save_distributed=True)
        saved = async_save(tensors, storage_writer=writer, process_group=self.group)
        assert isinstance(saved, Future)  # with a separate process group
        self.writing = saved, state.step, temporary

    def poll(self, state: TrainingState) -> None:
        """Publish the checkpoint that is written in the background if it is complete."""
        if self.writing and self.writing[0].done():
            self.publish_pending(state.ranks.is_main)

    def publish_pending(self, is_main: bool) -> None:
        """Wait for the checkpoint that is written in the background, and publish it. Raises ResourceError at the third
        consecutive failure."""
        if self.writing is None:
            return
        from torch.distributed.checkpoint.api import CheckpointException

        future, step, temporary = self.writing
        self.writing = None
        with self.tolerate_write_errors():
            try:
                future.result()
            except CheckpointException as error:
                reason = next(iter(error.failures.values()))[0]
                raise ResourceError(
                    f"checkpoint of step {step} not saved in {temporary.parent}: {reason}", "free some disk space"
                ) from None
            if is_main and temporary.exists():
                self.store.publish(step, temporary, self.pinned)

    def restore(self, state: TrainingState) -> dict[str, Any] | None:
        """Restore the state from the newest valid checkpoint. Returns its state.json, or None if there are no
        checkpoints.

        Raises WeightsError if no checkpoint is valid, or if a later version of vitreous wrote the newest one.
        """
        ranks = state.ranks
        folder = ranks.broadcast_text(str(self.store.newest(self.note) or "") if ranks.is_main else "")
        if not folder:
            return None
        saved_state = json.loads((Path(folder) / CHECKPOINT_STATE_FILE).read_text("utf-8"))
        if saved_state.get("format", 1) > CHECKPOINT_FORMAT:
            raise WeightsError(
                (
                    f"{folder} was written by a later version of vitreous (format {saved_state['format']}, "
                    f"this version supports {CHECKPOINT_FORMAT})"
                ),
                "update vitreous",
            )
        for name in (field.name for field in fields(TrainingCounters)):
            if name in saved_state:
                setattr(state, name, saved_state[name])
        self.saved = state.images
        state.flat.load(
            load_checkpoint_tensors(Path(folder), "model"), load_checkpoint_tensors(Path(folder), "ema") or None
        )
        state.optimizers.load(load_checkpoint_tensors(Path(folder), "optimizer"), state.flat.copy_into_views)
        state.flat.load_untrained_state(load_checkpoint_tensors(Path(folder), "frozen"))
        return saved_state


def load_checkpoint_weights(state: TrainingState, store: CheckpointStore, step: int) -> bool:
    """Load the weights, averaged weights and untrained tensors of the checkpoint of a step. Returns whether the
    checkpoint exists and is valid."""
    folder, ranks = store.get_path(step), state.ranks
    if not ranks.broadcast_text("valid" if ranks.is_main and find_damage(folder) is None else ""):
        return False
    state.flat.load(load_checkpoint_tensors(folder, "model"), load_checkpoint_tensors(folder, "ema") or None)
    state.flat.load_untrained_state(load_checkpoint_tensors(folder, "frozen"))
    return True


def collect_counters(state: TrainingState) -> dict[str, Any]:
    """Return the counters of a state (`TrainingCounters`) by name."""
    return {field.name: getattr(state, field.name) for field in fields(TrainingCounters)}


def collect_tensors(state: TrainingState) -> dict[str, dict[str, Tensor]]:
    """Return all tensors of a checkpoint in the shapes of the parameters, by file and name. With FSDP, these are this
    process's shards."""
    flat = state.flat
    sections = {"model": flat.views(flat.master), "optimizer": state.optimizers.get_state()}
    if flat.ema is not None:
        sections["ema"] = flat.views(flat.average)
    if untrained := flat.untrained_state():
        sections["frozen"] = untrained
    return sections


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors of any shape as a safetensors file. Raises OSError if it cannot be written."""
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(str(error)) from None
