"""Compute the features (the head's input) of every image of a split once, stream them to disk, and cache them.

n images, d features each: the class token or the pooled tokens, after the representation layer if there is one
(`pre_logits` in big_vision).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from torch import nn

from vitreous.config import to_builtins
from vitreous.data.decoding.decode import describe_exception
from vitreous.data.loader import EvalLoader
from vitreous.data.modalities.base import Preprocess
from vitreous.data.split import Split, hash_file_times
from vitreous.errors import DataError, NonFiniteError, ResourceError, UsageError
from vitreous.inference.engine import (
    ENGINE_CHUNK,
    InferenceOptions,
    ModelEngine,
    build_readable_mask,
    compute_chunk,
    make_engine,
    regroup_batches,
    remove_head,
)
from vitreous.inference.graph_cache import hash_cache_fields, hash_weights
from vitreous.models.zoo import Model
from vitreous.system.cores import default_worker_count
from vitreous.system.disk import get_cache_folder, open_atomic
from vitreous.system.machine import pick_device, pick_precision
from vitreous.version import __version__

POOLED = "pooled"  # name of the array of the head's input
FEATURES_FORMAT = 1  # increase it if the same model computes different features
STALE_FEATURES_SECONDS = 86_400  # age in seconds at which an unfinished file is considered abandoned
DISK_SPACE_HINT = "free disk space, set XDG_CACHE_HOME to a folder on a larger disk, or use --no-cache"


@dataclass(frozen=True)
class FeatureArray:
    """Features that one pass of an encoder computes for each image: `name`, `shape` per image, and `dtype` in files."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "<f4"

    @property
    def values(self) -> int:
        """The number of values per image."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes per image."""
        return self.values * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class SplitFeatures:
    """Features of a split's images in its order; those of unreadable images are computed from black images. `features`
    (n, ...), by default (n, d) float32, are memory-mapped. `read_errors`: image index -> error message. `file`: the
    cache file, None without a cache. `reused`: all features came from the cache."""

    features: np.ndarray
    read_errors: dict[int, str]
    file: Path | None = None
    reused: bool = False

    @property
    def is_readable(self) -> np.ndarray:
        """(n,) bool: whether each image could be read."""
        return build_readable_mask(len(self.features), self.read_errors)


def load_or_compute_features(
    model: Model,
    preprocess: Preprocess,
    split: Split,
    how: InferenceOptions | None = None,
    batch_size: int = ENGINE_CHUNK,
    workers: int | None = None,
    keep: bool = True,
    on_images: Callable[[int], None] = lambda images: None,
) -> SplitFeatures:
    """Load the features of a split from `XDG_CACHE_HOME/vitreous/features`, or compute them and, if `keep`, cache them.
    `on_images` is called with the number of images of every step. Raises NonFiniteError for features that are not
    finite, ResourceError for a full disk, UsageError for int8, whose calibration would differ between splits."""
    pooled = FeatureArray(POOLED, (model.config.num_features,))
    return load_or_compute_arrays(
        model,
        remove_head(model),
        arrays=(pooled,),
        preprocess=preprocess,
        split=split,
        how=how,
        batch_size=batch_size,
        workers=workers,
        keep=keep,
        on_images=on_images,
    )[POOLED]


def load_or_compute_arrays(
    model: Model,
    encoder: nn.Module,
    arrays: tuple[FeatureArray, ...],
    preprocess: Preprocess,
    split: Split,
    how: InferenceOptions | None = None,
    batch_size: int = ENGINE_CHUNK,
    workers: int | None = None,
    keep: bool = True,
    on_images: Callable[[int], None] = lambda images: None,
) -> dict[str, SplitFeatures]:
    """Load several arrays of features of a split from the cache, or compute all of them in one pass.

    `encoder` computes the values of all `arrays` of an image, one after the other: (B, C, *image) -> (B, values). Its
    weights are those of `model`. Returns the features by name of the array. Raises NonFiniteError for features that are
    not finite, ResourceError for a full disk, UsageError for int8.
    """
    how = how or InferenceOptions()
    if how.precision == "int8":
        raise UsageError("features do not support int8", "use --precision bf16 or fp32")
    cache_fields = {**model_cache_fields(model, preprocess, how), "images": hash_split_images(split)}
    # the pooled features of all evaluations share one file
    fields = {
        array.name: cache_fields | ({} if array.name == POOLED else {"array": [*astuple(array)]}) for array in arrays
    }
    paths = {name: get_cache_folder("features") / f"{hash_cache_fields(key)}.npy" for name, key in fields.items()}
    cached = {array.name: load_features(paths[array.name], array.dtype) for array in arrays} if keep else {}
    missing = [array for array in arrays if cached.get(array.name) is None]
    results = {name: features for name, features in cached.items() if features is not None}
    if not missing:
        return results
    engine = make_engine(cast(Model, encoder), preprocess, how)
    reader = EvalLoader(split, preprocess, default_worker_count() if workers is None else workers)
    if not keep:
        files: list[Any] = [tempfile.TemporaryFile() for _ in arrays]  # noqa: SIM115 (memory maps outlive this function)
        shapes, read_errors = write_features(files, arrays, engine, reader, batch_size=batch_size, on_images=on_images)
        for file, array, shape in zip(files, arrays, shapes, strict=True):
            start = file.tell() - len(split) * array.nbytes
            results[array.name] = SplitFeatures(np.memmap(file, array.dtype, "r", start, shape), read_errors)
        return results
    try:
        get_cache_folder("features").mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            files = [
                stack.enter_context(open_atomic(paths[array.name], shared=True)) if array in missing else None
                for array in arrays
            ]
            shapes, read_errors = write_features(
                files, arrays, engine, reader, batch_size=batch_size, on_images=on_images
            )
        for array, shape in zip(arrays, shapes, strict=True):
            if array not in missing:
                continue
            document = {"shape": shape, "unreadable": read_errors, "of": fields[array.name]}
            with open_atomic(paths[array.name].with_suffix(".json"), "w", shared=True, encoding="utf-8") as file:
                json.dump(document, file, ensure_ascii=False)
    except OSError as error:
        raise ResourceError(
            f"features cannot be stored in {get_cache_folder('features')} ({describe_exception(error)})",
            DISK_SPACE_HINT,
        ) from None
    for array in missing:
        path = paths[array.name]
        results[array.name] = SplitFeatures(np.load(path, mmap_mode="r", allow_pickle=False), read_errors, path)
    return results


def write_features(
    files: list[Any],
    arrays: tuple[FeatureArray, ...],
    engine: ModelEngine,
    reader: EvalLoader,
    *,
    batch_size: int,
    on_images: Callable[[int], None],
) -> tuple[list[tuple[int, ...]], dict[int, str]]:
    """Write the `arrays` of features of a reader's images to one .npy file each; arrays whose file is None are skipped.

    Returns the shapes (n, ...), and error messages by image index. Raises NonFiniteError for features that are not
    finite, ResourceError for a full disk.
    """
    read_errors: dict[int, str] = {}
    count, offsets = len(reader.split), np.cumsum([array.values for array in arrays])[:-1]
    shapes = [(count, *array.shape) for array in arrays]
    outputs = [(index, file) for index, file in enumerate(files) if file is not None]
    check_disk_space(outputs[0][1], sum(count * arrays[index].nbytes for index, _ in outputs))
    for index, file in outputs:
        array, shape = arrays[index], shapes[index]
        np.lib.format.write_array_header_1_0(file, {"descr": array.dtype, "fortran_order": False, "shape": shape})
    for samples, images in regroup_batches(reader.iterate_batches(batch_size), ENGINE_CHUNK):
        read_errors |= {
            s: image.message for s, image in zip(samples, images, strict=True) if isinstance(image, DataError)
        }
        values = np.split(compute_chunk(engine, images), offsets, 1)
        for index, file in outputs:
            with np.errstate(over="ignore"):
                features = np.ascontiguousarray(values[index].astype(arrays[index].dtype, copy=False))
            non_finite = np.flatnonzero(~np.isfinite(features).all(1))
            if len(non_finite):
                problem = f"the features of {reader.split.name(samples[int(non_finite[0])])} are not finite"
                raise NonFiniteError(problem, "use --precision fp32, or other weights")
            file.write(features.data)
        on_images(len(images))
    for _, file in outputs:
        file.flush()
    return shapes, read_errors


def model_cache_fields(model: Model, preprocess: Preprocess, how: InferenceOptions) -> dict[str, Any]:
    """Return the part of the features' cache key that does not depend on the images: weights except the head,
    preprocessing, and inference options."""
    body, device = remove_head(model), pick_device(how.device)
    return {
        "format": FEATURES_FORMAT,
        "vitreous": __version__,
        "weights": hash_weights(body),
        "architecture": to_builtins(body.config),
        "preprocess": to_builtins(preprocess),
        "precision": pick_precision(how.precision, device),
        "engine": "openvino" if how.engine == "openvino" else "torch",
        "merge_tokens": how.merge_tokens,
    }


def hash_split_images(split: Split) -> str:
    """Return a digest of a split's images as they are on disk, without labels."""
    digest = hashlib.sha256()
    split.update(digest)
    hash_file_times(split, digest)
    return f"{len(split)} {digest.hexdigest()}"


def load_features(path: Path, dtype: str = "<f4") -> SplitFeatures | None:
    """Load cached features of a dtype; None if the files are missing or incomplete. The .json file is written last."""
    try:
        document = json.loads(path.with_suffix(".json").read_text("utf-8"))
        features = np.load(path, mmap_mode="r", allow_pickle=False)
        read_errors = {int(sample): message for sample, message in document["unreadable"].items()}
        is_complete = list(features.shape) == document["shape"] and features.dtype == np.dtype(dtype)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return SplitFeatures(features, read_errors, path, reused=True) if is_complete else None


def check_disk_space(file: IO[bytes], num_bytes: int) -> None:
    """Raise ResourceError if the disk has no space for a file of `num_bytes` bytes."""
    check_free_space(tempfile.gettempdir() if isinstance(file.name, int) else os.path.dirname(file.name), num_bytes)


def check_cache_space(num_bytes: int, keep: bool) -> None:
    """Raise ResourceError if the disk has no space for `num_bytes` bytes of features: that of the cache if they are
    kept, else that of temporary files."""
    folder = get_cache_folder("features") if keep else Path(tempfile.gettempdir())
    check_free_space(next(path for path in (folder, *folder.parents) if path.is_dir()), num_bytes)


def check_free_space(folder: str | os.PathLike[str], num_bytes: int) -> None:
    """Raise ResourceError if the disk of a folder has less than `num_bytes` bytes free."""
    if (free := shutil.disk_usage(folder or ".").free) < num_bytes:
        raise ResourceError(
            f"features of {num_bytes:,} bytes do not fit on the disk of {folder}, which has {free:,} bytes free",
            DISK_SPACE_HINT,
        )
