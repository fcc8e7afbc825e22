"""Figures of attention: attention per head, attention distance, and the contribution of patches to the output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitreous.errors import UsageError, suggest_nearest
from vitreous.inspection.attention import compute_attention_maps, threshold_attention_mass
from vitreous.inspection.distance import AttentionDistances, compute_attention_distances
from vitreous.inspection.gradient import compute_relevance
from vitreous.inspection.rollout import RolloutOptions, compute_rollout
from vitreous.reports.figures.drawing import (
    ATTENTION_COLORMAP,
    BLUE,
    DEFAULT_IMAGE_COUNT,
    FONT_SIZE,
    ORANGE,
    add_colour_bar,
    choose_heads,
    count_attention_blocks,
    draw_heat_map,
    draw_weighted_image,
    format_dimensions,
    label_panel,
    make_image_rows,
    make_panels,
    new_figure,
)
from vitreous.reports.figures.subject import FigureContext, FigureResult, InputImage
from vitreous.reports.pages.formats import format_count
from vitreous.reports.pages.plots import INK
from vitreous.reports.pages.thumbnails import scale_attention_map

MAX_BLOCK_COLUMNS = 12  # blocks shown side by side
EDGE_COLOUR, DIMMED_LIGHT = (
    np.array([214, 84, 32]),
    0.35,
)  # colour of the edges of kept patches, and brightness of the other patches
MIN_EDGE_SIDE = 320  # minimum longer side in pixels for drawing edges
#: attention span of a query -> its name, and colour and marker of its dots
SPAN_STYLES = {
    "all": ("heads", BLUE, "o"),
    "row": ("heads along rows", BLUE, "o"),
    "column": ("heads along columns", ORANGE, "s"),
    "window": ("heads within windows", ORANGE, "s"),
    "space": ("heads within time slots", BLUE, "o"),
    "time": ("heads over time", ORANGE, "s"),
}


def make_attention(scene: FigureContext) -> list[FigureResult]:
    """Draw the attention of each block of --layers (default: the last), with a column per head and their mean."""
    figures, prefix = [], scene.model.config.prefix
    for of in iterate_head_attention(scene):
        pictures, rows, heads = of.pictures, of.rows, of.heads
        maps = rows[..., prefix:].unflatten(-1, scene.grid)
        figure, axes = make_head_panels(scene, pictures, heads, "mean")
        for row, picture, head_maps in zip(axes, pictures, maps, strict=True):
            for place, values in zip(row[1:], [*head_maps[heads], head_maps.mean(0)], strict=True):
                image = draw_heat_map(place, picture, values)
        add_colour_bar(figure, image, axes, "attention")
        caption = (
            f"Attention of {format_block_name(of.layer, scene)} from {describe_readout(scene)} to the patches, "
            f"per head and averaged "
            f"over all {rows.shape[1]} heads. Prefix tokens are excluded; each map is scaled to its maximum "
            "value."
        )
        numbers = {"maps": maps[:, heads].numpy(), "mean": maps.mean(1).numpy(), "prefix": rows[..., :prefix].numpy()}
        figures.append(of.figure("attention", caption, figure, numbers))
    return figures


def make_segments(scene: FigureContext) -> list[FigureResult]:
    """Draw the patches with most attention in each block of --layers (default: the last), with a column per head."""
    figures, mass = [], scene.options.mass
    for of in iterate_head_attention(scene):
        pictures, heads = of.pictures, of.heads
        masks = threshold_attention_mass(of.rows[:, heads, scene.model.config.prefix :], mass).unflatten(-1, scene.grid)
        figure, axes = make_head_panels(scene, pictures, heads)
        for row, picture, head_masks in zip(axes, pictures, masks, strict=True):
            for place, mask in zip(row[1:], head_masks.numpy(), strict=True):
                place.imshow(draw_kept_patches(np.asarray(picture.shown), mask), interpolation="nearest")
        caption = (
            f"The smallest set of patches that holds {mass:.0%} of the attention from {describe_readout(scene)} to the "
            f"patches, in each head of {format_block_name(of.layer, scene)} (arXiv:2104.14294, Fig. 3). Prefix tokens "
            "are excluded before the share is computed."
        )
        numbers = {"kept": masks.numpy(), "mass": np.array(mass)}
        figures.append(of.figure("segments", caption, figure, numbers))
    return figures


class HeadAttention(NamedTuple):
    """Attention `rows` (n, h, T) of n images in block `layer` to all tokens, and the heads shown.

    `suffix` distinguishes figures of several blocks.
    """

    pictures: list[InputImage]
    layer: int
    suffix: str
    rows: Tensor
    heads: list[int]

    def figure(self, kind: str, caption: str, figure: Any, numbers: dict[str, np.ndarray]) -> FigureResult:
        """Return a drawn figure of this block as a result."""
        numbers |= {"heads": np.array(self.heads), "images": np.array([one.name for one in self.pictures])}
        return FigureResult(
            kind + self.suffix, f"{kind.capitalize()} of block {self.layer + 1}", caption, figure, numbers=numbers
        )


def iterate_head_attention(scene: FigureContext) -> Iterator[HeadAttention]:
    """Yield the attention of each selected block, by default the last.

    Raises UsageError for a model without attention, and for a head or block that does not exist.
    """
    depth = count_attention_blocks(scene)
    layers = scene.layers(depth) if scene.options.layers else [depth - 1]
    pictures = scene.take_images(DEFAULT_IMAGE_COUNT)
    results = [compute_attention_maps(scene.model, scene.input(one.pixels[None]), layers) for one in pictures]
    for layer in layers:
        rows = torch.cat([one[layer] for one in results]).cpu()
        heads = choose_heads(scene.options.heads, rows.shape[1])
        yield HeadAttention(pictures, layer, "" if len(layers) == 1 else f"-{layer}", rows, heads)


def make_head_panels(
    scene: FigureContext, pictures: Sequence[InputImage], heads: list[int], *more: str
) -> tuple[Any, np.ndarray]:
    """Return panels and their (n, columns) axes: one column each for the image, each head and each of `more`."""
    words = ["input", *(f"head {head + 1}" for head in heads), *more]
    return make_image_rows(scene, pictures, words, 1.4 if len(words) <= 6 else 1.0)


def draw_kept_patches(pixels: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Darken all but the (h, w) kept patches of (H, W, 3) uint8 pixels and outline those -> (kH, kW, 3) uint8.

    Small images are enlarged by an integer k, so that outlines are thin.
    """
    factor = max(1, MIN_EDGE_SIDE // max(pixels.shape))
    pixels = pixels.repeat(factor, 0).repeat(factor, 1)
    whole = np.repeat(np.repeat(mask, pixels.shape[0] // mask.shape[0], 0), pixels.shape[1] // mask.shape[1], 1)
    width = max(1, max(pixels.shape) // 160)
    edge = np.zeros_like(whole)
    for axis in (0, 1):
        padded = np.pad(whole, [(width, width) if a == axis else (0, 0) for a in (0, 1)])
        for start in range(2 * width + 1):
            edge |= whole & ~padded.take(range(start, start + whole.shape[axis]), axis)
    shown = np.where(whole[..., None], pixels, pixels * DIMMED_LIGHT)
    return np.where(edge[..., None], EDGE_COLOUR, shown).astype(np.uint8)


def make_gradient(scene: FigureContext) -> list[FigureResult]:
    """Draw gradient-weighted rollout of each image, for --of-class or the predicted class."""
    count_attention_blocks(scene)
    known = scene.bundle.classes
    number = None if scene.options.of_class is None else torch.tensor([get_class_index(scene.options.of_class, known)])
    pictures = scene.take_images(DEFAULT_IMAGE_COUNT)
    gradients = [compute_relevance(scene.model, scene.input(one.pixels[None]), number) for one in pictures]
    maps = torch.cat([one.maps for one in gradients]).cpu()
    words = [known[int(one.classes[0])] for one in gradients]
    caption = (
        (
            f"Gradient-weighted rollout (arXiv:2103.15679), for {describe_readout(scene)}: "
            f"attention that raises the logit of "
        )
        + ("the predicted class" if number is None else f"the class {words[0]}")
        + ", through all blocks. Colours span the 1st to the 99th percentile of a map; right: the image times the map."
    )
    numbers = {
        "maps": maps.numpy(),
        "classes": np.array(words),
        "logits": torch.cat([one.logits for one in gradients]).cpu().numpy(),
        "images": np.array([one.name for one in pictures]),
    }
    figure, axes = draw_map_rows(scene, pictures, maps, "relevance", "relevance")
    for place, word in zip(axes[:, 1], words, strict=True):
        label_panel(place, f"for {word}")
    return [FigureResult("gradient", "Gradient-weighted rollout", caption, figure, numbers=numbers)]


def get_class_index(name: str, known: tuple[str, ...]) -> int:
    """Return the index of a class. Raises UsageError for a class that the model lacks."""
    if name not in known:
        some = ", ".join(known[:20]) + (", …" if len(known) > 20 else "")
        hint = suggest_nearest(name, known) or (f"its classes are {some}" if known else "")
        raise UsageError(f"the model has no class {name}", hint)
    return known.index(name)


def draw_map_rows(
    scene: FigureContext, pictures: list[InputImage], maps: Tensor, name: str, unit: str
) -> tuple[Any, np.ndarray]:
    """Draw a row per image for (n, h, w) maps: the map over the image, and the image times the map."""
    figure, axes = make_image_rows(scene, pictures, ("input", name, f"input × {name}"))
    for row, picture, values in zip(axes, pictures, maps, strict=True):
        scaled = scale_attention_map(values.numpy())
        image = draw_heat_map(row[1], picture, scaled, 1.0)
        draw_weighted_image(row[2], picture, scaled)
    add_colour_bar(figure, image, axes, unit, "1st to\n99th percentile of a map")
    return figure, axes


def make_rollout(scene: FigureContext) -> list[FigureResult]:
    """Draw attention rollout: one row per image, and the first image with one column per block."""
    options, layers = scene.options, scene.layers(count_attention_blocks(scene))
    pictures, mixing = (
        scene.take_images(DEFAULT_IMAGE_COUNT),
        RolloutOptions(options.residual, options.fusion, options.discard),
    )
    # one at a time: images can be large
    rollouts = [compute_rollout(scene.model, scene.input(one.pixels[None]), mixing) for one in pictures]
    maps = torch.cat([one.maps for one in rollouts]).cpu()
    alone = torch.cat([one.single_maps for one in rollouts]).cpu()
    discarded = f", {mixing.discard:.0%} discarded" if mixing.discard else ""
    numbers: dict[str, np.ndarray] = {
        "maps": maps.numpy(),
        "single": alone.numpy(),
        "prefix": torch.cat([one.joint[..., : one.prefix] for one in rollouts]).cpu().numpy(),
        "images": np.array([one.name for one in pictures]),
    }
    caption = (
        f"Attention rollout through all {maps.shape[1]} blocks, for {describe_readout(scene)} "
        f"({mixing.fusion} over heads, "
        f"residual {mixing.residual:g}{discarded}; "
        "arXiv:2005.00928, arXiv:2010.11929 Fig. 6): an estimate of the contribution of each patch "
        "to the output. Prefix tokens are excluded; colours span the 1st to the 99th percentile of each map. "
        "Right: the image times the map, as in the paper."
    )
    below = (
        f"Attention rollout for {pictures[0].name}, block by block. Upper row: all blocks up to this one; lower row: "
        "this block only. Each map is scaled to its maximum value."
    )
    if len(layers) > MAX_BLOCK_COLUMNS:
        layers = [layers[round(i * (len(layers) - 1) / (MAX_BLOCK_COLUMNS - 1))] for i in range(MAX_BLOCK_COLUMNS)]
    of_blocks = {"maps": maps[:1, layers].numpy(), "single": alone[:1, layers].numpy(), "layers": np.array(layers)}
    figure = draw_map_rows(scene, pictures, maps[:, -1], "rollout", "share of the output")[0]
    depths = draw_rollout_by_block(scene, maps[0], alone[0], layers)
    return [
        FigureResult("rollout", "Attention rollout", caption, figure, numbers=numbers),
        FigureResult("rollout-blocks", "Attention rollout by depth", below, depths, numbers=of_blocks),
    ]


def draw_rollout_by_block(scene: FigureContext, maps: Tensor, alone: Tensor, layers: list[int]) -> Any:
    """Draw two rows for (L, h, w) maps, with one column for each of `layers`."""
    figure, axes = make_panels(scene, 2, len(layers), [f"block {layer + 1}" for layer in layers], side=0.95)
    for row, values, word in zip(axes, (maps, alone), ("cumulative", "this block"), strict=True):
        for place, layer in zip(row, layers, strict=True):
            place.imshow(values[layer].numpy(), cmap=ATTENTION_COLORMAP, vmin=0)
        row[0].text(
            -0.06, 0.5, word, transform=row[0].transAxes, rotation=90, ha="right", va="center", fontsize=FONT_SIZE
        )
    return figure


def make_distance(scene: FigureContext) -> list[FigureResult]:
    """Draw mean attention distance of each head against depth, over --count images of the data or the given images."""
    layers, pictures = scene.layers(count_attention_blocks(scene)), scene.take_images(scene.options.count)
    measured = compute_attention_distances(scene.model, scene.batches(pictures, "attention distance"))
    shown = [row for row, layer in enumerate(measured.layers) if layer in layers]
    mean, std = measured.mean.numpy()[shown], measured.std.numpy()[shown]
    blocks, spans = np.array(measured.layers)[shown], [measured.spans[row] for row in shown]
    uniform = np.array(measured.uniform)[shown]
    caption = (
        f"Mean attention distance of each head over {format_count(len(pictures), 'image')}, in pixels of an image of "
        f"{format_dimensions(scene.preprocess.image)} (arXiv:2010.11929, Fig. 7 right): from the query's patch to "
        f"all others, "
        "weighted by attention. Prefix tokens are excluded without renormalisation. The dashed line is a head "
        "with uniform attention."
    )
    rows = [
        [int(block), span, head, f"{mean[i, head]:.4f}", f"{std[i, head]:.4f}", f"{uniform[i]:.4f}"]
        for i, (block, span) in enumerate(zip(blocks, spans, strict=True))
        for head in range(mean.shape[1])
        if not np.isnan(mean[i, head])
    ]
    head = ["block", "span", "head", "distance_px", "std_over_images_px", "uniform_px"]
    numbers = {"layers": blocks, "spans": np.array(spans), "heads": np.arange(mean.shape[1]), "distance": mean}
    numbers |= {"std": std, "uniform": uniform, "images": np.array([one.name for one in pictures])}
    figure = draw_distances(measured, shown)
    return [
        FigureResult(
            "distance", "Mean attention distance", caption=caption, figure=figure, numbers=numbers, table=(head, rows)
        )
    ]


def draw_distances(measured: AttentionDistances, shown: list[int]) -> Any:
    """Draw a dot per head, a line through their mean, and the distance of uniform attention."""
    from matplotlib.ticker import MaxNLocator

    figure, ((axes,),) = new_figure(5.2, 3.4)
    mean = measured.mean.numpy()
    lines: dict[float, str] = {}
    highest = np.nanmax(mean[shown])
    for span in dict.fromkeys(measured.spans[row] for row in shown):
        word, colour, marker = SPAN_STYLES[span]
        rows = [row for row in shown if measured.spans[row] == span]
        depth = [measured.layers[row] + 1 for row in rows]
        pixels = measured.uniform[rows[0]]
        alike = len({measured.uniform[row] for row in rows}) == 1
        if alike:
            lines[pixels] = INK if pixels in lines else colour
        else:  # windows of different sizes
            references = [measured.uniform[row] for row in rows]
            axes.plot(depth, references, color=INK, linewidth=1, linestyle="--", label="uniform attention")
            highest = max(highest, *references)
        axes.plot(depth, np.nanmean(mean[rows], 1), color=colour, linewidth=1, alpha=0.5)
        places = np.repeat(depth, mean.shape[1])
        axes.scatter(places, mean[rows].ravel(), s=16, color=colour, marker=marker, alpha=0.8, linewidths=0, label=word)
    for pixels, colour in lines.items():
        axes.axhline(pixels, color=colour, linewidth=1, linestyle="--", label=f"uniform attention, {pixels:.1f} px")
    axes.set_xlabel("block", fontsize=FONT_SIZE)
    axes.set_ylabel("mean attention distance (pixels)", fontsize=FONT_SIZE)
    axes.set_ylim(0, 1.12 * max([highest, *lines]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=FONT_SIZE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=FONT_SIZE - 1, frameon=False, loc="lower right")
    return figure


def format_block_name(layer: int, scene: FigureContext) -> str:
    """Format the name of a block for captions: counted from 1, with the --layers index."""
    return f"block {layer + 1} of {count_attention_blocks(scene)} (--layers {layer})"


def describe_readout(scene: FigureContext) -> str:
    """Name the token or mean that the head uses, for captions."""
    classed = scene.model.config.pool in ("class", "distilled")
    return "the class token" if classed else "the mean-pooled output"
