"""CPU time of one image for every model with published weights, with random weights.

    OMP_NUM_THREADS=1 python benchmarks/encoder_speed.py

Writes `vitreous/weights/published_speed.py`, which `vitreous models --weights` and docs/reference/published-weights.md
show. Each model runs in a separate process, with the PyTorch engine in the precision that `vitreous predict` would
choose; a pair of image and text encoders runs its image encoder. The time is the median CPU time of one image. Models
that do not fit into memory have no row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from vitreous.data.modalities.clips import ClipPreprocess
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import ResourceError
from vitreous.inference.engine import InferenceOptions, make_engine
from vitreous.models.config import ModelConfig
from vitreous.models.names import config_from_name
from vitreous.models.zoo import Model, build_model
from vitreous.nn.no_init import NoInitMode
from vitreous.system.machine import get_best_cpu_feature, get_processor_name
from vitreous.weights.published import PUBLISHED_WEIGHTS

MODULE = Path(__file__).parent.parent / "vitreous" / "weights" / "published_speed.py"
HEADER = '''"""CPU time of the models with published weights, measured with random weights by benchmarks/encoder_speed.py, which
writes this file. Does not import PyTorch."""

#: hardware of the measurement
SPEED_HARDWARE = "{hardware}"
#: (model, image size in pixels) -> milliseconds of CPU time of one image or clip
CPU_MILLISECONDS: dict[tuple[str, int], float] = {{
{rows}
}}
'''


def build_random_model(config: ModelConfig) -> Model:
    """Build a model whose parameters are uniform in ±0.02: much faster than initialising it. Raises ResourceError for a
    model that does not fit into memory."""
    with NoInitMode():
        model: Model = build_model(config)
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.02, 0.02)
    return model.eval()


def measure_milliseconds(name: str, image_size: int, rounds: int, seconds: float) -> float | None:
    """Measure the median CPU time of one image in milliseconds; None for a model that does not fit into memory.

    Runs at least three images, at most `rounds`, for about `seconds`.
    """
    config = config_from_name(name, image_size)
    config = config.backbone if config.has_text else config
    try:
        model = build_random_model(config)
    except ResourceError as error:
        print(f"{name} skipped: {error.message}", file=sys.stderr)
        return None
    preprocess = ClipPreprocess(config.image) if len(config.image) == 3 else ImagePreprocess(config.image)
    engine = make_engine(model, preprocess, InferenceOptions("cpu", engine="torch"))
    pixels = torch.from_numpy(preprocess.noise())
    engine(pixels)
    times: list[float] = []
    while len(times) < 3 or (len(times) < rounds and sum(times) < seconds):
        start = time.process_time()
        engine(pixels)
        times.append(time.process_time() - start)
    return 1e3 * statistics.median(times)


def format_module(milliseconds: dict[tuple[str, int], float]) -> str:
    """Return the source of the module, with times rounded to two digits."""
    rows = "\n".join(
        f'    ("{name}", {size}): {float(f"{duration:.2g}"):g},' for (name, size), duration in milliseconds.items()
    )
    return HEADER.format(
        hardware=f"one thread of an {get_processor_name()}, {get_best_cpu_feature().replace('_', '-')}", rows=rows
    )


def main() -> None:
    """Measure every model in a separate process, and write the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "PIXELS"), help="measure one model, and print JSON")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure_milliseconds(options.one[0], int(options.one[1]), options.rounds, options.seconds)))
        return
    milliseconds = {}
    for name, size in dict.fromkeys((weights.model, weights.image_size) for weights in PUBLISHED_WEIGHTS):
        command = [sys.executable, __file__, "--one", name, str(size)]
        command += ["--rounds", str(options.rounds), "--seconds", str(options.seconds)]
        duration = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        print(name, size, duration, flush=True)
        if duration is not None:
            milliseconds[name, size] = duration
    MODULE.write_text(format_module(milliseconds), "utf-8")


if __name__ == "__main__":
    main()
