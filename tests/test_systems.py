"""Without fork, file locks, resource limits and most signals, all modules import, and a run trains, resumes and
predicts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

#: removes functions that Windows lacks before anything is imported
REMOVAL_SCRIPT = """
import os, signal, sys
for name in ("fcntl", "resource", "pwd", "grp", "termios", "pty"):
    sys.modules[name] = None
for module, names in (
    (os, ("fork", "getuid", "geteuid", "getgid", "sched_getaffinity", "nice", "killpg", "setsid", "mkfifo")),
    (signal, ("SIGKILL", "SIGHUP", "SIGALRM", "SIGUSR1", "setitimer", "ITIMER_PROF", "ITIMER_REAL", "alarm")),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
"""
IMPORT_ALL = """
import importlib, json, pkgutil
import vitreous

failed = {}
names = [one.name for one in pkgutil.walk_packages(vitreous.__path__, "vitreous.") if not one.name.endswith("__main__")]
for name in names:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = repr(error)
print(json.dumps([len(names), failed]))
"""
USAGE_SCRIPT = """
import json
import numpy as np
import torch
from PIL import Image
import vitreous
from vitreous.system.cores import ContentionMonitor, count_usable_cores, get_peak_memory

plain = dict(out="run", device="cpu", workers=0, save_every=1)
first = vitreous.train("digits", steps=2, **plain)
Image.fromarray(np.zeros((8, 8), np.uint8)).save("digit.png")
model = vitreous.load("run")
answer = model.predict("digit.png")
torch.save({name: tensor for name, tensor in model.model.state_dict().items()}, "weights.pt")
again = vitreous.load("weights.pt", headless=True).model
same = all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.model.state_dict().values()))
vitreous.train("digits", steps=2, out="run", resume=True, device="cpu", workers=0)
judged = vitreous.evaluate("run", split="val", workers=0)
vitreous.export("run", to="google-npz", out="run.npz")
print(json.dumps([first["steps"], len(answer.names), same, judged["val"]["images"], count_usable_cores() > 0]))
"""


def run_without_unix_features(code: str, folder: Path) -> list:
    """Run a program in a new process on such a system; returns its parsed JSON output."""
    root = os.fspath(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", REMOVAL_SCRIPT + code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_module_is_imported(tmp_path):
    count, failed = run_without_unix_features(IMPORT_ALL, tmp_path)
    assert not failed and count > 300


@pytest.mark.slow
def test_a_run_trains_resumes_evaluates_and_predicts(tmp_path):
    assert run_without_unix_features(USAGE_SCRIPT, tmp_path) == [2, 5, True, 179, True]
