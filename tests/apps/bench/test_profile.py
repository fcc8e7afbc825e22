"""`vitreous bench --profile`: operator groups and the time of a step."""

from __future__ import annotations

import pytest
import torch

from vitreous.apps.bench.profile import (
    OPERATOR_GROUPS,
    OTHER_OPERATORS,
    OUTSIDE_OPERATORS,
    PROFILED_REGION,
    OperatorEvent,
    classify_operator,
    profile_steps,
    summarise_events,
)
from vitreous.apps.bench.run import run_benchmarks
from vitreous.apps.bench.work import Timing
from vitreous.errors import UsageError


@pytest.mark.parametrize(
    "operator, group",
    [
        ("aten::addmm", "products"),
        ("aten::baddbmm", "products"),
        ("mkldnn::_linear_pointwise", "products"),
        ("aten::mkldnn_convolution", "products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention, fused"),
        ("aten::_softmax_backward_data", "softmax"),
        ("aten::native_layer_norm_backward", "norms"),
        ("aten::gelu_backward", "GELU"),
        ("aten::_fused_adamw_", "optimiser"),
        ("aten::copy_", "copies and layout"),
        ("aten::empty_strided", "memory"),
        ("aten::add_", "sums and other elementwise"),
        ("AddmmBackward0", OTHER_OPERATORS),
    ],
)
def test_each_operator_is_in_one_group(operator, group):
    assert classify_operator(operator) == group


def test_step_time_is_attributed_to_the_busy_cores():
    """Two seconds: half a second of a product on all cores, then two threads, one of them idle for half of the time."""
    events = [
        OperatorEvent(PROFILED_REGION, 1, 0.1),
        OperatorEvent("aten::mm", 1, 0.5),
        OperatorEvent("aten::gelu", 2, 1.5),
        OperatorEvent("aten::copy_", 3, 0.25),
        OperatorEvent("aten::copy_", 3, 0.5),
    ]
    profile = summarise_events(events, elapsed=2.0, num_steps=2, top=2)
    assert profile.shares["products"] == pytest.approx(0.25)
    assert profile.shares["GELU"] == pytest.approx(0.375)
    assert profile.shares["copies and layout"] == pytest.approx(0.1875)
    assert profile.shares[OUTSIDE_OPERATORS] == pytest.approx(0.1875)
    assert sum(profile.shares.values()) == pytest.approx(1) and list(profile.shares) == list(OPERATOR_GROUPS)
    assert profile.seconds == 1.0
    assert profile.operators == [("aten::gelu", 0.5, pytest.approx(0.375)), ("aten::mm", 0.5, pytest.approx(0.25))]


def test_profile_records_the_operators_of_a_step():
    left = torch.randn(256, 256)

    def run_step() -> float:
        _ = (left @ left).softmax(-1)
        return 1.0

    profile = profile_steps(run_step, 0.02)
    (product,) = (calls for name, calls, _ in profile.operators if name == "aten::mm")
    assert product == 1 and profile.shares["products"] > 0 and profile.shares["softmax"] > 0
    assert profile.shares["optimiser"] == 0


def test_profiling_a_gpu_is_rejected(monkeypatch):
    monkeypatch.setattr("vitreous.apps.bench.run.pick_device", lambda device: "cuda")
    with pytest.raises(UsageError, match="profile supports only the CPU, not cuda\n  add device='cpu'"):
        run_benchmarks(timing=Timing(profile=True))
