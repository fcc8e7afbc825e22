"""Two programs on one machine: each alone, then both at the same time, in alternating rounds.

    python benchmarks/sharing.py --out benchmarks/results/DATE-sharing-HARDWARE.md

`train`: ten epochs of digits, two runs at a time. `predict`: predictions of a ViT-S/16 while a `vitreous serve` of the
same model receives continuous requests. Each is measured with this package's limit on thread spinning, and with the
default of GNU OpenMP, 300,000 spins.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import vitreous
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.system.cores import SPIN_VARIABLES
from vitreous.system.machine import get_processor_name
from vitreous.tasks.classification import Classification
from vitreous.weights.bundle import Bundle

SPIN_COUNTS = {"bounded": SPIN_VARIABLES["GOMP_SPINCOUNT"], "OpenMP's own": "300000"}
PORT, NUM_IMAGES = 8765, 200


def start_command(words: list[str], spins: str) -> subprocess.Popen[bytes]:
    """Start a command of this package."""
    environment = os.environ | {"GOMP_SPINCOUNT": spins}
    return subprocess.Popen([sys.executable, "-m", "vitreous", *words], env=environment, stdout=-3, stderr=-3)


def measure_seconds(commands: list[list[str]], spins: str) -> float:
    """The mean wall time of concurrent commands, as complete processes."""
    started, times = time.perf_counter(), []
    processes = [start_command(words, spins) for words in commands]
    threads = [
        threading.Thread(target=lambda p=p: (p.wait(), times.append(time.perf_counter() - started))) for p in processes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{commands[0]} failed")
    return statistics.mean(times)


def make_train_commands(scratch: Path, round_: int, count: int) -> list[list[str]]:
    """Commands that train ten epochs of digits."""
    return [
        ["train", "digits", "--epochs", "10", "--out", str(scratch / f"{round_}-{count}-{i}-{time.time_ns()}")]
        for i in range(count)
    ]


def prepare_data(scratch: Path) -> bytes:
    """Write a bundle with random weights and a folder of images; returns one image as an uploaded file."""
    random, folder = np.random.default_rng(0), scratch / "pictures"
    folder.mkdir()
    names = tuple(f"class {i}" for i in range(10))
    Bundle(
        vitreous.create("ViT-S/16", num_classes=10), Classification(names), ImagePreprocess(image=(224, 224)), {}
    ).save(scratch / "bundle")
    for i in range(NUM_IMAGES):
        Image.fromarray(random.integers(0, 255, (300, 400, 3), dtype=np.uint8)).save(folder / f"{i:04}.jpg")
    return (folder / "0000.jpg").read_bytes()


@contextmanager
def run_busy_server(scratch: Path, image: bytes, spins: str) -> Iterator[None]:
    """Run a server that receives one request after the other."""
    server, asking = start_command(["serve", str(scratch / "bundle"), "--port", str(PORT)], spins), True
    body = BytesIO()
    body.write(
        b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\nContent-Type: image/jpeg\r\n\r\n'
    )
    body.write(image + b"\r\n--x--\r\n")
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/predict", body.getvalue(), {"Content-Type": "multipart/form-data; boundary=x"}
    )

    def ask() -> None:
        while asking:
            try:
                urllib.request.urlopen(request, timeout=30).read()
            except OSError:
                time.sleep(0.2)

    client = threading.Thread(target=ask)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(request, timeout=30).read()
                break
            except OSError:
                time.sleep(0.2)
        client.start()
        yield
    finally:
        asking = False
        server.terminate()
        server.wait()
        client.join()


def measure_rows(scratch: Path, rounds: int) -> list[tuple[str, str, float, float]]:
    """Task, spinning, seconds alone, and seconds with another program: medians over rounds."""
    image = prepare_data(scratch)
    predict_commands = [["predict", str(scratch / "bundle"), str(scratch / "pictures"), "--json"]]
    durations: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for round_ in range(rounds):
        for name, spins in SPIN_COUNTS.items():
            alone, beside = (measure_seconds(make_train_commands(scratch, round_, count), spins) for count in (1, 2))
            durations.setdefault(("train digits, 10 epochs, with another run", name), []).append((alone, beside))
            alone = measure_seconds(predict_commands, spins)
            with run_busy_server(scratch, image, spins):
                beside = measure_seconds(predict_commands, spins)
            durations.setdefault((f"predict {NUM_IMAGES} images, ViT-S/16, with serve", name), []).append(
                (alone, beside)
            )
            print(durations, flush=True)
    return [
        (*key, *(statistics.median(column) for column in zip(*pairs, strict=True))) for key, pairs in durations.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure_rows(Path(scratch), arguments.rounds)
    lines = [f"# Two programs on one machine, {time.strftime('%Y-%m-%d')}", ""]
    lines += [
        f"{get_processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}; whole processes, medians of"
    ]
    lines += [f"{arguments.rounds} alternating rounds. `python benchmarks/sharing.py`", ""]
    lines += ["| | thread spinning | seconds alone | seconds each, concurrent | ratio |", "|---|---|---|---|---|"]
    lines += [
        f"| {task} | {name} | {alone:.1f} | {beside:.1f} | {beside / alone:.2f} |" for task, name, alone, beside in rows
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
