"""The decoding process of the server. It may crash on an image, since it has no model, no open files, and only its
socket. It runs without PyTorch.

A job consists of flags (a byte), the lengths of settings and content (8 bytes each), the settings as JSON, and the
content. A response consists of a status byte, two lengths, a JSON text (dtype and shape of the pixels, or the error),
and the pixels.
"""

from __future__ import annotations

import io
import json
import math
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pkgutil import iter_modules

import numpy as np

from vitreous.config import from_builtins, to_builtins
from vitreous.data.decoding.decode import IMAGE_FORMATS, read_upright_size
from vitreous.data.decoding.gate import MAX_JPEG_PIXELS
from vitreous.data.decoding.heif import list_readable_formats, register_pillow_reader
from vitreous.data.decoding.tiff import preload_tiff_codecs
from vitreous.data.modalities.base import Preprocess
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.modalities.table import AnyPreprocess
from vitreous.errors import DataError
from vitreous.inference.reading import read_large_jpeg, read_model_input
from vitreous.system.children import STOP_SIGNALS
from vitreous.tasks.tiles import to_native_array

JOB_HEADER, RESPONSE_HEADER = struct.Struct(">BQQ"), struct.Struct(">BQQ")
STATUS_PIXELS, STATUS_REFUSED = 0, 1
FLAG_WITH_SIZE, FLAG_FULL_SIZE = 1, 2  # flags of a job: also return the image's size; do not resize the image


@dataclass(frozen=True)
class DecodeSettings:
    """Decoding settings of a model: its preprocessing, `exact` to decode every JPEG at full size, and the maximum
    number of pixels of an image."""

    preprocess: Preprocess
    exact: bool
    max_pixels: int

    @cached_property
    def encoded(self) -> bytes:
        """Return the settings as JSON for the decoding process."""
        return json.dumps([to_builtins(self.preprocess), self.exact, self.max_pixels]).encode()


@cache
def parse_settings(encoded: bytes) -> DecodeSettings:
    """Parse settings from the JSON of `DecodeSettings.encoded`."""
    preprocess, exact, max_pixels = json.loads(encoded)
    return DecodeSettings(from_builtins(AnyPreprocess, preprocess), exact, max_pixels)


#: decodes an image: content, settings, and whether to keep its original size -> pixels
DecodeFunction = Callable[[bytes, DecodeSettings, bool], np.ndarray]


def decode_request_image(content: bytes, settings: DecodeSettings, full_size: bool) -> np.ndarray:
    """Decode one image or clip to the (C, *image) pixels of the model's input or, with `full_size`, one image to (C, H,
    W) at its original size. Raises DataError."""
    preprocess, max_pixels = settings.preprocess, settings.max_pixels
    if full_size:
        return to_native_array(preprocess.decode_within(content, "image", max_pixels))
    jpeg_preprocess = preprocess.for_reduced_decoding() if content.startswith(b"\xff\xd8") else None
    if jpeg_preprocess is None:
        return preprocess.to_array(preprocess.decode_within(content, "image", max_pixels))
    if math.prod(read_upright_size(content, "image", min(MAX_JPEG_PIXELS, 64 * max_pixels))) > max_pixels:
        return read_large_jpeg(content, jpeg_preprocess, "image", settings.exact, max_pixels)
    return read_model_input(content, preprocess, "image", exact=settings.exact)


def serve_jobs(decode: DecodeFunction = decode_request_image) -> None:
    """Run jobs from the socket whose file descriptor is the first command-line argument, until the socket is closed.
    The second and third are the limits of `limit_cpu_time` and `drop_privileges`."""
    pipe = socket.socket(fileno=int(sys.argv[1]))
    seconds, memory = float(sys.argv[2]), int(sys.argv[3])
    drop_privileges(memory)
    pipe.sendall(b"!")
    jobs = pipe.makefile("rb")
    while len(header := jobs.read(JOB_HEADER.size)) == JOB_HEADER.size:
        flags, settings_length, content_length = JOB_HEADER.unpack(header)
        settings = parse_settings(jobs.read(settings_length))
        content = jobs.read(content_length)
        limit_cpu_time(seconds)
        try:
            pixels = np.ascontiguousarray(decode(content, settings, bool(flags & FLAG_FULL_SIZE)))
            read_size = settings.preprocess.read_upload_size
            image_size = read_size(content, "image", MAX_JPEG_PIXELS) if flags & FLAG_WITH_SIZE else (0, 0)
            document = {"dtype": str(pixels.dtype), "shape": pixels.shape, "size": image_size}
            data = pixels.data.cast("B")
            status = STATUS_PIXELS
        except (DataError, MemoryError) as error:
            data_error = (
                error
                if isinstance(error, DataError)
                else DataError("image: decoding needs too much memory", "scale the image down")
            )
            document, data, status = (
                {"message": data_error.message, "hint": data_error.hint},
                memoryview(b""),
                STATUS_REFUSED,
            )
        limit_cpu_time(0)
        text = json.dumps(document).encode()
        pipe.sendall(RESPONSE_HEADER.pack(status, len(text), len(data)) + text)
        pipe.sendall(data)


def limit_cpu_time(seconds: float) -> None:
    """Let the system kill this process after `seconds` of CPU time; 0 removes the limit."""
    if hasattr(signal, "setitimer"):  # by default the signal ends the process
        signal.setitimer(signal.ITIMER_PROF, seconds)


def drop_privileges(memory: int) -> None:
    """Limit this process, as far as the system supports it: at most `memory` bytes, and no new files, processes or core
    dumps. It ends when its parent ends."""
    for signal_number in STOP_SIGNALS:  # they go to the process group; the server drains, then ends this process
        signal.signal(signal_number, signal.SIG_IGN)
    import_decoders()
    with suppress(OSError, AttributeError):
        os.nice(5)
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None)
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    try:
        import resource
    except ImportError:  # the system has no such limits
        return
    limits = {"RLIMIT_AS": memory, "RLIMIT_CORE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_NPROC": 0}
    for name, limit in limits.items():
        with suppress(ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (limit, limit))
    highest = max(int(name) for name in os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 16
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))


def import_decoders() -> None:
    """Import all modules that decoding imports lazily, also by decoding images, since the process cannot open files
    afterwards."""
    from importlib import import_module

    import PIL
    from PIL import Image

    Image.init()
    plugins = [module.name for module in iter_modules(PIL.__path__, "PIL.") if module.name.endswith("ImagePlugin")]
    pillow_modules = ("PIL.ImageCms", "PIL.ImageOps", "PIL.ImageChops", "PIL.ExifTags")
    other_modules = ("tifffile", "vitreous.data.decoding.spectral", "av", "av.video.reformatter")
    for name in (*plugins, *pillow_modules, *other_modules):
        with suppress(ImportError):
            import_module(name)
    preload_tiff_codecs()
    for image_format in list_readable_formats():
        register_pillow_reader(image_format)
    for image_format in IMAGE_FORMATS:
        Image.new("RGB", (64, 64)).save(file := io.BytesIO(), image_format)
        read_upright_size(file.getvalue(), image_format)
        read_model_input(file.getvalue(), ImagePreprocess((8, 8)), image_format)
    Image.new("RGB", (64, 64)).save(file := io.BytesIO(), "JPEG")
    read_large_jpeg(file.getvalue(), ImagePreprocess((8, 8)), "JPEG", True, 1024)


if __name__ == "__main__":
    serve_jobs()
