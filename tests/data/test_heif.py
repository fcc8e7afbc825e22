"""AVIF and HEIC files are decoded if Pillow supports them; otherwise they are counted, with the package to install."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from PIL import Image

from tests.conftest import make_folder, run_cli
from tests.data.crafted import build_iso_header
from vitreous.data.decoding import heif
from vitreous.data.decoding.decode import decode_to_pillow, read_upright_size
from vitreous.data.sources import open_data
from vitreous.errors import DataError

pytestmark = pytest.mark.usefixtures("without_pages")  # report pages would slow down the many trainings

pytest.importorskip("pillow_heif")
HEIF_SUFFIXES = {"AVIF": ".avif", "HEIF": ".heic"}
# (64, 96, 3)
RAMP_PIXELS = np.stack(np.broadcast_arrays(np.arange(96)[None] * 2, np.arange(64)[:, None] * 3, 128), -1).astype(
    np.uint8
)


def encode_heif(heif_format: str, pixels: np.ndarray = RAMP_PIXELS, orientation: int = 1) -> bytes:
    """Encode pixels in the given format."""
    heif.register_pillow_reader(heif_format)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(file := io.BytesIO(), heif_format, quality=95, exif=exif.tobytes())
    return file.getvalue()


@pytest.fixture
def without_heif(monkeypatch):
    """Simulate an installation that cannot decode AVIF or HEIC."""
    monkeypatch.setattr(heif, "is_format_readable", lambda heif_format: False)


@pytest.mark.parametrize("heif_format", HEIF_SUFFIXES)
def test_heif_pixels_are_decoded_upright(heif_format):
    content = encode_heif(heif_format)
    assert heif.detect_heif_format(content) == heif_format
    assert np.abs(np.asarray(decode_to_pillow(content)).astype(int) - RAMP_PIXELS).mean() < 2
    assert decode_to_pillow(content, channels=1).mode == "L" and read_upright_size(content, "image") == (96, 64)
    for orientation, exif_file in (
        (3, RAMP_PIXELS[::-1, ::-1]),
        (6, np.rot90(RAMP_PIXELS, -1)),
        (8, np.rot90(RAMP_PIXELS)),
    ):
        content = encode_heif(heif_format, orientation=orientation)
        assert np.abs(np.asarray(decode_to_pillow(content)).astype(int) - exif_file).mean() < 2, orientation
        assert read_upright_size(content, "image") == (exif_file.shape[1], exif_file.shape[0])


@pytest.mark.parametrize("heif_format", HEIF_SUFFIXES)
def test_transparency_is_laid_over_white(heif_format):
    transparent_pixels = np.dstack([RAMP_PIXELS, np.zeros(RAMP_PIXELS.shape[:2], np.uint8)])
    assert np.asarray(decode_to_pillow(encode_heif(heif_format, transparent_pixels))).min() > 250


@pytest.mark.parametrize("heif_format", HEIF_SUFFIXES)
@pytest.mark.parametrize("share", [0.3, 0.9, 0.99])
def test_truncated_heif_files_are_rejected(heif_format, share):
    content = encode_heif(heif_format)
    with pytest.raises(DataError, match="cannot be read as an image"):
        decode_to_pillow(content[: int(share * len(content))])


def test_brands_tell_the_format():
    box = b"\0\0\0\x1cftyp"
    assert heif.detect_heif_format(box + b"mif1" + bytes(4) + b"mif1avifmiaf") == "AVIF"
    assert heif.detect_heif_format(box + b"mif1" + bytes(4) + b"mif1heicmiaf") == "HEIF"
    assert heif.detect_heif_format(box + b"msf1" + bytes(4) + b"msf1hevcmiaf") == "HEIF"
    assert (
        heif.detect_heif_format(build_iso_header(b"isom"))
        == heif.detect_heif_format(b"\xff\xd8\xff")
        == heif.detect_heif_format(b"")
        == ""
    )


@pytest.mark.parametrize(
    "heif_format, install_hint", [("AVIF", "pip install --upgrade pillow"), ("HEIF", r"pip install 'vitreous\[heif\]'")]
)
def test_unsupported_heif_files_suggest_what_to_install(without_heif, heif_format, install_hint):
    with pytest.raises(DataError, match=f"photo: an? (AVIF|HEIC) image, .*{install_hint}"):
        decode_to_pillow(encode_heif(heif_format), name="photo")
    assert read_upright_size(encode_heif(heif_format), "photo") == (0, 0)


@pytest.fixture
def photos_with_heif(tmp_path):
    """Return a folder of PNG files with two files of each HEIF format."""
    root = make_folder(tmp_path / "photos", {"train": 6, "val": 2}, classes=("ant", "bee"))
    for heif_format, suffix in HEIF_SUFFIXES.items():
        for name in ("ant", "bee"):
            (root / "train" / name / f"phone{suffix}").write_bytes(encode_heif(heif_format))
    return root


TRAIN_ARGUMENTS = [
    "--model",
    "ViT-16x1/8",
    "--image-size",
    "16",
    "--epochs",
    "1",
    "--device",
    "cpu",
    "--workers",
    "0",
    "--batch-size",
    "8",
]


def test_heif_files_are_trained_checked_and_predicted(photos_with_heif, tmp_path):
    assert len(open_data(photos_with_heif).splits["train"]) == 16
    result = run_cli("train", str(photos_with_heif), "--out", "run", *TRAIN_ARGUMENTS, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "run" / "data.json").read_text())["train_images"] == 16
    files = [str(photos_with_heif / "train" / "ant" / f"phone{suffix}") for suffix in HEIF_SUFFIXES.values()]
    result = run_cli("predict", "run", *files, "--json", cwd=tmp_path)
    assert result.returncode == 0 and len(json.loads(result.stdout)["predictions"]) == 2
    result = run_cli("data", "check", str(photos_with_heif), "--json", cwd=tmp_path)
    assert {"AVIF", "HEIF"} <= set(json.dumps(json.loads(result.stdout)).replace('"', " ").split())


def test_unreadable_heif_files_are_counted_and_named(photos_with_heif, tmp_path, without_heif):
    result = run_cli("train", str(photos_with_heif), "--out", "run", *TRAIN_ARGUMENTS, cwd=tmp_path)
    assert result.returncode == 3 and "4 of 16 images cannot be read" in result.stderr
    assert (
        result.stderr.count("a HEIC image, which needs pillow-heif") == result.stderr.count("an AVIF image, but") == 2
    )
    assert str(photos_with_heif / "train" / "ant" / "phone.heic") in result.stderr
    result = run_cli(
        "train", str(photos_with_heif), "--out", "run", *TRAIN_ARGUMENTS, "--bad-images", "skip", cwd=tmp_path
    )
    assert result.returncode == 0 and "4 of 16 training images cannot be read and are left out" in result.stderr
    result = run_cli("predict", "run", str(photos_with_heif / "train" / "ant" / "phone.heic"), cwd=tmp_path)
    assert result.returncode == 3 and "a HEIC image, which needs pillow-heif" in result.stdout
    result = run_cli("data", "check", str(photos_with_heif), cwd=tmp_path)
    assert result.returncode == 1 and "4 of 20 images cannot be read" in result.stdout
    assert "2 x a HEIC image, which needs pillow-heif" in result.stdout and "ant/phone.heic" in result.stdout
    assert "2 x an AVIF image, but Pillow was built without" in result.stdout and "bee/phone.avif" in result.stdout
