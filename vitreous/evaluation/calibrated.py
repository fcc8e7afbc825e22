"""int8 graphs of OpenVINO, kept: calibrating one takes minutes, and the same weights and pictures give the same
graph."""

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

import numpy as np

from vitreous.config import to_plain
from vitreous.data.preprocess import Preprocess
from vitreous.disk import atomic, cache
from vitreous.errors import ResourceError
from vitreous.evaluation.features import digest_of, key_of
from vitreous.machine import capabilities
from vitreous.models.zoo import Model
from vitreous.version import __version__

FORMAT = 1  # goes up when the same model and pictures give another graph
# graphs that are kept: each is about a quarter of its weights, and weights without a run have one for every set of
# pictures
MOST = 16


def told(model: Model, preprocess: Preprocess, pictures: Sequence[np.ndarray]) -> dict[str, Any]:
    """What an int8 graph depends on: weights, preprocessing, the pictures that it is calibrated on, the libraries, and
    what the processor can do, which says whether sums overflow and in which numbers the pictures are answered for
    calibration."""
    digest = hashlib.sha256()
    for picture in pictures:
        digest.update(f"{picture.dtype} {picture.shape}\n".encode())
        digest.update(np.ascontiguousarray(picture).data)
    return {
        "format": FORMAT,
        "vitreous": __version__,
        "weights": digest_of(model),
        "architecture": to_plain(model.config),
        "preprocess": to_plain(preprocess),
        "pictures": digest.hexdigest(),
        "libraries": {name: version_of(name) for name in ("openvino", "nncf", "torch")},
        "processor": sorted(name for name, has in capabilities().items() if has is True),
    }


def version_of(name: str) -> str | None:
    """Of an installed package, which is not imported for it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def kept(ov: Any, of: dict[str, Any], make: Callable[[], Any]) -> Any:
    """The graph `of` what is told, from `XDG_CACHE_HOME/vitreous/int8`, or made and kept there.

    What is made anew is answered by as it is read back, so that answers are the same to the bit whether it was kept or
    not. If nothing can be kept, that is no error; a file that is damaged, or of something else, is made again.
    """
    place = cache("int8") / f"{key_of(of)}.graph"
    if (graph := recall(ov, place, of)) is not None:
        with suppress(OSError):
            os.utime(place)  # the least used ones go first
        return graph
    graph = make()
    try:
        xml, weights = written(ov, graph)
        graph = ov.Core().read_model(model=xml, weights=weights)
        keep(place, of, xml, weights)
    except (OSError, RuntimeError, ResourceError):
        pass
    return graph


def written(ov: Any, graph: Any) -> tuple[bytes, bytes]:
    """A graph as OpenVINO's two files have it. Raises OSError and RuntimeError."""
    with TemporaryDirectory() as scratch:
        place = Path(scratch) / "graph.xml"
        ov.save_model(graph, place, compress_to_fp16=False)
        return place.read_bytes(), place.with_suffix(".bin").read_bytes()


def keep(place: Path, of: dict[str, Any], xml: bytes, weights: bytes) -> None:
    """Write one file, whole or not at all: a line of JSON, then both parts. Raises OSError and ResourceError."""
    head = {"of": of, "xml": len(xml), "weights": len(weights), "sha256": digest(xml, weights)}
    place.parent.mkdir(parents=True, exist_ok=True)
    with atomic(place, shared=True) as file:
        file.writelines((json.dumps(head).encode(), b"\n", xml, weights))
    for old in sorted(place.parent.glob("*.graph"), key=lambda file: file.stat().st_mtime, reverse=True)[MOST:]:
        old.unlink(missing_ok=True)


def recall(ov: Any, place: Path, of: dict[str, Any]) -> Any | None:
    """The graph in a file, if it is whole and of what is told."""
    try:
        first, _, rest = place.read_bytes().partition(b"\n")
        head = json.loads(first)
        xml, weights = rest[: head["xml"]], rest[head["xml"] :]
        whole = (
            head["of"] == json.loads(json.dumps(of))
            and len(weights) == head["weights"]
            and digest(xml, weights) == head["sha256"]
        )
        return ov.Core().read_model(model=xml, weights=weights) if whole else None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None


def digest(*parts: bytes) -> str:
    """SHA-256 of the parts, one after the other."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()
