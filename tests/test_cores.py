"""Thread pools and contention: settings made before PyTorch is imported, and detection of other load."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from vitreous.cli.console import Console
from vitreous.cli.main import main
from vitreous.system import cores, machine
from vitreous.system.cores import (
    SPIN_VARIABLES,
    USER_WAIT_VARIABLES,
    ContentionMonitor,
    limit_thread_pools,
    restore_default_spinning,
)
from vitreous.training.shards import choose_shard_count

THREAD_VARIABLES = (*USER_WAIT_VARIABLES, "OMP_NUM_THREADS")
LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Unset all variables; changes by a test are reverted."""
    for name in THREAD_VARIABLES:
        monkeypatch.setenv(name, "")  # registers the variable for restoring
        monkeypatch.delenv(name)


@pytest.fixture
def two_core_quota(monkeypatch, tmp_path):
    """A container limited to two of eight cores."""
    monkeypatch.setattr(cores, "CGROUP_CPU_FILE", str(tmp_path / "cpu.max"))
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    monkeypatch.setattr(cores, "count_affinity_cores", lambda: 8)


def test_every_command_limits_thread_spinning(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert {name: os.environ.get(name) for name in SPIN_VARIABLES} == SPIN_VARIABLES


@pytest.mark.parametrize(
    "name, value", [("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "300000"), ("KMP_BLOCKTIME", "200")]
)
def test_user_wait_variables_are_not_overridden(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    limit_thread_pools()
    assert {variable: os.environ[variable] for variable in USER_WAIT_VARIABLES if variable in os.environ} == {
        name: value
    }


def test_thread_count_follows_the_container_quota(two_core_quota, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert cores.count_usable_cores() == 2
    assert choose_shard_count("cpu", 128) == 2
    limit_thread_pools()
    assert os.environ["OMP_NUM_THREADS"] == "2"
    calls = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    machine.configure_process()
    assert calls == []  # the environment already limits the threads
    monkeypatch.delenv("OMP_NUM_THREADS")
    machine.configure_process()  # PyTorch was imported before this package
    assert calls == [2]


def test_thread_count_is_unset_without_a_container(monkeypatch, tmp_path):
    monkeypatch.setattr(cores, "CGROUP_CPU_FILE", str(tmp_path / "none"))
    limit_thread_pools()
    assert "OMP_NUM_THREADS" not in os.environ


def test_other_libraries_are_measured_with_default_spinning(monkeypatch):
    limit_thread_pools()
    with restore_default_spinning():
        assert not any(name in os.environ for name in SPIN_VARIABLES)
    assert os.environ["GOMP_SPINCOUNT"] == SPIN_VARIABLES["GOMP_SPINCOUNT"]
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    with restore_default_spinning():
        assert os.environ["GOMP_SPINCOUNT"] == "7"  # set by the user, for all processes


def fake_cpu_usage(monkeypatch, *, other_share: float, own_share: float, steps: int = 6) -> None:
    """Simulate measurements 4 seconds apart, with shares of two cores used by other processes and by this one."""
    per, clock = 800, iter(range(1, steps + 2))

    def usage(root: int) -> tuple[float, int, int, int]:
        n = next(clock)
        return 4.0 * n, per * n, round(per * (1 - other_share - own_share)) * n, round(per * own_share) * n

    monkeypatch.setattr(cores, "read_cpu_ticks", usage)
    monkeypatch.setattr(ContentionMonitor, "SECONDS", 3.0)
    monkeypatch.setattr(cores.time, "monotonic", lambda: 1e9)


@pytest.mark.parametrize(
    "other_share, own_share, crowded",
    [(0.5, 0.5, True), (0.25, 0.7, True), (0.0, 1.0, False), (0.15, 0.85, False), (0.4, 0.4, False)],
)
def test_cpu_contention_is_reported_once(other_share, own_share, crowded, monkeypatch):
    fake_cpu_usage(monkeypatch, other_share=other_share, own_share=own_share)
    notes: list[str] = []
    neighbours = ContentionMonitor(notes.append)
    neighbours.poll()
    assert notes == []  # a single measurement may be chance
    for _ in range(4):
        neighbours.poll()
    assert len(notes) == crowded
    assert not crowded or f"{other_share:.0%}" in notes[0]
    assert neighbours.measure() == pytest.approx(other_share)


def test_unreadable_cpu_usage_is_not_reported(monkeypatch):
    monkeypatch.setattr(cores, "read_cpu_ticks", lambda root: None)
    neighbours = ContentionMonitor(lambda text: pytest.fail(text))
    neighbours.poll()
    assert neighbours.measure() is None


@pytest.mark.parametrize(
    "value, threads", [(None, 2), ("", 2), ("1", 1), ("1,4", 1), ("2", 2), ("16", 2), ("0", 2), ("-1", 2), ("many", 2)]
)
def test_runtimes_of_exported_files_follow_the_openmp_variable(value, threads, two_core_quota, monkeypatch):
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert cores.count_compute_threads() == threads


@LINUX_ONLY
def test_child_processes_do_not_count_as_contention():
    start = cores.read_cpu_ticks(os.getpid())
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    with subprocess.Popen(
        [sys.executable, "-c", burn + "\nprint('done', flush=True)\ninput()"], stdin=-1, stdout=-1
    ) as child:
        assert child.stdout is not None and child.stdout.readline()
        alive = cores.read_cpu_ticks(os.getpid())
        assert child.pid in cores.list_descendants(os.getpid())
        child.communicate(b"\n")
    ended = cores.read_cpu_ticks(os.getpid())
    assert start and alive and ended
    # ticks of 10 ms are counted while the child is alive, and after it has ended
    assert alive[3] - start[3] >= 28 and ended[3] >= alive[3]
    assert alive[1] >= start[1] and alive[2] >= start[2]


def test_command_progress_reports_contention(monkeypatch, capsys):
    fake_cpu_usage(monkeypatch, other_share=0.5, own_share=0.5)
    console = Console(False)
    for done in range(4):
        console.progress("train", done, 10)
    assert capsys.readouterr().err.count("other processes use 50%") == 1
