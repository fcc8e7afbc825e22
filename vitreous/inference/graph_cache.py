"""Cache keys of models, and the cache of OpenVINO graphs: conversion takes seconds, int8 calibration minutes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import BadZipFile

import numpy as np
from torch import nn

from vitreous.config import to_builtins
from vitreous.data.modalities.base import Preprocess
from vitreous.errors import ResourceError
from vitreous.inference.libraries import get_openvino_core
from vitreous.models.zoo import Model
from vitreous.system.disk import get_cache_folder, open_atomic
from vitreous.system.machine import get_cpu_features
from vitreous.version import __version__

GRAPH_FORMAT = 2  # increase it if the same model and calibration images give another graph
MAX_GRAPH_BYTES = 4 * 2**30  # total size of stored graphs; the least recently used are removed


def hash_weights(model: nn.Module) -> str:
    """Return the SHA-256 of a model's parameters and buffers with their names and shapes."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def hash_cache_fields(cache_fields: dict[str, Any]) -> str:
    """Return a hash of a cache key, for use as a file name."""
    return hashlib.sha256(json.dumps(cache_fields, sort_keys=True).encode()).hexdigest()[:32]


def graph_cache_fields(
    model: Model, preprocess: Preprocess, calibration_images: Sequence[np.ndarray]
) -> dict[str, Any]:
    """Return the cache key of a graph: weights, preprocessing and libraries. With int8 `calibration_images`, (1, C,
    *image) each, it also contains these and the processor, which determines whether sums may overflow. Without images
    the graph is float32."""
    digest = hashlib.sha256()
    for image in calibration_images:
        digest.update(f"{image.dtype} {image.shape}\n".encode())
        digest.update(np.ascontiguousarray(image).data)
    return {
        "format": GRAPH_FORMAT,
        "vitreous": __version__,
        "weights": hash_weights(model),
        "architecture": to_builtins(model.config),
        "preprocess": to_builtins(preprocess),
        "sample_images": digest.hexdigest(),
        "libraries": {name: find_installed_version(name) for name in ("openvino", "nncf", "torch")},
        "processor": sorted(name for name, has in get_cpu_features().items() if has is True)
        if calibration_images
        else None,
    }


def find_installed_version(name: str) -> str | None:
    """Return the version of an installed package without importing it; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def load_or_build_graph(ov: Any, cache_fields: dict[str, Any], build: Callable[[], Any]) -> Any:
    """Load the graph with this cache key from `XDG_CACHE_HOME/vitreous/graphs`, or build and store it. A new graph is
    loaded back from its file, so that outputs are bit-identical with and without the cache. A graph that cannot be
    stored is still used; a damaged file is rebuilt."""
    path = get_cache_folder("graphs") / f"{hash_cache_fields(cache_fields)}.graph"
    if (graph := load_graph(path, cache_fields)) is not None:
        with suppress(OSError):
            os.utime(path)  # the least recently used ones are removed first
        return graph
    graph = build()
    try:
        with TemporaryDirectory() as scratch:
            xml = Path(scratch) / "graph.xml"
            ov.save_model(graph, xml, compress_to_fp16=False)
            graph_files = xml.read_bytes(), xml.with_suffix(".bin").read_bytes()
        graph = get_openvino_core().read_model(model=graph_files[0], weights=graph_files[1])
        write_graph(path, cache_fields, *graph_files)
    except (OSError, RuntimeError, ResourceError):
        pass
    return graph


def write_graph(path: Path, cache_fields: dict[str, Any], xml: bytes, weights: bytes) -> None:
    """Write the cache key and the two files of an OpenVINO graph atomically as one .npz, and remove the least recently
    used graphs. Raises OSError and ResourceError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_atomic(path, shared=True) as file:
        arrays: dict[str, Any] = {"xml": np.frombuffer(xml, np.uint8), "weights": np.frombuffer(weights, np.uint8)}
        np.savez(file, facts=np.array(json.dumps(cache_fields)), **arrays)
    total = 0
    for graph in sorted(path.parent.glob("*.graph"), key=lambda file: file.stat().st_mtime, reverse=True):
        total += graph.stat().st_size
        if total > MAX_GRAPH_BYTES:
            graph.unlink(missing_ok=True)


def load_graph(path: Path, cache_fields: dict[str, Any]) -> Any | None:
    """Load the graph in a file; None if the file is damaged (a .npz has checksums) or has another cache key."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            xml, weights, stored_fields = (
                stored["xml"].tobytes(),
                stored["weights"].tobytes(),
                json.loads(str(stored["facts"])),
            )
        return (
            get_openvino_core().read_model(model=xml, weights=weights)
            if stored_fields == json.loads(json.dumps(cache_fields))
            else None
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, BadZipFile):
        return None
