"""Frozen DINOv2 teacher: an encoder with its projection heads, which outputs prototype logits for images and patches.

Shapes: B images of C channels, N patches of each, K prototypes.
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
    """Encoder with its heads, from a DINOv2 or DINOv3 bundle of this package or a checkpoint of DINOv2's code. Its
    digest covers encoder and heads.

    `prototypes` is the number of prototypes for images, `patch_prototypes` that for patches, 0 if images and patches
    share a head. Raises UsageError for weights without DINOv2 heads, WeightsError for an unreadable file.
    """

    def __init__(self, source: str, dtype: torch.dtype = torch.float32) -> None:
        if not source:
            raise UsageError("no teacher is set", TEACHER_HINT)
        weights, objective_state = open_weights(source), open_objective_state(source)
        if objective_state is None or objective_state.config.get("name") not in ("dinov2", "dinov3"):
            other_heads = f"those of {objective_state.config.get('name')}" if objective_state else "none"
            raise UsageError(
                f"a teacher of dinov2 requires the heads of DINOv2, but {source} has {other_heads}", TEACHER_HINT
            )
        config, state = objective_state.config, objective_state.state
        self.prototypes, self.patch_prototypes = config["prototypes"], config.get("patch_prototypes", 0)
        bundle = weights.build_bundle()
        width = bundle.model.config.num_features
        heads = {"teacher_head": select_head_options(config)}
        if self.patch_prototypes:
            patch_options = {"prototypes": self.patch_prototypes, "bottleneck": config["patch_bottleneck"]}
            patch_options["head_width"] = config.get("patch_head_width") or config["head_width"]
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
        self.size = None  # `compute_targets` resizes views to the student's number of patches

    def compute_targets(
        self, images: Tensor, normalisation: Any, patch: tuple[int, ...], reduce: ReduceFunction, is_idle: bool
    ) -> tuple[Tensor, Tensor]:
        """Compute the logits for images, and for each of the student's patches: (B, C, *image) -> (B, K), (B, N, K)
        float32.

        `patch` is the student's patch size. If it differs from the teacher's, images are resized so that both have the
        same number of patches.
        """
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
            image_logits = heads[0](pooled.float(), reduce, is_idle)
            return image_logits, heads[-1](patches.flatten(0, 1), reduce, is_idle).unflatten(0, patches.shape[:2])

    def flops(self, patches: int = 0) -> float:
        """Return the floating-point operations of one image, heads included, with the patch head applied to `patches`
        patches."""
        config: Any = self.model.config
        head_macs = sum(p.numel() for p in self.heads[0].parameters() if p.ndim == 2)
        head_macs += patches * sum(p.numel() for p in self.heads[-1].parameters() if p.ndim == 2)
        return 2 * (config.macs() + head_macs)


def select_head_options(config: dict[str, Any]) -> HeadOptions:
    """Select the options of a head from the fields of an objective's config."""
    field_names = {field.name for field in fields(HeadOptions)}
    return HeadOptions(**{name: value for name, value in config.items() if name in field_names})


def check_teacher_fits(teacher: WeightsTeacher, model: ModelConfig) -> None:
    """Raise UsageError if the channels or the number of image axes of teacher and student differ."""
    if teacher.channels != model.channels:
        channels = f"{teacher.channels} channels, but the student has {model.channels}"
        raise UsageError(f"the teacher {teacher.source} requires {channels}", "use another teacher")
    teacher_axes, axes = len(teacher.model.config.patch), len(model.patch)
    if teacher_axes != axes:
        problem = f"the teacher {teacher.source} requires images with {teacher_axes} axes, but the student has {axes}"
        raise UsageError(problem, "use another teacher")
