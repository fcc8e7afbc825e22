"""The index of nearest training images: features, labels and thumbnails of a dataset, in one file of a run folder.

n images, D features of the head's input. For ViT-S/16 an image takes 768 bytes of features, about 1.5 kB of thumbnail
and its names: about 120 MB for the default maximum of 50,000 images.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitreous.data.layouts.video import open_sample
from vitreous.errors import DataError, UsageError, WeightsError
from vitreous.system.cores import default_worker_count
from vitreous.system.disk import open_atomic
from vitreous.system.torch_types import from_numpy

if TYPE_CHECKING:
    from vitreous.data.modalities.base import Preprocess
    from vitreous.data.split import Data, Split
    from vitreous.inference.engine import InferenceOptions

INDEX_FILE = "index.npz"
INDEX_FORMAT = 2
MAX_INDEX_IMAGES = 50_000  # default maximum number of images
INDEX_THUMBNAIL_SIDE, THUMBNAIL_QUALITY = 64, 80  # longer side in pixels, and JPEG quality
SEARCH_CHUNK = 4096  # rows compared at a time, and images whose thumbnails are computed at a time
MAX_IN_PROCESS_IMAGES = 500  # up to this number, images are decoded without worker processes
REBUILD_HINT = "write it again: vitreous embed RUN --index"


@dataclass(frozen=True)
class Neighbour:
    """A similar training image: its class or classes, file name, cosine similarity in [-1, 1], and a JPEG thumbnail of
    at most 64 pixels."""

    label: str
    name: str
    similarity: float
    thumbnail: bytes


@dataclass(frozen=True)
class PackedStrings:
    """Byte strings concatenated in one array; `ends` (n,) int64 has the end offset of each."""

    data: np.ndarray
    ends: np.ndarray

    @staticmethod
    def from_strings(strings: Iterable[bytes]) -> PackedStrings:
        """Concatenate byte strings in one array."""
        strings = list(strings)
        ends = np.cumsum([len(string) for string in strings], dtype=np.int64)
        return PackedStrings(np.frombuffer(b"".join(strings), np.uint8), ends)

    def __getitem__(self, index: int) -> bytes:
        return self.data[self.ends[index - 1] if index else 0 : self.ends[index]].tobytes()


@dataclass(frozen=True)
class NeighbourIndex:
    """An index of images by their features, `features` (n, D) float16 of length one or zero."""

    features: np.ndarray
    labels: PackedStrings
    names: PackedStrings
    thumbnails: PackedStrings

    def __len__(self) -> int:
        return len(self.features)

    def nearest(self, features: np.ndarray, count: int = 8) -> list[Neighbour]:
        """Find the `count` images (or all, if fewer) with the highest cosine similarity to `features` (D,), highest
        first.

        Ties are in the order of the index. Raises UsageError for features of another width. Equivalent loop:

            sorted(rows, key=lambda row: -cosine(row, features))[:count]
        """
        if features.shape != self.features.shape[1:]:
            raise UsageError(
                f"features of {features.shape} do not fit an index of {self.features.shape[1:]}", REBUILD_HINT
            )
        query = features.astype(np.float32)
        query = query / max(float(np.linalg.norm(query)), 1e-12)
        similarity_chunks = (
            self.features[start : start + SEARCH_CHUNK].astype(np.float32) @ query
            for start in range(0, len(self), SEARCH_CHUNK)
        )
        cosines = np.concatenate(list(similarity_chunks)).clip(-1, 1)
        best_indices = np.argsort(-cosines, kind="stable")[:count]
        return [
            Neighbour(
                self.labels[index].decode(), self.names[index].decode(), float(cosines[index]), self.thumbnails[index]
            )
            for index in map(int, best_indices)
        ]


def write_index(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    split: str = "train",
    limit: int = MAX_INDEX_IMAGES,
    how: InferenceOptions | None = None,
) -> Path:
    """Write the index for nearest-image search, of the run's training images or of `data`, next to the run's weights;
    return its path. If there are more than `limit` images, a fixed random subset is used; unreadable images are
    skipped. Raises UsageError for weights that are not a bundle, DataError if no image can be read."""
    from vitreous.data.keys import draw_permutation
    from vitreous.data.run_data import open_run_data
    from vitreous.inference.features import load_or_compute_features
    from vitreous.inference.open_model import open_bundle
    from vitreous.weights.adopt import locate_bundle

    if limit < 1:
        raise UsageError(f"an index needs at least 1 image, not {limit}", "use a limit of at least 1")
    bundle, folder = open_bundle(run, headless=True), locate_bundle(Path(run))
    if folder is None:
        raise UsageError(
            f"{run} is not a bundle, so it cannot store an index", "convert it to a bundle: vitreous convert SOURCE OUT"
        )
    run_dataset = open_run_data(run, data, split, labelled=False)[1]
    images = run_dataset.split(split)
    if len(images) > limit:
        images = images.take(np.sort(draw_permutation(len(images), 0, 0)[:limit]))
    features = load_or_compute_features(
        bundle.model, bundle.preprocess, images, how, workers=None if len(images) > MAX_IN_PROCESS_IMAGES else 0
    )
    readable_indices = np.flatnonzero(features.is_readable)
    if not len(readable_indices):
        raise DataError("no image can be read", "run `vitreous data check` to list the reasons")
    arrays: dict[str, Any] = {"features": normalise_features(features.features, readable_indices)}
    texts = {
        "labels": PackedStrings.from_strings(
            label.encode() for label in iterate_label_texts(run_dataset, images, readable_indices)
        ),
        "names": PackedStrings.from_strings(
            Path(images.name(int(index))).name.encode("utf-8", "replace") for index in readable_indices
        ),
        "thumbnails": PackedStrings.from_strings(encode_thumbnails(images, readable_indices, bundle.preprocess)),
    }
    arrays |= {name: text.data for name, text in texts.items()}
    arrays |= {f"{name}_ends": text.ends for name, text in texts.items()}
    path = folder / INDEX_FILE
    with open_atomic(path, shared=True) as file:
        np.savez(file, record=np.array(json.dumps({"format": INDEX_FORMAT, **bundle_cache_fields(folder)})), **arrays)
    return path


def open_index(run: str | os.PathLike[str]) -> NeighbourIndex | None:
    """Open the index of a run folder or bundle; None if there is none. Loading an index cannot run code. Raises
    WeightsError for an index that is damaged, or was computed with other weights or another preprocessing."""
    path = next(
        (folder / INDEX_FILE for folder in (Path(run) / "model", Path(run)) if (folder / INDEX_FILE).is_file()), None
    )
    if path is None:
        return None
    try:
        with np.load(path, allow_pickle=False) as stored:
            record = json.loads(str(stored["record"]))
            features = stored["features"]
            texts = [PackedStrings(stored[name], stored[f"{name}_ends"]) for name in ("labels", "names", "thumbnails")]
        is_complete = features.ndim == 2 and all(
            len(text.ends) == len(features) and text.ends[-1] == len(text.data) for text in texts
        )
    except Exception as error:  # numpy and zipfile raise many error types for damaged files
        raise WeightsError(f"{path} cannot be read ({error})", REBUILD_HINT) from None
    if record != {"format": INDEX_FORMAT, **bundle_cache_fields(path.parent)}:
        raise WeightsError(f"{path} was computed with other weights or another preprocessing", REBUILD_HINT)
    if not is_complete:
        raise WeightsError(f"{path} is damaged", REBUILD_HINT)
    return NeighbourIndex(features, *texts)


def bundle_cache_fields(folder: Path) -> dict[str, Any]:
    """Return the cache key of a bundle's features: the SHA-256 of the weights, and the preprocessing. Raises
    WeightsError for another folder."""
    from vitreous.weights.bundle import DESCRIPTION_FILE, WEIGHTS_FILE

    try:
        description = json.loads((folder / DESCRIPTION_FILE).read_text("utf-8"))
        return {"weights": description["sha256"][WEIGHTS_FILE], "preprocess": description["preprocess"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{folder} is not a model bundle ({error})") from None


def normalise_features(features: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Normalise the (n, D) float32 features at `indices` (m,) to unit length, (m, D) float16; cosine errors are about
    5e-4."""
    normalised = np.empty((len(indices), features.shape[1]), np.float16)
    for start in range(0, len(indices), SEARCH_CHUNK):
        chunk = np.asarray(features[indices[start : start + SEARCH_CHUNK]], np.float32)
        normalised[start : start + SEARCH_CHUNK] = chunk / np.maximum(
            np.linalg.norm(chunk, axis=1, keepdims=True), 1e-12
        )
    return normalised


def iterate_label_texts(data: Data, split: Split, indices: np.ndarray) -> Iterator[str]:
    """Yield the class name of each image at `indices` (n,); the names of several classes are separated by commas."""
    for label in split.labels[indices]:
        yield (
            ""
            if not data.classes
            else (
                data.classes[label]
                if np.ndim(label) == 0
                else ", ".join(data.classes[class_index] for class_index in np.flatnonzero(label))
            )
        )


def encode_thumbnails(split: Split, indices: np.ndarray, preprocess: Preprocess) -> Iterator[bytes]:
    """Yield a JPEG thumbnail of the model's input for each image at `indices` (n,)."""

    from vitreous.data.rgb_images import to_rgb_image

    def encode_thumbnail(index: int) -> bytes:
        """Encode the thumbnail of one image."""
        array = preprocess.to_array(preprocess.decode(open_sample(split, index), split.name(index)))
        thumbnail = to_rgb_image(from_numpy(array))
        thumbnail.thumbnail((INDEX_THUMBNAIL_SIDE, INDEX_THUMBNAIL_SIDE))
        buffer = io.BytesIO()
        thumbnail.save(buffer, "JPEG", quality=THUMBNAIL_QUALITY)
        return buffer.getvalue()

    with ThreadPoolExecutor(default_worker_count()) as pool:
        for start in range(0, len(indices), SEARCH_CHUNK):
            yield from pool.map(encode_thumbnail, map(int, indices[start : start + SEARCH_CHUNK]))
