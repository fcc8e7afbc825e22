"""Predictions for files: bit-identical regardless of batch composition, in order, with reading and computing in
parallel."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from tests import contracts
from tests.conftest import parse_json_output, run_cli
from tests.inference.small_models import CLASSES, make_tiny_bundle, write_images
from tests.precision import ERROR_LIMITS, are_predictions_close, parse_predictions, relative_error
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import DataError, UsageError
from vitreous.inference import engine, pipeline
from vitreous.inference.engine import TorchEngine, make_engine
from vitreous.inference.options import InferenceOptions
from vitreous.inference.pipeline import choose_chunk_size, run_pipeline
from vitreous.inference.predict import Predictor, load
from vitreous.inference.sources import Item
from vitreous.models.config import MlpConfig, ViTConfig
from vitreous.models.zoo import build_model


@pytest.fixture(scope="module")
def bundle():
    return make_tiny_bundle()


@pytest.fixture(scope="module")
def bundle_folder(bundle, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "bundle"
    bundle.save(folder)
    return folder


def build_engine(bundle, options, low_latency):
    engine = make_engine(bundle.model, bundle.preprocess, options)
    engine.low_latency = low_latency
    return engine


def compute_reference_outputs(bundle, pixels):
    """(n, C, *image) pixels -> logits (n, K) and the head's input features (n, D), computed by the model in float32."""
    read = []
    handle = bundle.model.head.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    try:
        with torch.inference_mode():
            return bundle.model.eval()(bundle.preprocess.normalise(torch.from_numpy(pixels))).numpy(), read[0].numpy()
    finally:
        handle.remove()


@pytest.mark.processor
@pytest.mark.parametrize("precision", ERROR_LIMITS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("quick", [False, True])
def test_predictions_are_bit_identical_regardless_of_batch(bundle, threads, quick, precision):
    """In every precision; outputs are also within that precision's tolerance of the model's."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (150, 3, 16, 16), dtype=np.uint8)

    def body():
        torch.set_num_threads(threads)
        engine = build_engine(bundle, InferenceOptions(precision=precision), quick)
        alone = np.concatenate([engine.logits(image[None]) for image in pixels[:20]])
        features = np.concatenate([engine.features(image[None]) for image in pixels[:5]])
        for _ in range(12):
            beside = pixels[rng.permutation(150)[: rng.integers(1, 150)]]
            selected = rng.integers(0, 20)
            at = rng.integers(0, len(beside) + 1)
            mixed = np.insert(beside, at, pixels[selected], axis=0)
            assert np.array_equal(engine.logits(mixed)[at], alone[selected])
        assert np.array_equal(engine.features(pixels[4::-1]), features[::-1])
        return alone, features

    num_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1) as apart:  # PyTorch's thread count is per thread
            alone, features = apart.submit(body).result()
    finally:
        torch.set_num_threads(num_threads)
    logits, read = compute_reference_outputs(bundle, pixels[:20])
    assert relative_error(alone, logits) < ERROR_LIMITS[precision]
    assert relative_error(features, read[:5]) < ERROR_LIMITS[precision]


def record_thread_names(engine, images, monkeypatch) -> list[str]:
    """Names of the threads that computed the chunks of `images` images, in a process of two threads."""
    names, forward_chunk = [], TorchEngine.forward_chunk

    def watched(self, pixels):
        names.append(threading.current_thread().name)
        return forward_chunk(self, pixels)

    monkeypatch.setattr(TorchEngine, "forward_chunk", watched)

    def body():
        torch.set_num_threads(2)
        return engine.logits(np.zeros((images, 3, 16, 16), np.uint8))

    num_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1, "caller") as apart:
            apart.submit(body).result()
    finally:
        torch.set_num_threads(num_threads)
    return [name.split("_")[0] for name in names]


@pytest.mark.parametrize(
    "quick, parts, keeps, expected",
    [
        (True, 1, True, ["caller"]),
        (True, 2, True, ["team"] * 2),
        (True, 1, False, ["caller"]),
        (True, 2, False, ["caller"] * 2),
        (False, 1, True, ["team"]),
    ],
)
def test_threads_share_chunks_for_low_latency(bundle, quick, parts, keeps, expected, monkeypatch):
    engine = build_engine(bundle, InferenceOptions("cpu", "fp32"), quick)
    monkeypatch.setattr(TorchEngine, "has_thread_invariant_outputs", lambda self, size, threads: keeps)
    assert record_thread_names(engine, parts * engine.chunk_size, monkeypatch) == expected


@pytest.mark.parametrize("differs", [False, True])
def test_thread_invariance_is_measured_once_on_noise(bundle, differs, monkeypatch):
    engine, calls = TorchEngine(bundle.model, bundle.preprocess, precision="fp32"), []

    def forward_chunk(pixels):
        calls.append((threading.current_thread().name.startswith("team"), pixels.float().std().item()))
        return torch.tensor([1.0 + 1e-6 * (differs and calls[-1][0])])

    monkeypatch.setattr(engine, "forward_chunk", forward_chunk)
    assert [engine.has_thread_invariant_outputs(1, 2) for _ in range(3)] == [not differs] * 3
    assert [is_shared for is_shared, _ in calls] == [True, False]
    assert min(deviation for _, deviation in calls) > 50  # noise from 0 to 255


@pytest.mark.processor
@pytest.mark.parametrize("precision", ERROR_LIMITS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "width, heads, image, patch", [(24, 2, 16, 4), (64, 4, 16, 2), (48, 3, 48, 16), (96, 3, 32, 8), (40, 1, 24, 8)]
)
def test_outputs_are_independent_of_the_position_in_a_chunk(precision, packed, width, heads, image, patch, monkeypatch):
    """Kernels compute the last rows of a product, and odd numbers of rows, in separate blocks: outputs must not
    change."""
    monkeypatch.setattr(engine, "has_fast_packed_matmul", lambda device: packed)
    torch.manual_seed(0)
    config = ViTConfig(
        image=(image, image),
        patch=(patch, patch),
        width=width,
        depth=2,
        heads=heads,
        classes=7,
        mlp=MlpConfig(hidden=2 * width + 8),
    )
    model = contracts.randomise(build_model(config).eval())
    torch_engine = TorchEngine(model, ImagePreprocess((image, image)), precision=precision)
    size = torch_engine.chunk_size
    pixels = torch.randint(0, 256, (size, 3, image, image), dtype=torch.uint8).numpy()
    alone = torch_engine.logits(pixels[:1])[0]
    for position in range(size) if size < 9 else (1, 2, size // 2, size - 2, size - 1):
        assert np.array_equal(torch_engine.logits(np.roll(pixels, position, 0))[position], alone), position


def test_default_precision_is_stored_and_required_to_resume(bundle_folder, tmp_path, processor, monkeypatch):
    files = write_images(tmp_path, 3)
    command = ["predict", str(bundle_folder), *files, "--top", "4", "--json"]
    by_default, exactly = (
        parse_json_output(run_cli(*command)),
        parse_json_output(run_cli(*command, "--precision", "fp32")),
    )
    assert (by_default["precision"], exactly["precision"]) == (processor, "fp32")
    assert are_predictions_close(
        *(parse_predictions(document["predictions"]) for document in (by_default, exactly)), processor
    )
    words = ["predict", str(bundle_folder), *files[:2], "--out", str(tmp_path / "a.jsonl"), "--resume", "--json"]
    assert parse_json_output(run_cli(*words))["precision"] == processor
    assert run_cli(*words).returncode == 0
    monkeypatch.setenv("VITREOUS_CPU_ISA", "AVX512_CORE_BF16" if processor == "fp32" else "AVX2")
    again = run_cli(*words)
    assert again.returncode == 2 and "precision" in again.stderr


def test_embeddings_are_the_input_of_the_head(bundle, bundle_folder, tmp_path):
    files = write_images(tmp_path, 7)
    pixels = np.stack([bundle.preprocess.to_array(Image.open(file).convert("RGB")) for file in files])
    for precision, limit in ERROR_LIMITS.items():
        embeddings = load(bundle_folder, InferenceOptions(precision=precision)).embed(files)
        assert (
            embeddings.dtype == np.float32
            and relative_error(embeddings, compute_reference_outputs(bundle, pixels)[1]) < limit
        )
    embeddings = load(bundle_folder).embed(files)
    (tmp_path / "bad.png").write_bytes(b"junk")
    mixed = load(bundle_folder).embed([files[0], tmp_path / "bad.png", files[1]], bad_images="skip")
    assert np.array_equal(mixed[[0, 2]], embeddings[:2]) and np.isnan(mixed[1]).all()
    with pytest.raises(DataError, match=r"bad\.png"):
        load(bundle_folder).embed([tmp_path / "bad.png"])
    assert load(bundle_folder).embed([]).shape == (0, 0)


def test_a_model_without_a_head_embeds_and_does_not_predict(tmp_path):
    make_tiny_bundle(classes=()).save(tmp_path / "body")
    file = write_images(tmp_path, 1)
    with pytest.raises(UsageError, match="no head"):
        load(tmp_path / "body")
    body = load(tmp_path / "body", headless=True)
    assert body.embed(file).shape == (1, 24)
    with pytest.raises(UsageError, match="no head"):
        body.predict(file)


def test_predictions_are_in_order_across_chunks(bundle, bundle_folder, tmp_path, monkeypatch):
    files, predictor = write_images(tmp_path, 11), load(bundle_folder)
    predictions = predictor.predict(files, top=2)
    monkeypatch.setattr(pipeline, "PIPELINE_CHUNK", 2)
    progress = []
    assert predictor.predict(files, top=2, on_images=progress.append) == predictions
    assert progress == [2, 4, 6, 8, 10, 11] and [prediction.path for prediction in predictions] == files
    assert all(set(prediction.names) < set(CLASSES) for prediction in predictions)
    assert isinstance(predictor, Predictor) and predictor.bundle is not None


def test_pipeline_read_ahead_is_limited():
    read, num_results = [], 0

    def items():
        for index in range(1000):
            read.append(index)
            yield Item(str(index), b"")

    def decode(item: Item) -> np.ndarray | DataError:
        index = int(item.name)
        return DataError(f"no {index}") if index % 7 == 3 else np.full((1, 2, 2), index)

    for chunk in run_pipeline(items(), decode, lambda inputs: inputs.reshape(len(inputs), -1)[:, :1] * 2, 5):
        for item, result in chunk:
            assert item.name == str(num_results)
            assert result.message == f"no {num_results}" if num_results % 7 == 3 else result == 2 * num_results
            num_results += 1
        assert len(read) - num_results <= 4 * 5
    assert num_results == 1000


def test_pipeline_yields_all_results_before_a_failure():
    def items():
        yield from (Item(str(number), b"") for number in range(7))
        raise DataError("the archive ends here")

    def start():
        return run_pipeline(items(), lambda item: np.zeros((1, 2, 2)), lambda inputs: inputs, 3)

    num_threads, results = threading.active_count(), []
    with pytest.raises(DataError, match="ends here"):
        for chunk in start():
            results += chunk
    assert len(results) == 7
    stopped = start()
    next(stopped)
    stopped.close()
    assert threading.active_count() == num_threads


def test_chunks_of_large_images_are_smaller():
    assert choose_chunk_size(ImagePreprocess((224, 224))) == 64
    assert choose_chunk_size(ImagePreprocess((2048, 2048))) == 5
    assert choose_chunk_size(ImagePreprocess((20000, 20000))) == 1


@pytest.mark.parametrize("words", [["-"], ["@-"], ["--list", "-"]])
def test_int8_calibration_rejects_lists_from_stdin(bundle_folder, words):
    pytest.importorskip("openvino")
    result = run_cli("predict", str(bundle_folder), *words, "--engine", "openvino", "--precision", "int8")
    assert result.returncode == 2 and "stdin can be read only once" in result.stderr and "@list.txt" in result.stderr
