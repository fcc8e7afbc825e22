"""From a race to a document and to a page."""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vitreous.bench.race import Lane
from vitreous.bench.work import DECODING, Work
from vitreous.machine import best_feature, processor
from vitreous.models.cost import computed, macs
from vitreous.models.names import configure

# forward passes' worth of products that an image costs
PASSES = {"inference": 1, "predict": 1, "train": 3, "loader": 0, "memory": 0}
PACKAGES = (
    "torch",
    "timm",
    "transformers",
    "torchvision",
    "onnxruntime",
    "openvino",
    "nncf",
    "pillow",
    "simplejpeg",
    "webdataset",
    "datasets",
)


@dataclass(frozen=True)
class Race:
    """A piece of work and its lanes: contenders, and the peaks that ran among them."""

    work: Work
    lanes: list[Lane]
    peaks: list[Lane]

    def base(self) -> Lane | None:
        """What ratios are to: the first peer's default, else our own default."""
        able = [lane for lane in self.lanes if lane.rates]
        return next((lane for lane in able if not lane.contender.ours), able[0] if able else None)

    def fraction(self, lane: Lane) -> float | None:
        """Of the highest peak measured in the same race, in products, or in images where the work has none; None
        without a peak."""
        limit = max((peak.median for peak in self.peaks if peak.rates), default=0.0)
        passes = PASSES[self.work.task]
        if not limit:
            return None
        if not passes:
            return lane.median / limit
        cost = computed if lane.contender.ours else macs  # nobody else leaves out what of the last block is not read
        return lane.median * passes * 2 * cost(configure(self.work.model, self.work.image_size)) / limit


def document(races: list[Race]) -> dict[str, Any]:
    """The `--json` document: rates are medians; peaks in operations a second, the median over all races."""
    peaks: dict[str, list[float]] = {}
    for race in races:
        for lane in race.peaks:
            peaks.setdefault(lane.contender.settings, []).extend(lane.rates)
    medians = {name: statistics.median(rates) for name, rates in peaks.items() if rates}
    return {
        "hardware": hardware(),
        "packages": packages(),
        "peak": medians,
        "rows": [row for race in races for row in rows(race)],
    }


def rows(race: Race) -> list[dict[str, Any]]:
    """One row a contender; one that failed has its reason and no figures."""
    base, table = race.base(), []
    for lane in race.lanes:
        row: dict[str, Any] = {
            "task": race.work.task,
            "model": race.work.model,
            "image_size": race.work.image_size,
            "batch_size": race.work.batch_size,
            "contender": lane.contender.name,
            "settings": lane.contender.settings,
            "images_per_second": lane.median if lane.rates else None,
            "spread": [min(lane.rates), max(lane.rates)] if lane.rates else None,
            "ratio": lane.median / base.median if lane.rates and base else None,
            "ratio_to": base.contender.label if base else None,
            "fraction_of_peak": race.fraction(lane) if lane.rates else None,
            "peak_memory_bytes": lane.memory if lane.rates else None,
            "logit_error": lane.error,
            "seconds_to_build": lane.ready,
            "seconds_of_first_turn": lane.first,
            "failure": lane.failure,
        }
        table.append(row)
    return table


HEAD = ["contender", "images/s (lowest to highest)", "ratio", "of peak", "peak MiB", "build + first turn, s"]


def cells(row: dict[str, Any]) -> list[str]:
    """A row for people."""
    label = f"{row['contender']}, {row['settings']}"
    if row["failure"]:
        return [label, f"failed: {row['failure'][:40]}", "", "", "", ""]
    low, high = row["spread"]
    fraction = "" if row["fraction_of_peak"] is None else f"{row['fraction_of_peak']:.0%}"
    rate = f"{row['images_per_second']:.1f} ({low:.1f} to {high:.1f})"
    build = f"{row['seconds_to_build']:.1f} + {row['seconds_of_first_turn']:.1f}"
    return [label, rate, f"{row['ratio']:.2f}", fraction, f"{row['peak_memory_bytes'] / 2**20:.0f}", build]


def table(race: Race) -> tuple[list[str], list[list[str]]]:
    """Head and rows for people, with errors of logits where there are any."""
    table = rows(race)
    if all(row["logit_error"] is None for row in table):
        return HEAD, [cells(row) for row in table]
    errors = ["" if row["logit_error"] is None else f"{row['logit_error']:.1g}" for row in table]
    return [*HEAD, "logit error"], [[*cells(row), error] for row, error in zip(table, errors, strict=True)]


def peak_text(peaks: dict[str, float]) -> str:
    """The peaks in a sentence: products, or what decodes alone; an empty string without any."""
    products = [f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in peaks.items() if name != DECODING]
    sentences = [f"Product peak: {', '.join(products)}."] if products else []
    return " ".join(sentences + ([f"Peak: {DECODING}, {peaks[DECODING]:.0f} images/s."] if DECODING in peaks else []))


def markdown(races: list[Race], command: str, rounds: int) -> str:
    """The page that `--out` writes."""
    facts = document(races)
    tasks = ", ".join(dict.fromkeys(race.work.task for race in races))
    lines = [
        f"# {tasks.capitalize()}, {time.strftime('%Y-%m-%d')}",
        "",
        f"{facts['hardware']}; {facts['packages']}.",
        "",
    ]
    lines += [
        f"`{command}`",
        "",
        " ".join(
            filter(
                None,
                [
                    f"Medians of {rounds} rounds in turn, every contender in a process of its own.",
                    peak_text(facts["peak"]),
                ],
            )
        ),
        "",
    ]
    if any(lane.error is not None for race in races for lane in race.lanes):
        lines += [
            (
                "Logit error: to the same random weights and images in float32 by PyTorch, length of the difference to "
                "length."
            ),
            "",
        ]
    for race in races:
        base = race.base()
        lines += [
            f"## {race.work.title()}",
            "",
            f"Ratios are to {base.contender.label}." if base else "Nobody could.",
            "",
        ]
        head, body = table(race)
        lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += ["| " + " | ".join(row) + " |" for row in body] + [""]
    return "\n".join(lines)


def hardware() -> str:
    """The processor, its best unit, and the cores in use."""
    import torch

    cards = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(
        filter(None, [processor(), best_feature().replace("_", "-"), f"{torch.get_num_threads()} threads", *cards])
    )


def packages() -> str:
    """The versions of everything that may have taken part."""
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(versions)


def file_name(races: list[Race]) -> str:
    """`2026-11-21-inference-amd-epyc-avx2-2-threads.md`."""
    tasks = "-".join(dict.fromkeys(race.work.task for race in races))
    words = re.sub(r"[^a-z0-9]+", "-", hardware().lower()).strip("-")
    return f"{time.strftime('%Y-%m-%d')}-{tasks}-{words}.md"
