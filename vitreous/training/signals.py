"""SIGTERM and SIGINT as a flag that a run looks at."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import active_children


class Signals:
    """The signal that came in, if one did; a second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.received: int | None = None

    def __call__(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            for worker in active_children():
                worker.kill()
            os._exit(130)
        self.received = number

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
