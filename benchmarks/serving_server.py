"""A server of this package as a process bound to one core, observed from outside; used by `serving.py`."""

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

START_TIMEOUT = 120  # maximum seconds until a server is ready
SERVE_PROGRAM = ("-m", "vitreous", "serve")
PHOTO_SIZE = (500, 375)  # size of a synthetic photograph, width and height


def make_run(folder: Path, name: str, seed: int = 0, classes: int = 1000) -> Path:
    """Create a bundle with random weights, including the head, so that predictions differ between images; an existing
    one is kept."""
    import torch

    from vitreous.data.modalities.images import ImagePreprocess
    from vitreous.models.zoo import create_untrained_model
    from vitreous.tasks.classification import Classification
    from vitreous.weights.bundle import Bundle

    out = folder / f"{name.replace('/', '-')}-{seed}"
    if (out / "model.json").exists():
        return out
    torch.manual_seed(seed)
    model = create_untrained_model(name, num_classes=classes)
    with torch.no_grad():
        model.head.weight.normal_(0, 1.0)
    Bundle(
        model,
        Classification(tuple(f"class {class_index}" for class_index in range(classes))),
        ImagePreprocess((224, 224)),
    ).save(out)
    return out


def load_photographs(folder: Path | None, count: int, seed: int = 0) -> list[tuple[str, bytes]]:
    """Names and bytes of JPEGs: those of a folder, or synthetic noisy clouds of colour."""
    if folder:
        files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))[:count]
        return [(f"{index}.jpg", path.read_bytes()) for index, path in enumerate(files)]
    from PIL import Image

    draw, photographs = np.random.default_rng(seed), []
    for index in range(count):
        coarse = Image.fromarray(draw.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(
            PHOTO_SIZE, Image.Resampling.BICUBIC
        )
        noisy = np.asarray(coarse, np.int16) + draw.integers(-12, 13, (PHOTO_SIZE[1], PHOTO_SIZE[0], 3), dtype=np.int16)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file := io.BytesIO(), "JPEG", quality=85)
        photographs.append((f"{index}.jpg", file.getvalue()))
    return photographs


def list_process_tree(root: int) -> list[int]:
    """The process IDs of a process and all its descendants."""
    pids = [root]
    for process in pids:
        try:
            for task in os.listdir(f"/proc/{process}/task"):
                pids += map(int, Path(f"/proc/{process}/task/{task}/children").read_text().split())
        except OSError:
            continue
    return pids


def read_command(process: int) -> bytes:
    """The command line of a process."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def measure_resident_bytes(processes: list[int]) -> int:
    """Bytes of processes; shared pages count proportionally."""
    total = 0
    for process in processes:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue
    return total


class Server:
    """`vitreous serve` on a free port, with its log in a file. Use as a context manager."""

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
        match = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        if not match:
            self.process.kill()
            raise RuntimeError(f"the server said {line!r}\n{self.log.read_text()[-2000:]}")
        self.port = int(match[1])
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
        """Whether the server reports that it is ready."""
        try:
            return self.get("/readyz").startswith(b"HTTP/1.1 200")
        except OSError:
            return False

    def get(self, path: str) -> bytes:
        """One response, head and body, on a new connection."""
        with socket.create_connection(("127.0.0.1", self.port), 10) as line:
            line.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
            received = bytearray()
            while piece := line.recv(65536):
                received += piece
        return bytes(received)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, keyed by its name with labels."""
        lines = self.get("/metrics").partition(b"\r\n\r\n")[2].decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def memory(self) -> int:
        """Bytes of the server and its children."""
        return measure_resident_bytes(list_process_tree(self.process.pid))

    def spent(self) -> float:
        """Processor seconds of the server and its children so far."""
        ticks = 0
        for process in list_process_tree(self.process.pid):
            try:
                ticks += sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]))
            except OSError:
                continue
        return ticks / os.sysconf("SC_CLK_TCK")

    def decoders(self) -> list[int]:
        """The process IDs of its decoders."""
        return [
            child
            for child in list_process_tree(self.process.pid)[1:]
            if b".child" in (command := read_command(child)) or b"_trap.py" in command
        ]

    def files(self) -> int:
        """The number of its open descriptors."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def bind_cores() -> tuple[int, int]:
    """One core for the server and one for the client, to which this process is bound; both are the same if there is
    only one."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    return cores[0], cores[-1]
