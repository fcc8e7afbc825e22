"""`serve`: load, warm up, listen, answer until told to stop, and then answer what was accepted."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from vitreous.cores import default_workers
from vitreous.errors import ResourceError, UsageError
from vitreous.serving.http.access import Access
from vitreous.serving.http.limits import Limits
from vitreous.serving.http.log import Log
from vitreous.serving.predict import Predictor

if TYPE_CHECKING:
    from vitreous.serving.http.model import Served

Run = str | os.PathLike[str] | None
BACKLOG = 32  # connections that are accepted in one turn of the event loop
WAITING = 1024  # that the system keeps for us
RESERVE = 32  # open files that are not connections
TURN = 0.001  # seconds after which the computing thread has to let the event loop run
SEEN = 0.05  # seconds between `readyz` saying no and the listener closing


@dataclass(frozen=True)
class Settings:
    """Where to listen and what to bear. `decoders`: processes that decode, 0 for one a core and at least two."""

    host: str = "127.0.0.1"
    port: int = 8000
    limits: Limits = field(default_factory=Limits)
    access: Access = field(default_factory=Access)
    decoders: int = 0
    quiet: bool = False
    command: tuple[str, ...] = ()


class Server:
    """A model behind a socket, which is bound at once. `load` makes the predictor, and again when SIGHUP asks; `home`
    may have an index."""

    def __init__(self, settings: Settings, home: Run, load: Callable[[], Predictor]) -> None:
        self.settings, self.home, self.load = settings, home, load
        self.socket = bound(settings.host, settings.port)
        self.code = 0
        self.reloading: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Where it is."""
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def run(self, up: Callable[[], None] = lambda: None, signals: bool = True) -> int:
        """Serve until stopped; `up` is called when it answers. Returns the exit code. Raises VitreousError where it
        cannot start."""
        from vitreous.serving.http.connection import Connection
        from vitreous.serving.http.decoders import Decoders
        from vitreous.serving.http.routes import table
        from vitreous.serving.http.site import Site

        settings, loop = self.settings, asyncio.get_running_loop()
        limits = fitted(settings.limits)
        count = settings.decoders or max(2, default_workers())
        decoders = Decoders(count, limits, settings.command) if settings.command else Decoders(count, limits)
        log = Log(settings.quiet)
        loop.set_exception_handler(lambda loop, told: log.tell(event="trouble", error=said(told)))
        if signals:
            sys.setswitchinterval(TURN)
            self.hear(lambda number: os._exit(128 + number), lambda: None)  # until there is anything to finish
        try:
            async with self.starting():
                _, served = await asyncio.gather(decoders.start(), asyncio.to_thread(self.prepared, limits))
                pace = await decoders.pace(served.settings)
        except BaseException:
            decoders.close()
            log.close()
            self.socket.close()
            raise
        self.stopping = asyncio.Event()
        self.site = site = Site(served, limits, settings.access, log, table(), decoders, pace)
        listener = await loop.create_server(lambda: Connection(site), sock=self.socket, backlog=BACKLOG)
        self.socket.listen(WAITING)
        if signals:
            self.hear(self.stop, self.reload)
        sweeping = loop.create_task(site.sweep())
        card = served.predictor.card
        log.tell(
            event="up",
            address=self.address,
            model=card.name,
            version=card.version,
            queue=site.queue,
            rate=round(site.rate, 1),
        )
        if served.note:
            log.tell(event="no index", error=served.note)
        up()
        await self.stopping.wait()
        await self.drain(listener)
        sweeping.cancel()
        site.batcher.close()
        decoders.close()
        log.tell(event="down", code=self.code)
        log.close()
        return self.code

    def hear(self, end: Callable[[int], None], again: Callable[[], None]) -> None:
        """What happens on SIGTERM and Ctrl-C, and on SIGHUP."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end, number)
        loop.add_signal_handler(signal.SIGHUP, again)

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Say meanwhile that the server is starting."""
        from vitreous.serving.http.starting import Starting

        open_ = set[asyncio.Transport]()
        listener = await asyncio.get_running_loop().create_server(
            lambda: Starting(open_), sock=self.socket.dup(), backlog=BACKLOG
        )
        try:
            yield
        finally:
            listener.close()
            for transport in list(open_):
                transport.abort()

    def prepared(self, limits: Limits) -> Served:
        """Load and warm up. Raises VitreousError."""
        from vitreous.serving.http.model import prepare

        return prepare(self.load(), limits, self.home)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Answer what was accepted and end; the second time, end."""
        if self.stopping.is_set():
            os._exit(128 + number)
        self.code = 130 if number == signal.SIGINT else 0
        self.site.draining = True
        self.site.log.tell(event="draining", images=self.site.taken, connections=len(self.site.connections))
        self.stopping.set()

    async def drain(self, listener: asyncio.Server) -> None:
        """Close the listener, answer every request that came whole, and close the connections."""
        site, loop = self.site, asyncio.get_running_loop()
        until = loop.time() + (1.5 if self.code else site.limits.drain_seconds)
        await asyncio.sleep(SEEN)
        while pending(self.socket) and loop.time() < until:  # closing resets those that nobody has accepted yet
            await asyncio.sleep(0)
        listener.close()
        quiet = loop.time() + 0.5  # a request may be under way on a connection that is kept
        while loop.time() < until:
            for connection in list(site.connections):
                if connection.state == "idle" and loop.time() > quiet:
                    connection.hang_up()
            if not site.connections:
                break
            await asyncio.sleep(0.02)
        for connection in list(site.connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    def reload(self) -> None:
        """Load the model again and put it in place of the old one, which goes on answering until then, and if that
        fails."""
        if self.reloading is None or self.reloading.done():
            self.reloading = asyncio.get_running_loop().create_task(self.replace())

    async def replace(self) -> None:
        """The work of it. Pictures that were asked of the old model are answered by the old model."""
        site = self.site
        try:
            served = await asyncio.to_thread(self.prepared, site.limits)
        except Exception as error:
            site.log.tell(event="reload refused", error=str(error)[:500])
            return
        site.served, site.reloads, site.batcher.size = served, site.reloads + 1, served.size
        site.log.tell(event="reloaded", model=served.predictor.card.name, version=served.predictor.card.version)


def pending(listening: socket.socket) -> bool:
    """Whether connections wait to be accepted."""
    poll = select.poll()
    poll.register(listening, select.POLLIN)
    return bool(poll.poll(0))


def said(told: dict[str, Any]) -> str:
    """What the event loop has to tell of, such as too many open files."""
    return f"{told.get('message', '')}: {told.get('exception') or ''}"[:500]


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address. Raises ResourceError where it is taken, UsageError where it cannot be."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError, OverflowError) as error:
        raise UsageError(f"no address {host}", str(error)) from None
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(place)
        found.listen(WAITING)
        found.setblocking(False)
    except OSError as error:
        found.close()
        raise ResourceError(
            f"port {port} of {host} cannot be had ({error.strerror})", "name another with --port; 0 finds a free one"
        ) from None
    except OverflowError:
        raise UsageError(f"no port {port}", "0 to 65535") from None
    return found


def fitted(limits: Limits) -> Limits:
    """The limits with no more connections than files may be open."""
    from dataclasses import replace

    try:
        import resource
    except ImportError:
        return limits
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections + RESERVE + len(os.listdir("/proc/self/fd") if sys.platform == "linux" else ())
    if soft < wanted and soft != resource.RLIM_INFINITY:
        with suppress(ValueError, OSError):
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
        limits = replace(limits, connections=max(4, min(limits.connections, limits.connections - (wanted - soft))))
    return limits


@contextmanager
def running(predictor: Predictor, settings: Settings | None = None, run: Run = None) -> Iterator[Server]:
    """A server in a thread of this process, at a free port, up: `with running(predictor) as server: …
    server.address`."""
    from dataclasses import replace

    server = Server(settings or replace(Settings(), port=0, quiet=True), run, lambda: predictor)
    up, failed = Event(), list[BaseException]()

    def work() -> None:
        try:
            asyncio.run(hold())
        except BaseException as error:
            failed.append(error)
            up.set()

    async def hold() -> None:
        server.loop = asyncio.get_running_loop()  # type: ignore[attr-defined]
        await server.run(up.set, signals=False)

    thread = Thread(target=work, name="server")
    thread.start()
    up.wait()
    try:
        if failed:
            raise failed[0]
        yield server
    finally:
        if not failed:
            with suppress(RuntimeError):
                server.loop.call_soon_threadsafe(lambda: server.stopping.is_set() or server.stop())  # type: ignore[attr-defined]
        thread.join()
