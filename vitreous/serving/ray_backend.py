"""The answers of a predictor from the machines of a Ray cluster (extra `ray`), by Ray Data: images in, answers out, in
their order.

Every worker loads the model once and answers a chunk of images at a time. A worker that dies is started again and its
chunk asked again; what a dead one had answered is never seen, so that every image has one answer. Images go out in
waves and answers are taken as they come: neither is ever held whole. Paths have to lead to the same files on every
machine, the model's too; images out of archives and Parquet are read here and sent.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, NoReturn

import numpy as np

import vitreous.errors as errors
from vitreous.cluster import connect_ray
from vitreous.errors import DataError, ResourceError, VitreousError
from vitreous.evaluation.inference_options import InferenceOptions
from vitreous.serving.predict import Asked, Embedding, Prediction, load
from vitreous.serving.sources import Item
from vitreous.weights.options import WeightsSource

CHUNK = 256  # images that a worker answers at a time: what is done again when it dies
SENT = 2**25  # bytes of images that were read here, of a chunk
WAVE, WEIGHT = 200_000, 2**30  # images and bytes that Ray is given at a time; workers start anew with each wave

Verb = Literal["predictions", "embeddings"]


@dataclass(frozen=True)
class Task:
    """What every worker needs: the model, how it computes, and the method of a predictor with what follows the
    images."""

    run: str | WeightsSource
    how: InferenceOptions
    exact: bool
    verb: Verb
    rest: tuple[Any, ...]
    place: str


@dataclass(frozen=True)
class Remote:
    """A cluster in the place of a predictor. `address` is as `ray.init` takes it, or `local` for one that is started
    here.

    There is a worker for every GPU, unless `how` says cpu, or for every core. What is computed, and each answer's last
    bit, is what one thread of one machine would compute.
    """

    address: str
    run: str | WeightsSource
    how: InferenceOptions = InferenceOptions()  # noqa: RUF009
    exact: bool = False

    def predictions(self, items: Iterable[Item], asked: Asked, bad_images: str = "skip") -> Iterator[list[Prediction]]:
        """As `Predictor.predictions`. Raises UsageError without Ray or cluster, ResourceError where the cluster gives
        out."""
        for rows, _ in self.answers(items, "predictions", (asked, bad_images)):
            yield [
                Prediction(**{**row, "names": tuple(row["names"]), "probabilities": tuple(row["probabilities"])})
                for row in rows
            ]

    def embeddings(self, items: Iterable[Item], bad_images: str = "skip") -> Iterator[list[Embedding]]:
        """As `Predictor.embeddings`, and raises as `predictions`."""
        for rows, raw in self.answers(items, "embeddings", (bad_images,)):
            good = sum(row["error"] is None for row in rows)
            values = iter(np.frombuffer(raw, np.float32).reshape(good, -1) if good else ())
            yield [Embedding(row["path"], next(values) if row["error"] is None else None, row["error"]) for row in rows]

    def answers(
        self, items: Iterable[Item], verb: Verb, rest: tuple[Any, ...]
    ) -> Iterator[tuple[list[dict[str, Any]], bytes]]:
        """Chunk by chunk, the fields of every answer, and the numbers of all of them."""
        path = os.path.abspath(self.run) if os.path.exists(self.run) else os.fspath(self.run)
        run = replace(self.run, path=path) if isinstance(self.run, WeightsSource) else path
        task = Task(run, self.how, self.exact, verb, rest, os.getcwd())
        packed = chunks(items)
        wave = list(a_wave(packed))
        ray = connect_ray(self.address) if wave else None
        try:
            while wave:
                for records, raw in computed(ray, task, wave):
                    answers = json.loads(records)
                    if "kind" in answers:
                        raise getattr(errors, answers["kind"])(answers["message"], answers["hint"])
                    yield answers["answers"], raw
                wave = list(a_wave(packed))
        finally:
            if ray is not None:
                ray.shutdown()


def chunks(items: Iterable[Item]) -> Iterator[dict[str, Any]]:
    """Chunks as rows for Ray: JSON, which keeps names that are no text as Python has them, and the bytes that belong to
    it."""
    records: list[dict[str, Any]] = []
    contents: list[bytes] = []
    weight = 0
    for item in items:
        one: dict[str, Any] = {"name": item.name}
        try:
            content = item.content()
            if isinstance(content, str):
                one["path"] = content
            else:
                one["size"] = len(content)
                weight += len(content)
                contents.append(content)
        except DataError as error:
            one["message"] = error.message
        records.append(one)
        if len(records) == CHUNK or weight >= SENT:
            yield {"told": json.dumps(records).encode(), "raw": b"".join(contents), "images": len(records)}
            records, contents, weight = [], [], 0
    if records:
        yield {"told": json.dumps(records).encode(), "raw": b"".join(contents), "images": len(records)}


def a_wave(packed: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The next chunks, as many as Ray is given at a time."""
    images = weight = 0
    for chunk in packed:
        yield chunk
        images, weight = images + chunk["images"], weight + len(chunk["raw"])
        if images >= WAVE or weight >= WEIGHT:
            return


def unpacked(records: bytes, raw: bytes) -> Iterator[Item]:
    """The items of a chunk."""
    start = 0
    for one in json.loads(records):
        if "message" in one:
            yield Item(one["name"], partial(unreadable, one["message"]))
        elif "path" in one:
            yield Item(one["name"], one["path"])
        else:
            yield Item(one["name"], raw[start : start + one["size"]])
            start += one["size"]


def unreadable(message: str) -> NoReturn:
    """Say again why an image could not be read."""
    raise DataError(message)


class Worker:
    """One process that answers. Ray makes it, and makes it again where it dies."""

    def __init__(self, task: Task) -> None:
        import torch

        os.chdir(task.place)
        torch.set_num_threads(1)
        self.task, self.failure = task, None
        try:
            self.predictor = load(task.run, task.how, exact=task.exact, headless=task.verb == "embeddings")
        except VitreousError as error:  # raised here, Ray would make another worker, again and again
            self.failure = error

    def __call__(self, batch: dict[str, Sequence[bytes]]) -> dict[str, list[bytes]]:
        """One chunk."""
        try:
            if self.failure is not None:
                raise self.failure
            answer = getattr(self.predictor, self.task.verb)
            rows = [
                row for some in answer(unpacked(batch["told"][0], batch["raw"][0]), *self.task.rest) for row in some
            ]
        except VitreousError as error:
            return packed({"kind": type(error).__name__, "message": error.message, "hint": error.hint})
        if self.task.verb == "predictions":
            return packed({"answers": [asdict(row) for row in rows]})
        raw = b"".join(row.values.tobytes() for row in rows if row.values is not None)
        return packed({"answers": [{"path": row.path, "error": row.error} for row in rows]}, raw)


def packed(records: dict[str, Any], raw: bytes = b"") -> dict[str, list[bytes]]:
    """A row that a worker gives back."""
    return {"told": [json.dumps(records).encode()], "raw": [raw]}


def computed(ray: Any, task: Task, wave: Sequence[dict[str, Any]]) -> Iterator[tuple[bytes, bytes]]:
    """A wave through Ray Data: what each chunk's worker gave back, in order. Raises ResourceError."""
    from ray.data import ActorPoolStrategy, DataContext

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    answers = ray.cluster_resources()
    gpus = 0 if task.how.device == "cpu" else int(answers.get("GPU", 0))
    needs = {"num_gpus": 1} if gpus else {"num_cpus": 1}
    workers = max(1, min(gpus or int(answers.get("CPU", 1)), len(wave)))
    try:
        rows = ray.data.from_items(list(wave), override_num_blocks=len(wave)).map_batches(
            Worker, fn_constructor_args=(task,), batch_size=1, compute=ActorPoolStrategy(size=workers), **needs
        )
        for row in rows.iter_rows():
            yield row["told"], row["raw"]
    except ray.exceptions.RayError as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[-1]
        raise ResourceError(
            f"the Ray cluster gave out: {reason}", "see that every machine finds the model and the images"
        ) from None
