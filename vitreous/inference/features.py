"""Compute the features (the head's input) of every image of a split once, stream them to disk, and cache them.

n images, d features each: the class token or the pooled tokens, after the representation layer if there is one
(`pre_logits` in big_vision).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

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

FEATURES_FORMAT = 1  # increase it if the same model computes different features
STALE_FEATURES_SECONDS = 86_400  # age in seconds at which an unfinished file is considered abandoned
DISK_SPACE_HINT = "free disk space, set XDG_CACHE_HOME to a folder on a larger disk, or use --no-cache"


@dataclass(frozen=True)
class SplitFeatures:
    """Features of a split's images in its order; those of unreadable images are computed from black images. `features`
    (n, d) float32 are memory-mapped. `read_errors`: image index -> error message. `file`: the cache file, None without
    a cache. `reused`: all features came from the cache."""

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
    how = how or InferenceOptions()
    if how.precision == "int8":
        raise UsageError("features do not support int8", "use --precision bf16 or fp32")
    cache_fields = {**model_cache_fields(model, preprocess, how), "images": hash_split_images(split)}
    cache_path = get_cache_folder("features") / f"{hash_cache_fields(cache_fields)}.npy"
    if keep and (cached := load_features(cache_path)):
        return cached
    engine = make_engine(remove_head(model), preprocess, how)
    reader = EvalLoader(split, preprocess, default_worker_count() if workers is None else workers)
    if not keep:
        with tempfile.TemporaryFile() as file:
            shape, read_errors = write_features(file, engine, reader, batch_size, on_images)
            start = file.tell() - 4 * shape[0] * shape[1]
            return SplitFeatures(np.memmap(file, np.float32, "r", start, shape), read_errors)
    try:
        cache_path.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(cache_path, shared=True) as file:
            shape, read_errors = write_features(file, engine, reader, batch_size, on_images)
        with open_atomic(cache_path.with_suffix(".json"), "w", shared=True, encoding="utf-8") as file:
            json.dump({"shape": shape, "unreadable": read_errors, "of": cache_fields}, file, ensure_ascii=False)
    except OSError as error:
        raise ResourceError(
            f"features cannot be stored in {cache_path.parent} ({describe_exception(error)})", DISK_SPACE_HINT
        ) from None
    return SplitFeatures(np.load(cache_path, mmap_mode="r", allow_pickle=False), read_errors, cache_path)


def write_features(
    file: IO[bytes], engine: ModelEngine, reader: EvalLoader, batch_size: int, on_images: Callable[[int], None]
) -> tuple[tuple[int, int], dict[int, str]]:
    """Write the (n, d) features of a reader's images as a .npy file; return its shape, and error messages by image
    index. Raises NonFiniteError for features that are not finite, ResourceError for a full disk."""
    read_errors: dict[int, str] = {}
    shape, count = (0, 0), len(reader.split)
    for samples, images in regroup_batches(reader.iterate_batches(batch_size), ENGINE_CHUNK):
        read_errors |= {
            s: image.message for s, image in zip(samples, images, strict=True) if isinstance(image, DataError)
        }
        features = np.ascontiguousarray(compute_chunk(engine, images), dtype="<f4")
        non_finite = np.flatnonzero(~np.isfinite(features).all(1))
        if len(non_finite):
            problem = f"the features of {reader.split.name(samples[int(non_finite[0])])} are not finite"
            raise NonFiniteError(problem, "use --precision fp32, or other weights")
        if not shape[0]:
            shape = count, features.shape[1]
            check_disk_space(file, 4 * count * features.shape[1])
            np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        file.write(features.data)
        on_images(len(features))
    file.flush()
    return shape, read_errors


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


def load_features(path: Path) -> SplitFeatures | None:
    """Load cached features; None if the files are missing or incomplete. The .json file is written last."""
    try:
        document = json.loads(path.with_suffix(".json").read_text("utf-8"))
        features = np.load(path, mmap_mode="r", allow_pickle=False)
        read_errors = {int(sample): message for sample, message in document["unreadable"].items()}
        is_complete = list(features.shape) == document["shape"] and features.dtype == np.float32
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return SplitFeatures(features, read_errors, path, reused=True) if is_complete else None


def check_disk_space(file: IO[bytes], num_bytes: int) -> None:
    """Raise ResourceError if the disk has no space for a file of `num_bytes` bytes."""
    folder = tempfile.gettempdir() if isinstance(file.name, int) else os.path.dirname(file.name)
    if (free := shutil.disk_usage(folder or ".").free) < num_bytes:
        raise ResourceError(
            f"features of {num_bytes:,} bytes do not fit on the disk of {folder}, which has {free:,} bytes free",
            DISK_SPACE_HINT,
        )
