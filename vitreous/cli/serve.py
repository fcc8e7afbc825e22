"""vitreous serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

from tyro.conf import Positional, arg

from vitreous.cli.console import Console
from vitreous.weights.options import ReadingOptions

if TYPE_CHECKING:
    from vitreous.apps.server.server import Server


@dataclass(frozen=True, kw_only=True)
class Options(ReadingOptions):
    """A page and an HTTP interface for a trained model, on this machine unless you say --public.

    Example: vitreous serve runs/pets
    """

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """A run folder, a bundle, or an exported file."""
    host: str = "127.0.0.1"
    """The address to listen at; another than this machine's own needs --public."""
    port: int = 8000
    """0 finds a free one."""
    public: bool = False
    """Listen to other machines. Whoever asks needs the token, which is printed once unless --token-file has it."""
    token_file: str | None = None
    """A file with the token, of at least 16 characters."""
    host_name: tuple[str, ...] = ()
    """Names by which browsers may call this server, beside its address."""
    root_path: str = ""
    """The path below which a reverse proxy shows this server, as /vit; whether the proxy removes it from requests makes
    no difference (default: none)."""
    queue: int = 0
    """Pictures that may wait; 0 is as many as the model answers in a second, at least 8. Further requests are refused
    with 429."""
    max_bytes: int = 20 * 2**20
    """The largest request."""
    max_pixels: int = 25_000_000
    """The largest picture. A JPEG of up to 178,000,000 is decoded at 1/2 to 1/8, but not for classes of pixels or
    objects."""
    decoders: int = 0
    """Processes that decode pictures; 0 is one a core, at least two."""
    exact: bool = False
    """Decode every JPEG at its full size."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Numbers to compute with; auto is bf16 where the device has it, else fp32."""
    engine: Literal["auto", "torch", "compiled", "openvino"] = "auto"
    """Inference engine. auto measures at the first start which installed engine answers one image sooner (with --bulk:
    more of them). torch gives the same outputs with and without the extra `export`, which openvino needs. compiled:
    torch.compile, on a GPU."""
    vae: str | None = None
    """Of a model of latents: the autoencoder that decodes them (default: that which its run names)."""
    bulk: bool = False
    """Answer more pictures a second (a fifth more with ViT-S/16 on two cores), each of them later: larger parts are
    computed together."""
    quiet: bool = False
    """No line on stderr for each request."""


def run(options: Options, console: Console) -> NoReturn:
    """Serve until SIGTERM or Ctrl-C."""
    import os
    import sys

    from vitreous.apps.server.start import serve, settings_of
    from vitreous.cli.inference import print_notes
    from vitreous.errors import Interrupted
    from vitreous.inference.options import InferenceOptions

    settings, token = settings_of(options)
    how = InferenceOptions(options.device, options.precision, options.engine)

    def up(server: Server) -> None:
        card = server.service.served.predictor.card
        print_notes(server.service.served.predictor, console)
        document = {"address": server.address, "model": card.name, "version": card.version}
        console.document(document | ({"token": token} if token else {}))
        if console.document_to is not None:
            return
        console.say(f"serving {card.name} ({card.version}) at {server.address}")
        if token:
            console.say(f"token {token}")

    code = serve(
        options.source(options.run),
        settings,
        how=how,
        exact=options.exact,
        quick=not options.bulk,
        up=up,
        vae=options.vae,
    )
    if code:
        raise Interrupted("stopped")
    sys.stdout.flush()
    os._exit(code)  # nothing is left to save, and with PyTorch loaded Python takes seconds to end by itself
