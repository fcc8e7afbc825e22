"""The processes of a run: one, or as many as `torchrun` started (torch.distributed). Nothing else knows of ranks'
environment.

With one process every method here is the identity, so no caller asks how many there are.
"""
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from vitreous.errors import ResourceError, UsageError
from vitreous.progress import LAUNCHER_VARIABLES, is_distributed_launch

# words of what collectives raise when a process is gone
CONNECTION_ERROR_WORDS = ("gloo", "nccl", "timed out", "connection", "process group")


RENDEZVOUS_KEY = "vitreous/meeting"  # a key of the agent's store


@dataclass(frozen=True)
class Ranks:
    """This process among `world` processes; `local` is its number on its machine, `joined` whether torch.distributed is
    up."""

    rank: int = 0
    world: int = 1
    local: int = 0
    joined: bool = False

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and speaks."""
        return self.rank == 0

    def device(self, name: str) -> str:
        """The device of this process: each its own GPU, where the run is on GPUs."""
        return f"cuda:{self.local}" if self.joined and name.startswith("cuda") else name

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor of any shape over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def mean(self, values: Tensor) -> Tensor:
        """The mean over all processes of a tensor of any shape; without gradient."""
        return values if self.world == 1 else self.sum(values.detach().clone()) / self.world

    def sum_number(self, value: float, device: str) -> float:
        """The sum of a number over all processes."""
        return value if self.world == 1 else float(self.sum(torch.tensor(value, dtype=torch.float64, device=device)))

    def all_reduce_max(self, values: Sequence[float], device: str) -> list[float]:
        """The largest of each value over all processes; exchanged by processors where the group can, for which no GPU
        is waited."""
        if self.world == 1:
            return list(values)
        host = "cpu:" in str(dist.get_backend_config())
        largest = torch.tensor(values, dtype=torch.float64, device="cpu" if host else device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.tolist()

    def gather(self, rows: Tensor) -> list[Tensor]:
        """Return every process's (n, ...) tensor, in order; n may differ."""
        if self.world == 1:
            return [rows]
        lengths = torch.zeros(self.world, dtype=torch.int64, device=rows.device)
        lengths[self.rank] = len(rows)
        dist.all_reduce(lengths)
        padded = rows.new_zeros((int(lengths.max()), *rows.shape[1:]))
        padded[: len(rows)] = rows
        gathered = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(gathered, padded)
        return [part[: int(length)] for part, length in zip(gathered, lengths, strict=True)]

    def gather_rows(self, rows: Tensor) -> tuple[Tensor, int]:
        """(n, ...) -> the rows of all processes, (N, ...), without gradient, and the number of the first of its own."""
        parts = self.gather(rows.detach())
        return torch.cat(parts), sum(map(len, parts[: self.rank]))

    def broadcast_text(self, text: str) -> str:
        """The leading process's text."""
        if self.world == 1:
            return text
        held = [text]
        dist.broadcast_object_list(held)
        return held[0]

    def wait(self) -> None:
        """Go on when every process has come here."""
        if self.world > 1:
            dist.barrier()


SINGLE_PROCESS = Ranks()


def get_launch_name() -> str:
    """What tells a job of `torchrun` from others, the same in its processes however often they are started again: its
    `--rdzv-id`, the name that `--standalone` draws, or else the agent's process; "" without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"process {os.getppid()} of {platform.node()}" if name == "none" else name


def count_restarts() -> int:
    """How often the agent of `torchrun` has started this process again because one of its own had failed; 0 without
    torchrun.

    A restart because machines have come or gone is not counted, and each machine counts for itself.
    """
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextmanager
def process_group(device: str, timeout: float):
    """Join the processes that `torchrun` started for the length of the block; yields this process's `Ranks`.

    If a process is lost, or the others wait for it for more than `timeout` seconds, all end with a ResourceError.
    Raises UsageError if a machine has fewer GPUs than processes.
    """
    if not is_distributed_launch() or dist.is_initialized():
        check_environment()
        yield SINGLE_PROCESS if not dist.is_initialized() else current_ranks()
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = device.startswith("cuda")
    if cuda and local >= torch.cuda.device_count():
        raise UsageError(
            f"process {local} of this machine has no GPU: there are {torch.cuda.device_count()}",
            "lower --nproc-per-node",
        )
    if cuda:
        torch.cuda.set_device(local)
    try:
        join_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timedelta(seconds=timeout))
        yield current_ranks()
    except RuntimeError as error:
        if not any(word in str(error).lower() for word in CONNECTION_ERROR_WORDS):
            raise
        line = str(error).splitlines()[0][:200]
        raise ResourceError(
            f"another process of the run is gone or does not answer ({line})", "start it again with --resume"
        ) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def check_environment() -> None:
    """Raise UsageError for several processes without the address at which they meet."""
    world = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and world != "1" and not is_distributed_launch() and not dist.is_initialized():
        missing = " and ".join(name for name in LAUNCHER_VARIABLES if name not in os.environ)
        hint = "start it with torchrun, or unset RANK and WORLD_SIZE"
        raise UsageError(f"WORLD_SIZE is {world} without {missing}", hint)


def join_group(backend: str, timeout: timedelta) -> None:
    """Start torch.distributed among the processes of this launch; raises RuntimeError where they do not meet in
    time."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    store = rendezvous_store(agent, rank, world, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def rendezvous_store(agent: dist.Store, rank: int, world: int, timeout: timedelta) -> dist.Store:
    """The part of the agent's store that the processes that are here now share.

    An agent of `torchrun` keeps one store for all its starts, and nothing in a process's environment tells these apart
    on several machines (pytorch/pytorch#135712): processes that were started again would read the addresses of those
    that are dead. So the first process draws a name, the others ask under it, and only one that is alive answers.
    Raises RuntimeError after `timeout`.
    """
    own, until = uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        agent.set(RENDEZVOUS_KEY, own)
        store = dist.PrefixStore(own, agent)
        asked = {other: store.get(f"asked/{other}") for other in range(1, world)}  # waits for each
        for other, question in asked.items():
            store.set(f"answered/{other}", question.decode())
        return store
    while time.monotonic() < until:
        store = dist.PrefixStore(agent.get(RENDEZVOUS_KEY).decode(), agent)
        store.set(f"asked/{rank}", own)
        if store.check([f"answered/{rank}"]) and store.get(f"answered/{rank}").decode() == own:
            return store
        time.sleep(0.05)
    raise RuntimeError(f"process group: timed out after {timeout.total_seconds():.0f} s, waiting for the first process")


def current_ranks() -> Ranks:
    """Return this process's place among those of the process group."""
    return Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")), True)
