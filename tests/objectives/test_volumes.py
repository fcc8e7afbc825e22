"""Voxel segmentation: training, resumption, evaluation, prediction and export."""

import json

import nibabel
import numpy as np
import pytest
import torch

import vitreous
from tests.data.annotations.scenery import write_maps
from tests.data.annotations.solids import AFFINE, make_solid, write_solids, write_volume
from vitreous.apps.curation.dedup import find_copies
from vitreous.apps.curation.pack import pack_dataset
from vitreous.apps.server.model import warm_up_predictor
from vitreous.apps.server.settings import ServerLimits
from vitreous.data.annotations.drawing import tile_middle_planes
from vitreous.data.augmentation.scenes import SceneViews
from vitreous.data.decoding.volumes import read_volume
from vitreous.data.sources import open_data
from vitreous.errors import DataError, UsageError
from vitreous.models.names import config_from_name
from vitreous.objectives.segmentation import SegmentationConfig
from vitreous.tasks.tiles import predict_class_map, segment_by_tiles
from vitreous.weights.bundle import load_bundle

TRAIN_OPTIONS = {
    "recipe": "segment", "model": "ViT-32x2/4x4x4", "workers": 0, "device": "cpu", "precision": "fp32",
}  # fmt: skip


def test_model_names_have_a_patch_size_per_axis():
    assert (
        config_from_name("ViT-32x2/4x4x4").patch == (4, 4, 4)
        and config_from_name("vit-32x2/4X4x4").name() == "ViT-32x2/4x4x4"
    )
    assert config_from_name("ViT-S/8x16x16", (16, 32, 32)).name() == "ViT-S/8x16x16"
    assert config_from_name("ViT-S/8x16").patch == (8, 16) and config_from_name("ViT-S/8").patch == (8, 8)
    with pytest.raises(UsageError, match="unknown model"):
        config_from_name("ViT-S/8x8x8x8")
    with pytest.raises(UsageError, match="patch is below 1 pixel"):
        config_from_name("ViT-S/8x0x8")


@pytest.mark.parametrize("size", [(6, 8, 4), (7, 9, 13), (3, 20, 4), (14, 8, 1)])
def test_tiled_segmentation_matches_the_whole_volume(size):
    def compute_logits(tiles):  # logit k of value v is -(v - k)^2
        assert tiles.shape[1:] == (1, 6, 8, 4) and len(tiles) <= 8
        return -((tiles.astype(np.float32) - np.arange(3).reshape(3, 1, 1, 1)) ** 2)

    voxels = np.random.default_rng(1).integers(0, 3, (1, *size)).astype(np.float32)
    assert np.allclose(segment_by_tiles(compute_logits, voxels, (6, 8, 4)), compute_whole_volume(voxels), atol=1e-5)
    assert np.array_equal(predict_class_map(compute_logits, voxels, (6, 8, 4)), voxels[0])
    with pytest.raises(ValueError, match="must have the same number of spatial axes"):
        predict_class_map(compute_logits, voxels, (6, 8))


def compute_whole_volume(voxels):
    """Return the logits of the whole volume at once."""
    return -((voxels - np.arange(3).reshape(3, 1, 1, 1)) ** 2)


@pytest.fixture(scope="module")
def volume_data(tmp_path_factory):
    """Return volumes of two sizes in three splits."""
    volume_data = tmp_path_factory.mktemp("solids")
    for split, count in (("train", 8), ("val", 2), ("test", 3)):
        write_solids(volume_data / split, count, names="")
    voxels, classes = make_solid(20, (17, 9, 15))
    write_volume(volume_data / "test" / "images" / "odd.nii.gz", voxels)
    write_volume(volume_data / "test" / "masks" / "odd.nii.gz", classes)
    (volume_data / "classes.txt").write_text("background\nbox\nball\n")
    return volume_data


@pytest.fixture(scope="module")
def volume_run(volume_data, tmp_path_factory):
    """Return a run trained on the volumes."""
    out = tmp_path_factory.mktemp("runs") / "run"
    view_settings = {"views.scale": ["0.9", "1.1"], "views.rotate": ["0"]}
    vitreous.train(
        str(volume_data), out=str(out), steps=40, lr=1e-2, batch_size=4, settings=view_settings, **TRAIN_OPTIONS
    )
    return out


def test_volume_segmentation_run_learns_and_writes_a_report(volume_data, volume_run):
    summary = json.loads((volume_run / "summary.json").read_text())
    assert summary["test"]["images"] == 4 and summary["test"]["dice"] > 0.8, summary["test"]
    bundle = load_bundle(volume_run / "model")
    assert bundle.preprocess.name == "volumes" and bundle.preprocess.image == bundle.model.config.image == (12, 16, 16)
    assert bundle.preprocess.mean == (0.0,) and bundle.preprocess.std == (1.0,)
    default_evaluation = vitreous.evaluate(str(volume_run), device="cpu")  # default precision
    assert default_evaluation["test"]["dice"] == pytest.approx(summary["test"]["dice"], abs=1e-6)
    document = vitreous.evaluate(str(volume_run), device="cpu", precision="fp32")
    page = (volume_run / "report.html").read_text()
    assert page.count("data:image/") >= 12 and "Dice per image" in page
    split, predictor, dice_scores = (
        open_data(volume_data).split("test"),
        vitreous.load(volume_run, precision="fp32"),
        [],
    )
    for sample in range(len(split)):
        predicted = predictor.segment(split.raw(sample)).classes == 1
        truth = split.target(sample).class_map() == 1
        dice_scores.append(2 * (predicted & truth).sum() / (predicted.sum() + truth.sum()))
    assert document["per_class"][1]["image_dice"] == pytest.approx(np.mean(dice_scores), abs=1e-6)


def test_middle_planes_are_tiled_side_by_side():
    volume = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    planes = tile_middle_planes(volume, -1)
    assert planes.shape == (2, 4, 5 + 5 + 4)
    assert np.array_equal(planes[:, :, :5], volume[:, 1]) and np.array_equal(planes[:, :3, 5:10], volume[:, :, 2])
    assert np.array_equal(planes[:, :3, 10:], volume[..., 2]) and (planes[:, 3, 5:] == -1).all()


def run_predict(*arguments):
    """Return the exit code of `vitreous predict`."""
    from vitreous.cli.main import main

    with pytest.raises(SystemExit) as stop:
        main(["predict", *map(str, arguments), "--json"])
    return stop.value.code


def test_nifti_class_maps_keep_the_image_affine(volume_data, volume_run, tmp_path, capsys):
    images = volume_data / "test" / "images"
    assert (
        run_predict(
            volume_run, images, "--out", tmp_path / "out", "--overlay", tmp_path / "over", "--precision", "fp32"
        )
        == 0
    )
    names = sorted(path.name for path in images.iterdir())
    assert sorted(path.name for path in (tmp_path / "out").glob("*.nii.gz")) == names
    assert sorted(path.name for path in (tmp_path / "over").iterdir()) == [f"{name}.png" for name in names]
    predictor = vitreous.load(volume_run, precision="fp32")
    for name in names:
        written = nibabel.load(tmp_path / "out" / name)  # type: ignore[attr-defined]
        assert np.allclose(written.affine, AFFINE) and written.get_data_dtype() == np.uint8
        assert np.array_equal(np.asarray(written.dataobj), predictor.segment(images / name).classes)
    reloaded = vitreous.train(
        str(link_predictions_as_dataset(tmp_path, images)), out=str(tmp_path / "again"), steps=1, **TRAIN_OPTIONS
    )
    assert reloaded["steps"] == 1  # the written class maps are valid masks
    assert (
        run_predict(
            volume_run,
            images,
            "--out",
            tmp_path / "out",
            "--overlay",
            tmp_path / "over",
            "--precision",
            "fp32",
            "--resume",
        )
        == 0
    )
    capsys.readouterr()


def link_predictions_as_dataset(path, images):
    """Create a dataset of images and their predicted class maps."""
    (path / "data").mkdir()
    (path / "data" / "images").symlink_to(images)
    (path / "data" / "masks").symlink_to(path / "out")
    return path / "data"


def test_class_maps_of_other_formats_are_written_as_arrays(volume_run, tmp_path, capsys):
    voxels, _ = make_solid(3)
    path = write_volume(tmp_path / "a.npy", voxels)
    assert run_predict(volume_run, path, "--out", tmp_path / "out") == 0
    capsys.readouterr()
    predictor = vitreous.load(volume_run)
    assert np.array_equal(np.load(tmp_path / "out" / "a.npy"), predictor.segment(voxels).classes)
    segmentations = predictor.segment([voxels, torch.from_numpy(voxels)[None], path], keep_images=True)
    assert all(np.array_equal(segmentation.classes, segmentations[0].classes) for segmentation in segmentations)
    assert segmentations[0].draw_overlay().size == (14 + 14 + 17, 17)  # three planes next to each other
    assert predictor.embed(voxels).shape == (32,)
    with pytest.raises(UsageError, match="batch"):
        predictor.segment(voxels[None, None])
    with pytest.raises(DataError, match="12 x 17 is not"):
        predictor.segment(voxels[:, :, 0])
    (tmp_path / "b.nii.gz").write_bytes(b"\x1f\x8b nothing")
    assert run_predict(volume_run, tmp_path / "b.nii.gz", "--out", tmp_path / "bad") == 3
    assert "b.nii.gz: cannot be read as a volume" in capsys.readouterr().err


def test_onnx_export_matches_the_run(volume_data, volume_run, tmp_path):
    images = [str(path) for split in ("train", "test") for path in sorted((volume_data / split / "images").iterdir())]
    document = vitreous.export(volume_run, "onnx", tmp_path / "model.onnx", images)
    assert document["exports"][0]["top1_agreement"] > 0.999
    voxels = volume_data / "test" / "images" / "odd.nii.gz"
    run_predictor, onnx_predictor = (
        vitreous.load(model_path, precision="fp32") for model_path in (volume_run, tmp_path / "model.onnx")
    )
    assert np.mean(run_predictor.segment(voxels).classes == onnx_predictor.segment(voxels).classes) > 0.999


def test_resumed_volume_segmentation_run_is_bit_identical(volume_data, tmp_path):
    options = {**TRAIN_OPTIONS, "steps": 6, "batch_size": 2, "save_every": 2}
    vitreous.train(str(volume_data), out=str(tmp_path / "whole"), **options)

    class StopRun(Exception):
        pass

    class StoppingListener(vitreous.progress.NullListener):
        def progress(self, verb, done, total, text):
            if done >= 6:
                raise StopRun

    with pytest.raises(StopRun):
        vitreous.train(
            str(volume_data), out=str(tmp_path / "stopped"), listener=StoppingListener(), **options, log_every=1
        )
    vitreous.train(str(volume_data), out=str(tmp_path / "stopped"), resume=True)
    first, second = (load_bundle(tmp_path / name / "model").model.state_dict() for name in ("whole", "stopped"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_volume_runs_start_from_volume_weights_only(volume_data, volume_run, tmp_path):
    options = {name: value for name, value in TRAIN_OPTIONS.items() if name != "model"}
    assert (
        vitreous.train(str(volume_data), out=str(tmp_path / "more"), init=str(volume_run), steps=1, **options)["steps"]
        == 1
    )
    vitreous.save(vitreous.create("ViT-32x2/8", 32, 2), tmp_path / "flat")
    with pytest.raises(UsageError, match="are for images, but the data are volumes"):
        vitreous.train(str(volume_data), out=str(tmp_path / "no"), init=str(tmp_path / "flat"), steps=1, **options)


@pytest.mark.parametrize(("change", "problem"), [
    ({"recipe": "photos"}, "contains volumes, but supervised needs images"), ({"recipe": "mae"}, "needs images"), ({"model": "Swin-T/4"}, "for images"),
    ({"recipe": "swin-upernet", "model": None, "init": "RUN"}, "for images"),
])  # fmt: skip
def test_image_recipes_are_rejected_for_volumes(volume_data, volume_run, tmp_path, change, problem):
    options = {
        **TRAIN_OPTIONS,
        "steps": 1,
        "settings": {},
        **{k: str(volume_run) if v == "RUN" else v for k, v in change.items()},
    }
    with pytest.raises(UsageError, match=problem):
        vitreous.train(str(volume_data), out=str(tmp_path / "run"), **options)


def test_image_only_features_reject_volumes(volume_data, volume_run, tmp_path):
    data = open_data(volume_data)
    with pytest.raises(UsageError, match="the server supports images"):
        warm_up_predictor(vitreous.load(volume_run), ServerLimits())
    with pytest.raises(UsageError, match="figure rollout is not available for models of volumes"):
        vitreous.inspect(volume_run, figures=["rollout"])
    with pytest.raises(UsageError, match="the data are volumes, but packs store images"):
        pack_dataset(volume_data, tmp_path / "packed")
    with pytest.raises(UsageError, match="copies are found among images, or among clips"):
        find_copies([data.split("train")], [], within=True)
    with pytest.raises(UsageError, match="requires views of type volumes"):
        SegmentationConfig().check(config_from_name("ViT-32x2/4x4x4"), ("a", "b"), SceneViews())
    image_data = write_maps(tmp_path / "pictures", 4)
    with pytest.raises(DataError, match="classes"):
        vitreous.evaluate(str(volume_run), str(image_data), device="cpu")
    with pytest.raises(DataError, match="not a volume"):
        vitreous.load(volume_run).segment(image_data / "images" / "0.png")
    assert read_volume(volume_data / "test" / "images" / "odd.nii.gz", 1).shape == (1, 17, 9, 15)
