"""Everything worth measuring on one GPU in nine minutes: tests, training, inference, objectives, the loop, CIFAR-10.

    bash benchmarks/gpu.sh OUT                            on a machine with a GPU
    python benchmarks/gpu.py OUT --device cpu --tiny      the same code in minutes, without one

Sections run in order of value, each in a process of its own with a limit of its own. Every result is appended to
OUT/rows.jsonl at once, and OUT/gpu.md is written again after each section, so that an interrupted run keeps what it
has. Kernels are compiled into a cache by other processes while the tests run; timed processes then read them there.
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
#: seconds of each section, in the order in which they run
SECTION_SECONDS = {
    "tests": 120,
    "training": 95,
    "inference": 45,
    "objectives": 95,
    "loop": 75,
    "limits": 25,
    "cifar": 200,
}
NUM_WARMUP_PROCESSES = 6  # processes that compile while the tests run
NUM_WINDOWS, WINDOW_SECONDS = 3, 0.4  # of a timed case; its figure is the median


def main() -> None:
    """Run the sections, or one of them as a child."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="models and sizes of seconds, to find mistakes")
    parser.add_argument("--seconds", type=float, default=540.0, help="of all sections")
    parser.add_argument("--sections", nargs="+", choices=SECTION_SECONDS, default=list(SECTION_SECONDS))
    parser.add_argument("--warm-seconds", type=float, default=130.0, help="that compiling beside the tests may take")
    parser.add_argument("--tests", default="", help="of tests/gpu, those that `pytest -k` takes by this expression")
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of cases, `*timm*` or `train, ViT-B*`")
    parser.add_argument("--cifar", type=Path, help="folder or archive of CIFAR-10 as class folders")
    parser.add_argument("--child", choices=SECTION_SECONDS, help=argparse.SUPPRESS)
    parser.add_argument("--warm", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.warm is not None:
        compile_cases(given)
    elif given.child:
        run_child(given)
    else:
        run_sections(given)


def run_sections(given: argparse.Namespace) -> None:
    """All sections, each a child process."""
    started = time.time()
    deadline = started + given.seconds
    timed = [name for name in given.sections if name in ("training", "inference", "objectives")]
    warmers = []
    if given.device != "cpu" and timed:
        warmers = [
            start_child(given, f"warm-{number}", ["--warm", str(number)]) for number in range(NUM_WARMUP_PROCESSES)
        ]
    for name in given.sections:
        if name != "tests":
            for process in warmers:
                wait_or_kill(process, started + given.warm_seconds)
            warmers = []
        limit = min(time.time() + SECTION_SECONDS[name], deadline)
        if limit < time.time() + 5:
            append_row(given.out, {"section": name, "failure": "no time was left"})
            continue
        began = time.time()
        if name == "tests":
            run_tests(given, limit - began)
        else:
            arguments = ["--child", name, "--until", str(limit - 3)]
            if wait_or_kill(start_child(given, name, arguments), limit) not in (0, None) and time.time() < limit - 20:
                wait_or_kill(start_child(given, name, arguments), limit)  # it goes on after the case that ended it
        append_row(given.out, {"section": name, "took": time.time() - began})
        write_page(given)
    write_page(given)
    print((given.out / "gpu.md").read_text())


def start_child(given: argparse.Namespace, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
    """Start a child; what it prints goes to OUT/log.txt."""
    command = [sys.executable, __file__, str(given.out), "--device", given.device, *(["--tiny"] * given.tiny)]
    command += ["--sections", *given.sections, "--only", *given.only] + (
        ["--cifar", str(given.cifar)] if given.cifar else []
    )
    with (given.out / "log.txt").open("ab") as log:
        log.write(f"== {name}\n".encode())
        log.flush()
        return subprocess.Popen(
            command + arguments, cwd=ROOT, stdout=log, stderr=log, env=build_environment(given), start_new_session=True
        )


def build_environment(given: argparse.Namespace) -> dict[str, str]:
    """What children run with: this checkout, and one cache of compiled kernels."""
    cache = Path(tempfile.gettempdir()) / "vitreous-gpu-cache"
    paths = [str(ROOT), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    chosen = {
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if given.tiny:
        chosen |= {"VITREOUS_GPU_TESTS": given.device, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    return os.environ | chosen


def wait_or_kill(process: subprocess.Popen[bytes], until: float) -> int | None:
    """The exit status of a child; None where it had to be ended."""
    try:
        return process.wait(max(0.1, until - time.time()))
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def run_tests(given: argparse.Namespace, seconds: float) -> None:
    """`pytest tests/gpu`, and its failures as rows."""
    xml = given.out / "tests.xml"
    workers = ["-n", "8"] if given.device != "cpu" else ["-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "--durations=12", "--timeout=80", f"--junitxml={xml}"]
    command += ["-k", given.tests] if given.tests else []
    with (given.out / "tests.txt").open("wb") as log:
        process = subprocess.Popen(
            command + workers, cwd=ROOT, stdout=log, stderr=log, env=build_environment(given), start_new_session=True
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
    append_row(given.out, row)


def append_row(out: Path, row: dict[str, Any]) -> None:
    """Add a row to OUT/rows.jsonl."""
    with (out / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(out: Path) -> list[dict[str, Any]]:
    """The rows so far."""
    path = out / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def compile_cases(given: argparse.Namespace) -> None:
    """Compile what the timed cases need: a share of them, one turn each."""
    from gpu_cases import SECTIONS

    cases = [case for name in SECTIONS if name in given.sections for case in SECTIONS[name](given.device, given.tiny)]
    cases = [case for case in cases if is_wanted(given, case.work.title(), case.label)]
    for case in [case for case in cases if case.compiles][given.warm :: NUM_WARMUP_PROCESSES]:
        try:
            reset_compiler()
            case.build(case.work)()
            print("warm", case.label, case.work.title(), flush=True)
        except Exception as error:  # the timed process will say it
            print("warm", case.label, case.work.title(), type(error).__name__, str(error)[:300], flush=True)


def reset_compiler() -> None:
    """Forget compiled code and cached memory of the case before."""
    import torch
    import torch._inductor.config as inductor

    inductor.autotune_local_cache = False  # choices that were timed beside other processes are made again
    torch._dynamo.reset()
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def run_child(given: argparse.Namespace) -> None:
    """The cases of one section, those that a process before this one has begun left out."""
    begun = {(row.get("work"), row.get("contender")) for row in read_rows(given.out) if row.get("begun") == given.child}
    for work, contender, measure in list_cases(given):
        if (work, contender) in begun or not is_wanted(given, work, contender):
            continue
        row = {"section": given.child, "work": work, "contender": contender}
        if time.time() > given.until - 2:
            append_row(given.out, row | {"failure": "no time was left"})
            continue
        append_row(given.out, {"begun": given.child, "work": work, "contender": contender})
        try:
            row |= measure()
        except Exception as error:  # a case may fail in any way; the others go on
            traceback.print_exc()
            row["failure"] = (
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]
            )
        append_row(given.out, row)
        print(row, flush=True)


def is_wanted(given: argparse.Namespace, work: str, contender: str) -> bool:
    """Whether a case matches a pattern of --only."""
    return any(fnmatchcase(f"{work}: {contender}", pattern) for pattern in given.only)


def list_cases(given: argparse.Namespace) -> list[tuple[str, str, Any]]:
    """What a section measures: work, contender, and a function that returns the rest of its row."""
    from functools import partial

    if given.child == "loop":
        import gpu_loop

        scratch = Path(tempfile.mkdtemp())
        size = (64, 48) if given.tiny else (500, 375)
        photos = gpu_loop.write_photos(scratch / "photos", 16 if given.tiny else 1536, size)
        cifar = None if given.tiny else gpu_loop.unpack_cifar(given.cifar, scratch)
        return [(n, "vitreous train", run) for n, run in gpu_loop.loop_cases(given.device, given.tiny, photos, cifar)]
    if given.child == "limits":
        import gpu_limits

        return gpu_limits.limit_cases(given.device, given.tiny)
    if given.child == "cifar":
        import gpu_loop

        cifar = Path("digits") if given.tiny else gpu_loop.unpack_cifar(given.cifar, Path(tempfile.mkdtemp()))
        if cifar is None:
            return []
        seconds = max(30.0, min(180.0, given.until - time.time() - 15))
        model, batch, rate = CIFAR_RUN
        return [
            (
                "CIFAR-10",
                "vitreous train",
                partial(gpu_loop.train_cifar, cifar, given.device, seconds, given.tiny, model, batch, rate),
            )
        ]
    from gpu_cases import SECTIONS

    return [
        (case.work.title(), case.label, partial(measure_case, case, given))
        for case in SECTIONS[given.child](given.device, given.tiny)
    ]


#: model, images of a step, and images a second that the length of the run is planned by
CIFAR_RUN = ("Conv32-128x1-256x1-256+ViT-128x4/8", 512, 10_000.0)


def measure_case(case: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Build a case, warm it up, and time it: median and spread of the windows, share of the peak, memory."""
    from vitreous.apps.bench.race import run_steps_for
    from vitreous.system.cores import get_peak_memory, synchronize_device
    from vitreous.training.throughput import measure_peak_flops

    peak = measure_peak_flops(given.device, "bf16")
    reset_compiler()
    began = time.perf_counter()
    turn = case.build(case.work)
    built = time.perf_counter()
    turn()
    synchronize_device(given.device)
    first = time.perf_counter() - built
    for _ in range(5):  # the fourth pass records a CUDA graph
        turn()
    synchronize_device(given.device)
    rates = []
    for _ in range(NUM_WINDOWS):
        units, seconds = run_steps_for(0.05 if given.tiny else WINDOW_SECONDS, turn, given.device)
        rates.append(units / seconds)
    rate, flops = statistics.median(rates), case.flops()
    executed = case.flops(executed=True)
    return {
        "images_per_second": rate,
        "images_per_second_range": [min(rates), max(rates)],
        "share_of_peak": rate * flops / peak if flops else None,
        "executed_share_of_peak": rate * executed / peak if flops else None,
        "memory_bytes": get_peak_memory(given.device),
        "build_seconds": built - began,
        "first_seconds": first,
        "peak": peak,
    }


def write_page(given: argparse.Namespace) -> None:
    """OUT/gpu.md from the rows."""
    from gpu_page import build_page

    (given.out / "gpu.md").write_text(build_page(read_rows(given.out)))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    main()
