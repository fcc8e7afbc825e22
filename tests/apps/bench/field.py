"""Benchmark contenders for tests, in a small module that their processes import quickly."""

from __future__ import annotations

import os
import time

import numpy as np

from vitreous.apps.bench.work import LogitsStep


def build_steady_step(work, rate=100.0):
    """Build a step that reports exactly `rate` images/s, regardless of how late a busy machine wakes the process."""

    def run_step():
        start_time = time.perf_counter()
        time.sleep(0.01)
        return rate * (time.perf_counter() - start_time)

    return run_step


def build_inexact_step(work):
    """Build a step whose logits are off by a tenth."""
    return LogitsStep(
        build_steady_step(work), lambda: np.array([[3.0, 4.5]], np.float32), lambda: np.array([[3.0, 4.0]], np.float32)
    )


def build_zero_step(work):
    """Build a step whose logits are zero."""
    return LogitsStep(build_steady_step(work), lambda: np.zeros((1, 2)), lambda: np.zeros((1, 2)))


def raise_on_build(work):
    raise ValueError("nothing here\nand more")


def exit_on_build(work):
    os._exit(7)


def build_step_that_fails_later(work):
    calls = []

    def run_step():
        calls.append(None)
        if len(calls) > 1:
            raise RuntimeError("tired")
        return 1.0

    return run_step


def build_step_with_subprocess(work):
    """Build a step that starts a child process, as data loaders do."""
    import multiprocessing

    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,))
    child.start()
    child.join()
    return lambda: time.sleep(0.01) or 1.0
