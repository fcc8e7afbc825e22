"""The ASGI application: a gate that judges requests by their heads, and Starlette's router behind it."""

from __future__ import annotations

import asyncio
import re
import secrets

from starlette.requests import ClientDisconnect
from starlette.routing import Router
from starlette.types import Message, Receive, Scope, Send

from vitreous.apps.server.protocol import MAX_DISCARDED_BYTES
from vitreous.apps.server.responses import SECURITY_HEADERS, Refusal, json_response, refusal_response, shorten_text
from vitreous.apps.server.routes import PUBLIC_ROUTES, ROUTES
from vitreous.apps.server.service import RequestInfo, Service

STATUS_CLIENT_CLOSED = 499  # the status in the log of a request whose client left
MAX_DEADLINE_MS = 600_000  # milliseconds
_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_SINGLE = frozenset(
    (b"host", b"content-type", b"content-length", b"authorization", b"origin", b"x-deadline-ms", b"content-encoding")
)


class RequestGate:
    """Answers what needs no body, reads bodies within their limits, and gives every response its common headers.

    Nothing escapes it: whatever goes wrong becomes a response. `service` is None while the model is loaded.
    """

    service: Service | None = None

    def __init__(self, root_path: str = "") -> None:
        self.root_path = root_path
        self.router = Router(ROUTES)
        self.routes = {route.path: route for route in ROUTES}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request (ASGI)."""
        scope = self.strip_root_path(scope)
        headers, service = dict(scope["headers"]), self.service
        info = self.make_request_info(headers)
        scope["info"], scope["service"], name = info, service, info.id

        async def respond(message: Message) -> None:
            if message["type"] == "http.response.start":
                info.status = message["status"]
                message["headers"] = [*message["headers"], *SECURITY_HEADERS, (b"x-request-id", name.encode())]
                message["headers"] += [(b"connection", b"close")] * should_close_connection(info, headers, service)
            await send(message)

        if service is None:
            await self.respond_while_starting(scope, receive, respond)
            return
        try:
            self.check_head(service, scope, headers, info)
            await self.answer(service, scope, receive, respond, info)
        except ClientDisconnect:
            info.status = STATUS_CLIENT_CLOSED
        except Exception as error:
            if not info.status:
                await refusal_response(service.to_refusal(error, info), name)(scope, receive, respond)
        service.record(info, scope["method"], scope["path"])

    def make_request_info(self, headers: dict[bytes, bytes]) -> RequestInfo:
        """A request that has just begun, under the id that it brings, or a new one."""
        given, now = headers.get(b"x-request-id", b""), asyncio.get_running_loop().time()
        name = given.decode() if _ID.fullmatch(given) else secrets.token_hex(8)
        return RequestInfo(name, now, now + (self.service.limits.deadline if self.service is not None else 0.0))

    def strip_root_path(self, scope: Scope) -> Scope:
        """The request without the path of the reverse proxy, where the proxy left that in place."""
        path = scope["path"]
        if not self.root_path or not path.startswith(f"{self.root_path}/"):
            return scope
        return {**scope, "path": path[len(self.root_path) :]}

    def refuse_full(self, scope: Scope) -> tuple[Refusal, str] | None:
        """The refusal, 429, and the id of a request for which there is no room; None for one that has to be answered,
        or that closes its connection."""
        service = self.service
        if service is None or service.draining or scope["method"] != "POST" or not service.is_full:
            return None
        scope, headers = self.strip_root_path(scope), dict(scope["headers"])
        info = self.make_request_info(headers)
        try:
            self.check_head(service, scope, headers, info)
        except Refusal as refusal:
            info.status = refusal.status
            if refusal.status == 429 and not should_close_connection(info, headers, service):
                service.record(info, scope["method"], scope["path"])
                return refusal, info.id
        return None

    async def respond_while_starting(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The process is alive, and not ready."""
        info: RequestInfo = scope["info"]
        if scope["path"] == "/healthz":
            response = json_response({"status": "alive"})
        elif scope["path"] == "/readyz":
            response = json_response({"status": "starting"}, 503, {"retry-after": "1"})
        else:
            refusal = Refusal(503, "starting", "the model is being loaded", "ask again in a moment", retry=1)
            response = refusal_response(refusal, info.id)
        await response(scope, receive, send)

    def check_head(self, service: Service, scope: Scope, headers: dict[bytes, bytes], info: RequestInfo) -> None:
        """Raises Refusal for a request that will not be answered, whatever its body is."""
        method, path = scope["method"], scope["path"]
        info.length = None if b"transfer-encoding" in headers else int(headers.get(b"content-length", b"0"))
        if scope["http_version"] not in ("1.0", "1.1"):
            raise Refusal(400, "bad_request", f"HTTP/{scope['http_version']}", "speak HTTP/1.1")
        if "\ufffd" in path:
            raise Refusal(400, "bad_request", "an address that is no UTF-8", "ask for a path, as in /v1/predict")
        if len(headers) < len(scope["headers"]):
            names = [name for name, _ in scope["headers"]]
            if twice := [name for name in _SINGLE if names.count(name) > 1]:
                raise Refusal(400, "bad_request", f"two headers {twice[0].decode()}", "send one")
        route = self.routes.get(path)
        info.route = route.name if route is not None else "none"
        service.access.check(headers, route is not None and route.name not in PUBLIC_ROUTES)
        if route is None and self.root_path and path == self.root_path and method == "GET":
            place = {"location": f"{self.root_path}/"}
            raise Refusal(308, "moved", f"the page is at {self.root_path}/", "add the slash", headers=place)
        if route is None:
            hint = "GET /openapi.json tells what there is"
            raise Refusal(404, "not_found", f"there is nothing at {shorten_text(path)}", hint)
        allowed = route.methods or ()
        if method not in allowed:
            allow = {"allow": ", ".join(sorted(allowed))}
            hint = f"use {'POST' if 'POST' in allowed else 'GET'}"
            raise Refusal(405, "method_not_allowed", f"{method} {path}", hint, headers=allow)
        if (given := headers.get(b"x-deadline-ms")) is not None:
            info.deadline = info.began + parse_deadline(given)
        if info.length is not None and info.length > service.limits.bytes:
            raise service.make_size_refusal()
        if method != "POST" and info.length != 0:
            raise Refusal(400, "bad_request", "a GET with a body", "leave the body out")
        if b"content-encoding" in headers:
            hint = "send the bytes of the picture as they are"
            raise Refusal(415, "unsupported_media", "a body with a content encoding", hint)
        if method == "POST":
            service.check_capacity(1)

    async def answer(self, service: Service, scope: Scope, receive: Receive, send: Send, info: RequestInfo) -> None:
        """Read the body and let the router answer, until the deadline or until the client leaves.

        Raises Refusal, TimeoutError, ClientDisconnect, and whatever the handler raises.
        """
        if scope["method"] != "POST":
            info.whole = True
            async with asyncio.timeout_at(info.deadline):
                await self.router(scope, receive, send)
            return
        try:
            parts = [await read_body(service, scope, receive, info)]

            async def replay() -> Message:
                return {"type": "http.request", "body": parts.pop() if parts else b"", "more_body": False}

            work = asyncio.ensure_future(self.router(scope, replay, send))
            left = asyncio.ensure_future(wait_for_disconnect(receive))
            try:
                async with asyncio.timeout_at(info.deadline):
                    await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    raise ClientDisconnect
                await work
            finally:
                work.cancel()
                left.cancel()
        finally:
            service.held -= info.received


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(service: Service, scope: Scope, receive: Receive, info: RequestInfo) -> bytes:
    """The whole body, counted in `info.received` and `service.held`.

    Raises Refusal: 408 where it comes too slowly, 413 where it is too large, 429 where all bodies together are, and
    what the protocol refused while it read. Raises ClientDisconnect.
    """
    limits, loop, body = service.limits, asyncio.get_running_loop(), bytearray()
    start = loop.time()
    while not info.whole:
        slowest = start + max(limits.body_seconds, info.received / limits.body_rate)
        try:
            async with asyncio.timeout_at(min(slowest, info.deadline)):
                message = await receive()
        except TimeoutError:
            hint = f"at least {limits.body_rate:,.0f} bytes a second"
            raise Refusal(408, "too_slow", "the body came too slowly", hint) from None
        if refusal := scope.get("refusal"):
            raise refusal
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message["body"]
        info.received += len(message["body"])
        service.held += len(message["body"])
        service.check_body_size(info.received)
        info.whole = not message.get("more_body", False)
    return bytes(body)


def should_close_connection(info: RequestInfo, headers: dict[bytes, bytes], service: Service | None) -> bool:
    """Whether the connection ends after this response: when shutting down, or before the rest of a long body."""
    if info.status in (400, 408) or service is None or service.draining:
        return True
    left = MAX_DISCARDED_BYTES + 1 if info.length is None else info.length - info.received
    return not info.whole and (left > MAX_DISCARDED_BYTES or b"expect" in headers)


def parse_deadline(text: bytes) -> float:
    """Seconds from the header X-Deadline-Ms. Raises Refusal, 422."""
    if not (text.isdigit() and len(text) < 9 and 1 <= int(text) <= MAX_DEADLINE_MS):
        message, hint = (
            f"X-Deadline-Ms: {shorten_text(text.decode('latin-1'))}",
            f"a whole number from 1 to {MAX_DEADLINE_MS}",
        )
        raise Refusal(422, "bad_parameter", message, hint)
    return int(text) / 1000
