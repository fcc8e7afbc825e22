"""The figure of nearest training images: which ones a model finds most like a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import islice
from pathlib import PurePath
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vitreous.data.keys import permutation
from vitreous.data.split import Data, Split
from vitreous.errors import DataError, UsageError
from vitreous.inspection.features import nearest, pooled
from vitreous.reports.figures.style import hide_axes, styled
from vitreous.reports.scene import SEEN, FigureResult, Picture, Scene, see_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEIGHBOURS, POOL = 6, 8  # neighbours shown; training images looked at for each of --count
LETTERS = 18  # of a class that fit over a picture


@styled
def make(scene: Scene) -> list[FigureResult]:
    """Pictures, each with the training images whose features point most nearly the same way."""
    data = scene.data[1]
    if "train" not in data.splits:
        raise UsageError(
            f"{data.name} has no training images to find the nearest among", "name a data set that has: --data"
        )
    train = data.splits["train"]
    if scene.pictures:
        queries, titles = list(scene.pictures[:SEEN]), [PurePath(one.name).name for one in scene.pictures[:SEEN]]
    else:
        chosen = list(islice(drawn(scene, scene.split), SEEN))
        queries, titles = [shown for _, shown in chosen], [called(data, scene.split, sample) for sample, _ in chosen]
    overlap = not scene.pictures and scene.split is train
    samples, known = known_of(scene, train, len(queries) if overlap else 0)
    asked = torch.cat([pooled(scene.model, images).cpu() for images in scene.batches(queries, "pictures")])
    values, places = nearest(asked, known, NEIGHBOURS)
    nearest_samples = [[samples[place] for place in line] for line in places.tolist()]
    lines = [
        [(query.name, sample, value, called(data, train, sample)) for sample, value in zip(row, similar, strict=True)]
        for query, row, similar in zip(queries, nearest_samples, values.tolist(), strict=True)
    ]
    rows = [[(shown, title)] for shown, title in zip(queries, titles, strict=True)]
    for row, line in zip(rows, lines, strict=True):
        for _, sample, value, name in line:
            row.append((see_picture(train.raw(sample), train.name(sample), scene.preprocess), f"{value:.2f} {name}"))
    caption = (
        f"Pictures (first column), each with the most similar of {len(samples)} training images of {data.name}, drawn "
        "at random: cosine "
        "similarity of the pooled features before the head, and the class."
    )
    table = [
        [query, rank + 1, f"{value:.5f}", train.name(sample), name]
        for line in lines
        for rank, (query, sample, value, name) in enumerate(line)
    ]
    numbers = {"similarity": values.numpy(), "sample": np.array(nearest_samples), "features": asked.numpy()}
    head = ["picture", "rank", "similarity", "training_image", "class"]
    return [FigureResult("nearest", "Nearest training images", caption, strip(rows), numbers, (head, table))]


def drawn(scene: Scene, split: Split) -> Iterator[tuple[int, Picture]]:
    """The samples of a split that can be read, in an order that is always the same: their numbers, and how the model
    sees them."""
    for sample in permutation(len(split), scene.options.seed, 0).tolist():
        try:
            yield sample, see_picture(split.raw(sample), split.name(sample), scene.preprocess)
        except DataError:
            continue


def known_of(scene: Scene, train: Split, skipped: int) -> tuple[list[int], Tensor]:
    """The training images that are looked at, without the first few: their numbers, and their (n, D) features."""
    count, samples, rows = scene.options.count * POOL, [], []
    count = min(count, len(train) - skipped)
    pool = islice(drawn(scene, train), skipped, skipped + count)
    while part := list(islice(pool, scene.options.batch_size)):
        samples += [sample for sample, _ in part]
        rows.append(pooled(scene.model, scene.input(torch.stack([shown.pixels for _, shown in part]))).cpu())
        scene.listener.progress("training images", len(samples), count)
    if not samples:
        raise UsageError("there are no training images beside the pictures themselves", "use another --split")
    return samples, torch.cat(rows)


def called(data: Data, split: Split, sample: int) -> str:
    """The class of a sample by its title, or its classes."""
    label = split.labels[sample]
    names = [data.classes[int(label)]] if np.ndim(label) == 0 else [data.classes[i] for i in np.flatnonzero(label)]
    return ", ".join(data.titles.get(name, name).split(",")[0] for name in names)


def strip(rows: list[list[tuple[Picture, str]]]) -> Figure:
    """Rows of pictures with a line over each, the first of a row apart from the others."""
    from matplotlib.figure import Figure

    width, height = rows[0][0][0].shown.size
    side = 1.05
    tall, letters, apart = side * height / width, 0.22, 0.12
    across, down = len(rows[0]) * (side + 0.06) + apart, len(rows) * (tall + letters)
    figure = Figure(figsize=(across, down))
    for number, row in enumerate(rows):
        for column, (shown, words) in enumerate(row):
            left, top = column * (side + 0.06) + apart * (column > 0), down - number * (tall + letters) - letters
            place = figure.add_axes((left / across, (top - tall) / down, side / across, tall / down))
            hide_axes(place)
            place.imshow(shown.shown, interpolation="nearest")
            place.set_title(textwrap.shorten(words, LETTERS, placeholder="…") or words[:LETTERS], fontsize=7.5, pad=2)
    return figure
