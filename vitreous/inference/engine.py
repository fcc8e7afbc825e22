"""Engines: uint8 pixels in, float32 logits out, by the fastest way the machine has.

On a CPU the weights are cast and packed once (`nn.frozen`), and a batch is split into chunks that stay in cache, one
thread each, which wastes less than all cores sharing each product. On a GPU the batch is computed as a whole, and from
the third batch of one shape on as a CUDA graph.

B images, K classes, D features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vitreous.data.clip_views import SINGLE_VIEW, ClipViews
from vitreous.data.loader import EvalLoader
from vitreous.data.modalities.base import Preprocess
from vitreous.errors import DataError, UsageError
from vitreous.inference.options import CalibrationImages, InferenceOptions, Precision
from vitreous.inference.outputs import Outputs, compute_in_chunks, pack_outputs, unpack_outputs
from vitreous.models.config import ModelConfig
from vitreous.models.packed import PackedViT
from vitreous.models.zoo import Model
from vitreous.nn.cuda_graphs import CudaGraphRunner, uses_cuda_graphs
from vitreous.nn.encoder import Encoder, compile_blocks
from vitreous.nn.frozen import freeze_for_inference
from vitreous.nn.merge import TokenMergingEncoder
from vitreous.system.machine import (
    DTYPES,
    configure_process,
    get_cpu_features,
    get_thread_pool,
    has_fast_packed_products,
    pick_device,
    pick_precision,
)
from vitreous.system.torch_types import from_numpy

# tokens of a chunk: more fall out of the caches, fewer leave cores waiting for each other; and with tiles (AMX), whose
# products wait for weights, which a chunk reads once
CHUNK_TOKENS, AMX_CHUNK_TOKENS = 1600, 3200
MAX_IDLE_CORES = 0.1  # share of the cores that may wait before a batch is computed by all of them together
# of chunks of one fixed size, computed by one thread each; and by all threads, where callers wait for single images
FIXED_CHUNK_TOKENS, LATENCY_CHUNK_TOKENS = 800, 200
DEVICE_CHUNK = 32  # images of such a chunk on a GPU
LIBRARY_CHUNK = 4  # and of an engine of another library
ENGINE_CHUNK = 64  # images that `compute_split_logits` gives an engine at a time

#: (B, C, *image), or images at their own aspect ratio, each (C, height, width)
Pixels = np.ndarray | list[np.ndarray]


class Engine(Protocol):
    """Computes a model's outputs: of a run (`ModelEngine`), or of an exported file (`inference.exported`).

    Pixels are as `Preprocess.array` makes them. Outputs are bit-identical regardless of batch composition.
    """

    name: str  # of the library
    precision: str  # of its products: `fp32`, `bf16` or `int8`

    def logits(self, pixels: Any) -> np.ndarray:
        """(B, C, *image) pixels -> (B, K) float32."""
        ...

    def features(self, pixels: Any) -> np.ndarray:
        """(B, C, *image) pixels -> (B, D) float32, the head's input. Raises UsageError where there are none."""
        ...

    def objects(self, pixels: np.ndarray) -> Outputs:
        """(B, C, *image) pixels -> boxes, scores, labels and masks of a detector, as `outputs` describes them."""
        ...


class ModelEngine:
    """A model with its preprocessing, computed by the library of a subclass.

    Calling it is the fast way, for evaluation: the last bits of an output may depend on the rest of the batch.
    `logits`, `features` and `objects` compute chunks of one fixed size instead, the last one padded with black images.
    With `low_latency` chunks are small and shared by all threads: a single image is computed sooner, a long job later.

    `options`: those that build the engine again; `note`: how it was chosen, for people, "" if there was no choice.
    """

    name: str
    note = ""
    low_latency = False

    def __init__(self, model: Model, preprocess: Preprocess, precision: str, options: InferenceOptions) -> None:
        self.original, self.preprocess, self.precision, self.options = model, preprocess, precision, options

    def __call__(self, pixels: Any) -> Tensor:
        """(B, C, *image) uint8 -> (B, K) float32 logits, on the CPU; of a detector as `outputs` has it. Of images at
        their own aspect ratio a list of B, each (C, height, width)."""
        raise NotImplementedError

    @property
    def chunk_size(self) -> int:
        """Images of a chunk."""
        return 1 if self.low_latency else LIBRARY_CHUNK

    def logits(self, pixels: Pixels) -> np.ndarray:
        """(B, C, *image) pixels -> (B, K) float32."""
        assert isinstance(pixels, np.ndarray), "only PyTorch takes images of different sizes"
        return compute_in_chunks(lambda chunk: self(from_numpy(chunk)).numpy(), pixels, self.chunk_size)

    def features(self, pixels: Pixels) -> np.ndarray:
        """(B, C, *image) pixels -> (B, D) float32, the head's input."""
        return self.feature_engine.logits(pixels)

    def objects(self, pixels: np.ndarray) -> Outputs:
        """(B, C, *image) pixels -> boxes, scores, labels and masks of a detector, as `outputs` describes them."""
        return unpack_outputs(self.logits(pixels))

    @cached_property
    def feature_engine(self) -> ModelEngine:
        """The engine of the model without its head; of dense models, whose heads need feature maps, of the backbone."""
        body = self.original.backbone if self.original.config.backbone else remove_head(self.original)
        engine = make_engine(body, self.preprocess, self.options)
        engine.low_latency = self.low_latency
        return engine


class TorchEngine(ModelEngine):
    """PyTorch. `precision` is `auto` (bf16 where the device has it), `fp32` or `bf16`; blocks merge `merge_tokens`.

    Images at their own aspect ratio are packed into rows of tokens (`models.packed`). Raises UsageError for a model
    that cannot merge tokens, or not take such images.

    On a CPU a chunk of fixed size is computed by one thread and has about 800 tokens (four images of ViT-S/16): fewer
    would not pay for laying out the weights anew for every product, more would not be faster. On two cores of an EPYC
    with AVX2 ViT-S/16 reached, of its best 13.7 images/s, 98 % in chunks of four, 92 % in chunks of two and 80 % in
    chunks of one; a single image took 560, 320 and 170 ms.
    """

    name = "torch"

    def __init__(
        self,
        model: Model,
        preprocess: Preprocess,
        device: str = "cpu",
        precision: Precision = "auto",
        *,
        merge_tokens: int = 0,
    ) -> None:
        configure_process()  # before weights are laid out
        options = InferenceOptions(device, precision, "torch", merge_tokens)
        super().__init__(model, preprocess, pick_precision(precision, device), options)
        self.device, self.dtype = device, DTYPES[self.precision]
        self.model = freeze_for_inference(model.to(device), self.dtype, has_fast_packed_products(device))
        self.packed = None if preprocess.stacks else PackedViT(self.model)  # type: ignore[arg-type]  # which checks the config
        if merge_tokens:
            if self.packed is not None:
                problem = "tokens merge only in pictures of one size, not at their own aspect"
                raise UsageError(problem, "leave --merge-tokens or --native-aspect out")
            if not model.config.merges_tokens:
                problem = "tokens merge only in plain ViTs without attention pooling"
                raise UsageError(problem, "leave --merge-tokens out")
            mean = model.config.pool == "mean"
            encoder = self.model.encoder
            assert isinstance(encoder, Encoder)
            self.model.encoder = TokenMergingEncoder(encoder, merge_tokens, model.config.prefix, mean)
        self.input_dtype = choose_input_dtype(model.config, self.dtype)
        tiled = self.dtype == torch.bfloat16 and get_cpu_features().get("amx_bf16", False)
        self.chunk_tokens = AMX_CHUNK_TOKENS if tiled else CHUNK_TOKENS
        self.same_bits: dict[tuple[int, int], bool] = {}
        fixed = self.packed is None and not model.config.finds_objects and not merge_tokens
        self.captured = CudaGraphRunner(device) if fixed and uses_cuda_graphs(device) else None
        self.tokens = preprocess.count_tokens(model.config.grid) + model.config.prefix

    def __call__(self, pixels: Tensor | list[Tensor]) -> Tensor:
        """(B, C, *image) uint8, or a list of B images at their own aspect ratio -> (B, K) float32 logits, on the
        CPU."""
        if self.device != "cpu":
            return self.forward_chunk(pixels).cpu()
        threads = torch.get_num_threads()
        size, is_shared = split_batch(len(pixels), max(1, round(self.chunk_tokens / self.tokens)), threads)
        chunks = [pixels[low : low + size] for low in range(0, len(pixels), size)]
        return self.forward_chunks(chunks, is_shared)

    @property
    def chunk_size(self) -> int:
        """Images of a chunk of fixed size; on a GPU always the same."""
        if self.device != "cpu":
            return DEVICE_CHUNK
        return max(1, min(64, round((LATENCY_CHUNK_TOKENS if self.low_latency else FIXED_CHUNK_TOKENS) / self.tokens)))

    def logits(self, pixels: Pixels) -> np.ndarray:
        """(B, C, *image) pixels -> (B, K) float32, in chunks of exactly `chunk_size` images; a list of B images at
        their own aspect ratio one by one.

        On a CPU one thread computes a chunk: products of another height, or shared by more threads, may round
        differently. With `low_latency` all threads share each chunk, which two threads finish 1.4 to 1.9 times as soon.
        Where that was seen to change no bit, they do so only if there are chunks for half of the threads at most: one
        chunk per thread finishes many images sooner.
        """
        threads, size = torch.get_num_threads(), self.chunk_size
        is_shared = threads == 1 or self.device != "cpu"
        if not self.preprocess.stacks:
            chunks: Sequence[Tensor | list[Tensor]] = [[from_numpy(np.ascontiguousarray(image))] for image in pixels]
        else:
            batch = from_numpy(np.ascontiguousarray(pixels))
            missing = -len(batch) % size
            whole = torch.cat([batch, batch.new_zeros(missing, *batch.shape[1:])]) if missing else batch
            chunks = torch.split(whole, size)
            if self.low_latency and not is_shared:
                is_shared = 2 * len(chunks) <= threads or not self.has_thread_invariant_outputs(size, threads)
        return self.forward_chunks(chunks, is_shared)[: len(pixels)].cpu().numpy()

    def forward_chunks(self, chunks: Iterable[Tensor | list[Tensor]], is_shared: bool) -> Tensor:
        """Compute chunks with all threads each, if `is_shared`, or with one thread each -> (B, K) float32."""
        pool = get_thread_pool(torch.get_num_threads()) if not is_shared else None
        return torch.cat(list((pool.map if pool else map)(self.forward_chunk, chunks)))

    def has_thread_invariant_outputs(self, size: int, threads: int) -> bool:
        """Whether one thread and all of them compute the same bits for a chunk of `size` images: measured on noise,
        once. The split of a product depends on its shape, not on its values."""
        if (size, threads) not in self.same_bits:
            pixels = from_numpy(self.preprocess.noise(size))
            (alone,) = get_thread_pool(threads).map(self.forward_chunk, [pixels])
            self.same_bits[size, threads] = torch.equal(alone, self.forward_chunk(pixels))
        return self.same_bits[size, threads]

    @torch.inference_mode()
    def forward_chunk(self, pixels: Tensor | list[Tensor]) -> Tensor:
        """(b, C, *image) uint8, or a list of b -> (b, K) float32 on the device, of a detector as `outputs` has it: one
        forward pass."""
        if self.packed is not None:
            return self.packed([self.to_input(image[None])[0] for image in pixels]).float()
        assert isinstance(pixels, Tensor)
        images = self.to_input(pixels)
        if self.captured is None:
            return self.forward(images)
        return self.captured.run(lambda own: {"outputs": self.forward(own["images"])}, {"images": images})["outputs"]

    def forward(self, images: Tensor) -> Tensor:
        """(b, C, *image) normalised -> (b, K) float32, of a detector as `outputs` has it."""
        outputs: Tensor | tuple[Tensor, ...] = self.model(images)
        return pack_outputs(outputs) if isinstance(outputs, tuple) else outputs.float()

    def to_input(self, pixels: Tensor) -> Tensor:
        """(b, C, *image) uint8 -> the model's input, normalised, on the device."""
        return self.preprocess.normalise(pixels.to(self.device, non_blocking=True), self.input_dtype)


class OpenVinoEngine(ModelEngine):
    """OpenVINO on the CPU. The options' precision is `auto` (bf16 where the processor has it), `fp32`, `bf16` or
    `int8`, calibrated on `pictures`.

    Graphs are cached (`inference.graph_cache`), unless `keep` is False. Raises ResourceError where OpenVINO is
    not installed, UsageError for int8 without pictures and for a model that OpenVINO cannot convert or compute here.
    """

    name = "openvino"

    def __init__(
        self,
        model: Model,
        preprocess: Preprocess,
        options: InferenceOptions | None = None,
        pictures: CalibrationImages | None = None,
        *,
        keep: bool = True,
    ) -> None:
        from vitreous.inference.openvino import compile_model

        options = options or InferenceOptions(engine="openvino")
        super().__init__(model, preprocess, pick_precision(options.precision, "cpu"), options)
        self.compiled = compile_model(model, preprocess, self.precision, pictures, keep)

    def __call__(self, pixels: Tensor) -> Tensor:
        """(B, C, *image) uint8 -> (B, K) float32 logits."""
        return from_numpy(np.asarray(self.compiled([pixels.numpy()])[0]).astype(np.float32))


def choose_input_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of images for a model frozen in `dtype`: convolutions stay float32."""
    return dtype if config.front == "patches" else torch.float32


def split_batch(images: int, most: int, threads: int) -> tuple[int, bool]:
    """Return the images of a chunk, at most `most`, and whether all threads work on each chunk together.

    Otherwise each thread computes chunks of its own, of even size, unless that left more than `MAX_IDLE_CORES` of them
    waiting.
    """
    rounds = math.ceil(images / (most * threads))  # chunks that each thread computes
    size = max(1, math.ceil(images / (rounds * threads)))
    busy = images / (size * threads * rounds)
    return (size, False) if threads > 1 and busy >= 1 - MAX_IDLE_CORES else (most, True)


def remove_head(model: Model) -> Model:
    """Return the model without a head, its weights shared: it outputs the head's input."""
    twin = copy(model)
    vars(twin)["_modules"] = {**vars(model)["_modules"], "head": nn.Identity()}
    twin.config = model.config.with_options(classes=0)
    return twin


def make_engine(
    model: Model, preprocess: Preprocess, how: InferenceOptions | None = None, pictures: CalibrationImages | None = None
) -> ModelEngine:
    """Return the engine of the options, for `auto` PyTorch's; int8 is calibrated on `pictures`.

    Raises UsageError for options that do not go together.
    """
    how = how or InferenceOptions()
    device = pick_device(how.device)
    if how.clip_views != SINGLE_VIEW:
        problem = f"--clip-views {how.clip_views} is for answers of models that name classes of clips"
        raise UsageError(problem, "leave it out")
    if how.merge_tokens < 0:
        raise UsageError(f"--merge-tokens must be at least 0, not {how.merge_tokens}")
    if how.engine == "compiled" and not device.startswith("cuda"):
        raise UsageError(f"--engine compiled is for GPUs, not for {device}", "use --engine torch")
    if how.engine == "openvino":
        if not preprocess.stacks:
            problem = "--engine openvino computes images of one size, not pictures at their own aspect"
            raise UsageError(problem, "leave it out")
        if model.config.finds_objects:
            hint = "export it, `vitreous export RUN --to openvino`, and name the file in the place of the run"
            raise UsageError("--engine openvino does not compute the detectors of runs", hint)
        if device != "cpu" or how.merge_tokens:
            problem = "--engine openvino computes on the CPU, and merges no tokens"
            raise UsageError(problem, "use --device cpu without --merge-tokens")
        return OpenVinoEngine(model, preprocess, how, pictures)
    if how.precision == "int8":
        raise UsageError("--precision int8 needs --engine openvino", "add it, or use bf16 or fp32")
    engine = TorchEngine(model, preprocess, device, how.precision, merge_tokens=how.merge_tokens)
    if how.engine == "compiled":
        compile_blocks(engine.model)
    engine.options = how
    return engine


def compute_split_logits(
    engine: ModelEngine,
    reader: EvalLoader,
    batch_size: int = ENGINE_CHUNK,
    on_images: Callable[[int], None] = lambda images: None,
) -> tuple[np.ndarray, dict[int, DataError]]:
    """Return (n, K) float32 logits of every image of a split, in order, and the images that could not be read.

    The engine always gets CHUNK images at a time, or as many clips as have so many views, whose logits are averaged:
    `batch_size` changes memory only. The row of an unreadable image is
    that of a black one. `on_images` gets the number of images of every step. An empty split gives (0, K).
    """
    rows: list[np.ndarray] = []
    bad: dict[int, DataError] = {}
    views = reader.views.count if reader.views else 1
    size = max(1, ENGINE_CHUNK // views)
    for samples, images in regroup_batches(reader.batches(max(1, batch_size // views)), size):
        bad |= {s: image for s, image in zip(samples, images, strict=True) if isinstance(image, DataError)}
        rows.append(compute_chunk(engine, images, reader.views))
        on_images(len(images))
    return np.concatenate(rows) if rows else compute_chunk(engine, [DataError("no image")])[:0], bad


def compute_chunk(engine: ModelEngine, images: list[Tensor | DataError], views: ClipViews | None = None) -> np.ndarray:
    """Return (n, K) float32 logits of images (C, *image) uint8, or of clips with `views` (V, C, *image) their means; an
    unreadable one is taken to be black."""
    p = engine.preprocess
    blank = p.blank()
    if views is not None:
        blank = blank.expand(views.count, *blank.shape)
    pixels = [blank if isinstance(image, DataError) else image for image in images]
    if views is not None:
        return views.mean(lambda parts: engine(from_numpy(parts)).numpy())(torch.stack(pixels).numpy())
    return engine(p.collate(pixels)).numpy()


def regroup_batches(
    batches: Iterable[tuple[Tensor, list[Tensor | DataError]]], size: int
) -> Iterator[tuple[list[int], list[Tensor | DataError]]]:
    """Regroup batches of any size, (b,) samples and images, into batches of `size`, the last one shorter."""
    samples: list[int] = []
    images: list[Tensor | DataError] = []
    for more_samples, more_images in batches:
        samples, images = samples + more_samples.numpy().tolist(), images + more_images
        while len(images) >= size:
            yield samples[:size], images[:size]
            samples, images = samples[size:], images[size:]
    if images:
        yield samples, images


def build_readable_mask(count: int, bad: Iterable[int]) -> np.ndarray:
    """Return (count,) bool: the positions that are not in `bad`."""
    mask = np.ones(count, dtype=bool)
    mask[list(bad)] = False
    return mask
