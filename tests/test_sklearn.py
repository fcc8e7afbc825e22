"""Estimators: scikit-learn's checks, pipelines, grid searches, pickles, and all types of X."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import vitreous
from tests.conftest import make_folder
from vitreous.errors import DataError, UsageError
from vitreous.sklearn import MAX_ROW_TOKENS, VitreousClassifier, VitreousEmbedder, VitreousRegressor, as_token_rows
from vitreous.training.session import Session

QUICK_OPTIONS = {"device": "cpu", "precision": "fp32", "workers": 0, "log_every": 10**6}
SMALL_DECODER = {
    f"objective.decoder_{name}": [size] for name, size in (("width", "16"), ("depth", "1"), ("heads", "1"))
}
CLASSIFIER = VitreousClassifier(
    "ViT-16x1/1", epochs=12, batch_size=256, lr=0.03, random_state=0, train_options=QUICK_OPTIONS
)
REGRESSOR = VitreousRegressor(
    "ViT-16x1/1", epochs=30, batch_size=64, lr=0.03, random_state=0, train_options=QUICK_OPTIONS
)
EMBEDDER = VitreousEmbedder(
    model="ViT-16x1/1",
    epochs=2,
    batch_size=256,
    random_state=0,
    train_options=QUICK_OPTIONS | {"settings": SMALL_DECODER},
)


def test_feature_rows_become_tokens():
    assert as_token_rows(np.ones((3, 2))).shape == (3, 1, 4)
    long = as_token_rows(np.arange(260.0).reshape(2, 130))
    assert long.shape == (2, 1, 44, 3) and long.shape[2] <= MAX_ROW_TOKENS
    assert (
        np.array_equal(long.reshape(2, -1)[:, :130], np.arange(260.0).reshape(2, 130)) and not long[:, 0, -1, 1:].any()
    )


#: the scikit-learn checks that always run; the others, more fits of the same kind, are slow
FAST_CHECKS = frozenset(
    [
        "data_not_an_array",
        "dict_unchanged",
        "nan_inf",
        "pickle",
        "unfitted",
        "fit2d_1sample",
        "check_is_fitted",
        "subset_invariance",
        "n_features_in_after_fitting",
        "no_attributes_set_in_init",
        "requires_y_none",
        "transformer_general",
        "one_label",
    ]
)


def iterate_scikit_learn_checks():
    """Every check of every estimator."""
    for estimator, check in parametrize_with_checks([CLASSIFIER, REGRESSOR, EMBEDDER]).args[1]:
        name, estimator_class = getattr(check, "func", check).__name__, type(estimator).__name__
        marks = [] if name.endswith(tuple(FAST_CHECKS)) else [pytest.mark.slow]
        yield pytest.param(estimator, check, marks=marks, id=f"{estimator_class}-{name}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("estimator, check", list(iterate_scikit_learn_checks()))
def test_scikit_learn_checks(estimator, check):
    """No check is expected to fail."""
    check(estimator)


@pytest.fixture(scope="module")
def two_digits():
    """Two easily separable digits: (n, 64) floats from 0 to 16, and y as strings."""
    X, y = load_digits(return_X_y=True)
    few = y < 2
    return X[few][:120], np.array(["zero", "one"])[y[few][:120]]


@pytest.fixture(scope="module")
def fitted_classifier(two_digits):
    digits = VitreousClassifier(
        "ViT-16x1/4", image_shape=(8, 8), epochs=12, random_state=3, lr=0.01, train_options=QUICK_OPTIONS
    )
    return digits.fit(*two_digits)


def test_flat_rows_and_images_give_the_same_model(fitted_classifier, two_digits):
    X, y = two_digits
    assert fitted_classifier.score(X, y) > 0.9 and list(fitted_classifier.classes_) == ["one", "zero"]
    image_model = clone(fitted_classifier).set_params(image_shape=None).fit(X.reshape(-1, 8, 8), y)
    assert np.array_equal(image_model.predict_proba(X.reshape(-1, 8, 8)), fitted_classifier.predict_proba(X))
    assert (
        image_model.bundle_.model.config.image == (8, 8) and fitted_classifier.bundle_.preprocess.numbers == "float32"
    )
    assert (
        fitted_classifier.summary_["model"] == "ViT-16x1/4"
        and fitted_classifier.history_[-1]["train/loss"] == fitted_classifier.summary_["train"]["loss"]
    )


def test_random_state_makes_fits_reproducible(fitted_classifier, two_digits):
    X, y = two_digits
    state = torch.get_rng_state()
    again, other_seed = (
        clone(fitted_classifier).fit(X, y),
        clone(fitted_classifier).set_params(random_state=4).fit(X, y),
    )
    assert np.array_equal(again.predict_proba(X), fitted_classifier.predict_proba(X))
    assert not np.array_equal(other_seed.predict_proba(X), fitted_classifier.predict_proba(X))
    assert (torch.get_rng_state() == state).all()


def test_pickled_estimators_predict_the_same_in_a_new_process(fitted_classifier, two_digits, tmp_path):
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(fitted_classifier))
    np.save(tmp_path / "X.npy", two_digits[0])
    code = "import pickle, numpy as n, torch; torch.set_num_threads(1); e = pickle.load(open('model.pkl', 'rb'))"
    code += "; n.save('answer.npy', e.predict_proba(n.load('X.npy')))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=120)
    assert np.array_equal(np.load(tmp_path / "answer.npy"), fitted_classifier.predict_proba(two_digits[0]))


def test_saved_estimators_are_bundles(fitted_classifier, two_digits, tmp_path):
    folder = fitted_classifier.save(tmp_path / "model")
    image = two_digits[0][0].reshape(8, 8).astype(np.float32)
    prediction = vitreous.load(folder, device="cpu", precision="fp32").predict(image)
    assert prediction.names[0] == fitted_classifier.predict(two_digits[0][:1])[0]
    with pytest.raises(UsageError, match="already exists and is not overwritten"):
        fitted_classifier.save(folder)
    with pytest.raises(NotFittedError):
        clone(fitted_classifier).save(tmp_path / "other")
    features = VitreousEmbedder(folder, image_shape=(8, 8)).fit_transform(two_digits[0])
    assert features.shape == (120, 16) and features.dtype == np.float32


def test_grid_search_over_a_pipeline():
    X, y = load_iris(return_X_y=True)
    pipe = make_pipeline(StandardScaler(), clone(CLASSIFIER))
    grid = GridSearchCV(pipe, {"vitreousclassifier__epochs": [1, 15]}, cv=2, error_score="raise").fit(X, y)
    assert grid.best_params_ == {"vitreousclassifier__epochs": 15} and grid.best_score_ > 0.8


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Paths of 24 images of three classes, and their classes."""
    root = make_folder(tmp_path_factory.mktemp("photos"), {"": 8}, size=(20, 16))
    paths = sorted(root.glob("*/*.png"))
    return paths, [path.parent.name for path in paths]


def test_paths_images_and_arrays_give_the_same_predictions(photos):
    paths, y = photos
    tiny = VitreousClassifier("ViT-16x1/8", epochs=2, random_state=0, train_options=QUICK_OPTIONS | {"image_size": 16})
    images = [Image.open(path) for path in paths]
    input_types = [
        paths,
        np.array([str(path) for path in paths]),
        pd.DataFrame({"path": [str(path) for path in paths]}),
        images,
        np.stack([np.asarray(image) for image in images]),
    ]
    probabilities = [clone(tiny).fit(X, y).predict_proba(X) for X in input_types]
    assert all(np.allclose(values, probabilities[0], atol=1e-6) for values in probabilities)
    mixed = [np.asarray(image.resize((16 + n % 3, 16))) for n, image in enumerate(images)]
    assert clone(tiny).fit(mixed, y).predict(mixed).shape == (24,)


def test_embedders_work_in_a_pipeline(photos, tmp_path):
    paths, y = photos
    vitreous.save(vitreous.create("ViT-16x1/8", image_size=16, num_classes=2), tmp_path / "weights")
    pipe = make_pipeline(VitreousEmbedder(tmp_path / "weights"), KNeighborsClassifier(1)).fit(paths, y)
    assert pipe.score(paths, y) == 1.0
    embed = VitreousEmbedder(tmp_path / "weights").fit(paths)
    assert list(embed.get_feature_names_out()[:2]) == ["vitreousembedder0", "vitreousembedder1"]
    expected = vitreous.load(tmp_path / "weights").embed([str(path) for path in paths])
    assert np.array_equal(embed.transform(paths), expected)
    linear = make_pipeline(clone(EMBEDDER), StandardScaler(), LogisticRegression())
    X, labels = load_iris(return_X_y=True)
    assert linear.fit(StandardScaler().fit_transform(X), labels).score(StandardScaler().fit_transform(X), labels) > 0.6


def test_invalid_parameters_are_rejected(fitted_classifier, two_digits, photos, tmp_path):
    X, y = two_digits
    with pytest.raises(UsageError, match=r"\(7, 8\) does not have 64 values"):
        clone(fitted_classifier).set_params(image_shape=(7, 8)).fit(X, y)
    with pytest.raises(UsageError, match="cannot have out, seed"):
        clone(fitted_classifier).set_params(train_options={"out": "runs/a", "seed": 1}).fit(X, y)
    with pytest.raises(UsageError, match="perhaps you meant epochs"):
        clone(fitted_classifier).set_params(train_options={"epoch": 1}).fit(X, y)
    with pytest.raises(ValueError, match="one class"):
        clone(fitted_classifier).fit(X, ["same"] * len(X))
    with pytest.raises(ValueError, match="inconsistent"):
        clone(fitted_classifier).fit(X, y[:-1])
    with pytest.raises(ValueError, match="X has 10 features, but"):
        fitted_classifier.predict(X[:, :10])
    for single_image in (photos[0][0], str(photos[0][0]), Image.open(photos[0][0])):
        with pytest.raises(ValueError, match="X is a single image"):
            fitted_classifier.predict(single_image)
    with pytest.raises(ValueError, match=r"pass X\[None\]"):
        fitted_classifier.predict(np.asarray(Image.open(photos[0][0])))
    with pytest.raises(ValueError, match="X mixes PngImageFile and str"):
        clone(fitted_classifier).fit([str(photos[0][0]), Image.open(photos[0][1])], ["a", "b"])
    with pytest.raises(ValueError, match="64 features, but the model needs images: set image_shape"):
        clone(fitted_classifier).set_params(image_shape=None).fit(X.reshape(-1, 8, 8), y).predict(X)
    (tmp_path / "torn.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match="1 of 25 images cannot be read"):
        VitreousClassifier(epochs=1, train_options=QUICK_OPTIONS).fit(
            [*photos[0], tmp_path / "torn.png"], [*photos[1], "ant"]
        )


@pytest.mark.parametrize("number, error", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_stops_a_grid_search(number, error, monkeypatch):
    """Grid searches continue after errors, so a signal must not be raised as one."""
    monkeypatch.setattr(Session, "log", lambda session, state: os.kill(os.getpid(), number))
    X, y = load_iris(return_X_y=True)
    estimator = clone(CLASSIFIER).set_params(train_options=QUICK_OPTIONS | {"log_every": 1})
    with warnings.catch_warnings(), pytest.raises(error):
        warnings.simplefilter("ignore")
        GridSearchCV(estimator, {"epochs": [1, 2]}, cv=2).fit(X, y)


def test_channels_first_images_are_accepted():
    images = np.random.default_rng(0).integers(0, 256, (5, 16, 24, 3), dtype=np.uint8)
    estimator = VitreousClassifier()
    for expected in (images, images.astype(np.float32), images[..., :1]):
        read = estimator.read_images(np.moveaxis(expected, -1, 1), reset=True)
        assert np.array_equal(read, estimator.read_images(expected, reset=True))
    pair = [images[0], images[1][:8]]
    read = estimator.read_images([np.moveaxis(image, -1, 0) for image in pair], reset=True)
    assert all(np.array_equal(image, expected) for image, expected in zip(read, pair, strict=True))
    # ambiguous shapes are read as given
    assert np.array_equal(estimator.read_images(images[:, :, :3, :3], reset=True), images[:, :, :3, :3])


def test_multi_target_regression_with_missing_values():
    """For a data frame, whose columns name the targets: predictions in their units, a score, and pickling."""
    X, _ = load_digits(return_X_y=True)
    X = X[:120]
    y = pd.DataFrame({"ink": X.sum(1) * 10, "top": X[:, :32].sum(1) - X[:, 32:].sum(1)})
    y.iloc[::4, 1] = np.nan
    model = VitreousRegressor(
        "ViT-16x1/4", image_shape=(8, 8), epochs=60, lr=0.01, random_state=3, augment=False, train_options=QUICK_OPTIONS
    )
    model.fit(X, y)
    values = model.predict(X)
    assert model.targets_ == ["ink", "top"] and values.shape == (120, 2) and values.dtype == np.float64
    assert np.corrcoef(values[:, 0], y["ink"])[0, 1] > 0.9 and model.bundle_.task.targets == ("ink", "top")
    assert np.array_equal(pickle.loads(pickle.dumps(model)).predict(X), values)
    single_target = clone(model).fit(X, y["ink"])
    assert (
        single_target.predict(X).shape == (120,)
        and single_target.targets_ == ["ink"]
        and single_target.score(X, y["ink"]) > 0.8
    )
    assert clone(model).set_params(epochs=1).fit(X, y[["ink"]].to_numpy()).predict(X).shape == (120, 1)
    with pytest.raises(ValueError, match="NaN"):
        model.fit(X, y["top"])
    with pytest.raises(DataError, match="the same value of target"):
        model.fit(X, np.ones(120))
