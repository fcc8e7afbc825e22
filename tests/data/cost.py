"""python -m tests.data.cost FILE...: what it costs to decode each file, or to refuse it, in a process of its own, as
JSON.

FILE -> [seconds of the processor, bytes that the process grew by]. This process knows no torch: its children start
small.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from contextlib import suppress

from vitreous.data.decoding.decode import decode_to_pillow
from vitreous.errors import DataError


def get_peak_memory() -> int:
    """The most bytes that this process has had in memory."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure_decode_cost(path: str) -> list[float]:
    """Seconds and bytes of one file, in a child."""
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        with os.fdopen(reader) as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        return json.loads(said)
    before, begun = get_peak_memory(), time.process_time()
    with suppress(DataError):
        decode_to_pillow(path)
    os.write(writer, json.dumps([time.process_time() - begun, get_peak_memory() - before]).encode())
    os._exit(0)


if __name__ == "__main__":
    with suppress(DataError):
        decode_to_pillow(b"no image")  # what is imported at the first use belongs to no file
    print(json.dumps({path: measure_decode_cost(path) for path in sys.argv[1:]}))
