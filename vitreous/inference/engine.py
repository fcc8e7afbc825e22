"""Inference engines: they compute float32 logits of uint8 pixels, as fast as the hardware allows.

On a CPU the weights are cast and packed once (`nn.frozen`), and a batch is split into cache-sized chunks, one thread
each, which is more efficient than all cores sharing each matrix product. On a GPU the batch is computed at once, and as
a CUDA graph from the fourth batch of the same shape.

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
    has_fast_packed_matmul,
    pick_device,
    pick_precision,
)
from vitreous.system.torch_types import from_numpy

# tokens per chunk: more do not fit in the caches, fewer leave cores idle; with AMX tiles, matrix products are bound by
# loading weights, which a chunk does once
CHUNK_TOKENS, AMX_CHUNK_TOKENS = 1600, 3200
MAX_IDLE_CORES = 0.1  # largest share of idle cores before all cores share each chunk
# tokens per fixed-size chunk if one thread computes a chunk, and if all threads share it (`low_latency`)
FIXED_CHUNK_TOKENS, LATENCY_CHUNK_TOKENS = 800, 200
DEVICE_CHUNK = 32  # images per fixed-size chunk on a GPU
LIBRARY_CHUNK = 4  # images per fixed-size chunk of OpenVINO
ENGINE_CHUNK = 64  # images per engine call of `compute_split_logits`

#: (B, C, *image), or images at their native aspect ratio, each (C, height, width)
Pixels = np.ndarray | list[np.ndarray]


class Engine(Protocol):
    """Computes a model's outputs from the weights of a run (`ModelEngine`) or an exported file (`inference.exported`).

    Pixels are stacked arrays of `Preprocess.to_array`. Outputs are bit-identical regardless of batch composition.
    """

    name: str  # name of the library
    precision: str  # compute precision: `fp32`, `bf16` or `int8`

    def logits(self, pixels: Any) -> np.ndarray:
        """Compute (B, K) float32 logits of (B, C, *image) pixels."""
        ...

    def features(self, pixels: Any) -> np.ndarray:
        """Compute (B, D) float32 features, the head's input, of (B, C, *image) pixels. Raises UsageError for a model
        without features."""
        ...

    def objects(self, pixels: np.ndarray) -> Outputs:
        """Compute boxes, scores, labels and masks of a detector, `Outputs`, from (B, C, *image) pixels."""
        ...


class ModelEngine:
    """A model with its preprocessing; each subclass computes it with one library.

    Calling the engine is fastest, for evaluation, but the last bits of an output may depend on the rest of the batch.
    `logits`, `features` and `objects` compute fixed-size chunks instead, the last one padded with black images. With
    `low_latency`, chunks are small and shared by all threads: single images are faster, large jobs slower.

    `options`: inference options that create this engine again. `note`: why it was chosen, "" if there was no choice.
    """

    name: str
    note = ""
    low_latency = False

    def __init__(self, model: Model, preprocess: Preprocess, precision: str, options: InferenceOptions) -> None:
        self.original, self.preprocess, self.precision, self.options = model, preprocess, precision, options

    def __call__(self, pixels: Any) -> Tensor:
        """Compute (B, K) float32 logits on the CPU from (B, C, *image) uint8 pixels; a detector's outputs are packed
        (`pack_outputs`). Images at their native aspect ratio are a list of B, each (C, height, width)."""
        raise NotImplementedError

    @property
    def chunk_size(self) -> int:
        """Number of images per fixed-size chunk."""
        return 1 if self.low_latency else LIBRARY_CHUNK

    def logits(self, pixels: Pixels) -> np.ndarray:
        """Compute (B, K) float32 logits of (B, C, *image) pixels."""
        assert isinstance(pixels, np.ndarray), "only the PyTorch engine supports images of different sizes"
        return compute_in_chunks(lambda chunk: self(from_numpy(chunk)).numpy(), pixels, self.chunk_size)

    def features(self, pixels: Pixels) -> np.ndarray:
        """Compute (B, D) float32 features, the head's input, from (B, C, *image) pixels."""
        return self.feature_engine.logits(pixels)

    def objects(self, pixels: np.ndarray) -> Outputs:
        """Compute boxes, scores, labels and masks of a detector, `Outputs`, from (B, C, *image) pixels."""
        return unpack_outputs(self.logits(pixels))

    @cached_property
    def feature_engine(self) -> ModelEngine:
        """The engine of the model without its head; for segmentation and detection models, of the backbone."""
        body = self.original.backbone if self.original.config.backbone else remove_head(self.original)
        engine = make_engine(body, self.preprocess, self.options)
        engine.low_latency = self.low_latency
        return engine


class TorchEngine(ModelEngine):
    """The PyTorch engine.

    `precision` is `auto` (bf16 if supported), `fp32` or `bf16`. Each block merges `merge_tokens` similar tokens. Images
    at their native aspect ratio are packed into token sequences (`models.packed`). Raises UsageError for a model that
    does not support merged tokens or native aspect ratios.

    On a CPU, one thread computes a fixed-size chunk of about 800 tokens (four images of ViT-S/16). Smaller chunks do
    not amortise the packing of weights for each product, larger ones are not faster. On two cores of an EPYC with AVX2,
    ViT-S/16 reached 98 % of its peak of 13.7 images/s in chunks of four, 92 % in chunks of two and 80 % in chunks of
    one. The latency of a single image was 560, 320 and 170 ms.
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
        configure_process()  # before weights are packed
        options = InferenceOptions(device, precision, "torch", merge_tokens)
        super().__init__(model, preprocess, pick_precision(precision, device), options)
        self.device, self.dtype = device, DTYPES[self.precision]
        self.model = freeze_for_inference(model.to(device), self.dtype, has_fast_packed_matmul(device))
        self.packed = None if preprocess.stacks else PackedViT(self.model)  # raises UsageError for other models
        if merge_tokens:
            if self.packed is not None:
                problem = "--merge-tokens does not support images at their native aspect ratio"
                raise UsageError(problem, "leave --merge-tokens or --native-aspect out")
            if not model.config.merges_tokens:
                problem = "--merge-tokens needs a plain ViT without attention pooling"
                raise UsageError(problem, "leave --merge-tokens out")
            mean = model.config.pool == "mean"
            encoder = self.model.encoder
            assert isinstance(encoder, Encoder)
            self.model.encoder = TokenMergingEncoder(encoder, merge_tokens, model.config.prefix, mean)
        self.input_dtype = choose_input_dtype(model.config, self.dtype)
        use_amx = self.dtype == torch.bfloat16 and get_cpu_features().get("amx_bf16", False)
        self.chunk_tokens = AMX_CHUNK_TOKENS if use_amx else CHUNK_TOKENS
        self.same_bits: dict[tuple[int, int], bool] = {}
        has_fixed_shape = self.packed is None and not model.config.finds_objects and not merge_tokens
        self.graph_runner = CudaGraphRunner(device) if has_fixed_shape and uses_cuda_graphs(device) else None
        self.tokens = preprocess.count_tokens(model.config.grid) + model.config.prefix

    def __call__(self, pixels: Tensor | list[Tensor]) -> Tensor:
        """Compute (B, K) float32 logits on the CPU from (B, C, *image) uint8 pixels, or from a list of B images at
        their native aspect ratio."""
        if self.device != "cpu":
            return self.forward_chunk(pixels).cpu()
        threads = torch.get_num_threads()
        size, is_shared = split_batch(len(pixels), max(1, round(self.chunk_tokens / self.tokens)), threads)
        chunks = [pixels[start : start + size] for start in range(0, len(pixels), size)]
        return self.forward_chunks(chunks, is_shared)

    @property
    def chunk_size(self) -> int:
        """Number of images per fixed-size chunk: from the number of tokens on a CPU, constant on a GPU."""
        if self.device != "cpu":
            return DEVICE_CHUNK
        return max(1, min(64, round((LATENCY_CHUNK_TOKENS if self.low_latency else FIXED_CHUNK_TOKENS) / self.tokens)))

    def logits(self, pixels: Pixels) -> np.ndarray:
        """Compute (B, K) float32 logits of (B, C, *image) pixels in chunks of exactly `chunk_size` images; a list of B
        images at their native aspect ratio is computed one by one.

        On a CPU one thread computes a chunk: matrix products of another height, or split over more threads, may round
        differently. With `low_latency` all threads share each chunk, which is 1.4-1.9x faster with two threads. If
        outputs do not depend on the number of threads, threads share chunks only if there are at most half as many
        chunks as threads; otherwise one chunk per thread has the higher throughput.
        """
        threads, size = torch.get_num_threads(), self.chunk_size
        is_shared = threads == 1 or self.device != "cpu"
        if not self.preprocess.stacks:
            chunks: Sequence[Tensor | list[Tensor]] = [[from_numpy(np.ascontiguousarray(image))] for image in pixels]
        else:
            batch = from_numpy(np.ascontiguousarray(pixels))
            missing = -len(batch) % size
            padded = torch.cat([batch, batch.new_zeros(missing, *batch.shape[1:])]) if missing else batch
            chunks = torch.split(padded, size)
            if self.low_latency and not is_shared:
                is_shared = 2 * len(chunks) <= threads or not self.has_thread_invariant_outputs(size, threads)
        return self.forward_chunks(chunks, is_shared)[: len(pixels)].cpu().numpy()

    def forward_chunks(self, chunks: Iterable[Tensor | list[Tensor]], use_all_threads: bool) -> Tensor:
        """Compute (B, K) float32 outputs of chunks of images. With `use_all_threads`, chunks are computed one after
        another, each by all threads; otherwise in parallel, one thread per chunk."""
        pool = get_thread_pool(torch.get_num_threads()) if not use_all_threads else None
        return torch.cat(list((pool.map if pool else map)(self.forward_chunk, chunks)))

    def has_thread_invariant_outputs(self, size: int, threads: int) -> bool:
        """Return whether one thread and all threads give bit-identical outputs for a chunk of `size` images. Measured
        once per size, on noise: the split of a matrix product depends on its shape, not on its values."""
        if (size, threads) not in self.same_bits:
            pixels = from_numpy(self.preprocess.noise(size))
            (single_thread,) = get_thread_pool(threads).map(self.forward_chunk, [pixels])
            self.same_bits[size, threads] = torch.equal(single_thread, self.forward_chunk(pixels))
        return self.same_bits[size, threads]

    @torch.inference_mode()
    def forward_chunk(self, pixels: Tensor | list[Tensor]) -> Tensor:
        """Compute one forward pass of (b, C, *image) uint8 pixels, or a list of b images: (b, K) float32 on the device.
        A detector's outputs are packed (`pack_outputs`)."""
        if self.packed is not None:
            return self.packed([self.to_input(image[None])[0] for image in pixels]).float()
        assert isinstance(pixels, Tensor)
        images = self.to_input(pixels)
        if self.graph_runner is None:
            return self.forward(images)
        return self.graph_runner.run(lambda inputs: {"outputs": self.forward(inputs["images"])}, {"images": images})[
            "outputs"
        ]

    def forward(self, images: Tensor) -> Tensor:
        """Compute (b, K) float32 outputs of (b, C, *image) normalised images; a detector's outputs are packed."""
        outputs: Tensor | tuple[Tensor, ...] = self.model(images)
        return pack_outputs(outputs) if isinstance(outputs, tuple) else outputs.float()

    def to_input(self, pixels: Tensor) -> Tensor:
        """Convert (b, C, *image) uint8 pixels to the model's normalised input on the device."""
        return self.preprocess.normalise(pixels.to(self.device, non_blocking=True), self.input_dtype)


class OpenVinoEngine(ModelEngine):
    """The OpenVINO engine on the CPU.

    `options.precision` is `auto` (bf16 if supported), `fp32`, `bf16` or `int8`, which is calibrated on
    `calibration_images`. Graphs are cached (`inference.graph_cache`), unless `keep` is False. Raises ResourceError if
    OpenVINO is not installed, UsageError for int8 without calibration images and for a model that OpenVINO cannot
    convert or run.
    """

    name = "openvino"

    def __init__(
        self,
        model: Model,
        preprocess: Preprocess,
        options: InferenceOptions | None = None,
        calibration_images: CalibrationImages | None = None,
        *,
        keep: bool = True,
    ) -> None:
        from vitreous.inference.openvino import compile_model

        options = options or InferenceOptions(engine="openvino")
        super().__init__(model, preprocess, pick_precision(options.precision, "cpu"), options)
        self.compiled = compile_model(model, preprocess, self.precision, calibration_images, keep)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Compute (B, K) float32 logits of (B, C, *image) uint8 pixels."""
        return from_numpy(np.asarray(self.compiled([pixels.numpy()])[0]).astype(np.float32))


def choose_input_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the images for a model whose weights are frozen in `dtype`: float32 if its first layer is a
    convolution."""
    return dtype if config.front == "patches" else torch.float32


def split_batch(num_images: int, max_size: int, threads: int) -> tuple[int, bool]:
    """Choose how to split a batch: the number of images per chunk, at most `max_size`, and whether all threads share
    each chunk. Otherwise each thread computes separate chunks of even size, unless that would leave more than
    `MAX_IDLE_CORES` of the cores idle."""
    rounds = math.ceil(num_images / (max_size * threads))  # chunks per thread
    size = max(1, math.ceil(num_images / (rounds * threads)))
    busy_share = num_images / (size * threads * rounds)
    return (size, False) if threads > 1 and busy_share >= 1 - MAX_IDLE_CORES else (max_size, True)


def remove_head(model: Model) -> Model:
    """Return a copy of the model without its head: it outputs the head's input, and shares the weights."""
    headless = copy(model)
    vars(headless)["_modules"] = {**vars(model)["_modules"], "head": nn.Identity()}
    headless.config = model.config.with_options(classes=0) if model.config.classes else model.config
    return headless


def make_engine(
    model: Model,
    preprocess: Preprocess,
    how: InferenceOptions | None = None,
    calibration_images: CalibrationImages | None = None,
) -> ModelEngine:
    """Create the engine that the options `how` select; `auto` selects PyTorch. int8 is calibrated on
    `calibration_images`. Raises UsageError for incompatible options."""
    how = how or InferenceOptions()
    device = pick_device(how.device)
    if how.clip_views != SINGLE_VIEW:
        problem = f"--clip-views {how.clip_views} is only for predictions and embeddings of video models"
        raise UsageError(problem, "leave --clip-views out")
    if how.merge_tokens < 0:
        raise UsageError(f"--merge-tokens must be at least 0, not {how.merge_tokens}", "use 0 to merge no tokens")
    if how.engine == "compiled" and not device.startswith("cuda"):
        raise UsageError(f"--engine compiled needs a GPU, not {device}", "use --engine torch")
    if how.engine == "openvino":
        if not preprocess.stacks:
            problem = "--engine openvino does not support images at their native aspect ratio"
            raise UsageError(problem, "use --engine torch, or leave --native-aspect out")
        if model.config.finds_objects:
            hint = "export it with `vitreous export RUN --to openvino`, and use the file instead of the run"
            raise UsageError("--engine openvino does not support detectors from runs", hint)
        if device != "cpu" or how.merge_tokens:
            problem = "--engine openvino runs on the CPU only, without --merge-tokens"
            raise UsageError(problem, "use --device cpu without --merge-tokens")
        return OpenVinoEngine(model, preprocess, how, calibration_images)
    if how.precision == "int8":
        raise UsageError("--precision int8 needs --engine openvino", "add --engine openvino, or use bf16 or fp32")
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
    """Compute (n, K) float32 logits of every image of a split, in order; also return read errors by image index.

    The engine always gets `ENGINE_CHUNK` images, or clips with that many views in total, whose logits are averaged:
    `batch_size` only changes memory use. An unreadable image gets the logits of a black one. `on_images` is called with
    the number of images of every step. An empty split returns (0, K).
    """
    logit_chunks: list[np.ndarray] = []
    read_errors: dict[int, DataError] = {}
    views = reader.views.count if reader.views else 1
    size = max(1, ENGINE_CHUNK // views)
    for samples, images in regroup_batches(reader.iterate_batches(max(1, batch_size // views)), size):
        read_errors |= {s: image for s, image in zip(samples, images, strict=True) if isinstance(image, DataError)}
        logit_chunks.append(compute_chunk(engine, images, reader.views))
        on_images(len(images))
    return np.concatenate(logit_chunks) if logit_chunks else compute_chunk(engine, [DataError("no image")])[
        :0
    ], read_errors


def compute_chunk(engine: ModelEngine, images: list[Tensor | DataError], views: ClipViews | None = None) -> np.ndarray:
    """Compute (n, K) float32 logits of images (C, *image) uint8; unreadable images are replaced by black ones. With
    `views`, each image is a clip (V, C, *image), and logits are means over its views."""
    preprocess = engine.preprocess
    blank = preprocess.blank()
    if views is not None:
        blank = blank.expand(views.count, *blank.shape)
    pixels = [blank if isinstance(image, DataError) else image for image in images]
    if views is not None:
        return views.average_over_views(lambda chunk: engine(from_numpy(chunk)).numpy())(torch.stack(pixels).numpy())
    return engine(preprocess.collate(pixels)).numpy()


def regroup_batches(
    batches: Iterable[tuple[Tensor, list[Tensor | DataError]]], size: int
) -> Iterator[tuple[list[int], list[Tensor | DataError]]]:
    """Regroup batches of any size, (b,) sample indices and images, into batches of `size`; the last may be smaller."""
    samples: list[int] = []
    images: list[Tensor | DataError] = []
    for more_samples, more_images in batches:
        samples, images = samples + more_samples.numpy().tolist(), images + more_images
        while len(images) >= size:
            yield samples[:size], images[:size]
            samples, images = samples[size:], images[size:]
    if images:
        yield samples, images


def build_readable_mask(count: int, unreadable: Iterable[int]) -> np.ndarray:
    """Build a mask (count,) bool that is False at the indices in `unreadable`."""
    mask = np.ones(count, dtype=bool)
    mask[list(unreadable)] = False
    return mask
