"""--engine fastest: what is measured is what is taken, of engines that agree, and people are told."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest
import torch

from tests.conftest import document, say
from tests.precision import LIMITS, relative_error
from tests.serving.made import pictures, tiny
from vitreous.errors import UsageError
from vitreous.evaluation import openvino
from vitreous.evaluation.engine import TorchEngine, make_engine
from vitreous.evaluation.inference_options import InferenceOptions
from vitreous.serving import fastest
from vitreous.serving.fastest import open_runtime, race
from vitreous.serving.predict import load

FASTEST = InferenceOptions("cpu", "fp32", "fastest")


@pytest.fixture(scope="module")
def bundle():
    return tiny()


@pytest.fixture
def home(bundle, tmp_path):
    bundle.save(tmp_path / "bundle")
    return tmp_path / "bundle"


class Other(TorchEngine):
    """Another library's engine, without its seconds of building."""

    wrong: float | None = None  # what it answers, if not the truth

    def __init__(self, model, preprocess, precision="auto", pictures=None):
        super().__init__(model, preprocess, "cpu", precision)

    def steady(self, pixels, size, quick=False):
        logits = super().steady(pixels, size, quick)
        return logits if self.wrong is None else logits * 0 + self.wrong


@pytest.fixture
def other(monkeypatch):
    monkeypatch.setattr(openvino, "OpenVinoEngine", Other)


def measured(monkeypatch, **seconds: float) -> None:
    """Have the race end as said; the turns are called all the same."""

    def run(turns):
        for turn in turns.values():
            turn()
        return {name: seconds[name] for name in turns}

    monkeypatch.setattr(fastest, "race", run)


@pytest.mark.parametrize("first", ["torch", "torch, compiled"])
def test_compiled_blocks_are_taken_on_a_gpu_where_they_are_faster(bundle, first, monkeypatch):
    """A CPU in the place of the GPU; the compiler only traces."""
    monkeypatch.setattr(fastest, "pick_device", lambda name: "cuda:0")
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module: compile_(module, backend="eager"))
    seconds = {"torch": 0.5, "torch, compiled": 0.5, first: 0.25}
    measured(monkeypatch, **seconds)
    runtime = open_runtime(bundle, FASTEST)
    second = next(name for name in seconds if name != first)
    count = runtime.part
    rates = f"{count / 0.25:.1f} images/s in fp32, {count} at a time; {second} {count / 0.5:.1f}"
    assert runtime.note == f"engine: {first}, {rates}"
    pixels = bundle.preprocess.noise(3)
    expected = TorchEngine(bundle.model, bundle.preprocess, "cpu", "fp32")(torch.from_numpy(pixels)).numpy()
    np.testing.assert_allclose(runtime.logits(pixels), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("quick", [True, False])
def test_the_engine_that_was_faster_is_taken_and_named(bundle, quick, other, monkeypatch):
    images = 1 if quick else fastest.PART * torch.get_num_threads()
    measured(monkeypatch, torch=0.5, openvino=0.25)
    theirs = open_runtime(bundle, FASTEST, quick=quick)
    assert isinstance(theirs.engine, Other) and theirs.how.engine == "openvino"
    assert theirs.note == (
        f"engine: openvino, {images / 0.25:.1f} images/s in fp32, {images} at a time; torch {images / 0.5:.1f}"
    )
    measured(monkeypatch, torch=0.25, openvino=0.5)
    ours = open_runtime(bundle, FASTEST, quick=quick)
    assert ours.how.engine == "torch" and ours.note.startswith("engine: torch, ")


def test_openvino_itself_agrees_and_may_be_taken(bundle, monkeypatch):
    pytest.importorskip("openvino")
    measured(monkeypatch, torch=0.5, openvino=0.25)
    theirs, pixels = open_runtime(bundle, FASTEST), bundle.preprocess.noise(9)
    assert isinstance(theirs.engine, openvino.OpenVinoEngine)
    ours = TorchEngine(bundle.model, bundle.preprocess, precision="fp32")
    assert relative_error(theirs.logits(pixels), ours(torch.from_numpy(pixels)).numpy()) < LIMITS["fp32"]


@pytest.mark.parametrize("wrong", [1.0, math.nan])
def test_an_engine_whose_answers_differ_is_not_taken(bundle, wrong, other, monkeypatch):
    measured(monkeypatch, torch=0.5, openvino=0.25)
    monkeypatch.setattr(Other, "wrong", wrong)
    runtime = open_runtime(bundle, FASTEST)
    assert runtime.how.engine == "torch" and "differ from its own" in runtime.note


def test_without_a_second_engine_torch_answers_and_the_reason_is_told(bundle, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    runtime = open_runtime(bundle, FASTEST)
    assert runtime.how.engine == "torch" and "only one here" in runtime.note and "openvino" in runtime.note


@pytest.mark.parametrize(
    ("error", "says"), [(NotImplementedError("far\nno such operator"), "no such operator"), (KeyError(), "KeyError")]
)
def test_a_model_that_openvino_cannot_convert_is_answered_by_torch(bundle, error, says, monkeypatch):
    pytest.importorskip("openvino")

    def fail(*args, **options):
        raise error

    monkeypatch.setattr(torch.export, "export", fail)
    runtime = open_runtime(bundle, FASTEST)
    assert runtime.how.engine == "torch" and f"cannot convert this model: {says}" in runtime.note
    with pytest.raises(UsageError, match=says) as refused:
        open_runtime(bundle, InferenceOptions("cpu", "fp32", "openvino"))
    assert "--engine torch" in refused.value.hint


def test_turns_are_called_by_turns_and_their_medians_are_compared(monkeypatch):
    monkeypatch.setattr(fastest, "SECONDS", 0.0)
    clock, calls = [0.0], []
    monkeypatch.setattr(fastest.time, "perf_counter", lambda: clock[0])

    def turn(name, seconds):
        def run():
            calls.append(name)
            clock[0] += seconds[len(calls) % len(seconds)]

        return run

    result = race({"a": turn("a", [1.0, 1.0, 9.0]), "b": turn("b", [2.0])})
    assert calls == ["a", "b"] * fastest.ROUNDS
    assert result == {"a": 1.0, "b": 2.0}


def test_options_that_leave_no_choice_are_refused(bundle, home, tmp_path, other, monkeypatch):
    measured(monkeypatch, torch=0.5, openvino=0.25)
    with pytest.raises(UsageError, match="OpenVINO's alone"):
        open_runtime(bundle, InferenceOptions("cpu", "int8", "fastest"))
    files = pictures(tmp_path / "new", 2)
    for words in (["--precision", "int8"], ["--ray", "local"]):
        result = say("predict", str(home), *files, "--engine", "fastest", *words)
        assert result.returncode == 2 and "fastest" in result.stderr
    with pytest.raises(UsageError, match="for verbs that answer about images"):
        make_engine(bundle.model, bundle.preprocess, FASTEST)


def test_predict_tells_the_engine_and_a_file_of_answers_keeps_it(home, tmp_path, other, monkeypatch):
    files, out = pictures(tmp_path / "new", 3), tmp_path / "answers.jsonl"
    words = ("predict", str(home), *files, "--precision", "fp32", "--engine")
    measured(monkeypatch, torch=0.5, openvino=0.25)
    result = say(*words, "fastest", "--out", str(out))
    assert result.returncode == 0 and "engine: openvino, " in result.stderr
    assert '"engine": "openvino"' in json.dumps(json.loads((tmp_path / "answers.jsonl.job.json").read_text()))
    answers = document(say(*words, "fastest", "--json"))
    assert answers["predictions"] == document(say(*words, "torch", "--json"))["predictions"]


def test_a_model_loaded_in_python_may_ask_for_it(home, other, monkeypatch):
    measured(monkeypatch, torch=0.25, openvino=0.5)
    predictor = load(home, engine="fastest", precision="fp32")
    assert predictor.runtime.how.engine == "torch" and "openvino" in predictor.runtime.note
