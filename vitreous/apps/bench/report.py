"""Reports of races: the JSON document, the printed tables, and the Markdown page."""

from __future__ import annotations

import re
import statistics
import textwrap
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

# compute of a task per image, in forward passes
FORWARD_PASSES_PER_IMAGE = {
    "inference": 1,
    "predict": 1,
    "train": 3,
    "dit": 3,
    "sample": 2 * SAMPLING_STEPS,
    "loader": 0,
    "memory": 0,
}
PAGE_WIDTH = 120  # characters of a line of prose
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
    """Results of one workload: `results` of the contenders, and `peaks` of the contenders that measure the machine's
    limit."""

    workload: Workload
    results: list[ContenderResult]
    peaks: list[ContenderResult]

    def get_baseline(self) -> ContenderResult | None:
        """Return the result that ratios are relative to: the first measured contender of another library, else the
        first of vitreous; None if all failed."""
        measured_results = [result for result in self.results if result.throughputs]
        return next(
            (result for result in measured_results if not result.contender.is_ours),
            measured_results[0] if measured_results else None,
        )

    def compute_fraction_of_peak(self, result: ContenderResult) -> float | None:
        """Return a contender's throughput as a fraction of the machine's measured peak: matmul FLOP/s, for loaders
        images/s. None if no peak was measured."""
        peak_throughput = max((peak.median for peak in self.peaks if peak.throughputs), default=0.0)
        if not peak_throughput:
            return None
        if self.workload.task in PRETRAINING_CONFIGS:
            return result.median * count_sample_flops(self.workload) / peak_throughput
        passes = FORWARD_PASSES_PER_IMAGE[self.workload.task]
        if not passes:
            return result.median / peak_throughput
        config = config_from_name(self.workload.model, self.workload.image_size)
        # only vitreous skips the unused part of the last block
        cost = config.computed_macs() if result.contender.is_ours else config.macs()
        return result.median * passes * 2 * cost / peak_throughput


def races_to_json(races: list[RaceResult]) -> dict[str, Any]:
    """Return the `--json` document. Throughputs are medians; each peak is the median over all races, in operations per
    second."""
    peaks: dict[str, list[float]] = {}
    for race in races:
        for result in race.peaks:
            peaks.setdefault(result.contender.settings, []).extend(result.throughputs)
    medians = {name: statistics.median(rates) for name, rates in peaks.items() if rates}
    return {
        "hardware": describe_hardware(),
        "packages": describe_packages(),
        "peak_throughput": medians,
        "results": [record for race in races for record in race_to_records(race)],
    }


def race_to_records(race: RaceResult) -> list[dict[str, Any]]:
    """Return one JSON record per contender. The record of a failed contender has `failure` and no metrics."""
    base, workload = race.get_baseline(), race.workload
    shared = {
        "task": workload.task,
        "model": workload.model,
        "image_size": workload.image_size,
        "batch_size": workload.batch_size,
    }
    return [
        shared
        | {
            "contender": result.contender.name,
            "settings": result.contender.settings,
            "images_per_second": result.median if result.throughputs else None,
            "images_per_second_range": [min(result.throughputs), max(result.throughputs)]
            if result.throughputs
            else None,
            "ratio": compute_throughput_ratio(result, base)[0],
            "ratio_omitted_reason": compute_throughput_ratio(result, base)[1],
            "ratio_baseline": base.contender.label if base else None,
            "fraction_of_peak": race.compute_fraction_of_peak(result) if result.throughputs else None,
            "peak_memory_bytes": result.memory if result.throughputs else None,
            "logit_error": result.error,
            "build_seconds": result.build_seconds,
            "first_call_seconds": result.warmup_seconds,
            "profile": asdict(result.profile) if result.profile else None,
            "failure": result.failure,
        }
        for result in race.results
    ]


def compute_throughput_ratio(result: ContenderResult, base: ContenderResult | None) -> tuple[float | None, str | None]:
    """Return the ratio of two median throughputs, or None and the reason for omitting it. The ratio is omitted if the
    rounds of one contender differ by more than `MAX_SPREAD`, or by more than the two contenders differ."""
    if base is None or not result.throughputs or not base.throughputs:
        return None, None
    if result is base:
        return 1.0, None
    ratio = result.median / base.median
    spread, noisiest_label = max(
        (max(compared.throughputs) / min(compared.throughputs), compared.contender.label) for compared in (result, base)
    )
    if spread > MAX_SPREAD:
        return None, f"rounds of {noisiest_label} differ by a factor of {spread:.1f}"
    if spread > max(ratio, 1 / ratio):
        return None, f"rounds of {noisiest_label} differ by a factor of {spread:.2f}, more than the contenders"
    return ratio, None


def describe_withheld_ratios(race: RaceResult) -> list[str]:
    """List the omitted ratios with their reasons, one line each."""
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
    """Format a JSON record as the cells of a row of the printed table."""
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
    """Return header and body of the printed table, with logit errors if measured."""
    table = race_to_records(race)
    if all(record["logit_error"] is None for record in table):
        return TABLE_COLUMNS, [format_record(record) for record in table]
    errors = ["" if record["logit_error"] is None else f"{record['logit_error']:.1g}" for record in table]
    return [*TABLE_COLUMNS, "logit error"], [
        [*format_record(record), error] for record, error in zip(table, errors, strict=True)
    ]


def format_profile_table(race: RaceResult) -> tuple[list[str], list[list[str]]]:
    """Return header and body of the profile table: shares of the time of all cores, one column per profiled contender.

    The last row is the throughput of matrix products as a fraction of the matmul peak.
    """
    profiled_results = [(result, result.profile) for result in race.results if result.profile]
    body = [[name, *(f"{profile.shares[name]:.1%}" for _, profile in profiled_results)] for name in OPERATOR_GROUPS]
    peak_fractions = []
    for result, profile in profiled_results:
        fraction, share = race.compute_fraction_of_peak(result), profile.shares["products"]
        peak_fractions.append(f"{fraction / share:.0%}" if fraction and share else "")
    return ["time", *(result.contender.label for result, _ in profiled_results)], [
        *body,
        ["products, share of peak", *peak_fractions],
    ]


def format_peaks(peaks: dict[str, float]) -> str:
    """Format the measured peaks as sentences; an empty string if there are none."""
    matmul_peaks = [
        f"{name} {throughput / 1e9:.0f} GFLOP/s" for name, throughput in peaks.items() if name != DECODE_LIMIT
    ]
    sentences = [f"Matmul peak: {', '.join(matmul_peaks)}."] if matmul_peaks else []
    return " ".join(
        sentences + ([f"Peak of {DECODE_LIMIT}: {peaks[DECODE_LIMIT]:.0f} images/s."] if DECODE_LIMIT in peaks else [])
    )


def render_race_markdown(races: list[RaceResult], command: str, rounds: int) -> str:
    """Render the Markdown page that `--out` saves."""
    document = races_to_json(races)
    tasks = ", ".join(dict.fromkeys(race.workload.task for race in races))
    peaks = format_peaks(document["peak_throughput"])
    medians = f"Medians of {rounds} alternating rounds, every contender in a separate process. {peaks}"
    lines = [
        f"# {tasks.capitalize()}, {time.strftime('%Y-%m-%d')}",
        "",
        f"{document['hardware']}; {document['packages']}.",
        "",
    ]
    lines += [f"`{command}`", "", medians.rstrip(), ""]
    if any(result.error is not None for race in races for result in race.results):
        lines += ["Logit error: relative L2 error to PyTorch in float32, with the same random weights and images.", ""]
    for race in races:
        base, (head, body) = race.get_baseline(), format_race_table(race)
        ratios = f"Ratios are relative to {base.contender.label}." if base else "No contender could run."
        lines += [
            f"## {race.workload.title()}",
            "",
            ratios,
            "",
            "| " + " | ".join(head) + " |",
            "|" + "---|" * len(head),
        ]
        lines += ["| " + " | ".join(row) + " |" for row in body] + [""]
        for line in describe_withheld_ratios(race):
            lines += [textwrap.fill(f"{line[:1].upper()}{line[1:]}.", PAGE_WIDTH, break_on_hyphens=False), ""]
        if any(result.profile for result in race.results):
            head, body = format_profile_table(race)
            lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
            lines += ["| " + " | ".join(row) + " |" for row in body] + [""]
    return "\n".join(lines)


def describe_hardware() -> str:
    """Return one line: the processor, its most capable instruction set extension, the number of PyTorch threads, and
    the GPUs."""
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
    """Return one line with the versions of the installed packages that contenders use."""
    versions = {name: find_installed_version(name) for name in REPORTED_PACKAGES}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def make_report_name(races: list[RaceResult]) -> str:
    """Return a file name for the page, such as `2026-11-21-inference-amd-epyc-avx2-2-threads.md`."""
    tasks = "-".join(dict.fromkeys(race.workload.task for race in races))
    hardware_slug = re.sub(r"[^a-z0-9]+", "-", describe_hardware().lower()).strip("-")
    return f"{time.strftime('%Y-%m-%d')}-{tasks}-{hardware_slug}.md"
