"""The wheel as a new user meets it: installed in a clean environment outside of the checkout, and every verb of the command line run there.

    python -m tests.wheel [--pythons 3.11 3.12 3.13] [--environment FOLDER]

For each Python that is at hand, by its name, an environment is made, the wheel is installed with the extras that the verbs need, the verbs
run one after the other on the embedded digits and on pictures that are made, and the environment is deleted. Takes minutes for each, and
downloads PyTorch. `--environment` takes one that is there, with everything but the wheel.
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
COMMAND_TIMEOUT = 900.0  # seconds for one verb; a machine that is busy with other things takes long
TINY_OPTIONS = ("--model", "ViT-32x2/4", "--seed", "0", "--device", "cpu")
#: verbs in their order, as words; {old} stands for words above. Each has to end with code 0
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
#: what is refused: words, exit code, and what the message names
INVALID_COMMANDS = {
    "a wrong verb": (("trian", "digits"), 2, "train"),
    "a wrong option": (("train", "digits", "--epoch", "1"), 2, "--epochs"),
    "no data": (("train", "nowhere"), 3, "nowhere"),
    "no such run": (("predict", "nowhere", "picture.png"), 2, "nowhere"),
}


@dataclass
class WheelResult:
    """What came of the verbs on one Python: seconds of each, and what was wrong, by name."""

    python: str
    seconds: dict[str, float] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)


def find_pythons(wanted: tuple[str, ...] = PYTHONS) -> dict[str, str]:
    """Version -> an interpreter of it: this one, `pythonX.Y` on the PATH, or pyenv's."""
    found = {}
    for version in wanted:
        candidates = filter(None, [sys.executable, shutil.which(f"python{version}"), *pyenv_pythons(version)])
        fitting = [path for path in candidates if get_python_version(path) == version]
        if fitting:
            found[version] = fitting[0]
    return found


def get_python_version(python: str) -> str:
    """`3.12`, or nothing for a program that is no Python."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def pyenv_pythons(version: str) -> list[str]:
    """The interpreters of a version that pyenv has."""
    if shutil.which("pyenv") is None:
        return []
    names = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True).stdout.split()
    chosen = [name for name in names if name.startswith(f"{version}.")]
    prefixes = [subprocess.run(["pyenv", "prefix", name], capture_output=True, text=True) for name in chosen]
    return [f"{one.stdout.strip()}/bin/python" for one in prefixes if one.returncode == 0]


def build_wheel(place: Path) -> Path:
    """The wheel of the checkout."""
    words = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", place, ROOT]
    subprocess.run(words, check=True, env=build_clean_environment())
    (wheel,) = place.glob("*.whl")
    return wheel


def build_clean_environment() -> dict[str, str]:
    """The environment without what would find the checkout, and one thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept | {"PIP_NO_COMPILE": "1", "OMP_NUM_THREADS": kept.get("OMP_NUM_THREADS", "1")}


def make_environment(python: str, folder: Path, wheel: Path) -> None:
    """An environment with the wheel and what it needs, nothing of it compiled; one that is there gets the wheel alone."""
    own = str(folder / "bin" / "python")
    more = ["--force-reinstall", "--no-deps", str(wheel)] if folder.is_dir() else [f"{wheel}[{EXTRAS}]"]
    if not folder.is_dir():
        subprocess.run([python, "-m", "venv", folder], check=True, env=build_clean_environment())
    subprocess.run(
        [own, "-m", "pip", "install", "-q", "--no-compile", *more], check=True, env=build_clean_environment()
    )


def write_images(home: Path) -> None:
    """`pictures/CLASS/*.png`, a picture, and `boxes` in YOLO's format: of Pillow's own drawing, without the package."""
    from PIL import Image, ImageDraw

    for number in range(24):
        picture = Image.new("RGB", (40, 32), (20 * (number % 12), 90, 30 + 9 * number))
        box = (6 + number % 8, 5, 25, 9 + number % 20)
        kind = ("disc", "square")[number % 2]
        (ImageDraw.Draw(picture).ellipse if number % 2 == 0 else ImageDraw.Draw(picture).rectangle)(
            box, (250, 250, 9 * number)
        )
        for folder in (home / "pictures" / kind, home / "boxes" / "images" / "train"):
            folder.mkdir(parents=True, exist_ok=True)
            picture.save(folder / f"{number:02}.png")
        labels = home / "boxes" / "labels" / "train"
        labels.mkdir(parents=True, exist_ok=True)
        (labels / f"{number:02}.txt").write_text(f"{number % 2} 0.4 0.4 0.5 0.3\n")
    (home / "boxes" / "data.yaml").write_text(
        "path: .\ntrain: images/train\nval: images/train\nnames: {0: disc, 1: square}\n"
    )
    Image.new("L", (8, 8), 90).save(home / "picture.png")


class WheelTrial:
    """The verbs of the command line in one environment, in a folder of their own."""

    def __init__(self, environment: Path, home: Path, name: str) -> None:
        self.program, self.home, self.tried = str(environment / "bin" / "vitreous"), home, WheelResult(name)

    def run(self) -> WheelResult:
        """All of them; what fails is noted, and the others go on."""
        write_images(self.home)
        for name, words in STEPS.items():
            if name == "predict":  # what follows needs a run, and one that was stopped
                self.note("train, stopped and resumed", self.stop_and_resume)
            self.note(name, lambda words=words: self.expect(words, 0))
        for name, (words, code, text) in INVALID_COMMANDS.items():
            self.note(name, lambda words=words, code=code, text=text: self.expect(words, code, text))
        self.note("serve", lambda: self.ask("serve", "/readyz", "--device", "cpu", "--quiet"))
        self.note("watch", lambda: self.ask("watch", "/"))
        return self.tried

    def note(self, name: str, act: Callable[[], None]) -> None:
        """Do one thing, and note its seconds and what was wrong."""
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
        """A command that ends with this code, without a traceback, and says `text`; JSON on stdout where it was asked for."""
        options = {
            "cwd": self.home,
            "env": build_clean_environment(),
            "capture_output": True,
            "text": True,
            "timeout": COMMAND_TIMEOUT,
        }
        done = subprocess.run([self.program, *words], **options)
        said = f"`vitreous {' '.join(words)}` gave {done.returncode}: {done.stderr}"
        assert done.returncode == code and "Traceback" not in done.stderr and text in done.stderr + done.stdout, said
        if "--json" in words:
            json.loads(done.stdout)

    def stop_and_resume(self) -> None:
        """A run that is stopped after its first checkpoint, and goes on to its end."""
        words = ("train", "digits", *TINY_OPTIONS, "--steps", "600", "--save-every", "20", "--out", "resumed")
        checkpoints = self.home / "resumed" / "checkpoints"
        with self.started(words) as process:
            self.wait(lambda: any(checkpoints.glob("step-*")), process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(COMMAND_TIMEOUT) == 143, "SIGTERM is code 143"
        self.expect(("train", "--resume", "--out", "resumed"), 0)
        assert json.loads((self.home / "resumed" / "summary.json").read_text())["steps"] == 600

    def ask(self, verb: str, path: str, *options: str) -> None:
        """A server that answers, to a picture too where it takes one, and ends when it is told."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        address = f"http://127.0.0.1:{port}"
        with self.started((verb, "run", "--port", str(port), *options)) as process:
            self.wait(lambda: is_server_ready(address + path), process)
            if verb == "serve":
                picture = (self.home / "picture.png").read_bytes()
                request = urllib.request.Request(f"{address}/v1/predict", picture, {"Content-Type": "image/png"})
                with urllib.request.urlopen(request, timeout=COMMAND_TIMEOUT) as answer:
                    assert json.load(answer), "no prediction"
            process.send_signal(signal.SIGTERM)
            assert process.wait(COMMAND_TIMEOUT) in (0, 143), f"{verb} ended with {process.returncode}"

    def started(self, words: tuple[str, ...]):
        """A command that runs on; killed in the end, if it is still there."""
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
        """Until something is so. Raises AssertionError where the process ends before, or it takes too long."""
        until = time.monotonic() + COMMAND_TIMEOUT
        while not done():
            assert process.poll() is None, f"ended with {process.returncode}: {(self.home / 'stderr.txt').read_text()}"
            assert time.monotonic() < until, "waited for too long"
            time.sleep(0.02)


class ManagedProcess:
    """A process that does not outlive the block."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process = process

    def __enter__(self) -> subprocess.Popen:
        return self.process

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def is_server_ready(address: str) -> bool:
    """Whether a server is there and well."""
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return answer.status == 200
    except OSError:
        return False


def try_wheel(wanted: tuple[str, ...] = PYTHONS, environment: Path | None = None) -> Iterator[WheelResult]:
    """What came of the verbs on each Python that is at hand."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        wheel = build_wheel(place)
        for version, python in find_pythons(wanted).items():
            folder = environment or place / f"python-{version}"
            start = time.monotonic()
            make_environment(python, folder, wheel)
            print(f"{version}  {time.monotonic() - start:6.1f} s  installed", flush=True)
            home = place / f"home-{version}"
            home.mkdir()
            yield WheelTrial(folder, home, version).run()
            if environment is None:
                shutil.rmtree(folder)


def main() -> None:
    """Try the wheel, print what came of it, and end with 1 where something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.wheel", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pythons", nargs="+", default=PYTHONS)
    parser.add_argument("--environment", type=Path)
    options = parser.parse_args()
    tried = list(try_wheel(tuple(options.pythons), options.environment))
    for one in tried:
        print(
            f"Python {one.python}: {len(one.seconds)} commands in {sum(one.seconds.values()):.0f} s, {len(one.wrong)} failed"
        )
        for name, text in one.wrong.items():
            print(f"  {name}: {text}")
    sys.exit(not tried or any(one.wrong for one in tried))


if __name__ == "__main__":
    main()
