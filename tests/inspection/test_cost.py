from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from vitreous.inspection import cost as costing
from vitreous.inspection.cost import (
    LiveMemoryTracker,
    estimate_pass_seconds,
    find_max_batch_size,
    list_powers_of_two,
    measure_inference_costs,
    round_image_sizes,
    trace_memory_by_operation,
)
from vitreous.models.zoo import create_untrained_model


def measure_peak_memory(model, images):
    """The peak bytes of tensors in one forward pass."""
    return max(trace_memory_by_operation(model, images))


def build_tiny_model(**changes):
    return create_untrained_model("ViT-16x1/8", **({"image_size": 16, "num_classes": 2} | changes)).eval()


def test_image_sizes_are_unique_multiples_of_the_patch_size():
    assert round_image_sizes(build_tiny_model(), (64, 30, 27, 3)) == [(8, 8), (24, 24), (32, 32), (64, 64)]
    assert round_image_sizes(create_untrained_model("ViT-16x1/14", image_size=28)) == [
        (70, 70),
        (126, 126),
        (224, 224),
        (378, 378),
        (518, 518),
    ]


def test_peak_memory_counts_only_live_tensors():
    """Of three consecutive products of 100 x 100 two are alive at a time; weights count as part of the model."""
    layers = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(3)))
    with torch.no_grad(), LiveMemoryTracker([p.untyped_storage() for p in layers.parameters()]) as alive:
        layers(torch.ones(100, 100).clone())
    assert alive.peak == 3 * 100 * 100 * 4  # the input stays alive
    with torch.no_grad(), LiveMemoryTracker([]) as alive:
        for _ in range(5):
            a = torch.ones(1000)
            a.view(10, 100).T.add_(1)
    assert alive.peak <= 2 * 1000 * 4


@pytest.mark.parametrize("batch", [1, 4])
def test_peak_memory_scales_with_batch_size_and_covers_the_widest_layer(batch):
    model = build_tiny_model(depth=2, mlp={"hidden": 256})  # all blocks but the last compute every token
    with torch.no_grad():
        peak = measure_peak_memory(model, torch.zeros(batch, 3, 32, 32))
    assert peak >= batch * (3 * 32 * 32 + 2 * 17 * 256) * 4
    assert peak <= 2 * batch * (3 * 32 * 32 + 2 * 17 * 256) * 4


def test_costs_are_measured_for_each_image_size():
    model = build_tiny_model()
    costs = list(measure_inference_costs(model, round_image_sizes(model, (16, 32)), (1, 3)))
    assert [(c.image, c.tokens) for c in costs] == [((16, 16), 5), ((32, 32), 17)]
    for cost in costs:
        assert cost.macs == model.config.macs(cost.image)
        assert list(cost.throughputs) == [1, 3] and min(cost.throughputs.values()) > 0
        assert cost.find_fastest[1] == max(cost.throughputs.values())
        assert cost.largest_batch_size <= costing.MAX_TRIED_BATCH_SIZE and not cost.is_measured
    assert costs[1].memory > costs[0].memory
    bit = create_untrained_model("BiT-R50x1", image_size=32, blocks=(1,), width=16, num_classes=2)
    assert [c.tokens for c in measure_inference_costs(bit, [(32, 32)], (1,))] == [64]
    assert bit.training and not next(bit.parameters()).grad


def test_max_batch_size_fits_in_free_memory(monkeypatch):
    model = build_tiny_model()
    with torch.no_grad():
        peak = measure_peak_memory(model, torch.zeros(1, 3, 16, 16))
    monkeypatch.setattr(costing, "get_free_memory", lambda device: int(5.5 * peak / costing.CPU_MEMORY_SHARE))
    (cost,) = measure_inference_costs(model, [(16, 16)], (1, 4, 8))
    assert cost.largest_batch_size == 5 and list(cost.throughputs) == [1, 4]  # a batch of 8 would not fit
    assert list_powers_of_two(5) == [1, 2, 4] and list_powers_of_two(1) == [1]


@pytest.mark.parametrize("name, changes", [("BiT-R50x1", {"blocks": (1, 1, 1, 1)}), ("ViT-64x2/8", {})])
def test_max_batch_size_is_the_largest_that_fits(name, changes):
    """Also where one image's memory is mostly standardised weights, which do not grow with the batch."""
    model = create_untrained_model(name, image_size=32, num_classes=2, **changes).eval()
    with torch.no_grad():
        single, two = (trace_memory_by_operation(model, torch.zeros(count, 3, 32, 32)) for count in (1, 2))
        for room in (max(single), 3 * max(single), 20 * max(single)):
            count = find_max_batch_size(room, single, two)
            assert (
                measure_peak_memory(model, torch.zeros(count, 3, 32, 32))
                <= room
                < measure_peak_memory(model, torch.zeros(count + 1, 3, 32, 32))
            )
    assert find_max_batch_size(20 * max(single), single, two) > (40 if name == "BiT-R50x1" else 19)
    assert (
        find_max_batch_size(max(single) - 1, single, two) == 0
        and find_max_batch_size(10**15, single, two) == costing.MAX_TRIED_BATCH_SIZE
    )


def test_measurement_respects_the_time_limit(monkeypatch):
    """A model that takes 0.1 s per image: few batch sizes are measured, and an image size beyond the time limit is
    skipped."""
    model = build_tiny_model()
    model.register_forward_pre_hook(lambda module, given: time.sleep(0.1 * len(given[0])))
    monkeypatch.setattr(costing, "TIMING_SECONDS", 0.05)
    costs = list(measure_inference_costs(model, [(16, 16), (256, 256)], seconds=1.2))
    assert [c.image for c in costs] == [(16, 16)] and 1 <= len(costs[0].throughputs) <= 3


def test_pass_time_estimate_separates_fixed_overhead():
    """A pass of 0.5 s plus 0.01 s per image takes 1.14 s for 64 images; scaling a pass of two images would give 17
    s."""
    rate = {batch: batch / (0.5 + 0.01 * batch) for batch in (1, 2)}
    assert estimate_pass_seconds(rate, 64) == pytest.approx(1.14)
    assert estimate_pass_seconds({}, 64) == 0
    assert estimate_pass_seconds({1: 10.0}, 64) == pytest.approx(6.4)
    assert estimate_pass_seconds({1: 10.0, 2: 40.0}, 4) == pytest.approx(0.05)  # never less than the time of one image
