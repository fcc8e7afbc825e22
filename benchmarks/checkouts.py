"""Two checkouts of this package: the same commands in alternating rounds, and whether their outputs are bit-identical.

python benchmarks/checkouts.py ../before --rounds 5

For a refactoring, which has to keep speed and bits. `before` is another checkout, for example of
`git worktree add ../before COMMIT`; both run in the Python environment of this command. Prints the median seconds of
each command, the ratio before / after, and its spread over the rounds. Data are digits that the script writes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

HERE = Path(__file__).resolve().parent.parent
VITREOUS = (sys.executable, "-m", "vitreous")
COMMANDS = {
    "import": (sys.executable, "-c", "import vitreous; vitreous.load"),
    "--help": (*VITREOUS, "--help"),
    "train digits": (*VITREOUS, "train", "digits", "--epochs", "10", "--out", "run"),
    "predict": (*VITREOUS, "predict", "run", "photos", "--engine", "torch", "--out", "predictions.jsonl"),
    "embed": (*VITREOUS, "embed", "run", "photos", "--engine", "torch", "--out", "features.npz"),
    "data check": (*VITREOUS, "data", "check", "photos", "--workers", "0"),
}
#: files that have to be bit-identical, after the commands above
OUTPUTS = ("run/model/weights.safetensors", "predictions.jsonl", "features.npz")


def write_digits(folder: Path) -> None:
    """Write the embedded digits as a folder of ten classes, in PNG files."""
    data = load_digits()
    for number, (pixels, label) in enumerate(zip(data.images, data.target, strict=True)):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15.9).astype(np.uint8)).save(folder / str(label) / f"{number}.png")


def time_command(words: tuple[str, ...], checkout: Path, folder: Path) -> float:
    """Run a command of a checkout in a folder, and return its seconds. Raises CalledProcessError if it fails."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "VITREOUS_ENGINE_CHOICE": "0"}
    start = time.perf_counter()
    subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True)
    return time.perf_counter() - start


def digest_output(path: Path) -> str:
    """Return the SHA-256 of a file; of an .npz file, of its numeric arrays, as the archive has dates."""
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
    checkouts = {"before": options.before.resolve(), "after": HERE}
    seconds: dict[str, dict[str, list[float]]] = {name: {"before": [], "after": []} for name in COMMANDS}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.rounds):
            for side in sorted(checkouts, reverse=bool(number % 2)):
                folder = Path(scratch) / side / str(number)
                write_digits(folder / "photos")
                for name, words in COMMANDS.items():
                    seconds[name][side].append(time_command(words, checkouts[side], folder))
        for name, sides in seconds.items():
            ratios = [before / after for before, after in zip(sides["before"], sides["after"], strict=True)]
            medians = {side: statistics.median(times) for side, times in sides.items()}
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(
                f"{name:14} {medians['before']:7.2f} s {medians['after']:7.2f} s  {statistics.median(ratios):.2f} ({spread})"
            )
        last = [Path(scratch) / side / str(options.rounds - 1) for side in checkouts]
        differing = [name for name in OUTPUTS if len({digest_output(folder / name) for folder in last}) > 1]
    print("different: " + ", ".join(differing) if differing else f"bit-identical: {', '.join(OUTPUTS)}")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
