"""Sequences packed into one row of tokens, which do not see each other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """A row of tokens (..., N, D) made of sequences of these `lengths`, one after the other.

    Attention is computed for one after the other, for neighbours of one length together; with `masked` for the whole
    row at once, where what a token may not see is masked: fewer and larger pieces of work, and N^2 logits.
    """

    lengths: tuple[int, ...]
    masked: bool = False

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Lengths, each with the number of sequences that have it one after the other."""
        return [(length, len(list(same))) for length, same in groupby(self.lengths)]

    def mask(self, device: torch.device) -> Tensor:
        """(N, N) bool: true where both tokens are of one sequence."""
        numbers = torch.arange(len(self.lengths), device=device)
        owner = numbers.repeat_interleave(torch.tensor(self.lengths, device=device))
        return owner[:, None] == owner[None]
