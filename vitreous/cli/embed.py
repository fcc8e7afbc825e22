"""The verb `vitreous embed`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vitreous.cli.console import Console
from vitreous.cli.inference import (
    ImageArguments,
    choose_backend,
    choose_job_engine,
    collect_file_settings,
    open_image_source,
    print_model_notes,
    require_image_arguments,
    write_predictions,
)

if TYPE_CHECKING:
    from vitreous.inference.predict import Embedding
    from vitreous.inference.sources import Item


@dataclass(frozen=True, kw_only=True)
class Options(ImageArguments):
    """Compute features of images (the inputs of the model's head), for search, clustering or other models.

    Example: vitreous embed runs/pets new/ --out new.npz
    """

    SECTIONS: ClassVar[dict[str, str]] = {"out": "Output"}

    out: str | None = None
    """Output file: .npz, .parquet or .jsonl (default: embeddings.npz)."""
    index: bool = False
    """Store the features of the training images in the run's bundle instead, so that the page of `serve` shows nearest
    neighbours."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Compute features, and write them to --out, or with --index to the bundle. Raises UsageError for int8, and if no
    images are passed."""
    from vitreous.errors import UsageError
    from vitreous.inference.predict import load
    from vitreous.inference.rows import EmbeddingRows

    if options.index:
        return embed_index(options, console)
    if options.precision == "int8":
        raise UsageError("features are not computed in int8", "use --precision bf16 or fp32")
    require_image_arguments(options)
    predictor = load(options.source(options.run), options.get_inference_options(), (), options.exact, headless=True)
    source = open_image_source(options, predictor.card.preprocess)
    choose_job_engine(options, predictor, source.count, features=True)
    print_model_notes(predictor, console)

    def iterate_embeddings(items: Iterator[Item]) -> Iterator[Sequence[Embedding]]:
        return choose_backend(options, predictor).embeddings(items, options.bad_images)

    provenance = {
        "verb": "embed",
        "model": predictor.card.name,
        "version": predictor.card.version,
        **collect_file_settings(options, predictor),
    }
    return write_predictions(
        options,
        options.out or "embeddings.npz",
        output_format=EmbeddingRows(),
        provenance=provenance,
        predict=iterate_embeddings,
        source=source,
        console=console,
    )


def embed_index(options: Options, console: Console) -> dict[str, Any]:
    """Store the features of the training images, or of one dataset, in the bundle.

    Raises UsageError for several inputs, --list and --out.
    """
    from vitreous.errors import UsageError
    from vitreous.inference.index import write_index

    if len(options.images) > 1 or options.list or options.out:
        message = "--index cannot be combined with several inputs, --list or --out"
        raise UsageError(message, "use vitreous embed RUN --index, or vitreous embed RUN DATA --index")
    index_path = write_index(
        options.source(options.run), options.images[0] if options.images else None, how=options.get_inference_options()
    )
    console.note(f"written to {index_path}")
    return {"model": options.run, "index": str(index_path)}
