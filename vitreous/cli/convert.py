"""The verb `vitreous convert`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import Positional, arg

from vitreous.cli.console import Console
from vitreous.weights.options import ZeroShotOptions


@dataclass(frozen=True, kw_only=True)
class Options(ZeroShotOptions):
    """Convert weights between formats; the result is verified bit for bit.

    Example: vitreous convert hf:google/vit-base-patch16-224 vit.npz --to google-npz
    """

    SECTIONS: ClassVar[dict[str, str]] = {"to": "Output", "heads": "Architecture"}

    weights: Annotated[Positional[str], arg(metavar="IN")]
    """A run folder, a bundle, a file or folder of a supported format, a name listed by `vitreous models --weights`,
    hf:org/name, timm:name, or https://...#sha256=..."""
    out: Annotated[Positional[str], arg(metavar="OUT")]
    """File or folder to create."""
    to: str = "bundle"
    """Format: bundle, huggingface, timm, google-npz, linen-npz, big-vision-npz, bit-npz, torchvision, dinov2, clip,
    sam, swin, videomae, dit or diffusers. Formats that keep the decoder or heads for further pre-training: bundle, mae,
    huggingface-mae, videomae-pretraining, huggingface-videomae, dino or dinov2-teacher."""
    model: str | None = None
    """Model of timm or transformers that the tensors of a file belong to: timm:NAME or hf:FOLDER."""
    image_size: Annotated[tuple[int, ...] | None, arg(metavar="PIXELS...")] = None
    """New image size in pixels: one number, height and width, or frames, height and width; position embeddings are
    resized."""
    num_classes: int | None = None
    """Replace the head by a zero-initialised head with this many classes; 0 for no head."""
    class_map: Annotated[str | None, arg(metavar="FILE")] = None
    """File with the rows of the head to keep, one index per line, such as Microsoft's map22kto1k.txt."""
    channels: int | None = None
    """New number of input channels: one channel sums the original weights, more channels repeat them."""
    heads: int | None = None
    """Number of attention heads, for files that do not store it."""
    gelu: Literal["none", "tanh", "quick"] | None = None
    """GELU variant, for files that do not store it; none is exact (erf)."""
    window: int | None = None
    """Swin V2 window size in tokens, for files that do not store it."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Convert weights, and print source and output. Raises UsageError for an invalid size or number."""
    from pathlib import Path

    from vitreous.errors import UsageError
    from vitreous.weights.files import open_weights_file

    if Path(options.weights).is_file():
        open_weights_file(options.weights)  # rejects other files before PyTorch is imported
    from vitreous.weights.convert import convert

    o = options
    if o.image_size is not None and (len(o.image_size) not in (1, 2, 3) or min(o.image_size) < 1):
        raise UsageError(
            f"--image-size {' '.join(map(str, o.image_size))} is not one to three positive numbers",
            "use SIZE, HEIGHT WIDTH or, for clips, FRAMES HEIGHT WIDTH",
        )
    for name, minimum in (("num_classes", 0), ("channels", 1), ("heads", 1), ("window", 1)):
        if (value := getattr(o, name)) is not None and value < minimum:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {minimum}, not {value}")
    size = (o.image_size * 2 if len(o.image_size) == 1 else o.image_size) if o.image_size else None
    settings = {"heads": o.heads, "mlp.gelu": o.gelu, "attention.window": o.window}
    settings = {path: value for path, value in settings.items() if value is not None}
    source = o.source(o.weights)
    document = convert(
        source,
        o.out,
        to=o.to,
        image_size=size,
        num_classes=o.num_classes,
        channels=o.channels,
        settings=settings,
        note=console.note,
        class_map=o.class_map,
        model=o.model,
    )
    rows = [
        ("model", f"{document['model']}, {document['parameters']:,} parameters"),
        ("read", f"{document['format']}, {document['source']}"),
    ]
    rows += [(key, ", ".join(document[key])) for key in ("new", "unused") if document[key]]
    rows += [(key, document[key]) for key in ("resized", "channels") if document[key]]
    size_text = f"{document['tensors']} tensors, {document['bytes']:,} bytes"
    rows.append(("written", f"{document['to']}, {size_text}, read back bit for bit"))
    for label, text in rows:
        console.print_line(f"{label:8} {text if len(text) < 400 else text[:400] + ' ...'}")
    console.print_line(
        f"next: vitreous predict {document['out']} IMAGE …" if options.to == "bundle" else document["out"]
    )
    return document
