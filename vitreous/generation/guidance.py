"""Classifier-free guidance (arXiv:2207.12598): from an answer for no class, through that for a class, and beyond.

B batch, C channels of an image, C' of an answer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vitreous.generation.settings import SamplingOptions

Answer = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (B, C, *image), (B,), (B,) int64 -> (B, C', *image)


def guide(
    answer: Answer, labels: Tensor | None, none: int, options: SamplingOptions
) -> Callable[[Tensor, Tensor, float], Tensor]:
    """A function (B, C, *image), (B,) times, 0..1 done -> (B, C', *image): u + scale (c - u) of the model's answers
    c for `labels` (B,) int64 and u for label `none`, computed in one batch; 1 is c alone.

    Only the channels of an image are moved, or the first of them; what a model says of variances is that for the class.
    Where the options leave an answer alone (`SamplingOptions.interval`, arXiv:2404.07724), u is not computed.
    """

    def ask(noisy: Tensor, time: Tensor, done: float) -> Tensor:
        if labels is None or not options.moves(done):
            return answer(noisy, time, labels)
        both = torch.cat([labels, torch.full_like(labels, none)])
        wanted, plain = answer(noisy.repeat(2, *[1] * (noisy.dim() - 1)), time.repeat(2), both).float().chunk(2)
        moved = slice(min(options.guided_channels or noisy.shape[1], noisy.shape[1]))
        wanted = wanted.clone()
        wanted[:, moved] = plain[:, moved] + options.guidance * (wanted[:, moved] - plain[:, moved])
        return wanted

    return ask
