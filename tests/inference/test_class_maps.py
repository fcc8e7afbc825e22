"""`predict` of semantic segmentation models: class maps and their files."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import vitreous
from tests.data.annotations.scenery import write_maps
from tests.reports.test_scenes import CLASSES, scenes_run  # noqa: F401
from vitreous.data.annotations.drawing import class_map_to_image, create_class_colours, overlay_class_map
from vitreous.data.annotations.target import IGNORE_INDEX
from vitreous.data.sources import open_data
from vitreous.errors import DataError, UsageError
from vitreous.inference.class_maps import OutputFileNames, find_common_root


def run_predict(*words):
    """Run `vitreous predict`; returns the exit code."""
    from vitreous.cli.main import main

    with pytest.raises(SystemExit) as stop:
        main(["predict", *map(str, words), "--json"])
    return stop.value.code


def test_class_map_matches_the_model_on_one_tile(scenes_run, tmp_path):  # noqa: F811
    pixels = np.random.default_rng(0).integers(0, 255, (32, 32, 3)).astype(np.uint8)
    predictor = vitreous.load(scenes_run, precision="fp32")
    prediction = predictor.segment(pixels)
    with torch.inference_mode():
        images = predictor.card.preprocess.normalise(torch.from_numpy(pixels).movedim(-1, 0)[None])
        logits = predictor.model(images)[0]
    assert prediction.names == tuple(CLASSES) and prediction.classes.shape == (32, 32)
    assert np.mean(prediction.classes == logits.argmax(0).numpy()) > 0.999
    shares = list(prediction.class_shares.values())
    assert sum(shares) == pytest.approx(1) and shares == sorted(shares, reverse=True)
    with pytest.raises(UsageError, match="keep_images=True"):
        prediction.draw_overlay()
    assert predictor.segment(pixels, keep_images=True).draw_overlay().size == (32, 32)
    assert np.array_equal(predictor.predict(pixels).classes, prediction.classes)
    assert len(predictor.predict([pixels, pixels])) == 2
    with pytest.raises(UsageError, match=r"predict\(threshold=…\) is for image classifiers"):
        predictor.predict(pixels, threshold=0.5)


def test_class_maps_keep_image_size_and_order(scenes_run, tmp_path):  # noqa: F811
    images = [np.full((h, w, 3), 90, np.uint8) for h, w in ((24, 32), (7, 90), (50, 33))]
    predictor = vitreous.load(scenes_run, precision="fp32")
    assert [prediction.classes.shape for prediction in predictor.segment(images)] == [(24, 32), (7, 90), (50, 33)]
    assert predictor.embed(images).shape == (3, 32)
    assert [prediction.classes.shape for prediction in predictor.predict(images)] == [(24, 32), (7, 90), (50, 33)]
    (tmp_path / "a.png").write_bytes(b"none")
    with pytest.raises(DataError, match=r"a\.png"):
        predictor.segment(tmp_path / "a.png")
    assert "a.png" in predictor.segment(tmp_path / "a.png", bad_images="skip").error


def test_image_classifier_has_no_class_maps(tmp_path):
    vitreous.save(vitreous.create("ViT-32x2/8", 32, 2), tmp_path / "model")
    with pytest.raises(UsageError, match="no per-pixel classes"):
        vitreous.load(tmp_path / "model").segment(np.zeros((32, 32, 3), np.uint8))
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    assert run_predict(tmp_path / "model", tmp_path / "a.png", "--overlay", tmp_path / "o") == 2


def test_written_class_maps_are_readable_as_a_dataset(scenes_run, tmp_path, capsys):  # noqa: F811
    folder = write_maps(tmp_path / "data", 3)
    images = folder / "images"
    assert run_predict(scenes_run, images, "--out", tmp_path / "out" / "masks", "--overlay", tmp_path / "over") == 0
    (tmp_path / "out" / "images").symlink_to(images)
    (tmp_path / "out" / "classes.txt").write_text("\n".join(CLASSES))
    split = open_data(str(tmp_path / "out")).split("train")
    predictor = vitreous.load(scenes_run)
    for sample in range(len(split)):
        prediction = predictor.segment(split.path(sample))
        assert np.array_equal(split.target(sample).class_map(), prediction.classes)
    rows = [json.loads(line) for line in (tmp_path / "out" / "masks" / "maps.jsonl").open()]
    assert [row["path"] for row in rows] == [str(images / f"{n}.png") for n in range(3)]
    assert rows[0]["class_shares"] == predictor.segment(images / "0.png").class_shares
    assert Image.open(rows[0]["overlay"]).size == (32, 24) and Image.open(rows[0]["file"]).mode == "P"


def test_output_folder_is_resumed_and_never_overwritten(scenes_run, tmp_path, capsys):  # noqa: F811
    images, out = write_maps(tmp_path / "data", 3) / "images", tmp_path / "masks"
    assert run_predict(scenes_run, images, "--out", out) == 0
    content = (out / "1.png").read_bytes()
    assert run_predict(scenes_run, images, "--out", out) == 2 and "which are not overwritten" in capsys.readouterr().err
    lines = (out / "maps.jsonl").read_text().splitlines()
    (out / "maps.jsonl").write_text(f"{lines[0]}\n{lines[1][:20]}")
    described = json.loads((out / "maps.jsonl.job.json").read_text())
    (out / "maps.jsonl.job.json").write_text(json.dumps(described | {"finished": False, "rows": 0}))
    (out / "1.png").unlink()
    assert run_predict(scenes_run, images, "--out", out, "--resume") == 0
    assert (out / "maps.jsonl").read_text().splitlines() == lines and (out / "1.png").read_bytes() == content
    assert len(list(out.glob("*.png"))) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top", 3], "--top is for image classifiers"),
        (["--overlay", "over"], "--out FOLDER"),
        (["--out", "maps.jsonl"], "maps.jsonl is a file, not a folder: class maps are one PNG per image"),
    ],
)
def test_inapplicable_options_are_rejected(scenes_run, tmp_path, capsys, words, message):  # noqa: F811
    images = write_maps(tmp_path / "data", 1) / "images"
    assert run_predict(scenes_run, images, *words) == 2 and message in capsys.readouterr().err


def test_unreadable_images_are_reported_and_skipped(scenes_run, tmp_path, capsys):  # noqa: F811
    images = write_maps(tmp_path / "data", 2) / "images"
    (images / "0.png").write_bytes(b"none")
    assert run_predict(scenes_run, images, "--out", tmp_path / "masks") == 3
    assert sorted(path.name for path in (tmp_path / "masks").glob("*.png")) == ["1.png"]
    assert run_predict(scenes_run, images) == 3


def test_output_names_are_relative_to_the_common_folder(tmp_path):
    for name in ("a/x.jpg", "a/x.png", "b/x.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_common_root([str(tmp_path / "a")]) == str(tmp_path / "a")
    assert find_common_root([str(tmp_path / "a" / "x.jpg"), str(tmp_path / "b" / "*.jpg")]) == str(tmp_path)
    assert find_common_root([str(tmp_path / "a"), "@list.txt"]) == "" == find_common_root([])
    files = OutputFileNames(str(tmp_path))
    paths = [str(files.get_output_path(str(tmp_path / name))) for name in ("a/x.jpg", "a/x.png", "b/x.jpg", "../y.jpg")]
    assert paths == ["a/x.png", "a/x.png.png", "b/x.png", "y.png"]
    assert str(OutputFileNames("").get_output_path("/etc/x.tar:3.jpg")).startswith("etc/")


def test_class_maps_are_rendered_as_images(tmp_path):
    names = ("background", "a", "b")
    colours = create_class_colours(names)
    assert (
        colours[0].tolist() == [0, 0, 0]
        and len({tuple(row) for row in create_class_colours(tuple("abcdefghijkl"))}) == 12
    )
    classes = np.array([[0, 1], [2, IGNORE_INDEX]])
    image = class_map_to_image(classes, colours)
    assert np.asarray(image).tolist() == [[0, 1], [2, 255]]
    assert np.asarray(image.convert("RGB"))[1, 0].tolist() == colours[2].tolist()
    many = class_map_to_image(np.array([[0, 299], [7, IGNORE_INDEX]]), np.zeros((300, 3), np.uint8))
    many.save(tmp_path / "many.png")
    assert np.asarray(Image.open(tmp_path / "many.png")).tolist() == [[0, 299], [7, 65535]]
    grey = Image.new("L", (2, 2), 100)
    over = np.asarray(overlay_class_map(grey, classes, colours))
    assert over[0, 0].tolist() == over[1, 1].tolist() == [100] * 3
    assert over[0, 1].tolist() == np.rint(100 * 0.45 + colours[1] * 0.55).astype(int).tolist()
