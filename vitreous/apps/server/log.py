"""Log of requests: a line of JSON each on stderr, written by a thread, so a slow reader stops nobody."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from typing import Any, TextIO

MOST = 10_000  # lines that wait for a slow reader; later ones are counted, not kept
PERIOD = 0.1


class Log:
    """`write_request` is for requests, which `quiet` leaves out; `write` is for what happens to the server.

    Refusals for want of room are counted in `refused` and written once a second.
    """

    def __init__(self, quiet: bool = False, out: TextIO | None = None) -> None:
        self.quiet, self.out = quiet, out or sys.stderr
        self.lines: deque[dict[str, Any]] = deque()
        self.lost = self.refused = 0
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self.run, name="log", daemon=True)
        self.thread.start()

    def write_request(self, **fields: Any) -> None:
        """Log a request."""
        if not self.quiet:
            self.write(**fields)

    def write(self, **fields: Any) -> None:
        """Log an event of the server."""
        if len(self.lines) >= MOST:
            self.lost += 1
        else:
            self.lines.append({"time": round(time.time(), 3), **fields})

    def run(self) -> None:
        """Write what there is, until closed."""
        written = time.monotonic()
        while not self.closed.wait(PERIOD):
            if (self.refused or self.lost) and time.monotonic() - written >= 1:
                written = time.monotonic()
                refused, lost, self.refused, self.lost = self.refused, self.lost, 0, 0
                self.write_request(event="refused", requests=refused, **({"lines_lost": lost} if lost else {}))
            self.flush()
        self.flush()

    def flush(self) -> None:
        """Write the lines that wait."""
        lines = []
        while self.lines:
            lines.append(json.dumps(self.lines.popleft()) + "\n")  # ASCII: no name can end a line or steer a terminal
        try:
            self.out.write("".join(lines))
            self.out.flush()
        except (OSError, ValueError):
            pass  # nobody reads

    def close(self) -> None:
        """Write the rest; a second is enough for a reader that reads."""
        self.closed.set()
        if self.thread.is_alive():
            self.thread.join(1.0)
