"""Limits on what one client may cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from vitreous.apps.server.access import Access

PIXELS = 25_000_000
BYTES = 20 * 2**20


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes, times in seconds; `queue` and `images` count pictures.

    `queue` holds every picture from the moment its request has arrived whole until it is answered, so it bounds the
    wait: 0 is as many as the model answers in a second, at least QUEUE. `flight`: bytes of bodies held at a time, over
    all connections. `decode_seconds` are of computing: on a busy machine a picture that takes less may wait for far
    longer.
    """

    bytes: int = BYTES
    pixels: int = PIXELS
    images: int = 16
    queue: int = 0
    flight: int = 4 * BYTES
    connections: int = 2048
    head: int = 32 * 2**10
    headers: int = 100
    head_seconds: float = 9.5
    idle_seconds: float = 30.0
    body_seconds: float = 5.0
    body_rate: float = 10_000.0
    decode_seconds: float = 3.0
    decode_memory: int = 2**30
    deadline: float = 30.0
    drain_seconds: float = 9.0


QUEUE = 8  # the least: while one picture is computed others are decoded


@dataclass(frozen=True)
class Settings:
    """Where to listen and what to bear. `decoders`: processes that decode, 0 for one a core and at least two.

    `root_path`: the path below which a reverse proxy shows the server, as `/vit`, "" for none; requests are answered
    with it and without."""

    host: str = "127.0.0.1"
    port: int = 8000
    limits: Limits = field(default_factory=Limits)
    access: Access = field(default_factory=Access)
    decoders: int = 0
    quiet: bool = False
    command: tuple[str, ...] = ()
    root_path: str = ""
