"""A study on a two-node Ray cluster gives the table of a single machine, even if a worker process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import parse_json_output, run_command
from tests.training.process_jobs import free_port

WORKER_TITLE = b"ray::run_remote_trial"
STUDY_ARGUMENTS = (
    "study",
    "positions",
    "--steps",
    "60",
    "--seeds",
    "1",
    "--device",
    "cpu",
    "--precision",
    "fp32",
    "--json",
)
#: of this cluster, even if others run on the machine
RAY_TOKEN_ENVIRONMENT = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}


@contextmanager
def start_ray_nodes(count: int) -> Iterator[str]:
    """Start `count` nodes of a local cluster with one processor each by `ray start`; yield the address."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--disable-usage-stats", "--block"]
    start += ["--node-ip-address=127.0.0.1", "--object-store-memory=100000000"]
    roles = [["--head", f"--port={port}", "--include-dashboard=false"], *[[f"--address={address}"]] * (count - 1)]
    started: list[subprocess.Popen[str]] = []
    try:
        for role in roles:
            environment = {**os.environ, **RAY_TOKEN_ENVIRONMENT}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            node = subprocess.Popen([*start, *role], **pipes, text=True, env=environment)
            started.append(node)
            assert node.stdout is not None
            assert any("Ray runtime started" in line for line in node.stdout), "a Ray node did not start"
        yield address
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
        for process in started:
            process.wait(30)


def find_training_processes() -> dict[int, int]:
    """Map the id of each training process to the node that started it."""
    parents = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes().startswith(WORKER_TITLE):
                parents[int(process.name)] = int((process / "stat").read_text().rpartition(") ")[2].split()[1])
        except OSError:  # the process has ended
            continue
    return parents


class WorkerKiller(threading.Thread):
    """Kills the first process that has trained for a second, and records which nodes trained."""

    killed, ended = 0, False

    def run(self) -> None:
        self.first_seen: dict[int, float] = {}
        self.nodes: set[int] = set()
        while not self.ended:
            for process, node in find_training_processes().items():
                self.nodes.add(node)
                if not self.killed and time.monotonic() - self.first_seen.setdefault(process, time.monotonic()) > 1:
                    os.kill(process, signal.SIGKILL)
                    self.killed = process
            time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists processes in /proc")
def test_a_killed_worker_on_two_nodes_does_not_change_the_table(tmp_path):
    local_result = parse_json_output(run_command(*STUDY_ARGUMENTS, "--out", str(tmp_path / "here"), timeout=700))
    with start_ray_nodes(2) as address:
        killer = WorkerKiller()
        killer.start()
        try:
            arguments = (*STUDY_ARGUMENTS, "--out", str(tmp_path / "there"), "--ray", address)
            cluster_result = parse_json_output(run_command(*arguments, timeout=700, **RAY_TOKEN_ENVIRONMENT))
        finally:
            killer.ended = True
            killer.join()
    assert killer.killed and len(killer.nodes) == 2
    means = [[(row["axis_values"], row["mean"]) for row in result["rows"]] for result in (local_result, cluster_result)]
    assert len(means[0]) == 8 and means[0] == means[1]
