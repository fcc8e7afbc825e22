"""Evaluation of generators: on latents, in Inception's feature space, and against reference files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

import vitreous
from tests.conftest import run_cli
from tests.contracts import randomise
from tests.inference.generators import save_autoencoder
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.sources import open_data
from vitreous.errors import UsageError, WeightsError
from vitreous.evaluation.frechet import compute_moments, frechet_distance
from vitreous.evaluation.inception import inception_score
from vitreous.generation.process import Flow
from vitreous.models.config import DiTConfig
from vitreous.models.dit import DiT
from vitreous.reports.generated import GenerationOptions, RealImages, compute_generator_metrics
from vitreous.reports.spaces import InceptionSpace, is_inception_file
from vitreous.tasks.generation import Generation
from vitreous.training.folder import RunFolder
from vitreous.weights.autoencoder import Autoencoder
from vitreous.weights.bundle import Bundle, load_bundle


def run_vitreous(*arguments):
    return run_cli(*map(str, arguments))


@pytest.fixture(scope="module")
def latent_data(tmp_path_factory):
    """Return photos of two classes, an autoencoder (4 channels, stride 2), and latents of both classes."""
    latent_data = tmp_path_factory.mktemp("latents")
    save_autoencoder(latent_data / "vae", shift_factor=0.25)
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 6), ("test", 12)):
        for name in ("cat", "dog"):
            folder = latent_data / "photos" / split / name
            folder.mkdir(parents=True)
            for number in range(count // 2):
                pixels = rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    arguments = [
        "--latents",
        latent_data / "vae",
        "--short-side",
        "16",
        "--mirror",
        "--workers",
        "0",
        "--shard-size",
        "1K",
    ]
    result = run_vitreous("data", "pack", latent_data / "photos", "--out", latent_data / "packed", *arguments)
    assert result.returncode == 0 and "--recipe dit" in result.stdout, result.stderr
    return latent_data


@pytest.fixture(scope="module")
def generator_run(latent_data):
    options = {
        "recipe": "sit",
        "model": "DiT-32x1/2",
        "steps": 3,
        "batch_size": 4,
        "device": "cpu",
        "precision": "fp32",
    }
    vitreous.train(latent_data / "packed", out=latent_data / "run", progress=False, **options)
    return latent_data / "run"


def test_latents_are_posterior_samples_of_each_image_and_its_mirror(latent_data):
    data, autoencoder = open_data(latent_data / "packed"), Autoencoder(latent_data / "vae")
    train, fit = data.split("train"), ImagePreprocess((16, 16))
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 24, "val": 6, "test": 12}
    assert data.latents == autoencoder.latents and (data.latents.scale, data.latents.shift, data.latents.stride) == (
        0.5,
        0.25,
        2,
    )
    source = open_data(latent_data / "photos").split("train")
    for sample in (0, 11):
        source_image = fit.fit_image(fit.decode(source.raw(sample)))
        for latent_index, image in (
            (sample, source_image),
            (sample + 12, source_image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
        ):
            pixels = torch.from_numpy(np.array(image)).movedim(-1, 0)[None] / 127.5 - 1
            with torch.no_grad():
                posterior = autoencoder.vae.encode(pixels).latent_dist
            got = train.raw(latent_index)
            assert got.shape == (8, 8, 4) and got.dtype == np.float32
            draws = (torch.from_numpy(got).movedim(-1, 0) - posterior.mean[0]) / posterior.std[0]
            assert draws.abs().max() < 5 and 0.8 < draws.std() < 1.2
            assert train.labels[latent_index] == source.labels[sample]
    assert not np.array_equal(train.raw(0), train.raw(12))
    document = json.loads((latent_data / "packed" / "pack.json").read_text())
    assert document["form"] == "latents" and len(document["splits"]["train"]["shards"]) > 1
    redrawn = data.with_holdout(0.25, 0)
    drawn_samples = {sample.tobytes() for sample in map(redrawn.split("val").raw, range(len(redrawn.split("val"))))}
    rows = {train.raw(i).tobytes(): i for i in range(24)}
    row_indices = {rows[key] for key in drawn_samples}
    assert row_indices and {(row + 12) % 24 for row in row_indices} == row_indices  # no flipped image is missing


def test_packing_latents_resumes_and_checks_options(latent_data, tmp_path):
    arguments = [
        "--latents",
        latent_data / "vae",
        "--short-side",
        "16",
        "--mirror",
        "--workers",
        "0",
        "--shard-size",
        "1K",
    ]
    assert (
        run_vitreous("data", "pack", latent_data / "photos", "--out", latent_data / "packed", *arguments).returncode
        == 0
    )
    rejected = run_vitreous(
        "data", "pack", latent_data / "photos", "--out", latent_data / "packed", *arguments[:4], *arguments[5:]
    )
    assert rejected.returncode == 2 and "another mirror" in rejected.stderr
    for arguments, problem in (
        (["--mirror"], "latents and --mirror need an autoencoder"),
        (["--latents", latent_data / "vae", "--short-side", "15"], "is not a multiple of the autoencoder's 2"),
        (["--latents", latent_data / "photos"], "not an autoencoder folder"),
    ):
        result = run_vitreous("data", "pack", latent_data / "photos", "--out", tmp_path / "x", *arguments)
        assert result.returncode in (2, 3, 4) and problem in result.stderr and "Traceback" not in result.stderr


def test_a_latent_run_stores_the_scale_and_the_autoencoder(latent_data, generator_run):
    config, bundle = RunFolder(generator_run).run(), load_bundle(generator_run / "model")
    assert config.preprocess.mean == (0.25,) * 4 and config.preprocess.std == (2.0,) * 4 and config.views.flip == 0
    assert bundle.task.autoencoder == str(latent_data / "vae") and (generator_run / "samples.png").is_file()
    vitreous.sample(generator_run, latent_data / "made", progress=False, classes=("cat",), steps=2, precision="fp32")
    assert Image.open(latent_data / "made" / "cat-00000.png").size == (16, 16)
    (latent_data / "vae").rename(latent_data / "moved")
    for arguments, problem in (([], "is no longer at"), (["--vae", latent_data / "moved"], "")):
        result = run_vitreous(
            "sample", generator_run, "--class", "cat", "--steps", "1", "--out", latent_data / "x.png", *arguments
        )
        assert problem in result.stderr and bool(result.returncode) == bool(problem)
    (latent_data / "moved").rename(latent_data / "vae")


def test_latent_generators_are_evaluated_on_latents_and_on_images(latent_data, generator_run):
    arguments = ["--samples", "12", "--steps", "2", "--precision", "fp32", "--json"]
    documents = [
        json.loads(run_vitreous("evaluate", generator_run, *data, *arguments).stdout)
        for data in ([], [latent_data / "photos"])
    ]
    assert [document["test"]["features"] for document in documents] == ["latents", "pixels"]
    assert [document["test"]["dimensions"] for document in documents] == [8 * 8 * 4, 16 * 16 * 3]
    assert all(document["test"][f"frechet_distance{name}"] > 0 for document in documents for name in ("", "_of_train"))
    result = run_vitreous("evaluate", generator_run, "--features", generator_run)
    assert result.returncode == 2 and "--features needs images" in result.stderr


@pytest.fixture(scope="module")
def inception_weights(tmp_path_factory):
    """Return a random file in torch-fidelity's format."""
    fidelity = pytest.importorskip("torch_fidelity", reason="a test dependency")
    from torch_fidelity import feature_extractor_inceptionv3 as theirs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs, "load_state_dict_from_url", lambda *arguments, **options: {})
        patch.setattr(torch.nn.Module, "load_state_dict", lambda self, state: None)
        torch.manual_seed(0)
        network = fidelity.FeatureExtractorInceptionV3("x", ["2048"])
    path = tmp_path_factory.mktemp("inception") / "inception.pth"
    torch.save(network.state_dict(), path)
    return path


def test_inception_metrics_match_fid_and_adm(inception_weights, tmp_path):
    from torch_fidelity.metric_isc import isc_features_to_metric

    model = randomise(DiT(DiTConfig(image=(8, 8), channels=3, classes=0, width=32, depth=1, heads=1, hidden=64)))
    Bundle(model, Generation((), Flow()), ImagePreprocess((8, 8))).save(tmp_path / "model")
    real = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 3), dtype=np.uint8)
    network = InceptionSpace(str(inception_weights), "cpu")
    features = network.features(real)
    assert [features[name].shape for name in ("features", "spatial", "logits")] == [(8, 2048), (8, 2023), (8, 1008)]
    np.savez(tmp_path / "real.npz", arr_0=real)
    arguments = ["--features", inception_weights, "--samples", "6", "--steps", "2", "--precision", "fp32", "--json"]
    document = json.loads(
        run_vitreous("evaluate", tmp_path / "model", "--reference", tmp_path / "real.npz", *arguments).stdout
    )
    reference = document["reference"]
    assert (reference["images"], reference["samples"], reference["features"]) == (8, 6, "inception")
    vitreous.sample(tmp_path / "model", tmp_path / "made", progress=False, count=6, steps=2, precision="fp32")
    generated = np.stack([np.asarray(Image.open(path)) for path in sorted((tmp_path / "made").glob("*.png"))])
    ours = network.features(generated)
    assert (
        reference["fid"]
        == reference["frechet_distance"]
        == pytest.approx(frechet_distance(features["features"], ours["features"]), rel=1e-2)
    )
    assert reference["sfid"] == pytest.approx(frechet_distance(features["spatial"], ours["spatial"]), rel=1e-2)
    theirs = isc_features_to_metric(torch.from_numpy(ours["logits"]), splits=1, shuffle=False, rng_seed=0)
    assert reference["inception_score"] == pytest.approx(theirs["inception_score_mean"], rel=1e-5)


def test_reference_moments_replace_reference_images():
    rng = np.random.default_rng(0)
    rows, ours = rng.normal(size=(40, 3)), {"features": rng.normal(1, 1, (30, 3)).astype(np.float32)}
    metrics = compute_generator_metrics(RealImages("x", "test", 40, {"features": rows}, train=rows[:20]), ours)
    from_moments = compute_generator_metrics(
        RealImages("x.npz", "reference", 0, {}, train=None, moments={"features": compute_moments(rows)}), ours
    )
    assert from_moments["frechet_distance"] == metrics["frechet_distance"] == frechet_distance(rows, ours["features"])
    assert (
        from_moments["precision"] is from_moments["near_duplicates"] is None
        and metrics["precision"] > 0
        and metrics["near_duplicates"] is not None
    )


def test_the_inception_score_is_the_divergence_from_the_mean():
    certain = np.log(np.eye(4) * (1 - 4e-9) + 1e-9)
    assert inception_score(certain) == pytest.approx(4, rel=1e-5) and inception_score(
        np.zeros((6, 4))
    ) == pytest.approx(1)


def test_invalid_references_are_rejected(inception_weights, tmp_path, latent_data, generator_run):
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    np.savez(tmp_path / "odd.npz", mu=np.zeros(3), sigma=np.zeros((2, 2)))
    np.savez(tmp_path / "whole.npz", mu=np.zeros(2048), sigma=np.zeros((2048, 2048), np.float16))
    (tmp_path / "torn.npz").write_bytes((tmp_path / "odd.npz").read_bytes()[:100])
    sample_options = ["--samples", "4", "--steps", "1"]
    for arguments, problem in (
        (["--reference", tmp_path / "none.npz"], "no reference file at"),
        (["--reference", tmp_path / "other.npz"], "contains none of the arrays of a reference file"),
        (["--reference", tmp_path / "odd.npz"], "not a mean and covariance"),
        (["--reference", tmp_path / "torn.npz"], "is not a reference file"),
        (["--reference", tmp_path / "whole.npz"], "contains moments of Inception features"),
        (["--reference", tmp_path / "odd.npz", "--split", "test"], "instead of the dataset"),
    ):
        result = run_vitreous("evaluate", generator_run, *arguments, *sample_options)
        assert result.returncode in (2, 3, 4) and problem in result.stderr and "Traceback" not in result.stderr, (
            result.stderr
        )
    assert (
        is_inception_file(inception_weights)
        and not is_inception_file(tmp_path / "other.npz")
        and not is_inception_file(latent_data)
    )
    torch.save({"Conv2d_1a_3x3.conv.weight": torch.zeros(2, 2)}, tmp_path / "half.pth")
    with pytest.raises(WeightsError, match="does not contain the Inception network"):
        InceptionSpace(str(tmp_path / "half.pth"), "cpu")
    with pytest.raises(UsageError, match="instead of the dataset"):
        vitreous.evaluate(generator_run, latent_data / "photos", settings=GenerationOptions(reference="x.npz"))
