"""The parts of `gpu.py` that run `vitreous train` itself: files, images in memory, synchronisations, CIFAR-10."""

from __future__ import annotations

import json
import tarfile
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitreous.jobs.train import train
from vitreous.system.cores import count_usable_cores
from vitreous.training import session

Row = dict[str, Any]
NEVER = 10**9
PROFILED_STEPS = (12, 22)  # steps under the profiler, then as many whose synchronisations are traced to a line


def write_photos(folder: Path, count: int, size: tuple[int, int]) -> Path:
    """Synthetic photographs as JPEG files of two classes: smooth random colours with a little noise."""
    for name in ("a", "b"):
        (folder / "train" / name).mkdir(parents=True, exist_ok=True)
    jobs = [(str(folder / "train" / "ab"[i % 2] / f"{i}.jpg"), i, size) for i in range(count)]
    with ProcessPoolExecutor(count_usable_cores()) as pool:
        list(pool.map(write_photo, jobs, chunksize=16))
    return folder


def write_photo(job: tuple[str, int, tuple[int, int]]) -> None:
    """Write one of them; `job` is a path, a seed, and width and height."""
    path, seed, size = job
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    noisy = np.asarray(coarse, np.int16) + rng.integers(-8, 9, (size[1], size[0], 3))
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)


class SynchronisationCounter:
    """A hook of the training loop that counts CUDA synchronisations of steps, by the profiler and by PyTorch's own
    debug mode, which names the line."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()
        self.profiler: Any = None
        self.caught: Any = None

    def __call__(self, state: Any) -> None:
        """After a step: begin or end what is recorded."""
        first, last = PROFILED_STEPS
        length = last - first
        if state.step == first and torch.cuda.is_available():
            kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self.profiler = torch.profiler.profile(activities=kinds, acc_events=True)
            self.profiler.start()
        elif state.step == last and self.profiler:
            self.profiler.stop()
            names = [event.name for event in self.profiler.events() if "Synchronize" in event.name]
            self.counts.update(names)
        elif state.step == last + 1 and torch.cuda.is_available():
            self.caught = warnings.catch_warnings(record=True)
            self.log = self.caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        elif state.step == last + 1 + length and self.caught:
            torch.cuda.set_sync_debug_mode("default")
            self.caught.__exit__(None, None, None)
            for item in self.log:
                if "synchronizing" in str(item.message):
                    self.lines[f"{Path(item.filename).name}:{item.lineno}"] += 1

    def row(self) -> Row:
        """Counts of a step."""
        length = PROFILED_STEPS[1] - PROFILED_STEPS[0]
        return {
            "synchronisations_per_step": {name: count / length for name, count in self.counts.items()},
            "synchronising_lines_per_step": {name: count / length for name, count in self.lines.most_common(8)},
        }


@contextmanager
def add_step_hook(hook: Callable[[Any], None]) -> Iterator[None]:
    """Every run in this context calls the hook after each step."""
    fit = session.run_training_loop
    session.run_training_loop = lambda state, batches, hooks=(): fit(state, batches, [*hooks, (0, hook)])
    try:
        yield
    finally:
        session.run_training_loop = fit


def run_loop(name: str, data: str, steps: int, **options: Any) -> Row:
    """Train for some steps and return what its log says of the second half, with synchronisations of a step."""
    counter = SynchronisationCounter()
    with tempfile.TemporaryDirectory() as scratch, add_step_hook(counter):
        out = Path(scratch) / "run"
        every = {"log_every": max(1, steps // 10), "evaluate_every": NEVER, "save_every": NEVER}
        started = time.perf_counter()
        train(data, progress=False, out=str(out), steps=steps, **every, **options)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        seconds = time.perf_counter() - started
    lines = [line for line in lines if "images_per_second" in line][-3:]
    mean = {
        key: float(np.mean([line[key] for line in lines]))
        for key in ("images_per_second", "data_wait", "flops_utilisation")
    }
    return {"work": name, "contender": "vitreous train", "seconds": seconds, **mean, **counter.row()}


def loop_cases(device: str, tiny: bool, photos: Path, cifar: Path | None) -> list[tuple[str, Callable[[], Row]]]:
    """What is run, by name."""
    steps = 8 if tiny else 60
    small = {"device": device, "epochs": None, "warmup_steps": 1}
    options: dict[str, dict[str, Any]] = {
        "photographs in files, ViT-S/16, batch 256": {
            "model": "ViT-S/16",
            "batch_size": 256,
            "recipe": "photos",
            "compile": True,
        },
        "photographs in files, MAE of ViT-S/16, batch 256": {"model": "ViT-S/16", "batch_size": 256, "recipe": "mae"},
        "photographs in files, DINO of ViT-S/16, batch 64": {"model": "ViT-S/16", "batch_size": 64, "recipe": "dino"},
    }
    if tiny:
        options = {
            name: {**o, "model": "ViT-32x2/16", "batch_size": 4, "image_size": 32} for name, o in options.items()
        }
    cases: list[tuple[str, Callable[[], Row]]] = []

    def add(name: str, data: str, given: dict[str, Any]) -> None:
        cases.append((name, lambda: run_loop(name, data, steps, **small, **given)))

    for name, given in options.items():
        add(name, str(photos), given)
    memory = str(cifar) if cifar else "digits"
    title = "CIFAR-10" if cifar else "digits"
    add(
        f"{title} in memory, Conv+ViT-128x4/8, batch 512",
        memory,
        {"model": "ViT-32x2/4" if tiny else "Conv+ViT-128x4/8", "batch_size": 16 if tiny else 512},
    )
    add(
        f"{title} in memory, ViT-S/4, batch 512",
        memory,
        {"model": "ViT-32x2/4" if tiny else "ViT-384x12/4", "batch_size": 16 if tiny else 512},
    )
    return cases


def unpack_cifar(source: Path | None, folder: Path) -> Path | None:
    """The class folders of CIFAR-10: `source` itself, or what an archive of it holds; None without one."""
    if source is None or source.is_dir():
        return source
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    return next(path.parent for path in folder.rglob("train") if path.is_dir())


def train_cifar(data: Path, device: str, seconds: float, tiny: bool, model: str, batch_size: int, rate: float) -> Row:
    """CIFAR-10 for so many seconds at `rate` images a second, and the test accuracy."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        started = time.perf_counter()
        length: dict[str, Any] = {"epochs": round(rate * seconds / 45_000, 2)}
        if tiny:
            model, batch_size, length = "ViT-32x2/4", 16, {"steps": 4}
        summary = train(
            str(data), progress=False, out=str(out), model=model, batch_size=batch_size, device=device,
            evaluate_every=NEVER, save_every=NEVER, **length,
        )  # fmt: skip
        passed = time.perf_counter() - started
    return {
        "work": f"CIFAR-10, {model}, batch {batch_size}",
        "contender": "vitreous train",
        "seconds": passed,
        "training_seconds": summary["wall_seconds"],
        "epochs": summary["epochs"],
        "images_per_second": summary["images_per_second"],
        "test_top1": summary["test"]["top1"],
    }
