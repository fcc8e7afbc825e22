from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests import other_processor
from tests.conftest import TINY_RUN, parse_json_output, run_cli
from vitreous.apps.bench.contenders import list_contenders
from vitreous.errors import UsageError
from vitreous.jobs import doctor
from vitreous.jobs.train import train
from vitreous.models.names import vit_config_from_name
from vitreous.system.allocator import reserve_huge_pages
from vitreous.system.cores import get_peak_memory
from vitreous.system.machine import (
    CPU_FEATURES,
    ONEDNN_ISA_LEVELS,
    describe_emulation,
    describe_environment,
    get_best_cpu_feature,
    get_cpu_features,
    get_device_table,
    has_fast_packed_matmul,
    has_vnni,
    pick_precision,
)
from vitreous.training import throughput
from vitreous.training import throughput as peak

pytestmark = pytest.mark.processor

#: level and its defaults: precision, packed products, products of 8-bit numbers summed in 32 bits
CHOICES_BY_LEVEL = [
    ("SSE41", "fp32", False, False),
    ("AVX2", "fp32", False, False),
    ("AVX2_VNNI", "fp32", False, True),
    ("AVX512_CORE", "fp32", True, False),
    ("AVX512_CORE_VNNI", "fp32", True, True),
    ("AVX512_CORE_BF16", "bf16", True, True),
    ("AVX512_CORE_AMX", "bf16", True, True),
]


@pytest.fixture
def full_processor(monkeypatch):
    """A processor with all instruction sets, and no variables set."""
    for name in ("VITREOUS_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: {**dict.fromkeys(CPU_FEATURES, True), "cpu_name": "Full", "fma3": True}
    )
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


@pytest.mark.parametrize("level, precision, packed, vnni", CHOICES_BY_LEVEL)
@pytest.mark.parametrize("variable", ["VITREOUS_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_choices_follow_the_instruction_set_limit(
    variable, level, precision, packed, vnni, full_processor, monkeypatch
):
    monkeypatch.setenv(variable, level.lower())
    assert (pick_precision("auto", "cpu"), has_fast_packed_matmul("cpu"), has_vnni()) == (precision, packed, vnni)
    assert (pick_precision("fp32", "cpu"), pick_precision("bf16", "cpu")) == ("fp32", "bf16")
    assert (describe_emulation("bf16", "cpu") is None) == (precision == "bf16") and describe_emulation(
        "fp32", "cpu"
    ) is None


@pytest.mark.parametrize(
    "kernels, best", [("DEFAULT", ""), ("AVX2", "avx_vnni"), ("AVX512", "amx_bf16"), ("SVE256", "amx_bf16")]
)
def test_the_limit_of_pytorch_is_respected(kernels, best, full_processor, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: kernels)
    assert get_best_cpu_feature() == best and get_cpu_features()["fma3"] and "cpu_name" not in get_cpu_features()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert get_best_cpu_feature() == ("avx2" if best else "")


def test_a_lower_level_never_has_more(full_processor, monkeypatch):
    """A feature that PyTorch does not report is absent, unless its level is assumed."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_f": False})
    for level in (*ONEDNN_ISA_LEVELS, "ALL", "DEFAULT"):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", level)
        assert {name for name, has in get_cpu_features().items() if has} <= {"avx2"}
    monkeypatch.setenv("VITREOUS_CPU_ISA", "AVX512_CORE_BF16")
    assert get_best_cpu_feature() == "avx512_bf16" and "assumed" in describe_environment()["instruction_set"]


def test_unknown_levels_are_rejected(monkeypatch):
    monkeypatch.setenv("VITREOUS_CPU_ISA", "AVX3")
    with pytest.raises(UsageError, match="AVX3 is not an instruction set level"):
        get_cpu_features()


def test_a_lowered_capability_is_detected():
    """Checked in a new process, because PyTorch reads its variable once."""
    script = "from vitreous.system.machine import *; print(pick_precision('auto', 'cpu'), has_fast_packed_matmul('cpu'), has_bf16('cpu'))"
    lowered = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "VITREOUS_CPU_ISA": ""}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=lowered
    ).stdout
    assert result.split() == ["fp32", "False", "False"]


def test_doctor_reports_the_precision(processor, monkeypatch):
    monkeypatch.setattr(doctor, "BENCHMARK_SECONDS", 0.0)
    monkeypatch.setattr(doctor, "vit_config_from_name", lambda name: vit_config_from_name("ViT-32x1/8", 224))
    document = parse_json_output(run_cli("doctor", "--json"))
    assert document["huge_pages"] == ("on request" if reserve_huge_pages() else "system default")
    assert document["precision"] == processor and document["bf16"] == (processor == "bf16")
    assert document["instruction_set"].startswith("avx512_bf16" if processor == "bf16" else "avx2")


def test_runs_train_in_the_default_precision_of_the_processor(processor, photo_folder, tmp_path, monkeypatch):
    """The default precision is stored in the run; the loss falls in either precision."""
    # measuring takes half a minute where bfloat16 is emulated
    monkeypatch.setattr(throughput, "measure_peak_flops", lambda device, precision: 1e12)
    options = {name: value for name, value in TINY_RUN.items() if name not in ("precision", "mixup", "drop_path")}
    train(photo_folder, out=tmp_path / "run", **options)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["precision"] == processor
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(losses) == 6 and sum(losses[-2:]) < sum(losses[:2])


def test_peak_flops_use_small_matrices_for_emulated_bfloat16(processor, monkeypatch):
    sides = {}
    monkeypatch.setattr(
        peak, "choose_fastest_matmul", lambda device, precision, size: (lambda: sides.update({precision: size}), 1.0)
    )
    for precision in ("fp32", "bf16"):
        peak.measure_peak_flops.__wrapped__("cpu", precision)
    assert sides == {
        "fp32": peak.PEAK_MATRIX_SIDES["cpu"],
        "bf16": peak.PEAK_MATRIX_SIDES["cpu"] if processor == "bf16" else peak.EMULATED_MATRIX_SIDE,
    }


def test_races_exclude_emulated_precisions(processor):
    for task in ("inference", "train"):
        assert any("bf16" in contender.settings for contender in list_contenders(task, "cpu")) == (processor == "bf16")


@pytest.mark.skipif(not (Path(__file__).parent.parent / ".ci" / "run").exists(), reason="not a checkout")
def test_ci_runs_the_marked_tests_as_another_processor(processor):
    script = (Path(__file__).parent.parent / ".ci" / "run").read_text("utf-8")
    assert "-m tests.other_processor" in script
    assert other_processor.get_other_processor_variables() == (
        other_processor.LOWERED_VARIABLES if processor == "bf16" else other_processor.RAISED_VARIABLES
    )


def test_a_gpu_packs_nothing():
    assert not has_fast_packed_matmul("cuda:0")


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_peak_memory_excludes_the_parent_process():
    held = torch.ones(150 * 2**20, dtype=torch.uint8)
    script = "from vitreous.system.cores import get_peak_memory; print(get_peak_memory('cpu'))"
    child = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    own_peak = get_peak_memory("cpu")
    more = torch.ones(150 * 2**20, dtype=torch.uint8)
    assert get_peak_memory("cpu") >= own_peak and get_peak_memory("cpu") > held.numel() + more.numel()
    assert 2 * 2**20 < child < held.numel()


def test_device_tables_are_built_once_and_support_training():
    calls = []

    def count_up(length: int) -> torch.Tensor:
        calls.append(length)
        return torch.arange(length, dtype=torch.float32)

    cpu = torch.device("cpu")
    with torch.inference_mode():
        table = get_device_table(count_up, cpu, 4)
    with torch.device("meta"):
        again = get_device_table(count_up, cpu, 4)
    assert again is table and calls == [4] and table.tolist() == [0, 1, 2, 3]
    weight = torch.ones(4, requires_grad=True)
    (weight * table).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, table)
