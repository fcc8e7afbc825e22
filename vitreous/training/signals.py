"""Handle SIGTERM and SIGINT as a flag that a run polls after every step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import active_children

#: seconds within which SIGINTs under `torchrun` count as a single one: the process group receives the signal, and the
#: agent forwards it again
REPEAT_SECONDS = 5.0


class StopSignals:
    """A signal handler that stores the first stop signal in `received`. A second SIGINT ends the process at once."""

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
        """Return whether a signal may be the same one again: forwarded by the `torchrun` agent after the process group
        received it."""
        return "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - self.received_at < REPEAT_SECONDS

    @contextmanager
    def catch(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT during the block, and restore the previous handlers after it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous_handlers = {signum: signal.signal(signum, self) for signum in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for signum, handler in previous_handlers.items():
                signal.signal(signum, handler)
