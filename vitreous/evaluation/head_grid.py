"""Heads of frozen features, trained for all candidates of a grid over learning rate and weight decay at once.

The candidates share every batch: their logits are one matrix product, their updates one step of AdamW. No candidate
affects another one, so that the weights of each are those of a training alone.

Shapes: B images per batch, N patch tokens, d features, K classes, C candidates, Q queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adam import adam

from vitreous.system.machine import get_thread_pool

BATCH_IMAGES = 256  # images per step
DEFAULT_EPOCHS, MIN_STEPS = 10.0, 300  # length of the training by default; the minimum is for small datasets
DEFAULT_LRS, DEFAULT_WEIGHT_DECAYS = (1e-3, 3e-3, 1e-2, 3e-2), (0.0, 3.0)  # grid for standardised features
BETAS, ADAM_EPS = (0.9, 0.999), 1e-8
ATTENTION_QUERIES = 4  # queries of an attentive probe
QUERY_STD = 0.02  # standard deviation of the initial queries
TOKEN_CHUNK_IMAGES = 32  # images per forward pass of an attentive probe: their tokens stay in the caches

#: indices (b,) of images -> their features, (b, ...)
LoadInputs = Callable[[np.ndarray], Tensor]


@dataclass(frozen=True)
class Candidate:
    """A candidate of a grid: learning rate and weight decay of AdamW."""

    lr: float
    weight_decay: float


def build_grid(lrs: Sequence[float], weight_decays: Sequence[float]) -> tuple[Candidate, ...]:
    """Build the candidates of all combinations, from low to high learning rates."""
    return tuple(Candidate(lr, decay) for lr in sorted(set(lrs)) for decay in sorted(set(weight_decays)))


class CandidateHeads(nn.Module):
    """Base class of C heads of the same kind, one per candidate: (B, ...) -> (B, C, K).

    The first axis of every parameter is the candidates. The initial weights of all candidates are equal. `chunk` is the
    number of images per forward pass.
    """

    num_candidates: int
    chunk: int = BATCH_IMAGES


class LinearHeads(CandidateHeads):
    """Linear classifiers of standardised features, (B, d) -> (B, C, K), whose weights start at 0.

    `mean` and `std` (d,) are those of the training features. Features are divided by their std.
    """

    def __init__(self, mean: Tensor, std: Tensor, num_candidates: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.num_candidates, self.classes = num_candidates, classes
        self.weight = nn.Parameter(torch.zeros(num_candidates, classes, len(mean)))
        self.bias = nn.Parameter(torch.zeros(num_candidates, classes))

    def forward(self, features: Tensor) -> Tensor:
        """Compute the logits of all candidates, (B, d) -> (B, C, K)."""
        x = (features - self.get_buffer("mean")).div_(self.get_buffer("std"))
        return F.linear(x, self.weight.flatten(0, 1), self.bias.flatten()).unflatten(1, (-1, self.classes))

    def fold_standardisation(self, index: int = 0) -> tuple[Tensor, Tensor]:
        """Return weight (K, d) and bias (K,) of the candidate at `index` for features before standardisation."""
        weight = self.weight.detach()[index] / self.get_buffer("std")
        return weight, self.bias.detach()[index] - weight @ self.get_buffer("mean")


class AttentiveHeads(CandidateHeads):
    """Attentive probes (arXiv:2506.10178): Q learned queries attend to patch tokens, and a linear classifier uses their
    weighted means, (B, N, d) -> (B, C, K).

    For standardised tokens z, attention is softmax(q z / sqrt(d)) over patches, without a key projection. The value
    projection is part of the classifier: the product of two matrices is a matrix. `mean` and `std` (d,) are those of
    the training tokens. The queries are drawn by `seed`.
    """

    chunk = TOKEN_CHUNK_IMAGES

    def __init__(
        self,
        mean: Tensor,
        std: Tensor,
        num_candidates: int,
        classes: int,
        *,
        queries: int = ATTENTION_QUERIES,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.num_candidates, self.classes = num_candidates, classes
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.empty(queries, len(mean)).normal_(std=QUERY_STD, generator=generator)
        self.queries = nn.Parameter(drawn.repeat(num_candidates, 1, 1).to(mean.device))
        self.weight = nn.Parameter(torch.zeros(num_candidates, classes, queries * len(mean), device=mean.device))
        self.bias = nn.Parameter(torch.zeros(num_candidates, classes, device=mean.device))

    def attend(self, tokens: Tensor) -> Tensor:
        """Compute the attention of each query over patches, (B, N, d) -> (B, C Q, N).

        Subtracting the mean of the tokens would change all scores of a query by the same amount, so it is left out.
        """
        queries = self.queries / (self.get_buffer("std") * math.sqrt(tokens.shape[2]))
        return (queries.flatten(0, 1) @ tokens.mT).softmax(2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits of all candidates, (B, N, d) -> (B, C, K)."""
        pooled = (self.attend(tokens) @ tokens - self.get_buffer("mean")) / self.get_buffer("std")
        pooled = pooled.unflatten(1, (self.num_candidates, -1)).flatten(2)
        return torch.einsum("bci,cki->bck", pooled, self.weight) + self.bias


def compute_candidate_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean loss of each candidate, (C,), from logits (B, C, K).

    Labels are classes (B,) int64, with softmax cross-entropy; several labels per image (B, K) bool, with the sum over
    classes of the sigmoid losses; or shares of classes (B, K) that sum to at most one, with softmax cross-entropy
    weighted by the shares. Shares may also be those of patches, (b, N, K) with B = b N.
    """
    if labels.ndim == 1:
        expanded = labels[:, None].expand(-1, logits.shape[1])
        return F.cross_entropy(logits.flatten(0, 1), expanded.flatten(), reduction="none").view_as(expanded).mean(0)
    if labels.dtype == torch.bool:
        targets = labels[:, None].to(logits.dtype).expand_as(logits)
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(2).mean(0)
    shares = labels.flatten(0, -2).to(logits.dtype)
    return -(logits.log_softmax(2) * shares[:, None]).sum(2).mean(0)


@dataclass(frozen=True)
class HeadSchedule:
    """The training of heads: `steps` of `batch` images in an order drawn by `seed`, and a cosine decay to 0."""

    steps: int
    batch: int
    seed: int = 0

    @classmethod
    def plan(
        cls,
        images: int,
        *,
        epochs: float | None,
        steps: int | None,
        seed: int,
        max_batch: int = BATCH_IMAGES,
        max_steps: int | None = None,
    ) -> HeadSchedule:
        """Plan the training on a number of images. The default length is `DEFAULT_EPOCHS` epochs, at least `MIN_STEPS`
        and at most `max_steps` steps."""
        batch = min(max_batch, images)
        if steps is None and epochs is None:
            steps = max(MIN_STEPS, math.ceil(DEFAULT_EPOCHS * images / batch))
            steps = steps if max_steps is None else min(steps, max_steps)
        return cls(steps or math.ceil((epochs or DEFAULT_EPOCHS) * images / batch), batch, seed)

    def iterate_batches(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the `batch` indices of each step from `rows` (n,), in a new order in every epoch."""
        draw, order = np.random.default_rng(self.seed), np.zeros(0, rows.dtype)
        for _ in range(self.steps):
            while len(order) < self.batch:
                order = np.concatenate([order, draw.permutation(rows)])
            yield order[: self.batch]
            order = order[self.batch :]


def train_candidate_heads(
    heads: CandidateHeads,
    candidates: Sequence[Candidate],
    load_inputs: LoadInputs,
    labels: Tensor,
    *,
    rows: np.ndarray,
    schedule: HeadSchedule,
    on_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Train one head per candidate by AdamW on the images `rows` (n,).

    `load_inputs` loads features of images by index; `labels` are those of all images, in a form of
    `compute_candidate_losses`.
    """
    # Adam's update does not depend on the learning rate: it is computed for all candidates at once, with rate 1
    parameters = [parameter.data for parameter in heads.parameters()]
    updates, averages, squares = ([torch.zeros_like(x) for x in parameters] for _ in range(3))
    device = parameters[0].device
    counts = [torch.zeros((), device=device) for _ in parameters]
    lrs, decays = (
        torch.tensor([getattr(candidate, name) for candidate in candidates], device=device)
        for name in ("lr", "weight_decay")
    )
    for step, batch in enumerate(schedule.iterate_batches(rows)):
        gradients = compute_candidate_gradients(heads, load_inputs, labels, batch)
        for update in updates:
            update.zero_()
        adam(
            updates, gradients, averages, squares, [], counts, fused=True, amsgrad=False, beta1=BETAS[0],
            beta2=BETAS[1], lr=1.0, weight_decay=0.0, eps=ADAM_EPS, maximize=False,
        )  # fmt: skip
        step_lrs = lrs * (0.5 * (1 + math.cos(math.pi * step / schedule.steps)))
        for parameter, update in zip(parameters, updates, strict=True):
            shape = (-1,) + (1,) * (parameter.ndim - 1)
            parameter.mul_((1 - step_lrs * decays).view(shape)).addcmul_(step_lrs.view(shape), update)
        on_step(step)


def compute_candidate_gradients(
    heads: CandidateHeads, load_inputs: LoadInputs, labels: Tensor, batch: np.ndarray
) -> list[Tensor]:
    """Compute the gradient of the mean loss over the images `batch` (B,) with respect to each parameter of the heads.

    On a CPU, chunks of `heads.chunk` images are computed in parallel, one thread per chunk.
    """
    parameters = list(heads.parameters())
    device = parameters[0].device

    def compute_chunk_gradients(start: int) -> tuple[Tensor, ...]:
        """Compute the share of a chunk of images in the gradients."""
        chunk = batch[start : start + heads.chunk]
        with torch.enable_grad():
            chunk_labels = labels[torch.from_numpy(chunk).to(labels.device)].to(device)
            losses = compute_candidate_losses(heads(load_inputs(chunk)), chunk_labels)
            return torch.autograd.grad(losses.sum() * (len(chunk) / len(batch)), parameters)

    starts, threads = range(0, len(batch), heads.chunk), torch.get_num_threads()
    in_parallel = len(starts) > 1 and threads > 1 and device.type == "cpu"
    chunk_gradients = list((get_thread_pool(threads).map if in_parallel else map)(compute_chunk_gradients, starts))
    totals = [gradient.contiguous() for gradient in chunk_gradients[0]]  # the fused optimizer ignores strides
    for gradients in chunk_gradients[1:]:
        for total, gradient in zip(totals, gradients, strict=True):
            total += gradient
    return totals


@torch.no_grad()
def compute_head_logits(heads: CandidateHeads, load_inputs: LoadInputs, rows: np.ndarray) -> Tensor:
    """Compute the logits of all candidates for the images `rows` (m,): (m, C, K) float32 on the CPU."""
    chunks = [rows[start : start + heads.chunk] for start in range(0, len(rows), heads.chunk)]
    return torch.cat([heads(load_inputs(chunk)).float().cpu() for chunk in chunks])
