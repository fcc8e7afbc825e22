"""Model soups: the mean of the weights, selected on validation images only."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import vitreous
from tests.conftest import make_folder, parse_json_output, run_cli
from vitreous.cli.main import run_command
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.options import DataOptions
from vitreous.data.sources import open_data
from vitreous.errors import DataError, UsageError
from vitreous.inference.engine import InferenceOptions
from vitreous.jobs.soup import soup
from vitreous.models.config import MlpConfig, NormConfig, PositionConfig, ViTConfig
from vitreous.models.zoo import build_model
from vitreous.system.disk import compute_sha256
from vitreous.tasks.classification import Classification
from vitreous.training.folder import RunFolder
from vitreous.training.run import Run
from vitreous.weights.bundle import WEIGHTS_FILE, Bundle, load_bundle

CLASSES = ("ant", "bee", "cat")
#: a model with predictable outputs: it uses the mean of each colour, and `make_folder` tints images by class
MODEL_CONFIG = ViTConfig(
    image=(16, 16),
    patch=(8, 8),
    classes=3,
    width=4,
    depth=1,
    heads=1,
    class_token=False,
    pool="mean",
    mlp=MlpConfig(hidden=4),
    positions=PositionConfig(kind="none"),
    norm=NormConfig(final="none"),
)
EXACT_INFERENCE = InferenceOptions("cpu", "fp32")


@pytest.fixture(autouse=True)
def without_workers(monkeypatch):
    """Reading a dozen images is faster than forking a process."""
    monkeypatch.setattr("vitreous.jobs.soup.default_worker_count", lambda: 0)


def save_colour_classifier(folder, size=1.0, seed=0, classes=CLASSES, config=MODEL_CONFIG, preprocess=None):
    """A bundle of a model whose predictions are always right, with logits scaled by `size`; a negative size is always
    wrong."""
    torch.manual_seed(seed)
    model = build_model(config)
    with torch.no_grad():
        for layer in (model.encoder.blocks[0].attention.part.out, model.encoder.blocks[0].mlp.part.fc2):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        model.projection.weight.zero_()
        for channel in range(3):
            model.projection.weight[channel, channel * 64 : (channel + 1) * 64] = 1 / 64
        for class_index, name in enumerate(classes):
            model.head.weight[class_index, CLASSES.index(name)] = size
    Bundle(model, Classification(classes), preprocess or ImagePreprocess((16, 16))).save(folder)
    return folder


def create_run_folder(folder, source, seed=0, hold_out=None, **changes):
    """A run folder: a bundle and the config of its run."""
    opened = open_data(source, seed)
    fingerprint = opened.with_holdout(hold_out, seed).fingerprint()
    data = DataOptions(str(source), CLASSES, 36, fingerprint, seed, hold_out)
    RunFolder(folder).create(Run(data, MODEL_CONFIG, ImagePreprocess((16, 16)), epochs=1.0), "vitreous train", {})
    save_colour_classifier(folder / "model", **changes)
    return folder


def load_state(folder):
    return load_bundle(folder).model.state_dict()


def test_a_uniform_soup_is_the_mean_in_any_order(tmp_path):
    runs = [save_colour_classifier(tmp_path / str(seed), seed=seed, size=1.0 + seed / 3) for seed in range(3)]
    summary = soup(runs, tmp_path / "soup")
    again = vitreous.soup(runs[::-1], tmp_path / "again")
    states = [load_state(run) for run in runs]
    for name, tensor in load_state(tmp_path / "soup").items():
        hand = sum(state[name].double() for state in states) / 3
        assert torch.equal(tensor, hand.float()), name
    assert compute_sha256(tmp_path / "soup" / WEIGHTS_FILE) == compute_sha256(tmp_path / "again" / WEIGHTS_FILE)
    assert summary["ingredients"] == again["ingredients"]
    assert {ingredient["run"]: ingredient["sha256"] for ingredient in summary["ingredients"]} == {
        str(run): compute_sha256(run / WEIGHTS_FILE) for run in runs
    }
    assert summary["val"] is None and [ingredient["score"] for ingredient in summary["ingredients"]] == [None] * 3


@pytest.mark.parametrize("reverse", [False, True])
def test_interpolation_weights_the_models_in_the_given_order(tmp_path, reverse):
    runs = [save_colour_classifier(tmp_path / str(seed), seed=seed, size=1.0 + seed / 3) for seed in range(2)]
    runs = runs[::-1] if reverse else runs
    first, second = map(load_state, runs)
    for alpha in (0.0, 0.3, 1.0):
        summary = vitreous.soup(runs, tmp_path / f"{alpha}", alpha=[alpha])
        for name, tensor in load_state(tmp_path / f"{alpha}").items():
            hand = (1 - alpha) * first[name].double() + alpha * second[name].double()
            assert torch.equal(tensor, hand.float()), name
        assert summary["soup"] == "interpolated" and summary["alphas"] == [{"alpha": alpha, "score": None}]
        assert [ingredient["weight"] for ingredient in summary["ingredients"]] == [1 - alpha, alpha]
        assert [ingredient["run"] for ingredient in summary["ingredients"]] == list(map(str, runs))


def test_the_best_alpha_is_kept(photo_folder, tmp_path):
    good, bad = save_colour_classifier(tmp_path / "good"), save_colour_classifier(tmp_path / "bad", size=-9.0)
    options = {"data": photo_folder, "how": EXACT_INFERENCE}
    summary = soup([bad, good], tmp_path / "soup", alpha=(0.5, 0.95, 1.0), **options)
    assert [trial["score"] for trial in summary["alphas"]] == [0, 1, 1] and summary["val"]["top1"] == 1
    assert [ingredient["score"] for ingredient in summary["ingredients"]] == [0, 1]
    assert summary["ingredients"][1]["weight"] == 0.95
    for words, message in (
        ({"alpha": [0.5], "greedy": True}, "not a greedy soup"),
        ({"alpha": [1.5]}, "must be from 0 to 1, not 1.5"),
    ):
        with pytest.raises(UsageError, match=message):
            soup([bad, good], tmp_path / "other", **words)
    with pytest.raises(UsageError, match="not 3 models"):
        soup([bad, good, good], tmp_path / "other", alpha=[0.5])


def test_head_weights_are_matched_by_class_name(tmp_path):
    reference = save_colour_classifier(tmp_path / "one")
    reordered = save_colour_classifier(tmp_path / "other", size=2.0, classes=("cat", "ant", "bee"))
    soup([reference, reordered], tmp_path / "soup")
    bundle = load_bundle(tmp_path / "soup")
    expected = torch.zeros(3, 4)
    for class_index, name in enumerate(bundle.classes):
        expected[class_index, CLASSES.index(name)] = 1.5
    assert set(bundle.classes) == set(CLASSES) and torch.equal(bundle.model.head.weight.data, expected)


def test_greedy_soup_drops_harmful_models(photo_folder, tmp_path):
    good = [save_colour_classifier(tmp_path / f"good-{seed}", seed=seed, size=1.0 + seed) for seed in range(2)]
    bad = save_colour_classifier(tmp_path / "bad", size=-9.0)
    uniform = soup([*good, bad], tmp_path / "uniform", data=photo_folder, how=EXACT_INFERENCE)
    summary = soup([bad, *good], tmp_path / "soup", greedy=True, data=photo_folder, how=EXACT_INFERENCE)
    assert (
        uniform["val"]["top1"] == 0 and [ingredient["selected"] for ingredient in uniform["ingredients"]] == [True] * 3
    )
    assert summary["val"]["top1"] == 1 and summary["val"]["images"] == 12
    assert [
        (ingredient["score"], ingredient["score_with"], ingredient["selected"]) for ingredient in summary["ingredients"]
    ] == [(1, 1, True), (1, 1, True), (0, 0, False)]
    assert summary["ingredients"][2]["run"] == str(bad)
    states = [load_state(run) for run in good]
    for name, tensor in load_state(tmp_path / "soup").items():
        assert torch.equal(tensor, ((states[0][name].double() + states[1][name].double()) / 2).float())
    provenance = load_bundle(tmp_path / "soup").provenance
    assert provenance["soup"] == "greedy" and provenance["ingredients"] == summary["ingredients"]
    assert provenance["val"] == json.loads(json.dumps(summary["val"])) and provenance["data"] == str(photo_folder)


def test_multilabel_models_are_selected_by_map(photo_folder, tmp_path):
    runs = []
    for seed, size in enumerate((1.0, 2.0, -9.0)):
        bundle = load_bundle(save_colour_classifier(tmp_path / "one", seed=seed, size=size))
        replace(bundle, task=Classification(bundle.classes, True, "sigmoid")).save(tmp_path / str(seed))
        runs.append(tmp_path / str(seed))
    summary = soup(runs, tmp_path / "soup", greedy=True, data=photo_folder, how=EXACT_INFERENCE)
    assert summary["val"]["map"] == 1 and summary["val"]["top1"] is None
    assert [ingredient["selected"] for ingredient in summary["ingredients"]] == [True, True, False] and 0 < summary[
        "ingredients"
    ][2]["score"] < 1
    bundle = load_bundle(tmp_path / "soup")
    assert bundle.classification.loss == "sigmoid" and bundle.classification.multilabel


def test_the_test_split_is_never_read(photo_folder, tmp_path, monkeypatch):
    import vitreous.data.split as splits

    runs = [create_run_folder(tmp_path / str(seed), photo_folder, seed=0, size=1.0 + seed) for seed in range(2)]
    opened, read = [], splits.read_input_file
    monkeypatch.setattr(splits, "read_input_file", lambda path: (opened.append(path), read(path))[1])
    summary = soup(runs, tmp_path / "soup", greedy=True, how=EXACT_INFERENCE, workers=0)
    assert summary["data"] == str(photo_folder) and summary["val"]["top1"] == 1
    assert {Path(path).relative_to(photo_folder).parts[0] for path in opened} == {"val"}
    with pytest.raises(UsageError, match="cannot be selected on the test split"):
        soup(runs, tmp_path / "other", greedy=True, split="test")


def test_runs_with_different_held_out_images_are_rejected(tmp_path):
    drawn, with_val = (
        make_folder(tmp_path / "drawn", {"": 12}),
        make_folder(tmp_path / "given", {"train": 12, "val": 4}),
    )
    runs = [create_run_folder(tmp_path / f"drawn-{seed}", drawn, seed=seed, size=1.0 + seed) for seed in range(2)]
    with pytest.raises(UsageError, match="the runs held out different images"):
        soup(runs, tmp_path / "soup", greedy=True)
    with pytest.raises(UsageError, match="the runs held out different images"):
        soup(runs, tmp_path / "soup", greedy=True, data=tmp_path / "given" / ".." / "drawn")
    assert soup(runs, tmp_path / "judged", greedy=True, data=with_val, how=EXACT_INFERENCE)["val"]["top1"] == 1
    same = [create_run_folder(tmp_path / f"given-{seed}", with_val, seed=seed, size=1.0 + seed) for seed in range(2)]
    assert soup(same, tmp_path / "same", greedy=True, how=EXACT_INFERENCE)["val"]["images"] == 12
    all_trained = [
        create_run_folder(tmp_path / f"all-{seed}", drawn, hold_out=0.0, size=1.0 + seed) for seed in range(2)
    ]
    with pytest.raises(DataError, match="has no val split"):
        soup(all_trained, tmp_path / "soup", greedy=True)
    assert soup(all_trained, tmp_path / "blind")["val"] is None  # averaging needs no validation images


def test_changed_data_is_reported(tmp_path):
    photos = make_folder(tmp_path / "photos", {"": 12})
    runs = [create_run_folder(tmp_path / str(seed), photos, size=1.0 + seed) for seed in range(2)]
    (photos / "ant" / "0.png").unlink()
    notes = []
    listener = type(
        "Listener", (), {"note": lambda self, text: notes.append(text), "progress": lambda self, *words: None}
    )()
    soup(runs, tmp_path / "soup", how=EXACT_INFERENCE, listener=listener)
    assert len(notes) == 2 and all("has changed since" in note for note in notes)


def test_mismatched_models_are_rejected_with_their_differences(tmp_path):
    reference = save_colour_classifier(tmp_path / "one")
    deeper = save_colour_classifier(
        tmp_path / "deeper", config=replace(MODEL_CONFIG, image=(32, 32), depth=2), preprocess=ImagePreprocess((32, 32))
    )
    with pytest.raises(UsageError) as error:
        soup([reference, deeper], tmp_path / "soup")
    for text in ("image: ", "depth: ", "preprocess.image: "):
        assert text in error.value.message
    named = save_colour_classifier(tmp_path / "named")
    description = json.loads((named / "model.json").read_text())
    (named / "model.json").write_text(json.dumps({**description, "classes": ["ant", "bee", "cow"]}))
    regular = save_colour_classifier(
        tmp_path / "dropped", size=2.0, config=MODEL_CONFIG.with_options(regularization={"drop_path": 0.1})
    )
    with pytest.raises(UsageError, match=r"classes: cat -> cow \(shared ones are not listed\)"):
        soup([regular, named], tmp_path / "soup")
    sigmoid = load_bundle(reference)
    replace(sigmoid, task=Classification(sigmoid.classes, True, "sigmoid")).save(tmp_path / "sigmoid")
    with pytest.raises(UsageError, match=r"loss: \w+ -> \w+\n    multilabel: "):
        soup([regular, tmp_path / "sigmoid"], tmp_path / "soup")
    assert soup([reference, regular], tmp_path / "soup")["bundle"] == str(tmp_path / "soup")


def test_invalid_soup_inputs_are_rejected(tmp_path):
    first, second = save_colour_classifier(tmp_path / "one"), save_colour_classifier(tmp_path / "other", size=2.0)
    same = save_colour_classifier(tmp_path / "same")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    for runs, out, expected in [
        ([first], "soup", "a soup needs at least two models, not 1"),
        ([first, same], "soup", "have the same weights"),
        ([first, tmp_path / "nowhere"], "soup", "no run at"),
        ([first, tmp_path / "taken"], "soup", "is neither a run nor a bundle"),
        ([first, second], "taken", "taken already exists"),
    ]:
        with pytest.raises(UsageError, match=expected):
            soup(runs, tmp_path / out)
    with pytest.raises(
        UsageError, match="not trained on the same dataset\n  give a dataset with validation images: data=DATA"
    ):
        soup([first, second], tmp_path / "soup", greedy=True)
    assert not (tmp_path / "soup").exists() and [path.name for path in (tmp_path / "taken").iterdir()] == ["file"]


def test_soup_command_writes_a_bundle_for_predict(photo_folder, tmp_path, capsys):
    runs = [
        str(save_colour_classifier(tmp_path / f"run-{seed}", size=size, seed=seed))
        for seed, size in enumerate((1.0, 2.0, -9.0))
    ]
    words = ["soup", *runs, "--greedy", "--data", str(photo_folder), "--workers", "0", "--out"]
    shown = run_cli(*words, str(tmp_path / "soup")).stdout
    assert "val top-1  soup with it  selected" in shown and "val: top-1 100.00%" in shown and runs[2] in shown
    document = parse_json_output(
        run_cli("predict", str(tmp_path / "soup"), str(photo_folder / "val" / "bee"), "--json")
    )
    assert {prediction["classes"][0]["class"] for prediction in document["predictions"]} == {"bee"}
    assert run_command([*words, str(tmp_path / "again"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert [ingredient["selected"] for ingredient in summary["ingredients"]] == [True, True, False] and summary[
        "bundle"
    ] == str(tmp_path / "again")
