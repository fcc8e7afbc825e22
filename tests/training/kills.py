"""A run killed again and again, in processes forked from one that has imported torch and done nothing yet.

python -m tests.training.kills FOLDER OUT WORKERS SEED KILLS: prints how many kills there were. With KILLS 0, never killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys

import torch

from tests.conftest import TINY
from vitreous.recipes.train import train
from vitreous.training.session import Session

RUN = {**TINY, "epochs": 5.0, "batch_size": 5, "accumulate": 1, "save_every": 3, "rand_augment": 1, "erase": 0.3}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(step: int, phase: str) -> None:
    """Make the session kill itself at a step, before or after one of its hooks."""
    name = {"before log": "log", "before save": "save", "at the end": "stop"}[phase]
    hook = getattr(Session, name)

    def armed(self, state):
        if state.step >= step:
            die()
        hook(self, state)

    setattr(Session, name, armed)


def attempt(folder: str, out: str, workers: int, kill: tuple[int, str] | None) -> bool:
    """One process of the run. Returns whether it lived to the end."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        if kill:
            arm(*kill)
        train(
            folder,
            out=out,
            workers=workers,
            resume=os.path.exists(f"{out}/config.yaml"),
            **(RUN if not os.path.exists(f"{out}/config.yaml") else {}),
        )
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"exit {status}"
    return not os.WIFSIGNALED(status)


def main(folder: str, out: str, workers: int, seed: int, kills: int) -> None:
    chance, done = random.Random(seed), 0
    steps = sorted(chance.randrange(1, 36) for _ in range(kills))
    for step in steps:
        done += not attempt(folder, out, workers, (step, chance.choice(["before log", "before save", "at the end"])))
    assert attempt(folder, out, workers, None)
    print(done)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
