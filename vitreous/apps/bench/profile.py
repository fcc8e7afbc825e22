"""CPU time per group of operators, recorded with `torch.profiler`."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from vitreous.apps.bench.work import BenchmarkStep

OUTSIDE_OPERATORS = "outside operators"  # Python, dispatch, compiled kernels, waiting threads
OTHER_OPERATORS = "other operators"
PROFILED_REGION = "recorded turns"
MAX_PROFILED_STEPS = 20  # maximum number of recorded steps; a step of a small model has thousands of operators
#: operator group by operator name; the first match applies
OPERATOR_PATTERNS: dict[str, str] = {
    "products": r"(add|badd)?(b)?mm$|_linear_pointwise|mkldnn_linear|qlinear|convolution|conv2d|_convolution|dot$|mv$",
    "attention, fused": r"attention",
    "softmax": r"softmax",
    "norms": r"(layer|group|batch|rms)_norm|rsqrt",
    "GELU": r"gelu|silu",
    "optimiser": r"_fused_|_foreach_|linalg_vector_norm|lerp",
    "copies and layout": r"copy|cat$|stack$|select|slice|index|gather|scatter|clone|contiguous|roll|pad|flip",
    "memory": r"empty|resize|fill|zero|full|rand|normal_|uniform|bernoulli",
    "sums and other elementwise": r"(add|sub|mul|div|neg|exp|pow|sqrt|sum|mean|where|clamp|max|min|abs|round|lt|gt)_?$",
}
OPERATOR_GROUPS = (*OPERATOR_PATTERNS, OTHER_OPERATORS, OUTSIDE_OPERATORS)


@dataclass(frozen=True)
class OperatorEvent:
    """One operator call: name, thread number, and seconds excluding the operators that it called."""

    name: str
    thread: int
    seconds: float


@dataclass(frozen=True)
class OperatorProfile:
    """CPU time of a step. `shares` has the share of each operator group in the time of all cores (sum 1), `seconds` the
    wall time per recorded step. `operators` lists the slowest operators: name, calls per step, share."""

    shares: dict[str, float]
    seconds: float
    operators: list[tuple[str, float, float]]


def classify_operator(operator: str) -> str:
    """Return the group of an operator by its name: `aten::addmm` belongs to `products`."""
    name = operator.rsplit("::", 1)[-1]
    return next((group for group, pattern in OPERATOR_PATTERNS.items() if re.search(pattern, name)), OTHER_OPERATORS)


def profile_steps(step: BenchmarkStep, seconds: float, top: int = 12) -> OperatorProfile:
    """Record steps for `seconds`, at least one and at most `MAX_PROFILED_STEPS`; the profile lists the `top` slowest
    operators.

    An operator in the calling thread counts as if it used all cores. Operators in other threads, such as those of the
    shards of a training step, count for their share of the cores. The remaining time is `OUTSIDE_OPERATORS`. Recording
    itself takes time, more for models with many small operators.
    """
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile, record_function

    num_steps, started, elapsed = 0, 0.0, 0.0
    experimental_config = _ExperimentalConfig(profile_all_threads=True)
    recorder = profile(activities=[ProfilerActivity.CPU], experimental_config=experimental_config)
    with recorder, record_function(PROFILED_REGION):
        started = time.perf_counter()
        while not num_steps or (elapsed < seconds and num_steps < MAX_PROFILED_STEPS):
            step()
            num_steps, elapsed = num_steps + 1, time.perf_counter() - started
    events = [OperatorEvent(e.name, e.thread, e.self_cpu_time_total * 1e-6) for e in recorder.events() or []]
    return summarise_events(events, elapsed, num_steps, top)


def summarise_events(events: Sequence[OperatorEvent], elapsed: float, num_steps: int, top: int) -> OperatorProfile:
    """Distribute `elapsed` seconds of wall time over the operators of the events. One event, `PROFILED_REGION`, covers
    all steps and identifies the calling thread."""
    calling_thread = next(event.thread for event in events if event.name == PROFILED_REGION)
    worker_threads = {event.thread for event in events} - {calling_thread}
    shares, group_shares, calls = defaultdict[str, float](float), defaultdict[str, float](float), Counter[str]()
    for event in events:
        if event.name != PROFILED_REGION:
            share = event.seconds / elapsed / (1 if event.thread == calling_thread else len(worker_threads))
            shares[event.name] += share
            calls[event.name] += 1
            group_shares[classify_operator(event.name)] += share
    group_shares[OUTSIDE_OPERATORS] = max(0.0, 1.0 - sum(group_shares.values()))
    total_share, largest = sum(group_shares.values()), sorted(shares, key=lambda name: -shares[name])[:top]
    top_operators = [(name, calls[name] / num_steps, shares[name] / total_share) for name in largest]
    return OperatorProfile(
        {name: group_shares[name] / total_share for name in OPERATOR_GROUPS}, elapsed / num_steps, top_operators
    )
