"""Prediction steps of other libraries, from image files to classes and probabilities."""
# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vitreous.apps.bench.peers.models import build_timm_model, build_transformers_model
from vitreous.apps.bench.work import BenchmarkStep, Workload
from vitreous.data.layouts.folder import list_images
from vitreous.system.cores import default_worker_count
from vitreous.system.machine import has_bf16


class ImageFileDataset(torch.utils.data.Dataset):
    """A dataset of image files with a transform."""

    def __init__(self, files: list[Path], transform: Any) -> None:
        self.files, self.transform = files, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        from PIL import Image

        with Image.open(self.files[index]) as image:
            return self.transform(image.convert("RGB"))


def build_timm_predict_step(workload: Workload, best: bool = False, compiled: bool = False) -> BenchmarkStep:
    """Build a prediction step, image files to the top 5 classes, with timm's model, its transform and a DataLoader, as
    in timm's `inference.py`.

    By default it uses batches of 16 and two workers. With `best`, it uses batches of 32, one worker per core, and
    bfloat16 if the device supports it.
    """
    from timm.data.transforms_factory import create_transform

    dtype = torch.bfloat16 if best and has_bf16(workload.device) else torch.float32
    model: Any = build_timm_model(workload).eval().requires_grad_(False).to(workload.device, dtype)
    if compiled:
        import torch._inductor.config as inductor

        inductor.freezing = True
        model = torch.compile(model, dynamic=True)
    files = list_images(Path(workload.images or "."))
    dataset = ImageFileDataset(
        files, create_transform((3, workload.image_size, workload.image_size), interpolation="bicubic", crop_pct=0.9)
    )
    workers = default_worker_count() if best else 2
    loader = torch.utils.data.DataLoader(dataset, 32 if best else 16, num_workers=workers, persistent_workers=True)

    @torch.inference_mode(not compiled)
    @torch.no_grad()
    def run_step() -> float:
        """Predict all files; return their number."""
        predictions = []
        for images in loader:
            best_classes = model(images.to(workload.device, dtype)).float().softmax(-1).topk(5)
            predictions += zip(best_classes.indices.tolist(), best_classes.values.tolist(), strict=True)
        return len(predictions)

    return run_step


def build_transformers_predict_step(workload: Workload, best: bool = False) -> BenchmarkStep:
    """Build a prediction step, image files to the top 5 classes, with the transformers pipeline and its fast
    (torchvision) processor.

    By default it uses the pipeline's default settings. With `best`, it uses batches of 8 that workers load, and
    bfloat16 if the device supports it.
    """
    from transformers import ViTImageProcessor, pipeline

    size = {"height": workload.image_size, "width": workload.image_size}
    build_pipeline: Any = pipeline
    options: dict[str, Any] = {"dtype": torch.bfloat16 if has_bf16(workload.device) else torch.float32} if best else {}
    model, processor = build_transformers_model(workload).eval(), ViTImageProcessor(size=size)
    pipe = build_pipeline(
        "image-classification", model=model, image_processor=processor, device=workload.device, **options
    )
    loader_options = {"batch_size": 8, "num_workers": default_worker_count()} if best else {}
    files = [str(file) for file in list_images(Path(workload.images or "."))]

    def run_step() -> float:
        """Predict all files; return their number."""
        return len(pipe(files, top_k=5, **loader_options))

    return run_step
