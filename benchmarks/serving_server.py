"""A server of this package as a process bound to one core, and what can be seen of it from outside; `serving.py` uses
it."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

START_TIMEOUT = 120  # seconds for a server to be ready
SERVE_PROGRAM = ("-m", "vitreous", "serve")
PHOTO_SIZE = (500, 375)  # of a made-up photograph, width and height


def make_run(home: Path, name: str, seed: int = 0, classes: int = 1000) -> Path:
    """A bundle of random weights, its head too, so that no two pictures have one answer; kept where it is there."""
    import torch

    from vitreous.data.modalities.images import ImagePreprocess
    from vitreous.models.zoo import create_untrained_model
    from vitreous.tasks.classification import Classification
    from vitreous.weights.bundle import Bundle

    out = home / f"{name.replace('/', '-')}-{seed}"
    if (out / "model.json").exists():
        return out
    torch.manual_seed(seed)
    model = create_untrained_model(name, num_classes=classes)
    with torch.no_grad():
        model.head.weight.normal_(0, 1.0)
    Bundle(
        model, Classification(tuple(f"class {number}" for number in range(classes))), ImagePreprocess((224, 224))
    ).save(out)
    return out


def load_photographs(folder: Path | None, count: int, seed: int = 0) -> list[tuple[str, bytes]]:
    """Names and bytes of JPEGs: those of a folder, or clouds of colour with some noise, drawn."""
    if folder:
        found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))[:count]
        return [(f"{number}.jpg", path.read_bytes()) for number, path in enumerate(found)]
    from PIL import Image

    draw, made = np.random.default_rng(seed), []
    for number in range(count):
        coarse = Image.fromarray(draw.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(
            PHOTO_SIZE, Image.Resampling.BICUBIC
        )
        noisy = np.asarray(coarse, np.int16) + draw.integers(-12, 13, (PHOTO_SIZE[1], PHOTO_SIZE[0], 3), dtype=np.int16)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file := io.BytesIO(), "JPEG", quality=85)
        made.append((f"{number}.jpg", file.getvalue()))
    return made


def list_process_tree(root: int) -> list[int]:
    """A process and all below it."""
    found = [root]
    for process in found:
        try:
            for task in os.listdir(f"/proc/{process}/task"):
                found += map(int, Path(f"/proc/{process}/task/{task}/children").read_text().split())
        except OSError:
            continue
    return found


def read_command(process: int) -> bytes:
    """The words that a process was started with."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def measure_resident_bytes(processes: list[int]) -> int:
    """Bytes that processes hold; what they share is counted once, in proportion."""
    total = 0
    for process in processes:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue
    return total


class Server:
    """`vitreous serve` on a port of its own, with its log in a file. Use as a context manager."""

    def __init__(
        self,
        run: Path,
        scratch: Path,
        core: int | None = None,
        words: tuple[str, ...] = (),
        program: tuple[str, ...] = SERVE_PROGRAM,
    ) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        self.log = scratch / f"serve-{os.getpid()}-{time.monotonic_ns()}.log"
        begun = time.perf_counter()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, str(run), "--port", "0", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                preexec_fn=None if core is None else (lambda: os.sched_setaffinity(0, {core})),
            )
        line = self.process.stdout.readline().decode()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        if not found:
            self.process.kill()
            raise RuntimeError(f"the server said {line!r}\n{self.log.read_text()[-2000:]}")
        self.port = int(found[1])
        while not self.ready():
            if self.process.poll() is not None or time.perf_counter() - begun > START_TIMEOUT:
                raise RuntimeError(f"the server is not ready\n{self.log.read_text()[-2000:]}")
            time.sleep(0.02)
        self.startup = time.perf_counter() - begun

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                for process in list_process_tree(self.process.pid):
                    os.kill(process, signal.SIGKILL)
                self.process.wait()
        self.process.stdout.close()

    def ready(self) -> bool:
        """Whether it says so."""
        try:
            return self.get("/readyz").startswith(b"HTTP/1.1 200")
        except OSError:
            return False

    def get(self, path: str) -> bytes:
        """One response, head and body, on a connection of its own."""
        with socket.create_connection(("127.0.0.1", self.port), 10) as line:
            line.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
            found = bytearray()
            while piece := line.recv(65536):
                found += piece
        return bytes(found)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name with labels."""
        lines = self.get("/metrics").partition(b"\r\n\r\n")[2].decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def memory(self) -> int:
        """Bytes of it and its children."""
        return measure_resident_bytes(list_process_tree(self.process.pid))

    def spent(self) -> float:
        """Processor seconds of it and its children so far."""
        ticks = 0
        for process in list_process_tree(self.process.pid):
            try:
                ticks += sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]))
            except OSError:
                continue
        return ticks / os.sysconf("SC_CLK_TCK")

    def decoders(self) -> list[int]:
        """Its children that decode."""
        return [
            child
            for child in list_process_tree(self.process.pid)[1:]
            if b".child" in (found := read_command(child)) or b"_trap.py" in found
        ]

    def files(self) -> int:
        """Descriptors that it has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def two_cores() -> tuple[int, int]:
    """One core for the server and one for the client, which binds this process to it. They are one where there is no
    other."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    return cores[0], cores[-1]
