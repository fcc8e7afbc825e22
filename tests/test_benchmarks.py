"""The benchmark scripts match the library: they are imported, and their contenders take a step."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ImageOps

from tests.apps.curation.test_copies import draw_photo
from tests.conftest import make_folder
from tests.data.annotations.scenery import write_objects
from tests.inference.small_models import make_photo, make_tiny_bundle
from vitreous.data.annotations.target import Target
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.sources import open_data
from vitreous.inference.options import InferenceOptions
from vitreous.weights.bundle import load_bundle

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_section_of_the_gpu_script_runs_on_a_cpu(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), str(tmp_path), "--device", "cpu", "--tiny"]
    subprocess.run(command, check=True, timeout=880, capture_output=True)
    records = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert not [record for record in records if "failure" in record]
    sections = {record["section"] for record in records if "section" in record and "took" not in record}
    assert sections == set(load_script("gpu").SECTION_SECONDS)
    assert next(record for record in records if record.get("section") == "tests")["failures"] == 0
    assert (tmp_path / "gpu.md").read_text().count("\n## ") == len(sections)


def test_knn_uses_the_same_split():
    k, val, test = load_script("digits").measure_knn()
    assert k in (1, 3, 5, 7, 9)
    assert min(val, test) > 0.95


def test_caption_set_describes_digits_that_are_not_shared_between_splits(tmp_path):
    script = load_script("contrastive")
    script.TRAIN_REPEATS = 1
    data = open_data(script.write_caption_set(tmp_path))
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 1439, "val": 358}
    assert all(caption.split()[1] in script.COLOURS for caption in data.splits["train"].captions())


def test_loader_benchmark_measures_every_stage(tmp_path):
    for index in range(3):
        make_photo(60, 48, index).save(tmp_path / f"{index}.jpg")
    make_photo(60, 48).convert("L").save(tmp_path / "grey.jpg")
    loader_parts = load_script("loader_parts")
    rows = loader_parts.measure_parts(tmp_path, 1)
    assert len(rows) == 10 and all(value >= 0 for value in rows.values())
    text = loader_parts.build_page(dict.fromkeys(rows, 1.0), "COMMAND")
    assert "| resizing | 1.000 |" in text and "| sum of the steps | 8.000 |" in text
    assert "decode in 33% of the time" in text and "it would be 50%" in text


def test_heads_on_cached_features_are_measured(tmp_path, monkeypatch):
    script = load_script("frozen_heads")
    arrays = {"pooled": ((8,), "<f4"), "layers": ((2, 2, 8), "<f4"), "tokens": ((4, 6), "<f2")}
    monkeypatch.setattr(script, "ARRAYS", arrays)
    rows = script.measure_heads(tmp_path, 60, 20, 3)
    assert [row[0] for row in rows] == ["knn", "linear", "blocks", "attentive", "fewshot"]
    page = script.build_page(rows, argparse.Namespace(images=60, evaluated=20, classes=3, maps=False), "COMMAND")
    assert "208 bytes per image" in page and page.count("top-1") == 5


def test_segmentation_heads_on_cached_tokens_are_measured(tmp_path, monkeypatch):
    script = load_script("frozen_heads")
    monkeypatch.setattr(script, "ARRAYS", {"tokens": ((196, 6), "<f2")})
    rows = script.measure_map_heads(tmp_path, 20, 5, 3)
    assert [row[0] for row in rows] == ["class maps", "knn", "linear"] and rows[2][1] > 1
    page = script.build_page(rows, argparse.Namespace(images=20, evaluated=5, classes=3, maps=True), "COMMAND")
    assert "2,352 bytes per image" in page and page.count("mIoU") == 2


def test_cifar_peers_use_the_augmentation_of_their_recipes(monkeypatch):
    pytest.importorskip("timm")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    cifar = load_script("cifar")
    images, labels = torch.randint(0, 256, (12, 3, 32, 32), dtype=torch.uint8), torch.arange(12) % 3
    arguments = (images, labels, 0, 3, ImagePreprocess((32, 32)))
    samples, epochs = np.arange(8), np.zeros(8, np.int64)
    augmented, targets = cifar.make_plain_views(*arguments)(samples, epochs, 0.0)
    assert augmented.shape == (8, 3, 32, 32) and targets.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    views = cifar.make_cct_views(*arguments)
    augmented, mixed = views(samples, epochs, 0.5)
    alone = views(samples, epochs, 0.6)[1]
    assert augmented.shape == (8, 3, 32, 32) and mixed.shape == alone.shape == (8, 3)
    assert torch.allclose(mixed.sum(1), torch.ones(8)) and torch.allclose(alone.sum(1), torch.ones(8))
    assert alone.argmax(1).tolist() == targets.tolist() and alone.max() == pytest.approx(0.9 + 0.1 / 3)


def test_transfer_resumes_and_reads_test_images_once(tmp_path, monkeypatch):
    transfer = load_script("transfer")
    candidates = {name: {"recipe": "finetune", "lr": rate} for name, rate in (("a", 1e-3), ("b", 1e-2))}
    monkeypatch.setattr(transfer, "CANDIDATES", {"fine-tuned": candidates, "from scratch": {"c": {"recipe": "small"}}})
    monkeypatch.setattr(transfer, "LABEL_SHARES", (0.1, 0.5))
    folder = make_folder(tmp_path / "photos", {"train": 20, "test": 3}, ("ant", "bee", "cat", "dog"))
    plan = transfer.TransferPlan(folder, tmp_path / "scratch", 1, "ViT-32x2/8", 24, 1.0, (1, 2), precision="fp32")
    transfer.pretrain(plan)
    transfer.finetune(plan)
    runs = {out.name: out for out in (plan.scratch / "runs").iterdir() if not out.is_symlink()}
    assert len(runs) == 1 + 6 + 4
    splits = {name: json.loads((out / "data.json").read_text())["splits"] for name, out in runs.items()}
    assert {split.get("train") for name, split in splits.items() if name != "pretrained"} == {4, 20}
    assert not any("test" in split for split in splits.values())
    readings = [(out / "evaluations.jsonl").read_text().splitlines() for name, out in runs.items() if "seed-0" in name]
    assert [len(lines) for lines in readings] == [1] * 4
    # the head of other classes is removed, even if their number is equal
    assert load_bundle(transfer.save_headless_model(plan)).model.config.classes == 0
    read = {path: path.stat().st_mtime_ns for out in runs.values() for path in out.rglob("*.json*")}
    transfer.finetune(plan)
    assert {path: path.stat().st_mtime_ns for path in read} == read
    assert (
        "| 10% | 4 | 1 | fine-tuned: " in (text := transfer.build_page(plan))
        and "| 50% | 20 | 2 | from scratch: c | **" in text
    )


def test_transfer_draws_are_seeded_and_class_balanced(tmp_path):
    transfer = load_script("transfer")
    plan = transfer.TransferPlan(
        make_folder(tmp_path / "photos", {"train": 20}, ("ant", "bee", "cat", "dog")), tmp_path / "scratch"
    )

    def files(seed, split="train", selection=False):
        root = transfer.link_label_share(plan, 0.2, seed, selection)
        return {path.resolve() for path in (root / split).rglob("*.png")}

    selection_images = files(transfer.SELECTION_SEED, "val", selection=True)
    draws = [files(seed) for seed in range(8)]
    assert files(3) == draws[3] != draws[4]
    assert all(sorted(path.parent.name for path in draw) == ["cat"] * 4 + ["dog"] * 4 for draw in draws)
    assert len(selection_images) == 8 and not any(draw & selection_images for draw in draws)


def test_precision_measures_errors_agreement_and_accuracy(tmp_path):
    """For synthetic logits, and for outputs with a known error, with classes and without."""
    precision = load_script("precision")
    exact = np.array([[3.0, 4.0], [0.0, 12.0], [2.0, 1.0]])
    logits = np.array([[4.0, 3.0], [0.0, 12.0], [2.0, 1.0]], np.float32)
    metrics = precision.compute_metrics(logits, exact, np.array([0, 0, 0]))
    assert metrics.error == pytest.approx(2**0.5 / np.linalg.norm(exact))
    assert metrics.agreement == pytest.approx(2 / 3) and metrics.right == pytest.approx(2 / 3)
    assert precision.compute_metrics(logits, exact, None).right is None

    make_tiny_bundle(classes=("cat", "ant", "bee")).save(tmp_path / "model")
    folder = make_folder(tmp_path / "photos", {"": 4})
    split, labels = precision.open_images(str(tmp_path / "model"), str(folder), 7)
    order = [("cat", "ant", "bee").index(Path(split.name(sample)).parent.name) for sample in range(len(split))]
    assert len(split) == 7 and labels.tolist() == order
    flat, none = precision.open_images(str(tmp_path / "model"), str(folder / "ant"), 7)
    assert len(flat) == 4 and none is None


def test_precision_compares_engines_and_keeps_the_cache(tmp_path, monkeypatch):
    precision = load_script("precision")
    make_tiny_bundle(classes=("ant", "bee", "cat")).save(tmp_path / "model")
    folder, run = make_folder(tmp_path / "photos", {"": 4}), str(tmp_path / "model")
    caches = []

    def list_engines(run, scratch):
        original = precision.load(run, InferenceOptions("cpu", "fp32")).engine.logits
        yield "same", lambda: original
        yield "int8", lambda: caches.append(os.environ["XDG_CACHE_HOME"]) or (lambda pixels: -original(pixels))

    monkeypatch.setattr(precision, "list_engines", list_engines)
    monkeypatch.setenv("XDG_CACHE_HOME", "mine")
    lines = precision.build_page(run, str(folder), 12)
    same, negative = lines[-2:]
    assert same.startswith("| same |") and "| 100.00% |" in same
    assert negative.startswith("| int8 | 2.0e+00 | 0.00% |") and not negative.endswith("|  |")
    assert len(caches) == 2 and caches[0] == caches[1] != "mine" and os.environ["XDG_CACHE_HOME"] == "mine"


def test_dedup_counts_labelled_pairs_and_creates_harder_copies(tmp_path):
    dedup = load_script("dedup")
    for folder, seeds in (("train", (0, 1, 2, 3)), ("test", (0, 1, 12, 13))):
        (tmp_path / folder / "ant").mkdir(parents=True)
        for index, seed in enumerate(seeds):
            image = draw_photo(seed) if folder == "train" else ImageOps.mirror(draw_photo(seed))
            image.save(tmp_path / folder / "ant" / f"{index}.jpg", quality=90)
    pairs = [
        "ant/0,ant/0,same,tuned",
        "ant/2,ant/2,other,tuned",
        "ant/1,ant/1,same,held-out",
        "ant/3,ant/3,same,held-out",
    ]
    (tmp_path / "pairs.csv").write_text("\n".join(["train,test,verdict,part", *pairs, "ant/3,ant/2,unsure,held-out"]))
    tuned, held_out = dedup.evaluate_labelled_pairs(tmp_path, tmp_path / "pairs.csv", 0)[2:]
    assert tuned == "| tuned | 1 | 1 | 100.0% | 1 | 0 | 100.0% |"
    assert held_out == "| held-out | 2 | 1 | 50.0% | 0 | 0 | 100.0% |"
    for change in dedup.HARDER_COPY_KINDS.values():
        copies = [change(draw_photo(5), random.Random(seed)) for seed in (1, 1, 2)]
        assert (
            copies[0].mode == "RGB"
            and copies[0].tobytes() == copies[1].tobytes()
            and copies[0].tobytes() != draw_photo(5).tobytes()
        )


def test_dense_peers_augment_boxes_and_maps_with_the_pixels(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    dense = load_script("dense_peers")
    classes = np.zeros((300, 280), np.int32)
    classes[60:140, 100:180] = 1
    target = Target((300, 280), np.array([2]), np.array([[100, 60, 180, 140]], np.float32), np.zeros(1, bool))
    pixels = np.repeat(classes[None].astype(np.uint8) * 255, 3, 0)
    for seed in range(4):
        image, boxes, labels = dense.flip_sample(pixels, target, np.random.default_rng(seed))
        left, top, right, bottom = boxes[0].int().tolist()
        assert labels.tolist() == [3] and image[0, top:bottom, left:right].min() == 1
        assert image[0].sum() == 80 * 80
        crop, crop_classes = dense.crop_augmented(pixels, classes, np.random.default_rng(seed))
        assert crop.shape[1:] == crop_classes.shape == (dense.CROP_SIZE, dense.CROP_SIZE)
        assert ((crop[0] > 127) == (crop_classes == 1)).mean() > 0.99


def test_processor_rate_excludes_startup_and_evaluation(tmp_path, monkeypatch):
    pretraining = load_script("pretraining")
    # the first run takes 20 s longer, for one-time work; 10 s more for three quarters of 40 steps
    clock, lengths = iter([0.0, 50.0, 50.0, 80.0, 80.0, 120.0]), []

    def train(data, **options):
        lengths.append(options["steps"])
        return {"epochs": options["steps"] * 8 / 9}

    monkeypatch.setattr(pretraining.vitreous, "train", train)
    monkeypatch.setattr(pretraining.time, "process_time", lambda: next(clock))
    folder = make_folder(tmp_path / "photos", {"train": 3, "val": 1})
    for _ in range(2):
        assert pretraining.measure_processor_rate(tmp_path / "home", 40, str(folder)) == pytest.approx(30 * 8 / 10)
    assert lengths == [10, 10, 40]


def test_vitdet_matches_a_plain_implementation(monkeypatch):

    from vitreous.apps.bench.work import Workload
    from vitreous.models.names import config_from_name

    vitdet = load_script("vitdet")
    small = config_from_name("ViTDet-B/16", 64).with_options(
        patch=(8, 8), width=32, depth=4, heads=2, mlp={"hidden": 64}, attention={"window": 3, "global_blocks": (1, 3)}
    )
    assert vitdet.compute_difference(small) < 1e-5
    monkeypatch.setattr(vitdet, "config_from_name", lambda name, size: small)
    for task in vitdet.TASKS:
        for passes in vitdet.PASSES:
            work = Workload(f"{task}, {passes}", "ViTDet-B/16", 64, 1)
            for contender in vitdet.list_contenders():
                assert contender.build(work)() == 1
            shapes = [vitdet.build_task_module(work, is_ours)[1] for is_ours in (True, False)]
            assert shapes == [(1, 3, 64, 64) if task == "whole" else (1, 8, 8, 32)] * 2
    text = vitdet.build_page("ViTDet-B/16", 64, 1e-7, {"whole, forward": []})
    assert "| work | contender | seconds | MiB |" in text


def test_huge_page_contenders_differ_only_in_huge_pages(monkeypatch):
    from vitreous.apps.bench.race import ContenderResult
    from vitreous.apps.bench.work import Workload

    pages, switches = load_script("huge_pages"), []
    monkeypatch.setattr(
        pages.ours, "build_train_step", lambda work: switches.append(pages.os.environ["VITREOUS_HUGE_PAGES"])
    )
    monkeypatch.setattr(pages.ours, "build_inference_step", lambda work: switches.append("inference"))
    monkeypatch.setenv("VITREOUS_HUGE_PAGES", "")  # restored afterwards
    work = Workload("train", "ViT-S/16", 224, 16)
    for contender in pages.list_contenders():
        contender.build(work)
    assert switches == ["1", "0"]
    lanes = [
        ContenderResult(contender, [rate, rate])
        for contender, rate in zip(pages.list_contenders(), (3.0, 2.0), strict=True)
    ]
    text = pages.build_page({work: lanes}, True)
    assert "| 3.0 (3.0, 3.0) | 2.0 (2.0, 2.0) | 1.50 |" in text and "does not give" not in text
    assert "does not give" in pages.build_page({work: lanes}, False)


@pytest.mark.parametrize("name", ["vitdet", "windows", "video"])
def test_race_scripts_use_the_given_rounds_and_seconds(name, monkeypatch, capsys):
    from vitreous.apps.bench.work import Timing

    module, timings = load_script(name), []

    def race(work, contenders, timing):
        timings.append(timing)
        return []

    monkeypatch.setattr(module, "run_race", race)
    monkeypatch.setattr(module, "compute_difference", lambda config: 0.0, raising=False)
    monkeypatch.setattr(sys, "argv", [name, "--rounds", "2", "--seconds", "0.5"])
    module.main()
    assert set(timings) == {Timing(2, 0.5)} and "| --- |" in capsys.readouterr().out.replace("|---|", "| --- |")


def test_dense_peers_train_on_the_same_class_maps(tmp_path, monkeypatch):
    """Nuclei are painted on a background before training."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    dense = load_script("dense")
    class_maps: list[np.ndarray] = []

    def build_peer(data):
        def evaluate():
            maps = [target.class_map() for _, target in load_script("dense_peers").read_samples(data.splits["test"])]
            class_maps.extend(maps)
            return {"miou": 1.0}, [{"class": name, "f1": 0.5} for name in data.classes]

        model = torch.nn.Conv2d(3, 2, 1)
        return model, lambda images, maps: torch.nn.functional.cross_entropy(model(images), maps), evaluate

    monkeypatch.setattr(dense, "build_unet", build_peer)
    root = write_objects(tmp_path / "nuclei", 40)
    plan = dense.DensePlan(root, tmp_path / "work", tmp_path / "rows.jsonl", kind="nuclei", minutes=0.001)
    result = dense.run_peer(plan, 0)
    assert result["dice_nuclei"] == 0.5 and result["images"] >= 8
    assert class_maps and all(set(np.unique(class_map)) == {0, 1} for class_map in class_maps)


def test_equal_time_runs_get_the_epochs_of_their_time(tmp_path, monkeypatch):
    pretraining = load_script("pretraining")
    runs = []

    def trained(out, data, **options):
        runs.append(options)
        return {"epochs": options["epochs"]}

    monkeypatch.setattr(pretraining, "measure_processor_rate", lambda folder, steps, data, **options: 0.5)
    monkeypatch.setattr(pretraining, "train_or_load", trained)
    root = write_objects(tmp_path / "nuclei", 40)
    plan = pretraining.EqualTime(root, tmp_path, tmp_path / "rows.jsonl", minutes=4.0, cores=2)
    count = len(open_data(str(root)).splits["train"])
    assert plan.seconds == 480 and plan.stored() == []
    images = plan.train(root, tmp_path / "run", tmp_path / "rate", 3, recipe="segment")[1]
    assert runs[0]["epochs"] == round(240 / count, 2) and abs(images - 240) <= 1
    assert runs[0]["seed"] == 3 and runs[0]["recipe"] == "segment"


def test_moving_digits_have_the_drawn_speeds_and_positions(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    moving = load_script("moving_digits")
    rng, room = np.random.default_rng(0), moving.FRAME_SIZE - moving.DIGIT_SIZE
    paths = np.stack([moving.draw_path(rng, 16) for _ in range(200)])
    assert paths.min() >= 0 and paths.max() <= room
    speeds = np.median(np.hypot(*np.moveaxis(np.diff(paths, axis=1), -1, 0)), axis=1)  # bounces are rare
    assert speeds.min() > 0.45 and speeds.max() < 2.55 and abs(speeds.mean() - 1.5) < 0.15
    dot = np.zeros((1, 3, moving.FRAME_SIZE, moving.FRAME_SIZE), np.uint8)
    dot[0, range(3), (2, 5, 8), (2, 6, 10)] = 255
    assert moving.compute_motion(dot) == pytest.approx(np.full((1, 2), 5.0))
    stamps = np.zeros((3, moving.DIGIT_SIZE, moving.DIGIT_SIZE), np.uint8)
    stamps[0, 4:8], stamps[1, :, 4:8], stamps[2, ::11], stamps[2, :, ::11] = 255, 255, 255, 255  # two bars, and a frame
    labels = np.arange(24) % 3
    clips = np.stack([moving.draw_moving_digits(rng, stamps[[label, label]]) for label in labels])
    reader = moving.FrameClassifier(clips[:16], labels[:16])
    metrics = moving.compute_clip_metrics(clips[16:], labels[16:], reader, moving.compute_motion(clips[16:]))
    assert metrics["recognised"] > 0.8 and metrics["distance"] == 0 and metrics["low"] <= metrics["median"]
    assert reader.read(clips[16:]).shape == (8, 16)
    real = [{"clips": "test clips", "number": 8} | metrics]
    run_record = {
        "clips": "M",
        "number": 8,
        "guidance": 2.0,
        "minutes": 1,
        "epochs": 3.0,
        "recipe": "sit",
        "seconds": 4.0,
    }
    assert "| M | 3.0 | 2 | " in moving.build_page(real, [run_record | metrics]) and "| 0.50 |" in moving.build_page(
        real, [run_record | metrics]
    )


def test_native_training_images_keep_the_digit_undistorted(tmp_path):
    native = load_script("native_training")
    rng, digit = np.random.default_rng(0), np.full((8, 8), 16.0)
    for _ in range(20):
        shape = np.asarray(native.draw_canvas(rng, digit, np.zeros((4, 8, 8)))) > 200
        height, width = shape.shape
        assert 1 / 4.2 < width / height < 4.2 and abs(height * width / native.CANVAS_AREA - 1) < 0.03
        assert shape.any(0).sum() >= native.DIGIT_SIZE - 1 and shape.any(1).sum() >= native.DIGIT_SIZE - 1
    data = native.write_data(tmp_path / "pictures", {"train": 1, "test": 1})
    arguments = argparse.Namespace(tokens=16, model="ViT-32x2/8", batch=4, folder=data, rounds=1, epochs=1)
    opened = open_data(str(data))
    ways, about = native.build_steps(arguments, opened.split("train"), opened.classes)
    medians = native.measure_medians(ways, 1)
    assert len(medians) == 4 and "squares of 16 patches" in about
    page = native.build_page(arguments, about, medians, [("squashed", 0.5, 0.25)])
    assert "| native aspect, packed | " in page and "| squashed | 50.0 % | 25.0 % |" in page


def test_study_pages_omit_runs_and_data_paths(tmp_path):
    study_folder = tmp_path / "out" / "toy"
    study_folder.mkdir(parents=True)
    (study_folder / "study.json").write_text(json.dumps({"settings": {"data": "/where/it/lay"}}))
    lines = [
        "# Toy",
        "",
        f"vitreous study toy --data /where/it/lay --out {study_folder.parent}",
        "",
        "| a | mean | runs |",
    ]
    lines += [
        "| --- | --- | --- |",
        "| x | 1 | [0](../runs/x/report.html) |",
        "",
        "![Toy](figure.svg)",
        "",
        "## Fit",
        "",
    ]
    (study_folder / "report.md").write_text("\n".join([*lines, "| b | c |", "| --- | --- |", "| y | 2 |", ""]))
    page = load_script("study_page").build_public_page(study_folder, "figures/toy.svg", 1, "Nothing can be told.")
    assert page.startswith("# Toy, 20") and "\n\nNothing can be told.\n\n" in page
    assert "vitreous study toy --data FOLDER\n" in page and str(tmp_path) not in page
    assert "| a | mean |\n| --- | --- |\n| x | 1 |\n" in page and "](figures/toy.svg)" in page
    assert page.endswith("## Fit\n\n| b | c |\n| --- | --- |\n| y | 2 |\n")
