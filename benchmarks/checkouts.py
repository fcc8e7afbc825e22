"""Compare two checkouts of this package: time the same commands in alternating rounds, and compare their outputs.

python benchmarks/checkouts.py ../before --rounds 5

It checks that a refactoring keeps the speed, and that outputs stay bit-identical. `../before` is the other checkout,
for example from `git worktree add ../before COMMIT`. Both run in the Python environment of this command. The script
prints the median seconds of each command in both checkouts, the ratio before / after, and the range of the ratio over
the rounds. It also times requests to a server, and the loader with `vitreous bench`. The data are digits, which the
script writes.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

CHECKOUT = Path(__file__).resolve().parent.parent
VITREOUS_COMMAND = (sys.executable, "-m", "vitreous")
COMMANDS = {
    "import": (sys.executable, "-c", "import vitreous; vitreous.load"),
    "--help": (*VITREOUS_COMMAND, "--help"),
    "train digits": (*VITREOUS_COMMAND, "train", "digits", "--epochs", "10", "--out", "run"),
    "predict": (*VITREOUS_COMMAND, "predict", "run", "photos", "--engine", "torch", "--out", "predictions.jsonl"),
    "embed": (*VITREOUS_COMMAND, "embed", "run", "photos", "--engine", "torch", "--out", "features.npz"),
    "data check": (*VITREOUS_COMMAND, "data", "check", "photos", "--workers", "0"),
}
NUM_REQUESTS, NUM_CLIENTS = 2_000, 8  # requests to a server in total, and concurrent connections
LOADER_COMMAND = ("bench", "--tasks", "loader", "--images", "jpeg", "--only", "vitreous*", "--rounds", "3", "--json")
#: outputs of `COMMANDS` that must be bit-identical
OUTPUT_FILES = ("run/model/weights.safetensors", "predictions.jsonl", "features.npz")


def write_digits(folder: Path) -> None:
    """Write the embedded digits as a folder of ten classes, in PNG files."""
    images, labels = (np.asarray(array) for array in load_digits(return_X_y=True))
    for number, (pixels, label) in enumerate(zip(images.reshape(-1, 8, 8), labels, strict=True)):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15.9).astype(np.uint8)).save(folder / str(label) / f"{number}.png")


def time_command(words: tuple[str, ...], checkout: Path, folder: Path) -> float:
    """Run a command of a checkout in a folder, and return its seconds. Raises CalledProcessError if it fails."""
    start = time.perf_counter()
    subprocess.run(words, cwd=folder, env=build_environment(checkout), check=True, capture_output=True)
    return time.perf_counter() - start


def build_environment(checkout: Path) -> dict[str, str]:
    """Return the environment in which Python imports the package of a checkout."""
    return os.environ | {"PYTHONPATH": str(checkout), "VITREOUS_ENGINE_CHOICE": "0"}


def time_requests(checkout: Path, folder: Path) -> float:
    """Return the seconds that a server of the trained run takes for `NUM_REQUESTS` images from `NUM_CLIENTS`
    connections."""
    images = [path.read_bytes() for path in sorted((folder / "photos" / "0").iterdir())[:NUM_CLIENTS]]
    words = (*VITREOUS_COMMAND, "serve", "run", "--port", "0", "--engine", "torch")
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    environment = build_environment(checkout)
    with subprocess.Popen(words, cwd=folder, env=environment, stdout=pipe, stderr=null, text=True) as server:
        try:
            assert server.stdout
            address = re.search(r"http://([\d.]+):(\d+)", server.stdout.readline())
            assert address, "the server did not print its address"

            def send(image: bytes) -> None:
                connection = http.client.HTTPConnection(address[1], int(address[2]), timeout=60)
                for _ in range(NUM_REQUESTS // NUM_CLIENTS):
                    connection.request("POST", "/v1/predict", image, {"Content-Type": "image/png"})
                    response = connection.getresponse()
                    content = response.read()
                    assert response.status == 200, content
                connection.close()

            send(images[0])  # warms up
            start = time.perf_counter()
            with ThreadPoolExecutor(NUM_CLIENTS) as pool:
                list(pool.map(send, images))
            return time.perf_counter() - start
        finally:
            server.terminate()


def time_loader(checkout: Path, folder: Path) -> float:
    """Return the seconds in which the loader decodes and augments 1,000 JPEG files of 320 x 240 pixels."""
    (folder / "jpeg").mkdir(exist_ok=True)
    for number in range(32):
        pixels = np.random.default_rng(number).integers(0, 256, (15, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((320, 240)).save(folder / "jpeg" / f"{number}.jpg")
    words = (*VITREOUS_COMMAND, *LOADER_COMMAND)
    result = subprocess.run(
        words, cwd=folder, env=build_environment(checkout), check=True, capture_output=True, text=True
    )
    return 1000 / json.loads(result.stdout)["results"][0]["images_per_second"]


def digest_output(path: Path) -> str:
    """Return the SHA-256 of a file. Of an .npz file, which contains dates, only the arrays are hashed."""
    if path.suffix != ".npz":
        return hashlib.sha256(path.read_bytes()).hexdigest()
    arrays = np.load(path, allow_pickle=False)
    return hashlib.sha256(b"".join(np.ascontiguousarray(arrays[name]).tobytes() for name in arrays)).hexdigest()


def main() -> None:
    """Time the commands, and compare the outputs of the last round. Exits with 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    checkouts = {"before": options.before.resolve(), "after": CHECKOUT}
    names = (*COMMANDS, "requests", "loader")
    seconds: dict[str, dict[str, list[float]]] = {name: {"before": [], "after": []} for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        for round_index in range(options.rounds):
            for side in sorted(checkouts, reverse=bool(round_index % 2)):
                folder = Path(scratch) / side / str(round_index)
                write_digits(folder / "photos")
                for name, words in COMMANDS.items():
                    seconds[name][side].append(time_command(words, checkouts[side], folder))
                seconds["requests"][side].append(time_requests(checkouts[side], folder))
                seconds["loader"][side].append(time_loader(checkouts[side], folder))
        for name, sides in seconds.items():
            ratios = [before / after for before, after in zip(sides["before"], sides["after"], strict=True)]
            medians = {side: statistics.median(times) for side, times in sides.items()}
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(
                f"{name:14} {medians['before']:7.2f} s {medians['after']:7.2f} s  {statistics.median(ratios):.2f} ({spread})"
            )
        last_folders = [Path(scratch) / side / str(options.rounds - 1) for side in checkouts]
        differing = [
            name for name in OUTPUT_FILES if len({digest_output(folder / name) for folder in last_folders}) > 1
        ]
    print("different: " + ", ".join(differing) if differing else f"bit-identical: {', '.join(OUTPUT_FILES)}")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
