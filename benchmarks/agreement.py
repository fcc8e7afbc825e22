"""The same pictures through Python, `predict`, HTTP and onnxruntime: how far their probabilities are apart.

    python benchmarks/agreement.py RUN PICTURES --out benchmarks/results/DATE-agreement-HARDWARE.md

Python's answers are the measure. `predict` and `serve` are commands of their own; HTTP gets all pictures at once,
sixteen requests at a time, so that they are computed beside others; the ONNX file is exported here, and answers by
`predict` without PyTorch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import vitreous
from vitreous.system.machine import get_processor_name
from vitreous.tasks.classification import Prediction

CONCURRENT_REQUESTS = 6  # requests at a time: fewer than a server lets wait


def run_command(*words: str) -> dict:
    """What `vitreous WORDS --json` prints."""
    done = subprocess.run([sys.executable, "-m", "vitreous", *words, "--json"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def to_probability_table(found: list[dict], classes: tuple[str, ...]) -> np.ndarray:
    """Rows of classes and probabilities -> (n, K), in the model's order."""
    rows = [{one["class"]: one["probability"] for one in row["classes"]} for row in found]
    return np.array([[row[name] for name in classes] for row in rows])


def predict_with_python(run: str, files: list[Path]) -> tuple[tuple[str, ...], np.ndarray]:
    """The class names, and (n, K)."""
    predictor = vitreous.load(run)
    classes = predictor.card.classes
    found = [one for one in predictor.predict(files, top=len(classes)) if isinstance(one, Prediction)]
    rows = [dict(zip(one.names, one.probabilities, strict=True)) for one in found]
    return classes, np.array([[row[name] for name in classes] for row in rows])


def predict_with_command(model: str, files: list[Path], classes: tuple[str, ...]) -> np.ndarray:
    """(n, K) of `vitreous predict`."""
    return to_probability_table(
        run_command("predict", model, *map(str, files), "--top", str(len(classes)))["predictions"], classes
    )


def predict_with_http(run: str, files: list[Path], classes: tuple[str, ...]) -> np.ndarray:
    """(n, K) of `vitreous serve`."""
    server = subprocess.Popen(
        [sys.executable, "-m", "vitreous", "serve", run, "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    address = next(line for line in server.stdout if "http://" in line).split()[-1]
    try:

        def ask(file: Path) -> dict:
            head = {"Content-Type": "application/octet-stream"}
            request = urllib.request.Request(f"{address}/v1/predict?top={len(classes)}", file.read_bytes(), head)
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)["predictions"][0]

        with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
            return to_probability_table(list(pool.map(ask, files)), classes)
    finally:
        server.terminate()
        server.wait()


def predict_with_onnx(run: str, files: list[Path], classes: tuple[str, ...], scratch: Path) -> np.ndarray:
    """(n, K) of the exported model."""
    run_command("export", run, "--to", "onnx", "--out", str(scratch / "model.onnx"), "--images", *map(str, files))
    return predict_with_command(str(scratch / "model.onnx"), files, classes)


def build_page(run: str, files: list[Path], scratch: Path) -> list[str]:
    """The page, line by line."""
    classes, mine = predict_with_python(run, files)
    ways = {
        "`vitreous predict RUN`": predict_with_command(run, files, classes),
        f"`vitreous serve RUN`, {CONCURRENT_REQUESTS} requests at a time": predict_with_http(run, files, classes),
        "`vitreous export RUN --to onnx`, `vitreous predict model.onnx`": predict_with_onnx(
            run, files, classes, scratch
        ),
    }
    rows = [
        f"| {way} | {np.abs(p - mine).max():.1e} | {(p.argmax(1) == mine.argmax(1)).sum()} of {len(files)} |"
        for way, p in ways.items()
    ]
    return [
        f"# One picture, one answer, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}. `python benchmarks/agreement.py RUN PICTURES`: {len(files)} pictures, {len(classes)} classes;",
        (
            f"highest probabilities {mine.max(1).min():.3f} to {mine.max(1).max():.3f}. Beside "
            "`vitreous.load(RUN).predict(...)`:"
        ),
        "",
        "| way | largest difference of a probability | top-1 equal |",
        "|---|---|---|",
        *rows,
    ]


def main() -> None:
    """Measure, print and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from vitreous.data.layouts.folder import list_images

    with tempfile.TemporaryDirectory() as scratch:
        lines = build_page(options.run, list_images(options.pictures), Path(scratch))
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
