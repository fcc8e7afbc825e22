"""A tiny served model, and a client that sends well-formed HTTP requests or raw bytes over a socket."""

from __future__ import annotations

import http.client
import io
import json
import socket
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from vitreous.data.modalities.images import ImagePreprocess
from vitreous.models.config import MlpConfig, ViTConfig
from vitreous.models.zoo import build_model
from vitreous.tasks.classification import Classification
from vitreous.tasks.features import FeatureExtraction
from vitreous.weights.bundle import Bundle

CLASSES = ("ant", "<b>bee</b>", "cat", "dog", "eel")


def save_bundle(folder: Path, seed: int = 0, classes: tuple[str, ...] = CLASSES) -> Path:
    """Save a ViT with 4 x 4 patches whose logits differ between images; without classes it has no head."""
    torch.manual_seed(seed)
    model = build_model(
        ViTConfig(
            image=(32, 32), patch=(8, 8), classes=len(classes), width=32, depth=2, heads=2, mlp=MlpConfig(hidden=64)
        )
    ).eval()
    if classes:
        torch.nn.init.normal_(model.head.weight)
    Bundle(model, Classification(classes) if classes else FeatureExtraction(), ImagePreprocess((32, 32))).save(folder)
    return folder


def encode_noise_image(seed: int, size: tuple[int, int] = (48, 40), kind: str = "PNG") -> bytes:
    """Return a noisy image as an encoded file."""
    buffer = io.BytesIO()
    Image.fromarray(
        torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed)).byte().numpy()
    ).save(buffer, kind)
    return buffer.getvalue()


def encode_multipart(*files: tuple[str, bytes], mark: str = "XXmark") -> tuple[bytes, dict[str, str]]:
    """Encode files as multipart/form-data; returns the body and the headers."""
    parts = [
        f'--{mark}\r\nContent-Disposition: form-data; name="image"; filename="{n}"\r\n\r\n'.encode() + c + b"\r\n"
        for n, c in files
    ]
    return b"".join(parts) + f"--{mark}--\r\n".encode(), {"Content-Type": f"multipart/form-data; boundary={mark}"}


class ServerClient:
    """Sends requests to the server at one address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.host, port = address.removeprefix("http://").rsplit(":", 1)
        self.port = int(port)

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, Any]:
        """Send a request; returns the status, the parsed JSON or the bytes, and the headers."""
        with closing(http.client.HTTPConnection(self.host, self.port, timeout=60)) as connection:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            content = response.read()
        content_type = response.headers.get("Content-Type", "")
        return (
            response.status,
            json.loads(content) if content_type.startswith("application/json") and content else content,
            response.headers,
        )

    def predict(self, content: bytes, query: str = "", **headers: str) -> tuple[int, Any, Any]:
        """Send one image as the body of POST /v1/predict."""
        return self.ask("POST", f"/v1/predict{query}", content, {"Content-Type": "image/png", **headers})

    def raw(self, content: bytes, timeout: float = 30) -> bytes:
        """Send bytes and return everything received until the server closes the connection."""
        with self.connect(timeout) as link:
            link.sendall(content)
            return receive_all(link)

    def connect(self, timeout: float = 30) -> socket.socket:
        """Open a TCP connection to the server."""
        return socket.create_connection((self.host, self.port), timeout)

    def metric(self, name: str) -> float:
        """Return one metric of /metrics."""
        text = self.ask("GET", "/metrics")[1].decode()
        return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(name + " ")))


def receive_all(link: socket.socket) -> bytes:
    """Receive bytes until the connection ends, by a close or a reset."""
    received = b""
    try:
        while piece := link.recv(65536):
            received += piece
    except ConnectionError:
        pass
    return received


def wait_until(condition: Callable[[], Any], seconds: float = 30) -> Any:
    """Wait for a condition; fail after a generous time limit."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"the condition did not hold within {seconds} s"
        time.sleep(0.02)
    return value


__all__ = [
    "CLASSES",
    "ServerClient",
    "receive_all",
    "encode_noise_image",
    "encode_multipart",
    "save_bundle",
    "wait_until",
]
