"""Contrastive losses of image and text embeddings, over one or several processes: the softmax loss of CLIP
(arXiv:2103.00020, Figure 3) and the sigmoid loss of SigLIP (arXiv:2303.15343, Eq. 1).

Every process keeps the embeddings of its images. Blocks of texts travel around a ring of the processes (SigLIP, section
3.3), so a process never stores more logits than its images times the texts of one block. The gradients travel with the
blocks. They are computed in the forward pass, with streaming sums, and are exact.

Shapes: B pairs of this process, T texts of a block, E channels, p processes. The loss is a mean over the N pairs of all
processes; x_i and y_j are normalised image and text embeddings, s_ij = exp(t) x_i y_j + b their logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.objectives.base import SINGLE_PROCESS_RING, ProcessRing

ContrastiveLoss = Literal["softmax", "sigmoid"]
MAX_BLOCK_TEXTS = 4096  # texts whose logits are computed at a time


class TextBlock(NamedTuple):
    """A block of texts that visits a process.

    - `values` (T, E + n): the text embeddings, and n columns of statistics or gradients that travel with them. Views,
      so that a visit can change them in place.
    - `first_match`: the index of the image that belongs to the first text of the block; None for texts of another
      process.
    """

    values: Tensor
    first_match: int | None

    def matches(self, logits: Tensor) -> Tensor:
        """Return a view of the logits (B, T) of the pairs that belong together; empty for texts of another process."""
        return logits[:, :0].diagonal() if self.first_match is None else logits.diagonal(-self.first_match)


def circulate_blocks(values: Tensor, ring: ProcessRing, counts: Sequence[int], visit: Callable[[TextBlock], None]):
    """Pass the blocks of all processes around the ring, and call `visit` for each in every process.

    Args:
        values: the block of this process, (B, K), which visits change in place.
        ring: the ring of processes.
        counts: the number of texts of each process.
        visit: the function that is called with pieces of at most `MAX_BLOCK_TEXTS` texts of every block.

    Returns:
        This process's block after all processes were visited, (B, K).
    """
    for step in range(ring.world):
        owner = (ring.rank - step) % ring.world
        for first in range(0, len(values), MAX_BLOCK_TEXTS):
            visit(TextBlock(values[first : first + MAX_BLOCK_TEXTS], first if owner == ring.rank else None))
        if ring.world > 1:
            values = ring.shift(values, counts[(owner - 1) % ring.world])
    return values


class ContrastiveGradients(NamedTuple):
    """The sum of a loss over this process's pairs, and its gradients.

    `loss`, `log_scale` and `bias` are scalars: the sums over the images of this process. `images` (B, E) and `texts`
    (B, E) are gradients of the sum over all processes.
    """

    loss: Tensor
    images: Tensor
    texts: Tensor
    log_scale: Tensor
    bias: Tensor


def compute_sigmoid_gradients(
    images: Tensor, texts: Tensor, log_scale: Tensor, bias: Tensor, *, ring: ProcessRing, counts: Sequence[int]
) -> ContrastiveGradients:
    """Compute the sigmoid loss and its gradients: embeddings (B, E), scalars t and b.

    The sum over i of this process and j of all processes is, with z_ij = 1 for i = j and -1 otherwise:

        for i in range(B): for j in range(N): loss -= logsigmoid(z[i, j] * (exp(t) * x[i] @ y[j] + b))

    `counts` are the numbers of pairs of the processes.
    """
    scale, channels = log_scale.exp(), images.shape[1]
    image_gradient, totals = torch.zeros_like(images), images.new_zeros(3)

    def visit(block: TextBlock) -> None:
        """Add the loss of this process's images with the texts of a block, and its gradients."""
        block_texts = block.values[:, :channels]
        products = scale * images @ block_texts.T
        signed = -(products + bias)
        block.matches(signed).neg_()
        totals[0] -= F.logsigmoid(signed).sum()
        gradient = torch.sigmoid(-signed)
        block.matches(gradient).neg_()
        image_gradient.addmm_(gradient, scale * block_texts)
        block.values[:, channels:].addmm_(gradient.T, scale * images)
        totals[1] += (gradient * products).sum()
        totals[2] += gradient.sum()

    values = circulate_blocks(torch.cat([texts, torch.zeros_like(texts)], 1), ring, counts, visit)
    return ContrastiveGradients(totals[0], image_gradient, values[:, channels:], totals[1], totals[2])


def compute_softmax_gradients(
    images: Tensor, texts: Tensor, log_scale: Tensor, bias: Tensor, *, ring: ProcessRing, counts: Sequence[int]
) -> ContrastiveGradients:
    """Compute the softmax loss and its gradients: embeddings (B, E), scalar t; b has no effect on this loss.

    The sum over this process's pairs is half the cross-entropy of images to texts plus half of texts to images:

        for i in range(B): loss += logsumexp_j(s[i, j]) / 2 + logsumexp_j(s[j, i]) / 2 - s[i, i]

    The blocks travel twice: first with the log-sum-exp of the texts, which the visited processes complete, then with
    the gradients. `counts` are the numbers of pairs of the processes.
    """
    scale, channels = log_scale.exp(), images.shape[1]
    image_norms = images.new_full((len(images),), -torch.inf)
    image_gradient, totals = torch.zeros_like(images), images.new_zeros(2)

    def add_norms(block: TextBlock) -> None:
        """Add the logits of this process's images and the texts of a block to the log-sum-exp of both."""
        logits = scale * images @ block.values[:, :channels].T
        totals[0] -= block.matches(logits).sum()
        image_norms.copy_(torch.logaddexp(image_norms, logits.logsumexp(1)))
        block.values[:, channels] = torch.logaddexp(block.values[:, channels], logits.logsumexp(0))

    text_norms = texts.new_full((len(texts), 1), -torch.inf)
    values = circulate_blocks(torch.cat([texts, text_norms], 1), ring, counts, add_norms)
    loss = totals[0] + (image_norms.sum() + values[:, channels].sum()) / 2

    def add_gradients(block: TextBlock) -> None:
        """Add the gradients of this process's images with the texts of a block."""
        block_texts, block_norms = block.values[:, :channels], block.values[:, channels]
        logits = scale * images @ block_texts.T
        gradient = ((logits - image_norms[:, None]).exp() + (logits - block_norms).exp()) / 2
        block.matches(gradient).sub_(1)
        image_gradient.addmm_(gradient, scale * block_texts)
        block.values[:, channels + 1 :].addmm_(gradient.T, scale * images)
        totals[1] += (gradient * logits).sum()

    values = circulate_blocks(torch.cat([values, torch.zeros_like(texts)], 1), ring, counts, add_gradients)
    return ContrastiveGradients(loss, image_gradient, values[:, channels + 1 :], totals[1], torch.zeros_like(bias))


LOSS_FUNCTIONS = {"sigmoid": compute_sigmoid_gradients, "softmax": compute_softmax_gradients}


class ContrastiveFunction(torch.autograd.Function):
    """Autograd function of the contrastive losses, which computes the gradients in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        texts: Tensor,
        scalars: tuple[Tensor, Tensor],
        loss: ContrastiveLoss,
        ring: ProcessRing,
        log_scale: Tensor,
        bias: Tensor,
    ) -> Tensor:
        """Compute the mean loss of this process's pairs, a scalar. `scalars` are the values of t and b that the loss
        uses; `log_scale` and `bias` are the tensors that receive their gradients."""
        counts = [int(count) for count in ring.gather(torch.tensor([len(images)]))]
        result = LOSS_FUNCTIONS[loss](images, texts, *scalars, ring=ring, counts=counts)
        size = max(1, len(images))
        ctx.save_for_backward(*(gradient / size for gradient in result[1:]))
        return result.loss / size

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradients, times the gradient of the loss."""
        images, texts, log_scale, bias = (gradients[0] * value for value in ctx.saved_tensors)
        return images, texts, None, None, None, log_scale, bias


def compute_contrastive_loss(
    images: Tensor,
    texts: Tensor,
    log_scale: Tensor,
    bias: Tensor,
    *,
    loss: ContrastiveLoss,
    max_log_scale: float = torch.inf,
    ring: ProcessRing = SINGLE_PROCESS_RING,
) -> Tensor:
    """Compute the mean contrastive loss of this process's pairs, a scalar.

    The sum of the processes' losses, weighted by their shares B / N of the pairs, is the loss of all N pairs, and so
    are its gradients. Every process of the ring has to call this; a process may have no pairs, but every loss must have
    the weight B / N, up to a factor that all processes share.

    Args:
        images: normalised image embeddings (B, E).
        texts: normalised embeddings (B, E) of the texts of these images.
        log_scale: t, the logarithm of the factor of the logits, a scalar.
        bias: b, a scalar; not used by the softmax loss.
        loss: `softmax` or `sigmoid`.
        max_log_scale: values of t above it count as this value; their gradient is only passed on if it reduces t.
        ring: the processes of the run.
    """
    limited = log_scale.detach().clamp(max=max_log_scale)
    values = limited.to(images.dtype), bias.detach().to(images.dtype)
    limited_scale = KeepBelow.apply(log_scale, max_log_scale)
    return ContrastiveFunction.apply(images, texts, values, loss, ring, limited_scale, bias)


class KeepBelow(torch.autograd.Function):
    """Autograd function that limits a scalar to a maximum. Above it, only gradients that reduce the scalar are passed
    on, so that training can leave the limit."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, maximum: float) -> Tensor:
        """Return the value, at most `maximum`."""
        ctx.save_for_backward(value > maximum)
        return value.clamp(max=maximum)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradient; 0 above the maximum if it would increase the value."""
        (is_above,) = ctx.saved_tensors
        return torch.where(is_above, gradients[0].clamp(min=0), gradients[0]), None
