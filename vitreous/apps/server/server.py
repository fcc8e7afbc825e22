"""The server behind `vitreous serve`: it loads and warms up the model, listens, serves until stopped, and then drains
accepted requests."""

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
LISTEN_BACKLOG = 1024  # pending connections in the kernel
ACCEPTS_PER_TURN = 32  # connections accepted per iteration of the event loop
RESERVED_FILES = 32  # open files reserved for other uses than connections
MIN_DRAIN_SECONDS = 0.05  # minimum seconds between the first failing `readyz` and the closing of the listening socket
THREAD_SWITCH_SECONDS = 0.001  # interpreter switch interval: the computing thread yields to the event loop after it


class HttpServer(uvicorn.Server):
    """uvicorn with the signals and the shutdown of `Server`, and a periodic check of its connections."""

    drain: Callable[[], Awaitable[None]]

    def capture_signals(self) -> AbstractContextManager[None]:
        """Install no signal handlers; `Server` does."""
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with a long kernel backlog, and accept few connections per iteration of the event loop."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(LISTEN_BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        """End connections whose phase takes too long. uvicorn calls this ten times per second."""
        if counter % 2 == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                connection.sweep(now)  # type: ignore[union-attr]
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain accepted requests, then close all connections."""
        await self.drain()


class Server:
    """A model behind a listening socket, which is bound in the constructor.

    `load` loads the predictor, at the start and on SIGHUP. `run` may contain an index of training images.
    """

    service: Service
    loop: asyncio.AbstractEventLoop

    def __init__(self, settings: ServerSettings, run: RunPath, load: Callable[[], Predictor]) -> None:
        self.settings, self.run_path, self.load = settings, run, load
        self.socket = bind_socket(settings.host, settings.port)
        self.limits = limit_connections(settings.limits)
        self.exit_code = 0
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
        """Return the URL of the server."""
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def count_malformed(self, status: int) -> None:
        """Count a malformed request, with the status of its response."""
        if self.gate.service is not None:
            self.gate.service.metrics.record("none", status, 0.0)

    async def run(self, on_ready: Callable[[], None] = lambda: None, signals: bool = True) -> int:
        """Load the model, and serve until stopped. `on_ready` is called when the model is ready; `signals` installs
        signal handlers.

        Returns the exit code. Raises VitreousError if the server cannot start.
        """
        settings, loop = self.settings, asyncio.get_running_loop()
        count = settings.decoders or max(2, default_worker_count())
        decoders, log = DecoderPool(count, self.limits, settings.command or DECODER_COMMAND), self.log
        loop.set_exception_handler(lambda loop, context: self.log_trouble(context))
        if signals:
            sys.setswitchinterval(THREAD_SWITCH_SECONDS)
            # until there are requests to drain
            self.handle_signals(lambda signal_number: os._exit(128 + signal_number), lambda: None)
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
            log.write(event="down", code=self.exit_code)
        finally:
            if not serving.done():
                self.http.should_exit = True
                await serving
            decoders.close()
            log.close()
        return self.exit_code

    def log_trouble(self, context: dict[str, Any]) -> None:
        """Log an error of the event loop, such as too many open files."""
        error = f"{context.get('message', '')}: {context.get('exception') or ''}"
        self.log.write(event="trouble", error=error[:500])

    def log_start(self) -> None:
        """Log that the server is ready, with the model and the limits."""
        service, card = self.service, self.service.served.predictor.card
        fields = {
            "model": card.name,
            "version": card.version,
            "queue": service.queue_limit,
            "rate": round(service.images_per_second, 1),
        }
        self.log.write(event="up", address=self.address, **fields)
        if service.served.note:
            self.log.write(event="no index", error=service.served.note)

    def handle_signals(self, on_end: Callable[[int], None], on_reload: Callable[[], None]) -> None:
        """Install handlers: `on_end` for SIGTERM and Ctrl-C, `on_reload` for SIGHUP."""
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, on_end, signal_number)
        if hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, on_reload)

    def prepare_model(self) -> ServedModel:
        """Load and warm up the model. Raises VitreousError if it cannot be served."""
        return warm_up_predictor(self.load(), self.limits, self.run_path)

    def stop(self, signal_number: int = signal.SIGTERM) -> None:
        """Drain accepted requests, and end. On the second call, end immediately."""
        if self.http.should_exit:
            os._exit(128 + signal_number)
        self.exit_code = 130 if signal_number == signal.SIGINT else 0
        self.service.draining = self.http.should_exit = True
        connections = len(self.http.server_state.connections)
        self.log.write(event="draining", images=self.service.images_in_flight, connections=connections)

    async def drain(self) -> None:
        """Close the listening socket, respond to every complete request, and close the connections."""
        loop, connections = asyncio.get_running_loop(), self.http.server_state.connections
        seconds = 0.0 if self.gate.service is None else 1.5 if self.exit_code else self.limits.drain_seconds
        end = loop.time() + seconds
        await asyncio.sleep(min(MIN_DRAIN_SECONDS, seconds))
        # closing the listener resets connections that are not accepted yet
        while has_pending_connections(self.socket) and loop.time() < end:
            await asyncio.sleep(0)
        for listener in self.http.servers:
            listener.close()
        self.socket.close()
        grace_end = loop.time() + 0.5  # a request may be arriving on a kept-alive connection
        while connections and loop.time() < end:
            for connection in list(connections):
                if loop.time() > grace_end:
                    connection.shutdown()
            await asyncio.sleep(0.02)
        for connection in list(connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    def reload(self) -> None:
        """Reload the model in the background. The old model serves until the new one is ready, and continues if loading
        fails."""
        if self.reloading is None or self.reloading.done():
            self.reloading = asyncio.get_running_loop().create_task(self.replace_model())

    async def replace_model(self) -> None:
        """Load a model, and replace the served one. Requests that were accepted before use the old model."""
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
    """Configure uvicorn for HTTP only, without its log and its headers. `options` are further settings of uvicorn."""
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
    """Return whether connections to a listening socket wait to be accepted."""
    poll = select.poll()
    poll.register(listening, select.POLLIN)
    return bool(poll.poll(0))


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind a listening socket. Raises ResourceError if the port is in use, UsageError if the address or the port is
    invalid."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError, OverflowError) as error:
        raise UsageError(f"invalid address {host}", str(error)) from None
    use_dual_stack = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        listening = socket.create_server(address, family=family, backlog=LISTEN_BACKLOG, dualstack_ipv6=use_dual_stack)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        hint = "use another --port; 0 selects a free one"
        raise ResourceError(f"cannot listen on port {port} of {host} ({reason})", hint) from None
    except OverflowError:
        raise UsageError(f"invalid port {port}", "use 0 to 65535") from None
    listening.setblocking(False)
    return listening


def limit_connections(limits: ServerLimits) -> ServerLimits:
    """Lower the maximum number of connections to the number of open files that the system allows, after raising that
    limit if possible."""
    try:
        import resource
    except ImportError:
        return limits
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = (
        limits.connections + RESERVED_FILES + len(os.listdir("/proc/self/fd") if sys.platform == "linux" else ())
    )
    if soft < num_files and soft != resource.RLIM_INFINITY:
        with suppress(ValueError, OSError):
            new_limit = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
            soft = new_limit
        limits = replace(limits, connections=max(4, min(limits.connections, limits.connections - (num_files - soft))))
    return limits


@contextmanager
def serve_in_thread(
    predictor: Predictor, settings: ServerSettings | None = None, run: RunPath = None
) -> Iterator[Server]:
    """Run a server in a thread of this process: `with serve_in_thread(predictor) as server: … server.address`.

    It listens on a free port unless `settings` set one. `run` may contain an index of training images.
    """
    server = Server(settings or ServerSettings(port=0, quiet=True), run, lambda: predictor)
    ready, errors, loops = Event(), list[BaseException](), list[asyncio.AbstractEventLoop]()

    async def run_server() -> None:
        """Run the server in the thread's event loop."""
        loops.append(asyncio.get_running_loop())
        await server.run(ready.set, signals=False)

    def run_event_loop() -> None:
        """Run the event loop of the thread; store an exception for the caller."""
        try:
            asyncio.run(run_server())
        except BaseException as error:
            errors.append(error)
            ready.set()

    thread = Thread(target=run_event_loop, name="server")
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
