"""Pool of decoding processes. A malicious image that crashes, loops endlessly or needs too much memory fails only its
own request."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from vitreous.apps.server.child import (
    FLAG_FULL_SIZE,
    FLAG_WITH_SIZE,
    JOB_HEADER,
    RESPONSE_HEADER,
    STATUS_PIXELS,
    DecodeSettings,
)
from vitreous.apps.server.responses import Refusal
from vitreous.apps.server.settings import ServerLimits
from vitreous.system.children import block_stop_signals

DECODER_COMMAND = (sys.executable, "-m", "vitreous.apps.server.child")
START_SECONDS = 60.0  # maximum startup time of a process on a busy machine
DECODE_TIMEOUT_FACTOR = 6  # maximum wall time of a job, as a multiple of its CPU time limit
EXIT_POLL_SECONDS = 0.02  # interval at which a process whose socket has closed is checked for its exit
INHERITED_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "HOME", "VIRTUAL_ENV", "SYSTEMROOT")


class DecoderProcess:
    """A decoding process (`child.py`) and the socket to it."""

    def __init__(self, command: Sequence[str], limits: ServerLimits) -> None:
        self.socket, child_socket = socket.socketpair()
        self.socket.setblocking(False)
        arguments = [*command, str(child_socket.fileno()), str(limits.decode_seconds), str(limits.decode_memory)]
        environment = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with child_socket, block_stop_signals():
            self.process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=2, env=environment, pass_fds=(child_socket.fileno(),)
            )

    async def wait_until_ready(self) -> bool:
        """Wait until the process has finished its imports. Return whether it has."""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                return await asyncio.get_running_loop().sock_recv(self.socket, 1) == b"!"
        return False

    async def send_job(self, content: memoryview, settings: bytes, flags: int) -> tuple[Any, np.ndarray | None]:
        """Run one job in the process. Return the JSON of its response, and (C, *image) pixels, or None if the image was
        refused. Raises ConnectionError if the process dies."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.socket, JOB_HEADER.pack(flags, len(settings), len(content)) + settings)
        await loop.sock_sendall(self.socket, content)
        status, length, size = RESPONSE_HEADER.unpack(await self.receive(bytearray(RESPONSE_HEADER.size)))
        response = json.loads(await self.receive(bytearray(length)))
        if status != STATUS_PIXELS:
            return response, None
        pixels = np.empty(response["shape"], response["dtype"])
        if pixels.nbytes != size:
            raise ConnectionError("invalid response of a decoder")
        await self.receive(pixels.data)
        return response, pixels

    async def receive(self, buffer: Any) -> Any:
        """Fill a buffer from the socket, and return it. Raises ConnectionError if the process has closed the socket."""
        view, loop = memoryview(buffer).cast("B"), asyncio.get_running_loop()
        while len(view):
            num_received = await loop.sock_recv_into(self.socket, view)
            if not num_received:
                raise ConnectionError("a decoder died")
            view = view[num_received:]
        return buffer

    def kill(self) -> None:
        """Kill the process, and close its socket."""
        self.socket.close()
        self.process.kill()
        self.process.wait()


class DecoderPool:
    """Pool of `count` decoding processes; a process that dies is replaced.

    `restarts` counts replacements, `waiting` the images that are queued or being decoded. Methods raise Refusal: 422
    for the image, 503 if no process is available.
    """

    def __init__(self, count: int, limits: ServerLimits, command: Sequence[str] = DECODER_COMMAND) -> None:
        self.count, self.limits, self.command = count, limits, command
        self.idle: asyncio.Queue[DecoderProcess] = asyncio.Queue()
        self.children: set[DecoderProcess] = set()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.restarts = self.waiting = 0
        self.closed = False

    async def start(self) -> None:
        """Start all processes, and wait until they are ready. Raises Refusal if none can be started."""
        await asyncio.gather(*(self.start_process(once=True) for _ in range(self.count)))
        for _ in range(self.count - len(self.children)):
            self.run_in_background(self.start_process())
        if not self.children:
            message = "no decoding process can be started"
            raise Refusal(503, "decoder_lost", message, "check the limits on memory and processes")

    async def start_process(self, once: bool = False) -> None:
        """Start a process. If that fails, retry after a pause, since memory may be free later; with `once`, do not
        retry."""
        pause = 0.1
        while not self.closed:
            with suppress(OSError):
                child = DecoderProcess(self.command, self.limits)
                self.children.add(child)
                if await child.wait_until_ready():
                    self.idle.put_nowait(child)
                    return
                self.drop(child)
            if once:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)

    def drop(self, child: DecoderProcess) -> None:
        """End a process without replacing it."""
        self.children.discard(child)
        child.kill()

    def replace_process(self, child: DecoderProcess) -> None:
        """End a process, and start another in the background."""
        self.restarts += 1
        self.drop(child)
        self.run_in_background(self.start_process())

    def run_in_background(self, coroutine: Any) -> asyncio.Task[Any]:
        """Run a coroutine as a task to completion, even if its caller is cancelled."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def decode(
        self, content: memoryview, settings: DecodeSettings, with_size: bool = False, full_size: bool = False
    ) -> tuple[np.ndarray, tuple[int, int]]:
        """Decode an image's bytes in an idle process, which finishes the job even if the caller is cancelled.

        Returns the (C, *image) pixels of the model's input or, with `full_size`, (C, H, W) pixels at the image's
        original size. With `with_size`, also returns (width, height) of the upright image, else (0, 0). Raises Refusal:
        422 if the image cannot be decoded, 503 if the process was killed from outside.
        """
        flags = FLAG_WITH_SIZE * with_size | FLAG_FULL_SIZE * full_size
        self.waiting += 1
        try:
            child = await self.idle.get()
            return await asyncio.shield(self.run_in_background(self.run_job(child, content, settings.encoded, flags)))
        finally:
            self.waiting -= 1

    async def run_job(
        self, child: DecoderProcess, content: memoryview, settings: bytes, flags: int
    ) -> tuple[np.ndarray, tuple[int, int]]:
        """Run one job in a process, which becomes idle afterwards or is replaced. Returns (C, *image) pixels and the
        (width, height) of the image. Raises Refusal as `decode` does."""
        try:
            async with asyncio.timeout(self.limits.decode_seconds * DECODE_TIMEOUT_FACTOR):
                response, pixels = await child.send_job(content, settings, flags)
        except (OSError, ValueError) as error:
            for _ in range(0 if isinstance(error, TimeoutError) else 25):
                if child.process.poll() is not None:
                    break
                await asyncio.sleep(EXIT_POLL_SECONDS)
            was_killed = child.process.poll() == -getattr(signal, "SIGKILL", 9)
            self.replace_process(child)
            if was_killed:  # from outside: an image cannot cause this
                message = "the decoding process was killed"
                raise Refusal(503, "decoder_lost", message, "retry", retry=1) from None
            message = "image: decoding failed, or took too much time or memory"
            raise Refusal(422, "unreadable_image", message, "save the image as a standard JPEG or PNG") from None
        if self.closed:
            self.drop(child)
        else:
            self.idle.put_nowait(child)
        if pixels is None:
            raise Refusal(422, "unreadable_image", response["message"], response["hint"])
        width, height = response["size"]
        return pixels, (width, height)

    async def measure_seconds(self, settings: DecodeSettings) -> float:
        """Measure the seconds to decode a typical photograph, the fastest of three; 0 if the decoder refuses it."""
        loop, content = asyncio.get_running_loop(), memoryview(make_synthetic_photograph())
        seconds = []
        with suppress(Refusal):
            for _ in range(3):
                start = loop.time()
                await self.decode(content, settings)
                seconds.append(loop.time() - start)
        return min(seconds, default=0.0)

    def close(self) -> None:
        """End all processes without replacing them."""
        self.closed = True
        for child in list(self.children):
            self.drop(child)


def make_synthetic_photograph() -> bytes:
    """Make a JPEG of 500 x 375 pixels with about as much detail as a photograph."""
    import io

    from PIL import Image

    coarse = np.random.default_rng(0).integers(0, 256, (94, 125, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC).save(file := io.BytesIO(), "JPEG", quality=85)
    return file.getvalue()
