"""What is answered while the model is being loaded: the process is alive, and not ready."""

from __future__ import annotations

import asyncio
import secrets
from email.utils import formatdate

from vitreous.serving.http.messages import Refusal, answer

ALIVE = answer({"status": "alive"})
NOT_READY = answer({"status": "starting"}, 503, b"Retry-After: 1\r\n")


class Starting(asyncio.Protocol):
    """One answer by the first line of a request, whatever follows; `open` are the connections, to be ended when the
    model is there."""

    def __init__(self, open: set[asyncio.Transport]) -> None:
        self.open = open

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client came."""
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.open.add(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """It left."""
        self.open.discard(self.transport)

    def data_received(self, data: bytes) -> None:
        """The beginning of a request."""
        name = secrets.token_hex(8)
        if data.startswith(b"GET /healthz "):
            response = ALIVE
        elif data.startswith(b"GET /readyz "):
            response = NOT_READY
        else:
            response = Refusal(503, "starting", "the model is being loaded", "ask again in a moment", 1).response(name)
        self.transport.write(response.encoded(name, False, formatdate(usegmt=True).encode()))
        self.transport.close()
