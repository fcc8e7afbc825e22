"""The contrastive losses: equal to the dense formulas, in one process and in rings of two and four processes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from vitreous.objectives import contrastive_loss
from vitreous.objectives.contrastive_loss import compute_contrastive_loss
from vitreous.training.ranks import SINGLE_PROCESS, current_ranks

NUM_PAIRS, CHANNELS = 14, 6
#: pairs of each process; some process may have none
RINGS = [(14,), (7, 7), (9, 5), (4, 4, 3, 3), (5, 0, 8, 1)]
LOSSES = ("softmax", "sigmoid")
ROOT = Path(__file__).parents[2]


def draw_inputs(dtype=torch.float64):
    """Return embeddings, t and b that require gradients."""
    generator = torch.Generator().manual_seed(5)
    images, texts = (
        F.normalize(torch.randn(NUM_PAIRS, CHANNELS, generator=generator, dtype=torch.float64), dim=1).to(dtype)
        for _ in range(2)
    )
    scalars = torch.tensor(1.7, dtype=dtype), torch.tensor(-2.3, dtype=dtype)
    return [value.requires_grad_() for value in (images, texts, *scalars)]


def compute_dense_loss(images, texts, log_scale, bias, loss):
    """Compute the loss by the formulas of the papers."""
    logits = log_scale.exp() * images @ texts.T
    if loss == "softmax":
        labels = torch.arange(len(images))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    signs = 2 * torch.eye(len(images), dtype=images.dtype) - 1
    return -F.logsigmoid(signs * (logits + bias)).sum() / len(images)


def run_ring_process(rank, sizes, loss, path):
    """Compute a process's share of the loss and its gradients, and write them to a file."""
    torch.set_num_threads(1)
    if len(sizes) > 1:
        dist.init_process_group("gloo", init_method=f"file://{path}/meeting", rank=rank, world_size=len(sizes))
    ranks = current_ranks() if len(sizes) > 1 else SINGLE_PROCESS
    images, texts, log_scale, bias = draw_inputs()
    start = sum(sizes[:rank])
    span = slice(start, start + sizes[rank])
    ring_loss = compute_contrastive_loss(images[span], texts[span], log_scale, bias, loss=loss, ring=ranks)
    share = ring_loss * sizes[rank] / NUM_PAIRS
    share.backward()
    torch.save([share.detach(), images.grad, texts.grad, log_scale.grad, bias.grad], path / f"{rank}.pt")
    if len(sizes) > 1:
        dist.destroy_process_group()


def locate_ring(folder, sizes, loss):
    """Return the folder of a ring's files."""
    return folder / f"{'-'.join(map(str, sizes))}-{loss}"


def run_ring(sizes, loss, path):
    """Run a ring of forked processes."""
    path.mkdir()
    children = []
    for rank in range(len(sizes)):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run_ring_process(rank, sizes, loss, path)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * len(sizes)


@pytest.fixture(scope="module")
def ring_folder(tmp_path_factory):
    """Run all rings in one new process, because a process that has computed gradients cannot be forked."""
    folder = tmp_path_factory.mktemp("rings")
    command = [sys.executable, "-m", "tests.objectives.test_contrastive_loss", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=240)
    return folder


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("sizes", RINGS, ids=str)
def test_ring_equals_dense_formula(sizes, loss, ring_folder):
    path = locate_ring(ring_folder, sizes, loss)
    shares = [torch.load(path / f"{rank}.pt") for rank in range(len(sizes))]
    inputs = draw_inputs()
    expected = compute_dense_loss(*inputs, loss)
    expected.backward()
    gradients = [value.grad if value.grad is not None else torch.zeros(()) for value in inputs]
    totals = [sum(values) for values in zip(*shares, strict=True)]
    for computed, reference in zip(totals, [expected.detach(), *gradients], strict=True):
        torch.testing.assert_close(computed, reference.to(computed.dtype), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_float32_equals_dense_formula(loss):
    inputs, references = draw_inputs(torch.float32), draw_inputs()
    result, expected = compute_contrastive_loss(*inputs, loss=loss), compute_dense_loss(*references, loss)
    result.backward()
    expected.backward()
    assert float(result.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    for value, reference in zip(inputs, references, strict=True):
        if reference.grad is not None:
            torch.testing.assert_close(value.grad.double(), reference.grad, rtol=1e-5, atol=1e-6)


def test_start_values_of_the_sigmoid_loss():
    """Orthogonal embeddings at t = ln 10, b = -10: a positive costs ln 2, a negative ln(1 + e^-10)."""
    for size in (2, 64):
        rows = torch.eye(size, dtype=torch.float64)
        loss = compute_contrastive_loss(rows, rows, torch.tensor(math.log(10)), torch.tensor(-10.0), loss="sigmoid")
        expected = math.log(2) + (size - 1) * math.log1p(math.exp(-10))
        assert float(loss) == pytest.approx(expected, rel=1e-6)


def test_scale_is_limited_and_can_leave_the_limit():
    """Above the limit the loss is that of the limit, and only gradients that reduce t are passed on."""
    limit = math.log(100)
    for match, grows in ((True, True), (False, False)):
        rows = torch.eye(3)
        texts = rows if match else rows.roll(1, 0)
        log_scale = torch.tensor(limit + 0.5, requires_grad=True)
        bias = torch.tensor(0.0)
        loss = compute_contrastive_loss(rows, texts, log_scale, bias, loss="softmax", max_log_scale=limit)
        loss.backward()
        expected = compute_dense_loss(rows, texts, torch.tensor(limit), bias, "softmax")
        torch.testing.assert_close(loss.detach(), expected)
        assert (float(log_scale.grad) == 0) == grows


if __name__ == "__main__":
    contrastive_loss.MAX_BLOCK_TEXTS = 3  # several pieces of each block
    for ring_sizes in RINGS:
        for ring_loss_name in LOSSES:
            run_ring(ring_sizes, ring_loss_name, locate_ring(Path(sys.argv[1]), ring_sizes, ring_loss_name))
