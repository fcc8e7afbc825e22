"""A whole training run: from a `Run` and its pictures to a folder with metrics, checkpoints, a bundle and a summary."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitreous.data.keys import key
from vitreous.data.loader import Batch, Feed, Judged
from vitreous.data.sources import Split
from vitreous.errors import Interrupted, ResourceError
from vitreous.evaluation.classification import Report, judge
from vitreous.evaluation.engine import TorchEngine
from vitreous.evaluation.forward import logits_of
from vitreous.machine import DTYPES, peak_memory, settle_allocator
from vitreous.models.bit import BiT
from vitreous.models.cost import macs
from vitreous.models.initial import mimetic
from vitreous.models.names import name_of
from vitreous.models.vit import ViT
from vitreous.models.zoo import Model, build
from vitreous.objectives.supervised import Supervised
from vitreous.training.flat import Flat
from vitreous.training.folder import Folder
from vitreous.training.lighter import kept, shrunk
from vitreous.training.loop import State, fit
from vitreous.training.optimizer import Optimizers
from vitreous.training.run import Run
from vitreous.weights.adopt import adopt
from vitreous.weights.bundle import Bundle, write_text

STATE, MODEL, AVERAGE, OPTIMIZER = "state.json", "model.safetensors", "ema.safetensors", "optimizer.safetensors"
FAILURES = 3  # checkpoints in a row that may fail before the run stops


class Listener(Protocol):
    """Where a run tells what it does."""

    def note(self, text: str) -> None: ...
    def progress(self, label: str, done: int, total: int, text: str = "") -> None: ...


class Silent:
    """A listener that hears nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def progress(self, label: str, done: int, total: int, text: str = "") -> None:
        """Nothing."""


@dataclass(frozen=True)
class Inputs:
    """The pictures of a run; `cached` holds those of `train` as (n, C, *image) uint8 if they stay in memory."""

    train: Split
    val: Split | None = None
    cached: Tensor | None = None


class Signals:
    """SIGTERM and SIGINT as a flag that the run looks at; a second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.received: int | None = None

    def __call__(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            os._exit(130)
        self.received = number

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Take the signals over, and give them back."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Session:
    """One run in one folder. `train` goes from wherever the newest checkpoint is to the end."""

    def __init__(self, run: Run, inputs: Inputs, folder: Folder, listener: Listener | None = None) -> None:
        self.run, self.inputs, self.folder = run, inputs, folder
        self.listener = listener or Silent()
        self.signals = Signals()
        self.store = folder.store(run.keep)
        self.failures = 0
        self.pending = False  # an evaluation was cut short and has to be made after resuming
        self.before = 0.0  # seconds of earlier processes
        self.started = self.logged = time.perf_counter()
        self.logged_images = 0
        self.rates: list[float] = []
        self.last: Report | None = None

    def train(self) -> dict[str, Any]:
        """Train to the end, write the bundle, and return the run's summary, without figures for a test split.

        Raises Interrupted after a signal, with everything saved; NonFiniteError, DataError, ResourceError as they come.
        """
        settle_allocator()
        with self.signals.caught():
            state = self.build()
            self.restore(state)
            self.started = self.logged = time.perf_counter()
            self.logged_images = state.images
            if self.pending:
                self.evaluate(state)
            run = self.run
            hooks = [(run.log_every, self.log), (run.evaluate_every, self.evaluate), (run.save_every, self.save), (1, self.stop)]
            fit(state, self.batches(state), hooks)
            if state.halt and self.signals.received:
                raise self.interrupted(state)
            return self.finish(state)

    def build(self) -> State:
        """The model, its objective, its flat weights and its optimisers, at step 0."""
        run = self.run
        torch.manual_seed(int(key(run.seed)) >> 1)
        model = build(run.model)
        if run.mimetic and isinstance(model, ViT):
            mimetic(model)
        if run.init:
            self.listener.note(adopt(model, run.init).text())
        objective = Supervised(model, run.smoothing)
        flat = Flat(objective, DTYPES[run.precision], torch.device(run.device), run.ema, run.shards)
        return State(run, objective, flat, Optimizers(run.optimizer, flat))

    def batches(self, state: State) -> Iterator[Batch]:
        """Micro-batches from the state's position on, on the device, normalised, mixed, in the run's precision."""
        run, start = self.run, state.images
        feed = Feed(self.inputs.train, run.preprocess, run.augment, run.seed, run.data.workers, self.inputs.cached)
        position = start
        for batch in feed.batches(start, run.total, run.batch_size):
            images = run.preprocess.normalise(batch["images"].to(run.device, non_blocking=True))
            labels = batch["labels"].to(run.device, non_blocking=True)
            images, labels = run.augment.mix(images, labels, run.model.classes, run.seed, position)
            images = shrunk(images, run, position)
            ready = {"images": images.to(DTYPES[run.precision]), "labels": labels, "samples": batch["samples"]}
            if (keep := kept(images, run, position)) is not None:
                ready["keep"] = keep
            position += len(batch["samples"])
            yield ready

    def log(self, state: State) -> None:
        """One line of training figures, and the progress shown."""
        now = time.perf_counter()
        rate = (state.images - self.logged_images) / max(now - self.logged, 1e-9)
        loss = state.losses / max(state.counted, 1)
        self.record(
            {
                "step": state.step,
                "epoch": state.images / self.run.data.images,
                "train/loss": loss,
                "lr": state.rate,
                "gradient_norm": state.norm,
                "exaflops": self.exaflops(state),
                "seconds": self.seconds(),
                "images_per_second": rate,
            }
        )
        self.rates.append(rate)
        self.logged, self.logged_images, state.losses, state.counted = now, state.images, 0.0, 0
        val = f"  val top-1 {self.last.figures['top1']:.1%}" if self.last else ""
        epoch = f"epoch {state.images / self.run.data.images:.1f}/{self.run.epochs:g}"
        self.listener.progress("train", state.images, self.run.total, f"{epoch}  loss {loss:.3f}  {rate:.0f} images/s{val}")

    def record(self, line: dict[str, Any]) -> None:
        """A line of metrics. One that cannot be written is told, and does not stop the run."""
        try:
            self.folder.append(line)
        except OSError as error:
            self.listener.note(f"metrics of step {line['step']} not written ({error.strerror}); training goes on")

    def evaluate(self, state: State) -> None:
        """Judge the averaged weights on the validation split, in the run's precision."""
        if self.inputs.val is None or state.step == self.run.steps:
            return  # the last one is made by `finish`, as `evaluate` would
        self.pending = True
        try:
            self.last = self.judged(state, self.inputs.val, self.run.precision)
        except Interrupted:
            return
        self.pending = False
        figures = {f"val/{name}": value for name, value in self.last.figures.items()}
        self.record({"step": state.step, "epoch": state.images / self.run.data.images, "seconds": self.seconds(), **figures})
        self.logged, self.logged_images = time.perf_counter(), state.images

    def judged(self, state: State, split: Split, precision: str) -> Report:
        """The figures of the averaged weights on a split. Raises Interrupted when a signal came in."""

        def each(images: int) -> None:
            if self.signals.received:
                raise Interrupted("evaluation cut short")

        reader = Judged(split, self.run.preprocess, self.run.data.workers)
        engine = TorchEngine(averaged(state), self.run.preprocess, self.run.device, precision)
        logits, bad = logits_of(engine, reader, each=each)
        readable = [sample not in bad for sample in range(len(split))]
        return judge(logits, split.labels, self.run.data.classes, torch.tensor(readable).numpy())

    def save(self, state: State) -> None:
        """A checkpoint. A failure is told and the run goes on; after three in a row ResourceError ends it."""
        flat = state.flat
        numbers = {
            "format": 1,
            "step": state.step,
            "images": state.images,
            "losses": state.losses,
            "counted": state.counted,
            "pending": self.pending,
            "seconds": self.seconds(),
            "threads": torch.get_num_threads(),
        }
        writers: dict[str, Callable[[Path], None]] = {
            MODEL: lambda path: write_tensors(flat.views(flat.master), path),
            OPTIMIZER: lambda path: write_tensors(state.optimizers.state(), path),
            STATE: lambda path: write_text(path, json.dumps(numbers)),
        }
        if flat.ema is not None:
            writers[AVERAGE] = lambda path: write_tensors(flat.views(flat.average), path)
        try:
            self.store.save(state.step, writers, size=4 * len(flat.master) * 4)
            self.failures = 0
        except ResourceError as error:
            self.failures += 1
            if self.failures >= FAILURES:
                raise
            self.listener.note(f"{error.message}; training goes on ({self.failures} of {FAILURES} failures)")

    def restore(self, state: State) -> None:
        """Continue from the newest valid checkpoint, if there is one."""
        place = self.store.newest(self.listener.note)
        if place is not None:
            numbers = json.loads((place / STATE).read_text())
            state.step, state.images = numbers["step"], numbers["images"]
            state.losses, state.counted = numbers["losses"], numbers["counted"]
            self.pending, self.before = numbers["pending"], numbers["seconds"]
            flat = state.flat
            copy_into(flat.views(flat.master), load_file(place / MODEL))
            if flat.ema is not None:
                copy_into(flat.views(flat.average), load_file(place / AVERAGE))
            if flat.work is not flat.master:
                flat.work.copy_(flat.master)
            state.optimizers.load(load_file(place / OPTIMIZER))
            self.listener.note(f"resumed at step {state.step} of {self.run.steps}")
            if numbers["threads"] != torch.get_num_threads():
                self.listener.note(
                    f"{numbers['threads']} threads before, {torch.get_num_threads()} now: results may differ in the last bits"
                )
        self.folder.rewind(state.step)

    def stop(self, state: State) -> None:
        """After a signal: save, and end the loop."""
        if self.signals.received and state.step < self.run.steps:
            self.save(state)
            state.halt = True

    def interrupted(self, state: State) -> Interrupted:
        """What a stopped run says."""
        code = 128 + int(self.signals.received or 0)
        return Interrupted(
            f"stopped at step {state.step} of {self.run.steps}, saved", f"continue with --resume --out {self.folder.path}", code
        )

    def finish(self, state: State) -> dict[str, Any]:
        """Write the bundle, judge it as `evaluate` would, and sum the run up."""
        run = self.run
        model = averaged(state)
        provenance = {"init": run.init, "data": run.data.source, "epochs": run.epochs, "seed": run.seed}
        Bundle(model, run.data.classes, run.preprocess, provenance).save(self.folder.bundle)
        val = None
        if self.inputs.val is not None:
            try:
                self.last = self.judged(state, self.inputs.val, "auto")
            except Interrupted:
                raise self.interrupted(state) from None
            val = self.last.summary()
            figures = {f"val/{name}": value for name, value in self.last.figures.items()}
            self.folder.rewind(state.step, but=f'"step": {state.step}, "epoch": {json.dumps(run.epochs)}, "val/')
            self.folder.append({"step": state.step, "epoch": run.epochs, **figures, "seconds": self.seconds()})
        rates = sorted(self.rates) or [0.0]
        return {
            "model": name_of(run.model),
            "parameters": sum(p.numel() for p in model.parameters()),
            "data": run.data.source,
            "steps": state.step,
            "epochs": run.epochs,
            "seed": run.seed,
            "wall_seconds": self.seconds(),
            "images_per_second": rates[len(rates) // 2],
            "exaflops": self.exaflops(state),
            "flops_utilisation": None,
            "peak_memory_bytes": peak_memory(run.device),
            "train": {"loss": json.loads(last_line(self.folder.metrics, "train/loss"))["train/loss"]},
            "val": val,
            "test": None,
            "run": str(self.folder.path),
            "bundle": str(self.folder.bundle),
        }

    def seconds(self) -> float:
        """Wall time of the run so far, those before a resume included."""
        return self.before + time.perf_counter() - self.started

    def exaflops(self, state: State) -> float:
        """Floating-point operations of the model so far, in 1e18: three forward passes a picture, two to a multiply-add.
        Patches and pixels that were left out are counted."""
        return 6 * macs(self.run.model) * state.images / 1e18


def averaged(state: State) -> Model:
    """The model that computes with the averaged weights."""
    model = state.flat.twin.get_submodule("model")
    assert isinstance(model, ViT | BiT)
    return model


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """A safetensors file. Raises OSError where it cannot be written."""
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(str(error)) from None


def copy_into(views: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Give views new values, name by name."""
    for name, view in views.items():
        view.copy_(tensors[name])


def last_line(path: Path, word: str) -> str:
    """The last line of a file with a word in it."""
    return [line for line in path.read_text("utf-8").splitlines() if word in line][-1]
