"""Measure the cost of decoding or rejecting files: `python -m tests.data.cost FILE...`.

Each file is decoded in a separate child process. Prints JSON: {FILE: [CPU seconds, memory growth in bytes]}. The parent
process does not import torch, so that its children start small.
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
    """Return the peak memory of this process in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure_decode_cost(path: str) -> list[float]:
    """Return CPU seconds and memory growth in bytes for one file, measured in a child process."""
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        with os.fdopen(reader) as pipe:
            output = pipe.read()
        os.waitpid(child, 0)
        return json.loads(output)
    start_memory, start_time = get_peak_memory(), time.process_time()
    with suppress(DataError):
        decode_to_pillow(path)
    os.write(writer, json.dumps([time.process_time() - start_time, get_peak_memory() - start_memory]).encode())
    os._exit(0)


if __name__ == "__main__":
    with suppress(DataError):
        decode_to_pillow(b"no image")  # modules imported on first use are not part of the cost of a file
    print(json.dumps({path: measure_decode_cost(path) for path in sys.argv[1:]}))
