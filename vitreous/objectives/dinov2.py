"""Objective of DINOv2 (arXiv:2304.07193): DINO on whole images, iBOT on masked patches (arXiv:2111.07832), and KoLeo,
which spreads features (arXiv:1806.03198).

Shapes: B images, V views of which 2 are global, b = 2 B global views, N patches of a view, M masked patches of the
batch, K prototypes, D width.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from vitreous.data.augmentation.masks import ibot_masks
from vitreous.data.augmentation.views import NUM_GLOBAL_VIEWS, MultiCrop
from vitreous.data.batch import Batch
from vitreous.data.keys import derive_keys
from vitreous.errors import UsageError
from vitreous.models.config import ModelConfig
from vitreous.models.vit import ViT
from vitreous.models.zoo import Model
from vitreous.objectives.base import FrozenUpdate, ObjectiveConfig, ObjectiveSetting, TrainingProgress
from vitreous.objectives.dino import (
    accumulate_outputs,
    compute_target_metrics,
    cross_view_entropy,
    detect_target_collapse,
    prototype_names,
    update_teacher_ema,
)
from vitreous.objectives.heads import DINOHead, HeadOptions, check_head, compute_prototype_logits
from vitreous.objectives.prototypes import PrototypeTeacher, check_teacher_fits
from vitreous.objectives.teacher import absolute_source, check_teacher_digest
from vitreous.objectives.unlabelled import (
    UnlabelledObjective,
    check_local_views,
    check_takes_patches,
    check_views,
    hide_patches,
    koleo_loss_of_views,
)
from vitreous.system.machine import copy_to_device
from vitreous.system.torch_types import from_numpy

SINKHORN_ITERATIONS = 3  # iterations of Sinkhorn-Knopp normalisation
_MASK = 0x69424F54  # makes the random numbers of masks independent of those of augmentation


@dataclass(frozen=True)
class DINOv2Config(HeadOptions, ObjectiveConfig):
    """Options of DINOv2; the defaults are those of the authors' code (`ssl_default_config.yaml`).

    It has the options of DINO (`DINOConfig`), and:

    - `patch_prototypes`, `patch_bottleneck`, `patch_head_width`: prototypes, bottleneck and channels of a separate head
      for patches; with `patch_prototypes` 0, images and patches share a head, and with `patch_head_width` 0, the patch
      head has `head_width` channels.
    - `centring`: how the teacher's outputs are centred: by their moving mean (`moving`), or by `sinkhorn_knopp`, which
      assigns every prototype an equal share of the batch.
    - `mask_probability`: probability that a global view is masked, in blocks; `mask_shares`: range of the share of its
      patches that is masked.
    - `patch_weight`, `koleo`: weights of the patch loss and of KoLeo.
    - `teacher`: a frozen model with its heads that provides the targets, as in the distillation of DINOv2's smaller
      models. Nothing is masked, the patch loss covers all patches, and the student's EMA is deployed. The numbers of
      prototypes are then the teacher's.

    Raises UsageError for invalid values.
    """

    guards_drift: ClassVar[bool] = True
    least_batch: ClassVar[int] = 2  # KoLeo requires a nearest neighbour

    name: Literal["dinov2"] = "dinov2"
    unit_prototypes: bool = False
    patch_prototypes: int = 0
    patch_bottleneck: int = 256
    patch_head_width: int = 0
    temperature: float = 0.1
    centring: Literal["moving", "sinkhorn"] = "moving"
    centre_momentum: float = 0.9
    mask_probability: float = 0.5
    mask_shares: tuple[float, float] = (0.1, 0.5)
    patch_weight: float = 1.0
    koleo: float = 0.1
    frozen: float = 0.01
    teacher: str = ""

    @property
    def can_split_batch(self) -> bool:
        """Return False, because features are compared with those of other samples."""
        return False

    def __post_init__(self) -> None:
        check_head(self)
        if self.koleo < 0:
            raise UsageError(f"objective.koleo {self.koleo:g} would make features collapse", "use 0 or more")
        if self.temperature <= 0 or not 0 <= self.centre_momentum <= 1 or not 0 <= self.mask_probability <= 1:
            names = "temperature must be above 0, centre_momentum and mask_probability from 0 to 1"
            values = f"{self.temperature:g}, {self.centre_momentum:g} and {self.mask_probability:g}"
            raise UsageError(f"{names}, got {values}")
        if not 0 <= self.mask_shares[0] <= self.mask_shares[1] <= 1:
            raise UsageError(
                f"mask_shares {self.mask_shares} are out of range", "use two numbers from 0 to 1, the lower one first"
            )

    def check(self, model: ModelConfig, classes: tuple[str, ...], views: Any) -> None:
        """Raise UsageError for views that are not multi-crop, for local views whose size is not divisible by the patch,
        and for models without patch tokens."""
        check_views(views, MultiCrop, self.name)
        check_takes_patches(model, self.name)
        check_local_views(model, views)

    def with_absolute_paths(self, model: ModelConfig, classes: tuple[str, ...]) -> DINOv2Config:
        """Return the config with the absolute path of the teacher and its numbers of prototypes.

        Raises UsageError for a teacher that is incompatible or has no DINOv2 heads, WeightsError for an unreadable
        teacher.
        """
        if not self.teacher:
            return self
        teacher = PrototypeTeacher(self.teacher)
        check_teacher_fits(teacher, model)
        counts = {"prototypes": teacher.prototypes, "patch_prototypes": teacher.patch_prototypes}
        return replace(self, teacher=absolute_source(self.teacher), **counts)

    def build(self, model: Model, setting: ObjectiveSetting) -> DINOv2:
        """Build the objective of an encoder. Raises the errors of `with_absolute_paths`."""
        return DINOv2(model, self, setting, PrototypeTeacher(self.teacher, setting.dtype) if self.teacher else None)


class DINOv2(UnlabelledObjective):
    """The sum of three losses, in nats: DINO's, iBOT's times `patch_weight`, and KoLeo times `koleo`.

    The input is {"images": (B, 2, C, *image), "local": (B, V - 2, C, *local image), "masks": (B, 2, *grid) bool}. The
    teacher encodes whole images; in the student, a mask token replaces each masked patch.

    A `frozen` teacher provides the targets instead of the student's EMA, which is updated nevertheless. All patches
    then count as masked, but the student encodes them unchanged. Checkpoints do not contain the frozen teacher, only
    its digest.
    """

    compares_views: ClassVar[bool] = True
    logged: ClassVar[tuple[str, ...]] = ("dino", "ibot", "koleo", "teacher_entropy", "prototype_entropy", "feature_std")
    input_tokens: ClassVar[tuple[str, ...]] = ("mask_token",)
    temperature: Tensor
    centre: Tensor
    outputs: Tensor
    patch_centre: Tensor
    patch_outputs: Tensor
    digest: Tensor

    def __init__(
        self,
        model: Model,
        config: DINOv2Config = DINOv2Config(),
        setting: ObjectiveSetting = ObjectiveSetting(),
        frozen: PrototypeTeacher | None = None,
    ) -> None:
        super().__init__()
        self.config, self.setting, self.frozen = config, setting, frozen
        if frozen is not None:
            check_teacher_fits(frozen, model.config)
            self.register_buffer("digest", frozen.digest.clone())
        width, shape = model.config.num_features, model.config
        self.model, self.head = cast(ViT, model), DINOHead(width, config)
        self.mask_token = nn.Parameter(torch.zeros(shape.width))
        if config.patch_prototypes:
            head_width = config.patch_head_width or config.head_width
            sizes = (config.patch_prototypes, config.head_layers, head_width, config.patch_bottleneck)
            options = HeadOptions(*sizes, unit_prototypes=config.unit_prototypes, batch_norm=config.batch_norm)
            self.patch_head = DINOHead(shape.width, options)
            self.teacher_patch_head = copy.deepcopy(self.patch_head).requires_grad_(False)
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        self.teacher_head = copy.deepcopy(self.head).requires_grad_(False)
        self.model.any_size = self.teacher.any_size = True
        self.register_buffer("temperature", torch.tensor(0.04), persistent=False)
        for name, count in (("", config.prototypes), ("patch_", config.patch_prototypes or config.prototypes)):
            self.register_buffer(f"{name}centre", torch.zeros(count))
            # the sum of the teacher's outputs since the last step, and their number
            self.register_buffer(f"{name}outputs", torch.zeros(count + 1), persistent=False)

    @property
    def collapse_hint(self) -> str:
        """Return a hint against feature collapse: a larger KoLeo weight, a lower learning rate, or larger batches."""
        return f"raise --objective.koleo (now {self.config.koleo:g}), lower --lr, or use larger batches"

    def heads(self, owner: str = "") -> tuple[DINOHead, ...]:
        """Return the heads of the student, or with owner "teacher_" those of the teacher: for images, and for patches
        if separate."""
        names = ("head", "patch_head") if self.config.patch_prototypes else ("head",)
        return tuple(getattr(self, owner + name) for name in names)

    def train(self, mode: bool = True) -> DINOv2:
        """Set training mode; the teacher stays in evaluation mode, without dropout and stochastic depth."""
        super().train(mode)
        self.teacher.eval()
        return self

    def prepare(self, batch: Batch, progress: TrainingProgress) -> Batch:
        """Draw the masks, and set the teacher's temperature for this step."""
        self.temperature.fill_(progress.values.get("teacher_temperature", 0.04))
        if self.frozen is not None:
            mask_shape = (*batch["images"].shape[:2], *self.model.config.grid)
            masks = torch.ones(mask_shape, dtype=torch.bool, device=batch["images"].device)
            return {**batch, "masks": masks, "masked": torch.full((len(masks),), masks[0].numel())}
        keys = derive_keys(
            self.setting.seed, _MASK, batch["positions"].numpy()[:, None], torch.arange(NUM_GLOBAL_VIEWS).numpy()
        )
        grid = self.model.config.grid
        masks = ibot_masks(keys.ravel(), grid, self.config.mask_shares, self.config.mask_probability)
        masks = from_numpy(masks).reshape(*keys.shape, *grid)
        counts = masks.flatten(1).sum(1)  # on the CPU, so that `forward` does not synchronise with a GPU
        return {**batch, "masks": copy_to_device(masks, batch["images"].device), "masked": counts}

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the loss, its three terms and the metrics of `compute_target_metrics`, as scalars, and accumulate the
        teacher's outputs."""
        config, images, masks = self.config, batch["images"], batch["masks"].flatten(0, 1).flatten(1)
        count = len(images)
        index = masked_positions(masks, int(batch["masked"].sum()))
        with torch.no_grad():
            targets, patch_targets = self.compute_teacher_outputs(images.flatten(0, 1), index)
        encoded = self.encode_tokens(images.flatten(0, 1), masks)
        features, patches = self.model.pool(encoded), encoded[:, self.model.config.prefix :]
        views = [features]
        if batch["local"].shape[1]:
            views.append(self.model(batch["local"].flatten(0, 1)))
        logits = compute_prototype_logits(self.head, views, count, self.reduce, self.is_idle) / config.temperature
        masked_patches = patches.flatten(0, 1)[index]
        patch_logits = self.heads()[-1](masked_patches, self.reduce, self.is_idle) / config.temperature
        losses = {
            "dino": self.compute_view_loss(torch.unflatten(targets, 0, (count, NUM_GLOBAL_VIEWS)), logits),
            "ibot": masked_cross_entropy(patch_targets, patch_logits, masks, index),
            "koleo": koleo_loss_of_views(
                torch.unflatten(features, 0, (count, NUM_GLOBAL_VIEWS)), self.gather, self.is_idle
            ),
        }
        loss = losses["dino"] + config.patch_weight * losses["ibot"] + config.koleo * losses["koleo"]
        weighted_losses = self.compute_patch_losses(batch, patches)
        for name, (weight, value) in weighted_losses.items():
            loss, losses[name] = loss + weight * value, value
        loss_values = {name: value.detach() for name, value in losses.items()}
        return {"loss": loss, **loss_values, **compute_target_metrics(targets, features)}

    def compute_view_loss(self, targets: Tensor, logits: Tensor) -> Tensor:
        """Compute DINO's loss of the views, a scalar: targets (B, 2, K), logits (B, V, K)."""
        return cross_view_entropy(targets, logits)

    def compute_patch_losses(self, batch: Batch, patches: Tensor) -> dict[str, tuple[float, Tensor]]:
        """Compute further losses of the student's patch tokens of the global views (b, N, D) after the last norm: the
        weight and the value, a scalar, of each by its name. Here there are none."""
        return {}

    def encode_tokens(self, images: Tensor, masks: Tensor) -> Tensor:
        """Encode global views with the student: images (b, C, *image), masks (b, N) bool -> every token after the last
        norm, (b, P + N, D). A mask token replaces each masked patch, unless the teacher is frozen."""
        model = self.model
        hidden = masks if self.frozen is None else torch.zeros_like(masks)
        grid = model.project(hide_patches(images, hidden, model.config))
        tokens = torch.where(hidden.view(*grid.shape[:-1], 1), self.mask_token.to(grid.dtype), grid)
        return model.encode(model.add_positions(tokens), model.make_token_positions(tokens))

    def encode(self, images: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Encode global views with the student: images (b, C, *image), masks (b, N) bool -> features (b, D), masked
        patches (M, D)."""
        encoded = self.encode_tokens(images, masks)
        return self.model.pool(encoded), encoded[:, self.model.config.prefix :][masks]

    def compute_teacher_outputs(self, images: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the teacher's targets for global views (b, C, *image) and the masked patches at the flattened indices
        `index` (M,): probabilities (b, K) and (M, K) float32."""
        logits = self.teacher_logits(images, index)
        if self.config.centring == "sinkhorn":
            image_targets, patch_targets = (
                sinkhorn_knopp(head_logits / self.temperature, self.reduce, self.is_idle) for head_logits in logits
            )
            return image_targets, patch_targets
        for outputs, head_logits in zip((self.outputs, self.patch_outputs), logits, strict=True):
            accumulate_outputs(outputs, head_logits, self.is_idle)
        centres = (self.centre, self.patch_centre)
        image_targets, patch_targets = (
            ((head_logits - centre) / self.temperature).softmax(-1)
            for head_logits, centre in zip(logits, centres, strict=True)
        )
        return image_targets, patch_targets

    def teacher_logits(self, images: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the teacher's logits for global views (b, C, *image) and the masked patches at the flattened indices
        `index` (M,): (b, K) and (M, K) float32.

        Raises WeightsError if the frozen teacher of a resumed run has changed.
        """
        if self.frozen is not None:
            check_teacher_digest(self.frozen, self.digest)
            patch, normalisation = self.model.config.patch, self.setting.normalisation
            image_logits, patch_logits = self.frozen.compute_targets(
                images, normalisation, patch, self.reduce, self.is_idle
            )
            return image_logits, patch_logits.flatten(0, 1)[index]
        model, dtype = self.teacher, images.dtype
        with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
            encoded = model.features(images)
        features, patches = model.pool(encoded).float(), encoded[:, model.config.prefix :].flatten(0, 1)[index].float()
        image_head, patch_head = self.teacher_head, self.heads("teacher_")[-1]
        return image_head(features, self.reduce, self.is_idle), patch_head(patches, self.reduce, self.is_idle)

    def after_step(self, progress: TrainingProgress) -> None:
        """Update the teacher from the student, and the centres from the teacher's outputs in this step."""
        momentum = progress.values.get("momentum", 0.992)
        update_teacher_ema((self.model, *self.heads()), (self.teacher, *self.heads("teacher_")), momentum)
        for centre, outputs in ((self.centre, self.outputs), (self.patch_centre, self.patch_outputs)):
            mean = self.reduce(outputs)
            # `where` instead of `if`, which would synchronise with a GPU
            new_centre = torch.where(mean[-1] > 0, mean[:-1] / mean[-1], centre)
            centre.lerp_(new_centre, 1 - self.config.centre_momentum)
            outputs.zero_()

    def deployed_model(self) -> Model:
        """Return the teacher."""
        return self.teacher

    def warnings(self, scalars: Mapping[str, float], progress: TrainingProgress) -> Iterator[tuple[str, str]]:
        """Detect collapse: of the features, of all targets to the same prototype, or of targets to a uniform
        distribution."""
        yield from super().warnings(scalars, progress)
        yield from detect_target_collapse(scalars, self.config.prototypes, progress)

    def frozen_at_start(self) -> tuple[str, ...]:
        """Return the names of the prototypes of all heads."""
        return prototype_names(self, *("head", "patch_head")[: len(self.heads())])

    def frozen_update(self, progress: TrainingProgress) -> FrozenUpdate | None:
        """Return "zero-lr" during the first share `frozen` of the run, because in the authors' code moments and step
        count of the prototypes change."""
        return "zero-lr" if progress.fraction_done < self.config.frozen else None

    def flops(self, progress: TrainingProgress) -> float:
        """Return the floating-point operations of three passes of the student over every view, and one pass of the
        teacher over the global views; heads included."""
        views, encoder_config, config = self.setting.views, self.teacher.config, self.config
        head_macs = [sum(p.numel() for p in head.parameters() if p.ndim == 2) for head in self.heads()]
        num_masked = config.mask_probability * sum(config.mask_shares) / 2 * math.prod(encoder_config.grid)
        if self.frozen is not None:
            num_masked = math.prod(encoder_config.grid)
        global_macs = encoder_config.macs() + head_macs[0] + num_masked * head_macs[-1]
        local_macs = encoder_config.computed_macs(views.local_image) + head_macs[0] if views.locals else 0
        student_flops = 2 * (3 * NUM_GLOBAL_VIEWS * global_macs + 3 * views.locals * local_macs)
        return student_flops + NUM_GLOBAL_VIEWS * (
            2 * global_macs if self.frozen is None else self.frozen.flops(math.prod(encoder_config.grid))
        )


def masked_positions(masks: Tensor, count: int) -> Tensor:
    """Return the indices of the true elements of the flattened masks, in order: (b, N) bool -> (M,) int64; `count` is
    M.

    Equal to `masks.flatten().nonzero()`, which would synchronise with a GPU to determine M.
    """
    return masks.flatten().to(torch.uint8).sort(descending=True, stable=True).indices[:count]


def masked_cross_entropy(targets: Tensor, logits: Tensor, masks: Tensor, index: Tensor | None = None) -> Tensor:
    """Compute the cross-entropy of masked patches, a scalar: targets q and logits s, both (M, K).

    It is the mean over images of the mean over their masked patches of -sum_k q_k log softmax(s)_k; 0 for an image
    without masked patches. `index` (M,) are the indices of the patches in the flattened `masks` (b, N) bool; None
    computes them.

        for image in range(b): loss += -(q * log_softmax(s)).sum(-1)[patches of the image].mean() / b
    """
    index = masks.flatten().nonzero()[:, 0] if index is None else index
    weights = (1 / masks.sum(1, keepdim=True).clamp(min=1)).expand_as(masks).flatten()[index]
    terms = logits.logsumexp(-1) - (targets * logits).sum(-1)
    return (terms * weights).sum() / len(masks)


def sinkhorn_knopp(scores: Tensor, reduce: Callable[[Tensor], Tensor], is_idle: bool = False) -> Tensor:
    """Normalise exp(scores) to equal column sums, then to row sums of one, three times: (n, K) -> probabilities (n, K)
    (arXiv:2006.09882, Algorithm 1 of its appendix).

    The sums are over the samples of all processes that are not `is_idle` (`Objective.is_idle`); `reduce` is the mean
    over processes.

        Q = exp(scores); for _ in range(3): Q /= Q.sum(0) * K; Q /= Q.sum(1, keepdim) * n; return Q * n

    The computation is in log space, so nothing overflows.
    """
    log_probs, neg_inf = scores.float(), scores.new_full(scores.shape[1:], -torch.inf, dtype=torch.float32)
    for _ in range(SINKHORN_ITERATIONS):
        sums = neg_inf if is_idle or not len(log_probs) else log_probs.logsumexp(0)
        offset = reduce(sums.nan_to_num(neginf=0.0))
        log_probs = log_probs - offset - reduce((sums - offset).exp()).log()
        log_probs = log_probs - log_probs.logsumexp(1, keepdim=True)
    return log_probs.exp()
