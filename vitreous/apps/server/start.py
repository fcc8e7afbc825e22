"""The verb `serve`. Its options are checked before the model is loaded."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitreous.apps.server.settings import LOCAL_HOSTS, AccessControl, ServerLimits, ServerSettings
from vitreous.errors import ResourceError, UsageError, require_installed
from vitreous.inference.exported import is_exported_file
from vitreous.inference.generators import build_generator_predictor
from vitreous.inference.predict import Predictor, build_predictor, load

if TYPE_CHECKING:
    from vitreous.apps.server.server import Server
    from vitreous.inference.options import InferenceOptions

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
ALL_INTERFACES = ("0.0.0.0", "::")
ROOT_PATH_PATTERN = re.compile(r"(/[A-Za-z0-9._~-]+)+")
MIN_TOKEN_LENGTH = 16  # minimum characters of a token


def serve(
    run: str | os.PathLike[str],
    settings: ServerSettings | None = None,
    how: InferenceOptions | None = None,
    exact: bool = False,
    quick: bool = True,
    up: Callable[[Server], None] = lambda server: None,
    vae: str | None = None,
) -> int:
    """Serve a model over HTTP until SIGTERM or Ctrl-C, from the main thread; reload `run` on SIGHUP.

    `settings` are the address (default 127.0.0.1:8000) and limits; `how`, `exact` and `quick` are those of `load`. `up`
    is called when the server is ready. `vae` is the autoencoder of a latent diffusion model. Returns the exit code.
    Raises UsageError and WeightsError as `load` does, and ResourceError if the port is in use or the system does not
    support the sockets of the decoding processes.
    """
    if sys.platform == "win32":
        raise ResourceError("`serve` does not run on Windows", "use WSL or the container of Containerfile")
    from vitreous.apps.server.server import Server

    server = Server(settings or ServerSettings(), run, lambda: load_served_predictor(run, how, exact, quick, vae))
    return asyncio.run(server.run(lambda: up(server)))


def load_served_predictor(
    run: str | os.PathLike[str],
    how: InferenceOptions | None = None,
    exact: bool = False,
    quick: bool = True,
    vae: str | None = None,
) -> Predictor:
    """Load the predictor of a run. Unlike `load`, it accepts generative models. Raises UsageError and WeightsError
    as `load` does."""
    if vae is None and is_exported_file(run):
        return load(run, how, exact=exact, quick=quick)
    from vitreous.inference.open_model import find_bundle, select_task_bundle

    def ignore_note(text: str) -> None:
        """Ignore notes of the bundle, which the caller prints."""

    bundle = find_bundle(run, ignore_note)
    if not bundle.task.reads_images:
        return build_generator_predictor(bundle, how, vae)
    if vae is not None:
        raise UsageError(f"--vae needs a generative model, but {run} is not one", "remove --vae")
    predictor = build_predictor(
        run, select_task_bundle(run, bundle, True, ignore_note, dense=True), how, exact=exact, quick=quick
    )
    predictor.choose_engine()
    return predictor


def parse_server_options(options: Any) -> tuple[ServerSettings, str]:
    """Convert command-line options to settings. Also return the generated token, or an empty string. Raises UsageError
    for an invalid option, ResourceError without the extra `serve`."""
    require_installed(("starlette", "uvicorn", "httptools", "python_multipart", "prometheus_client"), "serve")
    for name, minimum in (("queue", 0), ("max_bytes", 1), ("max_pixels", 1), ("decoders", 0)):
        if getattr(options, name) < minimum:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {minimum}, not {getattr(options, name)}")
    if not 0 <= options.port <= 65535:
        raise UsageError(f"invalid --port {options.port}", "use 0 to 65535; 0 selects a free one")
    if options.host not in LOOPBACK_HOSTS and not options.public:
        message = f"--host {options.host} accepts connections from other machines"
        raise UsageError(message, "add --public; clients then need a token")
    generated_token = ""
    token = read_token(options.token_file) if options.token_file else b""
    if options.public and not token:
        generated_token = secrets.token_urlsafe(24)
        token = generated_token.encode()
    host, names = options.host.lower(), {name.lower() for name in options.host_name}
    hosts = {*LOCAL_HOSTS, host, f"[{host}]", *names}
    limits = ServerLimits(
        bytes=options.max_bytes,
        pixels=options.max_pixels,
        queue=options.queue,
        in_flight_bytes=max(4 * options.max_bytes, 2**26),
    )
    access = AccessControl(frozenset(hosts), token or None, accepts_addresses=host in ALL_INTERFACES)
    root = parse_root_path(options.root_path)
    settings = ServerSettings(
        options.host,
        options.port,
        limits=limits,
        access=access,
        decoders=options.decoders,
        quiet=options.quiet,
        root_path=root,
    )
    return settings, generated_token


def parse_root_path(path: str) -> str:
    """Remove the trailing slash of a path; "" for the root. Raises UsageError for an invalid path."""
    root = path.rstrip("/")
    if root and not (ROOT_PATH_PATTERN.fullmatch(root) and not {".", ".."} & set(root.split("/"))):
        raise UsageError(
            f"--root-path {path} is not a path", "use a path such as /vit: a slash, then letters, digits, - . _ ~"
        )
    return root


def read_token(path: str) -> bytes:
    """Read the token from a file, without surrounding whitespace. Raises UsageError if it cannot be read or is too
    short."""
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise UsageError(f"--token-file {path}: {error.strerror}", "use a file that contains a token") from None
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or b" " in token or b"\n" in token:
        message = f"--token-file {path} does not contain a token of at least {MIN_TOKEN_LENGTH} characters"
        raise UsageError(message, "create one: python -c 'import secrets; print(secrets.token_urlsafe())'")
    return token
