"""The table of who does what."""

from __future__ import annotations

from functools import partial

from vitreous.bench import ours
from vitreous.bench.peak import peak
from vitreous.bench.peers import loaders, models, pictures
from vitreous.bench.work import DECODING, Contender
from vitreous.machine import has_bf16

TASKS = ("inference", "train", "loader", "memory", "predict")


def contenders(task: str, device: str) -> list[Contender]:
    """Who does a task on a device, ours first; settings that the device has no hardware for are left out."""
    half = has_bf16(device)
    table = {"inference": inference, "train": train, "loader": loader, "memory": memory, "predict": predict}
    return [c for c in table[task](device) if half or "bf16" not in c.settings]


def limits(task: str, device: str) -> list[Contender]:
    """What bounds a task, which takes part in its races: products, or the decoder alone."""
    if task == "loader":
        return [Contender("limit", DECODING, ours.decoding)]
    if task == "memory":
        return []
    kinds = ["fp32", "bf16"] if has_bf16(device) else ["fp32"]
    return [Contender("peak", kind, partial(peak, precision=kind)) for kind in kinds]


def inference(device: str) -> list[Contender]:
    """Images to logits."""
    table = [
        Contender("vitreous", "default", ours.inference, ours=True),
        Contender("vitreous", "fp32", partial(ours.inference, precision="fp32"), ours=True),
        Contender("timm", "default (fp32)", partial(models.inference, peer="timm"), "timm"),
        Contender("timm", "bf16", partial(models.inference, peer="timm", precision="bf16"), "timm"),
        Contender(
            "timm",
            "best: bf16, compiled",
            partial(models.inference, peer="timm", precision="bf16", compiled=True),
            "timm",
        ),
        Contender("transformers", "default (fp32)", partial(models.inference, peer="transformers"), "transformers"),
        Contender("torchvision", "default (fp32)", partial(models.inference, peer="torchvision"), "torchvision"),
    ]
    if device == "cpu":
        int8 = partial(ours.inference, engine="openvino", precision="int8")
        table += [
            Contender("vitreous", "--engine openvino --precision int8", int8, "nncf", True),
            Contender("onnxruntime", "fp32, by hand", models.onnxruntime, "onnxscript"),
            Contender(
                "onnxruntime", "int8 dynamic, by hand", partial(models.onnxruntime, quantised=True), "onnxscript"
            ),
            Contender("openvino", "fp32, by hand", partial(models.openvino, precision="fp32"), "openvino"),
            Contender("openvino", "bf16, by hand", partial(models.openvino, precision="bf16"), "openvino"),
            Contender("openvino", "int8, by hand", partial(models.openvino, precision="int8"), "nncf"),
        ]  # fmt: skip
    return table


def train(device: str) -> list[Contender]:
    """A training step."""
    return [
        Contender("vitreous", "default", ours.train, ours=True),
        Contender("vitreous", "fp32", partial(ours.train, precision="fp32"), ours=True),
        Contender("timm", "default (fp32)", models.train, "timm"),
        Contender("timm", "bf16 autocast, fused AdamW", partial(models.train, precision="bf16"), "timm"),
        Contender(
            "timm", "best: bf16 autocast, compiled", partial(models.train, precision="bf16", compiled=True), "timm"
        ),
        Contender("timm", "fp32, compiled", partial(models.train, compiled=True), "timm"),
    ]


def loader(device: str) -> list[Contender]:
    """Photographs to training batches: from files, and where ours says so from a pack that was made of them before."""
    table = [
        Contender("vitreous", "default", ours.loader, ours=True),
        Contender("vitreous", "--exact", partial(ours.loader, exact=True), ours=True),
        Contender("vitreous", "packed JPEG, short side 256", partial(ours.loader, form="tar"), ours=True),
        Contender("vitreous", "packed uint8, short side 256", partial(ours.loader, form="uint8"), ours=True),
    ]
    for name in ("torchvision", "timm", "webdataset", "datasets"):
        table += [Contender(name, "default", getattr(loaders, name), name)]
        table += [Contender(name, "best", partial(getattr(loaders, name), best=True), name)]
    return table


def memory(device: str) -> list[Contender]:
    """Small pictures in memory to training batches."""
    return [
        Contender("vitreous", "default", ours.memory, ours=True),
        Contender("torchvision", "default", loaders.memory, "torchvision"),
        Contender("torchvision", "best", partial(loaders.memory, best=True), "torchvision"),
    ]


def predict(device: str) -> list[Contender]:
    """Files to classes and probabilities, by what each library has for it: as it comes, and at the best settings
    known."""
    return [
        Contender("vitreous", "default", ours.predict, ours=True),
        Contender("vitreous", "--exact", partial(ours.predict, exact=True), ours=True),
        Contender("transformers", "default (pipeline)", pictures.transformers, "transformers"),
        Contender(
            "transformers", "best: batches of 8, workers", partial(pictures.transformers, best=True), "transformers"
        ),
        Contender("timm", "default script with a DataLoader", pictures.timm, "timm"),
        Contender("timm", "best: batches of 32, a worker a core", partial(pictures.timm, best=True), "timm"),
        Contender("timm", "best, compiled", partial(pictures.timm, best=True, compiled=True), "timm"),
    ]
