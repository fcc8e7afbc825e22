"""Decode randomly damaged images: `python -m tests.data.mutate [--count N] [--seed N] [--keep DIR]`.

Each mutant is decoded in a child process with limits on memory and time. It may be accepted or rejected with a
DataError. Any other outcome is a miss: another exception, a signal, an exceeded limit. Exits with 1 if there was a
miss.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from tests.data.hostile import build_corpus
from vitreous.data.decoding.decode import decode_to_pillow
from vitreous.data.decoding.regions import open_lazy_image
from vitreous.errors import DataError

MAX_SEED_BYTES = 4_000  # largest seed file in bytes
MAX_EXTRA_MEMORY = 2**30  # memory limit of the child, in bytes above its memory at the start
MAX_CPU_SECONDS = 5.0  # CPU seconds for one mutant
MAX_SILENT_SECONDS = 60.0  # seconds without output after which the child is killed
EDGE_VALUES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


@cache
def list_seed_files() -> tuple[bytes, ...]:
    """Return the small files of the corpus, which cover all formats and modes."""
    return tuple(sorted({case.content for case in build_corpus() if 8 <= len(case.content) <= MAX_SEED_BYTES}))


def make_mutant(seed: int, number: int) -> bytes:
    """Return mutant `number`: one of the seed files with one or a few changes."""
    rng = random.Random(seed * 1_000_003 + number)
    content = bytearray(rng.choice(list_seed_files()))
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        rng.choice(MUTATIONS)(content, rng)
    fix_checksums = content.startswith(b"\x89PNG") and rng.random() < 0.7
    return fix_png_checksums(bytes(content)) if fix_checksums else bytes(content)


def draw_position(content: bytearray, rng: random.Random) -> int:
    """Draw a position, preferably near the beginning, where headers are."""
    return rng.randrange(min(len(content), 128) if rng.random() < 0.6 else len(content)) if content else 0


def flip_bit(content: bytearray, rng: random.Random) -> None:
    """Flip one bit."""
    if content:
        content[draw_position(content, rng)] ^= 1 << rng.randrange(8)


def write_edge_value(content: bytearray, rng: random.Random) -> None:
    """Write a boundary value of 1, 2 or 4 bytes, in either byte order."""
    width, order = rng.choice((1, 2, 4)), rng.choice("<>")
    at = draw_position(content, rng)
    value = rng.choice(EDGE_VALUES) & (1 << 8 * width) - 1
    content[at : at + width] = struct.pack(order + {1: "B", 2: "H", 4: "I"}[width], value)


def drop_bytes(content: bytearray, rng: random.Random) -> None:
    """Remove a range of bytes."""
    at = draw_position(content, rng)
    del content[at : at + rng.randint(1, 1 + len(content) // 4)]


def duplicate_bytes(content: bytearray, rng: random.Random) -> None:
    """Copy a range of bytes to another position."""
    at, to = draw_position(content, rng), draw_position(content, rng)
    content[to:to] = content[at : at + rng.randint(1, 1 + len(content) // 4)]


def randomise_bytes(content: bytearray, rng: random.Random) -> None:
    """Replace a range with random bytes."""
    at, length = draw_position(content, rng), rng.randint(1, 16)
    content[at : at + length] = rng.randbytes(length)


def truncate_bytes(content: bytearray, rng: random.Random) -> None:
    """Truncate the file."""
    del content[draw_position(content, rng) :]


def splice_tail(content: bytearray, rng: random.Random) -> None:
    """Replace the end with the end of another seed file."""
    donor = rng.choice(list_seed_files())
    content[draw_position(content, rng) :] = donor[rng.randrange(len(donor)) :]


MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    flip_bit,
    flip_bit,
    flip_bit,
    write_edge_value,
    write_edge_value,
    randomise_bytes,
    drop_bytes,
    duplicate_bytes,
    truncate_bytes,
    splice_tail,
)


def fix_png_checksums(content: bytes) -> bytes:
    """Recompute the checksums of a PNG, so that the decoder reaches the data behind them."""
    out, at = [content[:8]], 8
    while at + 12 <= len(content):
        length = int.from_bytes(content[at : at + 4], "big")
        body = content[at + 4 : at + 8 + length]
        if len(body) < 4 + length:
            break
        out.append(content[at : at + 4] + body + struct.pack(">I", zlib.crc32(body)))
        at += 12 + length
    return b"".join(out) + content[at:]


def classify_decoding(content: bytes) -> str:
    """Return the outcome of decoding: accepted, rejected, or the description of a miss.

    Misses are other exceptions, and training crops that differ from the full image.
    """
    full_image = None
    try:
        with suppress(DataError):
            full_image = decode_to_pillow(content, name="mutant")
        for region in ("top", "bottom"):
            with suppress(DataError):
                crop = decode_crop(content, region)
                if full_image is None or not np.array_equal(crop[1], np.asarray(full_image.crop(crop[0]))):
                    return f"the {region} of it is another to training"
    except BaseException as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
    return "refused" if full_image is None else "accepted"


def decode_crop(content: bytes, region: str) -> tuple[tuple[int, int, int, int], np.ndarray]:
    """Decode a third of an image as training does; return (left, top, right, bottom) and pixels. Raises DataError."""
    image = open_lazy_image(content, 3, "mutant")
    width, height = image.size
    third = max(height // 3, 1)
    box = (0, 0, width, third) if region == "top" else (0, height - third, width, height)
    return box, np.asarray(image.crop(box) if isinstance(image, Image.Image) else image.decode_region(box))


def decode_mutants(seed: int, start: int, stop: int) -> None:
    """Child process: decode mutants `start` to `stop` within the limits, and print one line for each."""
    import resource

    addresses = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (addresses + MAX_EXTRA_MEMORY, addresses + MAX_EXTRA_MEMORY))
    for number in range(start, stop):
        content = make_mutant(seed, number)
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)  # the signal ends the process even inside a library call
        outcome = classify_decoding(content)
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(1, f"{number} {outcome}\n".encode())


@dataclass
class OutcomeTally:
    """Number of mutants by outcome; `misses` maps mutant numbers to the unexpected outcome."""

    counts: Counter[str] = field(default_factory=Counter)
    misses: dict[int, str] = field(default_factory=dict)

    def add(self, number: int, outcome: str) -> None:
        """Count one mutant."""
        is_known = outcome in ("accepted", "refused", "crash", "hang")
        self.counts[outcome if is_known else "error"] += 1
        if outcome not in ("accepted", "refused"):
            self.misses[number] = outcome

    def __str__(self) -> str:
        return ", ".join(f"{self.counts[name]:,} {name}" for name in ("accepted", "refused", "error", "crash", "hang"))


def run_mutants(count: int, seed: int = 0, on_progress: Callable[[int], None] = lambda done: None) -> OutcomeTally:
    """Decode `count` mutants in successive child processes.

    If a child ends, the next child starts behind the mutant that ended it.
    """
    tally, number = OutcomeTally(), 0
    while number < count:
        command = [
            sys.executable,
            "-m",
            "tests.data.mutate",
            "--seed",
            str(seed),
            "--from",
            str(number),
            "--count",
            str(count),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            for line in read_child_lines(child):
                mutant, outcome = line.split(" ", 1)
                tally.add(int(mutant), outcome)
                number = int(mutant) + 1
                on_progress(number)
            silent = child.poll() is None and number < count
            child.kill()
        if number < count:
            if child.returncode > 0:
                raise RuntimeError(f"the child of mutant {number} ended with {child.returncode}")
            tally.add(number, "hang" if silent or child.returncode == -signal.SIGPROF else "crash")
            number += 1
    return tally


def read_child_lines(child: subprocess.Popen[bytes]):
    """Yield the output lines of a child until it exits or prints nothing for MAX_SILENT_SECONDS."""
    assert child.stdout
    incomplete_line, pipe = b"", child.stdout.fileno()
    while select.select([pipe], [], [], MAX_SILENT_SECONDS)[0]:
        received = os.read(pipe, 2**16)
        if not received:
            child.wait()
            return
        *complete_lines, incomplete_line = (incomplete_line + received).split(b"\n")
        yield from (line.decode() for line in complete_lines)


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2_000, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations")
    parser.add_argument("--keep", type=Path, help="folder for the mutants with unexpected outcomes")
    parser.add_argument("--from", type=int, dest="start", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start is not None:
        decode_mutants(arguments.seed, arguments.start, arguments.count)
        return 0
    start_time = time.monotonic()
    tally = run_mutants(
        arguments.count,
        arguments.seed,
        lambda done: None if done % 10_000 else print(f"  {done:,}", file=sys.stderr, flush=True),
    )
    print(
        f"{arguments.count:,} mutants of {len(list_seed_files())} files (seed {arguments.seed}): {tally}, {time.monotonic() - start_time:.0f} s"
    )
    for number, outcome in tally.misses.items():
        print(f"  unexpected outcome of mutant {number}: {outcome}")
        if arguments.keep:
            arguments.keep.mkdir(parents=True, exist_ok=True)
            (arguments.keep / f"{arguments.seed}-{number}").write_bytes(make_mutant(arguments.seed, number))
    return int(bool(tally.misses))


if __name__ == "__main__":
    sys.exit(main())
