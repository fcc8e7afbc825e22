"""Compare the probabilities that the Python API, `predict`, HTTP and an ONNX file give for the same images.

    python benchmarks/agreement.py RUN IMAGES --out benchmarks/results/DATE-agreement-HARDWARE.md

The reference is the Python API. `predict` and `serve` run as separate commands. HTTP requests are sent concurrently, so
that the server batches images. The script exports the ONNX file, and `predict` runs it without PyTorch.
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

CONCURRENT_REQUESTS = 6  # fewer than the queue of a server accepts


def run_command(*words: str) -> dict:
    """Run `vitreous WORDS --json`, and return the JSON document. Exits with the error if the command fails."""
    result = subprocess.run([sys.executable, "-m", "vitreous", *words, "--json"], capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(result.stderr)
    return json.loads(result.stdout)


def to_probability_table(predictions: list[dict], classes: tuple[str, ...]) -> np.ndarray:
    """Convert the predictions of a JSON document to probabilities (n, K), in the model's class order."""
    probabilities = [{item["class"]: item["probability"] for item in entry["classes"]} for entry in predictions]
    return np.array([[by_class[name] for name in classes] for by_class in probabilities])


def predict_with_python(run: str, files: list[Path]) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the class names, and the probabilities (n, K) of the Python API."""
    predictor = vitreous.load(run)
    classes = predictor.card.classes
    results = predictor.predict(files, top=len(classes))
    predictions = [result for result in results if isinstance(result, Prediction)]
    probabilities = [dict(zip(item.names, item.probabilities, strict=True)) for item in predictions]
    return classes, np.array([[by_class[name] for name in classes] for by_class in probabilities])


def predict_with_command(model: str, files: list[Path], classes: tuple[str, ...]) -> np.ndarray:
    """Return the probabilities (n, K) of `vitreous predict`, for a run or an exported file."""
    return to_probability_table(
        run_command("predict", model, *map(str, files), "--top", str(len(classes)))["predictions"], classes
    )


def predict_with_http(run: str, files: list[Path], classes: tuple[str, ...]) -> np.ndarray:
    """Return the probabilities (n, K) of `vitreous serve`, by concurrent HTTP requests."""
    server = subprocess.Popen(
        [sys.executable, "-m", "vitreous", "serve", run, "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    address = next(line for line in server.stdout if "http://" in line).split()[-1]
    try:

        def send_request(file: Path) -> dict:
            headers = {"Content-Type": "application/octet-stream"}
            request = urllib.request.Request(f"{address}/v1/predict?top={len(classes)}", file.read_bytes(), headers)
            with urllib.request.urlopen(request) as response:
                return json.load(response)["predictions"][0]

        with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
            return to_probability_table(list(pool.map(send_request, files)), classes)
    finally:
        server.terminate()
        server.wait()


def predict_with_onnx(run: str, files: list[Path], classes: tuple[str, ...], scratch: Path) -> np.ndarray:
    """Export a run as ONNX, and return the probabilities (n, K) of that file."""
    run_command("export", run, "--to", "onnx", "--out", str(scratch / "model.onnx"), "--images", *map(str, files))
    return predict_with_command(str(scratch / "model.onnx"), files, classes)


def build_page(run: str, files: list[Path], scratch: Path) -> list[str]:
    """Compute all probabilities, and return the lines of the page."""
    classes, reference = predict_with_python(run, files)
    probabilities_by_interface = {
        "`vitreous predict RUN`": predict_with_command(run, files, classes),
        f"`vitreous serve RUN`, {CONCURRENT_REQUESTS} requests at a time": predict_with_http(run, files, classes),
        "`vitreous export RUN --to onnx`, `vitreous predict model.onnx`": predict_with_onnx(
            run, files, classes, scratch
        ),
    }
    rows = [
        f"| {interface} | {np.abs(probabilities - reference).max():.1e} | {(probabilities.argmax(1) == reference.argmax(1)).sum()} of {len(files)} |"
        for interface, probabilities in probabilities_by_interface.items()
    ]
    return [
        f"# Agreement of Python API, predict, HTTP and ONNX, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}. `python benchmarks/agreement.py RUN IMAGES`: {len(files)} images, {len(classes)} classes;",
        (
            f"highest probabilities {reference.max(1).min():.3f} to {reference.max(1).max():.3f}. Compared with "
            "`vitreous.load(RUN).predict(...)`:"
        ),
        "",
        "| interface | largest difference of a probability | top-1 equal |",
        "|---|---|---|",
        *rows,
    ]


def main() -> None:
    """Parse the command line, and print and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="run folder or bundle of a classifier")
    parser.add_argument("images", type=Path, help="folder of images")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from vitreous.data.layouts.folder import list_images

    with tempfile.TemporaryDirectory() as scratch:
        lines = build_page(options.run, list_images(options.images), Path(scratch))
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
