"""`serve`: load, warm up, listen, answer until told to stop, and then answer what was accepted."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import select
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from threading import Event, Thread
from typing import Any

import uvicorn

from vitreous.apps.server.app import RequestGate
from vitreous.apps.server.decoders import DECODER_COMMAND, DecoderPool
from vitreous.apps.server.model import ServedModel, warm_up_predictor
from vitreous.apps.server.monitoring import ServerLog
from vitreous.apps.server.protocol import LimitedProtocol
from vitreous.apps.server.service import Service
from vitreous.apps.server.settings import ServerLimits, ServerSettings
from vitreous.errors import ResourceError, UsageError
from vitreous.inference.predict import Predictor
from vitreous.system.cores import default_worker_count

RunPath = str | os.PathLike[str] | None
LISTEN_BACKLOG = 1024  # connections that the system keeps for us
ACCEPTS_PER_TURN = 32  # of them that are accepted in one turn of the event loop
RESERVED_FILES = 32  # open files that are not connections
MIN_DRAIN_SECONDS = 0.05  # seconds at least between `readyz` saying no and the listener closing
THREAD_SWITCH_SECONDS = 0.001  # seconds after which the computing thread has to let the event loop run


class HttpServer(uvicorn.Server):
    """uvicorn, with this server's signals and end, and a sweep over its connections."""

    drain: Callable[[], Awaitable[None]]

    def capture_signals(self) -> AbstractContextManager[None]:
        """Leave signals to `Server`."""
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; accept few connections in one turn, but let the system keep many."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(LISTEN_BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: end connections that take too long."""
        if counter % 2 == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                connection.sweep(now)  # type: ignore[union-attr]
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what was accepted, then close."""
        await self.drain()


class Server:
    """A model behind a socket, which is bound at once.

    `load` makes the predictor, and again when SIGHUP asks; `home` may have an index.
    """

    service: Service
    loop: asyncio.AbstractEventLoop

    def __init__(self, settings: ServerSettings, home: RunPath, load: Callable[[], Predictor]) -> None:
        self.settings, self.home, self.load = settings, home, load
        self.socket = bind_socket(settings.host, settings.port)
        self.limits = limit_connections(settings.limits)
        self.code = 0
        self.reloading: asyncio.Task[None] | None = None
        self.log = ServerLog(settings.quiet)
        self.gate = RequestGate(settings.root_path)
        self.http = HttpServer(
            configure_uvicorn(
                self.gate,
                http=partial(LimitedProtocol, self.limits, self.count_malformed, self.gate.refuse_full),
                proxy_headers=False,
                timeout_keep_alive=math.ceil(self.limits.idle_seconds),
                backlog=ACCEPTS_PER_TURN,
            )
        )
        self.http.drain = self.drain

    @property
    def address(self) -> str:
        """The URL."""
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def count_malformed(self, status: int) -> None:
        """Count what was no request."""
        if self.gate.service is not None:
            self.gate.service.metrics.record("none", status, 0.0)

    async def run(self, on_ready: Callable[[], None] = lambda: None, signals: bool = True) -> int:
        """Serve until stopped; `on_ready` is called when the model answers.

        Returns the exit code. Raises VitreousError where it cannot start.
        """
        settings, loop = self.settings, asyncio.get_running_loop()
        count = settings.decoders or max(2, default_worker_count())
        decoders, log = DecoderPool(count, self.limits, settings.command or DECODER_COMMAND), self.log
        loop.set_exception_handler(lambda loop, context: self.log_trouble(context))
        if signals:
            sys.setswitchinterval(THREAD_SWITCH_SECONDS)
            # until there is anything to finish
            self.handle_signals(lambda number: os._exit(128 + number), lambda: None)
        serving = loop.create_task(self.http.serve([self.socket]))
        try:
            _, served = await asyncio.gather(decoders.start(), asyncio.to_thread(self.prepare_model))
            decode_seconds = await decoders.measure_seconds(served.decode_settings)
            connections = self.http.server_state.connections
            self.service = service = Service(
                served,
                self.limits,
                access=settings.access,
                log=log,
                decoders=decoders,
                decode_seconds=decode_seconds,
                connections=connections,
            )
            service.root_path = settings.root_path
            if signals:
                self.handle_signals(self.stop, self.reload)
            self.gate.service = service
            self.log_start()
            on_ready()
            await serving
            service.batcher.close()
            log.write(event="down", code=self.code)
        finally:
            if not serving.done():
                self.http.should_exit = True
                await serving
            decoders.close()
            log.close()
        return self.code

    def log_trouble(self, context: dict[str, Any]) -> None:
        """Log what the event loop reports, such as too many open files."""
        error = f"{context.get('message', '')}: {context.get('exception') or ''}"
        self.log.write(event="trouble", error=error[:500])

    def log_start(self) -> None:
        """Log that the server answers."""
        service, card = self.service, self.service.served.predictor.card
        fields = {"model": card.name, "version": card.version, "queue": service.queue, "rate": round(service.rate, 1)}
        self.log.write(event="up", address=self.address, **fields)
        if service.served.note:
            self.log.write(event="no index", error=service.served.note)

    def handle_signals(self, on_end: Callable[[int], None], on_reload: Callable[[], None]) -> None:
        """Set what happens on SIGTERM and Ctrl-C, and on SIGHUP."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_end, number)
        if hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, on_reload)

    def prepare_model(self) -> ServedModel:
        """Load and warm up. Raises VitreousError."""
        return warm_up_predictor(self.load(), self.limits, self.home)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Answer what was accepted and end; the second time, end at once."""
        if self.http.should_exit:
            os._exit(128 + number)
        self.code = 130 if number == signal.SIGINT else 0
        self.service.draining = self.http.should_exit = True
        connections = len(self.http.server_state.connections)
        self.log.write(event="draining", images=self.service.taken, connections=connections)

    async def drain(self) -> None:
        """Close the listener, answer every request that came whole, and close the connections."""
        loop, connections = asyncio.get_running_loop(), self.http.server_state.connections
        seconds = 0.0 if self.gate.service is None else 1.5 if self.code else self.limits.drain_seconds
        end = loop.time() + seconds
        await asyncio.sleep(min(MIN_DRAIN_SECONDS, seconds))
        # closing the listener resets connections that nobody has accepted yet
        while has_pending_connections(self.socket) and loop.time() < end:
            await asyncio.sleep(0)
        for listener in self.http.servers:
            listener.close()
        self.socket.close()
        quiet = loop.time() + 0.5  # a request may be under way on a connection that is kept
        while connections and loop.time() < end:
            for connection in list(connections):
                if loop.time() > quiet:
                    connection.shutdown()
            await asyncio.sleep(0.02)
        for connection in list(connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    def reload(self) -> None:
        """Load the model again; the old one answers until the new one can, and goes on if loading fails."""
        if self.reloading is None or self.reloading.done():
            self.reloading = asyncio.get_running_loop().create_task(self.replace_model())

    async def replace_model(self) -> None:
        """Put the new model in place. Pictures that were asked of the old model are answered by the old model."""
        service = self.service
        try:
            served = await asyncio.to_thread(self.prepare_model)
        except Exception as error:
            self.log.write(event="reload refused", error=str(error)[:500])
            return
        service.served, service.reloads, service.batcher.size = served, service.reloads + 1, served.batch_size
        card = served.predictor.card
        self.log.write(event="reloaded", model=card.name, version=card.version)


def configure_uvicorn(app: Any, **options: Any) -> uvicorn.Config:
    """The config of uvicorn for plain HTTP alone, without a log or a header of its own, and with `options` of it."""
    return uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=logging.CRITICAL,
        access_log=False,
        server_header=False,
        **options,
    )


def has_pending_connections(listening: socket.socket) -> bool:
    """Whether connections wait to be accepted."""
    poll = select.poll()
    poll.register(listening, select.POLLIN)
    return bool(poll.poll(0))


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ResourceError where the address is taken, UsageError where it cannot be."""
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError, OverflowError) as error:
        raise UsageError(f"no address {host}", str(error)) from None
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        listening = socket.create_server(place, family=family, backlog=LISTEN_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        hint = "name another with --port; 0 finds a free one"
        raise ResourceError(f"port {port} of {host} cannot be had ({reason})", hint) from None
    except OverflowError:
        raise UsageError(f"no port {port}", "0 to 65535") from None
    listening.setblocking(False)
    return listening


def limit_connections(limits: ServerLimits) -> ServerLimits:
    """The limits with no more connections than files may be open."""
    try:
        import resource
    except ImportError:
        return limits
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections + RESERVED_FILES + len(os.listdir("/proc/self/fd") if sys.platform == "linux" else ())
    if soft < wanted and soft != resource.RLIM_INFINITY:
        with suppress(ValueError, OSError):
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
        limits = replace(limits, connections=max(4, min(limits.connections, limits.connections - (wanted - soft))))
    return limits


@contextmanager
def serve_in_thread(
    predictor: Predictor, settings: ServerSettings | None = None, run: RunPath = None
) -> Iterator[Server]:
    """A server in a thread of this process, ready: `with running(predictor) as server: … server.address`.

    It listens at a free port unless `settings` say otherwise; `run` may have an index.
    """
    server = Server(settings or ServerSettings(port=0, quiet=True), run, lambda: predictor)
    ready, errors, loops = Event(), list[BaseException](), list[asyncio.AbstractEventLoop]()

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.run(ready.set, signals=False)

    def work() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            errors.append(error)
            ready.set()

    thread = Thread(target=work, name="server")
    thread.start()
    ready.wait()
    try:
        if errors:
            raise errors[0]
        server.loop = loops[0]
        yield server
    finally:
        if not errors:
            with suppress(RuntimeError):
                loops[0].call_soon_threadsafe(lambda: server.http.should_exit or server.stop())
        thread.join()
