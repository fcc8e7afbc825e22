"""A nine-minute measurement of one GPU: tests, training, inference, objectives, the loop, CIFAR-10.

    bash benchmarks/gpu.sh OUT                            on a machine with a GPU
    python benchmarks/gpu.py OUT --device cpu --tiny      the same code in minutes, without one

Sections run in order of importance, each in a separate process with a time limit. Every result is appended to
OUT/rows.jsonl immediately, and OUT/gpu.md is written after each section, so that an interrupted run keeps its results.
Other processes compile kernels into a cache while the tests run; timed processes then load them from there.
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
#: seconds of each section, in execution order
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
NUM_WINDOWS, WINDOW_SECONDS = 3, 0.4  # windows of a timed case; their median is reported


def main() -> None:
    """Run the sections, or one of them as a child."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="small models and sizes, for testing the script in minutes")
    parser.add_argument("--seconds", type=float, default=540.0, help="of all sections")
    parser.add_argument("--sections", nargs="+", choices=SECTION_SECONDS, default=list(SECTION_SECONDS))
    parser.add_argument(
        "--warm-seconds", type=float, default=130.0, help="maximum seconds of compiling while the tests run"
    )
    parser.add_argument("--tests", default="", help="`pytest -k` expression for tests/gpu")
    parser.add_argument(
        "--only", nargs="+", default=["*"], help="patterns of cases, such as `*timm*` or `train, ViT-B*`"
    )
    parser.add_argument("--cifar", type=Path, help="folder or archive of CIFAR-10 with class folders")
    parser.add_argument("--child", choices=SECTION_SECONDS, help=argparse.SUPPRESS)
    parser.add_argument("--warm", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.warm is not None:
        compile_cases(args)
    elif args.child:
        run_child(args)
    else:
        run_sections(args)


def run_sections(args: argparse.Namespace) -> None:
    """Run all sections, each as a child process."""
    started = time.time()
    deadline = started + args.seconds
    timed = [name for name in args.sections if name in ("training", "inference", "objectives")]
    warmers = []
    if args.device != "cpu" and timed:
        warmers = [start_child(args, f"warm-{index}", ["--warm", str(index)]) for index in range(NUM_WARMUP_PROCESSES)]
    for name in args.sections:
        if name != "tests":
            for process in warmers:
                wait_or_kill(process, started + args.warm_seconds)
            warmers = []
        limit = min(time.time() + SECTION_SECONDS[name], deadline)
        if limit < time.time() + 5:
            append_row(args.out, {"section": name, "failure": "no time was left"})
            continue
        began = time.time()
        if name == "tests":
            run_tests(args, limit - began)
        else:
            arguments = ["--child", name, "--until", str(limit - 3)]
            if wait_or_kill(start_child(args, name, arguments), limit) not in (0, None) and time.time() < limit - 20:
                wait_or_kill(start_child(args, name, arguments), limit)  # it continues after the case that ended it
        append_row(args.out, {"section": name, "took": time.time() - began})
        write_page(args)
    write_page(args)
    print((args.out / "gpu.md").read_text())


def start_child(args: argparse.Namespace, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
    """Start a child whose output goes to OUT/log.txt."""
    command = [sys.executable, __file__, str(args.out), "--device", args.device, *(["--tiny"] * args.tiny)]
    command += ["--sections", *args.sections, "--only", *args.only] + (
        ["--cifar", str(args.cifar)] if args.cifar else []
    )
    with (args.out / "log.txt").open("ab") as log:
        log.write(f"== {name}\n".encode())
        log.flush()
        return subprocess.Popen(
            command + arguments, cwd=ROOT, stdout=log, stderr=log, env=build_environment(args), start_new_session=True
        )


def build_environment(args: argparse.Namespace) -> dict[str, str]:
    """The environment of children: this checkout, and a shared cache of compiled kernels."""
    cache = Path(tempfile.gettempdir()) / "vitreous-gpu-cache"
    paths = [str(ROOT), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    chosen = {
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if args.tiny:
        chosen |= {"VITREOUS_GPU_TESTS": args.device, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    return os.environ | chosen


def wait_or_kill(process: subprocess.Popen[bytes], until: float) -> int | None:
    """The exit status of a child; None if it had to be killed."""
    try:
        return process.wait(max(0.1, until - time.time()))
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def run_tests(args: argparse.Namespace, seconds: float) -> None:
    """Run `pytest tests/gpu`, and append its failures as rows."""
    xml = args.out / "tests.xml"
    workers = ["-n", "8"] if args.device != "cpu" else ["-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "--durations=12", "--timeout=80", f"--junitxml={xml}"]
    command += ["-k", args.tests] if args.tests else []
    with (args.out / "tests.txt").open("wb") as log:
        process = subprocess.Popen(
            command + workers, cwd=ROOT, stdout=log, stderr=log, env=build_environment(args), start_new_session=True
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
    append_row(args.out, row)


def append_row(out: Path, row: dict[str, Any]) -> None:
    """Append a row to OUT/rows.jsonl."""
    with (out / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(out: Path) -> list[dict[str, Any]]:
    """The rows so far."""
    path = out / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def compile_cases(args: argparse.Namespace) -> None:
    """Compile a share of the timed cases, one turn each."""
    from gpu_cases import SECTIONS

    cases = [case for name in SECTIONS if name in args.sections for case in SECTIONS[name](args.device, args.tiny)]
    cases = [case for case in cases if is_wanted(args, case.work.title(), case.label)]
    for case in [case for case in cases if case.compiles][args.warm :: NUM_WARMUP_PROCESSES]:
        try:
            reset_compiler()
            case.build(case.work)()
            print("warm", case.label, case.work.title(), flush=True)
        except Exception as error:  # the timed process will report it
            print("warm", case.label, case.work.title(), type(error).__name__, str(error)[:300], flush=True)


def reset_compiler() -> None:
    """Reset compiled code and cached memory of the previous case."""
    import torch
    import torch._inductor.config as inductor

    inductor.autotune_local_cache = False  # choices that were timed during other load are measured again
    torch._dynamo.reset()
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def run_child(args: argparse.Namespace) -> None:
    """Run the cases of a section, except those that a previous process started."""
    begun = {(row.get("work"), row.get("contender")) for row in read_rows(args.out) if row.get("begun") == args.child}
    for work, contender, measure in list_cases(args):
        if (work, contender) in begun or not is_wanted(args, work, contender):
            continue
        row = {"section": args.child, "work": work, "contender": contender}
        if time.time() > args.until - 2:
            append_row(args.out, row | {"failure": "no time was left"})
            continue
        append_row(args.out, {"begun": args.child, "work": work, "contender": contender})
        try:
            row |= measure()
        except Exception as error:  # a case may fail in any way; the others continue
            traceback.print_exc()
            row["failure"] = (
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]
            )
        append_row(args.out, row)
        print(row, flush=True)


def is_wanted(args: argparse.Namespace, work: str, contender: str) -> bool:
    """Whether a case matches a pattern of --only."""
    return any(fnmatchcase(f"{work}: {contender}", pattern) for pattern in args.only)


def list_cases(args: argparse.Namespace) -> list[tuple[str, str, Any]]:
    """The cases of a section: work, contender, and a function that returns the rest of the row."""
    from functools import partial

    if args.child == "loop":
        import gpu_loop

        scratch = Path(tempfile.mkdtemp())
        size = (64, 48) if args.tiny else (500, 375)
        photos = gpu_loop.write_photos(scratch / "photos", 16 if args.tiny else 1536, size)
        cifar = None if args.tiny else gpu_loop.unpack_cifar(args.cifar, scratch)
        return [(n, "vitreous train", run) for n, run in gpu_loop.loop_cases(args.device, args.tiny, photos, cifar)]
    if args.child == "limits":
        import gpu_limits

        return gpu_limits.limit_cases(args.device, args.tiny)
    if args.child == "cifar":
        import gpu_loop

        cifar = Path("digits") if args.tiny else gpu_loop.unpack_cifar(args.cifar, Path(tempfile.mkdtemp()))
        if cifar is None:
            return []
        seconds = max(30.0, min(180.0, args.until - time.time() - 15))
        model, batch, rate = CIFAR_RUN
        return [
            (
                "CIFAR-10",
                "vitreous train",
                partial(gpu_loop.train_cifar, cifar, args.device, seconds, args.tiny, model, batch, rate),
            )
        ]
    from gpu_cases import SECTIONS

    return [
        (case.work.title(), case.label, partial(measure_case, case, args))
        for case in SECTIONS[args.child](args.device, args.tiny)
    ]


#: model, batch size, and images/s for planning the length of the run
CIFAR_RUN = ("Conv32-128x1-256x1-256+ViT-128x4/8", 512, 10_000.0)


def measure_case(case: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Build a case, warm it up, and time it: median and spread of the windows, share of the peak, memory."""
    from vitreous.apps.bench.race import run_steps_for
    from vitreous.system.cores import get_peak_memory, synchronize_device
    from vitreous.training.throughput import measure_peak_flops

    peak = measure_peak_flops(args.device, "bf16")
    reset_compiler()
    began = time.perf_counter()
    turn = case.build(case.work)
    built = time.perf_counter()
    turn()
    synchronize_device(args.device)
    first_step_seconds = time.perf_counter() - built
    for _ in range(5):  # the fourth pass records a CUDA graph
        turn()
    synchronize_device(args.device)
    rates = []
    for _ in range(NUM_WINDOWS):
        units, seconds = run_steps_for(0.05 if args.tiny else WINDOW_SECONDS, turn, args.device)
        rates.append(units / seconds)
    rate, flops = statistics.median(rates), case.flops()
    executed = case.flops(executed=True)
    return {
        "images_per_second": rate,
        "images_per_second_range": [min(rates), max(rates)],
        "share_of_peak": rate * flops / peak if flops else None,
        "executed_share_of_peak": rate * executed / peak if flops else None,
        "memory_bytes": get_peak_memory(args.device),
        "build_seconds": built - began,
        "first_seconds": first_step_seconds,
        "peak": peak,
    }


def write_page(args: argparse.Namespace) -> None:
    """Write OUT/gpu.md from the rows."""
    from gpu_page import build_page

    (args.out / "gpu.md").write_text(build_page(read_rows(args.out)))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    main()
