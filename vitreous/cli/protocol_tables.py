"""Tables of the protocols of `vitreous evaluate` on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from vitreous.cli.console import format_interval_suffix, format_percentage
from vitreous.tasks.metrics import METRICS

MAX_LISTED_HEADS = 5  # heads of a published probe that are listed
#: protocol -> key of its results by which the rows of the table are labelled
PROTOCOL_SETTING_KEYS = {"knn": "k", "linear": "l2", "real": "images", "objectnet": "candidate_classes"}


def format_protocol_table(protocol: str, results: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return header and rows of a protocol's table: one row per task of vtab, per number of shots, or per setting."""
    if protocol == "vtab":
        cells = [
            [
                result["task"],
                result["group"],
                format_share_with_interval(result, "top1"),
                result["images"],
                f"{result['l2']:.2g}",
            ]
            for result in results
        ]
        return ["task", "group", "top-1", "images", "l2"], cells
    if protocol == "fewshot":
        return ["shots", "top-1", "std", "of each draw"], [
            [
                result["shots"],
                format_percentage(result["top1"]),
                None if result["std"] is None else f"{result['std'] * 100:.1f}",
                " ".join(format_percentage(draw["top1"]) for draw in result["per_seed"]),
            ]
            for result in results
        ]
    if protocol == "heads":
        return format_heads_table(results)
    if protocol == "retrieval":
        depths = list(results[0]["interval"])  # r1, r5, r10
        cells = [
            [result["direction"], *(format_share_with_interval(result, depth) for depth in depths)]
            for result in results
        ]
        return ["direction", *(depth.replace("r", "R@") for depth in depths)], cells
    names = (
        ["map", "macro_f1"] if "map" in results[0] else ["top1", "top5"] if results[0]["top5"] is not None else ["top1"]
    )
    key = "probe" if "probe" in results[0] else PROTOCOL_SETTING_KEYS[protocol]
    settings = [f"{result[key]:.3g}" if isinstance(result[key], float) else result[key] for result in results]
    cells = [
        [value, *(format_share_with_interval(result, name) for name in names)]
        for value, result in zip(settings, results, strict=True)
    ]
    return ["classes" if key == "candidate_classes" else key, *(METRICS[name].label for name in names)], cells


def format_heads_table(results: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return header and rows of the table of heads: chosen settings, the metric on held-out training images, the metric
    with its interval, and the duration of the fit."""
    name = results[0]["primary"]
    cells = [
        [
            result["head"],
            ", ".join(format_head_setting(key, value) for key, value in result["settings"].items()),
            None if result["val"] is None else format_percentage(result["val"]),
            format_share_with_interval(result, name),
            f"{result['seconds']:.1f}",
        ]
        for result in results
    ]
    return ["head", "settings", "held out", METRICS[name].label, "seconds"], cells


def format_head_setting(name: str, value: Any) -> str:
    """Format a setting of a head, such as `lr 0.001`."""
    return (
        f"{name.replace('_', ' ')} {value:g}"
        if not isinstance(value, bool)
        else f"{'' if value else 'no '}{name.replace('_', ' ')}"
    )


def format_heads_lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines below the table of heads: the best head, and the durations."""
    yield (
        f"best on {document['held_out_images']} held-out training images: {document['selected']}; "
        f"encoding {document['encoding_seconds']:.1f} s, heads {sum(r['seconds'] for r in document['results']):.1f} s"
    )


def format_share_with_interval(result: dict[str, Any], name: str) -> str:
    """Format a metric that is a fraction as a percentage, with its confidence interval."""
    return format_percentage(result[name]) + format_interval_suffix(result["interval"].get(name))


def format_vtab_lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines below the table of vtab: the means of the task groups, missing tasks, and skipped tasks."""
    yield "  ".join(
        f"{group} {format_percentage(document[group])}" for group in ("natural", "specialized", "structured", "mean")
    )
    if document["missing"]:
        yield f"missing: {', '.join(document['missing'])}"
    for name, reason in document["failed"].items():
        yield f"{name} was skipped: {reason}"


def format_probe_lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines below the table of a published probe: its training, the selected head, and the best heads."""
    if (selection := document.get("selection")) is None:
        return
    yield (
        f"{document['steps']:,} steps of {document['batch_size']:,} images; head: "
        f"{format_probe_candidate(selection['selected'])}"
    )
    candidates = selection["candidates"]
    if len(candidates) > 1:
        yield f"selected from {len(candidates)} heads on {selection['images']} validation images; the best heads:"
        best = sorted(
            candidates, key=lambda candidate: -1.0 if candidate["val"] is None else candidate["val"], reverse=True
        )
        yield from (f"  {format_probe_candidate(candidate)}" for candidate in best[:MAX_LISTED_HEADS])


def format_probe_candidate(candidate: dict[str, Any]) -> str:
    """Format a head of a published probe: learning rate, input features, and top-1 on validation images."""
    blocks = {0: "the model's own features", 1: "class token"}.get(
        candidate["blocks"], f"{candidate['blocks']} class tokens"
    )
    score = "" if candidate["val"] is None else f", val {format_percentage(candidate['val'])}"
    return f"lr {candidate['lr']:.3g}, {blocks}{' and mean patch' if candidate['mean_patch'] else ''}{score}"


#: protocol -> function that yields the lines below its table
PROTOCOL_LINES: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {
    "vtab": format_vtab_lines,
    "linear": format_probe_lines,
    "heads": format_heads_lines,
}
