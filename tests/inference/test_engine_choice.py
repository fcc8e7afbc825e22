"""--engine auto: the fastest engine with matching outputs is used, its measurement is cached, and short jobs are not
measured."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest
import torch

from tests.conftest import parse_json_output, run_cli
from tests.inference.small_models import make_tiny_bundle, write_images
from tests.precision import ERROR_LIMITS, relative_error
from vitreous.apps.server.start import load_served_predictor
from vitreous.errors import UsageError
from vitreous.inference import engine as engine_module
from vitreous.inference import engine_choice, openvino
from vitreous.inference.engine import TorchEngine, make_engine
from vitreous.inference.engine_choice import (
    MAX_BENCHMARK_SECONDS,
    MIN_SPEEDUP,
    benchmark_engines,
    choose_chunk_engine,
    choose_engine,
    describe_benchmark_conditions,
    find_alternative_engine,
    find_benchmark_record,
    list_engine_choices,
)
from vitreous.inference.options import InferenceOptions
from vitreous.inference.predict import load

DEFAULT_OPTIONS = InferenceOptions("cpu", "fp32")


@pytest.fixture(scope="module")
def bundle():
    return make_tiny_bundle()


@pytest.fixture
def bundle_folder(bundle, tmp_path):
    bundle.save(tmp_path / "bundle")
    return tmp_path / "bundle"


class FakeOpenVinoEngine(TorchEngine):
    """Replaces OpenVINO without the seconds of conversion."""

    built = 0
    wrong: float | None = None  # a constant output instead of the logits

    def __init__(self, model, preprocess, options, images=None):
        type(self).built += 1
        super().__init__(model, preprocess, "cpu", options.precision)
        self.options = options

    def logits(self, pixels):
        logits = super().logits(pixels)
        return logits if self.wrong is None else logits * 0 + self.wrong

    def __call__(self, pixels):
        return torch.from_numpy(self.logits(pixels.numpy()))


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """An empty cache; every job counts as long enough to be measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("VITREOUS_ENGINE_CHOICE")
    monkeypatch.setattr(engine_choice, "MIN_PASS_SECONDS", 0.0)
    monkeypatch.setattr(engine_choice, "MIN_PASSES", 0)
    monkeypatch.setattr(engine_choice, "WORTHWHILE_SECONDS", {"openvino": 0.0, "compiled": 0.0})
    monkeypatch.setattr(FakeOpenVinoEngine, "built", 0)
    return tmp_path / "cache" / "vitreous" / "engines"


@pytest.fixture
def other_engine(monkeypatch):
    monkeypatch.setattr(engine_module, "OpenVinoEngine", FakeOpenVinoEngine)
    monkeypatch.setattr(engine_choice, "find_spec", lambda name: object())


def set_race(monkeypatch, **seconds: float) -> list[int]:
    """Replace the race by fixed durations; the returned list grows with every race. Each engine is called once."""
    races = []

    def race(turns):
        races.append(1)
        for turn in turns.values():
            turn()
        return {name: seconds[name] for name in turns}

    monkeypatch.setattr(engine_choice, "benchmark_engines", race)
    return races


def build_engine(bundle, options=DEFAULT_OPTIONS, low_latency=False):
    engine = make_engine(bundle.model, bundle.preprocess, options)
    engine.low_latency = low_latency
    return engine


def choose_bundle_engine(bundle, options=DEFAULT_OPTIONS, low_latency=False, images=math.inf):
    return choose_chunk_engine(build_engine(bundle, options, low_latency), images)


@pytest.mark.parametrize("first", ["torch", "compiled"])
def test_compiled_engine_is_chosen_on_gpu_if_faster(bundle, first, monkeypatch):
    """A CPU replaces the GPU; the compiler only traces."""
    monkeypatch.setattr(engine_choice, "pick_device", lambda name: "cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda name: "made-up GPU")
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module: compile_(module, backend="eager"))

    def build(name, model, preprocess, options, precision):
        engine = TorchEngine(model, preprocess, "cpu", precision)
        engine_choice_compile(engine.model)
        engine.options = InferenceOptions("cpu", "fp32", name)
        return engine

    from vitreous.nn.encoder import compile_blocks as engine_choice_compile

    monkeypatch.setattr(engine_choice, "build_alternative", build)
    seconds = {"torch": 0.5, "compiled": 0.5, first: 0.25}
    set_race(monkeypatch, **seconds)
    engine = choose_bundle_engine(bundle)
    assert engine.options.engine == first and engine.note.startswith(f"engine: {first}, ")
    pixels = bundle.preprocess.noise(3)
    expected = TorchEngine(bundle.model, bundle.preprocess, "cpu", "fp32")(torch.from_numpy(pixels)).numpy()
    np.testing.assert_allclose(engine.logits(pixels), expected, rtol=1e-4, atol=1e-5)


def test_compiled_engine_is_rejected_without_a_gpu(bundle):
    with pytest.raises(UsageError, match="engine='compiled' needs a GPU, not cpu"):
        make_engine(bundle.model, bundle.preprocess, InferenceOptions("cpu", "fp32", "compiled"))


@pytest.mark.parametrize("low_latency", [True, False])
def test_faster_engine_is_used_logged_and_cached(bundle, low_latency, other_engine, monkeypatch):
    count = 1 if low_latency else build_engine(bundle).chunk_size * torch.get_num_threads()
    races = set_race(monkeypatch, torch=0.5, openvino=0.25)
    theirs = choose_bundle_engine(bundle, low_latency=low_latency)
    assert isinstance(theirs, FakeOpenVinoEngine) and theirs.options.engine == "openvino"
    line = f"engine: openvino, {count / 0.25:,.1f} images/s in fp32, batch size {count}; torch {count / 0.5:,.1f}"
    assert theirs.note == line
    again = choose_bundle_engine(bundle, low_latency=low_latency)
    assert races == [1] and again.note == line and isinstance(again, FakeOpenVinoEngine)
    assert [choice.partition(": ")[2] for choice in list_engine_choices()] == [line]


def test_torch_is_kept_unless_another_engine_is_clearly_faster(bundle, other_engine, monkeypatch):
    races = set_race(monkeypatch, torch=MIN_SPEEDUP - 0.001, openvino=1.0)
    ours = choose_bundle_engine(bundle)
    assert ours.options.engine == "torch" and not isinstance(ours, FakeOpenVinoEngine)
    assert ours.note.startswith("engine: torch, ") and "; openvino " in ours.note
    built = FakeOpenVinoEngine.built
    choose_bundle_engine(bundle)
    assert races == [1] and FakeOpenVinoEngine.built == built  # the record saves building the alternative


def test_features_are_measured_without_the_head(bundle, bundle_folder, other_engine, monkeypatch):
    set_race(monkeypatch, torch=0.5, openvino=0.25)
    predictor = load(bundle_folder, DEFAULT_OPTIONS)
    expected = load(bundle_folder, DEFAULT_OPTIONS).engine.features(bundle.preprocess.noise(3))
    predictor.choose_engine(math.inf, features=True)
    assert isinstance(predictor.engine.feature_engine, FakeOpenVinoEngine) and not isinstance(
        predictor.engine, FakeOpenVinoEngine
    )
    assert predictor.engine.options.engine == "openvino" and predictor.engine.note.startswith("engine: openvino, ")
    np.testing.assert_allclose(predictor.engine.features(bundle.preprocess.noise(3)), expected, rtol=1e-4, atol=1e-5)


def test_race_record_key_covers_model_batch_size_and_machine(bundle, monkeypatch):
    def key(batch_size=4, precision="fp32", model=bundle.model):
        return json.dumps(describe_benchmark_conditions(model, bundle.preprocess, precision, "cpu", batch_size))

    keys = {key(), key(), key(1), key(precision="bf16"), key(model=make_tiny_bundle(classes=("one", "two")).model)}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        keys.add(key())
    with monkeypatch.context() as patch:
        patch.setattr(engine_choice, "find_installed_version", lambda name: "0.0")
        keys.add(key())
    with monkeypatch.context() as patch:
        patch.setattr(engine_choice, "get_processor_name", lambda: "another processor")
        keys.add(key())
    assert len(keys) == 7


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"facts": {}, "seconds": {"torch": 0}}', "\udcff"])
def test_damaged_race_record_is_measured_again(bundle, content, other_engine, monkeypatch, cache_folder):
    races = set_race(monkeypatch, torch=0.5, openvino=0.25)
    choose_bundle_engine(bundle)
    (path,) = cache_folder.iterdir()
    path.write_bytes(content.encode(errors="surrogateescape"))
    assert list_engine_choices() == []
    assert choose_bundle_engine(bundle).options.engine == "openvino" and races == [1, 1]


def test_unwritable_cache_only_repeats_the_measurement(bundle, other_engine, monkeypatch, cache_folder):
    cache_folder.parent.mkdir(parents=True)
    cache_folder.write_text("a file in the place of the folder")
    races = set_race(monkeypatch, torch=0.5, openvino=0.25)
    assert [choose_bundle_engine(bundle).options.engine for _ in range(2)] == ["openvino"] * 2 and races == [1, 1]


def test_short_jobs_are_not_measured(bundle, other_engine, monkeypatch):
    races = set_race(monkeypatch, torch=0.5, openvino=0.25)
    monkeypatch.setattr(engine_choice, "WORTHWHILE_SECONDS", {"openvino": 3600.0})
    short = choose_bundle_engine(bundle, images=100)
    assert short.options.engine == "torch" and short.note == "" and FakeOpenVinoEngine.built == 0
    assert choose_bundle_engine(bundle, images=math.inf).options.engine == "openvino" and races == [1]
    monkeypatch.setattr(engine_choice, "MIN_PASS_SECONDS", 60.0)
    assert choose_bundle_engine(bundle, images=math.inf).options.engine == "torch"


def test_jobs_of_few_passes_run_no_measurement(bundle, other_engine, monkeypatch):
    set_race(monkeypatch, torch=0.5, openvino=0.25)
    monkeypatch.setattr(engine_choice, "MIN_PASSES", 10)
    engine, passes = build_engine(bundle), []
    forward_chunk = engine.forward_chunk
    monkeypatch.setattr(engine, "forward_chunk", lambda pixels: (passes.append(1), forward_chunk(pixels))[1])
    batch_size = engine.chunk_size * torch.get_num_threads()
    assert choose_chunk_engine(engine, 10 * batch_size - 1) is engine
    assert not passes and engine.options.engine == "torch"
    assert choose_bundle_engine(bundle, images=10 * batch_size).options.engine == "openvino"


def test_openvino_agrees_and_reuses_its_cached_graph(bundle, monkeypatch, cache_folder):
    pytest.importorskip("openvino")
    set_race(monkeypatch, torch=0.5, openvino=0.25)
    theirs, pixels = choose_bundle_engine(bundle), bundle.preprocess.noise(9)
    assert isinstance(theirs, engine_module.OpenVinoEngine)
    ours = TorchEngine(bundle.model, bundle.preprocess, precision="fp32")
    assert relative_error(theirs.logits(pixels), ours(torch.from_numpy(pixels)).numpy()) < ERROR_LIMITS["fp32"]
    assert len(list((cache_folder.parent / "graphs").iterdir())) == 1
    monkeypatch.setattr(openvino, "convert_to_openvino", lambda *args: pytest.fail("converted again"))
    again = choose_bundle_engine(bundle)
    np.testing.assert_array_equal(again.logits(pixels), theirs.logits(pixels))


@pytest.mark.parametrize("wrong", [1.0, math.nan])
def test_an_engine_whose_outputs_differ_is_not_used(bundle, wrong, other_engine, monkeypatch):
    """Agreement depends on the weights, so it is checked also where a cached measurement is reused."""
    races = set_race(monkeypatch, torch=0.5, openvino=0.25)
    choose_bundle_engine(bundle)
    monkeypatch.setattr(FakeOpenVinoEngine, "wrong", wrong)
    engine = choose_bundle_engine(bundle)
    assert races == [1] and engine.options.engine == "torch" and "the outputs of openvino differ by" in engine.note


def test_torch_is_used_silently_without_openvino(bundle, monkeypatch):
    monkeypatch.setattr(engine_choice, "find_spec", lambda name: None)
    engine = choose_bundle_engine(bundle)
    assert engine.options.engine == "torch" and engine.note == ""


def test_broken_openvino_installation_is_reported(bundle, monkeypatch):
    monkeypatch.setattr(engine_choice, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "openvino", None)
    engine = choose_bundle_engine(bundle)
    assert engine.options.engine == "torch" and engine.note.startswith("engine: torch (openvino: ")


@pytest.mark.parametrize(
    ("error", "reason"), [(NotImplementedError("far\nno such operator"), "no such operator"), (KeyError(), "KeyError")]
)
def test_failed_openvino_conversion_is_tried_once(bundle, error, reason, monkeypatch):
    pytest.importorskip("openvino")
    tries = []

    def fail(*args, **options):
        tries.append(1)
        raise error

    monkeypatch.setattr(torch.export, "export", fail)
    for _ in range(2):
        engine = choose_bundle_engine(bundle)
        assert engine.options.engine == "torch" and f"cannot convert this model: {reason}" in engine.note
    assert tries == [1]
    with pytest.raises(UsageError, match=reason) as refused:
        build_engine(bundle, InferenceOptions("cpu", "fp32", "openvino"))
    assert "--engine torch" in refused.value.hint


@pytest.mark.parametrize(
    "options",
    [
        InferenceOptions("cpu", "fp32", "torch"),
        InferenceOptions("cpu", "fp32", "openvino"),
        InferenceOptions("cpu", "int8"),
        InferenceOptions("cpu", merge_tokens=2),
    ],
)
def test_requested_options_leave_no_choice(bundle, options, other_engine, monkeypatch):
    assert find_alternative_engine(bundle.model, bundle.preprocess, options) is None
    assert find_alternative_engine(bundle.model, bundle.preprocess, DEFAULT_OPTIONS) == "openvino"
    monkeypatch.setenv("VITREOUS_ENGINE_CHOICE", "0")
    assert find_alternative_engine(bundle.model, bundle.preprocess, DEFAULT_OPTIONS) is None


@pytest.mark.parametrize(
    ("seconds", "rounds"), [((0.01, 0.02), engine_choice.MAX_ROUNDS), ((0.3, 0.3), 3), ((9.0, 1.0), 1)]
)
def test_engine_race_alternates_within_its_time_limit(seconds, rounds, monkeypatch):
    clock, calls = [0.0], []
    monkeypatch.setattr(engine_choice.time, "perf_counter", lambda: clock[0])

    def make_pass(name, duration):
        def run():
            calls.append(name)
            clock[0] += duration

        return run

    result = benchmark_engines({"a": make_pass("a", seconds[0]), "b": make_pass("b", seconds[1])})
    assert calls == ["a", "b"] * rounds and (rounds == 1 or clock[0] <= MAX_BENCHMARK_SECONDS)
    assert result == pytest.approx({"a": seconds[0], "b": seconds[1]})


def test_predict_logs_and_stores_the_engine(bundle_folder, tmp_path, other_engine, monkeypatch):
    files, out = write_images(tmp_path / "new", 3), tmp_path / "answers.jsonl"
    words = ("predict", str(bundle_folder), *files, "--precision", "fp32")
    set_race(monkeypatch, torch=0.5, openvino=0.25)
    result = run_cli(*words, "--out", str(out))
    assert result.returncode == 0 and result.stderr.count("engine: openvino, ") == 1
    assert '"engine": "openvino"' in json.dumps(json.loads((tmp_path / "answers.jsonl.job.json").read_text()))
    chosen, by_torch = (
        parse_json_output(run_cli(*words, "--json")),
        parse_json_output(run_cli(*words, "--engine", "torch", "--json")),
    )
    assert (chosen["engine"], by_torch["engine"]) == ("openvino", "torch")
    assert chosen["predictions"] == by_torch["predictions"]


def test_embed_and_serve_choose_an_engine(bundle_folder, tmp_path, other_engine, monkeypatch):
    files = write_images(tmp_path / "new", 3)
    set_race(monkeypatch, torch=0.5, openvino=0.25)
    embedded = run_cli("embed", str(bundle_folder), *files, "--precision", "fp32", "--out", str(tmp_path / "e.npz"))
    assert embedded.returncode == 0 and "engine: openvino, " in embedded.stderr
    served = load_served_predictor(bundle_folder, DEFAULT_OPTIONS)
    assert served.engine.options.engine == "openvino" and "batch size 1;" in served.engine.note


def test_python_api_measures_engines_only_on_request(bundle_folder, other_engine, monkeypatch):
    races = set_race(monkeypatch, torch=0.5, openvino=0.25)
    assert load(bundle_folder, precision="fp32").engine.options.engine == "auto" and not races
    predictor = load(bundle_folder, engine="auto", precision="fp32")
    assert predictor.engine.options.engine == "openvino" and races == [1]


def test_race_record_round_trips(bundle, other_engine, monkeypatch):
    set_race(monkeypatch, torch=0.5, openvino=0.25)
    choose_engine(
        bundle.model, bundle.preprocess, DEFAULT_OPTIONS, lambda e, p: e(torch.from_numpy(p)).numpy(), 2, math.inf
    )
    record = find_benchmark_record(describe_benchmark_conditions(bundle.model, bundle.preprocess, "fp32", "cpu", 2))
    assert record is not None and record["seconds"] == {"torch": 0.5, "openvino": 0.25}
