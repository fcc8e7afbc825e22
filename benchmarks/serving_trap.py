"""`vitreous serve` with decoders that fail on demand: images that end in CRASH, SPIN or EAT trigger it. For
`serving.py`.

    python benchmarks/serving_trap.py serve RUN …
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

TRICKS = (b"CRASH", b"SPIN", b"EAT")


def decode_with_trap(content: bytes, *arguments: Any) -> Any:
    """Decode an image in the child, or fail."""
    from vitreous.apps.server.child import decode_request_image

    if content.endswith(b"CRASH"):
        ctypes.string_at(0)
    while content.endswith(b"SPIN"):
        pass
    if content.endswith(b"EAT"):
        held = []
        while True:
            held.append(bytearray(b"x") * 2**26)
    return decode_request_image(content, *arguments)


def main() -> None:
    if sys.argv[1] != "serve":
        from vitreous.apps.server.child import serve_jobs

        serve_jobs(decode_with_trap)
        return
    from vitreous.apps.server import decoders
    from vitreous.cli.main import main as vitreous

    defaults = decoders.DecoderPool.__init__.__defaults__ or ()
    decoders.DecoderPool.__init__.__defaults__ = tuple(
        (sys.executable, __file__) if d is decoders.DECODER_COMMAND else d for d in defaults
    )
    vitreous(sys.argv[1:])


if __name__ == "__main__":
    main()
