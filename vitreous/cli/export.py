"""The verb `vitreous export`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import Positional, arg

from vitreous.cli.console import Console
from vitreous.weights.options import ZeroShotOptions


@dataclass(frozen=True, kw_only=True)
class Options(ZeroShotOptions):
    """Export a model to a file, which is kept only if its predictions on real images match the PyTorch model.

    Example: vitreous export runs/pets --to onnx
    """

    SECTIONS: ClassVar[dict[str, str]] = {"to": "Output", "images": "Verification"}

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """A run folder, a bundle, or weights of a supported format."""
    to: str = "onnx"
    """Format: onnx, torch (torch.export), openvino, or a weight format of `convert`, such as timm, huggingface or
    google-npz."""
    out: str | None = None
    """Output file (default: model.onnx etc. in the run folder)."""
    dynamic_size: bool = False
    """Accept any image size that is divisible by the patch size. The batch size is always dynamic."""
    quantize: Literal["int8"] | None = None
    """Quantise matrix products to int8, calibrated on training images of the run, on --data, or on half of --images."""
    images: Annotated[tuple[str, ...], arg(metavar="PATH...")] = ()
    """Files or folders of images for the verification (default: the run's validation images)."""
    data: str | None = None
    """Labelled dataset for the verification; top-1 accuracy is reported too."""
    max_loss: float | None = None
    """Maximum share of predictions that may change, 0 to 1 (default: 0, with logits within 1e-3; 0.02 for int8). Top-1
    accuracy may drop by half of it."""
    accept_loss: bool = False
    """Keep the file even if the verification fails."""
    overwrite: bool = False
    """Replace an existing file, once the new one has passed the verification."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Export a model, and print how the file compares with the PyTorch model."""
    from vitreous.apps.export.export import export

    o = options
    max_loss = "any" if o.accept_loss else o.max_loss
    result = export(
        o.source(o.run),
        o.to,
        o.out,
        images=o.images,
        data=o.data,
        quantize=o.quantize,
        dynamic_size=o.dynamic_size,
        max_loss=max_loss,
        overwrite=o.overwrite,
        listener=console,
    )
    document: dict[str, Any] = {**result}
    for exported in document["exports"]:
        lines = format_export_lines(exported)
        width = max(len(label) for label, _ in lines)
        for label, text in lines:
            console.print_line(f"{label:{width}}  {text}")
    return document


def format_export_lines(exported: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (label, text) of the lines to print for an exported file."""
    if not exported["images"]:
        return [("written", f"{exported['file']}, {exported['bytes']:,} bytes, read back bit for bit")]
    comparison = ("verified", f"on {exported['images']} images: {exported['verified_on']}")
    lines = (
        [comparison, *format_object_lines(exported)]
        if exported["outputs"] == "objects"
        else [
            comparison,
            (exported["outputs"], f"maximum difference {exported['max_abs_logit_difference']:.2g}"),
            ("predictions", f"{exported['top1_agreement']:.2%} identical"),
        ]
    )
    if exported["top1"]:
        lines.append(("top-1", f"{exported['top1']['export']:.2%}, original {exported['top1']['original']:.2%}"))
    return [
        *lines,
        ("size", f"{exported['bytes'] / 1e6:,.1f} MB, original {exported['original_bytes'] / 1e6:,.1f} MB"),
        (
            "speed",
            f"{exported['images_per_second']:,.1f} images/s, original {exported['original_images_per_second']:,.1f}",
        ),
        ("written", exported["file"]),
        *(
            [
                (
                    "next",
                    (
                        f"vitreous {'embed' if exported['outputs'] == 'features' else 'predict'} "
                        f"{exported['file']} IMAGE …"
                    ),
                )
            ]
            if exported["format"] != "torch"
            else []
        ),
    ]


def format_object_lines(exported: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (label, text) of the lines that compare the objects of an exported detector with those of the original."""
    if not exported["objects"]:
        return [("objects", "none on these images")]
    boxes, scores, masks = (exported[f"max_{name}_difference"] for name in ("box", "score", "mask"))
    return [
        ("objects", f"{exported['object_agreement']:.2%} of {exported['objects']} identical, counted in both"),
        ("maximum difference", f"boxes {boxes:.2g} pixels, scores {scores:.2g}, masks {masks:.2%} of the pixels"),
    ]
