"""Proposals, pooled regions and losses match torchvision with the same weights; vectorised code matches loops."""

import math

import pytest
import torch
from torchvision.models.detection import roi_heads, rpn
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_iou, nms, roi_align

from tests.models.test_detector import build_detector, make_detector_config, make_targets
from vitreous.data.keys import derive_key
from vitreous.models.boxes import (
    draw_splitmix64,
    is_in_crowd,
    nms_keep_mask,
    pyramid_roi_align,
    sample_foreground_background,
    to_signed_int64,
)
from vitreous.models.proposals import ANCHOR_BACKGROUND_IOU, ANCHOR_FOREGROUND_IOU, NMS_IOU, Proposals
from vitreous.models.regions import BOX_CODER_WEIGHTS

IMAGE_SIZE = (64, 128)  # a multiple of all strides, because torchvision computes strides from the level sizes


class DeterministicSampler:
    """`BalancedPositiveNegativeSampler` with our random keys."""

    def __init__(self, keys, count, share):
        self.keys, self.count, self.share = keys, count, share

    def __call__(self, labels):
        masks = []
        for image_labels, key in zip(labels, self.keys, strict=True):
            chosen = sample_foreground_background(
                image_labels.long(), draw_splitmix64(key, len(image_labels)), self.count, self.share
            )
            masks.append(
                [torch.zeros(len(image_labels), dtype=torch.bool).scatter(0, indices, True) for indices in chosen]
            )
        return [list(column) for column in zip(*masks, strict=True)]


def build_torchvision_rpn(model, **changes):
    """torchvision's region proposal network with our head."""
    sides = tuple((8 * stride,) for stride in model.config.strides)
    anchors = rpn.AnchorGenerator(sides, ((0.5, 1.0, 2.0),) * len(sides))
    count = {"training": model.config.proposals, "testing": model.config.proposals}
    most = {"training": 2 * model.config.proposals, "testing": model.config.proposals}
    return rpn.RegionProposalNetwork(
        anchors,
        model.proposals.head,
        ANCHOR_FOREGROUND_IOU,
        ANCHOR_BACKGROUND_IOU,
        256,
        0.5,
        most,
        count,
        NMS_IOU,
        **changes,
    )


def make_model_with_levels(**changes):
    """A model, two images and their feature levels."""
    model = build_detector(make_detector_config("hybrid", **changes))
    torch.nn.init.normal_(model.proposals.head.cls_logits.weight, std=0.5)
    torch.nn.init.normal_(model.proposals.head.bbox_pred.weight, std=0.2)
    images = torch.randn(2, 3, *IMAGE_SIZE, generator=torch.Generator().manual_seed(1))
    return model, model.levels(images), images


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("count", [15, 60])
def test_proposals_match_torchvision(count, training):
    model, levels, images = make_model_with_levels(proposals=count)
    peer = build_torchvision_rpn(model).train(training)
    model.train(training)
    maps = {str(index): level for index, level in enumerate(levels)}
    with torch.no_grad():
        anchors = model.proposals.make_anchors(levels)
        assert torch.equal(torch.cat(anchors), peer.anchor_generator(ImageList(images, [IMAGE_SIZE] * 2), levels)[0])
        ours = model.proposals(levels, IMAGE_SIZE)
        theirs, _ = peer(ImageList(images, [IMAGE_SIZE] * 2), maps, [{"boxes": torch.zeros(0, 4)}] * 2)
    for boxes, valid, expected in zip(ours.boxes, ours.valid, theirs, strict=True):
        assert torch.allclose(boxes[valid], expected, atol=1e-5)
        assert (boxes[~valid] == 0).all() and valid.sum() == len(expected) <= count


@pytest.mark.parametrize("agnostic", [False, True])
@pytest.mark.parametrize("threshold", [0.02, 0.3])
def test_detections_match_torchvision(threshold, agnostic):
    model, levels, _ = make_model_with_levels(proposals=30, threshold=threshold, agnostic=agnostic, detections=25)
    config, heads = model.config, model.regions.eval()
    with torch.no_grad():
        proposals = model.eval().proposals(levels, IMAGE_SIZE)
        boxes, scores, labels = heads(levels, proposals, IMAGE_SIZE)
        valid_boxes = [image_boxes[valid] for image_boxes, valid in zip(proposals.boxes, proposals.valid, strict=True)]
        regions = torch.cat([torch.cat([torch.full((len(r), 1), float(i)), r], 1) for i, r in enumerate(valid_boxes)])
        logits, deltas = heads.box(heads.pool_regions(levels, regions, 7))
        peer = roi_heads.RoIHeads(None, None, None, 0.5, 0.5, 512, 0.25, None, threshold, config.nms, 25)
        assert peer.box_coder.weights == BOX_CODER_WEIGHTS
        deltas = deltas.repeat(1, 1 + config.classes) if agnostic else deltas
        theirs = peer.postprocess_detections(logits, deltas, valid_boxes, [IMAGE_SIZE] * 2)
    for image in range(2):
        count = len(theirs[1][image])
        assert count == (scores[image] > 0).sum() and count
        assert torch.allclose(scores[image, :count], theirs[1][image], atol=1e-6)
        assert torch.allclose(boxes[image, :count], theirs[0][image], atol=1e-4)
        assert torch.equal(labels[image, :count] + 1, theirs[2][image])


@pytest.mark.parametrize("agnostic", [False, True])
def test_losses_match_torchvision(agnostic):
    model, levels, images = make_model_with_levels(proposals=60, masks=True, agnostic=agnostic)
    levels, targets = (
        [level[:1] for level in levels],
        {name: values[:1] for name, values in make_targets(IMAGE_SIZE).items()},
    )
    targets |= {"crowd": [torch.zeros(3, dtype=torch.bool)]}
    losses, proposals = model.proposals.losses(levels, IMAGE_SIZE, targets)
    losses |= model.regions.losses(levels, proposals, targets)
    truth = [{"boxes": targets["boxes"][0], "labels": targets["labels"][0] + 1, "masks": targets["masks"][0]}]
    peer = build_torchvision_rpn(model).train()
    peer.fg_bg_sampler = DeterministicSampler(targets["keys"], 256, 0.5)
    maps = {str(index): level for index, level in enumerate(levels)}
    theirs, expected = peer(ImageList(images[:1], [IMAGE_SIZE]), maps, truth)
    assert losses["objectness"].item() == pytest.approx(expected["loss_objectness"].item(), rel=1e-5)
    assert losses["proposals"].item() == pytest.approx(expected["loss_rpn_box_reg"].item(), rel=1e-5)
    count = int(proposals.valid.sum())
    assert torch.allclose(proposals.boxes[0, :count], theirs[0], atol=1e-4)

    boxes, labels, match = model.regions.sample_training_regions(proposals, targets, 0)
    assert ((labels > 0) == (box_iou(boxes, truth[0]["boxes"]).max(1).values >= 0.5)).all() and (labels > 0).any()
    assert len(labels) == min(512, count + 3)
    read = lambda rois, bins: model.regions.pool_regions(levels, torch.cat([torch.zeros(len(rois), 1), rois], 1), bins)  # noqa: E731
    logits, deltas = model.regions.box(read(boxes, 7))
    deltas = deltas.repeat(1, 4) if agnostic else deltas
    expected = model.regions.coder.encode_single(truth[0]["boxes"][match], boxes)
    classes, distances = roi_heads.fastrcnn_loss(logits, deltas, [labels], [expected])
    assert losses["classes"].item() == pytest.approx(classes.item(), rel=1e-5)
    assert losses["boxes"].item() == pytest.approx(distances.item(), rel=1e-5)
    logits, values = model.regions.mask(read(boxes[labels > 0], 14)), match[labels > 0]
    # torchvision counts classes from 1 and has a background mask
    masks = roi_heads.maskrcnn_loss(
        torch.nn.functional.pad(logits, (0, 0, 0, 0, 1, 0)), [boxes[labels > 0]], [truth[0]["masks"]],
        [truth[0]["labels"]], [values],
    )  # fmt: skip
    assert losses["masks"].item() == pytest.approx(masks.item(), rel=1e-5)


def test_losses_are_the_mean_over_images():
    model, _, images = make_model_with_levels(masks=True)
    targets = make_targets(IMAGE_SIZE)
    batch_losses = model.losses(images, targets)
    single_losses = [
        model.losses(images[i : i + 1], {name: values[i : i + 1] for name, values in targets.items()}) for i in (0, 1)
    ]
    for name, loss in batch_losses.items():
        assert loss.item() == pytest.approx(
            (single_losses[0][name] + single_losses[1][name]).item() / 2, rel=1e-4, abs=1e-6
        ), name


def test_anchors_inside_crowds_are_ignored():
    model, levels, _ = make_model_with_levels()
    anchors = torch.cat(model.proposals.make_anchors(levels))
    boxes, crowd = make_targets()["boxes"][0][:2], torch.tensor([[0.0, 8, 100, 64]])
    without_crowd, _ = model.proposals.match_anchors(anchors, boxes, crowd[:0])
    labels, match = model.proposals.match_anchors(anchors, boxes, crowd)
    inside = is_in_crowd(anchors, crowd)
    for box, is_inside in zip(anchors.tolist(), inside.tolist(), strict=True):
        across, down = min(box[2], 100) - max(box[0], 0), min(box[3], 64) - max(box[1], 8)
        share = max(0, across) * max(0, down) / ((box[2] - box[0]) * (box[3] - box[1]))
        assert is_inside == (share >= 0.7) or abs(share - 0.7) < 1e-5
    assert inside.any() and (labels[inside & (without_crowd == 0)] == -1).all()
    assert (
        torch.equal(labels[~inside], without_crowd[~inside])
        and (labels[without_crowd == 1] == 1).all()
        and match.max() == 1
    )
    proposals = Proposals(torch.tensor([[[2.0, 32, 28, 46], [40, 2, 60, 9]]]), torch.tensor([[True, False]]))
    targets = {name: values[:1] for name, values in make_targets(IMAGE_SIZE).items()}
    chosen, labels, _ = model.regions.sample_training_regions(proposals, targets, 0)
    assert torch.equal(chosen.sort(0).values, boxes.sort(0).values) and sorted(labels.tolist()) == [1, 3]


def test_regions_are_pooled_from_their_pyramid_level():
    torch.manual_seed(0)
    strides = (4, 8, 16)
    levels = [torch.randn(2, 3, -(-50 // stride), -(-70 // stride)) for stride in strides]
    corner = torch.rand(40, 2) * 40
    boxes = torch.cat([corner, corner + torch.rand(40, 2) ** 3 * 400 + 0.5], 1)
    boxes[:, ::2].clamp_(max=70), boxes[:, 1::2].clamp_(max=50)
    regions = torch.cat([torch.arange(40.0)[:, None] % 2, boxes], 1)
    for sampling, learned in ((0, False), (2, False), (1, True), (2, True)):
        features = pyramid_roi_align([level.requires_grad_(learned) for level in levels], strides, regions, 7, sampling)
        used_levels = set()
        for region, pooled in zip(regions, features, strict=True):
            side = math.sqrt((region[3] - region[1]) * (region[4] - region[2]))
            level_index = min(max(math.floor(math.log2(side / (14 * 4)) + 1e-6), 0), 2)
            used_levels.add(level_index)
            expected = roi_align(
                levels[level_index], region[None], 7, 1 / strides[level_index], sampling, aligned=True
            )[0]
            assert torch.allclose(pooled, expected, atol=1e-4)
        assert used_levels == {0, 1, 2} or used_levels == {0}  # the image has few large regions


def test_grouped_nms_matches_nms_per_group():
    torch.manual_seed(0)
    corner = torch.rand(200, 2) * 80
    boxes, scores = torch.cat([corner, corner + 5 + torch.rand(200, 2) * 30], 1), torch.rand(200)
    for groups in (torch.zeros(200, dtype=torch.int64), torch.randint(0, 7, (200,)), torch.randint(0, 1203, (200,))):
        expected = torch.zeros(200, dtype=torch.bool)
        for group in groups.unique():
            group_indices = (groups == group).nonzero().flatten()
            expected[group_indices[nms(boxes[group_indices], scores[group_indices], 0.5)]] = True
        assert torch.equal(nms_keep_mask(boxes, scores, groups, 0.5), expected)


def test_draws_are_splitmix_and_choose_evenly():
    ours = draw_splitmix64(torch.tensor(to_signed_int64(derive_key(5))), 4).tolist()
    state = derive_key(5)
    for position, value in enumerate(ours, 1):
        value_bits = (state + position * 0x9E3779B97F4A7C15) & (2**64 - 1)
        value_bits = ((value_bits ^ (value_bits >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        value_bits = ((value_bits ^ (value_bits >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        assert value == to_signed_int64(value_bits ^ (value_bits >> 31))
    labels = torch.tensor([1] * 6 + [0] * 30 + [-1] * 4)
    counts = torch.zeros(40)
    for key in range(600):
        positive, negative = sample_foreground_background(labels, draw_splitmix64(torch.tensor(key), 40), 8, 0.25)
        assert len(positive) == 2 and len(negative) == 6
        counts[positive] += 1
        counts[negative] += 1
    assert (counts[36:] == 0).all()
    assert (counts[:6] / 600 - 2 / 6).abs().max() < 0.08 and (counts[6:36] / 600 - 6 / 30).abs().max() < 0.08
    for case_labels in (labels, labels.clamp(max=0), labels.clamp(min=0), torch.full((40,), -1)):
        counts = [
            len(indices)
            for indices in sample_foreground_background(case_labels, draw_splitmix64(torch.tensor(1), 40), 8, 0.25)
        ]
        theirs = BalancedPositiveNegativeSampler(8, 0.25)([case_labels])
        assert counts == [int(mask[0].sum()) for mask in theirs]
