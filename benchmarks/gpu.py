"""Measure one GPU in nine minutes: tests, training steps, inference, objectives, the training loop, CIFAR-10.

    bash benchmarks/gpu.sh OUT                            on a machine with a GPU
    python benchmarks/gpu.py OUT --device cpu --tiny      the same code in minutes, without a GPU

Sections run in order of importance, each in a separate process with a time limit. Every result is appended to
OUT/rows.jsonl immediately, and OUT/gpu.md is rewritten after each section, so that an interrupted run keeps its
results. While the tests run, other processes compile kernels into a cache, which the timed processes use.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ET
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: time limit of each section in seconds, in the order in which they run
SECTION_SECONDS = {
    "tests": 120,
    "training": 95,
    "inference": 45,
    "objectives": 95,
    "loop": 75,
    "limits": 25,
    "cifar": 200,
}
NUM_WARMUP_PROCESSES = 6  # processes that compile kernels while the tests run
NUM_WINDOWS, WINDOW_SECONDS = 3, 0.4  # time windows per case, whose median throughput is reported, and their seconds


def main() -> None:
    """Run the sections; or, as a child process, one section or the compilation of kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="small models and sizes, to test the script")
    parser.add_argument("--seconds", type=float, default=540.0, help="time limit of all sections together")
    parser.add_argument("--sections", nargs="+", choices=SECTION_SECONDS, default=list(SECTION_SECONDS))
    parser.add_argument(
        "--warm-seconds", type=float, default=130.0, help="time limit of compiling kernels during the tests"
    )
    parser.add_argument("--tests", default="", help="expression for `pytest -k` that selects tests of tests/gpu")
    parser.add_argument(
        "--only", nargs="+", default=["*"], help="patterns of cases, such as `*timm*` or `train, ViT-B*`"
    )
    parser.add_argument("--cifar", type=Path, help="folder or archive of CIFAR-10 as class folders")
    parser.add_argument("--child", choices=SECTION_SECONDS, help=argparse.SUPPRESS)
    parser.add_argument("--warm", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.warm is not None:
        compile_cases(options)
    elif options.child:
        run_child(options)
    else:
        run_sections(options)


def run_sections(options: argparse.Namespace) -> None:
    """Run each section in a child process within its time limit, and write the page."""
    started = time.time()
    deadline = started + options.seconds
    timed = [name for name in options.sections if name in ("training", "inference", "objectives")]
    warmers = []
    if options.device != "cpu" and timed:
        warmers = [
            start_child(options, f"warm-{number}", ["--warm", str(number)]) for number in range(NUM_WARMUP_PROCESSES)
        ]
    for name in options.sections:
        if name != "tests":
            for process in warmers:
                wait_or_kill(process, started + options.warm_seconds)
            warmers = []
        limit = min(time.time() + SECTION_SECONDS[name], deadline)
        if limit < time.time() + 5:
            append_row(options.out, {"section": name, "failure": "no time left"})
            continue
        start = time.time()
        if name == "tests":
            run_tests(options, limit - start)
        else:
            arguments = ["--child", name, "--until", str(limit - 3)]
            if wait_or_kill(start_child(options, name, arguments), limit) not in (0, None) and time.time() < limit - 20:
                wait_or_kill(
                    start_child(options, name, arguments), limit
                )  # continues after the case that terminated it
        append_row(options.out, {"section": name, "took": time.time() - start})
        write_page(options)
    write_page(options)
    print((options.out / "gpu.md").read_text())


def start_child(options: argparse.Namespace, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
    """Start a child process, whose output is appended to OUT/log.txt."""
    command = [sys.executable, __file__, str(options.out), "--device", options.device, *(["--tiny"] * options.tiny)]
    command += ["--sections", *options.sections, "--only", *options.only] + (
        ["--cifar", str(options.cifar)] if options.cifar else []
    )
    with (options.out / "log.txt").open("ab") as log:
        log.write(f"== {name}\n".encode())
        log.flush()
        return subprocess.Popen(
            command + arguments,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env=build_environment(options),
            start_new_session=True,
        )


def build_environment(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment of child processes: this checkout as package, and a common cache of compiled kernels."""
    cache = Path(tempfile.gettempdir()) / "vitreous-gpu-cache"
    paths = [str(ROOT), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if options.tiny:
        variables |= {"VITREOUS_GPU_TESTS": options.device, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    return os.environ | variables


def wait_or_kill(process: subprocess.Popen[bytes], until: float) -> int | None:
    """Wait for a child process until a time, and return its exit status; kill it and return None if it is not
    finished."""
    try:
        return process.wait(max(0.1, until - time.time()))
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def run_tests(options: argparse.Namespace, seconds: float) -> None:
    """Run `pytest tests/gpu`, and append a row with its counts and the names of failed tests."""
    xml = options.out / "tests.xml"
    workers = ["-n", "8"] if options.device != "cpu" else ["-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "--durations=12", "--timeout=80", f"--junitxml={xml}"]
    command += ["-k", options.tests] if options.tests else []
    with (options.out / "tests.txt").open("wb") as log:
        process = subprocess.Popen(
            command + workers, cwd=ROOT, stdout=log, stderr=log, env=build_environment(options), start_new_session=True
        )
        status = wait_or_kill(process, time.time() + seconds)
    row: dict[str, Any] = {"section": "tests", "status": status}
    if xml.is_file():
        suite = ET.parse(xml).getroot()[0]
        row |= {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
        row["failed"] = [
            f"{case.get('classname')}::{case.get('name')}"
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
    append_row(options.out, row)


def append_row(out: Path, row: dict[str, Any]) -> None:
    """Append a row to OUT/rows.jsonl."""
    with (out / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(out: Path) -> list[dict[str, Any]]:
    """Return the rows of OUT/rows.jsonl; an empty list if there is no file."""
    path = out / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def compile_cases(options: argparse.Namespace) -> None:
    """Run one step of a share of the timed cases, so that their kernels are compiled into the cache.

    `--warm N` selects every `NUM_WARMUP_PROCESSES`-th case, from the N-th on.
    """
    from gpu_cases import SECTIONS

    cases = [
        case for name in SECTIONS if name in options.sections for case in SECTIONS[name](options.device, options.tiny)
    ]
    cases = [case for case in cases if is_wanted(options, case.work.title(), case.label)]
    for case in [case for case in cases if case.compiles][options.warm :: NUM_WARMUP_PROCESSES]:
        try:
            reset_compiler()
            case.build(case.work)()
            print("warm", case.label, case.work.title(), flush=True)
        except Exception as error:  # the timed process reports the failure
            print("warm", case.label, case.work.title(), type(error).__name__, str(error)[:300], flush=True)


def reset_compiler() -> None:
    """Delete compiled code and cached memory of the previous case."""
    import torch
    import torch._inductor.config as inductor

    inductor.autotune_local_cache = False  # kernel choices timed while other processes ran are not reused
    torch._dynamo.reset()
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def run_child(options: argparse.Namespace) -> None:
    """Measure the cases of one section, except those that an earlier process of this section has started."""
    started_cases = {
        (row.get("work"), row.get("contender")) for row in read_rows(options.out) if row.get("begun") == options.child
    }
    for work, contender, measure in list_cases(options):
        if (work, contender) in started_cases or not is_wanted(options, work, contender):
            continue
        row = {"section": options.child, "work": work, "contender": contender}
        if time.time() > options.until - 2:
            append_row(options.out, row | {"failure": "no time left"})
            continue
        append_row(options.out, {"begun": options.child, "work": work, "contender": contender})
        try:
            row |= measure()
        except Exception as error:  # a case may fail in any way; other cases must still run
            traceback.print_exc()
            row["failure"] = (
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]
            )
        append_row(options.out, row)
        print(row, flush=True)


def is_wanted(options: argparse.Namespace, work: str, contender: str) -> bool:
    """Return whether a case matches a pattern of --only."""
    return any(fnmatchcase(f"{work}: {contender}", pattern) for pattern in options.only)


def list_cases(options: argparse.Namespace) -> list[tuple[str, str, Any]]:
    """Return (work, contender, function) of each case of a section; the function measures it and returns the
    metrics."""
    from functools import partial

    if options.child == "loop":
        import gpu_loop

        scratch = Path(tempfile.mkdtemp())
        size = (64, 48) if options.tiny else (500, 375)
        photos = gpu_loop.write_photos(scratch / "photos", 16 if options.tiny else 1536, size)
        cifar = None if options.tiny else gpu_loop.unpack_cifar(options.cifar, scratch)
        return [
            (name, "vitreous train", run)
            for name, run in gpu_loop.loop_cases(options.device, options.tiny, photos, cifar)
        ]
    if options.child == "limits":
        import gpu_limits

        return gpu_limits.limit_cases(options.device, options.tiny)
    if options.child == "cifar":
        import gpu_loop

        cifar = Path("digits") if options.tiny else gpu_loop.unpack_cifar(options.cifar, Path(tempfile.mkdtemp()))
        if cifar is None:
            return []
        seconds = max(30.0, min(180.0, options.until - time.time() - 15))
        model, batch, throughput = CIFAR_RUN
        return [
            (
                "CIFAR-10",
                "vitreous train",
                partial(gpu_loop.train_cifar, cifar, options.device, seconds, options.tiny, model, batch, throughput),
            )
        ]
    from gpu_cases import SECTIONS

    return [
        (case.work.title(), case.label, partial(measure_case, case, options))
        for case in SECTIONS[options.child](options.device, options.tiny)
    ]


#: model, batch size, and the throughput in images/s from which the length of the run is computed
CIFAR_RUN = ("Conv32-128x1-256x1-256+ViT-128x4/8", 512, 10_000.0)


def measure_case(case: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Build, warm up and time a case; return median and range of its throughput, shares of the peak, and memory."""
    from vitreous.apps.bench.race import run_steps_for
    from vitreous.system.cores import get_peak_memory, synchronize_device
    from vitreous.training.throughput import measure_peak_flops

    peak = measure_peak_flops(options.device, "bf16")
    reset_compiler()
    start = time.perf_counter()
    run_step = case.build(case.work)
    built = time.perf_counter()
    run_step()
    synchronize_device(options.device)
    first_seconds = time.perf_counter() - built
    for _ in range(5):  # the fourth pass records a CUDA graph
        run_step()
    synchronize_device(options.device)
    throughputs = []
    for _ in range(NUM_WINDOWS):
        units, seconds = run_steps_for(0.05 if options.tiny else WINDOW_SECONDS, run_step, options.device)
        throughputs.append(units / seconds)
    throughput, flops = statistics.median(throughputs), case.flops()
    executed = case.flops(executed=True)
    return {
        "images_per_second": throughput,
        "images_per_second_range": [min(throughputs), max(throughputs)],
        "share_of_peak": throughput * flops / peak if flops else None,
        "executed_share_of_peak": throughput * executed / peak if flops else None,
        "memory_bytes": get_peak_memory(options.device),
        "build_seconds": built - start,
        "first_seconds": first_seconds,
        "peak": peak,
    }


def write_page(options: argparse.Namespace) -> None:
    """Write OUT/gpu.md from the rows."""
    from gpu_page import build_page

    (options.out / "gpu.md").write_text(build_page(read_rows(options.out)))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    main()
