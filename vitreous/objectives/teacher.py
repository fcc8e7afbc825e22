"""Frozen teachers for distillation: a run, a bundle, other weights, or an ONNX file.

Shapes: B images of C channels, K classes.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.config import from_builtins
from vitreous.data.modalities.base import Preprocess
from vitreous.data.modalities.table import AnyPreprocess
from vitreous.errors import UsageError, WeightsError
from vitreous.inference.graph_cache import hash_weights
from vitreous.inference.libraries import build_onnx_session_options, import_optional_library
from vitreous.models.zoo import Model
from vitreous.system.machine import copy_to_device
from vitreous.system.torch_types import from_numpy
from vitreous.tasks.table import task_from_json
from vitreous.weights.adopt import open_weights
from vitreous.weights.bundle import Bundle

CARD_KEY = "vitreous"  # metadata key of the model card in exported files
NORMALISATION_HINT = (
    "set --objective.teacher-mean and --objective.teacher-std, for ImageNet 0.485 0.456 0.406 and 0.229 0.224 0.225"
)
Normalisation = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std of each channel


class Teacher:
    """A model that computes logits or features of images, with its classes, its normalisation, and a SHA-256 of its
    weights.

    `size` is its image size (height, width) in pixels, None for any size. A teacher is not a torch module, so a run
    neither moves, copies nor saves it: a checkpoint contains only the digest.
    """

    channels: int
    size: tuple[int, ...] | None
    checked: tuple[int, int]

    def __init__(self, source: str, classes: tuple[str, ...], normalisation: Normalisation, digest: str) -> None:
        self.source, self.classes, self.normalisation = source, classes, normalisation
        self.channels = len(normalisation[0])
        self.digest = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8)
        self.checked = (0, -1)  # id and version of the last tensor that passed `check_teacher_digest`

    def __deepcopy__(self, memo: dict[int, Any]) -> Teacher:
        return self

    def to_teacher_input(self, images: Tensor, normalisation: Normalisation) -> Tensor:
        """Convert the student's input to the teacher's: images (B, C, *image) float32, normalised by `normalisation`
        (mean, std) -> (B, C, *teacher image), with the teacher's normalisation and resized to its size."""
        mean, std, teacher_mean, teacher_std = (
            copy_to_device(torch.tensor(values).view(-1, 1, 1), images.device)
            for values in (*normalisation, *self.normalisation)
        )
        images = (images * std + mean - teacher_mean) / teacher_std
        if self.size is not None and tuple(images.shape[2:]) != self.size:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True)
        return images

    def logits(self, images: Tensor) -> Tensor:
        """Compute logits of images from `to_teacher_input`: (B, C, *teacher image) -> (B, K) float32, on the same
        device."""
        raise NotImplementedError

    def flops(self) -> float:
        """Return the floating-point operations of one image; 0 if unknown."""
        return 0.0


class WeightsTeacher(Teacher):
    """Teacher that is a model of this package: a run, a bundle, or weights of a known format. It computes in `dtype`.

    The digest covers the model, and its `heads` if they are separate.
    """

    def __init__(
        self, source: str, bundle: Bundle, dtype: torch.dtype = torch.float32, heads: nn.Module | None = None
    ) -> None:
        preprocess, model = bundle.preprocess, bundle.model
        digest = hash_weights(model if heads is None else nn.ModuleList([model, heads]))
        super().__init__(source, bundle.classes, (preprocess.mean, preprocess.std), digest)
        self.size = tuple(bundle.model.config.image)
        self.model: Model = bundle.model.requires_grad_(False).eval()
        self.dtype = dtype

    def get_model_on(self, device: torch.device) -> Model:
        """Return the model on a device and in the run's precision."""
        parameter = next(self.model.parameters())
        if parameter.device != device or parameter.dtype != self.dtype:
            self.model.to(device, self.dtype)
        return self.model

    def logits(self, images: Tensor) -> Tensor:
        """Compute logits of images from `to_teacher_input`: (B, C, *teacher image) -> (B, K) float32, on the same
        device."""
        with torch.no_grad():
            return self.get_model_on(images.device)(images.to(self.dtype)).float()

    def flops(self) -> float:
        """Return the floating-point operations of one image."""
        return 2 * self.model.config.macs()


class OnnxTeacher(Teacher):
    """Teacher in an ONNX file, run by onnxruntime on the CPU.

    Files of `vitreous export` contain classes and normalisation. For other files, `default_normalisation` is the
    normalisation, and the first output contains the logits, in the order of the data's classes. Raises WeightsError for
    a file that cannot be run, UsageError for a file without normalisation if `default_normalisation` is None.
    """

    def __init__(self, source: str, default_normalisation: Normalisation | None = None) -> None:
        runtime = import_optional_library("onnxruntime", "a teacher in an ONNX file requires")
        try:
            raw = Path(source).read_bytes()
        except OSError as error:
            raise WeightsError(f"{source} cannot be read ({error.strerror})", "set the path of a teacher") from None
        options = build_onnx_session_options(runtime)
        try:
            self.session = runtime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has an exception class for each problem, none of them public
            problem = f"onnxruntime {runtime.__version__} cannot run {source} ({str(error)[:200]})"
            raise WeightsError(problem, "export the teacher again, or restore the file from a copy") from None
        input_info, output_info = self.session.get_inputs()[0], self.session.get_outputs()[0]
        self.input, self.output = input_info.name, output_info.name
        card = parse_teacher_card(self.session.get_modelmeta().custom_metadata_map, source)
        if card is not None:
            classes, normalisation = card
        elif default_normalisation is not None:
            num_classes = output_info.shape[-1] if isinstance(output_info.shape[-1], int) else 0
            classes, normalisation = tuple(map(str, range(num_classes))), default_normalisation
        else:
            problem = f"{source} does not contain its mean and std, as files of `vitreous export` do"
            raise UsageError(problem, NORMALISATION_HINT)
        super().__init__(source, classes, normalisation, hashlib.sha256(raw).hexdigest())
        image_size = tuple(input_info.shape[2:])
        self.size = image_size if all(isinstance(length, int) for length in image_size) else None

    def logits(self, images: Tensor) -> Tensor:
        """Compute logits of images from `to_teacher_input`: (B, C, *teacher image) -> (B, K) float32, on the same
        device."""
        pixels = np.ascontiguousarray(images.float().cpu().numpy())
        outputs = self.session.run([self.output], {self.input: pixels})[0]
        return copy_to_device(from_numpy(np.array(outputs, dtype=np.float32)), images.device)


def parse_teacher_card(metadata: dict[str, str], source: str) -> tuple[tuple[str, ...], Normalisation] | None:
    """Return classes and (mean, std) from the metadata of a file of `vitreous export`; None for other files.

    Raises WeightsError if the metadata cannot be parsed.
    """
    if CARD_KEY not in metadata:
        return None
    try:
        card: Any = json.loads(metadata[CARD_KEY])["card"]
        preprocess: Preprocess = from_builtins(AnyPreprocess, card["preprocess"])
        return task_from_json(card, source).classes, (preprocess.mean, preprocess.std)
    except (KeyError, ValueError, TypeError) as error:
        raise WeightsError(f"the model card in {source} cannot be read ({error})", "export the teacher again") from None


def open_teacher(
    source: str, dtype: torch.dtype = torch.float32, default_normalisation: Normalisation | None = None
) -> Teacher:
    """Open a teacher by path or name; `default_normalisation` is the (mean, std) for an ONNX file that does not contain
    it.

    Raises UsageError if no teacher is set, WeightsError if it cannot be read.
    """
    if not source:
        raise UsageError("no teacher is set", "set its weights with --objective.teacher")
    if source.lower().endswith(".onnx") and not os.path.isdir(source):
        return OnnxTeacher(source, default_normalisation)
    return WeightsTeacher(source, open_weights(source).build_bundle(), dtype)


def absolute_source(source: str) -> str:
    """Return a teacher's name that is valid in every working directory: an absolute path for a local file, else
    unchanged."""
    return os.path.abspath(source) if source and os.path.lexists(source) else source


def check_teacher_digest(teacher: Teacher, digest: Tensor) -> None:
    """Raise WeightsError unless the digest of the teacher's weights is `digest` (32,) uint8, the digest that a run
    stored.

    A tensor that passed the check and has not been changed since is not read again, because reading would synchronise
    with a GPU.
    """
    if teacher.checked == (id(digest), digest._version):
        return
    if torch.equal(teacher.digest, digest.cpu()):
        teacher.checked = (id(digest), digest._version)
    else:
        raise WeightsError(
            f"the teacher {teacher.source} has changed since the run began: the digest of its weights differs",
            "restore the teacher's file, or start a new run",
        )
