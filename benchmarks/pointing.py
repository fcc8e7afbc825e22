"""Does rollout highlight relevant patches? Accuracy of a run with a quarter of the patches masked by rollout, at
random, or at the centre.

    python benchmarks/pointing.py RUN --out benchmarks/results/DATE-pointing-HARDWARE.md

A masked patch gets the mean pixel of the training images. Masked are the patches with the highest rollout, those
nearest to the centre (ordered by a Gaussian; ties by row and column), or random ones per image, with five seeds. All
images of the run's test split are used.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitreous.data.class_order import align_labels
from vitreous.data.run_data import open_run_data
from vitreous.data.split import decode_sample
from vitreous.inference.open_model import open_bundle
from vitreous.inspection.gradient import compute_relevance
from vitreous.inspection.rollout import RolloutOptions, compute_rollout
from vitreous.nn.grid import patchify, unpatchify
from vitreous.system.machine import get_processor_name

MASKED_SHARE, NUM_SEEDS = 0.25, 5


def score_by_centre(grid: tuple[int, ...], images: int) -> Tensor:
    """(images, N): higher values are nearer to the centre."""
    rows, columns = (torch.arange(length) - (length - 1) / 2 for length in grid)
    return -(rows[:, None] ** 2 + columns[None] ** 2).flatten().expand(images, -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    bundle = open_bundle(arguments.run)
    source, opened = open_run_data(arguments.run, None, "test")
    split, preprocess = align_labels(opened.split("test"), opened, bundle.classes), bundle.preprocess
    pixels = torch.stack(
        [preprocess.to_tensor(decode_sample(split, sample, preprocess.channels)) for sample in range(len(split))]
    )
    images, labels = preprocess.normalise(pixels), torch.from_numpy(split.labels)
    train = opened.split("train")
    mean = np.mean(
        [np.asarray(decode_sample(train, sample, preprocess.channels)).mean((0, 1)) for sample in range(len(train))], 0
    )
    filled = preprocess.normalise(torch.as_tensor(mean, dtype=torch.float32).view(1, -1, 1, 1)).flatten(1)
    patch, model = bundle.model.config.patch, bundle.model
    patches = patchify(images, patch).flatten(1, -2)  # (n, N, C * pixels)
    grid = tuple(i // p for i, p in zip(images.shape[2:], patch, strict=True))
    count, blank = math.floor(MASKED_SHARE * math.prod(grid)), filled.repeat_interleave(math.prod(patch), 1)

    def accuracy(order: Tensor | None) -> float:
        shown = patches.clone()
        if order is not None:
            results = order.argsort(dim=1, descending=True, stable=True)[:, :count]
            shown.scatter_(1, results[..., None].expand(-1, -1, shown.shape[-1]), blank.expand(len(shown), count, -1))
        with torch.no_grad():
            return float((model(unpatchify(shown.unflatten(1, grid), patch)).argmax(1) == labels).float().mean())

    def maps(mixing: RolloutOptions) -> Tensor:
        rollout = compute_rollout(model, images, mixing)
        return rollout.joint[:, -1, rollout.prefix :]

    results = [("none", accuracy(None))]
    results += [
        ("highest rollout", accuracy(maps(RolloutOptions()))),
        ("highest rollout, maximum over heads", accuracy(maps(RolloutOptions(fusion="max")))),
    ]
    results.append(("highest gradient-weighted rollout", accuracy(compute_relevance(model, images).maps.flatten(1))))
    results += [("the centre", accuracy(score_by_centre(grid, len(images))))]
    for seed in range(NUM_SEEDS):
        draw = torch.rand(len(images), math.prod(grid), generator=torch.Generator().manual_seed(seed))
        results.append((f"at random, seed {seed}", accuracy(draw)))
    page = [
        f"# Accuracy with masked patches, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, torch {torch.__version__}.",
    ]
    page += [f"`python benchmarks/pointing.py RUN` on the run of `vitreous train {source}`: {len(images)} test images,"]
    page += [f"{count} of {math.prod(grid)} patches masked.", ""]
    page += ["| masked | test top-1 |", "|---|---|", *(f"| {name} | {share:.1%} |" for name, share in results), ""]
    print("\n".join(page))
    if arguments.out:
        arguments.out.write_text("\n".join(page), encoding="utf-8")


if __name__ == "__main__":
    main()
