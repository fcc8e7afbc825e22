"""Test the wheel as a new user: install it in a clean environment outside the checkout and run every command.

    python -m tests.wheel [--pythons 3.11 3.12 3.13] [--environment FOLDER]

For each available Python version, the script creates an environment, installs the wheel with the required extras, runs
the commands on the built-in digits and on generated images, and deletes the environment. This takes minutes for each
version and downloads PyTorch. `--environment` uses an existing environment that has everything but the wheel.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
EXTRAS = "serve,export,hub"
COMMAND_TIMEOUT = 900.0  # seconds for one command; generous for busy machines
TINY_OPTIONS = ("--model", "ViT-32x2/4", "--seed", "0", "--device", "cpu")
#: command lines in order; {old} is a previous output. Each must exit with 0
STEPS: dict[str, tuple[str, ...]] = {
    "help": ("--help",),
    "doctor": ("doctor", "--json"),
    "models": ("models", "ViT-Ti*", "--json"),
    "recipes": ("recipes", "digits"),
    "completion": ("completion", "bash"),
    "data check": ("data", "check", "pictures", "--out", "check.html"),
    "data dedup": ("data", "dedup", "pictures", "--within", "--out", "copies.csv"),
    "data pack": ("data", "pack", "pictures", "--out", "packed"),
    "data convert": ("data", "convert", "boxes", "coco", "--to", "coco"),
    "train, planned": ("train", "pictures", *TINY_OPTIONS, "--dry-run", "--json"),
    "train": ("train", "digits", *TINY_OPTIONS, "--steps", "20", "--out", "run", "--json"),
    "train, pictures": ("train", "pictures", *TINY_OPTIONS, "--image-size", "16", "--steps", "2", "--out", "photos", "--workers", "1"),
    "predict": ("predict", "run", "picture.png", "--json"),
    "embed": ("embed", "run", "picture.png", "--out", "vectors.npz"),
    "evaluate": ("evaluate", "run", "--json"),
    "inspect": ("inspect", "run", "picture.png", "--figures", "rollout", "positions", "--out", "inside"),
    "export": ("export", "run", "--to", "onnx", "--json"),
    "convert": ("convert", "run", "as-timm", "--to", "timm"),
    "soup": ("soup", "run", "resumed", "--out", "soup"),
    "push, planned": ("push", "run", "hf:someone/digits", "--dry-run", "--out", "card"),
    "train a generator": ("train", "digits", "--recipe", "sit", "--model", "DiT-32x2/2", "--steps", "4", "--device", "cpu", "--out", "maker"),
    "sample": ("sample", "maker", "--count", "2", "--steps", "3", "--out", "made.png", "--device", "cpu"),
    "study": ("study", "--json"),
    "study, planned": ("study", "pooling", "--steps", "2", "--seeds", "1", "--dry-run", "--device", "cpu"),
    "bench": ("bench", "--tasks", "inference", "--models", "ViT-32x2/4", "--image-size", "16", "--batch-sizes", "1", "--rounds", "1", "--seconds", "0.05", "--device", "cpu", "--only", "vitreous*"),
}  # fmt: skip
#: rejected commands: words, exit code, and a part of the message
INVALID_COMMANDS = {
    "a wrong verb": (("trian", "digits"), 2, "train"),
    "a wrong option": (("train", "digits", "--epoch", "1"), 2, "--epochs"),
    "no data": (("train", "nowhere"), 3, "nowhere"),
    "no such run": (("predict", "nowhere", "picture.png"), 2, "nowhere"),
}


@dataclass
class WheelResult:
    """The results of the commands on one Python: seconds of each, and failures, by name."""

    python: str
    seconds: dict[str, float] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)


def find_pythons(versions: tuple[str, ...] = PYTHONS) -> dict[str, str]:
    """Version -> interpreter: this one, `pythonX.Y` on the PATH, or pyenv's."""
    interpreters = {}
    for version in versions:
        candidates = filter(None, [sys.executable, shutil.which(f"python{version}"), *find_pyenv_pythons(version)])
        fitting = [path for path in candidates if get_python_version(path) == version]
        if fitting:
            interpreters[version] = fitting[0]
    return interpreters


def get_python_version(python: str) -> str:
    """The version, such as `3.12`, or an empty string if the program is not Python."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def find_pyenv_pythons(version: str) -> list[str]:
    """The interpreters of a version installed by pyenv."""
    if shutil.which("pyenv") is None:
        return []
    names = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True).stdout.split()
    chosen = [name for name in names if name.startswith(f"{version}.")]
    prefixes = [subprocess.run(["pyenv", "prefix", name], capture_output=True, text=True) for name in chosen]
    return [f"{prefix.stdout.strip()}/bin/python" for prefix in prefixes if prefix.returncode == 0]


def build_wheel(folder: Path) -> Path:
    """Build the wheel of the checkout."""
    words = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT]
    subprocess.run(words, check=True, env=build_clean_environment())
    (wheel,) = folder.glob("*.whl")
    return wheel


def build_clean_environment() -> dict[str, str]:
    """The environment variables except those that would find the checkout, with one thread."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return environment | {"PIP_NO_COMPILE": "1", "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1")}


def make_environment(python: str, folder: Path, wheel: Path) -> None:
    """Create an environment with the wheel and its binary dependencies; an existing one gets only the wheel."""
    interpreter = str(folder / "bin" / "python")
    more = ["--force-reinstall", "--no-deps", str(wheel)] if folder.is_dir() else [f"{wheel}[{EXTRAS}]"]
    if not folder.is_dir():
        subprocess.run([python, "-m", "venv", folder], check=True, env=build_clean_environment())
    subprocess.run(
        [interpreter, "-m", "pip", "install", "-q", "--no-compile", *more], check=True, env=build_clean_environment()
    )


def write_images(home: Path) -> None:
    """Write `pictures/CLASS/*.png`, a single image, and `boxes` in YOLO format, drawn with Pillow, without the
    package."""
    from PIL import Image, ImageDraw

    for index in range(24):
        image = Image.new("RGB", (40, 32), (20 * (index % 12), 90, 30 + 9 * index))
        box = (6 + index % 8, 5, 25, 9 + index % 20)
        shape = ("disc", "square")[index % 2]
        (ImageDraw.Draw(image).ellipse if index % 2 == 0 else ImageDraw.Draw(image).rectangle)(
            box, (250, 250, 9 * index)
        )
        for folder in (home / "pictures" / shape, home / "boxes" / "images" / "train"):
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / f"{index:02}.png")
        labels = home / "boxes" / "labels" / "train"
        labels.mkdir(parents=True, exist_ok=True)
        (labels / f"{index:02}.txt").write_text(f"{index % 2} 0.4 0.4 0.5 0.3\n")
    (home / "boxes" / "data.yaml").write_text(
        "path: .\ntrain: images/train\nval: images/train\nnames: {0: disc, 1: square}\n"
    )
    Image.new("L", (8, 8), 90).save(home / "picture.png")


class WheelTrial:
    """The commands in one environment, in a new folder."""

    def __init__(self, environment: Path, folder: Path, name: str) -> None:
        self.program, self.home, self.tried = str(environment / "bin" / "vitreous"), folder, WheelResult(name)

    def run(self) -> WheelResult:
        """Run all commands; a failure is recorded and the others continue."""
        write_images(self.home)
        for name, words in STEPS.items():
            if name == "predict":  # later commands need a complete run, and a resumed one
                self.note("train, stopped and resumed", self.stop_and_resume)
            self.note(name, lambda words=words: self.expect(words, 0))
        for name, (words, code, text) in INVALID_COMMANDS.items():
            self.note(name, lambda words=words, code=code, text=text: self.expect(words, code, text))
        self.note("serve", lambda: self.request_server("serve", "/readyz", "--device", "cpu", "--quiet"))
        self.note("watch", lambda: self.request_server("watch", "/"))
        return self.tried

    def note(self, name: str, act: Callable[[], None]) -> None:
        """Run one function, and record its seconds and failure."""
        start = time.monotonic()
        try:
            act()
        except (AssertionError, subprocess.TimeoutExpired, OSError, ValueError) as error:
            self.tried.wrong[name] = str(error)[-1500:]
        self.tried.seconds[name] = round(time.monotonic() - start, 1)
        print(
            f"{self.tried.python}  {self.tried.seconds[name]:6.1f} s  {name}{'  FAILED' * (name in self.tried.wrong)}",
            flush=True,
        )

    def expect(self, words: tuple[str, ...], code: int, text: str = "") -> None:
        """Run a command; check its exit code, that there is no traceback, that it prints `text`, and that --json output
        is JSON."""
        options = {
            "cwd": self.home,
            "env": build_clean_environment(),
            "capture_output": True,
            "text": True,
            "timeout": COMMAND_TIMEOUT,
        }
        done = subprocess.run([self.program, *words], **options)
        message = f"`vitreous {' '.join(words)}` gave {done.returncode}: {done.stderr}"
        assert done.returncode == code and "Traceback" not in done.stderr and text in done.stderr + done.stdout, message
        if "--json" in words:
            json.loads(done.stdout)

    def stop_and_resume(self) -> None:
        """Stop a run after its first checkpoint, then resume it to its end."""
        words = ("train", "digits", *TINY_OPTIONS, "--steps", "600", "--save-every", "20", "--out", "resumed")
        checkpoints = self.home / "resumed" / "checkpoints"
        with self.start_in_background(words) as process:
            self.wait(lambda: any(checkpoints.glob("step-*")), process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(COMMAND_TIMEOUT) == 143, "SIGTERM is code 143"
        self.expect(("train", "--resume", "--out", "resumed"), 0)
        assert json.loads((self.home / "resumed" / "summary.json").read_text())["steps"] == 600

    def request_server(self, verb: str, path: str, *options: str) -> None:
        """Start a server, request a prediction if it supports that, and stop it."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        address = f"http://127.0.0.1:{port}"
        with self.start_in_background((verb, "run", "--port", str(port), *options)) as process:
            self.wait(lambda: is_server_ready(address + path), process)
            if verb == "serve":
                content = (self.home / "picture.png").read_bytes()
                request = urllib.request.Request(f"{address}/v1/predict", content, {"Content-Type": "image/png"})
                with urllib.request.urlopen(request, timeout=COMMAND_TIMEOUT) as response:
                    assert json.load(response), "no prediction"
            process.send_signal(signal.SIGTERM)
            assert process.wait(COMMAND_TIMEOUT) in (0, 143), f"{verb} ended with {process.returncode}"

    def start_in_background(self, words: tuple[str, ...]):
        """Start a command in the background; it is killed at the end if it is still running."""
        return ManagedProcess(
            subprocess.Popen(
                [self.program, *words],
                cwd=self.home,
                env=build_clean_environment(),
                stdout=subprocess.DEVNULL,
                stderr=(self.home / "stderr.txt").open("w"),
            )
        )

    def wait(self, done: Callable[[], bool], process: subprocess.Popen) -> None:
        """Wait for a condition. Raises AssertionError if the process ends before, or after a timeout."""
        until = time.monotonic() + COMMAND_TIMEOUT
        while not done():
            assert process.poll() is None, f"ended with {process.returncode}: {(self.home / 'stderr.txt').read_text()}"
            assert time.monotonic() < until, "waited for too long"
            time.sleep(0.02)


class ManagedProcess:
    """A process that ends with the block."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process = process

    def __enter__(self) -> subprocess.Popen:
        return self.process

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def is_server_ready(address: str) -> bool:
    """Whether a server responds."""
    try:
        with urllib.request.urlopen(address, timeout=10) as response:
            return response.status == 200
    except OSError:
        return False


def try_wheel(versions: tuple[str, ...] = PYTHONS, environment: Path | None = None) -> Iterator[WheelResult]:
    """Yield the results of the commands on each available Python."""
    with tempfile.TemporaryDirectory() as scratch:
        scratch_folder = Path(scratch)
        wheel = build_wheel(scratch_folder)
        for version, python in find_pythons(versions).items():
            folder = environment or scratch_folder / f"python-{version}"
            start = time.monotonic()
            make_environment(python, folder, wheel)
            print(f"{version}  {time.monotonic() - start:6.1f} s  installed", flush=True)
            home_folder = scratch_folder / f"home-{version}"
            home_folder.mkdir()
            yield WheelTrial(folder, home_folder, version).run()
            if environment is None:
                shutil.rmtree(folder)


def main() -> None:
    """Test the wheel, print the results, and exit with 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.wheel", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pythons", nargs="+", default=PYTHONS)
    parser.add_argument("--environment", type=Path)
    options = parser.parse_args()
    tried = list(try_wheel(tuple(options.pythons), options.environment))
    for result in tried:
        print(
            f"Python {result.python}: {len(result.seconds)} commands in {sum(result.seconds.values()):.0f} s, {len(result.wrong)} failed"
        )
        for name, text in result.wrong.items():
            print(f"  {name}: {text}")
    sys.exit(not tried or any(result.wrong for result in tried))


if __name__ == "__main__":
    main()
