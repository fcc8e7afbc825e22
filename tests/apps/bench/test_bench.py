"""`vitreous bench`: timing, failing contenders, ratios, logit errors and the report."""

from __future__ import annotations

import importlib.util
import json
from functools import partial

import pytest
import torch
from PIL import Image

from tests.apps.bench.field import (
    build_inexact_step,
    build_steady_step,
    build_step_that_fails_later,
    build_step_with_subprocess,
    build_zero_step,
    exit_on_build,
    raise_on_build,
)
from tests.conftest import parse_json_output, run_cli
from tests.precision import ERROR_LIMITS
from vitreous.apps.bench import race as race_module
from vitreous.apps.bench import report, run
from vitreous.apps.bench.contenders import TASKS, list_contenders, list_limit_contenders
from vitreous.apps.bench.race import ContenderResult, run_race
from vitreous.apps.bench.run import run_benchmarks
from vitreous.apps.bench.work import Contender, LogitsStep, Timing, Workload
from vitreous.errors import DataError, UsageError
from vitreous.system.machine import pick_precision

WORKLOAD = Workload("inference", "ViT-32x1/8", 16, 2)


@pytest.mark.parametrize("device, runs", [("cpu", [1] * 8), ("cuda:0", [1, 2, 4, 1])])
def test_timing_doubles_the_steps_between_gpu_synchronizations(monkeypatch, device, runs):
    """A fake clock: a step takes a second on the CPU; on the GPU, queued steps take their time at synchronization."""
    clock, launched, launched_at_wait = [0.0], [0], []

    def run_step() -> float:
        launched[0] += 1
        return 2.0

    def synchronize(device: str) -> None:
        clock[0] += launched[0]
        launched_at_wait.append(launched[0])
        launched[0] = 0

    monkeypatch.setattr(race_module, "synchronize_device", synchronize)
    monkeypatch.setattr(race_module.time, "perf_counter", lambda: clock[0])
    assert race_module.run_steps_for(7.5, run_step, device) == (16.0, 8.0)
    assert launched_at_wait == runs


CONTENDERS = [
    Contender("vitreous", "default", partial(build_steady_step, rate=300.0), is_ours=True),
    Contender("peer", "default", build_steady_step),
    Contender("peer", "best", partial(build_steady_step, rate=200.0)),
    Contender("parent", "default", build_step_with_subprocess),
    Contender("leaning", "default", build_inexact_step),
    Contender("zero", "default", build_zero_step),
    Contender("broken", "default", raise_on_build),
    Contender("dying", "default", exit_on_build),
    Contender("late", "default", build_step_that_fails_later),
    Contender("absent", "default", build_steady_step, needs="no_such_package"),
]


@pytest.fixture(scope="module")
def race_results():
    return run_race(WORKLOAD, CONTENDERS, Timing(2, 0.05))


def test_a_failed_contender_has_a_reason_and_the_others_continue(race_results):
    assert [lane.contender.label for lane in race_results] == [c.label for c in CONTENDERS[:-1]]
    assert [lane.failure for lane in race_results] == [None] * 6 + [
        "ValueError: nothing here",
        "the process ended",
        "RuntimeError: tired",
    ]
    assert [len(lane.throughputs) for lane in race_results] == [2, 2, 2, 2, 2, 2, 0, 0, 0]
    assert all(lane.memory > 10 * 2**20 for lane in race_results[:3])


@pytest.mark.parametrize(
    "ours, peer, ratio, reason",
    [
        ([300, 310, 305], [100, 101, 99], 305 / 100, None),
        ([3600, 3627, 3700], [60, 100, 360], None, "rounds of peer, default differ by a factor of 6.0"),
        ([103, 105, 107], [90, 100, 110], None,
         "rounds of peer, default differ by a factor of 1.22, more than the contenders"),
    ],
)  # fmt: skip
def test_a_ratio_within_the_round_to_round_variation_is_withheld(ours, peer, ratio, reason):
    lanes = [
        ContenderResult(Contender("vitreous", "default", build_steady_step, is_ours=True), ours),
        ContenderResult(Contender("peer", "default", build_steady_step), peer),
    ]
    race = report.RaceResult(WORKLOAD, lanes, [])
    row = report.race_to_records(race)[0]
    assert (row["ratio"], row["ratio_omitted_reason"]) == (ratio and pytest.approx(ratio), reason)
    assert report.describe_withheld_ratios(race) == ([f"no ratio of vitreous, default: {reason}"] if reason else [])
    assert report.format_race_table(race)[1][0][2] == ("-" if reason else "3.05")
    assert (f"No ratio of vitreous, default: {reason}." in report.render_race_markdown([race], "bench", 3)) == bool(
        reason
    )


def test_ratios_refer_to_the_first_peer_and_to_the_measured_peak(race_results):
    from vitreous.models.names import config_from_name

    limit = [ContenderResult(Contender("peak", "fp32", build_steady_step), [1e9, 1e9])]
    document = report.races_to_json([report.RaceResult(WORKLOAD, race_results, limit)])
    rows = document["results"]
    assert rows[0]["ratio"] == pytest.approx(3.0, rel=0.2) and rows[1]["ratio"] == 1.0
    assert rows[0]["ratio_baseline"] == "peer, default"
    config = config_from_name("ViT-32x1/8", 16)
    # our classifier skips unused outputs
    for row, cost in zip(rows, (config.computed_macs(), config.macs()), strict=False):
        operations = 2 * cost
        assert row["fraction_of_peak"] == pytest.approx(
            row["images_per_second"] * operations / document["peak_throughput"]["fp32"]
        )
    page = report.render_race_markdown([report.RaceResult(WORKLOAD, race_results, limit)], "vitreous bench", 2)
    assert "| vitreous, default |" in page and "failed: ValueError: nothing here" in page and "`vitreous bench`" in page


def test_logit_errors_are_reported_after_the_race(race_results):
    errors = {lane.contender.name: lane.error for lane in race_results}
    assert errors.pop("leaning") == pytest.approx(0.1) and set(errors.values()) == {None}
    race = report.RaceResult(WORKLOAD, race_results, [])
    assert [row["logit_error"] for row in report.races_to_json([race])["results"]].count(None) == len(race_results) - 1
    page = report.render_race_markdown([race], "vitreous bench", 2)
    assert "| logit error |" in page and "| 0.1 |" in page
    without = report.RaceResult(WORKLOAD, [lane for lane in race_results if lane.error is None], [])
    assert "ogit error" not in report.render_race_markdown([without], "vitreous bench", 2)


@pytest.fixture(scope="module")
def photo_folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("photographs")
    for index in range(3):
        Image.new("RGB", (40 + index, 30), (index * 80, 10, 200)).save(home / f"{index}.jpg")
    return str(home)


def get_max_logit_error(contender):
    """Return the relative tolerance of a contender's logits.

    By default our model computes in the precision that the processor multiplies fastest.
    """
    if "int8" in contender.settings:
        return 0.2
    if not contender.is_ours:  # peers also round the residual stream to bfloat16
        return 0.05 if "bf16" in contender.settings else ERROR_LIMITS["fp32"]
    return ERROR_LIMITS["fp32" if "fp32" in contender.settings else pick_precision("auto", "cpu")]


@pytest.mark.parametrize("task", TASKS)
def test_every_installed_contender_runs(task, photo_folder):
    """Except for compiled contenders and OpenVINO, which take minutes to build and are run by the benchmark itself."""
    work = Workload(
        task, "DiT-32x1/8" if task in ("dit", "sample") else "ViT-32x1/8", 16, 2, device="cpu", images=photo_folder
    )
    for contender in list_contenders(task, "cpu"):
        slow = "compiled" in contender.settings or "openvino" in contender.label
        if not slow and importlib.util.find_spec(contender.needs):
            step = contender.build(work)
            assert step() > 0, contender.label
            if isinstance(step, LogitsStep):
                assert (step.error() or 0.0) < get_max_logit_error(contender), contender.label


def test_peak_throughput_is_computed_from_counted_operations():
    for contender in list_limit_contenders("train", "cpu"):
        assert contender.build(WORKLOAD)() in (2 * 2048**3, torch.get_num_threads() * 2 * 2048**3)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"tasks": ["flight"]}, UsageError, "unknown task flight"),
        ({"tasks": ["predict"]}, UsageError, "--images"),
        ({"tasks": ["loader"], "images": "nowhere"}, DataError, "no images in nowhere"),
        ({"only": ["nobody"]}, UsageError, "no contender matches nobody"),
        ({"timing": Timing(rounds=0)}, UsageError, "at least 1"),
        ({"image_size": 17}, UsageError, "not divisible by patch size 16"),
        ({"models": ["ViT-X/16"]}, UsageError, "unknown model"),
        ({"tasks": ["dit"]}, UsageError, "ViT-S/16 is not generative"),
        ({"models": ["DiT-S/2"]}, UsageError, "the task inference cannot be measured: DiT-S/2 is generative"),
    ],
)
def test_unsupported_benchmark_options_are_rejected(options, error, message):
    with pytest.raises(error) as raised:
        run_benchmarks(**options)
    assert message in f"{raised.value.message} {raised.value.hint}"


def test_bench_prints_json_and_writes_a_page(tmp_path, monkeypatch):
    # one process less
    monkeypatch.setattr(run, "list_limit_contenders", lambda task, device: list_limit_contenders(task, device)[:1])
    arguments = [
        "--models",
        "ViT-32x1/8",
        "--image-size",
        "16",
        "--batch-sizes",
        "2",
        "--rounds",
        "1",
        "--seconds",
        "0.05",
        "--tasks",
        "inference",
        "--profile",
    ]
    result = run_cli(
        "bench", *arguments, "--seconds", "0.05", "--only", "vitreous, fp32", "--out", str(tmp_path), "--json"
    )
    document = parse_json_output(result)
    assert [row["task"] for row in document["results"]] == ["inference"]
    keys = {
        "task",
        "model",
        "image_size",
        "batch_size",
        "contender",
        "settings",
        "images_per_second",
        "fraction_of_peak",
        "peak_memory_bytes",
    }
    assert all({*keys, "peak_memory_bytes"} <= set(row) and row["images_per_second"] > 0 for row in document["results"])
    assert document["peak_throughput"]["fp32"] > 1e9
    (page,) = tmp_path.iterdir()
    assert page.name.endswith("threads.md") and "inference" in page.name
    assert "vitreous bench --models" in page.read_text()
    assert sum(document["results"][0]["profile"]["shares"].values()) == pytest.approx(1)
    assert "| outside operators | " in page.read_text()
    json.dumps(document)
