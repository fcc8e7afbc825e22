"""The table of contenders by task."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from vitreous.apps.bench import generating as our_generating
from vitreous.apps.bench import ours
from vitreous.apps.bench.peers import generating, loaders, models, pictures, pretraining
from vitreous.apps.bench.pretraining import pretrain
from vitreous.apps.bench.work import DECODING, Contender, Turn, Work
from vitreous.system.machine import has_bf16
from vitreous.training.throughput import fastest

TASKS = ("inference", "train", "mae", "dino", "dit", "sample", "loader", "memory", "predict")
SIDE = {"cpu": 2048, "cuda": 8192}  # of the matrices whose product is the peak


def contenders(task: str, device: str) -> list[Contender]:
    """Return who does a task on a device, ours first, without settings that the device has no hardware for."""
    half = has_bf16(device)
    table = {
        "inference": inference,
        "train": train,
        "mae": mae,
        "dino": dino,
        "dit": dit,
        "sample": sample,
        "loader": loader,
        "memory": memory,
        "predict": predict,
    }
    return [c for c in table[task](device) if half or "bf16" not in c.settings]


def limits(task: str, device: str) -> list[Contender]:
    """Return what bounds a task, which takes part in its races: products, or the decoder alone."""
    if task == "loader":
        return [Contender("limit", DECODING, ours.decoding)]
    if task == "memory":
        return []
    kinds = ["fp32", "bf16"] if has_bf16(device) else ["fp32"]
    return [Contender("peak", kind, partial(peak, precision=kind)) for kind in kinds]


def peak(work: Work, precision: str) -> Turn:
    """Return turns that multiply square matrices the fastest way and count operations, two for a multiply-add."""
    run, operations = fastest(work.device, precision, SIDE.get(work.device.split(":")[0], 2048))

    @torch.inference_mode()
    def turn() -> float:
        run()
        return operations

    return turn


def own(settings: str, build: Callable[..., Turn], **options: object) -> Contender:
    """Return a contender of ours."""
    return Contender("vitreous", settings, partial(build, **options), ours=True)


def peer(name: str, settings: str, build: Callable[..., Turn], needs: str = "", **options: object) -> Contender:
    """Return another library as a contender; it needs the package of its name, or `needs`."""
    return Contender(name, settings, partial(build, **options), needs or name)


def inference(device: str) -> list[Contender]:
    """Images to logits."""
    table = [
        own("default", ours.inference),
        own("--engine torch", ours.inference, engine="torch"),
        own("fp32", ours.inference, precision="fp32"),
        peer("timm", "default (fp32)", models.inference, peer="timm"),
        peer("timm", "bf16", models.inference, peer="timm", precision="bf16"),
        peer("timm", "best: bf16, compiled", models.inference, peer="timm", precision="bf16", compiled=True),
        peer("transformers", "default (fp32)", models.inference, peer="transformers"),
        peer("torchvision", "default (fp32)", models.inference, peer="torchvision"),
    ]
    if device == "cpu":
        int8 = partial(ours.inference, engine="openvino", precision="int8")
        openvino = partial(ours.inference, engine="openvino")
        table += [
            Contender("vitreous", "--engine openvino", openvino, "openvino", ours=True),
            Contender("vitreous", "--engine openvino --precision int8", int8, "nncf", ours=True),
            peer("onnxruntime", "fp32, by hand", models.onnxruntime, "onnxscript"),
            peer("onnxruntime", "int8 dynamic, by hand", models.onnxruntime, "onnxscript", quantised=True),
            peer("openvino", "fp32, by hand", models.openvino, precision="fp32"),
            peer("openvino", "bf16, by hand", models.openvino, precision="bf16"),
            peer("openvino", "int8, by hand", models.openvino, "nncf", precision="int8"),
        ]
    return table


def train(device: str) -> list[Contender]:
    """A training step."""
    return [
        own("default", ours.train),
        own("fp32", ours.train, precision="fp32"),
        peer("timm", "default (fp32)", models.train),
        peer("timm", "bf16 autocast, fused AdamW", models.train, precision="bf16"),
        peer("timm", "best: bf16 autocast, compiled", models.train, precision="bf16", compiled=True),
        peer("timm", "fp32, compiled", models.train, compiled=True),
    ]


def mae(device: str) -> list[Contender]:
    """A step of masked autoencoding."""
    return [
        own("default", pretrain),
        own("fp32", pretrain, precision="fp32"),
        peer("transformers", "default (fp32)", pretraining.mae),
        peer("transformers", "bf16 autocast, fused AdamW", pretraining.mae, precision="bf16"),
        peer("transformers", "best: bf16 autocast, compiled", pretraining.mae, precision="bf16", compiled=True),
        peer("transformers", "fp32, compiled", pretraining.mae, compiled=True),
    ]


def dino(device: str) -> list[Contender]:
    """A step of DINO, two global and eight local views an image."""
    return [
        own("default", pretrain),
        own("fp32", pretrain, precision="fp32"),
        peer("lightly", "default (fp32), a view at a time", pretraining.dino),
        peer("lightly", "fp32, views of a size together", pretraining.dino, together=True),
        peer("lightly", "best: bf16 autocast, together, fused", pretraining.dino, together=True, precision="bf16"),
    ]


def dit(device: str) -> list[Contender]:
    """A training step of a DiT."""
    return [own("default", our_generating.train), own("fp32", our_generating.train, precision="fp32")] + [
        peer("diffusers", "default (fp32)", generating.train),
        peer("diffusers", "bf16 autocast, fused AdamW", generating.train, precision="bf16"),
        peer("diffusers", "best: bf16 autocast, compiled", generating.train, precision="bf16", compiled=True),
    ]


def sample(device: str) -> list[Contender]:
    """Images of a DiT."""
    return [own("default", our_generating.sample), own("fp32", our_generating.sample, precision="fp32")] + [
        peer("diffusers", "default (fp32)", generating.sample),
        peer("diffusers", "bf16 autocast", generating.sample, precision="bf16"),
        peer("diffusers", "best: bf16 autocast, compiled", generating.sample, precision="bf16", compiled=True),
    ]


def loader(device: str) -> list[Contender]:
    """Photographs to training batches: from files, and where ours says so from a pack that was made of them before."""
    table = [
        own("default", ours.loader),
        own("--exact", ours.loader, exact=True),
        own("packed JPEG, short side 256", ours.loader, form="tar"),
        own("packed uint8, short side 256", ours.loader, form="uint8"),
    ]
    for name in ("torchvision", "timm", "webdataset", "datasets"):
        build = getattr(loaders, name)
        table += [peer(name, "default", build), peer(name, "best", build, best=True)]
    return table


def memory(device: str) -> list[Contender]:
    """Small pictures in memory to training batches."""
    peers = [peer("torchvision", "default", loaders.memory), peer("torchvision", "best", loaders.memory, best=True)]
    return [own("default", ours.memory), *peers]


def predict(device: str) -> list[Contender]:
    """Files to classes and probabilities, by what each library has for it: by default, and at the best settings."""
    return [
        own("default", ours.predict),
        own("--exact", ours.predict, exact=True),
        peer("transformers", "default (pipeline)", pictures.transformers),
        peer("transformers", "best: batches of 8, workers", pictures.transformers, best=True),
        peer("timm", "default script with a DataLoader", pictures.timm),
        peer("timm", "best: batches of 32, a worker a core", pictures.timm, best=True),
        peer("timm", "best, compiled", pictures.timm, best=True, compiled=True),
    ]
