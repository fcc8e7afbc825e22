"""`sample`: grids, resumed folders, masks, interpolation between seeds, and errors."""

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
from vitreous.errors import UsageError, WeightsError
from vitreous.generation.process import Flow
from vitreous.inference.open_model import open_generator
from vitreous.inference.samples import (
    Generator,
    SampleOptions,
    build_file_stems,
    choose_grid_columns,
    slerp_noise,
    square_grid_columns,
)
from vitreous.models.config import DiTConfig
from vitreous.models.dit import DiT
from vitreous.tasks.generation import Generation
from vitreous.weights.bundle import Bundle, load_bundle

pytestmark = pytest.mark.drawn

CLASS_NAMES = ("cat", "a dog", "a/dog")


@pytest.fixture(scope="module")
def generator_folder(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("generator") / "model"
    model = randomise(DiT(DiTConfig(image=(8, 8), channels=3, classes=3, width=32, depth=1, heads=1, hidden=64)))
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    Bundle(model, Generation(CLASS_NAMES, Flow()), ImagePreprocess((8, 8))).save(folder)
    return folder


def test_bundle_stores_the_generation_task(generator_folder):
    assert load_bundle(generator_folder).task == Generation(CLASS_NAMES, Flow())
    assert load_bundle(generator_folder).task.classes == CLASS_NAMES and not load_bundle(generator_folder).classes


def test_grid_is_enlarged_with_class_captions(generator_folder, tmp_path):
    """Images of 8 x 8 pixels are enlarged to 128 x 128; names take 14 pixels, gaps between images 2."""
    document = vitreous.sample(generator_folder, tmp_path / "grid.png", progress=False, count=12, steps=2)
    grid = Image.open(tmp_path / "grid.png")
    assert grid.size == (4 * 130 - 2, 3 * 144 - 2) and document["count"] == 12
    assert document["classes"] == list(CLASS_NAMES) and document["sampler"] == ("heun", 2) and document["seeds"] == [0]
    image = np.asarray(grid.crop((0, 0, 128, 128)))
    assert np.array_equal(image, image[::16, ::16].repeat(16, 0).repeat(16, 1))
    captions = [np.asarray(grid.crop((0, row * 144 + 128, 128, row * 144 + 142))) for row in range(3)]
    assert all(caption.min() < 128 for caption in captions) and not np.array_equal(captions[0], captions[1])
    vitreous.sample(generator_folder, tmp_path / "one.png", progress=False, classes=("cat",), count=5, steps=2)
    assert Image.open(tmp_path / "one.png").size == (3 * 130 - 2, 2 * 144 - 2)


def test_count_is_the_total_number_of_images(generator_folder, tmp_path):
    """Classes alternate; a grid of unequal counts is about as wide as high."""
    document = vitreous.sample(generator_folder, tmp_path / "some", progress=False, count=4, steps=2)
    assert [f.rpartition("/")[2] for f in document["files"]] == [
        "cat-00000.png", "cat-00001.png", "a_dog-1-00000.png", "a_dog-2-00000.png"
    ]  # fmt: skip
    assert document["count"] == 4
    assert vitreous.sample(generator_folder, tmp_path / "each.png", progress=False, steps=2)["count"] == 3
    assert choose_grid_columns([(label, index) for label in range(10) for index in range(1 + (label < 6))]) == 4
    assert choose_grid_columns([(label, 0) for label in range(10)]) == 4
    assert choose_grid_columns([(label, index) for label in range(2) for index in range(64)]) == 12
    result = run_cli(
        "sample", str(generator_folder), "--count", "4", "--steps", "2", "--out", str(tmp_path / "all.png")
    )
    assert "all.png: 4 images at 8x8 pixels in" in result.stdout
    refused = run_cli(
        "sample", str(generator_folder), "--count", "4", "--to-seed", "2", "--out", str(tmp_path / "way.png")
    )
    assert refused.returncode == 2 and refused.stderr == (
        "error: --to-seed requires the same number of images, at least 2, for each of 3 classes, not 4 in total\n"
        "  use a multiple of 3 for --count, at least 6, or set --class\n"
    )


def test_grids_are_nearly_square():
    assert [square_grid_columns(n) for n in (1, 2, 4, 5, 9, 10)] == [1, 2, 2, 3, 3, 4]


def test_sample_folder_is_resumed(generator_folder, tmp_path):
    folder = tmp_path / "many"
    files = vitreous.sample(generator_folder, folder, progress=False, count=6, steps=2, precision="fp32")["files"]
    assert [f.rpartition("/")[2] for f in files[:3]] == ["cat-00000.png", "cat-00001.png", "a_dog-1-00000.png"]
    stamps = {name: (folder / name).stat().st_mtime_ns for name in ("cat-00000.png", "cat-00001.png")}
    (folder / "cat-00001.png").unlink()
    vitreous.sample(generator_folder, folder, progress=False, count=9, steps=2, precision="fp32")
    assert (folder / "cat-00000.png").stat().st_mtime_ns == stamps["cat-00000.png"]
    assert len([*folder.glob("*.png")]) == 9
    vitreous.sample(
        generator_folder, tmp_path / "again", progress=False, classes=("cat",), count=2, steps=2, precision="fp32"
    )
    resumed, uninterrupted = (
        np.asarray(Image.open(samples_folder / "cat-00001.png"), int) for samples_folder in (folder, tmp_path / "again")
    )
    assert np.abs(resumed - uninterrupted).max() <= 1
    with pytest.raises(UsageError, match="other settings"):
        vitreous.sample(generator_folder, folder, progress=False, steps=3)


def test_inpainting_keeps_pixels_outside_the_mask(generator_folder, tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    mask = np.zeros((8, 8), np.uint8)
    mask[2:6, 2:6] = 255
    Image.fromarray(image).save(tmp_path / "image.png")
    Image.fromarray(mask).save(tmp_path / "mask.png")
    options = {"inpaint": str(tmp_path / "image.png"), "mask": str(tmp_path / "mask.png"), "steps": 4}
    vitreous.sample(generator_folder, tmp_path / "out", progress=False, classes=("cat",), **options)
    out = np.asarray(Image.open(tmp_path / "out" / "cat-00000.png"))
    assert np.array_equal(out[mask == 0], image[mask == 0]) and not np.array_equal(out[mask > 0], image[mask > 0])
    Image.fromarray(mask[:4]).save(tmp_path / "mask.png")
    with pytest.raises(UsageError, match=r"8 x 8 pixels, but its mask 8 x 4"):
        vitreous.sample(generator_folder, tmp_path / "out2", progress=False, **options)


def test_seed_interpolation_starts_and_ends_at_the_seeds(generator_folder):
    generator = Generator(open_generator(generator_folder), "cpu", "fp32")
    steps = SampleOptions(seed=1, to_seed=2, count=5, steps=4)
    images = [sample.image for sample in generator.generate([(0, k) for k in range(5)], steps, lambda n: None)]
    ends = [next(generator.generate([(0, 0)], SampleOptions(seed=s, steps=4), lambda n: None)).image for s in (1, 2)]
    assert np.abs(images[0].astype(int) - ends[0]).max() <= 1 and np.abs(images[-1].astype(int) - ends[1]).max() <= 1
    noise = [torch.randn(1, 3, 16, 16) for _ in range(2)]
    middle = slerp_noise(*noise, torch.full((1, 1, 1, 1), 0.5))
    assert middle.std() == pytest.approx(1, abs=0.1)  # the mean of both noises would have 0.7


def test_file_names_are_derived_from_classes():
    assert build_file_stems(("a b", "a/b", "..", "ü")) == ["a_b-0", "a_b-1", "class", "ü"] and build_file_stems(()) == [
        "image"
    ]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--class", "dgo"], "no class dgo"),
        (["--count", "0"], "--count must be"),
        (["--steps", "0"], "--steps must be from 1 to"),
        (["--steps", "1001"], "--steps must be from 1 to"),
        (["--sampler", "ddim"], "--sampler ddim does not support models with a flow process"),
        (["--inpaint", "x.png"], "must be set together"),
        (["--to-seed", "3"], "--to-seed 3 needs at least 2 images"),
        (["--interval", "0.9", "0.1"], "--interval"),
        (["--guidance", "-2"], "--guidance"),
    ],
)
def test_invalid_sample_options_print_one_error(generator_folder, tmp_path, words, problem):
    done = run_cli("sample", str(generator_folder), "--out", str(tmp_path / "x.png"), *words)
    assert done.returncode == 2 and problem in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "x.png").exists()


def test_other_commands_reject_generative_models(generator_folder, tmp_path):
    image = tmp_path / "x.png"
    Image.new("RGB", (8, 8)).save(image)
    for words in (
        ["predict", generator_folder, image],
        ["embed", generator_folder, image, "--out", tmp_path / "v.npz"],
        ["export", generator_folder],
    ):
        done = run_cli(*map(str, words))
        assert done.returncode == 2 and "generates images" in done.stderr, done.stderr
    done = run_cli("evaluate", str(generator_folder), "--protocol", "knn")
    assert done.returncode == 2 and "--protocol knn" in done.stderr


def test_classifiers_cannot_generate_images(tmp_path):
    vitreous.save(vitreous.create("ViT-32x1/4", image_size=8, num_classes=2), tmp_path / "vit")
    with pytest.raises(UsageError, match="does not generate images"):
        vitreous.sample(tmp_path / "vit", tmp_path / "x.png", progress=False)


def test_generator_run_trains_samples_and_evaluates(tmp_path):
    """From the command line, with the built-in digits."""
    out = tmp_path / "run"
    done = run_cli("train", "digits", "--recipe", "sit", "--model", "DiT-32x1/2", "--steps", "6", "--out", str(out))
    assert done.returncode == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["val"]["denoising_error"] > 0 and "next       vitreous sample" in done.stdout
    assert Image.open(out / "samples.png").size == (8 * 130 - 2, 8 * 130 - 2)
    page = (out / "report.html").read_text("utf-8")
    assert (
        "Generated images" in page
        and "One class per row (0, 1, 2, 3, 5, 6, 7, 9), seed 0, guidance 1.5" in page
        and "Denoising error" in page
        and " on 179 validation images: " in page
        and "knn" not in page
    )
    done = run_cli("evaluate", str(out), "--samples", "40", "--steps", "3", "--json")
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout)["test"]
    assert metrics["frechet_distance"] > metrics["frechet_distance_of_train"] > 0 and metrics["features"] == "pixels"
    again = vitreous.evaluate(out, samples=40, steps=3)
    assert again["test"]["frechet_distance"] == pytest.approx(metrics["frechet_distance"], rel=1e-3)
    with pytest.raises(UsageError, match="protocol='knn'"):
        vitreous.evaluate(out, protocol="knn")
    assert metrics["classifier_accuracy"] is None and 0 <= metrics["near_duplicates"] <= 1
    assert (out / "evaluations.jsonl").is_file()


def test_latents_are_decoded_by_the_autoencoder(tmp_path):
    vae = save_autoencoder(tmp_path / "vae")
    model = randomise(DiT(DiTConfig(image=(8, 8), channels=4, classes=2, width=32, depth=1, heads=1, hidden=64)))
    Bundle(model, Generation(("a", "b")), ImagePreprocess((8, 8), 4, (0.5,) * 4, (0.5,) * 4)).save(tmp_path / "model")
    with pytest.raises(UsageError, match="latents of 4 channels"):
        vitreous.sample(tmp_path / "model", tmp_path / "x.png", progress=False)
    options = {"steps": 3, "precision": "fp32", "vae": str(tmp_path / "vae")}
    vitreous.sample(tmp_path / "model", tmp_path / "out", progress=False, classes=("b",), **options)
    generator = Generator(open_generator(tmp_path / "model"), "cpu", "fp32", str(tmp_path / "vae"))
    latents = []
    generator.sampler.decode = lambda images: latents.append(images) or generator.sampler.to_uint8_pixels(images)
    next(generator.generate([(1, 0)], SampleOptions(steps=3), lambda n: None))
    with torch.no_grad():
        expected = ((vae.decode(latents[0] / 0.5).sample + 1) * 127.5).round().clamp(0, 255)[0].movedim(0, -1)
    decoded = np.asarray(Image.open(tmp_path / "out" / "b-00000.png"), int)
    assert decoded.shape == (16, 16, 3) and np.abs(decoded - expected.numpy()).max() <= 1
    save_autoencoder(tmp_path / "three", latent_channels=3)
    for autoencoder, problem in (
        ("three", "three has 3 latent channels, but the model needs 4"),
        ("model", "not an autoencoder folder"),
    ):
        with pytest.raises((UsageError, WeightsError), match=problem):
            vitreous.sample(tmp_path / "model", tmp_path / "x.png", progress=False, vae=str(tmp_path / autoencoder))
