"""The OpenVINO Core of a process: its threads, and signals after models are released, because the plugin's alternate
signal stack stays mapped."""

import os
import subprocess
import sys

import numpy as np
import pytest

from vitreous.inference.libraries import compile_openvino_graph
from vitreous.system.cores import count_affinity_cores

ov = pytest.importorskip("openvino")

SIGNAL_SCRIPT = """
import gc, os, signal
import numpy as np, openvino as ov
from vitreous.inference.libraries import get_openvino_core

def compile_model():
    given = ov.opset13.parameter([-1, 64], ov.Type.f32)
    product = ov.opset13.matmul(given, np.ones((64, 64), np.float32), False, False)
    compiled = get_openvino_core().compile_model(ov.Model([product], [given]), "CPU")
    compiled([np.ones((2, 64), np.float32)])
    return compiled

received = []
signal.signal(signal.SIGUSR1, lambda *given: received.append(1))
models = [compile_model() for _ in range(3)]
while models:  # the first compiled is released first
    del models[0]
    gc.collect()
os.kill(os.getpid(), signal.SIGUSR1)
assert received
print("alive")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="could not import 'fcntl'")
def test_signal_after_releasing_models_is_handled():
    done = subprocess.run([sys.executable, "-c", SIGNAL_SCRIPT], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr[-2000:]


@pytest.mark.parametrize("threads", [1, 2])
def test_graphs_use_the_threads_of_the_openmp_variable(threads, monkeypatch):
    monkeypatch.setattr("vitreous.system.cores.count_usable_cores", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    pixels = ov.opset13.parameter([-1, 64], ov.Type.f32)
    product = ov.opset13.matmul(pixels, np.ones((64, 64), np.float32), False, False)
    compiled = compile_openvino_graph(ov.Model([product], [pixels]), "f32", PERFORMANCE_HINT="LATENCY")
    assert compiled.get_property("INFERENCE_NUM_THREADS") == min(threads, count_affinity_cores())
