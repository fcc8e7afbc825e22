"""Sequences packed into one row of tokens, which do not see each other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """A row of tokens (..., N, D) made of sequences of these `lengths`, one after the other.

    Attention is computed for one after the other; with `masked` for the whole row at once, where what a token may not
    see is masked: fewer and larger pieces of work, and N^2 logits.
    """

    lengths: tuple[int, ...]
    masked: bool = False

    @property
    def spans(self) -> list[slice]:
        """Where each sequence lies."""
        return [slice(low, high) for low, high in pairwise(accumulate(self.lengths, initial=0))]

    def mask(self, device: torch.device) -> Tensor:
        """(N, N) bool: true where both tokens are of one sequence."""
        numbers = torch.arange(len(self.lengths), device=device)
        owner = numbers.repeat_interleave(torch.tensor(self.lengths, device=device))
        return owner[:, None] == owner[None]
