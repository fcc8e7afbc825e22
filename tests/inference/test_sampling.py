"""Samples depend only on the seed, class and image index; inpainting masks and guidance scales."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.contracts import randomise
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.split import ArraySplit
from vitreous.errors import UsageError
from vitreous.evaluation.denoising import NUM_TIMES, DenoisingEvaluator, assign_times
from vitreous.generation.process import Diffusion, Flow
from vitreous.generation.settings import SamplingOptions
from vitreous.inference.engine import TorchEngine
from vitreous.inference.image_sampler import ImageSampler, InpaintingCanvas
from vitreous.models.config import DiTConfig
from vitreous.models.dit import DiT

DIT_CONFIG = DiTConfig(
    image=(8, 8), channels=3, classes=4, width=32, depth=2, heads=2, hidden=64, learned_variance=False
)
LABELS, SAMPLE_NUMBERS = torch.tensor([0, 1, 1, 2, 3]), torch.tensor([0, 0, 1, 0, 5])


DEFAULT_PROCESS = Diffusion()


def build_sampler(process=DEFAULT_PROCESS, precision="fp32", **changes):
    torch.manual_seed(0)
    config = replace(DIT_CONFIG, **changes)
    model = randomise(DiT(config)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    return ImageSampler(model, process, config.classes, ImagePreprocess((8, 8)), device="cpu", precision=precision)


@pytest.mark.processor
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("process", "name"), [(Diffusion(), "ddpm"), (Diffusion(), "ddim"), (Flow(), "heun")])
def test_samples_are_independent_of_batch_composition(process, name, precision):
    ours = build_sampler(process, precision)
    options = SamplingOptions(guidance=2.0, steps=8, sampler=name, seed=3)
    together = ours.sample(LABELS, SAMPLE_NUMBERS, options)
    assert together.shape == (5, 3, 8, 8) and together.dtype == torch.uint8 and together.float().std() > 1
    apart = torch.cat([ours.sample(LABELS[i : i + 1], SAMPLE_NUMBERS[i : i + 1], options) for i in range(5)])
    # of 255: in bfloat16 the result of a product depends slightly on its number of rows
    most = {"fp32": 1, "bf16": 24}[precision]
    assert (together.int() - apart.int()).abs().max() <= most
    other_seed = ours.sample(LABELS, SAMPLE_NUMBERS, replace(options, seed=4))
    assert (together.int() - other_seed.int()).abs().float().mean() > 1
    assert not torch.equal(together[1], together[2])


def test_progress_counts_every_image():
    count = [0.0]
    build_sampler().sample(
        LABELS, SAMPLE_NUMBERS, SamplingOptions(steps=4), lambda n: count.__setitem__(0, count[0] + n)
    )
    assert count[0] == pytest.approx(5)


def test_inpainting_keeps_the_masked_pixels():
    image = torch.linspace(-1, 1, 3 * 64).view(1, 3, 8, 8).expand(5, -1, -1, -1)
    mask = torch.zeros(5, 1, 8, 8, dtype=torch.bool)
    mask[..., :4] = True
    for process in (Diffusion(), Flow()):
        ours = build_sampler(process)
        images = ours.sample(LABELS, SAMPLE_NUMBERS, SamplingOptions(steps=10), canvas=InpaintingCanvas(image, mask))
        expected = ours.to_uint8_pixels(image)
        assert torch.equal(images[..., :4], expected[..., :4]) and not torch.equal(images[..., 4:], expected[..., 4:])


def test_sampling_with_learned_variance_and_without_classes():
    assert (
        build_sampler(learned_variance=True)
        .sample(LABELS, SAMPLE_NUMBERS, SamplingOptions(steps=5, sampler="ddpm"))
        .any()
    )
    plain = build_sampler(Flow(), classes=0)
    zero = torch.zeros(2, dtype=torch.int64)
    assert plain.sample(zero, torch.arange(2), SamplingOptions(steps=3, guidance=3.0)).shape == (2, 3, 8, 8)


def test_samplers_of_other_processes_are_rejected():
    with pytest.raises(UsageError, match="heun"):
        build_sampler().sample(LABELS, SAMPLE_NUMBERS, SamplingOptions(sampler="heun"))


@pytest.mark.parametrize("process", [Diffusion(betas="cosine"), Flow()])
def test_denoising_error_matches_the_loop(process):
    """A new model predicts 0, so its error is the mean square of the target."""
    rng = np.random.default_rng(0)
    split = ArraySplit(rng.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8), np.arange(6) % 4)
    engine = TorchEngine(DiT(DIT_CONFIG).eval(), ImagePreprocess((8, 8)), "cpu", "fp32")
    evaluator = DenoisingEvaluator(process, labelled=True)
    report = evaluator(engine, split, workers=0)
    rows = evaluator(engine, split.take(np.array([4, 1])), workers=0)
    assert report.images == 6 and report.better == "lower" and len(report.metrics) == 1 + NUM_TIMES
    alone = [evaluator(engine, split.take(np.array([i])), workers=0).metrics["denoising_error"] for i in (4, 1)]
    assert rows.metrics["denoising_error"] == pytest.approx(np.mean(alone), rel=1e-5)
    noise = 1.0 if isinstance(process, Diffusion) else 1.0 + 1 / 3  # images are uniform in -1 .. 1
    assert report.metrics["denoising_error"] == pytest.approx(noise, rel=0.1)


def test_denoising_error_of_many_images_uses_a_subset_of_times(monkeypatch):
    rng = np.random.default_rng(0)
    split = ArraySplit(rng.integers(0, 256, (32, 8, 8, 3), dtype=np.uint8), np.arange(32) % 4)
    engine = TorchEngine(DiT(DIT_CONFIG).eval(), ImagePreprocess((8, 8)), "cpu", "fp32")
    evaluator = DenoisingEvaluator(Flow(), labelled=True)
    all_metrics = evaluator(engine, split, workers=0).metrics
    for max_inputs, period in ((128, 2), (90, 3), (8, 8)):
        monkeypatch.setattr("vitreous.evaluation.denoising.MAX_MODEL_INPUTS", max_inputs)
        times = assign_times(np.arange(32), 32)
        assert times.any(0).all() and times.any(1).all() and times.sum() <= -(-32 * NUM_TIMES // period) + NUM_TIMES
        subset_metrics = evaluator(engine, split, workers=0).metrics
        assert (
            subset_metrics.keys() == all_metrics.keys()
            and subset_metrics["denoising_error"] != all_metrics["denoising_error"]
        )
        assert subset_metrics["denoising_error"] == pytest.approx(all_metrics["denoising_error"], rel=0.1)
