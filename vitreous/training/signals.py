"""SIGTERM and SIGINT as a flag that a run polls."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import active_children

#: seconds in which SIGINTs under `torchrun` count as one: the group receives it, and the agent forwards it
REPEAT_SECONDS = 5.0


class StopSignals:
    """The first stop signal received, if any; a second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.received_at = 0.0

    def __call__(self, signum: int, frame: object) -> None:
        if self.received is not None and self.is_repeated():
            return
        if signum == signal.SIGINT and self.received == signal.SIGINT:
            for worker in active_children():
                worker.kill()
            os._exit(130)
        self.received, self.received_at = signum, time.monotonic()

    def is_repeated(self) -> bool:
        """Return whether the agent of `torchrun` may have forwarded a signal that its process group has already
        received."""
        return "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - self.received_at < REPEAT_SECONDS

    @contextmanager
    def catch(self) -> Iterator[None]:
        """Handle the signals during the block, and restore the previous handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous_handlers = {signum: signal.signal(signum, self) for signum in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for signum, handler in previous_handlers.items():
                signal.signal(signum, handler)
