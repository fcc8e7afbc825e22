"""Volumes: every format gives the same voxels; hostile files are rejected before memory is allocated."""

import gzip
import io
import json
import struct
import sys
import zipfile

import numpy as np
import pytest

from tests.data.annotations.solids import AFFINE, make_solid, write_solids, write_volume
from vitreous.apps.curation.check import check_dataset
from vitreous.data.annotations.target import IGNORE_INDEX
from vitreous.data.decoding import volumes
from vitreous.data.decoding.volumes import (
    read_label_volume,
    read_nifti_header,
    read_volume,
    read_volume_form,
    standardise_channels,
)
from vitreous.data.modalities.volumes import VolumePreprocess
from vitreous.data.sources import open_data
from vitreous.errors import DataError

VOLUME_SUFFIXES = (".nii.gz", ".nii", ".npy", ".npz", ".tif")


@pytest.mark.parametrize("ending", VOLUME_SUFFIXES)
@pytest.mark.parametrize("dtype", ["float32", "uint8", "int16", "float64"])
def test_every_format_gives_the_same_voxels(tmp_path, ending, dtype):
    voxels, classes = make_solid(3)
    voxels = np.clip(voxels / 4, 0, 255).astype(dtype)
    path = write_volume(tmp_path / f"a{ending}", voxels)
    expected = standardise_channels(voxels.astype(np.float32)[None])
    for raw in (path, path.read_bytes(), voxels):
        assert read_volume_form(raw) == (1, voxels.shape)
        assert np.array_equal(read_volume(raw, 1), expected)
    assert np.array_equal(read_label_volume(write_volume(tmp_path / f"m{ending}", classes.astype(dtype))), classes)


@pytest.mark.parametrize("ending", VOLUME_SUFFIXES)
def test_channels_are_the_last_axis(tmp_path, ending):
    voxels = np.random.default_rng(0).normal(size=(5, 6, 7, 3)).astype(np.float32)
    path = write_volume(tmp_path / f"a{ending}", voxels)
    assert read_volume_form(path) == (3, (5, 6, 7))
    for channel, expected in zip(read_volume(path, 3), np.moveaxis(voxels, -1, 0), strict=True):
        assert np.array_equal(channel, standardise_channels(expected[None].copy())[0])
    with pytest.raises(DataError, match="3 channels, but the model expects 1"):
        read_volume(path, 1)
    with pytest.raises(DataError, match="a mask of 3 channels"):
        read_label_volume(path)


def test_each_channel_is_standardised_by_a_stated_rule():
    volume = np.random.default_rng(1).gamma(2.0, 50.0, (2, 9, 10, 11)).astype(np.float32)
    volume[0, 0, 0, 0] = 1e9  # one extreme voxel does not shift the others
    for standardised, before in zip(standardise_channels(volume.copy()), volume, strict=True):
        clipped = np.clip(before, *np.percentile(before, (0.5, 99.5)))
        assert standardised == pytest.approx((clipped - clipped.mean()) / clipped.std(), abs=1e-4)
    assert np.allclose(standardise_channels(3 * volume + 40), standardise_channels(volume.copy()), atol=1e-3)
    assert (standardise_channels(np.full((1, 2, 2, 2), 7, np.float32)) == 0).all()


def test_scaled_nifti_values_match_nibabel(tmp_path):
    import nibabel

    image = nibabel.Nifti1Image(np.arange(60, dtype=np.int16).reshape(3, 4, 5), AFFINE)  # type: ignore[attr-defined]
    image.header.set_slope_inter(0.25, -3)
    nibabel.save(image, tmp_path / "a.nii.gz")
    expected = nibabel.load(tmp_path / "a.nii.gz").get_fdata(dtype=np.float32)  # type: ignore[attr-defined]
    assert np.array_equal(volumes.open_volume(tmp_path / "a.nii.gz", "a").read().astype(np.float32), expected)
    assert np.allclose(read_nifti_header(tmp_path / "a.nii.gz").get_best_affine(), AFFINE)
    assert read_nifti_header(write_volume(tmp_path / "a.npy", expected)) is None


def test_extra_axes_of_length_one_are_dropped(tmp_path):
    voxels = np.zeros((3, 4, 5, 1, 2), np.float32)
    assert read_volume_form(write_volume(tmp_path / "vector.nii", voxels)) == (2, (3, 4, 5))
    assert read_volume_form(write_volume(tmp_path / "one.nii", voxels[..., 0])) == (1, (3, 4, 5))


def build_nifti(shape=(4, 5, 6), code=16, bits=32, offset=352, body=None, magic=b"n+1\0"):
    """Return the bytes of a NIfTI-1 file with this header."""
    head = bytearray(352)
    struct.pack_into("<i", head, 0, 348)
    struct.pack_into(f"<h{len(shape)}h", head, 40, len(shape), *shape)
    struct.pack_into("<hh", head, 70, code, bits)
    struct.pack_into("<ff", head, 108, offset, 1.0)
    head[344:348] = magic
    return bytes(head) + (bytes(4 * 4 * 5 * 6) if body is None else body)


def encode_npy(array, **options):
    """Return the bytes of a .npy file."""
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def build_oversized_npy(shape, descr="<f4"):
    """Return a .npy file that contains one number, with a header for a larger shape."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue() + b"\0\0\0\0"


def build_npz(*names, content=None):
    """Return a .npz file with these members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, encode_npy(np.zeros((3, 4, 5), np.uint8)) if content is None else content)
    return file.getvalue()


def encode_tiff_stack(array, **options):
    """Return the bytes of a multi-page TIFF."""
    import tifffile

    file = io.BytesIO()
    tifffile.imwrite(file, array, photometric="minisblack", **options)
    return file.getvalue()


VALID_VOLUME, NAN_VOLUME = np.ones((4, 5, 6), np.float32), np.full((4, 5, 6), np.nan, np.float32)
THREE_PAGE_TIFF = encode_tiff_stack(np.random.default_rng(0).integers(0, 255, (3, 40, 50), dtype=np.uint8))
HOSTILE_FILES = {
    "npy of 10^12 voxels": (build_oversized_npy((10_000, 10_000, 10_000)), "to 268,435,456 values"),
    "npz of 10^12 voxels": (build_npz("a.npy", content=build_oversized_npy((10_000,) * 3)), "to 268,435,456 values"),
    "nifti of 10^12 voxels": (gzip.compress(build_nifti((32_000, 32_000, 1_000))), "to 268,435,456 values"),
    "nifti larger than declared": (gzip.compress(build_nifti(body=bytes(2**24))), "more bytes than its header states"),
    "npz larger than declared": (
        build_npz("a.npy", content=build_oversized_npy((2, 2, 2)) + bytes(2**24)),
        "33 bytes of voxels",
    ),
    "truncated gzip": (gzip.compress(build_nifti(body=np.random.default_rng(0).bytes(480)))[:-40], "gzip: cut short"),
    "gzip with a wrong checksum": (gzip.compress(build_nifti())[:-8] + b"12345678", "gzip: .*check"),
    "gzip of other content": (gzip.compress(b"hello" * 200), "not a volume of a known format"),
    "truncated nifti": (build_nifti()[:500], "148 bytes of voxels, but the header states 480"),
    "nifti without a body": (build_nifti(body=b""), "0 bytes of voxels, but the header states 480"),
    "nifti in two files": (build_nifti(magic=b"ni1\0"), "not a volume of a known format"),
    "nifti of two axes": (build_nifti((4, 5)), "4 x 5 is not a volume"),
    "nifti of six axes": (build_nifti((2, 2, 2, 2, 2, 2)), "is not a volume"),
    "nifti with a time axis": (build_nifti((2, 2, 2, 300)), "300 channels"),
    "nifti with a negative size": (build_nifti((4, -5, 6)), "is not a volume"),
    "nifti of colours": (build_nifti(code=128, bits=24), "unsupported voxel dtype"),
    "nifti of complex numbers": (build_nifti(code=32, bits=64), "unsupported voxel dtype complex64"),
    "nifti of an unknown type": (build_nifti(code=77), "cannot be read as a volume"),
    "nifti with voxels in the header": (build_nifti(offset=0), "voxels inside the header"),
    "objects": (encode_npy(np.array([[[{}]]], object), allow_pickle=True), "unsupported voxel dtype object"),
    "texts": (encode_npy(np.array([[["a"]]])), "unsupported voxel dtype <U1"),
    "a damaged header": (encode_npy(VALID_VOLUME).replace(b"'descr'", b"'dexxx'"), "damaged .npy header"),
    "truncated npy": (encode_npy(VALID_VOLUME)[:-7], "473 bytes of voxels, but the header states 480"),
    "npy with trailing data": (encode_npy(VALID_VOLUME) + b"123", "483 bytes of voxels, but the header states 480"),
    "five axes": (encode_npy(np.zeros((1, 1, 1, 1, 1))), "is not a volume"),
    "no voxels": (encode_npy(np.zeros((3, 0, 4))), "3 x 0 x 4 is not a volume"),
    "a number": (encode_npy(np.float32(3)), "no axes is not a volume"),
    "not a number": (encode_npy(NAN_VOLUME), "120 of its values are NaN"),
    "infinite": (encode_npy(NAN_VOLUME * 0 + np.inf), "NaN or infinite"),
    "not an array": (build_npz("a.txt"), "0 arrays"),
    "two arrays": (build_npz("a.npy", "b.npy"), "2 arrays instead of one"),
    "a damaged zip": (build_npz("a.npy")[:60], "cannot be read as a volume"),
    "pages of two sizes": (None, "pages of 2 sizes or dtypes"),
    "one page": (encode_tiff_stack(np.zeros((8, 9), np.uint8)), "not a stack of pages"),
    "truncated pages": (THREE_PAGE_TIFF[: len(THREE_PAGE_TIFF) - 900], "cannot be read|missing strips|missing"),
    "an image": (b"\x89PNG\r\n\x1a\n" + bytes(60), "not a volume of a known format"),
    "nothing": (b"\0", "not a volume of a known format"),
}


@pytest.mark.parametrize("case", HOSTILE_FILES)
def test_hostile_volumes_are_rejected_with_one_message(case, monkeypatch):
    content, problem = HOSTILE_FILES[case]
    if content is None:
        import tifffile

        file = io.BytesIO()
        with tifffile.TiffWriter(file) as writer:
            writer.write(np.zeros((4, 8, 9), np.uint8), photometric="minisblack")
            writer.write(np.zeros((8, 7), np.uint8), photometric="minisblack")
        content = file.getvalue()
    allocations = []
    real = volumes.inflate_gzip
    monkeypatch.setattr(volumes, "inflate_gzip", lambda *a, **k: allocations.append(len(out := real(*a, **k))) or out)
    with pytest.raises(DataError, match=f"(?s)scan.nii: .*({problem})") as error:
        read_volume(content, 1, "scan.nii")
    assert "\n" not in error.value.message and max(allocations, default=0) <= 70_000


@pytest.mark.parametrize(("values", "problem"), [
    (np.full((2, 3, 4), 0.5), "0.5 is not a class"), (np.full((2, 3, 4), -1, np.int16), "-1 is not a class"),
    (np.full((2, 3, 4), np.nan), "NaN"), (np.full((2, 3, 4), 10**9), "1e[+]09 is not a class"),
])  # fmt: skip
def test_volume_masks_need_integer_values(values, problem):
    with pytest.raises(DataError, match=problem):
        read_label_volume(encode_npy(values), "mask.npy")
    assert np.array_equal(read_label_volume(np.ones((2, 3, 4), bool)), np.ones((2, 3, 4), np.int32))


@pytest.mark.parametrize(("library", "content", "extra"), [
    ("nibabel", build_nifti(), "volumes"), ("tifffile", THREE_PAGE_TIFF, "data")
])  # fmt: skip
def test_a_missing_library_is_reported_with_the_install_command(library, content, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DataError, match=f"needs {library}") as error:
        read_volume(content, 1, "a")
    assert error.value.hint == f"pip install 'vitreous[{extra}]'"


@pytest.mark.parametrize("ending", VOLUME_SUFFIXES)
def test_volume_masks_are_read(tmp_path, ending):
    data = open_data(write_solids(tmp_path / "data", 12, ending))
    assert data.classes == ("background", "box", "ball") and len(data.splits["val"]) == 1
    split = data.split("train")
    first = int(split.name(0).rpartition("/")[2].partition(".")[0])
    voxels, classes = make_solid(first)
    assert np.array_equal(split.target(0).class_map(), classes)
    assert np.array_equal(VolumePreprocess((8, 8, 8), 1, (0.0,), (1.0,)).decode(split.raw(0)),
                          standardise_channels(voxels[None].copy()))  # fmt: skip
    assert split.axes == 3 and split.labels.tolist() == [[1, 1, 1]] * 11


def test_medical_decathlon_folders_are_read(tmp_path):
    for number in range(4):
        voxels, classes = make_solid(number)
        write_volume(tmp_path / "imagesTr" / f"part_{number}.nii.gz", voxels)
        write_volume(tmp_path / "labelsTr" / f"part_{number}.nii.gz", classes.astype(np.float32))
    labels = {"0": "background", "1": "box", "2": "ball"}
    for written in (labels, {name: int(number) for number, name in labels.items()}):
        (tmp_path / "dataset.json").write_text(json.dumps({"labels": written}))
        assert open_data(tmp_path).classes == ("background", "box", "ball")
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": {"1": "box", "2": "ball"}}))
    with pytest.raises(DataError, match="count from 0"):
        open_data(tmp_path)
    (tmp_path / "dataset.json").write_text("{")
    with pytest.raises(DataError, match="has no valid class names"):
        open_data(tmp_path)


def test_mismatched_volume_masks_are_rejected_by_name(tmp_path):
    home = write_solids(tmp_path, 4)
    write_volume(home / "masks" / "2.nii.gz", np.zeros((12, 17, 15), np.uint8))
    split = open_data(home).split("train")
    with pytest.raises(DataError, match=r"masks/2\.nii\.gz is 12 x 17 x 15 voxels, its image .* 12 x 17 x 14"):
        [split.target(sample) for sample in range(len(split))]
    write_volume(home / "masks" / "2.nii.gz", np.full((12, 17, 14), 7, np.uint8))
    with pytest.raises(DataError, match=r"2\.nii\.gz has class 7, but there are 3"):
        [split.target(sample) for sample in range(len(split))]
    write_volume(home / "masks" / "2.nii.gz", np.full((12, 17, 14), 255, np.uint8))
    assert any((split.target(sample).class_map() == IGNORE_INDEX).all() for sample in range(len(split)))
    with pytest.raises(DataError, match="4 volumes without masks"):
        open_data(home / "images")
    (home / "masks" / "2.nii.gz").unlink()
    with pytest.raises(DataError, match=r"1 of 4 have no mask.*images/2\.nii\.gz"):
        open_data(home)


def test_check_reports_volume_sizes_classes_and_unreadable_files(tmp_path):
    home = write_solids(tmp_path / "data", 5)
    (home / "images" / "1.nii.gz").write_bytes((home / "images" / "1.nii.gz").read_bytes()[:900])
    write_volume(home / "masks" / "3.nii.gz", np.zeros((5, 5, 5), np.uint8))
    document, _ = check_dataset(home, workers=0)
    assert not document["passed"] and document["image_sizes"]["slices"]["max"] == 12
    assert document["image_sizes"]["height"]["max"] == 17 and document["image_sizes"]["width"]["min"] == 14
    assert [row["path"].rpartition("/")[2] for row in document["unreadable"]] == ["1.nii.gz"]
    assert document["channels"] == {"count": 1, "dtype": "voxels"} and document["formats"] == {"NIFTI": 4}
    unreadable_names = [row["path"].rpartition("/")[2] for row in document["annotations"]["unreadable"]]
    assert "3.nii.gz" in unreadable_names and document["annotations"]["pixels"]["box"] > 0
    assert "images" not in document["ignored_files"]
