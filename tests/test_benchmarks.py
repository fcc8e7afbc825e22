"""The benchmark scripts still fit the library: they are imported and their contenders take a step."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from tests.conftest import make_folder
from vitreous.weights.bundle import load_bundle

HOME = Path(__file__).parent.parent / "benchmarks"


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, HOME / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_neighbours_are_judged_on_the_same_split():
    k, val, test = script("digits").neighbours()
    assert k in (1, 3, 5, 7, 9)
    assert min(val, test) > 0.95


def test_the_cifar_script_imports():
    assert callable(script("cifar").theirs)


def test_transfer_compares_like_with_like_reads_test_images_once_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    transfer = script("transfer")
    candidates = {name: {"recipe": "finetune", "lr": rate} for name, rate in (("a", 1e-3), ("b", 1e-2))}
    monkeypatch.setattr(transfer, "WAYS", {"fine-tuned": candidates, "from scratch": {"c": {"recipe": "small"}}})
    monkeypatch.setattr(transfer, "SHARES", (0.1, 0.5))
    folder = make_folder(tmp_path / "photos", {"train": 20, "test": 3}, ("ant", "bee", "cat", "dog"))
    plan = transfer.Plan(folder, tmp_path / "scratch", 1, "ViT-32x2/8", 24, 1.0, (1, 2), precision="fp32")
    transfer.pretrain(plan)
    transfer.finetune(plan)
    runs = {out.name: out for out in (plan.scratch / "runs").iterdir() if not out.is_symlink()}
    assert len(runs) == 1 + 6 + 4
    splits = {name: json.loads((out / "data.json").read_text())["splits"] for name, out in runs.items()}
    assert {split.get("train") for name, split in splits.items() if name != "pretrained"} == {4, 20}
    assert not any("test" in split for split in splits.values())
    readings = [(out / "evaluations.jsonl").read_text().splitlines() for name, out in runs.items() if "seed-0" in name]
    assert [len(lines) for lines in readings] == [1] * 4
    assert load_bundle(transfer.headless(plan)).model.config.classes == 0  # not the head of other classes that are as many
    read = {place: place.stat().st_mtime_ns for out in runs.values() for place in out.rglob("*.json*")}
    transfer.finetune(plan)
    assert {place: place.stat().st_mtime_ns for place in read} == read
    assert "| 10% | 4 | 1 | fine-tuned: " in (text := transfer.page(plan)) and "| 50% | 20 | 2 | from scratch: c | **" in text


def test_a_draw_is_of_its_seed_even_over_classes_and_apart_from_what_judges_the_candidates(tmp_path):
    transfer = script("transfer")
    plan = transfer.Plan(make_folder(tmp_path / "photos", {"train": 20}, ("ant", "bee", "cat", "dog")), tmp_path / "scratch")

    def files(seed, split="train", judged=False):
        root = transfer.drawn(plan, 0.2, seed, judged)
        return {path.resolve() for path in (root / split).rglob("*.png")}

    judging = files(transfer.EXTRA, "val", judged=True)
    draws = [files(seed) for seed in range(8)]
    assert files(3) == draws[3] != draws[4]
    assert all(sorted(path.parent.name for path in draw) == ["cat"] * 4 + ["dog"] * 4 for draw in draws)
    assert len(judging) == 8 and not any(draw & judging for draw in draws)
