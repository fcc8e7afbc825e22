"""Figures of attention: what heads look at, how far, and which patches the answer is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitreous.errors import UsageError, nearest
from vitreous.inspection.attention import attention, segments
from vitreous.inspection.distance import Distances, distances
from vitreous.inspection.gradient import gradient
from vitreous.inspection.rollout import Mixing, rollout
from vitreous.reports.figures.drawing import (
    BLUE,
    HEAT,
    ORANGE,
    PICTURES,
    SIZE,
    choose_heads,
    depth_of,
    heat,
    label_panel,
    multiply,
    new_figure,
    panels,
    picture_rows,
    scale,
    times,
)
from vitreous.reports.figures.subject import FigureResult, Picture, Scene
from vitreous.reports.pages.formats import format_count
from vitreous.reports.pages.plots import INK
from vitreous.reports.pages.thumbnails import scale_map

COLUMNS = 12  # blocks shown side by side
TINT, DIM = np.array([214, 84, 32]), 0.35  # colour of edges of kept patches, and light left to the others
FINE = 320  # least pixels of the longer side that edges are drawn on
#: span of a query -> its name, and colour and shape of its dots
KINDS = {
    "all": ("heads", BLUE, "o"),
    "row": ("heads along rows", BLUE, "o"),
    "column": ("heads along columns", ORANGE, "s"),
    "window": ("heads within windows", ORANGE, "s"),
    "space": ("heads within slots of time", BLUE, "o"),
    "time": ("heads over time", ORANGE, "s"),
}


def make_attention(scene: Scene) -> list[FigureResult]:
    """Draw the attention of each block of --layers, by default the last: a column for each head, and their mean."""
    figures, prefix = [], scene.model.config.prefix
    for of in attention_rows(scene):
        pictures, rows, heads = of.pictures, of.rows, of.heads
        maps = rows[..., prefix:].unflatten(-1, scene.grid)
        figure, axes = head_panels(scene, pictures, heads, "mean")
        for row, picture, head_maps in zip(axes, pictures, maps, strict=True):
            for place, values in zip(row[1:], [*head_maps[heads], head_maps.mean(0)], strict=True):
                image = heat(place, picture, values)
        scale(figure, image, axes, "attention")
        caption = (
            f"Attention of {block_of(of.layer, scene)} from {reader(scene)} to the patches, head by head, and the mean "
            f"over all {rows.shape[1]} heads. Prefix tokens are left out; each map is shown relative to its largest "
            "value."
        )
        numbers = {"maps": maps[:, heads].numpy(), "mean": maps.mean(1).numpy(), "prefix": rows[..., :prefix].numpy()}
        figures.append(of.figure("attention", caption, figure, numbers))
    return figures


def make_segments(scene: Scene) -> list[FigureResult]:
    """Draw the patches with most attention in each block of --layers, by default the last: a column for each head."""
    figures, mass = [], scene.options.mass
    for of in attention_rows(scene):
        pictures, heads = of.pictures, of.heads
        masks = segments(of.rows[:, heads, scene.model.config.prefix :], mass).unflatten(-1, scene.grid)
        figure, axes = head_panels(scene, pictures, heads)
        for row, picture, head_masks in zip(axes, pictures, masks, strict=True):
            for place, mask in zip(row[1:], head_masks.numpy(), strict=True):
                place.imshow(masked(np.asarray(picture.shown), mask), interpolation="nearest")
        caption = (
            f"The fewest patches that hold {mass:.0%} of the attention of {reader(scene)} to patches, in each head of "
            f"{block_of(of.layer, scene)} (arXiv:2104.14294, Fig. 3). Prefix tokens are left out before the share is "
            "taken."
        )
        numbers = {"kept": masks.numpy(), "mass": np.array(mass)}
        figures.append(of.figure("segments", caption, figure, numbers))
    return figures


class HeadRows(NamedTuple):
    """Attention `rows` (n, h, T) of n images in block `layer` to all tokens, and the heads shown.

    `suffix` tells figures of several blocks apart.
    """

    pictures: list[Picture]
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


def attention_rows(scene: Scene) -> Iterator[HeadRows]:
    """Yield the attention of each block asked for, by default of the last.

    Raises UsageError for a model without attention, and a head or block that it does not have.
    """
    depth = depth_of(scene)
    layers = scene.layers(depth) if scene.options.layers else [depth - 1]
    pictures = scene.some(PICTURES)
    results = [attention(scene.model, scene.input(one.pixels[None]), layers) for one in pictures]
    for layer in layers:
        rows = torch.cat([one[layer] for one in results]).cpu()
        heads = choose_heads(scene.options.heads, rows.shape[1])
        yield HeadRows(pictures, layer, "" if len(layers) == 1 else f"-{layer}", rows, heads)


def head_panels(scene: Scene, pictures: Sequence[Picture], heads: list[int], *more: str) -> tuple[Any, np.ndarray]:
    """Return panels and their (n, columns) axes: a column for the image, for each head and each of `more`."""
    words = ["input", *(f"head {head + 1}" for head in heads), *more]
    return picture_rows(scene, pictures, words, 1.4 if len(words) <= 6 else 1.0)


def masked(pixels: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """(H, W, 3) uint8 and the (h, w) patches kept -> (kH, kW, 3) uint8, dark but for those, which have an edge.

    Small images are scaled up by an integer k, so that edges are thin.
    """
    factor = max(1, FINE // max(pixels.shape))
    pixels = pixels.repeat(factor, 0).repeat(factor, 1)
    whole = np.repeat(np.repeat(mask, pixels.shape[0] // mask.shape[0], 0), pixels.shape[1] // mask.shape[1], 1)
    width = max(1, max(pixels.shape) // 160)
    edge = np.zeros_like(whole)
    for axis in (0, 1):
        padded = np.pad(whole, [(width, width) if a == axis else (0, 0) for a in (0, 1)])
        for start in range(2 * width + 1):
            edge |= whole & ~padded.take(range(start, start + whole.shape[axis]), axis)
    shown = np.where(whole[..., None], pixels, pixels * DIM)
    return np.where(edge[..., None], TINT, shown).astype(np.uint8)


def make_gradient(scene: Scene) -> list[FigureResult]:
    """Draw gradient-weighted rollout of each image, for --of-class or the predicted class."""
    depth_of(scene)
    known = scene.bundle.classes
    number = None if scene.options.of_class is None else torch.tensor([place_of(scene.options.of_class, known)])
    pictures = scene.some(PICTURES)
    gradients = [gradient(scene.model, scene.input(one.pixels[None]), number) for one in pictures]
    maps = torch.cat([one.maps for one in gradients]).cpu()
    words = [known[int(one.classes[0])] for one in gradients]
    caption = (
        f"Gradient-weighted rollout (arXiv:2103.15679), seen from {reader(scene)}: attention that raises the logit of "
        + ("the predicted class" if number is None else f"the class {words[0]}")
        + ", through all blocks. Colours span the 1st to the 99th percentile of a map; right: the image times the map."
    )
    numbers = {
        "maps": maps.numpy(),
        "classes": np.array(words),
        "logits": torch.cat([one.logits for one in gradients]).cpu().numpy(),
        "images": np.array([one.name for one in pictures]),
    }
    figure, axes = map_rows(scene, pictures, maps, "relevance", "relevance")
    for place, word in zip(axes[:, 1], words, strict=True):
        label_panel(place, f"for {word}")
    return [FigureResult("gradient", "Gradient-weighted rollout", caption, figure, numbers=numbers)]


def place_of(name: str, known: tuple[str, ...]) -> int:
    """Return the index of a class. Raises UsageError for one that the model does not know."""
    if name not in known:
        some = ", ".join(known[:20]) + (", …" if len(known) > 20 else "")
        hint = nearest(name, known) or (f"it knows {some}" if known else "")
        raise UsageError(f"the model knows no class {name}", hint)
    return known.index(name)


def map_rows(scene: Scene, pictures: list[Picture], maps: Tensor, name: str, unit: str) -> tuple[Any, np.ndarray]:
    """(n, h, w) maps: draw a row for each image, with the map over it and the image times the map."""
    figure, axes = picture_rows(scene, pictures, ("input", name, f"input × {name}"))
    for row, picture, values in zip(axes, pictures, maps, strict=True):
        scaled = scale_map(values.numpy())
        image = heat(row[1], picture, scaled, 1.0)
        multiply(row[2], picture, scaled)
    scale(figure, image, axes, unit, "1st to\n99th percentile of a map")
    return figure, axes


def make_rollout(scene: Scene) -> list[FigureResult]:
    """Draw attention rollout: a row for each image, and the first image with a column for each block."""
    options, layers = scene.options, scene.layers(depth_of(scene))
    pictures, mixing = scene.some(PICTURES), Mixing(options.residual, options.fusion, options.discard)
    # one by one: an image can be large
    rollouts = [rollout(scene.model, scene.input(one.pixels[None]), mixing) for one in pictures]
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
        f"Attention rollout through all {maps.shape[1]} blocks, seen from {reader(scene)} ({mixing.fusion} over heads, "
        f"residual {mixing.residual:g}{discarded}; "
        "arXiv:2005.00928, arXiv:2010.11929 Fig. 6): the share of each patch in the answer as far as attention "
        "mixes tokens. Prefix tokens are left out; colours span the 1st to the 99th percentile of each map. "
        "Right: the image times the map, as in the paper."
    )
    below = (
        f"The same for {pictures[0].name}, block by block. Upper row: through all blocks up to this one; lower row: "
        "this block alone. Each map is shown relative to its largest value."
    )
    if len(layers) > COLUMNS:
        layers = [layers[round(i * (len(layers) - 1) / (COLUMNS - 1))] for i in range(COLUMNS)]
    of_blocks = {"maps": maps[:1, layers].numpy(), "single": alone[:1, layers].numpy(), "layers": np.array(layers)}
    figure = map_rows(scene, pictures, maps[:, -1], "rollout", "share of the answer")[0]
    depths = rollout_by_block(scene, maps[0], alone[0], layers)
    return [
        FigureResult("rollout", "Attention rollout", caption, figure, numbers=numbers),
        FigureResult("rollout-blocks", "Attention rollout by depth", below, depths, numbers=of_blocks),
    ]


def rollout_by_block(scene: Scene, maps: Tensor, alone: Tensor, layers: list[int]) -> Any:
    """(L, h, w) maps: draw two rows with a column for each of `layers`."""
    figure, axes = panels(scene, 2, len(layers), [f"block {layer + 1}" for layer in layers], side=0.95)
    for row, values, word in zip(axes, (maps, alone), ("up to here", "alone"), strict=True):
        for place, layer in zip(row, layers, strict=True):
            place.imshow(values[layer].numpy(), cmap=HEAT, vmin=0)
        row[0].text(-0.06, 0.5, word, transform=row[0].transAxes, rotation=90, ha="right", va="center", fontsize=SIZE)
    return figure


def make_distance(scene: Scene) -> list[FigureResult]:
    """Draw mean attention distance of each head against depth, over --count images of the data or those named."""
    layers, pictures = scene.layers(depth_of(scene)), scene.some(scene.options.count)
    measured = distances(scene.model, scene.batches(pictures, "attention distance"))
    shown = [row for row, layer in enumerate(measured.layers) if layer in layers]
    mean, std = measured.mean.numpy()[shown], measured.std.numpy()[shown]
    blocks, spans = np.array(measured.layers)[shown], [measured.spans[row] for row in shown]
    uniform = np.array(measured.uniform)[shown]
    caption = (
        f"Mean attention distance of each head over {format_count(len(pictures), 'image')}, in pixels of an image of "
        f"{times(scene.preprocess.image)} (arXiv:2010.11929, Fig. 7 right): from the query's patch to all others, "
        "weighted by attention. Prefix tokens are left out and the rest is not renormalised. The dashed line is a head "
        "that looks everywhere alike."
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


def draw_distances(measured: Distances, shown: list[int]) -> Any:
    """Draw a dot for each head, a line through their mean, and the distance of uniform attention."""
    from matplotlib.ticker import MaxNLocator

    figure, ((axes,),) = new_figure(5.2, 3.4)
    mean = measured.mean.numpy()
    lines: dict[float, str] = {}
    highest = np.nanmax(mean[shown])
    for span in dict.fromkeys(measured.spans[row] for row in shown):
        word, colour, marker = KINDS[span]
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
    axes.set_xlabel("block", fontsize=SIZE)
    axes.set_ylabel("mean attention distance (pixels)", fontsize=SIZE)
    axes.set_ylim(0, 1.12 * max([highest, *lines]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=SIZE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=SIZE - 1, frameon=False, loc="lower right")
    return figure


def block_of(layer: int, scene: Scene) -> str:
    """Name a block by its index for captions: counted from 1, with the option that asks for it."""
    return f"block {layer + 1} of {depth_of(scene)} (--layers {layer})"


def reader(scene: Scene) -> str:
    """Name what the answer is read from, for captions."""
    classed = scene.model.config.pool in ("class", "distilled")
    return "the class token" if classed else "the mean over the patches"
