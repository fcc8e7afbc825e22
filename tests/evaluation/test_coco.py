"""Judging detectors: COCO's figures to the last digit, intervals without judging again, and what is wrong."""

import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.evaluation.detecting import (
    COCO_METRIC_NAMES,
    PaintedEngine,
    PaintedSplit,
    draw_scene,
    evaluate_with_pycocotools,
)
from tests.tasks.test_detections import draw_rectangles, painted_model
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
    """The rows of all images."""
    tables = [match_image(answers, truth, masks) for answers, truth in scenes]
    return Ragged(np.concatenate(tables), np.array([len(table) for table in tables]))


def make_split_outputs(scenes, masks=True):
    return SplitOutputs(PaintedSplit([None] * len(scenes), []), match_scenes(scenes, masks), np.ones(len(scenes), bool))


@pytest.mark.parametrize("seed", range(4))
def test_metrics_match_pycocotools(seed):
    draw = np.random.default_rng(seed)
    scenes = [draw_scene(draw, (120 + number, 200), ties=seed % 2 == 0) for number in range(20)]
    report = CocoEvaluator(CLASSES, masks=True).report(make_split_outputs(scenes))
    for start, kind in (("", "segm"), ("box_", "bbox")):
        wanted, precision = evaluate_with_pycocotools(scenes, kind)
        figures = [report.metrics[start + name] for name in COCO_METRIC_NAMES]
        assert [-1 if value is None else value for value in figures] == pytest.approx(wanted, abs=1e-9)
        assert wanted[0] > 0.02
        by_class = [row[f"{start}ap"] for row in report.per_class]
        assert by_class == pytest.approx(precision.mean((0, 1)), abs=1e-9)
        assert [row[f"{start}ap50"] for row in report.per_class] == pytest.approx(precision[0].mean(0), abs=1e-9)
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
    answers = Detections(size, boxes, draw.integers(0, 2, 300), np.linspace(1, 0.1, 300, dtype=np.float32))
    rows = draw.permutation(300)[:40]
    layers = np.stack([truth_mask(box, size, number) for number, box in enumerate(boxes[rows], 1)])
    truth = Target(size, answers.labels[rows], boxes[rows], np.zeros(40, bool), layers=layers)
    report = CocoEvaluator(CLASSES[:2]).report(make_split_outputs([(answers, truth)], masks=False))
    wanted, _ = evaluate_with_pycocotools([(answers, truth)], "bbox", 2)
    assert [-1 if value is None else value for value in report.metrics.values()] == pytest.approx(wanted, abs=1e-9)
    assert set(report.intervals.values()) == {None}


def truth_mask(box, size, number):
    layer = np.zeros(size, np.int32)
    layer[int(box[1]) : int(box[3]), int(box[0]) : int(box[2])] = number
    return layer


def test_bootstrap_draws_match_evaluating_the_drawn_images():
    draw = np.random.default_rng(5)
    scenes = [draw_scene(draw, ties=False) for _ in range(8)]
    rows = match_scenes(scenes)
    counts = np.stack([np.bincount(draw.integers(8, size=8), minlength=8) for _ in range(4)], 1).astype(np.float32)
    for kind in (0, 1):
        drawn = dict(compute_coco_metrics(group_matches_by_class(rows.table, rows.images, 8, kind, 4), counts))
        for number in range(4):
            chosen = rows.take(np.repeat(np.arange(8), counts[:, number].astype(int)))
            again = compute_coco_metrics(
                group_matches_by_class(chosen.table, chosen.images, 8, kind, 4), np.ones((8, 1), np.float32)
            )
            for name, value in again:
                assert drawn[name][number] == pytest.approx(value[0], abs=1e-6, nan_ok=True), name


def test_metrics_missing_from_many_draws_have_no_interval():
    answers, truth = make_error_case()
    large = np.array([0, 0, 99, 99], np.float32)
    table = np.stack([large, *truth.boxes[1:]])
    others = [(answers, truth)] * 29
    rare = CocoEvaluator(("a", "b")).report(
        make_split_outputs([(answers, replace(truth, boxes=table)), *others], False)
    )
    assert rare.metrics["ap_large"] == 0 and rare.intervals["ap_large"] is None  # a third of the draws has none
    usual = [(answers, replace(truth, boxes=table))] * 5 + others
    assert CocoEvaluator(("a", "b")).report(make_split_outputs(usual, False)).intervals["ap_large"] == (0, 0)


def match_by_loops(iou, crowd, ignored, threshold):
    """COCO's rule for one area and one threshold, object by object."""
    order = sorted(range(iou.shape[1]), key=lambda place: ignored[place])
    owner, taken = [], set()
    for row in iou:
        best, most = -1, min(threshold, 1 - 1e-10)
        for place in order:
            if place in taken and not crowd[place]:
                continue
            if best >= 0 and not ignored[best] and ignored[place]:
                break
            if row[place] >= most:
                best, most = place, row[place]
        owner.append(best)
        taken |= {best}
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
DETECTIONS_WITH_ERRORS = [  # answers of falling score, and what is wrong with each
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
    answers = Detections(
        IMAGE_SIZE, table[:, :4].astype(np.float32), table[:, 4].astype(int), np.linspace(0.9, 0.4, 6, dtype=np.float32)
    )
    return answers, Target(IMAGE_SIZE, truth[:, 4].astype(int), truth[:, :4].astype(np.float32), np.zeros(5, bool))


def test_error_types_and_their_ap_cost_match_hand_fixes():
    rows = match_image(*make_error_case(), False)
    names = [None, "localisation", "class", "both", "duplicate", "nothing", "missed"]
    assert [names[int(row[4 + 2])] for row in rows[:6]] == [row[5] for row in DETECTIONS_WITH_ERRORS]
    assert [names[int(row[4 + 2])] for row in rows[6:]] == [None, None, None, "missed", "missed"]
    images = np.zeros(len(rows), int)

    def ap50(answers, objects):
        """AP50 of hits by falling score, for each class, by hand."""
        values = []
        for hits, total in zip(answers, objects, strict=True):
            right = np.cumsum(hits)
            precision = np.maximum.accumulate((right / np.arange(1, len(hits) + 1))[::-1])[::-1]
            places = np.searchsorted(right / total, np.linspace(0, 1, 101))
            values.append(np.mean([precision[place] if place < len(hits) else 0 for place in places]))
        return np.mean(values)

    before = ap50([[1, 0, 0, 0, 0], [0]], [2, 3])
    wanted = {
        "localisation": ap50([[1, 0, 0, 1, 0], [0]], [2, 3]) - before,
        "class": ap50([[1, 0, 0, 0], [1, 0]], [2, 3]) - before,
        "both": ap50([[1, 0, 0, 0], [0]], [2, 3]) - before,
        "duplicate": ap50([[1, 0, 0, 0], [0]], [2, 3]) - before,
        "nothing": 0.0,
        "missed": ap50([[1, 0, 0, 0, 0], [0]], [2, 1]) - before,
    }
    assert compute_tide_ap50_gains(rows, images, 1, 0, 2) == pytest.approx(wanted)
    assert wanted["localisation"] > 0 and wanted["class"] > 0


def test_detection_confusion_uses_the_best_f1_threshold():
    rows = match_image(*make_error_case(), False)
    pairs = group_matches_by_class(rows, np.zeros(len(rows), int), 1, 0, 2)
    assert find_best_f1_threshold(pairs) == pytest.approx(0.9)  # one of one is right
    everything = compute_detection_confusion(rows, 0.0, 2)
    assert everything.tolist() == [[1, 0, 1], [1, 0, 2], [3, 1, 0]]
    assert compute_detection_confusion(rows, 0.85, 2).tolist() == [[1, 0, 1], [0, 0, 3], [0, 0, 0]]
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
    everything = [(one, replace(truth, verified=own)) for (one, truth), own in zip(scenes, nothing, strict=True)]
    plain = CocoEvaluator(CLASSES, True).report(make_split_outputs(scenes)).metrics
    assert CocoEvaluator(CLASSES, True).report(make_split_outputs(everything)).metrics == plain
    silent = [
        (one, replace(truth, verified=VerifiedClasses(own.absent[:1], own.partial)))
        for (one, truth), own in zip(scenes, nothing, strict=True)
    ]
    chosen = [
        (one.take(np.isin(one.labels, [*truth.labels, *truth.verified.absent])), replace(truth, verified=None))
        for one, truth in silent
    ]
    figures = CocoEvaluator(CLASSES, True).report(make_split_outputs(silent)).metrics
    assert (
        figures == CocoEvaluator(CLASSES, True).report(make_split_outputs(chosen)).metrics
        and figures["ap"] > plain["ap"]
    )
    answers, truth = everything[0][0], replace(scenes[0][1], verified=VerifiedClasses(np.arange(4), np.array([1])))
    table, rows = match_image(answers, truth, False), answers.labels == 1
    part, before = (select_region_columns(one, 0)[: len(answers)] for one in (table, match_image(*scenes[0], False)))
    matched, ignored = (unpack_match_bits(part[:, column]) for column in (0, 1))
    assert np.array_equal(part[~rows], before[~rows]) and rows.any()
    assert (matched | ignored)[..., rows].all() and not part[rows, 2].any()


def test_ap_is_grouped_by_class_frequency():
    draw = np.random.default_rng(8)
    outputs, groups = make_split_outputs([draw_scene(draw) for _ in range(9)], False), ("rare", "common", "rare", "")
    report = CocoEvaluator(CLASSES, frequency=groups).report(outputs)
    own = [row["ap"] for row in report.per_class]
    assert report.metrics["ap_rare"] == pytest.approx((own[0] + own[2]) / 2)
    assert report.metrics["ap_common"] == pytest.approx(own[1]) and report.metrics["ap_frequent"] is None


def make_painted_split(count):
    """Painted pictures, and what is on them; the last object of each is not painted."""
    pictures, targets = [], []
    for number in range(count):
        objects = [(2, 3, 12 + number, 20, 100), (20, 5, 40, 25, 200), (30, 26, 46, 31, 100)]
        pictures.append(draw_rectangles((32, 48), *objects[:2])[0])
        masks = [draw_rectangles((32, 48), one)[0] > 0 for one in objects]
        boxes, labels = np.array([one[:4] for one in objects], np.float32), np.array([0, 1, 0])
        targets.append(Target((32, 48), labels, boxes, np.zeros(3, bool), layers=stack_masks(masks, (32, 48))))
    return PaintedSplit(pictures, targets)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_model_is_evaluated_on_a_split(workers):
    split, evaluator = make_painted_split(5), CocoEvaluator(("dark", "light"), masks=True)
    report = evaluator(PaintedEngine(painted_model), split, workers)
    assert report.images == 5 and report.unreadable == 0 and report.per_class[1]["ap"] == pytest.approx(1)
    recall = 51 / 101  # half of the objects of the first class, all answers right
    assert report.metrics["ap"] == report.metrics["box_ap"] == pytest.approx((1 + recall) / 2)
    assert report.metrics["ap_large"] is None and report.intervals["ap_large"] is None
    split.pictures[1] = None
    worse = evaluator(PaintedEngine(painted_model), split, workers)
    assert worse.unreadable == 1 and worse.metrics["ap"] < report.metrics["ap"]
    assert worse.per_class[1]["objects"] == 5


def test_mask_metrics_require_mask_data():
    split = make_painted_split(2)
    split.targets = [target.without_masks() for target in split.targets]
    with pytest.raises(DataError, match="boxes but no masks"):
        CocoEvaluator(("dark", "light"), masks=True)(PaintedEngine(painted_model), split, 0)
    engine = PaintedEngine(painted_model, masks=False)
    assert CocoEvaluator(("dark", "light"))(engine, split, 0).metrics["ap50"] == pytest.approx((1 + 51 / 101) / 2)


def test_a_missing_library_is_reported_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "faster_coco_eval.core.mask", None)
    with pytest.raises(ResourceError, match="faster-coco-eval") as error:
        CocoEvaluator(("a",), masks=True)
    assert error.value.hint == "pip install 'vitreous[dense]'"
    CocoEvaluator(("a",))


class ThreadProcessGroup:
    """Two threads that hand each other their rows, as processes do."""

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
    split, evaluator, engine = make_painted_split(130), CocoEvaluator(("dark", "light")), PaintedEngine(painted_model)
    split.pictures[100] = None
    engine.device = torch.device("cpu")
    parts, barrier, results = [None, None], threading.Barrier(2), {}

    def work(rank):
        results[rank] = compute_distributed_outputs(
            engine, ThreadProcessGroup(rank, parts, barrier), 0, lambda: False, evaluator, split
        )

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    rows, bad = evaluator.outputs(engine, EvalLoader(split, engine.preprocess))
    for rank in range(2):
        assert np.array_equal(results[rank].outputs.table, rows.table)
        assert np.array_equal(results[rank].outputs.lengths, rows.lengths)
        assert np.flatnonzero(~results[rank].readable).tolist() == list(bad) == [100]
