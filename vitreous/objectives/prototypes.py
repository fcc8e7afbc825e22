"""A frozen DINOv2 teacher: an encoder with its heads, which outputs prototype logits for images and patches.

B images, N patches of each, K prototypes, D width.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.errors import UsageError, WeightsError
from vitreous.models.config import ModelConfig
from vitreous.objectives.heads import DINOHead, HeadOptions, ReduceFunction
from vitreous.objectives.teacher import WeightsTeacher
from vitreous.weights.adopt import open_objective_state, open_weights

TEACHER_HINT = "use a run of --recipe dinov2, or the teacher_checkpoint.pth of DINOv2's code"


class PrototypeTeacher(WeightsTeacher):
    """An encoder and its heads, from a bundle of DINOv2 or the checkpoint of its authors' code; its digest covers both.

    `prototypes` for images, and `patch_prototypes` for patches, 0 if they share a head. Raises UsageError for weights
    without such heads, WeightsError for an unreadable file.
    """

    def __init__(self, source: str, dtype: torch.dtype = torch.float32) -> None:
        if not source:
            raise UsageError("no teacher is set", TEACHER_HINT)
        weights, objective_state = open_weights(source), open_objective_state(source)
        if objective_state is None or objective_state.config.get("name") != "dinov2":
            other_heads = f"those of {objective_state.config.get('name')}" if objective_state else "none"
            raise UsageError(
                f"a teacher of dinov2 needs the heads of DINOv2, and {source} has {other_heads}", TEACHER_HINT
            )
        config, state = objective_state.config, objective_state.state
        self.prototypes, self.patch_prototypes = config["prototypes"], config.get("patch_prototypes", 0)
        bundle = weights.build_bundle()
        width = bundle.model.config.num_features
        heads = {"teacher_head": select_head_options(config)}
        if self.patch_prototypes:
            patch_options = {"prototypes": self.patch_prototypes, "bottleneck": config["patch_bottleneck"]}
            heads["teacher_patch_head"] = select_head_options({**config, **patch_options})
        self.heads = nn.ModuleList([DINOHead(width, options) for options in heads.values()])
        for name, head in zip(heads, self.heads, strict=True):
            tensors = {key.removeprefix(f"{name}."): t for key, t in state.items() if key.startswith(f"{name}.")}
            try:
                head.load_state_dict(tensors)
            except RuntimeError as error:
                raise WeightsError(f"the heads of {source} do not match their config ({error})", TEACHER_HINT) from None
        self.heads.requires_grad_(False)
        super().__init__(source, bundle, dtype, self.heads)
        self.size = None  # every view has the student's number of patches

    def compute_targets(
        self, images: Tensor, normalisation: Any, patch: tuple[int, ...], reduce: ReduceFunction, idle: bool
    ) -> tuple[Tensor, Tensor]:
        """(B, C, *image) of a student with this patch size -> (B, K) and (B, N, K) float32: the logits for images, and
        for each of the student's patches. If the teacher has another patch size, images are resized."""
        teacher_patch, pixels = self.model.config.patch, self.to_teacher_input(images.float(), normalisation)
        if teacher_patch != patch:
            resized = tuple(
                length // p * q for length, p, q in zip(images.shape[2:], patch, teacher_patch, strict=True)
            )
            pixels = F.interpolate(pixels, resized, mode="bicubic", antialias=True)
        with torch.no_grad():
            model: Any = self.get_model_on(images.device)
            model.any_size = True
            encoded = model.features(pixels.to(self.dtype)).float()
            pooled, patches = model.pool(encoded), encoded[:, model.config.prefix :]
            heads = self.heads.to(images.device)
            image_logits = heads[0](pooled.float(), reduce, idle)
            return image_logits, heads[-1](patches.flatten(0, 1), reduce, idle).unflatten(0, patches.shape[:2])

    def flops(self, patches: int = 0) -> float:
        """Floating-point operations of an image, heads included, for this number of `patches`; 0: the teacher's native
        number."""
        config: Any = self.model.config
        count = sum(p.numel() for p in self.heads[0].parameters() if p.ndim == 2)
        count += patches * sum(p.numel() for p in self.heads[-1].parameters() if p.ndim == 2)
        return 2 * (config.macs() + count)


def select_head_options(config: dict[str, Any]) -> HeadOptions:
    """Return the options of a head among the fields of an objective's config."""
    field_names = {field.name for field in fields(HeadOptions)}
    return HeadOptions(**{name: value for name, value in config.items() if name in field_names})


def check_teacher_fits(teacher: PrototypeTeacher, model: ModelConfig) -> None:
    """Raise UsageError for a teacher with other channels or image axes than the student."""
    if teacher.channels != model.channels:
        message = f"the teacher {teacher.source} takes {teacher.channels} channels, the student {model.channels}"
        raise UsageError(message, "use another teacher")
    if len(teacher.model.config.patch) != len(model.patch):
        raise UsageError(
            f"the teacher {teacher.source} takes images with another number of axes", "use another teacher"
        )
