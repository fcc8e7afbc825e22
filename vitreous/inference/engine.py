"""Engines: uint8 pixels in, float32 logits out, by the fastest way the machine has.

On a CPU the weights are cast and packed once (`nn.frozen`), and a batch is cut into parts that stay in cache, one
thread each, which wastes less than all cores sharing each product. On a GPU the batch goes in whole, and batches of one
shape after the third as a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vitreous.data.clip_views import ONE, ClipViews
from vitreous.data.loader import EvalLoader
from vitreous.data.preprocess import Preprocess
from vitreous.errors import DataError, UsageError
from vitreous.inference.options import InferenceOptions, Pictures
from vitreous.inference.packing import pack
from vitreous.models.config import ModelConfig
from vitreous.models.packed import Packed
from vitreous.models.zoo import Model
from vitreous.nn.cuda_graphs import CapturedPasses, uses_graphs
from vitreous.nn.encoder import compile_blocks
from vitreous.nn.frozen import frozen
from vitreous.nn.merge import Merging
from vitreous.system.machine import (
    DTYPES,
    capabilities,
    packs,
    pick_device,
    pick_precision,
    settle_process,
    thread_pool,
)

# tokens of one part, about: more fall out of the caches, fewer leave the cores waiting for each other; and with tiles
# (AMX), whose products wait for weights, which a part reads once
TOKENS, TILED_TOKENS = 1600, 3200
IDLE = 0.1  # share of the cores that may wait before a batch is computed by all of them together
# tokens of a part of one thread, where parts are of one size; images of such a part on a GPU
STEADY, DEVICE_PART = 800, 32
CHUNK = 64  # images that `logits_of` gives an engine at a time


class Engine(Protocol):
    """What `evaluate` and `predict` call for outputs."""

    preprocess: Preprocess
    precision: str

    def __call__(self, pixels: Any) -> Tensor:
        """(B, C, *image) uint8 -> (B, K) float32 logits, on the CPU; of a detector as `packing` has it. Of pictures at
        their own aspect a list of B, each (C, height, width)."""
        ...


class TorchEngine:
    """PyTorch. `precision` is `auto` (bf16 where the device has it), `fp32` or `bf16`; blocks merge `merge_tokens`.

    Pictures at their own aspect are packed into rows of tokens (`models.packed`). An output depends on the images
    beside it in its last bits only. Raises UsageError for a model that cannot merge tokens, or not take such pictures.
    """

    def __init__(
        self, model: Model, preprocess: Preprocess, device: str = "cpu", precision: str = "auto", merge_tokens: int = 0
    ) -> None:
        settle_process()  # before weights are laid out
        self.preprocess, self.device = preprocess, device
        self.precision = pick_precision(precision, device)
        self.dtype = DTYPES[self.precision]
        self.model = frozen(model.to(device), self.dtype, packs(device))
        self.packed = Packed(self.model) if preprocess.native else None  # type: ignore[arg-type]
        if merge_tokens:
            if self.packed is not None:
                problem = "tokens merge only in pictures of one size, not at their own aspect"
                raise UsageError(problem, "leave --merge-tokens or --native-aspect out")
            if not model.config.merges_tokens:
                problem = "tokens merge only in plain ViTs without attention pooling"
                raise UsageError(problem, "leave --merge-tokens out")
            mean = model.config.pool == "mean"
            self.model.encoder = Merging(self.model.encoder, merge_tokens, model.config.prefix, mean)  # type: ignore[arg-type]
        self.images = given(model.config, self.dtype)
        tiled = self.dtype == torch.bfloat16 and capabilities().get("amx_bf16", False)
        self.part_tokens = TILED_TOKENS if tiled else TOKENS
        self.same_bits: dict[tuple[int, int], bool] = {}
        fixed = self.packed is None and model.config.kind != "detector" and not merge_tokens
        self.captured = CapturedPasses(device) if fixed and uses_graphs(device) else None
        self.tokens = (preprocess.tokens or math.prod(model.config.grid)) + model.config.prefix

    def __call__(self, pixels: Tensor | list[Tensor]) -> Tensor:
        """(B, C, *image) uint8, or of pictures at their own aspect a list of B -> (B, K) float32 logits, on the CPU."""
        if self.device != "cpu":
            return self.part(pixels).cpu()
        threads = torch.get_num_threads()
        size, together = cut(len(pixels), max(1, round(self.part_tokens / self.tokens)), threads)
        parts = [pixels[low : low + size] for low in range(0, len(pixels), size)]
        return torch.cat(list(map(self.part, parts) if together else thread_pool(threads).map(self.part, parts)))

    def steady(self, pixels: Tensor | list[Tensor], size: int, quick: bool = False) -> Tensor:
        """(B, C, *image) uint8 -> (B, K) float32, computed in parts of exactly `size` images, the last filled up with
        black; pictures at their own aspect, a list of B, each alone.

        Outputs are the same bits whatever is beside an image and however many there are. On a CPU one thread computes a
        part: products of another height, or shared by more threads, may round otherwise. `quick`: all threads compute
        each part, which is answered 1.4 to 1.9 times as soon by two. Where that was seen to change no bit, only if
        there are parts for half the threads at most: by one thread each, many are done sooner.
        """
        threads = torch.get_num_threads()
        if isinstance(pixels, list):
            parts = [[picture] for picture in pixels]
        else:
            lacking = -len(pixels) % size
            whole = torch.cat([pixels, pixels.new_zeros(lacking, *pixels.shape[1:])]) if lacking else pixels
            parts = whole.split(size)
        together = threads == 1 or self.device != "cpu"
        if quick and not together and isinstance(pixels, Tensor):
            together = 2 * len(parts) <= threads or not self.threads_keep_bits(size, threads)
        rows = list(map(self.part, parts) if together else thread_pool(threads).map(self.part, parts))
        return torch.cat(rows)[: len(pixels)].cpu()

    def threads_keep_bits(self, size: int, threads: int) -> bool:
        """Whether a part of `size` images comes out the same to the last bit from one thread and from all of them: of
        noise, once. The split of a product depends on its shape, not on its numbers."""
        if (size, threads) not in self.same_bits:
            pixels = torch.from_numpy(self.preprocess.noise(size))
            (alone,) = thread_pool(threads).map(self.part, [pixels])
            self.same_bits[size, threads] = torch.equal(alone, self.part(pixels))
        return self.same_bits[size, threads]

    def part_size(self, tokens: int = STEADY) -> int:
        """Return how many images make a part of about so many tokens; on a GPU always the same."""
        return max(1, min(64, round(tokens / self.tokens))) if self.device == "cpu" else DEVICE_PART

    @torch.inference_mode()
    def part(self, pixels: Tensor | list[Tensor]) -> Tensor:
        """(b, C, *image) uint8, or a list of b -> (b, K) float32 on the device, of a detector as `packing` has it: one
        forward pass."""
        if self.packed is not None:
            pictures = [self.given(picture[None])[0] for picture in pixels]
            return self.packed(pictures).float()
        assert isinstance(pixels, Tensor)
        images = self.given(pixels)
        if self.captured is None:
            return self.forward(images)
        return self.captured.run(lambda own: {"outputs": self.forward(own["images"])}, {"images": images})["outputs"]

    def forward(self, images: Tensor) -> Tensor:
        """(b, C, *image) normalised -> (b, K) float32, of a detector as `packing` has it."""
        outputs = self.model(images)
        return pack(outputs) if isinstance(outputs, tuple) else outputs.float()

    def given(self, pixels: Tensor) -> Tensor:
        """(b, C, *image) uint8 -> the same on the device, as the model takes it."""
        return self.preprocess.normalise(pixels.to(self.device, non_blocking=True), self.images)


def given(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of images for a model frozen in `dtype`: convolutions stay float32."""
    return dtype if config.front == "patches" else torch.float32


def cut(images: int, most: int, threads: int) -> tuple[int, bool]:
    """Return the images of a part, at most `most`, and whether all threads work on each part together.

    Else each thread computes parts of its own, of even size, unless that left more than `IDLE` of them waiting.
    """
    rounds = math.ceil(images / (most * threads))  # parts that each thread computes
    size = max(1, math.ceil(images / (rounds * threads)))
    busy = images / (size * threads * rounds)
    return (size, False) if threads > 1 and busy >= 1 - IDLE else (most, True)


def make_engine(
    model: Model, preprocess: Preprocess, how: InferenceOptions | None = None, pictures: Pictures | None = None
) -> Engine:
    """Return the engine of the options, for `auto` PyTorch's; int8 is calibrated on `pictures`.

    Raises UsageError for options that do not go together.
    """
    how = how or InferenceOptions()
    device = pick_device(how.device)
    if how.clip_views != ONE:
        problem = f"--clip-views {how.clip_views} is for answers of models that name classes of clips"
        raise UsageError(problem, "leave it out")
    if how.merge_tokens < 0:
        raise UsageError(f"--merge-tokens must be at least 0, not {how.merge_tokens}")
    if how.engine == "compiled" and not device.startswith("cuda"):
        raise UsageError(f"--engine compiled is for GPUs, not for {device}", "use --engine torch")
    if how.engine == "openvino":
        if preprocess.native:
            problem = "--engine openvino computes images of one size, not pictures at their own aspect"
            raise UsageError(problem, "leave it out")
        from vitreous.inference.openvino import OpenVinoEngine

        if model.config.kind == "detector":
            hint = "export it, `vitreous export RUN --to openvino`, and name the file in the place of the run"
            raise UsageError("--engine openvino does not compute the detectors of runs", hint)
        if device != "cpu" or how.merge_tokens:
            problem = "--engine openvino computes on the CPU, and merges no tokens"
            raise UsageError(problem, "use --device cpu without --merge-tokens")
        return OpenVinoEngine(model, preprocess, how.precision, pictures)
    if how.precision == "int8":
        raise UsageError("--precision int8 needs --engine openvino", "add it, or use bf16 or fp32")
    engine = TorchEngine(model, preprocess, device, how.precision, how.merge_tokens)
    if how.engine == "compiled":
        compile_blocks(engine.model)
    return engine


def logits_of(
    engine: Engine, reader: EvalLoader, batch_size: int = CHUNK, on_images: Callable[[int], None] = lambda images: None
) -> tuple[np.ndarray, dict[int, DataError]]:
    """Return (n, K) float32 logits of every image of a split, in order, and the images that could not be read.

    The engine always gets CHUNK images at a time, or as many clips as have so many views, whose logits are averaged:
    `batch_size` changes memory only. The row of an unreadable image is
    that of a black one. `on_images` gets the number of images of every step. An empty split gives (0, K).
    """
    rows: list[np.ndarray] = []
    bad: dict[int, DataError] = {}
    views = reader.views.count if reader.views else 1
    size = max(1, CHUNK // views)
    for samples, images in chunks(reader.batches(max(1, batch_size // views)), size):
        bad |= {s: image for s, image in zip(samples, images, strict=True) if isinstance(image, DataError)}
        rows.append(compute_chunk(engine, images, reader.views))
        on_images(len(images))
    return np.concatenate(rows) if rows else compute_chunk(engine, [DataError("no image")])[:0], bad


def compute_chunk(engine: Engine, images: list[Tensor | DataError], views: ClipViews | None = None) -> np.ndarray:
    """Return (n, K) float32 logits of images (C, *image) uint8, or of clips with `views` (V, C, *image) their means; an
    unreadable one is taken to be black."""
    p = engine.preprocess
    blank = torch.zeros(p.channels, *(p.patch or p.image), dtype=p.dtype)
    if views is not None:
        blank = blank.expand(views.count, *blank.shape)
    pixels = [blank if isinstance(image, DataError) else image for image in images]
    if views is not None:
        return views.mean(lambda parts: engine(torch.from_numpy(parts)).numpy())(torch.stack(pixels).numpy())
    return engine(pixels if p.native else torch.stack(pixels)).numpy()


def chunks(batches: Iterable[tuple[Tensor, list]], size: int) -> Iterator[tuple[list[int], list]]:
    """Regroup batches of any size, (b,) samples and images, into batches of `size`, the last one shorter."""
    samples: list[int] = []
    images: list = []
    for more_samples, more_images in batches:
        samples, images = samples + more_samples.tolist(), images + more_images
        while len(images) >= size:
            yield samples[:size], images[:size]
            samples, images = samples[size:], images[size:]
    if images:
        yield samples, images


def readable_mask(count: int, bad: Iterable[int]) -> np.ndarray:
    """Return (count,) bool: the positions that are not in `bad`."""
    mask = np.ones(count, dtype=bool)
    mask[list(bad)] = False
    return mask
