"""The verb `vitreous embed`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from tyro.conf import arg

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
    from vitreous.inference.predict import Embedding, Predictor
    from vitreous.inference.sources import Item


@dataclass(frozen=True, kw_only=True)
class Options(ImageArguments):
    """Compute features of images (the inputs of the model's head), or embeddings of texts, for search, clustering or
    other models.

    Example: vitreous embed runs/pets new/ --out new.npz
    """

    SECTIONS: ClassVar[dict[str, str]] = {"out": "Output", "texts": "Texts"}

    out: str | None = None
    """Output file: .npz, .parquet or .jsonl (default: embeddings.npz)."""
    index: bool = False
    """Store the features of the training images in the run's bundle instead, so that the page of `serve` shows nearest
    neighbours."""
    texts: Annotated[tuple[str, ...], arg(metavar="TEXT...")] = ()
    """Embed texts instead of images, or the lines of a .txt file; for models with a text encoder. The embeddings have
    length one."""
    search: str | None = None
    """Find the images of the index that are most similar to a text, for models with a text encoder."""
    count: int = 8
    """With --search: number of images."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Compute features, and write them to --out, or with --index to the bundle. Raises UsageError for int8, and if no
    images are passed."""
    from vitreous.errors import UsageError
    from vitreous.inference.predict import load
    from vitreous.inference.rows import EmbeddingRows

    if options.texts or options.search is not None:
        return embed_or_search(options, console)
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


def embed_or_search(options: Options, console: Console) -> dict[str, Any]:
    """Embed texts and write them to --out, or search the index for a text.

    Raises UsageError for images, for --texts with --search or --index, for a model without a text encoder or without an
    index, and for a text that is too long.
    """
    from vitreous.data.prompts import read_labels
    from vitreous.errors import UsageError
    from vitreous.inference.predict import load

    if options.images or options.list or options.index or (options.texts and options.search is not None):
        raise UsageError("--texts and --search cannot be combined with images or with each other", "use one of them")
    texts = read_labels(options.texts)
    if options.count < 1 or not all(texts) or options.search == "":
        problem = "a text is empty" if options.count > 0 else f"--count must be at least 1, not {options.count}"
        raise UsageError(problem, "remove it, or replace it")
    predictor = load(options.source(options.run), options.get_inference_options(), headless=True)
    print_model_notes(predictor, console)
    if options.search is not None:
        return search_index(options, predictor, options.search, console)
    return write_text_embeddings(options, predictor, texts, console)


def write_text_embeddings(
    options: Options, predictor: Predictor, texts: Sequence[str], console: Console
) -> dict[str, Any]:
    """Compute the embeddings of texts, and write them to the file of --out, each with its text as path. Raises the
    errors of `Predictor.embed_texts`."""
    from vitreous.inference.predict import Embedding
    from vitreous.inference.rows import EmbeddingRows
    from vitreous.inference.sinks import OutputFile

    embeddings = predictor.embed_texts(texts)
    out = options.out or "embeddings.npz"
    provenance = {"verb": "embed", "model": predictor.card.name, "version": predictor.card.version, "texts": len(texts)}
    output_file = OutputFile(out, EmbeddingRows(), provenance)
    try:
        output_file.add([Embedding(text, values) for text, values in zip(texts, embeddings, strict=True)])
        output_file.finish()
    finally:
        output_file.close()
    console.note(f"{len(texts):,} texts in {out}")
    return {"model": options.run, "out": out, "texts": len(texts)}


def search_index(options: Options, predictor: Predictor, text: str, console: Console) -> dict[str, Any]:
    """Print the images of the model's index that are most similar to a text. Raises UsageError without an index,
    WeightsError for an index of other weights, and the errors of `Predictor.embed_texts`."""
    from vitreous.errors import UsageError
    from vitreous.inference.index import open_index

    embedding = predictor.embed_texts([text])[0]
    index = open_index(options.run)
    if index is None:
        raise UsageError(
            f"{options.run} has no index of images", f"create one: vitreous embed {options.run} DATA --index"
        )
    nearest = index.nearest(embedding, options.count)
    console.table(
        ["image", "class", "similarity"],
        [[neighbour.name, neighbour.label, f"{neighbour.similarity:.3f}"] for neighbour in nearest],
    )
    results = [{"name": n.name, "label": n.label, "similarity": n.similarity} for n in nearest]
    return {"model": options.run, "search": text, "images": results}
