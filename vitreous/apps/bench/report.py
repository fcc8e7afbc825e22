"""The document and the page of races."""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from vitreous.apps.bench.generating import SAMPLING_STEPS
from vitreous.apps.bench.pretraining import PRETRAINING_CONFIGS, count_sample_flops
from vitreous.apps.bench.profile import OPERATOR_GROUPS
from vitreous.apps.bench.race import ContenderResult
from vitreous.apps.bench.work import DECODE_LIMIT, Workload
from vitreous.inference.graph_cache import find_installed_version
from vitreous.models.names import config_from_name
from vitreous.system.machine import get_best_cpu_feature, get_processor_name

# cost of an image in forward passes
FORWARD_PASSES_PER_IMAGE = {
    "inference": 1,
    "predict": 1,
    "train": 3,
    "dit": 3,
    "sample": 2 * SAMPLING_STEPS,
    "loader": 0,
    "memory": 0,
}
MAX_SPREAD = 2.0  # ratio of a contender's fastest to its slowest round above which no ratio is printed
REPORTED_PACKAGES = (
    "torch",
    "timm",
    "transformers",
    "torchvision",
    "diffusers",
    "lightly",
    "onnxruntime",
    "openvino",
    "nncf",
)
REPORTED_PACKAGES += ("pillow", "simplejpeg", "webdataset", "datasets")


@dataclass(frozen=True)
class RaceResult:
    """A workload with the results of its contenders, and of the peak measurements."""

    workload: Workload
    lanes: list[ContenderResult]
    peaks: list[ContenderResult]

    def get_baseline(self) -> ContenderResult | None:
        """Return the baseline of ratios: the first peer's default, else our default."""
        measured_lanes = [lane for lane in self.lanes if lane.throughputs]
        return next(
            (lane for lane in measured_lanes if not lane.contender.is_ours),
            measured_lanes[0] if measured_lanes else None,
        )

    def fraction(self, lane: ContenderResult) -> float | None:
        """Return a contender's throughput as a fraction of the highest peak of the race: in FLOP/s of matmuls, for
        loaders in images/s; None without a peak."""
        limit = max((peak.median for peak in self.peaks if peak.throughputs), default=0.0)
        if not limit:
            return None
        if self.workload.task in PRETRAINING_CONFIGS:
            return lane.median * count_sample_flops(self.workload) / limit
        passes = FORWARD_PASSES_PER_IMAGE[self.workload.task]
        if not passes:
            return lane.median / limit
        config = config_from_name(self.workload.model, self.workload.image_size)
        # only vitreous skips the unused part of the last block
        cost = config.computed_macs() if lane.contender.is_ours else config.macs()
        return lane.median * passes * 2 * cost / limit


def races_to_json(races: list[RaceResult]) -> dict[str, Any]:
    """Return the `--json` document: rates are medians; peaks in operations per second, the median over all races."""
    peaks: dict[str, list[float]] = {}
    for race in races:
        for lane in race.peaks:
            peaks.setdefault(lane.contender.settings, []).extend(lane.throughputs)
    medians = {name: statistics.median(rates) for name, rates in peaks.items() if rates}
    return {
        "hardware": describe_hardware(),
        "packages": describe_packages(),
        "peak_throughput": medians,
        "results": [record for race in races for record in race_to_records(race)],
    }


def race_to_records(race: RaceResult) -> list[dict[str, Any]]:
    """Return a row for each contender; a failed one has its reason and no metrics."""
    base, work = race.get_baseline(), race.workload
    shared = {"task": work.task, "model": work.model, "image_size": work.image_size, "batch_size": work.batch_size}
    return [
        shared
        | {
            "contender": lane.contender.name,
            "settings": lane.contender.settings,
            "images_per_second": lane.median if lane.throughputs else None,
            "images_per_second_range": [min(lane.throughputs), max(lane.throughputs)] if lane.throughputs else None,
            "ratio": compute_throughput_ratio(lane, base)[0],
            "ratio_omitted_reason": compute_throughput_ratio(lane, base)[1],
            "ratio_baseline": base.contender.label if base else None,
            "fraction_of_peak": race.fraction(lane) if lane.throughputs else None,
            "peak_memory_bytes": lane.memory if lane.throughputs else None,
            "logit_error": lane.error,
            "build_seconds": lane.build_seconds,
            "first_call_seconds": lane.warmup_seconds,
            "profile": asdict(lane.profile) if lane.profile else None,
            "failure": lane.failure,
        }
        for lane in race.lanes
    ]


def compute_throughput_ratio(lane: ContenderResult, base: ContenderResult | None) -> tuple[float | None, str | None]:
    """Return the ratio of two medians, or None and the reason for withholding it: the rounds of one contender differ by
    more than MAX_SPREAD, or by more than the contenders differ."""
    if base is None or not lane.throughputs or not base.throughputs:
        return None, None
    if lane is base:
        return 1.0, None
    ratio = lane.median / base.median
    spread, noisiest_label = max(
        (max(result.throughputs) / min(result.throughputs), result.contender.label) for result in (lane, base)
    )
    if spread > MAX_SPREAD:
        return None, f"rounds of {noisiest_label} differ by a factor of {spread:.1f}"
    if spread > max(ratio, 1 / ratio):
        return None, f"rounds of {noisiest_label} differ by a factor of {spread:.2f}, more than the contenders"
    return ratio, None


def describe_withheld_ratios(race: RaceResult) -> list[str]:
    """List withheld ratios with their reasons, one line each."""
    return [
        f"no ratio of {record['contender']}, {record['settings']}: {record['ratio_omitted_reason']}"
        for record in race_to_records(race)
        if record["ratio_omitted_reason"]
    ]


TABLE_COLUMNS = [
    "contender",
    "images/s (lowest to highest)",
    "ratio",
    "share of peak",
    "peak MiB",
    "build + first step, s",
]


def format_record(record: dict[str, Any]) -> list[str]:
    """Format a row of the printed table."""
    label = f"{record['contender']}, {record['settings']}"
    if record["failure"]:
        return [label, f"failed: {record['failure'][:40]}", "", "", "", ""]
    low, high = record["images_per_second_range"]
    fraction = "" if record["fraction_of_peak"] is None else f"{record['fraction_of_peak']:.0%}"
    throughput = f"{record['images_per_second']:.1f} ({low:.1f} to {high:.1f})"
    build = f"{record['build_seconds']:.1f} + {record['first_call_seconds']:.1f}"
    ratio = "-" if record["ratio"] is None else f"{record['ratio']:.2f}"
    return [label, throughput, ratio, fraction, f"{record['peak_memory_bytes'] / 2**20:.0f}", build]


def format_race_table(race: RaceResult) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the printed table, with logit errors if measured."""
    table = race_to_records(race)
    if all(record["logit_error"] is None for record in table):
        return TABLE_COLUMNS, [format_record(record) for record in table]
    errors = ["" if record["logit_error"] is None else f"{record['logit_error']:.1g}" for record in table]
    return [*TABLE_COLUMNS, "logit error"], [
        [*format_record(record), error] for record, error in zip(table, errors, strict=True)
    ]


def format_profile_table(race: RaceResult) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the profile: shares of the time of all cores, one column per profiled contender.

    The last row is the share of the peak that matrix products reach.
    """
    lanes = [(lane, lane.profile) for lane in race.lanes if lane.profile]
    body = [[name, *(f"{profile.shares[name]:.1%}" for _, profile in lanes)] for name in OPERATOR_GROUPS]
    peak_fractions = []
    for lane, profile in lanes:
        fraction, share = race.fraction(lane), profile.shares["products"]
        peak_fractions.append(f"{fraction / share:.0%}" if fraction and share else "")
    return ["time", *(lane.contender.label for lane, _ in lanes)], [*body, ["products, share of peak", *peak_fractions]]


def format_peaks(peaks: dict[str, float]) -> str:
    """Format the peaks as sentences; an empty string without any."""
    products = [f"{name} {throughput / 1e9:.0f} GFLOP/s" for name, throughput in peaks.items() if name != DECODE_LIMIT]
    sentences = [f"Product peak: {', '.join(products)}."] if products else []
    return " ".join(
        sentences + ([f"Peak: {DECODE_LIMIT}, {peaks[DECODE_LIMIT]:.0f} images/s."] if DECODE_LIMIT in peaks else [])
    )


def render_race_markdown(races: list[RaceResult], command: str, rounds: int) -> str:
    """Render the page for `--out`."""
    facts = races_to_json(races)
    tasks = ", ".join(dict.fromkeys(race.workload.task for race in races))
    peaks = format_peaks(facts["peak_throughput"])
    medians = f"Medians of {rounds} alternating rounds, every contender in a separate process. {peaks}"
    lines = [
        f"# {tasks.capitalize()}, {time.strftime('%Y-%m-%d')}",
        "",
        f"{facts['hardware']}; {facts['packages']}.",
        "",
    ]
    lines += [f"`{command}`", "", medians.rstrip(), ""]
    if any(lane.error is not None for race in races for lane in race.lanes):
        lines += ["Logit error: relative L2 error to PyTorch in float32, with the same random weights and images.", ""]
    for race in races:
        base, (head, body) = race.get_baseline(), format_race_table(race)
        ratios = f"Ratios are to {base.contender.label}." if base else "No contender could run."
        lines += [
            f"## {race.workload.title()}",
            "",
            ratios,
            "",
            "| " + " | ".join(head) + " |",
            "|" + "---|" * len(head),
        ]
        lines += ["| " + " | ".join(row) + " |" for row in body] + [""]
        lines += [f"{line[:1].upper()}{line[1:]}.\n" for line in describe_withheld_ratios(race)]
        if any(lane.profile for lane in race.lanes):
            head, body = format_profile_table(race)
            lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
            lines += ["| " + " | ".join(row) + " |" for row in body] + [""]
    return "\n".join(lines)


def describe_hardware() -> str:
    """Return the processor, its best unit, and the cores in use."""
    import torch

    cards = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    descriptions = (
        get_processor_name(),
        get_best_cpu_feature().replace("_", "-"),
        f"{torch.get_num_threads()} threads",
        *cards,
    )
    return ", ".join(filter(None, descriptions))


def describe_packages() -> str:
    """Return the versions of the installed packages that may take part."""
    versions = {name: find_installed_version(name) for name in REPORTED_PACKAGES}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def make_report_name(races: list[RaceResult]) -> str:
    """Return a name such as `2026-11-21-inference-amd-epyc-avx2-2-threads.md`."""
    tasks = "-".join(dict.fromkeys(race.workload.task for race in races))
    hardware_slug = re.sub(r"[^a-z0-9]+", "-", describe_hardware().lower()).strip("-")
    return f"{time.strftime('%Y-%m-%d')}-{tasks}-{hardware_slug}.md"
