"""The table of who does what."""

from __future__ import annotations

from functools import partial

from vitreous.bench import ours, peers
from vitreous.bench.peak import peak
from vitreous.bench.work import Contender
from vitreous.machine import has_bf16

TASKS = ("inference", "train", "loader", "predict")


def contenders(task: str, device: str) -> list[Contender]:
    """Who does a task on a device, ours first; settings that the device has no hardware for are left out."""
    half = has_bf16(device)
    table = {"inference": inference, "train": train, "loader": loader, "predict": predict}
    return [c for c in table[task](device) if half or "bf16" not in c.settings]


def peaks(device: str) -> list[Contender]:
    """The limits, which take part in every race."""
    kinds = ["fp32", "bf16"] if has_bf16(device) else ["fp32"]
    return [Contender("peak", kind, partial(peak, precision=kind)) for kind in kinds]


def inference(device: str) -> list[Contender]:
    """Images to logits."""
    table = [
        Contender("vitreous", "default", ours.inference, ours=True),
        Contender("vitreous", "fp32", partial(ours.inference, precision="fp32"), ours=True),
        Contender("timm", "default (fp32)", partial(peers.inference, peer="timm"), "timm"),
        Contender("timm", "bf16", partial(peers.inference, peer="timm", precision="bf16"), "timm"),
        Contender("timm", "best: bf16, compiled", partial(peers.inference, peer="timm", precision="bf16", compiled=True), "timm"),
        Contender("transformers", "default (fp32)", partial(peers.inference, peer="transformers"), "transformers"),
        Contender("torchvision", "default (fp32)", partial(peers.inference, peer="torchvision"), "torchvision"),
    ]
    if device == "cpu":
        int8 = partial(ours.inference, engine="openvino", precision="int8")
        table += [
            Contender("vitreous", "--engine openvino --precision int8", int8, "nncf", True),
            Contender("onnxruntime", "fp32, by hand", peers.onnxruntime, "onnxscript"),
            Contender("openvino", "fp32, by hand", partial(peers.openvino, precision="fp32"), "openvino"),
            Contender("openvino", "bf16, by hand", partial(peers.openvino, precision="bf16"), "openvino"),
            Contender("openvino", "int8, by hand", partial(peers.openvino, precision="int8"), "nncf"),
        ]  # fmt: skip
    return table


def train(device: str) -> list[Contender]:
    """A training step."""
    return [
        Contender("vitreous", "default", ours.train, ours=True),
        Contender("vitreous", "fp32", partial(ours.train, precision="fp32"), ours=True),
        Contender("timm", "default (fp32)", peers.train, "timm"),
        Contender("timm", "bf16 autocast, fused AdamW", partial(peers.train, precision="bf16"), "timm"),
        Contender("timm", "best: bf16 autocast, compiled", partial(peers.train, precision="bf16", compiled=True), "timm"),
        Contender("timm", "fp32, compiled", partial(peers.train, compiled=True), "timm"),
    ]


def loader(device: str) -> list[Contender]:
    """Files to training batches."""
    return [
        Contender("vitreous", "default", ours.loader, ours=True),
        Contender("timm", "its transform, DataLoader", partial(peers.loader, peer="timm"), "timm"),
        Contender("torchvision", "transforms v2, DataLoader", partial(peers.loader, peer="torchvision"), "torchvision"),
    ]


def predict(device: str) -> list[Contender]:
    """Files to classes and probabilities."""
    return [
        Contender("vitreous", "default", ours.predict, ours=True),
        Contender("transformers", "default (pipeline)", peers.predict_transformers, "transformers"),
        Contender("timm", "best script with a DataLoader", peers.predict_timm, "timm"),
    ]
