"""The verb `vitreous serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NoReturn

from tyro.conf import Positional, arg

from vitreous.cli.console import Console
from vitreous.weights.options import InferenceWeightsOptions, ZeroShotOptions

if TYPE_CHECKING:
    from vitreous.apps.server.server import Server


@dataclass(frozen=True, kw_only=True)
class Options(ZeroShotOptions, InferenceWeightsOptions):
    """Serve a model as a web page and an HTTP API; only this machine can connect without --public.

    Example: vitreous serve runs/pets
    """

    SECTIONS: ClassVar[dict[str, str]] = {"host": "Server", "queue": "Limits", "exact": "Device and engine"}

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """A run folder, a bundle, or an exported file."""
    host: str = "127.0.0.1"
    """Address to listen on; an address that other machines can reach needs --public."""
    port: int = 8000
    """Port to listen on; 0 selects a free one."""
    public: bool = False
    """Accept connections from other machines. Requests need a token, which is printed once unless --token-file is
    set."""
    token_file: str | None = None
    """File with the token, at least 16 characters."""
    host_name: tuple[str, ...] = ()
    """Host names that browsers may use for this server, in addition to its address."""
    root_path: str = ""
    """URL path prefix of this server behind a reverse proxy, such as /vit. The proxy may strip or keep the prefix."""
    queue: int = 0
    """Maximum number of queued images; further requests get status 429. 0: one second of work, at least 8."""
    max_bytes: int = 20 * 2**20
    """Maximum request size in bytes."""
    max_pixels: int = 25_000_000
    """Maximum image size in pixels. JPEG files of up to 178,000,000 pixels are decoded at 1/2 to 1/8, except for
    segmentation and detection."""
    decoders: int = 0
    """Processes that decode images; 0: one per core, at least two."""
    exact: bool = False
    """Decode JPEG files at full resolution."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute dtype. auto is bf16 if the device supports it, else fp32."""
    engine: Literal["auto", "torch", "compiled", "openvino"] = "auto"
    """Inference engine. auto measures the installed engines at the first start and uses the one with the lowest latency
    (with --bulk: the highest throughput). openvino needs the extra `export`; compiled is torch.compile on a GPU; torch
    gives the same outputs on machines with and without the extra."""
    vae: str | None = None
    """Latent models: autoencoder that decodes the latents (default: as stored in the run)."""
    bulk: bool = False
    """Optimise for throughput instead of latency: larger batches (a fifth more images/s with ViT-S/16 on two cores)."""
    quiet: bool = False
    """Do not log requests to stderr."""


def run(options: Options, console: Console) -> NoReturn:
    """Serve a model until SIGTERM or Ctrl-C, then exit the process."""
    import os
    import sys

    from vitreous.apps.server.start import parse_server_options, serve
    from vitreous.cli.inference import print_model_notes
    from vitreous.errors import Interrupted
    from vitreous.inference.options import InferenceOptions

    settings, token = parse_server_options(options)
    inference_options = InferenceOptions(options.device, options.precision, options.engine)

    def report_ready(server: Server) -> None:
        card = server.service.served.predictor.card
        print_model_notes(server.service.served.predictor, console)
        document = {"address": server.address, "model": card.name, "version": card.version}
        console.document(document | ({"token": token} if token else {}))
        if console.document_to is not None:
            return
        console.print_line(f"serving {card.name} ({card.version}) at {server.address}")
        if token:
            console.print_line(f"token {token}")

    code = serve(
        options.source(options.run),
        settings,
        how=inference_options,
        exact=options.exact,
        quick=not options.bulk,
        up=report_ready,
        vae=options.vae,
    )
    if code:
        raise Interrupted("stopped")
    sys.stdout.flush()
    os._exit(code)  # no file is open, and a normal exit takes seconds after PyTorch is imported
