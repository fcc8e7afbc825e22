"""The limit of the machine, as a contender."""

from __future__ import annotations

import torch

from vitreous.bench.work import Turn, Work
from vitreous.training.peak import fastest, synchronise

SIZE = {"cpu": 2048, "cuda": 8192}


def peak(work: Work, precision: str) -> Turn:
    """Turns that multiply square matrices by the fastest way there is and return operations, a multiply-add counted as
    two."""
    run, operations = fastest(work.device, precision, SIZE.get(work.device.split(":")[0], 2048))

    @torch.inference_mode()
    def turn() -> float:
        run()
        synchronise(work.device)
        return operations

    return turn
