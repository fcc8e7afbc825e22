"""Cases of `gpu.py` that run `vitreous train`: image files, images in memory, synchronisations, CIFAR-10."""

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
NEVER = 10**9  # steps
PROFILED_STEPS = (12, 22)  # first and last step with the profiler; as many following steps are traced


def write_photos(folder: Path, count: int, size: tuple[int, int]) -> Path:
    """Write synthetic photos as JPEG files of two classes to `folder`: smooth random colours with noise; return it."""
    for name in ("a", "b"):
        (folder / "train" / name).mkdir(parents=True, exist_ok=True)
    jobs = [(str(folder / "train" / "ab"[i % 2] / f"{i}.jpg"), i, size) for i in range(count)]
    with ProcessPoolExecutor(count_usable_cores()) as pool:
        list(pool.map(write_photo, jobs, chunksize=16))
    return folder


def write_photo(job: tuple[str, int, tuple[int, int]]) -> None:
    """Write a synthetic photo; `job` is (path, seed, (width, height))."""
    path, seed, size = job
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    noisy = np.asarray(coarse, np.int16) + rng.integers(-8, 9, (size[1], size[0], 3))
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)


class SynchronisationCounter:
    """A hook of the training loop that counts CUDA synchronisations per step.

    The profiler counts them by name, and PyTorch's synchronisation debug mode by source line.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()
        self.profiler: Any = None
        self.caught: Any = None

    def __call__(self, state: Any) -> None:
        """Start or stop recording after a step."""
        first, last = PROFILED_STEPS
        length = last - first
        if state.step == first and torch.cuda.is_available():
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self.profiler = torch.profiler.profile(activities=activities, acc_events=True)
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
        """Return the synchronisations per step, by name and by source line."""
        length = PROFILED_STEPS[1] - PROFILED_STEPS[0]
        return {
            "synchronisations_per_step": {name: count / length for name, count in self.counts.items()},
            "synchronising_lines_per_step": {name: count / length for name, count in self.lines.most_common(8)},
        }


@contextmanager
def add_step_hook(hook: Callable[[Any], None]) -> Iterator[None]:
    """Call `hook` after each step of every training run within this context."""
    fit = session.run_training_loop
    session.run_training_loop = lambda state, batches, hooks=(): fit(state, batches, [*hooks, (0, hook)])
    try:
        yield
    finally:
        session.run_training_loop = fit


def run_loop(name: str, data: str, steps: int, **options: Any) -> Row:
    """Train for `steps` steps; return throughput, data wait and FLOPs utilisation of the last log lines, and
    synchronisations per step."""
    counter = SynchronisationCounter()
    with tempfile.TemporaryDirectory() as scratch, add_step_hook(counter):
        out = Path(scratch) / "run"
        intervals = {"log_every": max(1, steps // 10), "evaluate_every": NEVER, "save_every": NEVER}
        started = time.perf_counter()
        train(data, progress=False, out=str(out), steps=steps, **intervals, **options)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        seconds = time.perf_counter() - started
    lines = [line for line in lines if "images_per_second" in line][-3:]
    mean = {
        key: float(np.mean([line[key] for line in lines]))
        for key in ("images_per_second", "data_wait", "flops_utilisation")
    }
    return {"work": name, "contender": "vitreous train", "seconds": seconds, **mean, **counter.row()}


def loop_cases(device: str, tiny: bool, photos: Path, cifar: Path | None) -> list[tuple[str, Callable[[], Row]]]:
    """Return (name, function) of each training run: photos in files, and images in memory."""
    steps = 8 if tiny else 60
    common_options = {"device": device, "epochs": None, "warmup_steps": 1}
    options: dict[str, dict[str, Any]] = {
        "photo files, ViT-S/16, batch 256": {
            "model": "ViT-S/16",
            "batch_size": 256,
            "recipe": "photos",
            "compile": True,
        },
        "photo files, MAE of ViT-S/16, batch 256": {"model": "ViT-S/16", "batch_size": 256, "recipe": "mae"},
        "photo files, DINO of ViT-S/16, batch 64": {"model": "ViT-S/16", "batch_size": 64, "recipe": "dino"},
    }
    if tiny:
        options = {
            name: {**o, "model": "ViT-32x2/16", "batch_size": 4, "image_size": 32} for name, o in options.items()
        }
    cases: list[tuple[str, Callable[[], Row]]] = []

    def add_case(name: str, data: str, train_options: dict[str, Any]) -> None:
        cases.append((name, lambda: run_loop(name, data, steps, **common_options, **train_options)))

    for name, train_options in options.items():
        add_case(name, str(photos), train_options)
    memory_data = str(cifar) if cifar else "digits"
    title = "CIFAR-10" if cifar else "digits"
    add_case(
        f"{title} in memory, Conv+ViT-128x4/8, batch 512",
        memory_data,
        {"model": "ViT-32x2/4" if tiny else "Conv+ViT-128x4/8", "batch_size": 16 if tiny else 512},
    )
    add_case(
        f"{title} in memory, ViT-S/4, batch 512",
        memory_data,
        {"model": "ViT-32x2/4" if tiny else "ViT-384x12/4", "batch_size": 16 if tiny else 512},
    )
    return cases


def unpack_cifar(source: Path | None, folder: Path) -> Path | None:
    """Return the folder of CIFAR-10: `source` if it is a folder, else the content of the archive; None without a
    source."""
    if source is None or source.is_dir():
        return source
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    return next(path.parent for path in folder.rglob("train") if path.is_dir())


def train_cifar(data: Path, device: str, seconds: float, tiny: bool, model: str, batch_size: int, rate: float) -> Row:
    """Train on CIFAR-10 for about `seconds`, given a throughput of `rate` images/s; return durations and test
    accuracy."""
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
        wall_seconds = time.perf_counter() - started
    return {
        "work": f"CIFAR-10, {model}, batch {batch_size}",
        "contender": "vitreous train",
        "seconds": wall_seconds,
        "training_seconds": summary["wall_seconds"],
        "epochs": summary["epochs"],
        "images_per_second": summary["images_per_second"],
        "test_top1": summary["test"]["top1"],
    }
