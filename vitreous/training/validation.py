"""The outputs of a model for validation images, computed by all processes of a run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from vitreous.data.loader import EvalLoader
from vitreous.data.split import Split
from vitreous.errors import Interrupted
from vitreous.evaluation.engine import CHUNK, TorchEngine, readable_mask
from vitreous.evaluation.evaluator import Evaluator, Outputs
from vitreous.training.ranks import Ranks


def shared_outputs(
    engine: TorchEngine, ranks: Ranks, workers: int, stopped: Callable[[], bool], evaluator: Evaluator, split: Split
) -> Outputs:
    """The outputs of a model for a split, of which every process computes a share, each image once.

    Raises Interrupted, in all processes, when `stopped` says so in one.
    """

    def check_signals(images: int) -> None:
        if stopped():
            raise Interrupted("evaluation cut short")

    positions, device = np.arange(len(split)), str(engine.device)
    mine = positions[positions // CHUNK % ranks.world == ranks.rank]
    cut, rows, readable = 0.0, np.zeros((0, 0), np.float32), np.ones(0, dtype=bool)
    try:
        reader = EvalLoader(split if ranks.world == 1 else split.take(mine), engine.preprocess, workers)
        rows, bad = evaluator.outputs(engine, reader, on_images=check_signals)
        readable = readable_mask(len(mine), bad)
    except Interrupted:
        cut = 1.0
    if ranks.all_reduce_max([cut], device)[0]:
        raise Interrupted("evaluation cut short")
    if ranks.world > 1:
        gathered = [ranks.gather(torch.from_numpy(part).to(device)) for part in (mine, rows, readable)]
        order, rows, readable = (torch.cat(parts).cpu().numpy() for parts in gathered)
        back = np.argsort(order)
        rows, readable = rows[back], readable[back]
    return Outputs(split, rows, readable)
