"""SIGTERM and SIGINT as a flag that a run looks at."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import active_children

#: seconds in which SIGINTs under `torchrun` count as one: the group gets it, and the agent passes it on
REPEAT_SECONDS = 5.0


class StopSignals:
    """The first stop signal received, if any; a second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.received_at = 0.0

    def __call__(self, number: int, frame: object) -> None:
        if self.received is not None and self.is_repeated():
            return
        if number == signal.SIGINT and self.received == signal.SIGINT:
            for worker in active_children():
                worker.kill()
            os._exit(130)
        self.received, self.received_at = number, time.monotonic()

    def is_repeated(self) -> bool:
        """Whether the agent of `torchrun` may have sent again the signal that its process group has received."""
        return "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - self.received_at < REPEAT_SECONDS

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Take the signals over, and give them back."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
