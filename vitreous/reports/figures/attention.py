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

MAX_BLOCK_COLUMNS = 12  # most blocks shown side by side
# colour of the edges of kept patches, and brightness of the other patches
EDGE_COLOUR, DIMMED_LIGHT = (np.array([214, 84, 32]), 0.35)
MIN_EDGE_SIDE = 320  # minimum longer side in pixels for drawing edges
#: tokens that a query attends to -> label, colour and marker of the dots of these heads
SPAN_STYLES = {
    "all": ("heads", BLUE, "o"),
    "row": ("heads along rows", BLUE, "o"),
    "column": ("heads along columns", ORANGE, "s"),
    "window": ("heads within windows", ORANGE, "s"),
    "space": ("heads within time slots", BLUE, "o"),
    "time": ("heads over time", ORANGE, "s"),
}


def make_attention(context: FigureContext) -> list[FigureResult]:
    """Draw the attention from the classifier's input to the patches in each block of --layers (default: the last).

    There is a column per attention head, and one for their mean.
    """
    figures, prefix = [], context.model.config.prefix
    for head_attention in iterate_head_attention(context):
        input_images, attention, heads = head_attention.images, head_attention.attention, head_attention.heads
        maps = attention[..., prefix:].unflatten(-1, context.grid)
        figure, axes = make_head_panels(context, input_images, heads, "mean")
        for row, input_image, head_maps in zip(axes, input_images, maps, strict=True):
            for panel, values in zip(row[1:], [*head_maps[heads], head_maps.mean(0)], strict=True):
                mappable = draw_heat_map(panel, input_image, values)
        add_colour_bar(figure, mappable, axes, "attention")
        caption = (
            f"Attention of {format_block_name(head_attention.layer, context)} from {describe_readout(context)} to the "
            "patches, "
            f"per head and averaged "
            f"over all {attention.shape[1]} heads. Prefix tokens are excluded; each map is scaled to its maximum "
            "value."
        )
        arrays = {
            "maps": maps[:, heads].numpy(),
            "mean": maps.mean(1).numpy(),
            "prefix": attention[..., :prefix].numpy(),
        }
        figures.append(head_attention.to_figure_result("attention", caption, figure, arrays))
    return figures


def make_segments(context: FigureContext) -> list[FigureResult]:
    """Draw the patches that get most attention in each block of --layers (default: the last), one column per head."""
    figures, mass = [], context.options.mass
    for head_attention in iterate_head_attention(context):
        input_images, heads = head_attention.images, head_attention.heads
        masks = threshold_attention_mass(
            head_attention.attention[:, heads, context.model.config.prefix :], mass
        ).unflatten(-1, context.grid)
        figure, axes = make_head_panels(context, input_images, heads)
        for row, input_image, head_masks in zip(axes, input_images, masks, strict=True):
            for panel, mask in zip(row[1:], head_masks.numpy(), strict=True):
                panel.imshow(draw_kept_patches(np.asarray(input_image.rgb_image), mask), interpolation="nearest")
        caption = (
            f"The smallest set of patches that holds {mass:.0%} of the attention from {describe_readout(context)} to "
            "the "
            f"patches, in each head of {format_block_name(head_attention.layer, context)} (arXiv:2104.14294, Fig. 3). "
            "Prefix tokens "
            "are excluded before the share is computed."
        )
        arrays = {"kept": masks.numpy(), "mass": np.array(mass)}
        figures.append(head_attention.to_figure_result("segments", caption, figure, arrays))
    return figures


class HeadAttention(NamedTuple):
    """The attention of n images in block `layer`, counted from 0, and the indices of the shown attention heads.

    `attention` (n, h, T) is the attention from the classifier's input, which is the class token or the mean of the
    patch tokens, to all T tokens, in each of h heads. `suffix` is added to the figure's name if several blocks are
    drawn.
    """

    images: list[InputImage]
    layer: int
    suffix: str
    attention: Tensor
    heads: list[int]

    def to_figure_result(self, name: str, caption: str, figure: Any, arrays: dict[str, np.ndarray]) -> FigureResult:
        """Return a drawn figure of this block with its arrays as a `FigureResult`."""
        arrays |= {"heads": np.array(self.heads), "images": np.array([image.name for image in self.images])}
        return FigureResult(
            name + self.suffix, f"{name.capitalize()} of block {self.layer + 1}", caption, figure, arrays=arrays
        )


def iterate_head_attention(context: FigureContext) -> Iterator[HeadAttention]:
    """Yield the attention of each block of --layers, by default of the last block.

    Raises UsageError for a model without attention, and for a head or block that does not exist.
    """
    depth = count_attention_blocks(context)
    layers = context.resolve_layers(depth) if context.options.layers else [depth - 1]
    input_images = context.take_images(DEFAULT_IMAGE_COUNT)
    results = [
        compute_attention_maps(context.model, context.to_model_input(item.pixels[None]), layers)
        for item in input_images
    ]
    for layer in layers:
        attention = torch.cat([item[layer] for item in results]).cpu()
        heads = choose_heads(context.options.heads, attention.shape[1])
        yield HeadAttention(input_images, layer, "" if len(layers) == 1 else f"-{layer}", attention, heads)


def make_head_panels(
    context: FigureContext, input_images: Sequence[InputImage], heads: list[int], *extra_titles: str
) -> tuple[Any, np.ndarray]:
    """Return a figure and its (n, columns) axes: one row per image; one column for the image, for each head, and for
    each of `extra_titles`."""
    titles = ["input", *(f"head {head + 1}" for head in heads), *extra_titles]
    return make_image_rows(context, input_images, titles, 1.4 if len(titles) <= 6 else 1.0)


def draw_kept_patches(pixels: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Darken the patches outside a mask and outline the patches inside: pixels (H, W, 3) uint8 -> (kH, kW, 3) uint8.

    `mask` (h, w) bool marks the kept patches. Small images are enlarged by an integer k, so that outlines are thin.
    """
    factor = max(1, MIN_EDGE_SIDE // max(pixels.shape))
    pixels = pixels.repeat(factor, 0).repeat(factor, 1)
    pixel_mask = np.repeat(np.repeat(mask, pixels.shape[0] // mask.shape[0], 0), pixels.shape[1] // mask.shape[1], 1)
    width = max(1, max(pixels.shape) // 160)
    edge = np.zeros_like(pixel_mask)
    for axis in (0, 1):
        padded = np.pad(pixel_mask, [(width, width) if a == axis else (0, 0) for a in (0, 1)])
        for start in range(2 * width + 1):
            edge |= pixel_mask & ~padded.take(range(start, start + pixel_mask.shape[axis]), axis)
    dimmed = np.where(pixel_mask[..., None], pixels, pixels * DIMMED_LIGHT)
    return np.where(edge[..., None], EDGE_COLOUR, dimmed).astype(np.uint8)


def make_gradient(context: FigureContext) -> list[FigureResult]:
    """Draw gradient-weighted attention rollout of each image, for --of-class or the predicted class."""
    count_attention_blocks(context)
    classes = context.bundle.classes
    class_index = (
        None if context.options.of_class is None else torch.tensor([get_class_index(context.options.of_class, classes)])
    )
    input_images = context.take_images(DEFAULT_IMAGE_COUNT)
    gradients = [
        compute_relevance(context.model, context.to_model_input(item.pixels[None]), class_index)
        for item in input_images
    ]
    maps = torch.cat([item.maps for item in gradients]).cpu()
    class_names = [classes[int(item.classes[0])] for item in gradients]
    caption = (
        (
            f"Gradient-weighted rollout (arXiv:2103.15679), for {describe_readout(context)}: "
            f"attention that raises the logit of "
        )
        + ("the predicted class" if class_index is None else f"the class {class_names[0]}")
        + ", through all blocks. Colours span the 1st to the 99th percentile of a map; right: the image times the map."
    )
    arrays = {
        "maps": maps.numpy(),
        "classes": np.array(class_names),
        "logits": torch.cat([item.logits for item in gradients]).cpu().numpy(),
        "images": np.array([item.name for item in input_images]),
    }
    figure, axes = draw_map_rows(context, input_images, maps, "relevance", "relevance")
    for panel, class_name in zip(axes[:, 1], class_names, strict=True):
        label_panel(panel, f"for {class_name}")
    return [FigureResult("gradient", "Gradient-weighted rollout", caption, figure, arrays=arrays)]


def get_class_index(name: str, classes: tuple[str, ...]) -> int:
    """Return the index of a class by its name. Raises UsageError for a class that the model lacks."""
    if name not in classes:
        listed = ", ".join(classes[:20]) + (", …" if len(classes) > 20 else "")
        hint = suggest_nearest(name, classes) or (
            f"use one of {listed}" if classes else "use a model with a classifier"
        )
        raise UsageError(f"the model has no class {name}", hint)
    return classes.index(name)


def draw_map_rows(
    context: FigureContext, input_images: list[InputImage], maps: Tensor, name: str, unit: str
) -> tuple[Any, np.ndarray]:
    """Draw a row per image for (n, h, w) maps: the image, the map over the image, and the image times the map."""
    figure, axes = make_image_rows(context, input_images, ("input", name, f"input × {name}"))
    for row, input_image, values in zip(axes, input_images, maps, strict=True):
        scaled = scale_attention_map(values.numpy())
        mappable = draw_heat_map(row[1], input_image, scaled, 1.0)
        draw_weighted_image(row[2], input_image, scaled)
    add_colour_bar(figure, mappable, axes, unit, "1st to\n99th percentile of a map")
    return figure, axes


def make_rollout(context: FigureContext) -> list[FigureResult]:
    """Draw attention rollout: one row per image, and the first image with one column per block."""
    options, layers = context.options, context.resolve_layers(count_attention_blocks(context))
    input_images, mixing = (
        context.take_images(DEFAULT_IMAGE_COUNT),
        RolloutOptions(options.residual, options.fusion, options.discard),
    )
    # one image at a time, because images can be large
    rollouts = [
        compute_rollout(context.model, context.to_model_input(item.pixels[None]), mixing) for item in input_images
    ]
    maps = torch.cat([item.maps for item in rollouts]).cpu()
    single_maps = torch.cat([item.single_maps for item in rollouts]).cpu()
    discarded = f", {mixing.discard:.0%} discarded" if mixing.discard else ""
    arrays: dict[str, np.ndarray] = {
        "maps": maps.numpy(),
        "single": single_maps.numpy(),
        "prefix": torch.cat([item.joint[..., : item.prefix] for item in rollouts]).cpu().numpy(),
        "images": np.array([item.name for item in input_images]),
    }
    caption = (
        f"Attention rollout through all {maps.shape[1]} blocks, for {describe_readout(context)} "
        f"({mixing.fusion} over heads, "
        f"residual {mixing.residual:g}{discarded}; "
        "arXiv:2005.00928, arXiv:2010.11929 Fig. 6): an estimate of the contribution of each patch "
        "to the output. Prefix tokens are excluded; colours span the 1st to the 99th percentile of each map. "
        "Right: the image times the map, as in the paper."
    )
    blocks_caption = (
        f"Attention rollout for {input_images[0].name}, block by block. Upper row: all blocks up to this one; "
        "lower row: "
        "this block only. Each map is scaled to its maximum value."
    )
    if len(layers) > MAX_BLOCK_COLUMNS:
        layers = [layers[round(i * (len(layers) - 1) / (MAX_BLOCK_COLUMNS - 1))] for i in range(MAX_BLOCK_COLUMNS)]
    block_arrays = {
        "maps": maps[:1, layers].numpy(),
        "single": single_maps[:1, layers].numpy(),
        "layers": np.array(layers),
    }
    figure = draw_map_rows(context, input_images, maps[:, -1], "rollout", "share of the output")[0]
    blocks_figure = draw_rollout_by_block(context, maps[0], single_maps[0], layers)
    return [
        FigureResult("rollout", "Attention rollout", caption, figure, arrays=arrays),
        FigureResult(
            "rollout-blocks", "Attention rollout by depth", blocks_caption, blocks_figure, arrays=block_arrays
        ),
    ]


def draw_rollout_by_block(context: FigureContext, maps: Tensor, single_maps: Tensor, layers: list[int]) -> Any:
    """Draw two rows with a column per block in `layers`: the cumulative rollout `maps`, and `single_maps`, the rollout
    of each block alone; both (L, h, w)."""
    figure, axes = make_panels(context, 2, len(layers), [f"block {layer + 1}" for layer in layers], side=0.95)
    for row, values, title in zip(axes, (maps, single_maps), ("cumulative", "this block"), strict=True):
        for panel, layer in zip(row, layers, strict=True):
            panel.imshow(values[layer].numpy(), cmap=ATTENTION_COLORMAP, vmin=0)
        row[0].text(
            -0.06, 0.5, title, transform=row[0].transAxes, rotation=90, ha="right", va="center", fontsize=FONT_SIZE
        )
    return figure


def make_distance(context: FigureContext) -> list[FigureResult]:
    """Draw mean attention distance of each head against depth, averaged over the input images or --count images of the
    data."""
    layers, input_images = (
        context.resolve_layers(count_attention_blocks(context)),
        context.take_images(context.options.count),
    )
    distances = compute_attention_distances(context.model, context.iterate_batches(input_images, "attention distance"))
    selected = [row for row, layer in enumerate(distances.layers) if layer in layers]
    mean, std = distances.mean.numpy()[selected], distances.std.numpy()[selected]
    blocks, spans = np.array(distances.layers)[selected], [distances.spans[row] for row in selected]
    uniform = np.array(distances.uniform)[selected]
    caption = (
        f"Mean attention distance of each head over {format_count(len(input_images), 'image')}, in pixels of an "
        "image of "
        f"{format_dimensions(context.preprocess.image)} (arXiv:2010.11929, Fig. 7 right): from the query's patch to "
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
    arrays = {"layers": blocks, "spans": np.array(spans), "heads": np.arange(mean.shape[1]), "distance": mean}
    arrays |= {"std": std, "uniform": uniform, "images": np.array([image.name for image in input_images])}
    figure = draw_distances(distances, selected)
    return [
        FigureResult(
            "distance", "Mean attention distance", caption=caption, figure=figure, arrays=arrays, table=(head, rows)
        )
    ]


def draw_distances(distances: AttentionDistances, selected: list[int]) -> Any:
    """Draw attention distance against block for the `selected` rows: a dot per head, a line through the mean of the
    heads, and a dashed line for uniform attention."""
    from matplotlib.ticker import MaxNLocator

    figure, ((axes,),) = new_figure(5.2, 3.4)
    mean = distances.mean.numpy()
    lines: dict[float, str] = {}
    highest = np.nanmax(mean[selected])
    for span in dict.fromkeys(distances.spans[row] for row in selected):
        label, colour, marker = SPAN_STYLES[span]
        rows = [row for row in selected if distances.spans[row] == span]
        depth = [distances.layers[row] + 1 for row in rows]
        pixels = distances.uniform[rows[0]]
        is_uniform = len({distances.uniform[row] for row in rows}) == 1
        if is_uniform:
            lines[pixels] = INK if pixels in lines else colour
        else:  # windows of different sizes
            references = [distances.uniform[row] for row in rows]
            axes.plot(depth, references, color=INK, linewidth=1, linestyle="--", label="uniform attention")
            highest = max(highest, *references)
        axes.plot(depth, np.nanmean(mean[rows], 1), color=colour, linewidth=1, alpha=0.5)
        dot_depths = np.repeat(depth, mean.shape[1])
        axes.scatter(
            dot_depths, mean[rows].ravel(), s=16, color=colour, marker=marker, alpha=0.8, linewidths=0, label=label
        )
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


def format_block_name(layer: int, context: FigureContext) -> str:
    """Format a block index for captions: `block 12 of 12 (--layers 11)`."""
    return f"block {layer + 1} of {count_attention_blocks(context)} (--layers {layer})"


def describe_readout(context: FigureContext) -> str:
    """Return the name of the classifier's input for captions: the class token or the mean-pooled output."""
    uses_class_token = context.model.config.pool in ("class", "distilled")
    return "the class token" if uses_class_token else "the mean-pooled output"
