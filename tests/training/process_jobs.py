"""Runs with several processes, forked from one that has imported torch: faster than `torchrun`.

python -m tests.training.process_jobs reads one JSON object per line:
- "jobs": a list of jobs;
- "errors": the file for their stderr.

A job has these keys:
- "world": the number of processes;
- "options": options of train, or a list of them for consecutive runs in the same processes;
- "stop": the step after which the run is interrupted;
- "kill" and "poison": [rank, step];
- "timeout": seconds.

For each line, prints the list of each job's exit codes by rank.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import time

import numpy.ma  # noqa: F401  modules that a run imports late are imported here, once for all processes
import PIL.Image
import pydantic.type_adapter  # noqa: F401
import scipy.special  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.checkpoint.hf_storage
import torch.distributed.fsdp
import torch.nested._internal.nested_tensor
import torch.nn.parallel
import torchvision.transforms.v2  # noqa: F401
import yaml  # noqa: F401

from tests.objectives import toys  # objectives defined only in the tests
from vitreous.config import get_type_adapter
from vitreous.errors import VitreousError
from vitreous.jobs.train import train
from vitreous.reports.pages import report
from vitreous.training import throughput
from vitreous.training.run import Run
from vitreous.training.session import Session


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def install_faults(rank: int, job: dict) -> None:
    """Interrupt, kill or poison this process at a step."""
    watch, batches = Session.watch, Session.batches

    def watched(self, state):
        watch(self, state)
        if state.step == job.get("stop") and rank == 0:
            self.signals.received = signal.SIGTERM
        if [rank, state.step] == job.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)

    def poisoned(self, state):
        for step_slice, batch in batches(self, state):
            if [rank, state.step] == job.get("poison"):
                batch["images"][0] = math.nan
            yield step_slice, batch

    Session.watch, Session.batches = watched, poisoned
    throughput.measure_peak_flops = lambda device, precision: (
        1e12
    )  # measuring takes half a second, and the metric is not part of an outcome
    report.write_report = lambda *parts, **named: None  # a report takes longer than the run


def run_process(rank: int, ports: list[int], job: dict) -> int:
    """Run one process of a job. Returns its exit code, or that of the first run that failed."""
    torch.set_num_threads(1)
    install_faults(rank, job)
    runs = job["options"] if isinstance(job["options"], list) else [job["options"]]
    for port, options in zip(ports, runs, strict=True):
        names = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": job["world"],
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        if job.get("joined", job["world"] > 1):
            os.environ |= {name: str(value) for name, value in names.items()}
        try:
            train(**options, timeout=float(job.get("timeout", 60)))
        except VitreousError as error:
            print(f"rank {rank}: {error}", file=sys.stderr)
            return error.code
    return 0


def run_job(job: dict) -> list[int]:
    """Run a job; returns the exit codes of its processes, negative for a signal. They are killed after the job's
    timeout."""
    runs = len(job["options"]) if isinstance(job["options"], list) else 1
    ports, children = [free_port() for _ in range(runs)], []
    for rank in range(job["world"]):
        child = os.fork()
        if child == 0:
            code = 99
            try:
                code = run_process(rank, ports, job)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes, deadline = {}, time.monotonic() + job.get("limit", 120)
    while len(codes) < len(children):
        for rank, child in enumerate(children):
            if rank not in codes:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[rank] for rank in range(len(children))]


if __name__ == "__main__":
    PIL.Image.preinit()
    toys.register_toys()
    get_type_adapter(Run)
    for line in sys.stdin:
        order = json.loads(line)
        errors = os.open(order["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(errors, 2)
        os.close(errors)
        print(json.dumps([run_job(job) for job in order["jobs"]]), flush=True)
