"""Benchmark steps that run vitreous as its commands do."""

from __future__ import annotations

import io
import math
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitreous.apps.bench.work import CIFAR_IMAGES, BenchmarkStep, LogitsStep, Workload
from vitreous.data.augmentation.augment import Augment
from vitreous.data.decoding.decode import decode_to_pillow, read_input_file
from vitreous.data.decoding.regions import get_jpeg_decoder, parse_jpeg_layout
from vitreous.data.layouts.folder import list_images
from vitreous.data.loader import TrainLoader
from vitreous.data.modalities.base import IMAGENET_MOMENTS, Preprocess
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.split import ArraySplit, FileSplit, Split
from vitreous.inference.engine import InferenceOptions, ModelEngine, OpenVinoEngine, Precision, make_engine
from vitreous.inference.predict import load
from vitreous.models.zoo import Model, create_untrained_model
from vitreous.nn.cuda_graphs import CudaGraphRunner
from vitreous.nn.encoder import compile_blocks
from vitreous.objectives.supervised import SupervisedObjective
from vitreous.system.cores import default_worker_count
from vitreous.system.machine import DTYPES, configure_process, pick_precision
from vitreous.tasks.classification import Classification
from vitreous.training.flat import FlatParameters
from vitreous.training.optimizer import FlatOptimizer
from vitreous.training.run import OptimizerConfig
from vitreous.training.shards import Shards, choose_shard_count
from vitreous.weights.bundle import Bundle

NUM_CLASSES = 1000


def build_random_classifier(workload: Workload) -> tuple[Model, Preprocess]:
    """Build the workload's classifier of `NUM_CLASSES` classes and its preprocessing. The weights of the head are
    random, too: a head that is initialised to 0 would return equal logits."""
    torch.manual_seed(0)
    model = create_untrained_model(workload.model, workload.image_size, NUM_CLASSES)
    nn.init.normal_(model.head.weight, std=0.02)
    return model, ImagePreprocess((workload.image_size, workload.image_size), share=0.9)


def make_noise_images(workload: Workload, count: int, seed: int) -> Tensor:
    """Return (count, 3, H, W) uint8 noise of the workload's image size."""
    size = (count, 3, workload.image_size, workload.image_size)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def compute_engine_logits(engine: ModelEngine, pixels: np.ndarray) -> np.ndarray:
    """Return the (B, K) float32 logits of an engine for (B, C, *image) uint8 pixels."""
    return engine(torch.from_numpy(pixels)).numpy()


def build_inference_step(
    workload: Workload, precision: Precision = "auto", engine: Literal["auto", "torch", "compiled", "openvino"] = "auto"
) -> BenchmarkStep:
    """Build an inference step, uint8 pixels to logits. If `precision` and `engine` are both `auto`, it uses the engine
    that `vitreous serve` would choose for this batch size. int8 is calibrated on other noise images."""
    pixels = make_noise_images(workload, workload.batch_size, 0)
    if engine == "auto" and precision == "auto":
        from vitreous.inference.engine_choice import choose_engine

        auto_options = InferenceOptions(workload.device)
        model_engine = choose_engine(
            *build_random_classifier(workload), auto_options, compute_engine_logits, workload.batch_size, math.inf
        )
    elif engine == "openvino":
        options = InferenceOptions("cpu", precision, "openvino")
        model_engine = OpenVinoEngine(
            *build_random_classifier(workload), options, lambda: make_noise_images(workload, 32, 1), keep=False
        )
    else:
        model_engine = make_engine(
            *build_random_classifier(workload), InferenceOptions(workload.device, precision, engine)
        )

    def run_step() -> float:
        """Compute the logits of the batch; return the number of images."""
        model_engine(pixels)
        return workload.batch_size

    @torch.inference_mode()
    def compute_reference_logits() -> np.ndarray:
        """Compute the (B, K) logits of the same pixels in float32 with PyTorch, without an engine."""
        model, preprocess = build_random_classifier(workload)
        return model.eval()(preprocess.normalise(pixels)).numpy()

    return LogitsStep(run_step, lambda: model_engine(pixels).numpy(), compute_reference_logits)


def build_train_step(
    workload: Workload,
    precision: str = "auto",
    shards: int | None = None,
    compiled: bool | None = None,
    graphs: bool = True,
) -> BenchmarkStep:
    """Build a training step: forward, backward, clipping, AdamW. On a GPU, it uses compiled blocks and CUDA graphs, as
    `vitreous train` does; `compiled` and `graphs` override this. `shards` None is the number of shards that `vitreous
    train` would choose."""
    configure_process()
    torch.manual_seed(0)
    dtype, device = DTYPES[pick_precision(precision, workload.device)], torch.device(workload.device)
    objective = SupervisedObjective(create_untrained_model(workload.model, workload.image_size, NUM_CLASSES))
    flat_parameters = FlatParameters(
        objective, dtype, device, shards=shards or choose_shard_count(workload.device, workload.batch_size)
    )
    if workload.uses_compile if compiled is None else compiled:
        compile_blocks(objective)
    optimizers, compute = FlatOptimizer(OptimizerConfig(), flat_parameters), Shards(objective, flat_parameters)
    if workload.uses_compile:
        compute.on_host = False
        compute.captured = CudaGraphRunner(device) if graphs else None
    images = torch.randn(workload.batch_size, 3, workload.image_size, workload.image_size, device=device).to(dtype)
    batch = {"images": images, "labels": torch.randint(0, NUM_CLASSES, (workload.batch_size,), device=device)}

    return make_batch_step(flat_parameters, compute, optimizers, batch, workload.batch_size)


def make_batch_step(
    flat_parameters: FlatParameters, compute: Shards, optimizers: FlatOptimizer, batch: dict[str, Tensor], images: int
) -> BenchmarkStep:
    """Return a step that trains on the same batch (B, ...) of `images` images: forward, backward, clipping, optimiser
    update, and update of the working copy of the weights."""

    def run_step() -> float:
        """Run one training step; return the number of images."""
        flat_parameters.zero_grad()
        compute.backward(batch, 1.0)
        flat_parameters.collect()
        flat_parameters.clip(1.0)
        optimizers.step(1.0)
        flat_parameters.sync(1)
        return images

    return run_step


def build_predict_step(workload: Workload, precision: Precision = "auto", exact: bool = False) -> BenchmarkStep:
    """Build a prediction step, image files to classes and probabilities. Loading the model is not measured."""
    files, (model, preprocess) = list_images(Path(workload.images or ".")), build_random_classifier(workload)
    with tempfile.TemporaryDirectory() as scratch:
        Bundle(model, Classification(tuple(map(str, range(NUM_CLASSES)))), preprocess).save(Path(scratch) / "model")
        predictor = load(Path(scratch) / "model", InferenceOptions(workload.device, precision), exact=exact)

    def run_step() -> float:
        """Predict all files; return their number."""
        return len(predictor.predict(files))

    return run_step


def build_loader_step(
    workload: Workload, exact: bool = False, form: Literal["tar", "uint8"] | None = None
) -> BenchmarkStep:
    """Build a loading step: photographs to augmented batches (random resized crop, flip), with one process per core.

    If `form` is set, the photographs are first packed by `vitreous data pack --to FORM`, which is not measured.
    """
    configure_process()
    split, scratch = open_photographs(workload, form)
    preprocess = ImagePreprocess(
        (workload.image_size, workload.image_size), mean=IMAGENET_MOMENTS[0], std=IMAGENET_MOMENTS[1]
    )
    loader = TrainLoader(
        split, preprocess, Augment(crop=(0.08, 1.0), flip=0.5), 0, workers=default_worker_count(), exact=exact
    )
    batches = loader.iterate_batches(0, 20_000 * workload.batch_size, workload.batch_size)

    def run_step(keep_alive: object = scratch) -> float:
        """Load and normalise the next batch; return its number of images. `keep_alive` keeps the files of a pack."""
        return len(preprocess.normalise(next(batches)["images"]))

    return run_step


def open_photographs(workload: Workload, form: Literal["tar", "uint8"] | None) -> tuple[Split, object]:
    """Open the workload's photographs as a split of files or, if `form` is set, of a temporary pack. Also return the
    pack's temporary folder (None for files), which the caller must keep alive as long as the split."""
    files = list_images(Path(workload.images or "."))
    split = FileSplit(files, np.zeros(len(files), dtype=np.int64))
    if form is None:
        return split, None
    from vitreous.data.sources import open_data

    scratch = tempfile.TemporaryDirectory()
    for index, file in enumerate(files):
        class_folder = Path(scratch.name) / "files" / "train" / str(index % 2)
        class_folder.mkdir(parents=True, exist_ok=True)
        (class_folder / f"{index}{file.suffix}").symlink_to(file.resolve())
    (Path(scratch.name) / "files" / "val").symlink_to(Path(scratch.name) / "files" / "train")
    pack_command = [
        sys.executable,
        "-m",
        "vitreous",
        "data",
        "pack",
        f"{scratch.name}/files",
        "--out",
        f"{scratch.name}/pack",
    ]
    subprocess.run([*pack_command, "--to", form], check=True, capture_output=True)
    return open_data(Path(scratch.name) / "pack").splits["train"], scratch


def build_decode_step(workload: Workload) -> BenchmarkStep:
    """Build a step that only decodes JPEG bytes in memory on all cores: the upper limit of any loader."""
    files = [
        (content, read_jpeg_shape(content))
        for content in map(read_input_file, list_images(Path(workload.images or ".")))
    ]
    pool, cores = ThreadPoolExecutor(default_worker_count()), default_worker_count()

    def decode_image(file: tuple[bytes, tuple[int, int, int] | None]) -> None:
        """Decode one file with the region decoder if it supports the shape, else with Pillow."""
        content, shape = file
        _ = decode_to_pillow(content) if shape is None else get_jpeg_decoder()(content, shape, 1)

    def run_step() -> float:
        """Decode all files as often as there are cores; return the number of images."""
        list(pool.map(decode_image, files * cores))
        return len(files) * cores

    return run_step


def read_jpeg_shape(content: bytes) -> tuple[int, int, int] | None:
    """Return (height, width, components) of a JPEG whose layout `parse_jpeg_layout` supports; None for any other
    file."""
    with Image.open(io.BytesIO(content)) as image:
        header = parse_jpeg_layout(content)
        return None if header is None else (image.height, image.width, header.components)


def build_memory_loader_step(workload: Workload) -> BenchmarkStep:
    """Build a loading step from images in memory: `CIFAR_IMAGES` random images to shifted, flipped, normalised
    batches."""
    configure_process()
    image_size = workload.image_size
    pixels = torch.randint(0, 256, (CIFAR_IMAGES, 3, image_size, image_size), dtype=torch.uint8)
    split = ArraySplit(pixels.numpy(), np.zeros(CIFAR_IMAGES, dtype=np.int64))
    preprocess = ImagePreprocess((image_size, image_size), mean=IMAGENET_MOMENTS[0], std=IMAGENET_MOMENTS[1])
    loader = TrainLoader(split, preprocess, Augment(shift=0.125, border="zeros", flip=0.5), 0, cached=pixels)
    batches = loader.iterate_batches(0, 10**9, workload.batch_size)

    def run_step() -> float:
        """Load and normalise the next batch; return its number of images."""
        return len(preprocess.normalise(next(batches)["images"]))

    return run_step
