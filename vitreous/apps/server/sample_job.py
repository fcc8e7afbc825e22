"""A request's generation of images. It runs in the computing thread; the client is served in the event loop.

Shapes: B images of C channels.
"""

from __future__ import annotations

import asyncio
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from vitreous.apps.server.model import ServedModel
from vitreous.apps.server.responses import Refusal
from vitreous.apps.server.sample_request import SampleRequest
from vitreous.data.annotations.drawing import encode_png
from vitreous.generation.samplers import SamplerState
from vitreous.inference.image_grid import enlarge_small_images
from vitreous.inference.samples import (
    Generator,
    Sample,
    SampleOptions,
    arrange_image_grid,
    array_to_image,
    square_grid_columns,
)

MAX_PREVIEWS = 24  # approximate maximum of previews per request
PREVIEW_INTERVAL = 0.1  # minimum seconds between previews
PREVIEW_SIZE = 128  # maximum pixels of a preview's longer side
MAX_GRID_ASPECT = 2.5  # maximum aspect ratio of a grid whose columns each have few classes


class SampleJobStopped(Exception):
    """Raised between two steps if the request was cancelled or its deadline expired."""


class SampleJob:
    """The generation of a request's images. The event `stop`, or the deadline, ends it after the current step.

    `compute_document` and `compute_grid` are work for the batcher, whose input is the job itself, as returned by
    `set_deadline`. `inpaint_input` is an image (C, H, W) to inpaint and its mask (1, H, W): only the white area is
    generated. `beat` is called after each step.
    """

    def __init__(
        self,
        served: ServedModel,
        generator: Generator,
        request: SampleRequest,
        beat: Callable[[], None],
        *,
        inpainting: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        self.served, self.generator, self.request, self.report_progress, self.inpaint_input = (
            served,
            generator,
            request,
            beat,
            inpainting,
        )
        self.pairs = request.list_class_number_pairs(generator.classes)
        self.stop, self.lock, self.preview_event = threading.Event(), threading.Lock(), asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.deadline = self.fraction_done = self.next_preview_fraction = self.last_preview_time = 0.0
        self.send_previews = False
        self.states: dict[int, Tensor] = {}  # first sample index -> estimated images (B, C, H, W)
        self.preview: dict[str, Any] | None = None

    @property
    def columns(self) -> int:
        """Return the number of columns of the image grid, about as many as rows. If images cycle through the classes,
        prefer a number for which each column contains few classes."""
        classes, count = len(self.generator.classes), self.request.count
        if self.request.name is not None or not 1 < classes <= count:
            return square_grid_columns(count)
        candidates = [columns for columns in range(1, count + 1) if classes % columns == 0 or columns % classes == 0]
        aspect_ratios = {columns: max(columns * columns / count, count / columns**2) for columns in candidates}
        best = min(candidates, key=aspect_ratios.__getitem__)
        return best if aspect_ratios[best] <= MAX_GRID_ASPECT else square_grid_columns(count)

    def set_deadline(self, deadline: float, previews: bool = False) -> SampleJob:
        """Set the deadline, and whether to send previews. Returns `self`, as the input of the batcher."""
        self.deadline, self.send_previews = deadline, previews
        return self

    def compute(self) -> list[Sample]:
        """Generate the images, and return them in order. Raises Refusal, 504, if the deadline expired or the request
        was cancelled."""
        options = SampleOptions(**asdict(self.request.options), count=self.request.count, to_seed=self.request.to_seed)
        canvas = None if self.inpaint_input is None else self.generator.canvas_of(*self.inpaint_input, len(self.pairs))
        try:
            return list(self.generator.generate(self.pairs, options, on_step=self.after_step, canvas=canvas))
        except SampleJobStopped:
            raise Refusal(504, "deadline", "the deadline expired", "retry with a longer deadline") from None

    def compute_document(self, job: SampleJob) -> dict[str, Any] | Refusal:
        """Generate the images. Return them with their settings as a JSON document, or the refusal."""
        start = time.monotonic()
        try:
            samples = self.compute()
        except Refusal as refusal:
            return refusal
        images = [
            {"class": sample.name or None, "number": sample.number, "image": encode_png_uri(sample.to_pil)}
            for sample in samples
        ]
        settings = self.request.describe(self.generator.sampler.precision)
        size = list(samples[0].image.shape[:2])
        document = {"images": images, "size": size, "columns": self.columns, "settings": settings}
        return document | {"seconds": round(time.monotonic() - start, 4)}

    def compute_grid(self, job: SampleJob) -> bytes | Refusal:
        """Generate the images. Return them as one PNG in the layout of `vitreous sample`, or the refusal."""
        try:
            samples = self.compute()
            captions = [sample.name for sample in samples] if any(sample.name for sample in samples) else []
            return encode_png(
                arrange_image_grid(enlarge_small_images([sample.to_pil for sample in samples]), self.columns, captions)
            )
        except Refusal as refusal:
            return refusal

    def after_step(self, batch_slice: slice, state: SamplerState) -> None:
        """Count a denoising step of a slice of the images, and publish a preview from time to time. Raises
        SampleJobStopped on cancellation or after the deadline."""
        now = time.monotonic()
        if self.stop.is_set() or now >= self.deadline:
            raise SampleJobStopped
        self.report_progress()
        if not self.send_previews:
            return
        with self.lock:
            self.fraction_done += (batch_slice.stop - batch_slice.start) / (self.request.count * self.request.steps)
            self.states[batch_slice.start] = state.image
            if self.fraction_done < self.next_preview_fraction or now - self.last_preview_time < PREVIEW_INTERVAL:
                return
            self.next_preview_fraction, self.last_preview_time, states = (
                self.fraction_done + 1 / MAX_PREVIEWS,
                now,
                dict(self.states),
            )
            done = min(1.0, round(self.fraction_done, 4))
        images: list[str | None] = [None] * self.request.count
        for start, image in states.items():
            for offset, preview_image in enumerate(
                self.generator.sampler.preview_images(image.float().cpu()).movedim(1, -1).numpy()
            ):
                images[start + offset] = encode_preview(preview_image)
        preview = {"event": "preview", "done": done, "columns": self.columns, "images": images}
        with suppress(RuntimeError):  # the loop may have ended
            self.loop.call_soon_threadsafe(self.publish, preview)

    def publish(self, preview: dict[str, Any]) -> None:
        """Make a preview the current one and wake the waiting response. Must be called in the event loop."""
        self.preview = preview
        self.preview_event.set()


def encode_preview(image: np.ndarray) -> str:
    """Encode an image (H, W, C) uint8 as a PNG data URI, scaled down if it is large."""
    thumbnail = array_to_image(image)
    thumbnail.thumbnail((PREVIEW_SIZE, PREVIEW_SIZE), Image.Resampling.BOX)
    return encode_png_uri(thumbnail)


def encode_png_uri(image: Image.Image) -> str:
    """Encode an image as a PNG data URI."""
    return "data:image/png;base64," + b64encode(encode_png(image)).decode()
