"""Report the death of a data loader's worker where a batch is requested, not between any two instructions."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from torch.utils.data._utils import signal_handling

from vitreous.errors import ResourceError


def worker_error(error: RuntimeError) -> ResourceError:
    """The ResourceError for what PyTorch raises when a worker has died or hangs."""
    reason = str(error).splitlines()[0].split(". ")[0].strip(" .")
    hint = "try fewer --workers, or --workers 0"
    if "Bus error" in reason or "shared memory" in str(error):
        hint = "enlarge /dev/shm (docker run --shm-size 1g), or use --workers 0"
    return ResourceError(f"a data worker stopped: {reason}", hint)


class WorkerDeaths:
    """Replaces PyTorch's handler of SIGCHLD, which raises a RuntimeError wherever the main process happens to be.

    The error is raised at once while the main process waits for a batch, which takes up to the loader's timeout
    otherwise, and else with the next request. So a dead worker never cuts a checkpoint or an evaluation short.
    """

    def __init__(self) -> None:
        self.loaders = 0  # that are iterated over
        self.is_waiting = False
        self.error: ResourceError | None = None

    def watch(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader that has just started its workers. Raises ResourceError where one has died."""
        self.replace_handler()
        iterator, in_main = iter(batches), threading.current_thread() is threading.main_thread()
        self.loaders += 1
        try:
            while True:
                self.is_waiting = in_main
                if self.error is not None:
                    raise self.error
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                finally:
                    self.is_waiting = False
                yield batch
        finally:
            self.is_waiting = False
            self.loaders -= 1
            if not self.loaders:
                self.error = None

    def replace_handler(self) -> None:
        """Take the place of PyTorch's handler of SIGCHLD, if it is set."""
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
            return
        check_workers = signal.getsignal(signal.SIGCHLD)
        if not callable(check_workers) or check_workers.__module__ != signal_handling.__name__:
            return

        def handle(number: int, frame: FrameType | None) -> None:
            try:
                check_workers(number, frame)
            except RuntimeError as error:
                if self.is_waiting:
                    raise worker_error(error) from None
                if self.loaders:
                    self.error = worker_error(error)

        signal.signal(signal.SIGCHLD, handle)


WORKER_DEATHS = WorkerDeaths()
