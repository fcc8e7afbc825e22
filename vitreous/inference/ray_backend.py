"""Distributed inference on a Ray cluster (extra `ray`), which yields predictions in the order of the images.

Every worker loads the model once and computes one chunk of images at a time. Ray restarts a worker that dies and
repeats its chunk; results of a dead worker are discarded, so every image has exactly one prediction. A few chunks per
worker are in flight, so neither all images nor all predictions are in memory. Paths, including the model's, must lead
to the same files on every machine; images in archives and Parquet files are read locally and sent.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Literal, NoReturn

import vitreous.errors as errors
from vitreous.errors import DataError, ResourceError, VitreousError
from vitreous.inference.options import InferenceOptions
from vitreous.inference.predict import Embedding, load
from vitreous.inference.sources import Item
from vitreous.system.cluster import connect_ray
from vitreous.tasks.base import PredictionFormat
from vitreous.weights.options import WeightsSource

WORKER_CHUNK = 256  # images per task of a worker, which is repeated if the worker dies
MAX_SENT_BYTES = 2**25  # bytes of locally read images in a chunk
CHUNKS_IN_FLIGHT = 2  # chunks in flight per worker

Verb = Literal["predictions", "embeddings"]


@dataclass(frozen=True)
class WorkerTask:
    """The work of a Ray worker: the model, its inference options, and the method of `Predictor` to call. `rest`: the
    method's arguments after the items. `working_directory`: the folder that paths are relative to."""

    run: str | WeightsSource
    inference_options: InferenceOptions
    exact: bool
    method_name: Verb
    rest: tuple[Any, ...]
    working_directory: str


@dataclass(frozen=True)
class RayPredictor:
    """A predictor that runs on a Ray cluster. `address` is passed to `ray.init`; `local` starts a local cluster. There
    is one worker per GPU, or per core if `inference_options` selects the CPU. The predictions are bit-identical to
    those of a single thread on one machine."""

    address: str
    run: str | WeightsSource
    inference_options: InferenceOptions = InferenceOptions()  # noqa: RUF009
    exact: bool = False

    def predictions(
        self, items: Iterable[Item], prediction_format: PredictionFormat, bad_images: str = "skip"
    ) -> Iterator[list[Any]]:
        """Yield the predictions of items in order, chunk by chunk, as `Predictor.predictions` does. Raises UsageError
        without Ray or a cluster, ResourceError if the cluster fails."""
        return self.compute_chunks(items, "predictions", (prediction_format, bad_images))

    def embeddings(self, items: Iterable[Item], bad_images: str = "skip") -> Iterator[list[Embedding]]:
        """Yield the features (D,) of items in order, chunk by chunk, as `Predictor.embeddings` does. Raises UsageError
        without Ray or a cluster, ResourceError if the cluster fails."""
        return self.compute_chunks(items, "embeddings", (bad_images,))

    def compute_chunks(self, items: Iterable[Item], verb: Verb, arguments: tuple[Any, ...]) -> Iterator[list[Any]]:
        """Yield the results of the predictor's method `verb` for chunks of items, in order. Raises a worker's
        VitreousError, and ResourceError if the cluster fails."""
        chunks = split_into_chunks(items)
        if (first_chunk := next(chunks, None)) is None:
            return
        path = os.path.abspath(self.run) if os.path.exists(self.run) else os.fspath(self.run)
        run = replace(self.run, path=path) if isinstance(self.run, WeightsSource) else path
        ray = connect_ray(self.address)
        try:
            start, num_workers = plan_workers(
                ray,
                WorkerTask(
                    run,
                    self.inference_options,
                    exact=self.exact,
                    method_name=verb,
                    rest=arguments,
                    working_directory=os.getcwd(),
                ),
            )
            workers, in_flight = list[Any](), deque[Any]()
            for chunk_index, chunk in enumerate(chain([first_chunk], chunks)):
                if chunk_index < num_workers:
                    workers.append(start())
                in_flight.append(workers[chunk_index % num_workers].compute_chunk.remote(chunk))
                if len(in_flight) >= CHUNKS_IN_FLIGHT * num_workers:
                    yield unpack_worker_result(ray.get(in_flight.popleft()))
            while in_flight:
                yield unpack_worker_result(ray.get(in_flight.popleft()))
        except ray.exceptions.RayError as error:
            reason = (str(error).strip().splitlines() or ["no reason given"])[-1]
            message = f"the Ray cluster failed: {reason}"
            raise ResourceError(message, "check that every machine can read the model and the images") from None
        finally:
            ray.shutdown()


def plan_workers(ray: Any, task: WorkerTask) -> tuple[Callable[[], Any], int]:
    """Plan the workers of a cluster: return a function that starts one, and their number, one per GPU or core."""
    resources = ray.cluster_resources()
    gpus = 0 if task.inference_options.device == "cpu" else int(resources.get("GPU", 0))
    worker_resources = {"num_gpus": 1} if gpus else {"num_cpus": 1}
    actor = ray.remote(**worker_resources, max_restarts=-1, max_task_retries=-1)(RayWorker)
    return partial(actor.remote, task), max(1, gpus or int(resources.get("CPU", 1)))


def split_into_chunks(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Split items into chunks for workers. Images that are not separate files are read, so that their bytes are
    sent."""
    chunk: list[Item] = []
    size = 0
    for item in items:
        try:
            content = item.content()
        except DataError as error:
            content = partial(raise_read_error, error.message)
        size += len(content) if isinstance(content, bytes) else 0
        chunk.append(Item(item.name, content))
        if len(chunk) == WORKER_CHUNK or size >= MAX_SENT_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def raise_read_error(message: str) -> NoReturn:
    """Raise DataError in a worker, for an image that could not be read locally."""
    raise DataError(message)


class RayWorker:
    """A worker process of the cluster, which computes chunks of images. Ray creates it, and recreates it if it dies."""

    def __init__(self, job: WorkerTask) -> None:
        import torch

        os.chdir(job.working_directory)
        torch.set_num_threads(1)
        self.task, self.failure = job, None
        try:
            self.predictor = load(
                job.run, job.inference_options, exact=job.exact, headless=job.method_name == "embeddings"
            )
        except VitreousError as error:  # if raised here, Ray would recreate the worker again and again
            self.failure = error

    def compute_chunk(self, chunk: list[Item]) -> list[Any] | tuple[str, str, str]:
        """Compute the predictions of one chunk; for an error that ends the job, return its class name, message and
        hint."""
        try:
            if self.failure is not None:
                raise self.failure
            return list(chain.from_iterable(getattr(self.predictor, self.task.method_name)(chunk, *self.task.rest)))
        except VitreousError as error:
            return type(error).__name__, error.message, error.hint


def unpack_worker_result(result: list[Any] | tuple[str, str, str]) -> list[Any]:
    """Return the predictions of a chunk. Raises the VitreousError that `RayWorker.compute_chunk` returned."""
    if isinstance(result, tuple):
        error_name, message, hint = result
        raise getattr(errors, error_name)(message, hint)
    return result
