"""The verb `vitreous bench`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from vitreous.cli.console import Console


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the speed of vitreous and of other installed libraries on this machine, in alternating rounds.

    Example: vitreous bench --tasks inference train --models ViT-Ti/16 ViT-S/16 --batch-sizes 1 16
    """

    tasks: tuple[Literal["inference", "train", "mae", "dino", "dit", "sample", "loader", "memory", "predict"], ...] = (
        "inference",
        "train",
    )
    """What to measure; loader and predict need --images, memory generates images of CIFAR size."""
    models: tuple[str, ...] = ("ViT-S/16",)
    """Models, randomly initialised."""
    batch_sizes: tuple[int, ...] = (16,)
    """Images per forward pass or step."""
    image_size: int | None = None
    """Image size in pixels (default: the model's)."""
    images: str | None = None
    """Folder of photographs."""
    only: tuple[str, ...] = ("*",)
    """Contenders to run, by the start of their names, with * and ?: vitreous, 'timm, default'."""
    rounds: int = 5
    """Measured rounds, after one warm-up round."""
    seconds: float = 1.0
    """Minimum seconds per contender and round."""
    profile: bool = False
    """After the rounds, record the share of time per operation: matrix products, norms, copies and so on (CPU only)."""
    out: str | None = None
    """Folder for a dated page with the hardware in its name."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    seed: int = 0
    """No effect: weights and images are always the same."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Run the benchmark, print a table per task, and write the page of --out. Raises ResourceError if it cannot be
    written."""
    import shlex
    import sys
    from pathlib import Path

    from vitreous.apps.bench import report
    from vitreous.apps.bench.run import run_benchmarks
    from vitreous.apps.bench.work import Timing
    from vitreous.errors import ResourceError
    from vitreous.system.disk import write_text_atomic

    o = options
    workload_options = (o.tasks, o.models, o.batch_sizes, o.image_size, o.images, o.only)
    races = run_benchmarks(*workload_options, Timing(o.rounds, o.seconds, o.profile), o.device, console.progress)
    document = report.races_to_json(races)
    if options.out:
        page_path = Path(options.out) / report.make_report_name(races)
        try:
            page_path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomic(
                page_path, report.render_race_markdown(races, shlex.join(["vitreous", *sys.argv[1:]]), options.rounds)
            )
        except OSError as error:
            raise ResourceError(f"cannot write {page_path}: {error.strerror}") from None
    console.print_line(document["hardware"])
    console.print_line(report.format_peaks(document["peak_throughput"]))
    for race in races:
        console.print_line()
        header, rows = report.format_race_table(race)
        console.table([race.workload.title(), *header[1:]], rows)
        for line in report.describe_withheld_ratios(race):
            console.print_line(line)
        if options.profile:
            console.print_line()
            console.table(*report.format_profile_table(race))
    if options.out:
        console.note(f"written to {Path(options.out) / report.make_report_name(races)}")
    return document
