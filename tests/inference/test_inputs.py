"""Inputs that Python accepts in place of files, and options as plain keywords."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.inference.small_models import make_tiny_bundle, write_images
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import DataError, UsageError
from vitreous.inference.inputs import to_pixel_array
from vitreous.inference.predict import load
from vitreous.reports.inspect import inspect
from vitreous.tasks.classification import Prediction


@pytest.fixture(scope="module")
def bundle_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "bundle"
    make_tiny_bundle().save(folder)
    return folder


@pytest.fixture(scope="module")
def predictor(bundle_folder):
    return load(bundle_folder, device="cpu", precision="fp32")


@pytest.fixture
def image_file(tmp_path):
    return write_images(tmp_path, 1)[0]


def make_equivalent_inputs(image_file: str) -> dict[str, object]:
    """One image as every accepted type."""
    with Image.open(image_file) as image:
        pixels = np.asarray(image.convert("RGB"))
    floats = pixels.astype(np.float32) / 255
    return {
        "str": str(image_file),
        "Path": Path(image_file),
        "bytes": Path(image_file).read_bytes(),
        "bytearray": bytearray(Path(image_file).read_bytes()),
        "BytesIO": io.BytesIO(Path(image_file).read_bytes()),
        "open file": open(image_file, "rb"),
        "lazy PIL": Image.open(image_file),
        "PIL": Image.fromarray(pixels),
        "array": pixels,
        "floats": floats,
        "float64": floats.astype(np.float64),
        "tensor": torch.from_numpy(pixels.copy()).permute(2, 0, 1),
        "float tensor": torch.from_numpy(floats).permute(2, 0, 1).requires_grad_(True),
    }


def test_text_mode_files_are_rejected(predictor):
    with pytest.raises(UsageError, match='open it with mode "rb"'):
        predictor.predict(io.StringIO("text"))


def test_all_input_types_give_the_same_prediction(predictor, image_file):
    expected, features = predictor.predict(str(image_file)), predictor.embed(str(image_file))
    assert isinstance(expected, Prediction) and features.shape == (24,)
    inputs = make_equivalent_inputs(image_file)
    for name, image in inputs.items():
        prediction = predictor.predict(image)
        assert isinstance(prediction, Prediction), name
        assert (prediction.names, prediction.probabilities) == (expected.names, expected.probabilities), name
        assert np.array_equal(predictor.embed(image), features), name
    mixed = predictor.predict(list(inputs.values()), top=1)
    assert [prediction.names for prediction in mixed] == [expected.names[:1]] * len(inputs)
    assert [prediction.path for prediction in mixed][:3] == [str(image_file), str(image_file), "image 2"]
    assert predictor.predict(inputs["PIL"]).path == "image"
    assert predictor.embed(tuple(inputs.values())).shape == (len(inputs), 24)
    assert predictor.predict([]) == []
    assert isinstance(predictor.predict([image_file]), list) and len(predictor.predict(iter([image_file]))) == 1


def test_pil_images_are_rotated_and_composited_like_files(predictor):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 4), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(buffer := io.BytesIO(), "PNG", exif=exif)
    content = buffer.getvalue()
    assert predictor.predict(Image.open(io.BytesIO(content))).probabilities == predictor.predict(content).probabilities


def test_greyscale_arrays_are_accepted():
    plane = np.arange(12, dtype=np.uint8).reshape(3, 4)
    preprocess = ImagePreprocess((8, 8))
    for image in (plane, plane[..., None], torch.from_numpy(plane)[None]):
        assert np.array_equal(to_pixel_array(image, preprocess, "x"), plane)
    assert to_pixel_array(plane / 255.0, preprocess, "x").tolist() == plane.tolist()


@pytest.mark.parametrize(
    "image, message",
    [
        (np.zeros((3, 8, 9), np.uint8), r"image: an array of 3 x 8 x 9 is not \(H, W\) or \(H, W, C\)"),
        (torch.zeros(8, 9, 3), r"image: a tensor of 8 x 9 x 3 is not \(C, H, W\)"),
        (np.zeros((0, 4, 3)), "image: an array of 0 x 4 x 3"),
        (np.full((4, 4, 3), 200.0), "pixels from 200 to 200 are not in 0 to 1\n  use unnormalised floats"),
        (np.full((4, 4, 3), -0.5), "pixels from -0.5"),
        (np.full((4, 4, 3), np.nan), "pixels from nan"),
        (np.zeros((4, 4, 3), np.int64), "pixels of int64"),
        (b"junk", "image: not an image of a known format"),
    ],
)
def test_invalid_pixel_arrays_are_rejected(predictor, image, message):
    with pytest.raises(DataError, match=message):
        predictor.predict(image)
    predictions = predictor.predict([image, np.zeros((8, 8, 3), np.uint8)], bad_images="skip")
    assert predictions[0].error is not None and predictions[1].error is None


@pytest.mark.parametrize("image", [7, None, [7], [[b"x"]]])
def test_non_images_are_rejected_with_supported_types(predictor, image):
    with pytest.raises(UsageError, match=r"is not an image\n  give a path, bytes, an open binary file, a PIL image"):
        predictor.predict(image)


def test_batched_arrays_are_rejected_with_a_hint(predictor):
    batch = torch.zeros(2, 3, 16, 16)
    with pytest.raises(UsageError, match=r"2 x 3 x 16 x 16 is a batch.*\n  give list\(batch\)"):
        predictor.predict(batch)
    assert len(predictor.predict(list(batch))) == 2


def test_training_the_module_does_not_change_predictions(predictor, image_file):
    module, expected = predictor.model, predictor.predict(image_file)
    assert isinstance(module, torch.nn.Module) and predictor.model is module and not module.training
    assert all(p.requires_grad and p.dtype == torch.float32 for p in module.parameters())
    images = torch.stack([predictor.transform(Image.open(image_file)), predictor.transform(str(image_file))])
    assert images.dtype == torch.float32 and torch.equal(images[0], images[1])
    with torch.no_grad():
        best = module(images).softmax(1)[0].sort(descending=True)
    np.testing.assert_allclose(best.values[:3], expected.probabilities[:3], atol=1e-5)
    module(images).sum().backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    assert predictor.predict(image_file) == expected


def test_transform_can_be_pickled(predictor, image_file):
    again = pickle.loads(pickle.dumps(predictor.transform))
    assert torch.equal(again(Image.open(image_file)), predictor.transform(image_file))


def test_unknown_keywords_are_rejected_with_a_suggestion(bundle_folder):
    from vitreous.reports.evaluate import evaluate

    for call, wrong, nearest in (
        (lambda **words: load(bundle_folder, **words), "precison", "precision"),
        (lambda **words: load(bundle_folder, **words), "exakt", "exact"),
        (lambda **words: load(bundle_folder, **words), "source_sizes", "source_size"),
        (lambda **words: evaluate(bundle_folder, **words), "devise", "device"),
        (lambda **words: evaluate(bundle_folder, **words), "calibrated", "calibrate"),
        (lambda **words: evaluate(bundle_folder, protocol="knn", **words), "temprature", "temperature"),
        (lambda **words: inspect(bundle_folder, **words), "figure", "figures"),
    ):
        with pytest.raises(UsageError, match=f"has no option {wrong}\n  perhaps you meant {nearest}"):
            call(**{wrong: 1})


def test_inspect_accepts_one_image_and_keywords(bundle_folder, image_file, tmp_path):
    result = inspect(bundle_folder, image_file, tmp_path / "out", figures=["filters"], device="cpu", precision="fp32")
    assert [figure["name"] for figure in result["figures"]] == ["filters"] and result["images"] == [image_file]
    again = inspect(bundle_folder, [image_file], tmp_path / "again", figures="filters", device="cpu")
    assert len(again["figures"]) == 1


def test_load_keywords_set_device_and_precision(bundle_folder):
    assert load(bundle_folder, device="cpu", precision="fp32").engine.precision == "fp32"
    with pytest.raises(UsageError, match=r"load: precision cannot be .fp7."):
        load(bundle_folder, device="cpu", precision="fp7")
