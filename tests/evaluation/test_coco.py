"""Evaluation of detectors: COCO's exact metrics, bootstrap intervals without repeated matching, and error types."""

import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.evaluation.detection_scenes import (
    COCO_METRIC_NAMES,
    PaintedEngine,
    PaintedSplit,
    draw_scene,
    evaluate_with_pycocotools,
)
from tests.tasks.test_detections import detect_painted_rectangles, draw_rectangles
from vitreous.data.annotations.shapes import mask_to_rle
from vitreous.data.annotations.target import Target, VerifiedClasses, stack_masks
from vitreous.data.loader import EvalLoader
from vitreous.errors import DataError, ResourceError
from vitreous.evaluation.average_precision import (
    compute_coco_metrics,
    compute_precision_curves,
    compute_tide_ap50_gains,
    group_matches_by_class,
)
from vitreous.evaluation.coco import CocoEvaluator, compute_detection_confusion, find_best_f1_threshold
from vitreous.evaluation.evaluator import Ragged, SplitOutputs
from vitreous.evaluation.matching import (
    IOU_THRESHOLDS,
    box_iou,
    get_true_mask_runs,
    match_detections,
    match_image,
    pack_match_bits,
    select_region_columns,
    unpack_match_bits,
)
from vitreous.tasks.detections import Detections
from vitreous.training.validation import compute_distributed_outputs

CLASSES = ("a", "b", "c", "d")


def match_scenes(scenes, masks=True):
    """The matching rows of all images."""
    tables = [match_image(detections, truth, masks) for detections, truth in scenes]
    return Ragged(np.concatenate(tables), np.array([len(table) for table in tables]))


def make_split_outputs(scenes, masks=True):
    return SplitOutputs(PaintedSplit([None] * len(scenes), []), match_scenes(scenes, masks), np.ones(len(scenes), bool))


@pytest.mark.parametrize("seed", range(4))
def test_metrics_match_pycocotools(seed):
    draw = np.random.default_rng(seed)
    scenes = [draw_scene(draw, (120 + index, 200), ties=seed % 2 == 0) for index in range(20)]
    report = CocoEvaluator(CLASSES, masks=True).report(make_split_outputs(scenes))
    for start, kind in (("", "segm"), ("box_", "bbox")):
        expected, precision = evaluate_with_pycocotools(scenes, kind)
        metrics = [report.metrics[start + name] for name in COCO_METRIC_NAMES]
        assert [-1 if value is None else value for value in metrics] == pytest.approx(expected, abs=1e-9)
        assert expected[0] > 0.02
        by_class = [class_metrics[f"{start}ap"] for class_metrics in report.per_class]
        assert by_class == pytest.approx(precision.mean((0, 1)), abs=1e-9)
        assert [class_metrics[f"{start}ap50"] for class_metrics in report.per_class] == pytest.approx(
            precision[0].mean(0), abs=1e-9
        )
    curves = compute_precision_curves(
        group_matches_by_class(match_scenes(scenes).table, match_scenes(scenes).images, 20, 0, 4), 0
    )
    assert np.allclose(curves, evaluate_with_pycocotools(scenes, "segm")[1][0].T, atol=1e-9)
    alone = CocoEvaluator(CLASSES).report(make_split_outputs(scenes, masks=False))
    assert alone.metrics == {name: report.metrics[f"box_{name}"] for name in COCO_METRIC_NAMES}


def test_at_most_100_detections_per_class_count():
    draw, size = np.random.default_rng(0), (60, 80)
    low = draw.uniform(0, 40, (300, 2)).round()
    boxes = np.concatenate([low, low + 9], 1).astype(np.float32)
    detections = Detections(size, boxes, draw.integers(0, 2, 300), np.linspace(1, 0.1, 300, dtype=np.float32))
    truth_indices = draw.permutation(300)[:40]
    layers = np.stack(
        [draw_truth_mask(box, size, instance_id) for instance_id, box in enumerate(boxes[truth_indices], 1)]
    )
    truth = Target(size, detections.labels[truth_indices], boxes[truth_indices], np.zeros(40, bool), layers=layers)
    report = CocoEvaluator(CLASSES[:2]).report(make_split_outputs([(detections, truth)], masks=False))
    expected, _ = evaluate_with_pycocotools([(detections, truth)], "bbox", 2)
    assert [-1 if value is None else value for value in report.metrics.values()] == pytest.approx(expected, abs=1e-9)
    assert set(report.intervals.values()) == {None}


def draw_truth_mask(box, size, instance_id):
    layer = np.zeros(size, np.int32)
    layer[int(box[1]) : int(box[3]), int(box[0]) : int(box[2])] = instance_id
    return layer


def test_bootstrap_draws_match_evaluating_the_drawn_images():
    draw = np.random.default_rng(5)
    scenes = [draw_scene(draw, ties=False) for _ in range(8)]
    matches = match_scenes(scenes)
    counts = np.stack([np.bincount(draw.integers(8, size=8), minlength=8) for _ in range(4)], 1).astype(np.float32)
    for region in (0, 1):
        drawn = dict(compute_coco_metrics(group_matches_by_class(matches.table, matches.images, 8, region, 4), counts))
        for draw_index in range(4):
            chosen = matches.take(np.repeat(np.arange(8), counts[:, draw_index].astype(int)))
            again = compute_coco_metrics(
                group_matches_by_class(chosen.table, chosen.images, 8, region, 4), np.ones((8, 1), np.float32)
            )
            for name, value in again:
                assert drawn[name][draw_index] == pytest.approx(value[0], abs=1e-6, nan_ok=True), name


def test_metrics_missing_from_many_draws_have_no_interval():
    detections, truth = make_error_case()
    large = np.array([0, 0, 99, 99], np.float32)
    table = np.stack([large, *truth.boxes[1:]])
    other_scenes = [(detections, truth)] * 29
    rare = CocoEvaluator(("a", "b")).report(
        make_split_outputs([(detections, replace(truth, boxes=table)), *other_scenes], False)
    )
    # a third of the draws has no large object
    assert rare.metrics["ap_large"] == 0 and rare.intervals["ap_large"] is None
    common = [(detections, replace(truth, boxes=table))] * 5 + other_scenes
    assert CocoEvaluator(("a", "b")).report(make_split_outputs(common, False)).intervals["ap_large"] == (0, 0)


def match_by_loops(iou, crowd, ignored, threshold):
    """COCO's rule for one area and one threshold, object by object."""
    order = sorted(range(iou.shape[1]), key=lambda object_index: ignored[object_index])
    owner, matched = [], set()
    for detection_iou in iou:
        best, most = -1, min(threshold, 1 - 1e-10)
        for object_index in order:
            if object_index in matched and not crowd[object_index]:
                continue
            if best >= 0 and not ignored[best] and ignored[object_index]:
                break
            if detection_iou[object_index] >= most:
                best, most = object_index, detection_iou[object_index]
        owner.append(best)
        matched |= {best}
    return owner


def test_matching_equals_the_naive_loop():
    draw = np.random.default_rng(2)
    for _ in range(100):
        n, g = draw.integers(0, 8), draw.integers(0, 6)
        iou = draw.choice([0.0, 0.5, 0.6, 0.75, 0.9, 1.0], (n, g))
        crowd = draw.random(g) < 0.3
        ignored = np.stack([crowd | (draw.random(g) < 0.3) for _ in range(4)])
        owner = match_detections(iou, crowd, ignored)
        for area in range(4):
            for level, threshold in enumerate(IOU_THRESHOLDS):
                assert owner[area, level].tolist() == match_by_loops(iou, crowd, ignored[area], threshold)
    flags = draw.random((4, 10, 7)) < 0.5
    assert np.array_equal(unpack_match_bits(pack_match_bits(flags)), flags)
    assert box_iou(np.array([[0, 0, 2, 2]]), np.array([[1, 0, 3, 2]]), np.array([True])).tolist() == [[0.5]]


def test_true_masks_are_converted_to_run_lengths():
    draw = np.random.default_rng(9)
    for _ in range(5):
        _, truth = draw_scene(draw)
        assert get_true_mask_runs(truth) == [mask_to_rle(mask) for mask in truth.masks()]
    assert get_true_mask_runs(truth.without_masks()) is None


IMAGE_SIZE = (100, 100)
TRUE_OBJECTS = [(0, 0, 20, 20, 0), (40, 0, 60, 20, 1), (0, 40, 20, 60, 0), (40, 40, 60, 60, 1), (80, 80, 100, 100, 1)]
DETECTIONS_WITH_ERRORS = [  # detections by falling score, with the error of each
    (0, 0, 20, 20, 0, None),
    (1, 0, 21, 20, 0, "duplicate"),
    (40, 0, 60, 20, 0, "class"),
    (8, 40, 28, 60, 0, "localisation"),
    (50, 40, 70, 60, 0, "both"),
    (80, 0, 95, 15, 1, "nothing"),
]


def make_error_case():
    table = np.array([row[:5] for row in DETECTIONS_WITH_ERRORS], float)
    truth = np.array(TRUE_OBJECTS, float)
    detections = Detections(
        IMAGE_SIZE, table[:, :4].astype(np.float32), table[:, 4].astype(int), np.linspace(0.9, 0.4, 6, dtype=np.float32)
    )
    return detections, Target(IMAGE_SIZE, truth[:, 4].astype(int), truth[:, :4].astype(np.float32), np.zeros(5, bool))


def test_error_types_and_their_ap_cost_match_hand_fixes():
    matches = match_image(*make_error_case(), False)
    names = [None, "localisation", "class", "both", "duplicate", "nothing", "missed"]
    assert [names[int(match[4 + 2])] for match in matches[:6]] == [match[5] for match in DETECTIONS_WITH_ERRORS]
    assert [names[int(match[4 + 2])] for match in matches[6:]] == [None, None, None, "missed", "missed"]
    images = np.zeros(len(matches), int)

    def ap50(hits_by_class, objects):
        """AP50 computed by hand from hits by falling score, for each class."""
        values = []
        for hits, total in zip(hits_by_class, objects, strict=True):
            right = np.cumsum(hits)
            precision = np.maximum.accumulate((right / np.arange(1, len(hits) + 1))[::-1])[::-1]
            positions = np.searchsorted(right / total, np.linspace(0, 1, 101))
            values.append(np.mean([precision[position] if position < len(hits) else 0 for position in positions]))
        return np.mean(values)

    baseline = ap50([[1, 0, 0, 0, 0], [0]], [2, 3])
    expected = {
        "localisation": ap50([[1, 0, 0, 1, 0], [0]], [2, 3]) - baseline,
        "class": ap50([[1, 0, 0, 0], [1, 0]], [2, 3]) - baseline,
        "both": ap50([[1, 0, 0, 0], [0]], [2, 3]) - baseline,
        "duplicate": ap50([[1, 0, 0, 0], [0]], [2, 3]) - baseline,
        "nothing": 0.0,
        "missed": ap50([[1, 0, 0, 0, 0], [0]], [2, 1]) - baseline,
    }
    assert compute_tide_ap50_gains(matches, images, 1, 0, 2) == pytest.approx(expected)
    assert expected["localisation"] > 0 and expected["class"] > 0


def test_detection_confusion_uses_the_best_f1_threshold():
    matches = match_image(*make_error_case(), False)
    pairs = group_matches_by_class(matches, np.zeros(len(matches), int), 1, 0, 2)
    assert find_best_f1_threshold(pairs) == pytest.approx(0.9)  # the one detection above it is correct
    everything = compute_detection_confusion(matches, 0.0, 2)
    assert everything.tolist() == [[1, 0, 1], [1, 0, 2], [3, 1, 0]]
    assert compute_detection_confusion(matches, 0.85, 2).tolist() == [[1, 0, 1], [0, 0, 3], [0, 0, 0]]
    report = CocoEvaluator(("a", "b")).report(make_split_outputs([make_error_case(), make_error_case()], masks=False))
    assert report.per_class[0]["recall"] == 0.5 and report.per_class[0]["precision"] == 1
    assert report.per_class[1]["precision"] is None and report.per_class[1]["objects"] == 6
    assert report.details["objects"]["confusion"] == [[2, 0, 2], [0, 0, 6], [0, 0, 0]]
    low, high = report.intervals["ap50"]
    assert low <= report.metrics["ap50"] <= high and report.headline[0] == "AP"


def test_federated_data_count_only_verified_classes():
    draw = np.random.default_rng(7)
    scenes = [draw_scene(draw) for _ in range(12)]
    nothing = [VerifiedClasses(np.setdiff1d(np.arange(4), truth.labels), np.zeros(0, int)) for _, truth in scenes]
    everything = [
        (image_detections, replace(truth, verified=verified))
        for (image_detections, truth), verified in zip(scenes, nothing, strict=True)
    ]
    plain = CocoEvaluator(CLASSES, True).report(make_split_outputs(scenes)).metrics
    assert CocoEvaluator(CLASSES, True).report(make_split_outputs(everything)).metrics == plain
    silent = [
        (image_detections, replace(truth, verified=VerifiedClasses(verified.absent[:1], verified.partial)))
        for (image_detections, truth), verified in zip(scenes, nothing, strict=True)
    ]
    chosen = [
        (
            image_detections.take(np.isin(image_detections.labels, [*truth.labels, *truth.verified.absent])),
            replace(truth, verified=None),
        )
        for image_detections, truth in silent
    ]
    metrics = CocoEvaluator(CLASSES, True).report(make_split_outputs(silent)).metrics
    assert (
        metrics == CocoEvaluator(CLASSES, True).report(make_split_outputs(chosen)).metrics
        and metrics["ap"] > plain["ap"]
    )
    detections, truth = everything[0][0], replace(scenes[0][1], verified=VerifiedClasses(np.arange(4), np.array([1])))
    table, class_mask = match_image(detections, truth, False), detections.labels == 1
    federated, all_verified = (
        select_region_columns(image_detections, 0)[: len(detections)]
        for image_detections in (table, match_image(*scenes[0], False))
    )
    matched, ignored = (unpack_match_bits(federated[:, column]) for column in (0, 1))
    assert np.array_equal(federated[~class_mask], all_verified[~class_mask]) and class_mask.any()
    assert (matched | ignored)[..., class_mask].all() and not federated[class_mask, 2].any()


def test_ap_is_grouped_by_class_frequency():
    draw = np.random.default_rng(8)
    outputs, groups = make_split_outputs([draw_scene(draw) for _ in range(9)], False), ("rare", "common", "rare", "")
    report = CocoEvaluator(CLASSES, frequency=groups).report(outputs)
    class_aps = [row["ap"] for row in report.per_class]
    assert report.metrics["ap_rare"] == pytest.approx((class_aps[0] + class_aps[2]) / 2)
    assert report.metrics["ap_common"] == pytest.approx(class_aps[1]) and report.metrics["ap_frequent"] is None


def make_painted_split(count):
    """Synthetic images and their objects; the last object of each is not painted."""
    images, targets = [], []
    for index in range(count):
        objects = [(2, 3, 12 + index, 20, 100), (20, 5, 40, 25, 200), (30, 26, 46, 31, 100)]
        images.append(draw_rectangles((32, 48), *objects[:2])[0])
        masks = [draw_rectangles((32, 48), rectangle)[0] > 0 for rectangle in objects]
        boxes, labels = np.array([rectangle[:4] for rectangle in objects], np.float32), np.array([0, 1, 0])
        targets.append(Target((32, 48), labels, boxes, np.zeros(3, bool), layers=stack_masks(masks, (32, 48))))
    return PaintedSplit(images, targets)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_model_is_evaluated_on_a_split(workers):
    split, evaluator = make_painted_split(5), CocoEvaluator(("dark", "light"), masks=True)
    report = evaluator(PaintedEngine(detect_painted_rectangles), split, workers)
    assert report.images == 5 and report.unreadable == 0 and report.per_class[1]["ap"] == pytest.approx(1)
    recall = 51 / 101  # half of the objects of the first class are found, and all detections are correct
    assert report.metrics["ap"] == report.metrics["box_ap"] == pytest.approx((1 + recall) / 2)
    assert report.metrics["ap_large"] is None and report.intervals["ap_large"] is None
    split.pictures[1] = None
    worse = evaluator(PaintedEngine(detect_painted_rectangles), split, workers)
    assert worse.unreadable == 1 and worse.metrics["ap"] < report.metrics["ap"]
    assert worse.per_class[1]["objects"] == 5


def test_mask_metrics_require_mask_data():
    split = make_painted_split(2)
    split.targets = [target.without_masks() for target in split.targets]
    with pytest.raises(DataError, match="boxes but no masks"):
        CocoEvaluator(("dark", "light"), masks=True)(PaintedEngine(detect_painted_rectangles), split, 0)
    engine = PaintedEngine(detect_painted_rectangles, masks=False)
    assert CocoEvaluator(("dark", "light"))(engine, split, 0).metrics["ap50"] == pytest.approx((1 + 51 / 101) / 2)


def test_a_missing_library_is_reported_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "faster_coco_eval.core.mask", None)
    with pytest.raises(ResourceError, match="faster-coco-eval") as error:
        CocoEvaluator(("a",), masks=True)
    assert error.value.hint == "pip install 'vitreous[dense]'"
    CocoEvaluator(("a",))


class ThreadProcessGroup:
    """Two threads that exchange rows, as processes do."""

    def __init__(self, rank, parts, barrier):
        self.rank, self.world, self.parts, self.barrier = rank, 2, parts, barrier

    def all_reduce_max(self, values, device):
        return values

    def gather(self, rows):
        self.parts[self.rank] = rows
        self.barrier.wait(10)
        both = list(self.parts)
        self.barrier.wait(10)
        return both


def test_two_processes_gather_the_results_of_one():
    split, evaluator, engine = (
        make_painted_split(130),
        CocoEvaluator(("dark", "light")),
        PaintedEngine(detect_painted_rectangles),
    )
    split.pictures[100] = None
    engine.device = torch.device("cpu")
    parts, barrier, results = [None, None], threading.Barrier(2), {}

    def work(rank):
        results[rank] = compute_distributed_outputs(
            engine, ThreadProcessGroup(rank, parts, barrier), 0, lambda: False, evaluator, split
        )

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows, bad = evaluator.outputs(engine, EvalLoader(split, engine.preprocess))
    for rank in range(2):
        assert np.array_equal(results[rank].outputs.table, rows.table)
        assert np.array_equal(results[rank].outputs.lengths, rows.lengths)
        assert np.flatnonzero(~results[rank].readable).tolist() == list(bad) == [100]
