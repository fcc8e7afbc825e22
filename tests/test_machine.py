from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from vitreous import machine
from vitreous.cores import peak_memory
from vitreous.machine import packs, pick_precision, warning


@pytest.mark.parametrize("units, half, packed", [({}, False, False), ({"avx2": True}, False, False), ({"avx512_f": True}, False, True)])
def test_choices_follow_the_processor(units, half, packed, monkeypatch):
    monkeypatch.setattr(machine, "capabilities", lambda: units)
    assert machine.has_bf16("cpu") == half and packs("cpu") == packed
    assert pick_precision("auto", "cpu") == "fp32"
    assert "emulated" in warning("bf16", "cpu")
    assert warning("fp32", "cpu") is None and warning("auto", "cpu") is None


@pytest.mark.parametrize("unit", ["avx512_bf16", "amx_bf16"])
def test_bfloat16_is_the_default_where_it_is_multiplied(unit, monkeypatch):
    monkeypatch.setattr(machine, "capabilities", lambda: {unit: True, "avx512_f": True})
    assert pick_precision("auto", "cpu") == "bf16" and warning("bf16", "cpu") is None
    assert pick_precision("fp32", "cpu") == "fp32"


def test_a_gpu_packs_nothing():
    assert not packs("cuda:0")


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_peak_memory_is_the_process_own_and_not_its_parent_s():
    held = torch.ones(150 * 2**20, dtype=torch.uint8)
    script = "from vitreous.cores import peak_memory; print(peak_memory('cpu'))"
    child = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    before = peak_memory("cpu")
    more = torch.ones(150 * 2**20, dtype=torch.uint8)
    assert peak_memory("cpu") >= before and peak_memory("cpu") > held.numel() + more.numel()
    assert 2 * 2**20 < child < held.numel()
