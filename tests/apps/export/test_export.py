"""Exported files give the outputs of their model in every runtime; exports that differ are not kept."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests import contracts
from tests.conftest import make_image, parse_json_output, run_cli
from tests.data.hostile import build_corpus
from tests.precision import PROBABILITY_LIMITS, are_predictions_close, parse_predictions
from vitreous.apps.export import export as verb
from vitreous.apps.export import graph
from vitreous.apps.export.export import export
from vitreous.apps.export.formats import EXPORT_FORMATS, ExportFormat, ExportTarget
from vitreous.data.decoding import npy
from vitreous.data.modalities.bands import BandPreprocess
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import DataError, UsageError, VitreousError, WeightsError
from vitreous.inference import export_file
from vitreous.inference.card import build_card
from vitreous.inference.exported import OnnxFileEngine
from vitreous.inference.options import InferenceOptions
from vitreous.inference.predict import load
from vitreous.models.config import (
    BiTConfig,
    ConvStemConfig,
    StemConfig,
    SwinAttentionConfig,
    SwinConfig,
    transformer_config,
)
from vitreous.models.zoo import build_model
from vitreous.nn import grid
from vitreous.tasks import export_proof as proof
from vitreous.tasks.classification import Classification
from vitreous.tasks.features import FeatureExtraction
from vitreous.weights.bundle import Bundle, load_bundle

pytestmark = pytest.mark.usefixtures("without_pages")  # report pages would slow down the many trainings

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

EXPORT_GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "export.md"
SMALL_CONFIG = {
    "image": (16, 24),
    "patch": (8, 8),
    "classes": 3,
    "width": 16,
    "depth": 1,
    "heads": 2,
    "mlp": {"hidden": 24},
}


def save_random_bundle(path: Path, config, seed: int = 0, **metadata) -> Bundle:
    """Save and return a bundle with random nonzero weights."""
    torch.manual_seed(seed)
    model = build_model(config).eval()
    contracts.randomise(model)
    mean, std = ((values * config.channels)[: config.channels] for values in ((0.4, 0.5, 0.6), (0.2, 0.25, 0.3)))
    names = ("ant", "bée", "cat")
    preprocess = ImagePreprocess((config.image[0], config.image[1]), config.channels, mean, std, share=0.9)
    bundle = Bundle(model, Classification(names, **{"temperature": 1.5, **metadata}), preprocess)
    bundle.save(path)
    return bundle


@pytest.fixture(scope="module")
def exported_folder(tmp_path_factory) -> Path:
    """Return a folder with `bundle`, ten `photos`, and the files of `vitreous export`."""
    exported_folder = tmp_path_factory.mktemp("exported")
    save_random_bundle(exported_folder / "bundle", transformer_config(**SMALL_CONFIG))
    (exported_folder / "photos").mkdir()
    for seed in range(10):
        make_image(seed, (30 + seed, 40), seed).save(exported_folder / "photos" / f"{seed}.png")
    document = parse_json_output(
        run_cli("export", str(exported_folder / "bundle"), "--images", str(exported_folder / "photos"), "--json")
    )
    (exported_folder / "result.json").write_text(json.dumps(document))
    return exported_folder


@pytest.fixture(scope="module")
def onnx_file(exported_folder) -> Path:
    return exported_folder / "bundle" / "model.onnx"


def run_onnx_session(path: Path, pixels: np.ndarray) -> np.ndarray:
    """Run a file with ONNX Runtime and its metadata only: pixels (n, C, *image) -> logits (n, K)."""
    session = ort.InferenceSession(os.fspath(path), providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map
    mean, std = (np.array(json.loads(metadata[name]))[:, None, None] for name in ("mean", "std"))
    return session.run(["logits"], {"images": ((pixels - mean) / std).astype(np.float32)})[0]


def run_pytorch(bundle: Bundle, pixels: np.ndarray) -> np.ndarray:
    """Return the outputs of PyTorch."""
    with torch.inference_mode():
        return bundle.model(bundle.preprocess.normalise(torch.from_numpy(pixels))).numpy()


def draw_random_pixels(count: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, *shape), dtype=np.uint8)


def test_the_result_reports_the_verification(exported_folder, onnx_file):
    (export_report,) = json.loads((exported_folder / "result.json").read_text())["exports"]
    assert (export_report["format"], export_report["file"], export_report["images"]) == ("onnx", str(onnx_file), 10)
    assert (
        export_report["bytes"] == onnx_file.stat().st_size
        and export_report["sha256"] == hashlib.sha256(onnx_file.read_bytes()).hexdigest()
    )
    assert (
        export_report["max_abs_logit_difference"] < 1e-4
        and export_report["top1_agreement"] == 1
        and export_report["top1"] is None
    )
    assert export_report["images_per_second"] > 0 and export_report["original_images_per_second"] > 0
    assert sorted(path.name for path in onnx_file.parent.iterdir()) == [
        "model.json",
        "model.onnx",
        "weights.safetensors",
    ]


@pytest.mark.parametrize("to", ["onnx", "torch", "openvino"])
def test_an_encoder_without_a_head_gives_features(exported_folder, to, tmp_path):
    if to == "openvino":
        pytest.importorskip("openvino")
    torch.manual_seed(0)
    model = contracts.randomise(build_model(transformer_config(**{**SMALL_CONFIG, "classes": 0})).eval())
    bundle = Bundle(model, FeatureExtraction(), ImagePreprocess((16, 24)))
    bundle.save(tmp_path / "encoder")
    (row,) = export(tmp_path / "encoder", to, images=[str(exported_folder / "photos")])["exports"]
    assert row["outputs"] == "features" and row["max_abs_logit_difference"] < 1e-4 and row["top1"] is None
    if to == "torch":
        return
    exported, pixels = load(row["file"], headless=True), draw_random_pixels(3, 3, 16, 24)
    assert np.allclose(exported.engine.features(pixels), run_pytorch(bundle, pixels), atol=1e-4)
    with pytest.raises(UsageError, match="has no head"):
        exported.predict(exported_folder / "photos" / "0.png")


@pytest.mark.parametrize("failures", [2, 20])
def test_npy_header_parsing_is_retried_if_the_python_parser_fails(failures, tmp_path, monkeypatch):
    """The parser of CPython 3.11 may fail in threads: two failures are retried, a permanent one is reported."""
    np.save(tmp_path / "a.npy", np.arange(12, dtype=np.uint8).reshape(3, 4))
    parse, left = npy.NPY_HEADER_READERS[(1, 0)], [failures]

    def fail_to_parse(onnx_file, **options):
        result = parse(onnx_file, **options)
        left[0] -= 1
        if left[0] >= 0:
            raise SystemError("AST constructor recursion depth mismatch (before=24, after=22)")
        return result

    monkeypatch.setitem(npy.NPY_HEADER_READERS, (1, 0), fail_to_parse)
    content = (tmp_path / "a.npy").read_bytes()
    if failures == 2:
        assert npy.read_npy(content, "a.npy").tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]]
    else:
        with pytest.raises(DataError, match=r"^a\.npy: a damaged \.npy header"):
            npy.read_npy(content, "a.npy")
        assert left == [failures - npy.NPY_HEADER_ATTEMPTS]


def test_feature_agreement_is_by_angle():
    task, ours = FeatureExtraction(), np.eye(3)
    assert task.measure_agreement(ours, 2 * ours) == 1
    rotated = ours + [[0.0, 0.2, 0.0], [0.0, 0.0, 0.0], [0.1, 0.0, 0.0]]  # by 11 and 6 degrees
    assert task.measure_agreement(ours, rotated) == pytest.approx(2 / 3)


@pytest.mark.parametrize("batch", [1, 3, 65])
def test_onnx_runtime_without_vitreous_gives_the_same_logits(exported_folder, onnx_file, batch):
    pixels = draw_random_pixels(batch, 3, 16, 24)
    assert (
        np.abs(run_onnx_session(onnx_file, pixels) - run_pytorch(load_bundle(exported_folder / "bundle"), pixels)).max()
        < 1e-4
    )


def test_exported_features_are_the_head_inputs(exported_folder, onnx_file):
    bundle, pixels = load_bundle(exported_folder / "bundle"), draw_random_pixels(3, 3, 16, 24)
    with torch.inference_mode():
        images = bundle.preprocess.normalise(torch.from_numpy(pixels))
        expected = bundle.model.pool(bundle.model.features(images)).numpy()
    assert np.abs(OnnxFileEngine(onnx_file).features(pixels) - expected).max() < 1e-4


@pytest.mark.processor
def test_exported_predictions_and_errors_match_on_hostile_files(exported_folder, onnx_file, tmp_path):
    """Within 1e-5 in float32. By default the run may compute in bfloat16, so the tolerance is that of bfloat16."""
    paths = []
    for case in build_corpus():
        paths.append(tmp_path / case.name)
        paths[-1].write_bytes(case.content)
    exported = load(onnx_file).predict(paths, bad_images="skip")
    for precision in PROBABILITY_LIMITS:
        run = load(exported_folder / "bundle", InferenceOptions(precision=precision)).predict(paths, bad_images="skip")
        assert [prediction.error for prediction in run] == [prediction.error for prediction in exported]
        readable_pairs = [(a, b) for a, b in zip(run, exported, strict=True) if a.error is None]
        assert len(readable_pairs) > 20 and len(readable_pairs) < len(paths)
        assert are_predictions_close(*zip(*readable_pairs, strict=True), precision), precision


def test_the_export_matches_the_run_within_its_precision(exported_folder, onnx_file, processor):
    """The run uses the default precision of each processor, the file always float32."""
    photos = sorted((exported_folder / "photos").iterdir())
    run, exported = load(exported_folder / "bundle"), load(onnx_file)
    assert (run.engine.precision, exported.engine.precision) == (processor, "fp32")
    assert are_predictions_close(run.predict(photos), exported.predict(photos), processor)


def test_onnx_logits_are_independent_of_batch_composition(onnx_file):
    runtime, pixels = OnnxFileEngine(onnx_file), draw_random_pixels(7, 3, 16, 24)
    assert runtime.session.get_session_options().get_session_config_entry("session.intra_op.allow_spinning") == "0"
    batch_logits = runtime.logits(pixels)
    assert all(np.array_equal(runtime.logits(pixels[i : i + 1])[0], batch_logits[i]) for i in range(7))


def test_onnx_sessions_use_the_threads_of_the_openmp_variable(onnx_file, monkeypatch):
    monkeypatch.setattr("vitreous.system.cores.count_usable_cores", lambda: 2)
    for threads in (1, 2):
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        assert OnnxFileEngine(onnx_file).session.get_session_options().intra_op_num_threads == threads


def test_predict_takes_the_file_and_never_imports_torch(exported_folder, onnx_file):
    code = f"""
import sys
from vitreous.cli.main import run_command
run_command(["predict", {str(onnx_file)!r}, {str(exported_folder / "photos" / "3.png")!r}, "--json"])
assert "torch" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    predictions = parse_predictions(parse_json_output(result)["predictions"])
    for precision in PROBABILITY_LIMITS:
        run = load(exported_folder / "bundle", InferenceOptions(precision=precision)).predict(
            [exported_folder / "photos" / "3.png"]
        )
        assert are_predictions_close(run, predictions, precision), precision


def test_the_script_of_the_guide_matches_predict(exported_folder, onnx_file, tmp_path, capsys, monkeypatch):
    script = re.search(r"```python\n(import json.*?)```", EXPORT_GUIDE.read_text("utf-8"), re.S)
    assert script
    (tmp_path / "classify.py").write_text(script[1], "utf-8")
    photo = tmp_path / "photos" / "0.png"
    for folder in (photo.parent, tmp_path / "bundle"):
        folder.mkdir()
    Image.fromarray(np.asarray(make_image(5, (50, 70)))).save(photo)
    shutil.copy(onnx_file, tmp_path / "bundle" / "model.onnx")
    monkeypatch.chdir(tmp_path)
    runpy.run_path("classify.py")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    (expected,) = load(onnx_file).predict([photo])
    assert tuple(row[0] for row in rows) == expected.names
    assert np.allclose([float(row[1]) for row in rows], expected.probabilities, atol=1e-4)


def test_a_flipped_bit_anywhere_is_noticed(onnx_file, tmp_path):
    raw, rng = onnx_file.read_bytes(), random.Random(0)
    OnnxFileEngine(onnx_file)
    bad = tmp_path / "bad.onnx"
    for offset in (0, 1, len(raw) - 1, len(raw) - 40, len(raw) - 70, *(rng.randrange(len(raw)) for _ in range(60))):
        bad.write_bytes(raw[:offset] + bytes([raw[offset] ^ 1 << rng.randrange(8)]) + raw[offset + 1 :])
        with pytest.raises(WeightsError):
            OnnxFileEngine(bad)
    for cut in (0, 10, len(raw) // 2, len(raw) - 1):
        bad.write_bytes(raw[:cut])
        with pytest.raises(WeightsError):
            OnnxFileEngine(bad)
    bad.write_bytes(raw + b"\0")
    assert run_cli("predict", str(bad), str(onnx_file)).returncode == 4


def test_parsing_random_bytes_as_onnx_never_crashes(onnx_file):
    raw, rng = onnx_file.read_bytes(), random.Random(1)
    for _ in range(300):
        content = bytearray(raw[: rng.randrange(3000)])
        for _ in range(rng.randrange(8)):
            if content:
                content[rng.randrange(len(content))] = rng.randrange(256)
        try:
            list(export_file.iterate_tensor_protos(export_file.parse_onnx(bytes(content), Path("x.onnx"))))
        except WeightsError:
            continue


def test_external_tensor_data_is_rejected(onnx_file, tmp_path):
    graph = onnx.load(os.fspath(onnx_file))
    tensor = graph.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../etc/passwd")
    del graph.metadata_props[[p.key for p in graph.metadata_props].index("sha256")]
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(export_file.append_onnx_checksum(graph.SerializeToString()))
    with pytest.raises(WeightsError, match="tensors in other files"):
        OnnxFileEngine(bad)


def test_foreign_onnx_files_and_pt2_files_are_rejected(onnx_file, tmp_path):
    graph = onnx.load(os.fspath(onnx_file))
    del graph.metadata_props[:]
    onnx.save(graph, os.fspath(tmp_path / "other.onnx"))
    with pytest.raises(WeightsError, match="was not exported by vitreous"):
        load(tmp_path / "other.onnx")
    (tmp_path / "model.pt2").write_bytes(b"PK")
    with pytest.raises(WeightsError, match="can execute code when loaded"):
        load(tmp_path / "model.pt2")
    with pytest.raises(UsageError, match="in its stored precision"):
        load(onnx_file, InferenceOptions(precision="bf16"))


def test_a_differing_export_is_kept_only_if_accepted(exported_folder, onnx_file, tmp_path, monkeypatch):
    save_random_bundle(tmp_path / "other", transformer_config(**SMALL_CONFIG), seed=1)

    def write_other_model(target: ExportTarget, file_path: Path) -> None:
        shutil.copy(onnx_file, file_path)

    monkeypatch.setitem(EXPORT_FORMATS, "onnx", ExportFormat(".onnx", write_other_model))
    arguments = ["export", str(tmp_path / "other"), "--images", str(exported_folder / "photos")]
    rejected = run_cli(*arguments)
    assert rejected.returncode == 1 and "error: the export failed the verification: " in rejected.stderr
    assert "add --accept-loss to keep it" in rejected.stderr
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == ["model.json", "weights.safetensors"]
    (export_report,) = parse_json_output(run_cli(*arguments, "--accept-loss", "--json"))["exports"]
    assert export_report["accepted_loss"] and Path(export_report["file"]).read_bytes() == onnx_file.read_bytes()
    repeated = run_cli(*arguments, "--accept-loss")
    assert repeated.returncode == 2 and "already exists and is not overwritten" in repeated.stderr


@pytest.mark.parametrize(
    "agreement,furthest,right,quantised,allowed,is_kept",
    [
        (1.0, 1e-4, None, None, None, True),
        (1.0, 2e-3, None, None, None, False),
        (0.99, 1e-4, None, None, None, False),
        (0.99, 0.5, None, "int8", None, True),
        (0.97, 0.5, None, "int8", None, False),
        (0.99, 0.5, (0.9, 0.88), "int8", None, False),
        (0.99, 0.5, (0.9, 0.895), "int8", None, True),
        (0.9, 0.5, (0.9, 0.86), None, 0.1, True),
        (1.0, float("inf"), None, "int8", 1.0, False),
    ],
)
def test_export_acceptance_bounds(agreement, furthest, right, quantised, allowed, is_kept):
    comparison = proof.ExportComparison(
        100, furthest, agreement, right, images_per_second=(1.0, 1.0), is_finite=furthest < 9
    )
    assert (comparison.get_rejection_reason(allowed, quantised) == "") is is_kept


def test_agreement_is_the_share_of_equal_predictions(exported_folder):
    card = build_card(load_bundle(exported_folder / "bundle"))
    ours, theirs = np.array([[3.0, 1, 0], [0, 2, 1]]), np.array([[2.0, 1, 0], [0, 1, 2]])
    assert card.task.measure_agreement(ours, theirs) == 0.5
    multilabel_bundle = Bundle(
        load_bundle(exported_folder / "bundle").model, Classification(card.classes, True, "sigmoid"), card.preprocess
    )
    assert multilabel_bundle.task.measure_agreement(ours - 1.5, theirs - 1.5) == 4 / 6


def test_export_requires_verification_images(exported_folder, tmp_path):
    save_random_bundle(tmp_path / "other", transformer_config(**SMALL_CONFIG))
    with pytest.raises(UsageError, match="no images to verify"):
        export(tmp_path / "other")
    with pytest.raises(DataError, match="at least 8"):
        export(tmp_path / "other", images=[os.fspath(exported_folder / "photos" / "1.png")])
    with pytest.raises(DataError, match="8 for calibration and 8 others"):
        export(tmp_path / "other", images=[os.fspath(exported_folder / "photos")], quantize="int8")
    assert len(list((tmp_path / "other").iterdir())) == 2


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--to", "onx"], "unknown format"),
        (["--to", "timm", "--quantize", "int8"], "writes unchanged weights"),
        (["--to", "torch", "--quantize", "int8"], "int8 needs"),
        (["--images", "x", "--data", "y"], "--images and --data cannot be combined"),
        (["--max-loss", "2"], "invalid --max-loss 2.0\n  use a number from 0 to 1"),
        (["--out", "model.txt"], "does not end in .onnx"),
    ],
)
def test_invalid_export_options_are_rejected(exported_folder, arguments, message, tmp_path):
    result = run_cli("export", str(exported_folder / "bundle"), *arguments, cwd=tmp_path)
    assert result.returncode == 2 and message in result.stderr and not list(tmp_path.iterdir())


def test_timm_weights_are_exported(exported_folder, tmp_path):
    (export_report,) = export(exported_folder / "bundle", "timm", tmp_path / "w")["exports"]
    assert export_report["format"] == "timm" and Path(export_report["file"]).stat().st_size == export_report["bytes"]


@pytest.mark.parametrize("to,library", [("onnx", "onnxscript"), ("openvino", "openvino")])
def test_a_missing_extra_is_reported_before_images_are_collected(exported_folder, tmp_path, monkeypatch, to, library):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr(verb, "collect_verification_images", None)  # a call would fail
    result = run_cli(
        "export", str(exported_folder / "bundle"), "--to", to, "--images", str(exported_folder / "photos"), cwd=tmp_path
    )
    assert result.returncode == 6 and library in result.stderr and "pip install 'vitreous[export]'" in result.stderr


@pytest.mark.parametrize(
    "to,name", [("torch", "model.pt2"), ("timm", "model-timm.safetensors"), ("huggingface", "model-huggingface")]
)
def test_an_existing_export_is_replaced_only_with_overwrite(exported_folder, tmp_path, to, name):
    save_random_bundle(tmp_path / "run", transformer_config(**SMALL_CONFIG))
    image_arguments = ["--images", str(exported_folder / "photos")] if to == "torch" else []
    arguments = ["export", str(tmp_path / "run"), "--to", to, *image_arguments]
    assert run_cli(*arguments).returncode == 0
    file_path = tmp_path / "run" / name
    marked = file_path / "config.json" if file_path.is_dir() else file_path
    marked.write_text("old")
    rejected = run_cli(*arguments)
    assert rejected.returncode == 2 and "--overwrite" in rejected.stderr and marked.read_text() == "old"
    assert run_cli(*arguments, "--overwrite").returncode == 0 and marked.read_bytes() != b"old"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"model.json", "weights.safetensors", name}


def test_a_folder_with_other_files_is_never_overwritten(exported_folder, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    for to in ("huggingface", "timm"):
        result = run_cli(
            "export", str(exported_folder / "bundle"), "--to", to, "--out", str(tmp_path / "mine"), "--overwrite"
        )
        assert (result.returncode == 2 and "letter.txt" in result.stderr) or (tmp_path / "mine.safetensors").is_file()
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


def test_a_failed_export_keeps_the_existing_file(exported_folder, tmp_path, monkeypatch):
    save_random_bundle(tmp_path / "run", transformer_config(**SMALL_CONFIG))
    (tmp_path / "run" / "model.pt2").write_text("old")
    monkeypatch.setattr(proof.ExportComparison, "get_rejection_reason", lambda *arguments: "a reason")
    result = run_cli(
        "export", str(tmp_path / "run"), "--to", "torch", "--images", str(exported_folder / "photos"), "--overwrite"
    )
    assert result.returncode == 1 and (tmp_path / "run" / "model.pt2").read_text() == "old"


def test_a_missing_extra_is_reported_with_the_install_command(exported_folder, onnx_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    result = run_cli("predict", str(onnx_file), str(exported_folder / "photos"))
    assert result.returncode == 6 and "pip install 'vitreous[export]'" in result.stderr
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    result = run_cli(
        "export",
        str(exported_folder / "bundle"),
        "--out",
        str(tmp_path / "a.onnx"),
        "--images",
        str(exported_folder / "photos"),
    )
    assert result.returncode == 6 and "pip install 'vitreous[export]'" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("numbers", ["", "uint16", "int16", "float32"])
def test_numpy_normalisation_is_bit_identical_to_torch(numbers):
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    preprocess = ImagePreprocess((9, 7), 3, mean, std)
    preprocess = BandPreprocess((9, 7), 3, mean, std, numbers=numbers) if numbers else preprocess
    pixels = (np.random.default_rng(0).random((2, 3, 9, 7)) * preprocess.peak).astype(preprocess.array_dtype)
    assert np.array_equal(preprocess.normalise_array(pixels), preprocess.normalise(torch.from_numpy(pixels)).numpy())


@pytest.mark.parametrize("rule", grid.RESIZE_MODES)
def test_position_resizing_in_the_graph_matches_eager(rule):
    for old in (1, 2, 3, 7, 14):
        source = torch.randn(old, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(old))
        for new in ((new, new_width) for new in (1, 2, 3, 5, 7, 9, 14, 24, 37) for new_width in (3, 4)):
            assert torch.allclose(
                graph.resize_to_symbolic_grid(source, new, rule),
                grid.resize_position_table(source, new, rule),
                rtol=0,
                atol=1e-12,
            ), (old, new)


MODEL_CONFIGS = {
    "mean": transformer_config(**SMALL_CONFIG, class_token=False, pool="mean", norm={"final": "pooled"}),
    "attention pool": transformer_config(
        **SMALL_CONFIG, class_token=False, pool="attention", positions={"resize": "bicubic"}
    ),
    "distilled": transformer_config(**SMALL_CONFIG, pool="distilled", positions={"resize": "bilinear"}),
    "registers, scale": transformer_config(**SMALL_CONFIG, registers=2).with_options(
        norm={"layer_scale": 0.1},
        mlp={"kind": "swiglu"},
        head={"representation": 8},
        positions={"resize": "zoom-scipy"},
    ),
    "axial in each block": transformer_config(
        **SMALL_CONFIG, positions={"kind": "axes", "at": "each", "resize": "bicubic-aligned"}
    ),
    "factorised": transformer_config(**SMALL_CONFIG, positions={"kind": "factorised"}),
    "waves, shared": transformer_config(**SMALL_CONFIG).with_options(
        positions={"kind": "sincos", "at": "shared"}, mlp={"gelu": "tanh"}
    ),
    "rotary": transformer_config(**SMALL_CONFIG).with_options(
        attention={"kind": "rotary"}, positions={"kind": "none"}, mlp={"gelu": "quick"}
    ),
    "conv stem": transformer_config(
        stem=ConvStemConfig(widths=(4, 8), blocks=(0, 1)), positions={"resize": "bicubic-offset"}, **SMALL_CONFIG
    ),
    "grey": transformer_config(**{**SMALL_CONFIG, "channels": 1}, positions={"resize": "zoom"}),
    "bit": BiTConfig(image=(40, 48), blocks=(1, 1), width=16, classes=3),
    "swin": SwinConfig(
        image=(32, 48),
        patch_size=(2, 2),
        classes=3,
        width=16,
        blocks=(2, 2),
        heads=(1, 2),
        attention=SwinAttentionConfig(window=4),
    ),
    "swin, version 2": SwinConfig(
        image=(32, 48),
        patch_size=(2, 2),
        classes=3,
        width=16,
        blocks=(2, 2),
        heads=(1, 2),
        version=2,
        attention=SwinAttentionConfig(window=4),
    ),
    "windows of patches": transformer_config(
        **{**SMALL_CONFIG, "depth": 2}, attention={"window": 2, "global_blocks": (1,)}
    ),
    # fixed image size
    "hybrid": transformer_config(**SMALL_CONFIG, stem=StemConfig(blocks=(1,), width=8)),
    "relative": transformer_config(**SMALL_CONFIG, attention={"kind": "relative"}),
    "windows": transformer_config(
        class_token=False,
        pool="mean",
        attention={"kind": "decomposed", "window": 2, "global_blocks": (0,)},
        **SMALL_CONFIG,
    ),
    "axial": transformer_config(**SMALL_CONFIG, axial=True, class_token=False, pool="mean"),
    "axial bit": BiTConfig(image=(40, 48), blocks=(1, 1), width=16, classes=3, axial=True),
}
FIXED_SIZE_MODELS = list(MODEL_CONFIGS)[list(MODEL_CONFIGS).index("hybrid") :]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_CONFIGS)
def test_every_model_family_exports_to_onnx(name, exported_folder, tmp_path):
    config = MODEL_CONFIGS[name]
    multilabel = {"loss": "sigmoid", "multilabel": True} if name == "mean" else {}
    bundle = save_random_bundle(tmp_path / "b", config, **multilabel)
    photos = exported_folder / "photos"
    if name in FIXED_SIZE_MODELS:
        with pytest.raises(UsageError, match="dynamic_size=True is not for"):
            export(tmp_path / "b", images=[os.fspath(photos)], dynamic_size=True)
    (export_report,) = export(tmp_path / "b", images=[os.fspath(photos)], dynamic_size=name not in FIXED_SIZE_MODELS)[
        "exports"
    ]
    assert export_report["max_abs_logit_difference"] < 1e-4
    height, width = config.image
    step = (1, 1) if isinstance(config, BiTConfig) else config.patch
    for rows, columns in [(0, 0)] if name in FIXED_SIZE_MODELS else [(0, 0), (1, 0), (-1, 3), (4, 4)]:
        pixels = draw_random_pixels(3, config.channels, height + rows * step[0], width + columns * step[1])
        assert np.abs(run_onnx_session(Path(export_report["file"]), pixels) - run_pytorch(bundle, pixels)).max() < 1e-4
    predictors = load(tmp_path / "b", precision="fp32"), load(export_report["file"])
    ours, theirs = (predictor.predict([photos / "1.png"], top=3) for predictor in predictors)
    assert ours[0].names == theirs[0].names and np.allclose(ours[0].probabilities, theirs[0].probabilities, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_int8_export_calibrates_on_half_of_the_images(to, exported_folder, tmp_path):
    save_random_bundle(
        tmp_path / "b", transformer_config(**{**SMALL_CONFIG, "width": 32, "mlp": {"hidden": 64}, "depth": 2})
    )
    (tmp_path / "photos").mkdir()
    for seed in range(24):
        make_image(seed, (30, 40), seed).save(tmp_path / "photos" / f"{seed}.png")
    document = export(tmp_path / "b", to, None, [os.fspath(tmp_path / "photos")], quantize="int8", max_loss="any")
    (export_report,) = document["exports"]
    assert (
        export_report["images"] == 12
        and export_report["quantised"] == "int8"
        and 1e-5 < export_report["max_abs_logit_difference"] < 1
    )
    pixels = draw_random_pixels(9, 3, 16, 24)
    runtime = load(export_report["file"]).engine
    ours = run_pytorch(load_bundle(tmp_path / "b"), pixels)
    assert np.abs(runtime.logits(pixels) - ours).max() < 0.3 * np.ptp(ours)
    assert np.array_equal(runtime.logits(pixels)[2], runtime.logits(pixels[2:3])[0])


@pytest.mark.slow
def test_openvino_files_predict_and_detect_damage(exported_folder, tmp_path):
    pytest.importorskip("openvino")
    out = tmp_path / "model.xml"
    (export_report,) = export(
        exported_folder / "bundle", "openvino", out, [os.fspath(exported_folder / "photos")], dynamic_size=True
    )["exports"]
    assert export_report["max_abs_logit_difference"] < 1e-4 and sorted(p.name for p in tmp_path.iterdir()) == [
        "model.bin",
        "model.xml",
    ]
    import openvino

    compiled = openvino.Core().compile_model(os.fspath(out), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    bundle, pixels = load_bundle(exported_folder / "bundle"), draw_random_pixels(3, 3, 24, 40)
    images = bundle.preprocess.normalise(torch.from_numpy(pixels)).numpy()
    assert np.abs(compiled({"images": images})["logits"] - run_pytorch(bundle, pixels)).max() < 1e-4
    files = sorted((exported_folder / "photos").iterdir())
    ours, theirs = (load(run).predict(files) for run in (exported_folder / "bundle", out))
    assert [a.names for a in ours] == [a.names for a in theirs]
    for path in (out, out.with_suffix(".bin")):
        raw = path.read_bytes()
        for offset in (0, len(raw) // 2, len(raw) - 1):
            path.write_bytes(raw[:offset] + bytes([raw[offset] ^ 4]) + raw[offset + 1 :])
            with pytest.raises(WeightsError):
                load(out)
        path.write_bytes(raw)
    load(out)


@pytest.mark.slow
def test_torch_export_runs_without_vitreous(exported_folder, tmp_path):
    out = tmp_path / "model.pt2"
    (export_report,) = export(
        exported_folder / "bundle", "torch", out, [os.fspath(exported_folder / "photos")], dynamic_size=True
    )["exports"]
    assert export_report["max_abs_logit_difference"] < 1e-5
    extra = {"vitreous.json": ""}
    module = torch.export.load(out, extra_files=extra).module()
    assert json.loads(extra["vitreous.json"])["card"]["classes"] == ["ant", "bée", "cat"]
    bundle, pixels = load_bundle(exported_folder / "bundle"), draw_random_pixels(3, 3, 24, 40)
    logits = module(bundle.preprocess.normalise(torch.from_numpy(pixels)))[0].detach().numpy()
    assert np.abs(logits - run_pytorch(bundle, pixels)).max() < 1e-5
    assert str(Path(verb.__file__).parent).encode() not in out.read_bytes()


@pytest.mark.slow
def test_a_run_is_verified_on_its_validation_images(photo_folder, tmp_path):
    from tests.conftest import TINY_RUN
    from vitreous.jobs.train import train

    train(photo_folder, out=tmp_path / "run", **TINY_RUN)
    files_after_export = (
        (tmp_path / "run" / "evaluations.jsonl").read_bytes()
        if (tmp_path / "run" / "evaluations.jsonl").exists()
        else b""
    )
    (export_report,) = parse_json_output(run_cli("export", str(tmp_path / "run"), "--json"))["exports"]
    assert export_report["images"] == 12 and export_report["verified_on"].endswith("(val)")
    assert export_report["top1"]["original"] == export_report["top1"]["export"]
    (quantised,) = parse_json_output(
        run_cli("export", str(tmp_path / "run"), "--quantize", "int8", "--accept-loss", "--json")
    )["exports"]
    assert quantised["images"] == 12 and quantised["file"].endswith("model-int8.onnx")
    after = (
        (tmp_path / "run" / "evaluations.jsonl").read_bytes()
        if (tmp_path / "run" / "evaluations.jsonl").exists()
        else b""
    )
    assert after == files_after_export
    with pytest.raises(VitreousError):
        export(tmp_path / "run", out=tmp_path / "x.onnx", max_loss=2)
