"""After `torchrun` restarts all processes or fewer, the run resumes with the same result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import vitreous
from tests.conftest import TINY_RUN
from tests.training.process_jobs import free_port
from tests.training.test_ranks import read_outcome
from vitreous.errors import Interrupted, UsageError
from vitreous.training.ranks import RENDEZVOUS_KEY, rendezvous_store
from vitreous.training.session import Session

RUN_OPTIONS = {**TINY_RUN, "epochs": 8.0, "reproducible": True, "save_every": 4, "workers": 0}
LONG_RUN_OPTIONS = {**RUN_OPTIONS, "epochs": 60.0}


def interrupt_at(step, monkeypatch):
    """End runs of this process after a step."""
    watch = Session.watch

    def watched(self, state):
        watch(self, state)
        if state.step == step:
            self.signals.received = signal.SIGTERM

    monkeypatch.setattr(Session, "watch", watched)


@pytest.fixture
def stopped_run(photo_folder, tmp_path, monkeypatch):
    """A run at step 6 of 19, started by a torchrun job with the ID `pets`."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "pets")
    with monkeypatch.context() as patch:
        interrupt_at(6, patch)
        with pytest.raises(Interrupted):
            vitreous.train(photo_folder, out=str(tmp_path / "run"), progress=False, **RUN_OPTIONS)
    return tmp_path / "run"


def test_a_restarted_launch_resumes_its_run(photo_folder, stopped_run, tmp_path, monkeypatch):
    vitreous.train(photo_folder, out=str(stopped_run), progress=False, **RUN_OPTIONS)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    vitreous.train(photo_folder, out=str(tmp_path / "whole"), progress=False, **RUN_OPTIONS)
    assert read_outcome(stopped_run) == read_outcome(tmp_path / "whole")
    assert json.loads((stopped_run / "environment.json").read_text())["torchrun"] == "pets"


@pytest.mark.parametrize("name", ["others", "none", None])
def test_another_launch_does_not_resume_the_run(photo_folder, stopped_run, monkeypatch, name):
    """`none` is torchrun's default job ID; such jobs are distinguished by the agent's process."""
    if name is None:
        monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    else:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
    with pytest.raises(UsageError, match="already exists"):
        vitreous.train(photo_folder, out=str(stopped_run), progress=False, **RUN_OPTIONS)


def test_a_restarted_launch_without_out_resumes_its_newest_run(photo_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "pets")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    run = {**RUN_OPTIONS, "steps": 3, "epochs": None}
    first_run, second_run = (vitreous.train(photo_folder, progress=False, **run)["run"] for _ in range(2))
    assert first_run != second_run
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert vitreous.train(photo_folder, progress=False, **run)["run"] == second_run
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "cars")
    assert vitreous.train(photo_folder, progress=False, **run)["run"] not in (first_run, second_run)


def build_launch_command(folder, out, *launch):
    """The command of an agent that trains with LONG_RUN_OPTIONS."""
    options = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in LONG_RUN_OPTIONS.items()
    ]
    start = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "vitreous", "train", str(folder)]
    return [*start, "--out", str(out), "--device", "cpu", "--timeout", "60", *options]


def start_agent(tmp_path, name, words):
    """Start an agent whose workers have separate sessions."""
    with open(tmp_path / f"{name}.log", "w") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(words, stdout=log, stderr=log, env=environment)


def wait_for_checkpoint(out, limit=120.0):
    """Wait until a run has saved a checkpoint."""
    until = time.monotonic() + limit
    while not list(out.glob("checkpoints/step-*")):
        assert time.monotonic() < until, "no checkpoint"
        time.sleep(0.02)


def list_children(process):
    """The process IDs of a process's children."""
    return [int(pid) for pid in open(f"/proc/{process.pid}/task/{process.pid}/children").read().split()]


def test_rendezvous_ignores_keys_of_an_earlier_start():
    """Process 0 arrives late, and an earlier start has replied to all requests."""
    agent = dist.TCPStore("127.0.0.1", free_port(), is_master=True)
    agent.set(RENDEZVOUS_KEY, "dead")
    dead, limit = dist.PrefixStore("dead", agent), timedelta(seconds=30)
    for rank in (1, 2):
        dead.set(f"asked/{rank}", "before")
        dead.set(f"answered/{rank}", "before")
    with ThreadPoolExecutor(3) as pool:
        clients = [dist.TCPStore("127.0.0.1", agent.port, is_master=False) for _ in range(3)]
        late = [pool.submit(rendezvous_store, clients[rank], rank, 3, limit) for rank in (1, 2)]
        time.sleep(0.2)
        assert not any(future.done() for future in late)
        address = rendezvous_store(clients[0], 0, 3, limit)
        address.set("address", "here")
        assert [future.result().get("address") for future in late] == [b"here"] * 2
        assert not dead.check(["address"])
    with pytest.raises(RuntimeError, match="waiting for the first process"):
        rendezvous_store(agent, 1, 3, timedelta(seconds=0.1))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="read from /proc")
def test_killed_processes_restart_and_lost_machines_are_dropped(photo_folder, tmp_path):
    vitreous.train(photo_folder, out=str(tmp_path / "whole"), progress=False, **LONG_RUN_OPTIONS)
    expected = read_outcome(tmp_path / "whole")

    agent = start_agent(
        tmp_path,
        "one",
        build_launch_command(
            photo_folder, tmp_path / "one", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"
        ),
    )
    wait_for_checkpoint(tmp_path / "one")
    os.kill(list_children(agent)[-1], signal.SIGKILL)
    assert agent.wait(300) == 0, (tmp_path / "one.log").read_text()[-3000:]
    assert "torchrun restarted the processes" in (tmp_path / "one.log").read_text()
    assert read_outcome(tmp_path / "one") == expected

    meeting = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    meeting += [
        "--rdzv-endpoint",
        f"127.0.0.1:{free_port()}",
        "--rdzv-id",
        "pair",
        "--rdzv-conf",
        "last_call_timeout=5",
    ]
    agents = [
        start_agent(tmp_path, name, build_launch_command(photo_folder, tmp_path / "pair", *meeting))
        for name in ("first", "second")
    ]
    wait_for_checkpoint(tmp_path / "pair")
    assert all(list_children(process_agent) for process_agent in agents)
    for process in [agents[1].pid, *list_children(agents[1])]:  # the agent first, because it would restart its worker
        os.kill(process, signal.SIGKILL)
    assert agents[0].wait(300) == 0, (tmp_path / "first.log").read_text()[-3000:]
    assert read_outcome(tmp_path / "pair") == expected
