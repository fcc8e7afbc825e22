"""The pictures that an export is judged on, and others that int8 is calibrated on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

import numpy as np

from vitreous.cores import default_workers
from vitreous.data.keys import permutation
from vitreous.data.preprocess import Preprocess
from vitreous.data.split import Data
from vitreous.errors import DataError, UsageError
from vitreous.reports.opening import data_for, examples, matched, training
from vitreous.serving.export.proof import FEWEST, MOST, Pictures, enough
from vitreous.serving.export_file import normalised
from vitreous.serving.sources import read_item, source
from vitreous.weights.bundle import Bundle

CALIBRATION = 128  # pictures that int8 is calibrated on, at most


def gather(
    run: str | os.PathLike[str],
    bundle: Bundle,
    images: Sequence[str],
    data: str | os.PathLike[str] | None,
    calibrate: bool,
) -> tuple[Pictures, list[np.ndarray] | None]:
    """What is judged: `images`, files or folders; or `data`; or validation images that the run held out, or else its
    test images.

    For int8 also normalised pictures to calibrate on, (1, C, *image) each: of the training split of the data, or, where
    there is none, every other of the pictures given. Raises UsageError where there are no pictures, DataError for too
    few.
    """
    opened = None
    if images:
        judged = of_files(images, bundle.preprocess)
    else:
        opened, judged = of_data(run, bundle, data)
    if not calibrate:
        return enough(judged), None
    if (train := training(run, opened)) is not None:
        pixels = (tensor.numpy() for tensor in examples(train, bundle.preprocess))
    else:
        if len(judged) < 2 * FEWEST:
            raise DataError(
                f"{judged.name} has {len(judged)} pictures: {FEWEST} to calibrate int8 on and {FEWEST} others to judge "
                "it on are needed",
                "name more: --images",
            )
        pixels, judged = iter(judged.part(slice(0, None, 2)).pixels), judged.part(slice(1, None, 2))
    calibration = [normalised(picture[None], bundle.preprocess) for picture in islice(pixels, CALIBRATION)]
    if len(calibration) < FEWEST:
        raise DataError(
            f"int8 is calibrated on at least {FEWEST} pictures; there are {len(calibration)}", "name more: --images"
        )
    return enough(judged), calibration


def of_files(images: Sequence[str], preprocess: Preprocess) -> Pictures:
    """Files, and those in folders; of more than are needed, a choice that is always the same. Raises DataError."""
    items = list(source(images))
    chosen = sorted(permutation(len(items), 0, 0)[: 2 * MOST].tolist())
    with ThreadPoolExecutor(default_workers()) as pool:
        pixels = list(pool.map(partial(read_item, preprocess=preprocess, exact=True), [items[row] for row in chosen]))
    return Pictures(
        np.stack(pixels),
        None,
        f"{len(pixels)} of {len(items)} files" if len(pixels) < len(items) else "the files given",
    )


def of_data(run: str | os.PathLike[str], bundle: Bundle, data: str | os.PathLike[str] | None) -> tuple[Data, Pictures]:
    """Labelled pictures of a data set, or of the run's own."""
    try:
        source, opened = data_for(run, data, "test")
    except (UsageError, DataError) as error:
        if data is not None:
            raise
        raise UsageError(
            f"there are no pictures to judge the export on: {error.message}",
            "name some: --images FOLDER, or --data DATA",
        ) from None
    name = "val" if "val" in opened.splits else "test" if "test" in opened.splits else next(iter(opened.splits))
    split = matched(opened.splits[name], opened, bundle.classes, bundle.multilabel)
    p, pixels, rows = bundle.preprocess, [], []
    for row in permutation(len(split), 0, 0)[: 4 * MOST].tolist():
        try:
            pixels.append(p.array(p.decoded(split.raw(row), split.name(row))))
            rows.append(row)
        except DataError:
            continue
        if len(rows) == MOST:
            break
    if not rows:
        raise DataError(f"no picture of {source} can be read", "name others: --images FOLDER")
    return opened, Pictures(np.stack(pixels), split.labels[rows], f"{source} ({name})")


def sizes(pictures: Pictures, patch: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Some of the pictures at other sizes, none of them square: a patch less high and one wider, and larger by two and
    by one."""
    pixels = pictures.pixels[:FEWEST]
    for rows, columns in ((-1, 1), (2, 1)):
        height, width = (
            max(2, side // p + more) * p for side, p, more in zip(pixels.shape[2:], patch, (rows, columns), strict=True)
        )
        more = [
            (0, 0),
            (0, 0),
            *((0, max(0, new - old)) for new, old in zip((height, width), pixels.shape[2:], strict=True)),
        ]
        yield np.pad(pixels, more, mode="wrap")[:, :, :height, :width]
