"""Raise the error for a dead worker of a data loader when a batch is requested, not at an arbitrary instruction."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from torch.utils.data._utils import signal_handling

from vitreous.errors import ResourceError


def worker_error(error: RuntimeError) -> ResourceError:
    """Convert PyTorch's error for a dead or hanging worker to a ResourceError."""
    reason = str(error).splitlines()[0].split(". ")[0].strip(" .")
    hint = "try fewer --workers, or --workers 0"
    if "Bus error" in reason or "shared memory" in str(error):
        hint = "enlarge /dev/shm (docker run --shm-size 1g), or use --workers 0"
    return ResourceError(f"a data worker stopped: {reason}", hint)


class WorkerDeaths:
    """Replacement for PyTorch's SIGCHLD handler, which raises a RuntimeError at any point of the main process.

    If the main process waits for a batch when a worker dies, the error is raised immediately, otherwise when the next
    batch is requested. A dead worker therefore never interrupts a checkpoint or an evaluation.
    """

    def __init__(self) -> None:
        self.loaders = 0  # number of loaders that are being iterated over
        self.is_waiting = False  # the main process waits for a batch
        self.error: ResourceError | None = None  # raised when the next batch is requested

    def watch(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader that has just started its workers. Raises ResourceError if a worker of any
        watched loader has died."""
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
        """Replace PyTorch's SIGCHLD handler, if it is set, by a handler that may postpone the error."""
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
            return
        check_workers = signal.getsignal(signal.SIGCHLD)
        if not callable(check_workers) or check_workers.__module__ != signal_handling.__name__:
            return

        def handle(signal_number: int, frame: FrameType | None) -> None:
            try:
                check_workers(signal_number, frame)
            except RuntimeError as error:
                if self.is_waiting:
                    raise worker_error(error) from None
                if self.loaders:
                    self.error = worker_error(error)

        signal.signal(signal.SIGCHLD, handle)


WORKER_DEATHS = WorkerDeaths()
