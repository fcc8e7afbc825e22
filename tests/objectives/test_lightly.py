"""DINO, iBOT, KoLeo and Sinkhorn match the losses of lightly 1.6; tests cover where lightly differs from the papers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightly.loss import DINOLoss, IBOTPatchLoss, KoLeoLoss
from lightly.loss.swav_loss import sinkhorn as their_sinkhorn

from tests.objectives.test_dino import HEAD_OPTIONS, TRAINING_PROGRESS, build_objective, make_view_batch
from vitreous.objectives.base import gather_single_process, reduce_single_process
from vitreous.objectives.dino import DINO, cross_view_entropy
from vitreous.objectives.dinov2 import DINOv2, masked_cross_entropy, sinkhorn_knopp
from vitreous.objectives.unlabelled import koleo_loss
from vitreous.training.run import RampConfig
from vitreous.training.schedule import ramp_value

NUM_PROTOTYPES, TEACHER_TEMPERATURE = HEAD_OPTIONS["prototypes"], TRAINING_PROGRESS.values["teacher_temperature"]
RELATIVE_TOLERANCE = 1e-6  # relative, in float32
VIEW_COUNTS = [2, 3, 10]  # global views only, one local view, eight local views


def compute_gradient(loss, leaf):
    """Return the gradient of `loss` with respect to `leaf`."""
    return torch.autograd.grad(loss, leaf, retain_graph=True)[0]


@pytest.mark.parametrize("views", VIEW_COUNTS)
def test_cross_view_entropy_matches_lightly(views):
    torch.manual_seed(views)
    teacher_outputs, logits = (
        torch.randn(2, 6, NUM_PROTOTYPES),
        torch.randn(views, 6, NUM_PROTOTYPES, requires_grad=True),
    )
    theirs = DINOLoss(NUM_PROTOTYPES, student_temp=0.1)(
        list(teacher_outputs), list(logits), teacher_temp=TEACHER_TEMPERATURE
    )
    targets = (teacher_outputs / TEACHER_TEMPERATURE).softmax(-1).transpose(0, 1)
    ours = cross_view_entropy(targets, logits.transpose(0, 1) / 0.1)
    assert ours.item() == pytest.approx(theirs.item(), rel=RELATIVE_TOLERANCE)
    assert torch.allclose(compute_gradient(ours, logits), compute_gradient(theirs, logits), rtol=1e-5, atol=1e-6)


def compute_step_losses(objective, batch, theirs):
    """Return our loss and lightly's for the same teacher outputs and logits, and complete the step."""
    images, local = batch["images"], batch["local"]
    teacher_outputs = objective.compute_teacher_outputs(images).unbind(1)
    logits = [objective.head(objective.model(view)) for views in (images, local) for view in views.unbind(1)]
    expected = theirs(list(teacher_outputs), logits, teacher_temp=TEACHER_TEMPERATURE)
    loss = objective(batch)["loss"]
    objective.after_step(TRAINING_PROGRESS)
    return loss, expected


def test_dino_loss_and_centre_match_lightly_over_steps():
    """Both update the centre after the loss of a step."""
    objective, theirs = build_objective(DINO), DINOLoss(NUM_PROTOTYPES, student_temp=0.1)
    batch = make_view_batch(objective, 6)
    for _ in range(4):
        loss, expected = compute_step_losses(objective, batch, theirs)
        assert loss.item() == pytest.approx(expected.item(), rel=RELATIVE_TOLERANCE)
        assert torch.allclose(objective.centre, theirs.center.flatten(), rtol=RELATIVE_TOLERANCE, atol=1e-7)
    assert objective.centre.abs().max() > 0.01


def test_centre_is_updated_once_per_accumulated_step():
    """The paper's centre (Eq. 4) is that of a batch.

    lightly updates it inside the loss. With gradient accumulation it moves once per micro-batch, and later
    micro-batches use another centre than the first.
    """
    objective, theirs = build_objective(DINO), DINOLoss(NUM_PROTOTYPES, student_temp=0.1)
    batch = make_view_batch(objective, 6)
    micro_batches = [{name: entry[rows] for name, entry in batch.items()} for rows in (slice(0, 3), slice(3, 6))]
    teacher_outputs = [objective.compute_teacher_outputs(micro_batch["images"]) for micro_batch in micro_batches]
    for micro_batch, outputs in zip(micro_batches, teacher_outputs, strict=True):
        objective(micro_batch)
        theirs(list(outputs.unbind(1)), list(outputs.unbind(1)))
    objective.after_step(TRAINING_PROGRESS)
    means = [outputs.mean((0, 1)) for outputs in teacher_outputs]
    assert torch.allclose(objective.centre, 0.1 * (means[0] + means[1]) / 2, rtol=1e-5, atol=1e-7)
    assert torch.allclose(theirs.center.flatten(), 0.09 * means[0] + 0.1 * means[1], rtol=1e-5, atol=1e-7)


def test_teacher_temperature_ramp_matches_lightly():
    """The authors' code changes the temperature once per epoch and reaches the last value in epoch n - 1.

    A `RampConfig` changes with each step and has the same end points.
    """
    theirs = DINOLoss(NUM_PROTOTYPES, 0.04, 0.07, warmup_teacher_temp_epochs=31).teacher_temp_schedule
    ours = [ramp_value(RampConfig(0.04, 0.07, "linear", 30), step, 100) for step in range(31)]
    assert ours == pytest.approx(theirs.tolist(), rel=RELATIVE_TOLERANCE)


@pytest.mark.parametrize("centred", [False, True])
def test_masked_patch_loss_matches_lightly(centred):
    torch.manual_seed(3)
    masks = torch.rand(5, 4, 4) < 0.4
    masks[2] = False  # images without masked patches count in the mean
    count = int(masks.sum())
    teacher_outputs, logits = torch.randn(count, NUM_PROTOTYPES), torch.randn(count, NUM_PROTOTYPES, requires_grad=True)
    theirs = IBOTPatchLoss(NUM_PROTOTYPES, student_temp=0.1)
    if centred:
        theirs.center.center.copy_(torch.randn(1, NUM_PROTOTYPES))
    targets = ((teacher_outputs - theirs.center.value) / TEACHER_TEMPERATURE).softmax(-1)
    expected = theirs(teacher_outputs, logits, masks, teacher_temp=TEACHER_TEMPERATURE)
    ours = masked_cross_entropy(targets, logits / 0.1, masks.flatten(1))
    assert ours.item() == pytest.approx(expected.item(), rel=RELATIVE_TOLERANCE)
    assert torch.allclose(compute_gradient(ours, logits), compute_gradient(expected, logits), rtol=1e-5, atol=1e-6)


def test_ibot_loss_and_centre_match_lightly_over_steps():
    objective, theirs = build_objective(DINOv2, mask_probability=1.0), IBOTPatchLoss(NUM_PROTOTYPES, student_temp=0.1)
    batch = make_view_batch(objective, 6)
    masks = batch["masks"].flatten(0, 1)
    images = batch["images"].flatten(0, 1)
    for _ in range(3):
        hidden = objective.teacher.features(images)[:, objective.model.config.prefix :][masks.flatten(1)]
        logits = objective.head(objective.encode(images, masks.flatten(1))[1])
        expected = theirs(objective.teacher_head(hidden), logits, masks, teacher_temp=TEACHER_TEMPERATURE)
        assert objective(batch)["ibot"].item() == pytest.approx(expected.item(), rel=RELATIVE_TOLERANCE)
        objective.after_step(TRAINING_PROGRESS)
        assert torch.allclose(objective.patch_centre, theirs.center.value.flatten(), rtol=1e-5, atol=1e-7)
    assert objective.patch_centre.abs().max() > 0.01


def test_batches_without_masks_keep_the_centre_finite():
    """Half of the views have no mask, so a small batch may contain no masked patch."""
    objective, theirs = build_objective(DINOv2, mask_probability=0.0), IBOTPatchLoss(NUM_PROTOTYPES)
    batch = make_view_batch(objective)
    no_patches = torch.zeros(0, NUM_PROTOTYPES)
    assert theirs(no_patches, no_patches, batch["masks"].flatten(0, 1)) == 0 and theirs.center.value.isnan().all()
    outputs = objective(batch)
    objective.after_step(TRAINING_PROGRESS)
    assert outputs["ibot"] == 0 and torch.isfinite(outputs["loss"])
    assert objective.patch_centre.abs().max() == 0 and objective.centre.abs().max() > 0


@pytest.mark.parametrize("count", [2, 9])
def test_koleo_matches_lightly(count):
    torch.manual_seed(count)
    features = torch.randn(count, 12, requires_grad=True)
    ours, theirs = koleo_loss(features, gather_single_process), KoLeoLoss()(features)
    assert ours.item() == pytest.approx(theirs.item(), rel=RELATIVE_TOLERANCE)
    assert torch.allclose(compute_gradient(ours, features), compute_gradient(theirs, features), rtol=1e-5, atol=1e-6)


def test_koleo_is_finite_in_float16_and_zero_for_one_image():
    """Its eps of 1e-8 is 0 in float16, and a single image has no nearest neighbour."""
    identical = torch.ones(3, 16)
    assert koleo_loss(identical, gather_single_process).item() == pytest.approx(
        KoLeoLoss()(identical).item(), rel=RELATIVE_TOLERANCE
    )
    assert KoLeoLoss()(identical.half()).isinf()
    assert koleo_loss(identical.half(), gather_single_process).item() == pytest.approx(
        koleo_loss(identical, gather_single_process).item(), rel=1e-2
    )
    alone_image = F.normalize(torch.randn(1, 16), dim=-1)
    assert KoLeoLoss()(alone_image) > 10 and koleo_loss(alone_image, gather_single_process) == 0


@pytest.mark.parametrize("shape", [(9, 5), (4, 24), (32, 3)])
def test_sinkhorn_matches_lightly(shape):
    torch.manual_seed(shape[0])
    cosines = 2 * torch.rand(shape) - 1
    theirs = their_sinkhorn(cosines.double(), iterations=3, epsilon=TEACHER_TEMPERATURE)
    assert torch.allclose(
        sinkhorn_knopp(cosines / TEACHER_TEMPERATURE, reduce_single_process).double(),
        theirs,
        rtol=1e-5,
        atol=RELATIVE_TOLERANCE,
    )
    assert torch.allclose(theirs.sum(1), torch.ones(shape[0]).double(), rtol=RELATIVE_TOLERANCE)


def test_sinkhorn_stays_finite_where_lightly_overflows():
    """exp(8 / 0.07) overflows float32; logits of DINOv2's heads, whose scale is learned, can be that large.

    lightly does not subtract the maximum, as in the authors' code.
    """
    logits = torch.tensor([[8.0, 0.0, 1.0], [7.5, 2.0, 0.0], [0.0, 8.0, 8.0]])
    assert their_sinkhorn(logits, epsilon=0.07).isnan().any()
    ours, exact = sinkhorn_knopp(logits / 0.07, reduce_single_process), their_sinkhorn(logits.double(), epsilon=0.07)
    assert torch.allclose(ours.double(), exact, rtol=1e-4, atol=RELATIVE_TOLERANCE)
