"""vitreous at work, as its verbs do it."""

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

from vitreous.apps.bench.work import CIFAR, Answering, Turn, Work
from vitreous.data.augmentation.augment import Augment
from vitreous.data.decoding.decode import decode, read_regular
from vitreous.data.decoding.regions import decoder, layout
from vitreous.data.layouts.folder import list_images
from vitreous.data.loader import TrainLoader
from vitreous.data.modalities.base import IMAGENET, Preprocess
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.split import Arrays, Files, Split
from vitreous.inference.engine import InferenceOptions, ModelEngine, OpenVinoEngine, Precision, make_engine
from vitreous.inference.predict import load
from vitreous.models.zoo import Model, create
from vitreous.nn.cuda_graphs import CapturedPasses
from vitreous.nn.encoder import compile_blocks
from vitreous.objectives.supervised import Supervised
from vitreous.system.cores import default_workers
from vitreous.system.machine import DTYPES, pick_precision, settle_process
from vitreous.tasks.classification import Classification
from vitreous.training.flat import Flat
from vitreous.training.optimizer import Optimizers
from vitreous.training.run import Optimizer
from vitreous.training.shards import Shards, default_shards
from vitreous.weights.bundle import Bundle

CLASSES = 1000


def answering(work: Work) -> tuple[Model, Preprocess]:
    """Return a model with random weights whose answers differ, and its preprocessing."""
    torch.manual_seed(0)
    model = create(work.model, work.image_size, CLASSES)
    nn.init.normal_(model.head.weight, std=0.02)
    return model, ImagePreprocess((work.image_size, work.image_size), share=0.9)


def noise(work: Work, count: int, seed: int) -> Tensor:
    """Return (count, 3, image size, image size) uint8 noise."""
    size = (count, 3, work.image_size, work.image_size)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def run_engine(engine: ModelEngine, pixels: np.ndarray) -> np.ndarray:
    """Return the (B, K) float32 logits of an engine for (B, C, *image) uint8 pixels."""
    return engine(torch.from_numpy(pixels)).numpy()


def inference(
    work: Work, precision: Precision = "auto", engine: Literal["auto", "torch", "compiled", "openvino"] = "auto"
) -> Turn:
    """Bytes to logits; both options auto: the engine that a server of such batches chooses. int8 is calibrated anew, on
    other images."""
    pixels = noise(work, work.batch_size, 0)
    if engine == "auto" and precision == "auto":
        from vitreous.inference.engine_choice import choose_engine

        how = InferenceOptions(work.device)
        computing = choose_engine(*answering(work), how, run_engine, work.batch_size, math.inf)
    elif engine == "openvino":
        options = InferenceOptions("cpu", precision, "openvino")
        computing = OpenVinoEngine(*answering(work), options, lambda: noise(work, 32, 1), keep=False)
    else:
        computing = make_engine(*answering(work), InferenceOptions(work.device, precision, engine))

    def turn() -> float:
        computing(pixels)
        return work.batch_size

    @torch.inference_mode()
    def exact() -> np.ndarray:
        model, preprocess = answering(work)
        return model.eval()(preprocess.normalise(pixels)).numpy()

    return Answering(turn, lambda: computing(pixels).numpy(), exact)


def train(
    work: Work, precision: str = "auto", shards: int | None = None, compiled: bool | None = None, graphs: bool = True
) -> Turn:
    """Forward, backward, clipping, AdamW: a step of the loop; on a GPU with `compiled` blocks and CUDA graphs, as
    `train` has it."""
    settle_process()
    torch.manual_seed(0)
    dtype, device = DTYPES[pick_precision(precision, work.device)], torch.device(work.device)
    objective = Supervised(create(work.model, work.image_size, CLASSES))
    flat = Flat(objective, dtype, device, shards=shards or default_shards(work.device, work.batch_size))
    if work.compiles if compiled is None else compiled:
        compile_blocks(objective)
    optimizers, compute = Optimizers(Optimizer(), flat), Shards(objective, flat)
    if work.compiles:
        compute.on_host = False
        compute.captured = CapturedPasses(device) if graphs else None
    images = torch.randn(work.batch_size, 3, work.image_size, work.image_size, device=device).to(dtype)
    batch = {"images": images, "labels": torch.randint(0, CLASSES, (work.batch_size,), device=device)}

    return step_turn(flat, compute, optimizers, batch, work.batch_size)


def step_turn(flat: Flat, compute: Shards, optimizers: Optimizers, batch: dict[str, Tensor], images: int) -> Turn:
    """Return turns that are training steps on one batch (B, ...) of so many images: forward, backward, clipping,
    optimiser, working copy."""

    def turn() -> float:
        flat.zero()
        compute.backward(batch, 1.0)
        flat.collect()
        flat.clip(1.0)
        optimizers.step(1.0)
        flat.sync(1)
        return images

    return turn


def predict(work: Work, precision: Precision = "auto", exact: bool = False) -> Turn:
    """Files to names and probabilities, the model already loaded."""
    files, (model, preprocess) = list_images(Path(work.images or ".")), answering(work)
    with tempfile.TemporaryDirectory() as scratch:
        Bundle(model, Classification(tuple(map(str, range(CLASSES)))), preprocess).save(Path(scratch) / "model")
        predictor = load(Path(scratch) / "model", InferenceOptions(work.device, precision), exact=exact)

    def turn() -> float:
        return len(predictor.predict(files))

    return turn


def loader(work: Work, exact: bool = False, form: Literal["tar", "uint8"] | None = None) -> Turn:
    """Photographs to augmented batches, random resized crop and flip, by as many processes as there are cores.

    `form`: from a pack of the photographs, made beforehand.
    """
    settle_process()
    split, keep = photographs(work, form)
    preprocess = ImagePreprocess((work.image_size, work.image_size), mean=IMAGENET[0], std=IMAGENET[1])
    feed = TrainLoader(
        split, preprocess, Augment(crop=(0.08, 1.0), flip=0.5), 0, workers=default_workers(), exact=exact
    )
    batches = feed.batches(0, 20_000 * work.batch_size, work.batch_size)

    def turn(keep_alive: object = keep) -> float:
        return len(preprocess.normalise(next(batches)["images"]))

    return turn


def photographs(work: Work, form: Literal["tar", "uint8"] | None) -> tuple[Split, object]:
    """Return the photographs of a race, as files or packed, and what must live as long."""
    files = list_images(Path(work.images or "."))
    split = Files(files, np.zeros(len(files), dtype=np.int64))
    if form is None:
        return split, None
    from vitreous.data.sources import open_data

    home = tempfile.TemporaryDirectory()
    for number, file in enumerate(files):
        place = Path(home.name) / "files" / "train" / str(number % 2)
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}{file.suffix}").symlink_to(file.resolve())
    (Path(home.name) / "files" / "val").symlink_to(Path(home.name) / "files" / "train")
    pack = [sys.executable, "-m", "vitreous", "data", "pack", f"{home.name}/files", "--out", f"{home.name}/pack"]
    subprocess.run([*pack, "--to", form], check=True, capture_output=True)
    return open_data(Path(home.name) / "pack").splits["train"], home


def decoding(work: Work) -> Turn:
    """JPEG bytes in memory to pixels on all cores, and nothing else: the limit of every loader."""
    files = [(content, shape_of(content)) for content in map(read_regular, list_images(Path(work.images or ".")))]
    pool, cores = ThreadPoolExecutor(default_workers()), default_workers()

    def pixels(file: tuple[bytes, tuple[int, int, int] | None]) -> None:
        content, shape = file
        _ = decode(content) if shape is None else decoder()(content, shape, 1)

    def turn() -> float:
        list(pool.map(pixels, files * cores))
        return len(files) * cores

    return turn


def shape_of(content: bytes) -> tuple[int, int, int] | None:
    """Return height, width and components of a plain JPEG; None for any other file."""
    with Image.open(io.BytesIO(content)) as image:
        header = layout(content)
        return None if header is None else (image.height, image.width, header.components)


def memory(work: Work) -> Turn:
    """Random pictures of CIFAR's number and size to shifted, mirrored and normalised batches."""
    settle_process()
    side = work.image_size
    pixels = torch.randint(0, 256, (CIFAR, 3, side, side), dtype=torch.uint8)
    split = Arrays(pixels.numpy(), np.zeros(CIFAR, dtype=np.int64))
    preprocess = ImagePreprocess((side, side), mean=IMAGENET[0], std=IMAGENET[1])
    feed = TrainLoader(split, preprocess, Augment(shift=0.125, border="zeros", flip=0.5), 0, cached=pixels)
    batches = feed.batches(0, 10**9, work.batch_size)

    def turn() -> float:
        return len(preprocess.normalise(next(batches)["images"]))

    return turn
