"""vitreous export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from vitreous.cli.console import Console
from vitreous.weights.options import WeightsOptions


@dataclass(frozen=True, kw_only=True)
class Options(WeightsOptions):
    """A trained model as a file for other programs, kept only once it answers real images as the original does.

    Example: vitreous export runs/pets --to onnx
    """

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """A run folder, a bundle, or weights of a known format."""
    to: str = "onnx"
    """onnx, torch (torch.export), openvino; or timm, huggingface, google-npz and other formats of weights that
    `convert` writes."""
    out: str | None = None
    """The file to make (default: model.onnx and the like, in the run's folder)."""
    dynamic_size: bool = False
    """Let height and width be any that the patch divides; the batch is free always."""
    quantize: Literal["int8"] | None = None
    """Compute products in int8, calibrated on training images of the run, or of --data, or on half of --images."""
    images: Annotated[tuple[str, ...], arg(metavar="PATH...")] = ()
    """Judge it on these files, or those in these folders (default: the run's validation images)."""
    data: str | None = None
    """Judge it on this data set, which has labels: top-1 is told too."""
    max_loss: float | None = None
    """Share of answers that may change, 0 to 1 (default: none, and logits within 1e-3; for int8 0.02). Top-1 may fall
    by half of it."""
    accept_loss: bool = False
    """Keep the file whatever it lost."""
    overwrite: bool = False
    """Replace an earlier file once the new one is kept."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Export, and print how the file compares with the original."""
    from vitreous.apps.export.export import export

    o = options
    max_loss = "any" if o.accept_loss else o.max_loss
    written = export(
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
    document: dict[str, Any] = {**written}
    for row in document["exports"]:
        for label, text in lines(row):
            console.say(f"{label:9} {text}")
    return document


def lines(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Labels and texts of the lines that describe one file."""
    if not row["images"]:
        return [("written", f"{row['file']}, {row['bytes']:,} bytes, read back bit for bit")]
    judged = ("judged", f"on {row['images']} images: {row['judged_on']}")
    rows = (
        [judged, *object_lines(row)]
        if row["outputs"] == "objects"
        else [
            judged,
            (row["outputs"], f"at most {row['max_abs_logit_difference']:.2g} off"),
            ("answers", f"{row['top1_agreement']:.2%} the same"),
        ]
    )
    if row["top1"]:
        rows.append(("top-1", f"{row['top1']['export']:.2%}, original {row['top1']['original']:.2%}"))
    return [
        *rows,
        ("size", f"{row['bytes'] / 1e6:,.1f} MB, original {row['original_bytes'] / 1e6:,.1f} MB"),
        ("speed", f"{row['images_per_second']:,.1f} images/s, original {row['original_images_per_second']:,.1f}"),
        ("written", row["file"]),
        *(
            [("next", f"vitreous {'embed' if row['outputs'] == 'features' else 'predict'} {row['file']} IMAGE ...")]
            if row["format"] != "torch"
            else []
        ),
    ]


def object_lines(row: dict[str, Any]) -> list[tuple[str, str]]:
    """How the objects of an exported detector compare with those of the original."""
    if not row["objects"]:
        return [("objects", "none on these images")]
    boxes, scores, masks = (row[f"max_{name}_difference"] for name in ("box", "score", "mask"))
    return [
        ("objects", f"{row['object_agreement']:.2%} of {row['objects']} the same, counted in both"),
        ("off", f"boxes at most {boxes:.2g} pixel, scores {scores:.2g}, masks {masks:.2%} of the pixels"),
    ]
