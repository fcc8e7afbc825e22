"""Diffusion and its samplers match the paper's constants, closed forms, and diffusers' schedulers step by step."""

from __future__ import annotations

import math

import pytest
import torch

from vitreous.errors import UsageError, WeightsError
from vitreous.generation.noising import (
    GaussianDiffusion,
    compute_beta_schedule,
    discretised_log_likelihood,
    gaussian_kl,
)
from vitreous.generation.process import Diffusion, Flow, process_from_json, process_to_json
from vitreous.generation.samplers import SAMPLERS, guide_prediction, run_reverse_diffusion, space_timesteps_evenly
from vitreous.generation.settings import SamplingOptions, space_timesteps_by_stride

diffusers = pytest.importorskip("diffusers", reason="a test dependency")
IMAGE_SHAPE = (2, 3, 4, 4)


def draw_noise(seed, *shape):
    return torch.randn(*(shape or IMAGE_SHAPE), generator=torch.Generator().manual_seed(seed))


def make_fake_model(channels=3, share=1.0):
    """An arbitrary model whose output depends on all inputs."""

    def predict(noisy, time, labels=None):
        predicted = share * noisy * 0.3 + (time / 900).view(-1, 1, 1, 1).sin()
        if labels is not None:
            predicted = predicted + 0.1 * labels.view(-1, 1, 1, 1)
        return torch.cat([predicted, (predicted * 2).cos() * 0.7], 1) if channels == 6 else predicted

    return predict


def test_noise_schedule_constants_match_the_paper():
    alphas = GaussianDiffusion(Diffusion()).alphas_cumprod
    assert alphas[0].item() == pytest.approx(0.9999) and alphas[-1].item() == pytest.approx(4.0358e-5, rel=1e-4)
    cosine = compute_beta_schedule(Diffusion(betas="cosine"))
    assert cosine.max() == 0.999 and (cosine[1:] > cosine[:-1]).all()


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_betas_match_diffusers(kind):
    theirs = diffusers.DDPMScheduler(beta_schedule={"linear": "linear", "cosine": "squaredcos_cap_v2"}[kind])
    assert torch.allclose(compute_beta_schedule(Diffusion(betas=kind)).float(), theirs.betas, rtol=1e-4)


def test_spaced_timesteps_keep_the_noise_levels():
    spaced = space_timesteps_evenly(1000, 250)
    assert spaced[:3] == [0, 4, 8] and spaced[-3:] == [991, 995, 999]
    full_process, spaced_process = GaussianDiffusion(Diffusion()), GaussianDiffusion(Diffusion(), spaced)
    assert torch.allclose(torch.cumprod(1 - spaced_process.betas, 0), full_process.alphas_cumprod[spaced], rtol=1e-12)
    assert space_timesteps_by_stride(1000, 50) == list(range(0, 1000, 20))


def list_authors_timesteps(steps):
    """The time steps of `space_timesteps` of DiT's code for "ddimN", by N."""
    timesteps_by_count = {}
    for stride in range(1, steps):
        timesteps = list(range(0, steps, stride))
        timesteps_by_count.setdefault(len(timesteps), timesteps)
    return timesteps_by_count


@pytest.mark.parametrize("steps", [1000, 75])
def test_ddim_timesteps_match_the_dit_code_or_are_rejected(steps):
    expected = list_authors_timesteps(steps)
    for count in range(1, steps + 1):
        if count in expected:
            assert space_timesteps_by_stride(steps, count) == expected[count], count
        else:
            with pytest.raises(UsageError) as caught:
                space_timesteps_by_stride(steps, count)
            offered = [int(token) for token in caught.value.hint.replace(",", "").split() if token.isdigit()]
            assert offered and set(offered) <= set(expected), caught.value.hint


def test_ddpm_timesteps_match_the_dit_code():
    """Ties are rounded by the rounding error of a sum of strides."""
    for count in range(1, 1001):
        stride, position, expected = 999 / max(count - 1, 1), 0.0, []
        for _ in range(count):
            expected.append(round(position))
            position += stride
        assert space_timesteps_evenly(1000, count) == expected, count


def test_the_posterior_is_the_product_of_gaussians():
    """Eq. 7 from the product of two densities: precisions 1 / variance are added."""
    g = GaussianDiffusion(Diffusion())
    step = 500
    a, previous_alpha, beta = g.alphas_cumprod[step], g.previous_alphas_cumprod[step], g.betas[step]
    precision = (1 - beta) / beta + 1 / (1 - previous_alpha)
    assert g.variance[step].item() == pytest.approx(1 / precision.item())
    assert a.item() == pytest.approx((previous_alpha * (1 - beta)).item())
    x, e = draw_noise(0), draw_noise(1)
    steps = torch.tensor([step, step])
    noisy = g.add_noise(x, e, steps)
    mean = ((1 - beta).sqrt() / beta * noisy + previous_alpha.sqrt() / (1 - previous_alpha) * x) / precision
    assert torch.allclose(g.compute_posterior_mean(x, noisy, steps), mean.float(), atol=1e-5)


def compute_authors_cdf(x):
    """`approx_standard_normal_cdf` of DiT's code."""
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))))


@pytest.mark.parametrize("predicts", ["noise", "velocity"])
def test_every_prediction_target_recovers_the_image(predicts):
    g = GaussianDiffusion(Diffusion(predicts=predicts))
    x, e, step = draw_noise(0), draw_noise(1), torch.tensor([3, 700])
    noisy = g.add_noise(x, e, step)
    predicted = g.estimate(g.make_target(x, e, step), noisy, step)
    assert torch.allclose(predicted.image, x, atol=1e-4) and torch.allclose(predicted.noise, e, atol=1e-4)


def test_the_variational_bound_trains_only_the_variance():
    g, x, e = GaussianDiffusion(Diffusion()), draw_noise(0).clamp(-1, 1), draw_noise(1)
    for step in (0, 1, 400, 999):
        steps = torch.tensor([step, step])
        noisy = g.add_noise(x, e, steps)
        output = (torch.cat([e * 1.1, draw_noise(2) * 0.5], 1)).requires_grad_()
        bound = g.variational_bound(output, x, noisy, steps)
        bound.sum().backward()
        assert output.grad[:, :3].abs().max() == 0 and output.grad[:, 3:].abs().max() > 0
        predicted = g.estimate(output, noisy, steps)
        mean, log = g.compute_posterior_mean(predicted.image, noisy, steps), predicted.log_variance
        if step:
            true, least = g.compute_posterior_mean(x, noisy, steps), g.log_variance[step].float()
            expected = torch.distributions.kl_divergence(
                torch.distributions.Normal(true, (least / 2).exp()), torch.distributions.Normal(mean, (log / 2).exp())
            )
        else:
            top = torch.where(
                x > 0.999, torch.ones_like(x), compute_authors_cdf((x + 1 / 255 - mean) / (log / 2).exp())
            )
            bottom = torch.where(
                x < -0.999, torch.zeros_like(x), compute_authors_cdf((x - 1 / 255 - mean) / (log / 2).exp())
            )
            expected = -(top - bottom).clamp(min=1e-12).log()
        expected = expected.flatten(1).mean(1) / math.log(2)
        assert torch.allclose(bound, expected, rtol=2e-3, atol=1e-5), step


def test_equal_gaussians_have_zero_kl_and_likelihoods_sum_to_one():
    assert gaussian_kl(draw_noise(0), draw_noise(1), draw_noise(0), draw_noise(1)).abs().max() < 1e-6
    values = (torch.arange(256) / 127.5 - 1).view(1, -1)
    logs = discretised_log_likelihood(values, torch.full_like(values, 0.1), torch.full_like(values, -2.0))
    assert logs.exp().sum().item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("channels", [3, 6])
def test_ddpm_matches_diffusers(channels):
    """Step by step with the same noise, and time steps a fixed stride apart as in diffusers."""
    variance_type = "learned_range" if channels == 6 else "fixed_small_log"
    theirs = diffusers.DDPMScheduler(variance_type=variance_type, clip_sample=False, timestep_spacing="leading")
    theirs.set_timesteps(50)
    g, predict = GaussianDiffusion(Diffusion(), space_timesteps_by_stride(1000, 50)), make_fake_model(channels)
    x = draw_noise(5)
    for index, time in enumerate(theirs.timesteps):
        step = torch.full((2,), 49 - index)
        predicted = g.estimate(predict(x, time.float().expand(2)), x, step)
        generator = torch.Generator().manual_seed(index)
        expected = theirs.step(predict(x, time.float().expand(2)), time, x, generator=generator).prev_sample
        noise = torch.randn(IMAGE_SHAPE, generator=torch.Generator().manual_seed(index))
        ours = g.compute_posterior_mean(predicted.image, x, step) + (predicted.log_variance / 2).exp() * noise * (
            time > 0
        )
        assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item()), time
        x = expected


def test_ddim_matches_diffusers():
    theirs = diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=True, timestep_spacing="leading")
    theirs.set_timesteps(50)
    x, predict = draw_noise(5), make_fake_model()
    states = SAMPLERS["ddim"](Diffusion(), lambda n, t, d: predict(n, t), x, 50, None)
    for time, state in zip(theirs.timesteps, states, strict=True):
        x = theirs.step(predict(x, time.float().expand(2)), time, x).prev_sample
        assert torch.allclose(state.noisy, x, rtol=1e-4, atol=1e-4 * x.abs().max().item()), time


def test_euler_matches_diffusers():
    """The sigma of diffusers falls from 1 to 0 while our time rises, and its velocity is the negative of ours."""
    theirs = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0)
    count = 20
    theirs.set_timesteps(sigmas=[1 - index / count for index in range(count)])
    x, predict = draw_noise(5), make_fake_model()
    for index, state in enumerate(SAMPLERS["euler"](Flow(), lambda n, t, d: predict(n, t), x, count, None)):
        predicted = -predict(x, torch.full((2,), 1000 * index / count))
        x = theirs.step(predicted, theirs.timesteps[index], x).prev_sample
        assert torch.allclose(state.noisy, x, atol=1e-4 * x.abs().max().item())


@pytest.mark.parametrize("name", ["ddim", "ddpm", "dpm-solver", "euler", "heun"])
def test_a_perfect_model_recovers_the_image(name):
    """If all images are equal, the exact prediction is known at every step."""
    image = draw_noise(0).clamp(-1, 1)
    process = Flow() if name in ("euler", "heun") else Diffusion()

    def predict(noisy, time, done):
        if isinstance(process, Flow):
            return (image - noisy) / max(1 - time[0].item() / 1000, 1e-3) if time[0] < 1000 else image - noisy
        alphas = GaussianDiffusion(process).alphas_cumprod[time.long()].float().view(-1, 1, 1, 1)
        return (noisy - alphas.sqrt() * image) / (1 - alphas).sqrt()

    draws = lambda step: draw_noise(100 + step)  # noqa: E731
    end = [*SAMPLERS[name](process, predict, draw_noise(1), 20, draws)][-1].noisy
    assert torch.allclose(end, image, atol=0.05 if name in ("dpm-solver", "heun") else 1e-2)


@pytest.mark.parametrize("eta", [0.0, None])
@pytest.mark.parametrize("channels", [3, 6])
def test_one_step_returns_the_predicted_image(eta, channels):
    g, noisy, output = GaussianDiffusion(Diffusion(), [0]), draw_noise(0), draw_noise(1).repeat(1, channels // 3, 1, 1)
    (state,) = run_reverse_diffusion(g, lambda *calls: output, noisy, lambda step: draw_noise(2), eta)
    image = (noisy - (1 - g.alphas_cumprod[0]).sqrt() * output[:, :3]) / g.alphas_cumprod[0].sqrt()
    assert torch.allclose(state.noisy, image.float(), atol=1e-5) and torch.allclose(
        state.image, image.float(), atol=1e-5
    )


def test_heun_is_second_order():
    """dx/dt = x + t: halving the step divides the error by about four; with Euler by two."""
    exact = draw_noise(1, 1, 1, 2, 2) * math.e + (math.e - 2)
    errors = {}
    for name in ("euler", "heun"):
        for steps in (20, 40):
            predict = lambda x, t, done: x + t.view(-1, 1, 1, 1)  # noqa: E731
            end = [*SAMPLERS[name](Flow(scale=1.0), predict, draw_noise(1, 1, 1, 2, 2), steps, None)][-1].noisy
            errors[name, steps] = (end - exact).abs().max().item()
    assert 1.7 < errors["euler", 20] / errors["euler", 40] < 2.3
    assert 3.5 < errors["heun", 20] / errors["heun", 40] < 4.6


def test_guidance_respects_scale_channels_and_interval():
    x, time, labels = draw_noise(0), torch.tensor([5.0, 5.0]), torch.tensor([1, 3])
    predict = make_fake_model(6)
    guide = lambda **o: guide_prediction(predict, labels, 10, SamplingOptions(**o))(x, time, 0.5)  # noqa: E731
    conditional, plain = predict(x, time, labels), predict(x, time, torch.tensor([10, 10]))
    assert torch.equal(guide(guidance=1.0), conditional)
    assert torch.allclose(guide(guidance=0.0)[:, :3], plain[:, :3])
    both = guide(guidance=3.0)
    assert torch.allclose(both[:, :3], plain[:, :3] + 3 * (conditional - plain)[:, :3], atol=1e-6)
    assert torch.equal(both[:, 3:], conditional[:, 3:])  # variances are the class-conditional ones
    guided = guide(guidance=3.0, guided_channels=2)
    assert torch.equal(guided[:, :2], both[:, :2]) and torch.equal(guided[:, 2:], conditional[:, 2:])
    assert torch.equal(guide(guidance=3.0, interval=(0.6, 1.0)), conditional)
    assert torch.equal(
        guide_prediction(predict, None, 0, SamplingOptions(guidance=3.0))(x, time, 0.5), predict(x, time)
    )


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"interval": (0.8, 0.2)}, "interval"),
        ({"guidance": -1.0}, "guidance"),
        ({"guided_channels": 0}, "channels"),
        ({"seed": -1}, "seed"),
    ],
)
def test_out_of_range_sampling_options_are_rejected(wrong, word):
    with pytest.raises(UsageError, match=word):
        SamplingOptions(**wrong)


def test_default_samplers_and_steps_depend_on_the_process():
    assert SamplingOptions().resolve_sampler(Diffusion()) == ("ddim", 50)
    assert SamplingOptions().resolve_sampler(Flow()) == ("heun", 25)
    assert SamplingOptions().resolve_sampler(Diffusion(steps=30)) == ("ddim", 30)
    assert SamplingOptions().resolve_sampler(Diffusion(steps=75)) == ("ddim", 38)  # every second time step
    assert SamplingOptions(steps=600, sampler="ddpm").resolve_sampler(Diffusion()) == ("ddpm", 600)
    with pytest.raises(
        UsageError, match="ddim cannot sample in 600 steps: no fixed stride divides 1000 time steps into 600"
    ):
        SamplingOptions(steps=600).resolve_sampler(Diffusion())
    for wrong, process in (({"sampler": "euler"}, Diffusion()), ({"sampler": "ddim"}, Flow()), ({"steps": 0}, Flow())):
        with pytest.raises(UsageError):
            SamplingOptions(**wrong).resolve_sampler(process)
    with pytest.raises(UsageError, match="1 to 1000"):
        SamplingOptions(steps=1001).resolve_sampler(Diffusion())
    with pytest.raises(UsageError, match="more than 20 steps"):
        Diffusion(steps=20)


def test_processes_survive_a_json_round_trip():
    for process in (Diffusion(500, "cosine", "velocity"), Flow(1.0)):
        assert process_from_json(process_to_json(process), "here") == process
    for wrong in (None, {"name": "other"}, {"name": "flow", "speed": 3}, {"name": "diffusion", "steps": 1}):
        with pytest.raises(WeightsError, match="here"):
            process_from_json(wrong, "here")
