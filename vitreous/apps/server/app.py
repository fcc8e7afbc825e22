"""The ASGI application: a gate that checks request headers before it reads the body, then Starlette's router."""

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

STATUS_CLIENT_CLOSED = 499  # logged status of a request whose client disconnected
MAX_DEADLINE_MS = 600_000  # maximum X-Deadline-Ms, in milliseconds
_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_SINGLE = frozenset(
    (b"host", b"content-type", b"content-length", b"authorization", b"origin", b"x-deadline-ms", b"content-encoding")
)


class RequestGate:
    """Check requests before their body is read, read bodies within limits, and add the common headers to every
    response.

    All exceptions become responses. `service` is None while the model is being loaded.
    """

    service: Service | None = None

    def __init__(self, root_path: str = "") -> None:
        self.root_path = root_path
        self.router = Router(ROUTES)
        self.routes = {route.path: route for route in ROUTES}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request (ASGI)."""
        scope = self.strip_root_path(scope)
        headers, service = dict(scope["headers"]), self.service
        info = self.make_request_info(headers)
        scope["info"], scope["service"], name = info, service, info.id

        async def send_with_headers(message: Message) -> None:
            """Send a message of the response, with the common headers and the request id added at its start."""
            if message["type"] == "http.response.start":
                info.status = message["status"]
                message["headers"] = [*message["headers"], *SECURITY_HEADERS, (b"x-request-id", name.encode())]
                message["headers"] += [(b"connection", b"close")] * should_close_connection(info, headers, service)
            await send(message)

        if service is None:
            await self.respond_while_starting(scope, receive, send_with_headers)
            return
        try:
            self.check_head(service, scope, headers, info)
            await self.respond(service, scope, receive, send_with_headers, info)
        except ClientDisconnect:
            info.status = STATUS_CLIENT_CLOSED
        except Exception as error:
            if not info.status:
                await refusal_response(service.to_refusal(error, info), name)(scope, receive, send_with_headers)
        service.record(info, scope["method"], scope["path"])

    def make_request_info(self, headers: dict[bytes, bytes]) -> RequestInfo:
        """Return the state of a new request, with the id from its X-Request-Id header or a random id."""
        requested_id, now = headers.get(b"x-request-id", b""), asyncio.get_running_loop().time()
        name = requested_id.decode() if _ID.fullmatch(requested_id) else secrets.token_hex(8)
        return RequestInfo(name, now, now + (self.service.limits.deadline if self.service is not None else 0.0))

    def strip_root_path(self, scope: Scope) -> Scope:
        """Remove `root_path`, the path of this server at a reverse proxy, from a request's path, unless the proxy has
        removed it."""
        path = scope["path"]
        if not self.root_path or not path.startswith(f"{self.root_path}/"):
            return scope
        return {**scope, "path": path[len(self.root_path) :]}

    def refuse_full(self, scope: Scope) -> tuple[Refusal, str] | None:
        """Return a refusal (429) and the request id if the server is full. None if the request must be handled by the
        application: the server is not full, the request has another error, or its connection must be closed."""
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
        """Respond while the model is being loaded: the process is alive, but not ready."""
        info: RequestInfo = scope["info"]
        if scope["path"] == "/healthz":
            response = json_response({"status": "alive"})
        elif scope["path"] == "/readyz":
            response = json_response({"status": "starting"}, 503, {"retry-after": "1"})
        else:
            refusal = Refusal(503, "starting", "the model is being loaded", "retry in a few seconds", retry=1)
            response = refusal_response(refusal, info.id)
        await response(scope, receive, send)

    def check_head(self, service: Service, scope: Scope, headers: dict[bytes, bytes], info: RequestInfo) -> None:
        """Check the request line and the headers of a request. Raises Refusal if it is invalid regardless of its
        body."""
        method, path = scope["method"], scope["path"]
        info.body_bytes = None if b"transfer-encoding" in headers else int(headers.get(b"content-length", b"0"))
        if scope["http_version"] not in ("1.0", "1.1"):
            raise Refusal(400, "bad_request", f"unsupported version HTTP/{scope['http_version']}", "use HTTP/1.1")
        if "\ufffd" in path:
            raise Refusal(400, "bad_request", "the URL is not UTF-8", "request a path such as /v1/predict")
        if len(headers) < len(scope["headers"]):
            names = [name for name, _ in scope["headers"]]
            if duplicates := [name for name in _SINGLE if names.count(name) > 1]:
                raise Refusal(400, "bad_request", f"duplicate header {duplicates[0].decode()}", "send it once")
        route = self.routes.get(path)
        info.route = route.name if route is not None else "none"
        service.access.check(headers, route is not None and route.name not in PUBLIC_ROUTES)
        if route is None and self.root_path and path == self.root_path and method == "GET":
            location_header = {"location": f"{self.root_path}/"}
            raise Refusal(
                308, "moved", f"the page is at {self.root_path}/", "add the trailing slash", headers=location_header
            )
        if route is None:
            hint = "GET /openapi.json lists all endpoints"
            raise Refusal(404, "not_found", f"unknown path {shorten_text(path)}", hint)
        allowed = route.methods or ()
        if method not in allowed:
            allow_header = {"allow": ", ".join(sorted(allowed))}
            hint = f"use {'POST' if 'POST' in allowed else 'GET'}"
            raise Refusal(405, "method_not_allowed", f"{path} does not support {method}", hint, headers=allow_header)
        if (deadline_text := headers.get(b"x-deadline-ms")) is not None:
            info.deadline = info.start_time + parse_deadline(deadline_text)
        if info.body_bytes is not None and info.body_bytes > service.limits.bytes:
            raise service.make_size_refusal()
        if method != "POST" and info.body_bytes != 0:
            raise Refusal(400, "bad_request", "unexpected body in a GET request", "remove the body")
        if b"content-encoding" in headers:
            hint = "send the image bytes without encoding"
            raise Refusal(415, "unsupported_media", "content encodings are not supported", hint)
        if method == "POST":
            service.check_capacity(1)

    async def respond(self, service: Service, scope: Scope, receive: Receive, send: Send, info: RequestInfo) -> None:
        """Read the body and run the router, until the deadline or until the client disconnects.

        Raises Refusal, TimeoutError, ClientDisconnect, and the exceptions of the handler.
        """
        if scope["method"] != "POST":
            info.is_body_complete = True
            async with asyncio.timeout_at(info.deadline):
                await self.router(scope, receive, send)
            return
        try:
            pending_bodies = [await read_body(service, scope, receive, info)]

            async def replay() -> Message:
                """Receive the body that was already read (ASGI), then an empty one."""
                return {
                    "type": "http.request",
                    "body": pending_bodies.pop() if pending_bodies else b"",
                    "more_body": False,
                }

            response_task = asyncio.ensure_future(self.router(scope, replay, send))
            disconnect_task = asyncio.ensure_future(wait_for_disconnect(receive))
            try:
                async with asyncio.timeout_at(info.deadline):
                    await asyncio.wait((response_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
                if not response_task.done():
                    raise ClientDisconnect
                await response_task
            finally:
                response_task.cancel()
                disconnect_task.cancel()
        finally:
            service.body_bytes_in_memory -= info.received_bytes


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(service: Service, scope: Scope, receive: Receive, info: RequestInfo) -> bytes:
    """Read the body, counting its bytes in `info.received_bytes` and `service.body_bytes_in_memory`.

    Raises Refusal: 408 if the body arrives too slowly, 413 if it is too large, 429 if all bodies in memory are too
    large together. Raises a refusal that the protocol has stored in the scope, and ClientDisconnect.
    """
    limits, loop, body = service.limits, asyncio.get_running_loop(), bytearray()
    start = loop.time()
    while not info.is_body_complete:
        slowest = start + max(limits.body_seconds, info.received_bytes / limits.body_rate)
        try:
            async with asyncio.timeout_at(min(slowest, info.deadline)):
                message = await receive()
        except TimeoutError:
            hint = f"send at least {limits.body_rate:,.0f} bytes/s"
            raise Refusal(408, "too_slow", "the body arrived too slowly", hint) from None
        if refusal := scope.get("refusal"):
            raise refusal
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message["body"]
        info.received_bytes += len(message["body"])
        service.body_bytes_in_memory += len(message["body"])
        service.check_body_size(info.received_bytes)
        info.is_body_complete = not message.get("more_body", False)
    return bytes(body)


def should_close_connection(info: RequestInfo, headers: dict[bytes, bytes], service: Service | None) -> bool:
    """Return whether to close the connection after this response: on shutdown, after a malformed or slow request, or if
    a long part of the body is unread."""
    if info.status in (400, 408) or service is None or service.draining:
        return True
    unread_bytes = MAX_DISCARDED_BYTES + 1 if info.body_bytes is None else info.body_bytes - info.received_bytes
    return not info.is_body_complete and (unread_bytes > MAX_DISCARDED_BYTES or b"expect" in headers)


def parse_deadline(text: bytes) -> float:
    """Parse the header X-Deadline-Ms, in milliseconds, to seconds. Raises Refusal, 422."""
    if not (text.isdigit() and len(text) < 9 and 1 <= int(text) <= MAX_DEADLINE_MS):
        message, hint = (
            f"invalid X-Deadline-Ms: {shorten_text(text.decode('latin-1'))}",
            f"use an integer from 1 to {MAX_DEADLINE_MS}",
        )
        raise Refusal(422, "bad_parameter", message, hint)
    return int(text) / 1000
