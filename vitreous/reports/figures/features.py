"""Figures of weights and features: filters, patch tokens as colours, and nearest training images."""

from __future__ import annotations

import textwrap
from itertools import islice
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitreous.data.layouts.video import open_sample
from vitreous.data.split import Data, Split
from vitreous.errors import UsageError
from vitreous.evaluation.knn import find_nearest_neighbours
from vitreous.inspection.features import (
    colour_patch_tokens,
    compute_filter_components,
    extract_patch_tokens,
    extract_pooled_features,
)
from vitreous.reports.figures.drawing import BLUE, format_dimensions, hide_axes, new_figure, tile_images
from vitreous.reports.figures.subject import MAX_SHOWN_IMAGES, FigureContext, FigureResult, InputImage, load_input_image
from vitreous.reports.pages.formats import format_share

FILTER_COLUMNS, FILTER_GAP_GREY = 7, 0.5  # filters per row; grey value between filters
SHOWN_NEIGHBOURS, CANDIDATES_PER_COUNT = 6, 8  # neighbours shown; searched training images per image of --count
MAX_TITLE_LETTERS = 18  # maximum length of a class name over an image


def make_filters(context: FigureContext) -> list[FigureResult]:
    """Draw the first principal components of the filters and their explained variance (arXiv:2010.11929, Fig. 7
    left)."""
    result = compute_filter_components(context.model)
    components, share = result.components.numpy(), result.share.numpy()
    count = len(components)
    filter_images, description = filters_to_images(components)
    figure, ((tiles, axes),) = new_figure(7.2, 2.5, 1, 2, width_ratios=(1.8, 1))
    hide_axes(tiles)
    tiles.set_anchor("N")
    tiles.imshow(arrange_filters(filter_images), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.plot(np.arange(1, count + 1), 100 * share.cumsum(), color=BLUE, marker="o", markersize=2.5, linewidth=1)
    axes.set(xlabel="components", ylabel="cumulative explained variance (%)", ylim=(0, 102), xlim=(0, count + 1))
    axes.grid(alpha=0.25, linewidth=0.5)
    caption = (
        f"The first {count} principal components of the {result.count} filters of the {result.layer}, "
        f"{format_dimensions(components.shape[2:])} pixels, {description}; each scaled to its range, "
        f"and its sign is "
        f"arbitrary. Together they explain {format_share(round(float(share.sum()), 6))} of the filters' variance, the "
        f"first {format_share(share[0])}. As in arXiv:2010.11929, Fig. 7 left."
    )
    table = ["component", "share"], [[index + 1, f"{value:.6f}"] for index, value in enumerate(share)]
    return [
        FigureResult(
            "filters",
            "Filters",
            caption=caption,
            figure=figure,
            arrays={"components": components, "share": share},
            table=table,
        )
    ]


def arrange_filters(filter_images: np.ndarray) -> np.ndarray:
    """Arrange filters (K, h, w[, 3]) as one image (H, W[, 3]) with seven filters per row.

    They are separated by grey, because filters can have white or black corners.
    """
    scale = -(-16 // max(filter_images.shape[1:3]))
    filter_images = filter_images.repeat(scale, 1).repeat(scale, 2)
    columns = min(FILTER_COLUMNS, len(filter_images))
    missing = np.full(
        (-len(filter_images) % columns, *filter_images.shape[1:]), FILTER_GAP_GREY, dtype=filter_images.dtype
    )
    tiles = np.concatenate([filter_images, missing])
    gap = max(1, filter_images.shape[1] // 8)
    tiled = tile_images(tiles.reshape(-1, columns, *tiles.shape[1:]), gap, FILTER_GAP_GREY)
    return np.pad(tiled, [(gap, gap)] * 2 + [(0, 0)] * (tiled.ndim - 2), constant_values=FILTER_GAP_GREY)


def filters_to_images(components: np.ndarray) -> tuple[np.ndarray, str]:
    """Convert filters (K, C, h, w) to images (K, h, w) or (K, h, w, 3) in [0, 1], each stretched to its range.

    Also returns a description of the colours for the caption.
    """
    channels = components.shape[1]
    visible = components[:, :3] if channels >= 3 else components[:, :1]
    low, high = (f(visible, axis=(1, 2, 3), keepdims=True) for f in (np.min, np.max))
    scaled = (visible - low) / np.maximum(high - low, 1e-12)
    if channels >= 3:
        description = "in colour" if channels == 3 else f"the first three of {channels} channels as red, green and blue"
        return scaled.transpose(0, 2, 3, 1), description
    return scaled[:, 0], "in grey" if channels == 1 else f"the first of {channels} channels in grey"


def make_features(context: FigureContext) -> list[FigureResult]:
    """Draw images in three rows: the image, the first three principal components of all patch tokens as colours, and
    those of the foreground patches only (arXiv:2304.07193, Fig. 1)."""
    input_images = context.take_images(4)[:MAX_SHOWN_IMAGES]
    maps = torch.cat(
        [
            extract_patch_tokens(context.model, images).cpu()
            for images in context.iterate_batches(input_images, "features")
        ]
    )
    coloured = colour_patch_tokens(maps)
    height, width = context.preprocess.image
    tile = 7.0 / max(4, len(input_images))
    figure, grid = new_figure(tile * len(input_images) + 0.3, 3 * tile * height / width + 0.2, 3, len(input_images))
    images = [image.rgb_image for image in input_images]
    rows = (("image", images), ("all patches", coloured.all.numpy()), ("foreground", coloured.inside.numpy()))
    for row, (name, values) in zip(grid, rows, strict=True):
        for axes, value in zip(row, values, strict=True):
            hide_axes(axes)
            axes.imshow(value, interpolation="nearest")
        row[0].set_ylabel(name)
    subject = f"{len(input_images)} images together" if len(input_images) > 1 else "the image"
    share = ", ".join(format_share(value) for value in coloured.share.tolist())
    caption = (
        f"The first three principal components of the {maps.shape[-1]} channels of the last layer's patch tokens as "
        f"red, green and blue, of {subject}, each stretched from its 1st to its 99th percentile. They explain {share} "
        "of the variance. Last row: patches on one side of the first component's mean, the side with less of the "
        "images' borders, with components recomputed within them; the rest is black. Signs, and so colours, are "
        "arbitrary. As in arXiv:2304.07193, Fig. 1."
    )
    arrays = {name: value.numpy() for name, value in coloured._asdict().items()}
    return [FigureResult("features", "PCA of patch features", caption, figure, arrays=arrays)]


def make_nearest(context: FigureContext) -> list[FigureResult]:
    """Draw each image next to its nearest training images in feature space. Raises UsageError for a dataset without
    training images."""
    data = context.data[1]
    if "train" not in data.splits:
        raise UsageError(
            f"{data.name} has no training images to search for neighbours", "use a dataset with a train split: --data"
        )
    train = data.splits["train"]
    if context.images:
        queries = list(context.images[:MAX_SHOWN_IMAGES])
        titles = [PurePath(image.name).name for image in queries]
    else:
        query_samples = list(islice(context.iterate_readable(context.split), MAX_SHOWN_IMAGES))
        queries, titles = (
            [image for _, image in query_samples],
            [get_class_title(data, context.split, sample) for sample, _ in query_samples],
        )
    queries_are_training_images = not context.images and context.split is train
    samples, candidate_features = compute_candidate_features(
        context, train, len(queries) if queries_are_training_images else 0
    )
    features = torch.cat(
        [extract_pooled_features(context.model, images).cpu() for images in context.iterate_batches(queries, "images")]
    ).numpy()
    values, neighbour_indices = find_nearest_neighbours(
        candidate_features.numpy(), features, min(SHOWN_NEIGHBOURS, len(candidate_features))
    )
    neighbours = np.array(samples)[neighbour_indices]
    table, strips = [], []
    for query, title, similarities, neighbour_samples in zip(
        queries, titles, values.tolist(), neighbours.tolist(), strict=True
    ):
        strips.append([(query, title)])
        for rank, (sample, value) in enumerate(zip(neighbour_samples, similarities, strict=True), 1):
            name, label = train.name(sample), get_class_title(data, train, sample)
            table.append([query.name, rank, f"{value:.5f}", name, label])
            strips[-1].append(
                (load_input_image(open_sample(train, sample), name, context.preprocess), f"{value:.2f} {label}")
            )
    caption = (
        f"Images (first column), each with the most similar of {len(samples)} training images of {data.name}, drawn "
        "at random: cosine similarity of the pooled features before the head, and the class."
    )
    arrays = {"similarity": values, "sample": neighbours, "features": features}
    header = ["image", "rank", "similarity", "training_image", "class"]
    return [
        FigureResult(
            "nearest",
            "Nearest training images",
            caption=caption,
            figure=draw_strips(strips),
            arrays=arrays,
            table=(header, table),
        )
    ]


def compute_candidate_features(context: FigureContext, train: Split, num_skipped: int) -> tuple[list[int], Tensor]:
    """Choose training images at random, and return their sample indices and their pooled features (n, D).

    The first `num_skipped` of the random order are the query images, and are not chosen. Raises UsageError if no image
    is left.
    """
    samples: list[int] = []
    features: list[Tensor] = []
    count = min(context.options.count * CANDIDATES_PER_COUNT, len(train) - num_skipped)
    pool = islice(context.iterate_readable(train), num_skipped, num_skipped + count)
    while batch := list(islice(pool, context.options.batch_size)):
        samples += [sample for sample, _ in batch]
        features.append(
            extract_pooled_features(
                context.model, context.to_model_input(torch.stack([image.pixels for _, image in batch]))
            ).cpu()
        )
        context.listener.progress("training images", len(samples), count)
    if not samples:
        raise UsageError("no training images are left besides the query images", "use another --split")
    return samples, torch.cat(features)


def get_class_title(data: Data, split: Split, sample: int) -> str:
    """Return the label of a sample as text: its class names, or its regression targets with their values."""
    label = split.labels[sample]
    if data.targets:
        return ", ".join(f"{name} {value:.4g}" for name, value in zip(data.targets, label, strict=True))
    names = [data.classes[int(label)]] if np.ndim(label) == 0 else [data.classes[i] for i in np.flatnonzero(label)]
    return ", ".join(data.titles.get(name, name).split(",")[0] for name in names)


def draw_strips(rows: list[list[tuple[InputImage, str]]]) -> Any:
    """Draw rows of images with a title above each; a gap separates the first image of a row from the others."""
    from matplotlib.figure import Figure

    width, height = rows[0][0][0].rgb_image.size
    image_width = 1.05
    image_height, title_height, query_gap = image_width * height / width, 0.22, 0.12
    figure_width, figure_height = (
        len(rows[0]) * (image_width + 0.06) + query_gap,
        len(rows) * (image_height + title_height),
    )
    figure = Figure(figsize=(figure_width, figure_height))
    for row_index, row in enumerate(rows):
        for column, (image, title) in enumerate(row):
            left, top = (
                column * (image_width + 0.06) + query_gap * (column > 0),
                figure_height - row_index * (image_height + title_height) - title_height,
            )
            panel = figure.add_axes(
                (
                    left / figure_width,
                    (top - image_height) / figure_height,
                    image_width / figure_width,
                    image_height / figure_height,
                )
            )
            hide_axes(panel)
            panel.imshow(image.rgb_image, interpolation="nearest")
            panel.set_title(
                textwrap.shorten(title, MAX_TITLE_LETTERS, placeholder="…") or title[:MAX_TITLE_LETTERS],
                fontsize=7.5,
                pad=2,
            )
    return figure
