"""The processes of a run: a single process, or those that `torchrun` started (torch.distributed).

With a single process every method returns its input, so callers need no special case. No other module reads the
environment variables of `torchrun`.
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

# words in the error messages of collective operations after a process was lost
CONNECTION_ERROR_WORDS = ("gloo", "nccl", "timed out", "connection", "process group")


RENDEZVOUS_KEY = "vitreous/meeting"  # key in the store of the `torchrun` agent: the token of the current start


@dataclass(frozen=True)
class Ranks:
    """The rank of this process among the `world` processes of the run, and collective operations over them.

    `local_rank` is the rank among the processes of the same machine. `is_initialised` is whether torch.distributed is
    initialised.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    is_initialised: bool = False

    @property
    def is_main(self) -> bool:
        """Whether this is the main process, which writes files and prints."""
        return self.rank == 0

    def device(self, name: str) -> str:
        """Return the device of this process. If `name` is `cuda`, each process has a separate GPU."""
        return f"cuda:{self.local_rank}" if self.is_initialised and name.startswith("cuda") else name

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor of any shape over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of a tensor of any shape over all processes, without gradient."""
        return values if self.world == 1 else self.sum(values.detach().clone()) / self.world

    def sum_number(self, value: float, device: str) -> float:
        """Return the sum of a number over all processes."""
        return value if self.world == 1 else float(self.sum(torch.tensor(value, dtype=torch.float64, device=device)))

    def all_reduce_max(self, values: Sequence[float], device: str) -> list[float]:
        """Return the maximum of each value over all processes. If the process group supports CPUs, values are exchanged
        on CPUs, which avoids synchronising with a GPU."""
        if self.world == 1:
            return list(values)
        host = "cpu:" in str(dist.get_backend_config())
        largest = torch.tensor(values, dtype=torch.float64, device="cpu" if host else device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.tolist()

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the (n, ...) tensors of all processes in the order of ranks; n may differ."""
        if self.world == 1:
            return [tensor]
        lengths = torch.zeros(self.world, dtype=torch.int64, device=tensor.device)
        lengths[self.rank] = len(tensor)
        dist.all_reduce(lengths)
        padded = tensor.new_zeros((int(lengths.max()), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        gathered = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(gathered, padded)
        return [chunk[: int(length)] for chunk, length in zip(gathered, lengths, strict=True)]

    def gather_samples(self, samples: Tensor) -> tuple[Tensor, int]:
        """Concatenate the (n, ...) tensors of all processes along the first dimension, without gradient.

        Returns the (N, ...) tensor, and the index in it of this process's first sample.
        """
        gathered = self.gather(samples.detach())
        return torch.cat(gathered), sum(map(len, gathered[: self.rank]))

    def shift(self, tensor: Tensor, length: int) -> Tensor:
        """Send a tensor (n, ...) to the next process of a ring, and return that of the previous process,
        (length, ...), without gradient. The last process sends to the first."""
        if self.world == 1:
            return tensor
        received = tensor.new_empty((length, *tensor.shape[1:]))
        sending = dist.P2POp(dist.isend, tensor.detach().contiguous(), (self.rank + 1) % self.world)
        receiving = dist.P2POp(dist.irecv, received, (self.rank - 1) % self.world)
        # an order in which neighbours do not both wait for a receiver
        operations = [sending, receiving] if self.rank % 2 == 0 else [receiving, sending]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        return received

    def broadcast_text(self, text: str) -> str:
        """Return the main process's `text` in all processes."""
        if self.world == 1:
            return text
        texts = [text]
        dist.broadcast_object_list(texts)
        return texts[0]

    def wait(self) -> None:
        """Wait for all processes (a barrier)."""
        if self.world > 1:
            dist.barrier()


SINGLE_PROCESS = Ranks()


def get_launch_name() -> str:
    """Return an identifier of the `torchrun` job, the same in all processes and after restarts; "" without torchrun.

    The identifier is the job's `--rdzv-id`, or the random one of `--standalone`. If neither exists, it names the
    agent's process and machine.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"process {os.getppid()} of {platform.node()}" if name == "none" else name


def count_restarts() -> int:
    """Return the number of times that the `torchrun` agent restarted this process after a failure on its machine; 0
    without torchrun.

    Restarts because machines were added or removed are not counted. Each machine counts separately.
    """
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextmanager
def process_group(device: str, timeout: float):
    """Join the process group of the processes that `torchrun` started, for the duration of the block; yields this
    process's `Ranks`. Without torchrun, yields `SINGLE_PROCESS`.

    If a process is lost, or the others wait for it for more than `timeout` seconds, all raise ResourceError. Raises
    UsageError if a machine has fewer GPUs than processes.
    """
    if not is_distributed_launch() or dist.is_initialized():
        check_environment()
        yield SINGLE_PROCESS if not dist.is_initialized() else current_ranks()
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    uses_gpu = device.startswith("cuda")
    if uses_gpu and local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"process {local_rank} of this machine has no GPU: the machine has {torch.cuda.device_count()} GPUs",
            "lower --nproc-per-node",
        )
    if uses_gpu:
        torch.cuda.set_device(local_rank)
    try:
        join_group("cpu:gloo,cuda:nccl" if uses_gpu else "gloo", timedelta(seconds=timeout))
        yield current_ranks()
    except RuntimeError as error:
        if not any(phrase in str(error).lower() for phrase in CONNECTION_ERROR_WORDS):
            raise
        reason = str(error).splitlines()[0][:200]
        raise ResourceError(
            f"another process of the run has ended or does not respond ({reason})", "restart the run with --resume"
        ) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def check_environment() -> None:
    """Raise UsageError if WORLD_SIZE is above 1, but the variables with the address of the main process are missing."""
    world = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and world != "1" and not is_distributed_launch() and not dist.is_initialized():
        missing = " and ".join(name for name in LAUNCHER_VARIABLES if name not in os.environ)
        hint = "start it with torchrun, or unset RANK and WORLD_SIZE"
        raise UsageError(f"WORLD_SIZE is {world} without {missing}", hint)


def join_group(backend: str, timeout: timedelta) -> None:
    """Initialise torch.distributed among the processes of this start of `torchrun`. Raises RuntimeError at a
    timeout."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    store = rendezvous_store(agent, rank, world, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def rendezvous_store(agent: dist.Store, rank: int, world: int, timeout: timedelta) -> dist.Store:
    """Return a section of the `torchrun` agent's store that only the processes of the current start use.

    An agent keeps one store for all restarts. On several machines the environment does not distinguish the restarts
    (pytorch/pytorch#135712), so a restarted process would read the addresses of ended ones. Therefore the first process
    draws a random token as the section's name. The others write a request with a random token and wait until the first
    process has confirmed it. Raises RuntimeError after `timeout`.
    """
    token, deadline = uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        agent.set(RENDEZVOUS_KEY, token)
        store = dist.PrefixStore(token, agent)
        requests = {rank_index: store.get(f"asked/{rank_index}") for rank_index in range(1, world)}  # waits for each
        for rank_index, request_token in requests.items():
            store.set(f"answered/{rank_index}", request_token.decode())
        return store
    while time.monotonic() < deadline:
        store = dist.PrefixStore(agent.get(RENDEZVOUS_KEY).decode(), agent)
        store.set(f"asked/{rank}", token)
        if store.check([f"answered/{rank}"]) and store.get(f"answered/{rank}").decode() == token:
            return store
        time.sleep(0.05)
    raise RuntimeError(f"process group: timed out after {timeout.total_seconds():.0f} s, waiting for the first process")


def current_ranks() -> Ranks:
    """Return the rank of this process in the initialised process group."""
    return Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")), True)
