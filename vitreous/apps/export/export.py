"""The verb `export`: write a trained model for other programs, and verify it against the original before it is
saved."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch

from vitreous.apps.export.formats import EXPORT_FORMATS, ExportTarget, open_export
from vitreous.apps.export.graph import check_dynamic_size
from vitreous.apps.export.proof_images import collect_verification_images, make_other_sizes
from vitreous.errors import ResourceError, UsageError, VitreousError, check_path_argument, suggest_nearest
from vitreous.inference.card import build_card
from vitreous.inference.engine import Engine, make_engine
from vitreous.inference.libraries import check_installed
from vitreous.inference.open_model import open_bundle
from vitreous.inference.options import InferenceOptions
from vitreous.progress import NullListener, ProgressListener
from vitreous.system.disk import compute_sha256, sync_and_rename
from vitreous.tasks.detection_proof import ObjectComparison
from vitreous.tasks.documents import ExportDocument, ExportedFile
from vitreous.tasks.export_proof import ExportComparison, VerificationImages
from vitreous.weights.bundle import Bundle
from vitreous.weights.convert import convert
from vitreous.weights.foreign import FOREIGN_FORMATS

QUANTIZED_DTYPES = ("int8",)
#: metrics of the document that are None for exported weights, which need no verification
NOT_MEASURED = (
    "max_abs_logit_difference", "top1_agreement", "top1", "images_per_second", "original_images_per_second"
)  # fmt: skip


def export(
    run: str | os.PathLike[str],
    to: str = "onnx",
    out: str | os.PathLike[str] | None = None,
    images: Sequence[str] = (),
    data: str | os.PathLike[str] | None = None,
    quantize: str | None = None,
    dynamic_size: bool = False,
    max_loss: float | Literal["any"] | None = None,
    overwrite: bool = False,
    listener: ProgressListener | None = None,
) -> ExportDocument:
    """Export a run's model to `onnx`, `torch` (torch.export), `openvino`, or a weight format of `convert`.

    `onnx`, `torch` and `openvino` are compared with the original on the files `images`, on `data`, or on the run's
    validation images. The export is kept only if predictions agree:

    - Float32 logits are within 1e-3 and have the same top-1 class. With `quantize="int8"`, at most 2 % of predictions
      may change, and top-1 accuracy may drop by 1 point.
    - Without a head, the cosine of features is at least 0.99.
    - In segmentation, at most a thousandth of the pixels change.
    - In detection, the box of an object is within 0.01 pixel, its score within 1e-3, and its mask within a thousandth
      of the pixels.

    `max_loss`, a fraction of predictions, replaces these bounds; with `any`, the export is always kept. `dynamic_size`
    makes height and width dynamic. `out` is the output file, by default in the run's folder; with `overwrite`, it
    replaces an existing file after the verification. Returns a document of metrics. Raises UsageError for unsupported
    exports, ResourceError for a missing library, and VitreousError if the export fails the verification.
    """
    check_path_argument(run, "export(run)")
    if to not in EXPORT_FORMATS:
        has_other_options = bool(images or data or quantize or dynamic_size or max_loss is not None)
        listener = listener or NullListener()
        return export_weights(
            run, to, out=out, has_other_options=has_other_options, overwrite=overwrite, listener=listener
        )
    allowed = check_export_options(to, images, data, quantize, max_loss)
    check_installed(EXPORT_FORMATS[to].libraries + EXPORT_FORMATS[to].for_int8 * (quantize is not None))
    listener = listener or NullListener()
    out_path = choose_output_path(
        run, out, "model" + (f"-{quantize}" if quantize else ""), EXPORT_FORMATS[to].suffix, overwrite
    )
    bundle = open_bundle(run, note=listener.note, headless=True, dense=True)
    if not bundle.preprocess.stacks:
        problem = f"{run} uses native aspect ratios, but a graph needs a fixed image size"
        raise UsageError(problem, "use `vitreous predict` or `serve`, or export its weights: --to timm")
    if dynamic_size:
        check_dynamic_size(bundle.model.config)
    if quantize and (refusal := bundle.task.export_rules.int8_refusal):
        raise UsageError(refusal, "remove --quantize")
    proof_images, calibration = collect_verification_images(run, bundle, images, data, quantize is not None)
    target = ExportTarget(bundle.model, build_card(bundle), dynamic_size, calibration)
    listener.note(f"verifying on {len(proof_images)} images: {proof_images.name}")
    with make_scratch_folder(out_path) as scratch:
        file = Path(scratch) / out_path.name
        EXPORT_FORMATS[to].write(target, file)
        export_engine = open_export(file, target)
        comparison, reason = verify_export(
            bundle, export_engine, proof_images=proof_images, target=target, allowed=allowed, listener=listener
        )
        if reason and max_loss != "any":
            raise VitreousError(f"the export failed the verification: {reason}", "add --accept-loss to keep it")
        if reason:
            listener.note(f"kept despite the failed verification: {reason}")
        size, digest = move_export_files(Path(scratch), out_path)
    original = sum(tensor.numel() * tensor.element_size() for tensor in bundle.model.state_dict().values())
    exported_file = {"format": to, "file": str(out_path), "bytes": size, **comparison.to_dict()}
    exported_file |= {"original_bytes": original, "sha256": digest}
    exported_file |= {"quantised": quantize, "dynamic_size": dynamic_size, "verified_on": proof_images.name}
    exported_file |= {"accepted_loss": reason or None, "outputs": bundle.task.export_rules.outputs}
    return {"run": os.fspath(run), "exports": [cast(ExportedFile, exported_file)]}


def check_export_options(
    to: str,
    images: Sequence[str],
    data: str | os.PathLike[str] | None,
    quantize: str | None,
    max_loss: float | Literal["any"] | None,
) -> float | None:
    """Return the fraction of predictions that may change, None for the default. Raises UsageError for options that are
    invalid or cannot be combined."""
    if quantize not in (None, *QUANTIZED_DTYPES):
        raise UsageError(f"unknown --quantize {quantize}", f"use {', '.join(QUANTIZED_DTYPES)}")
    if quantize and to == "torch":
        raise UsageError("int8 needs --to onnx or --to openvino", "remove --quantize")
    if images and data is not None:
        raise UsageError("--images and --data cannot be combined", "remove one of them")
    allowed = None if max_loss == "any" else max_loss
    if allowed is not None and not 0 <= allowed <= 1:
        raise UsageError(f"invalid --max-loss {max_loss}", "use a number from 0 to 1")
    return allowed


def move_export_files(scratch: Path, out_path: Path) -> tuple[int, str]:
    """Move the files of an export to their destination, the main file last. Return their total size in bytes, and the
    SHA-256 of the main file."""
    files = sorted(scratch.glob(f"{out_path.stem}.*"), key=lambda file: file.suffix == out_path.suffix)
    size, digest = sum(file.stat().st_size for file in files), compute_sha256(scratch / out_path.name)
    for file in files:
        sync_and_rename(file, out_path.parent / file.name)
    return size, digest


def verify_export(
    bundle: Bundle,
    export: Engine,
    proof_images: VerificationImages,
    target: ExportTarget,
    allowed: float | None,
    listener: ProgressListener,
) -> tuple[ExportComparison | ObjectComparison, str]:
    """Compare the export with the original model: at the model's image size and, if the size is dynamic, at two other
    sizes. Return the comparison, and the reason to reject the export, or an empty string."""
    original = make_engine(bundle.model, bundle.preprocess, InferenceOptions("cpu", "fp32"))
    num_images, bundle.model.any_size = len(proof_images), True

    def report_progress(done: int) -> None:
        """Report the images that are compared so far."""
        listener.progress("verify", done, num_images)

    comparison: Any = bundle.task.compare_export(original, export, proof_images, bundle.model.config, report_progress)
    for pixels in make_other_sizes(proof_images, bundle.model.config.patch) if target.dynamic else ():
        with torch.inference_mode():
            expected = bundle.model(bundle.preprocess.normalise(torch.from_numpy(pixels))).numpy()
        outputs = bundle.task.compute(export, pixels)
        is_finite = bool(np.isfinite(outputs).all())
        max_difference = float(np.abs(outputs - expected).max()) if is_finite else float("inf")
        comparison = replace(
            comparison,
            max_difference=max(comparison.max_difference, max_difference),
            is_finite=comparison.is_finite and is_finite,
        )
    return comparison, comparison.get_rejection_reason(allowed, target.quantised_dtype)


def export_weights(
    run: str | os.PathLike[str],
    to: str,
    out: str | os.PathLike[str] | None,
    has_other_options: bool,
    overwrite: bool,
    listener: ProgressListener,
) -> ExportDocument:
    """Export the weights in the format of another library with `convert`, which verifies them by reading them back.

    Raises UsageError for an unknown format, and for options that do not apply to weights.
    """
    known_formats = sorted({*EXPORT_FORMATS, "bundle", *(weight_format.name for weight_format in FOREIGN_FORMATS)})
    if to not in known_formats:
        raise UsageError(
            f"unknown format --to '{to}'",
            suggest_nearest(to, known_formats) or f"use one of {', '.join(known_formats)}",
        )
    if has_other_options:
        message = f"--to {to} writes unchanged weights"
        raise UsageError(message, "remove the other options, or use --to onnx, torch or openvino")
    out_path = choose_output_path(run, out, f"model-{to}", "", overwrite)
    with make_scratch_folder(out_path) as scratch:
        document = convert(run, Path(scratch) / out_path.name, to, note=listener.note)
        file = Path(document["out"])
        if not overwrite:
            refuse_existing(out_path.parent / file.name)
        replace_path(file, out_path.parent / file.name)
    exported_file = {"format": to, "file": str(out_path.parent / file.name), "bytes": document["bytes"], "images": 0}
    exported_file |= dict.fromkeys(NOT_MEASURED)
    return {"run": os.fspath(run), "exports": [cast(ExportedFile, exported_file)]}


def replace_path(source: Path, destination: Path) -> None:
    """Move a new file or folder to `destination`, replacing an existing one. Raises UsageError if that is a folder with
    other files."""
    if destination.is_dir() and not destination.is_symlink():
        new_names = {path.name for path in source.iterdir()} if source.is_dir() else set()
        if other_names := sorted({path.name for path in destination.iterdir()} - new_names):
            message = f"{destination} contains other files ({', '.join(other_names[:5])}) and is not replaced"
            raise UsageError(message, "use another --out")
        os.rename(destination, source.parent / f"before-{source.name}")
    sync_and_rename(source, destination)


def choose_output_path(
    run: str | os.PathLike[str], out: str | os.PathLike[str] | None, name: str, suffix: str, overwrite: bool = False
) -> Path:
    """Return `out`, or by default the file `name + suffix` in the run's folder (in the current folder if `run` is a
    file).

    Raises UsageError for a wrong suffix, and for an existing file unless `overwrite` is set.
    """
    out_path = Path(out) if out is not None else (Path(run) if Path(run).is_dir() else Path()) / (name + suffix)
    if suffix and out_path.suffix != suffix:
        raise UsageError(f"{out_path} does not end in {suffix}", f"use a {suffix} file")
    for path in {out_path, out_path.with_suffix(".bin") if suffix == ".xml" else out_path}:
        if not overwrite or (suffix and path.is_dir()):
            refuse_existing(path)
    return out_path


def refuse_existing(path: Path) -> None:
    """Raise UsageError if the output path exists."""
    if path.exists() or path.is_symlink():
        message = f"{path} already exists and is not overwritten"
        raise UsageError(message, "use another --out, or --overwrite")


def make_scratch_folder(out_path: Path) -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder next to the output file. Raises ResourceError if it cannot be created."""
    try:
        out_path.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=out_path.parent, prefix=".export-")
    except OSError as error:
        raise ResourceError(f"cannot write {out_path} ({error.strerror or error})", "use another --out") from None
