"""Image sources: every kind of source, odd file names, and rejected sources."""

from __future__ import annotations

import csv
import io
import os
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.inference.small_models import write_images
from vitreous.errors import DataError, UsageError
from vitreous.inference.sources import resolve_image_source

ODD_NAMES = [
    "new\nline.png",
    'quo"te, comma.png',
    "=formula.png",
    "'apostrophe.png",
    os.fsdecode(b"latin\xe9.png"),
    " blank .png",
    "é.png",
    "[a]*.png",
]


@pytest.fixture
def image_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return [os.path.relpath(file) for file in write_images(tmp_path / "p", 3)]


@pytest.fixture
def odd_files(image_files):
    for name in ODD_NAMES:
        Path("odd").mkdir(exist_ok=True)
        Path("odd", name).write_bytes(Path(image_files[0]).read_bytes())
    return [f"odd/{name}" for name in ODD_NAMES]


def list_image_names(*words: str, **options) -> list[str]:
    """The names of the images of a source; each image is checked to be readable."""
    items = list(resolve_image_source(words, **options))
    for item in items:
        content = item.content()
        assert (Path(content).read_bytes() if isinstance(content, str) else content).startswith(b"\x89PNG"), item.name
    return [item.name for item in items]


def test_files_folders_and_patterns(image_files):
    os.makedirs("p/deep/er")
    os.link("p/0.png", "p/deep/er/10.png")
    Path("p/deep/notes.txt").write_text("no image")
    assert list_image_names("p/1.png", "p/0.png", "p/1.png") == ["p/1.png", "p/0.png", "p/1.png"]
    assert list_image_names("p") == [*image_files, "p/deep/er/10.png"]
    assert resolve_image_source(["p", "p/0.png"]).count == 5
    assert list_image_names("p/**/*.png") == [*image_files, "p/deep/er/10.png"] == list_image_names("p/**")
    assert list_image_names("p/[02].png") == ["p/0.png", "p/2.png"]


def test_odd_names_are_kept_by_every_source(odd_files, tmp_path):
    assert sorted(list_image_names("odd")) == sorted(odd_files)
    assert list_image_names("odd/[a]*.png") == ["odd/[a]*.png"]  # an existing file is not a pattern
    Path("list").write_bytes(b"\0".join(map(os.fsencode, odd_files)) + b"\0")
    assert list_image_names("@list") == odd_files == list_image_names(lists=["list"])
    plain = [name for name in odd_files if "\n" not in name]
    Path("lines").write_bytes(b"\r\n".join(map(os.fsencode, plain)))
    assert list_image_names("@lines") == plain
    text = io.StringIO(newline="")
    csv.writer(text).writerows([["label", "file"], *(["x", name] for name in odd_files)])
    Path("table.csv").write_bytes(b"\xef\xbb\xbf" + text.getvalue().encode("utf-8", "surrogateescape"))
    assert list_image_names("table.csv") == odd_files
    with tarfile.open("odd.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        archive.add("odd")
    assert sorted(list_image_names("odd.tar")) == sorted(f"odd.tar/{name}" for name in odd_files)


def test_list_from_stdin(image_files, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("\n".join(["", *image_files, ""]).encode())))
    assert list_image_names("-") == image_files
    assert resolve_image_source(["-"]).count is None


def test_table_paths_are_relative_to_the_table(image_files, tmp_path, monkeypatch):
    Path("p/a.csv").write_text("name;path,picture\n1,0.png\n\n2,2.png\n")
    assert next(iter(resolve_image_source(["p/a.csv"], column="picture"))).content() == os.path.join("p", "0.png")
    Path("p/a.tsv").write_text("id\tIMAGE\n1\t0.png\n")
    assert list_image_names("p/a.tsv") == ["0.png"]
    with pytest.raises(UsageError, match="no column other; its columns are id, IMAGE"):
        list_image_names("p/a.tsv", column="other")
    Path("p/b.csv").write_text("0.png\n1.png\n")
    with pytest.raises(UsageError, match="the image column is unknown"):
        list_image_names("p/b.csv")
    Path("p/c.csv").write_text('path\n0.png\n"open\n')
    with pytest.raises(DataError, match="not valid CSV"):
        list_image_names("p/c.csv")
    Path("p/d.csv").write_text("id,path\n0,0.png\n1\n")
    with pytest.raises(DataError, match="line 3: no path"):
        list_image_names("p/d.csv")
    Path("p/e.csv").write_text("path,Start,end\n0.png,0,1\n")
    with pytest.raises(UsageError, match="has the column end, but segments of clips are not read here"):
        list_image_names("p/e.csv")


def test_archives_are_read_without_extraction(image_files):
    for index in range(2):
        with tarfile.open(f"s-{index}.tar", "w") as archive:
            archive.add("p/0.png", "dog/7.png")
            archive.add("p/1.png", "dog/.hidden.png")
            archive.addfile(tarfile.TarInfo("dog/7.cls"), io.BytesIO(b""))
            archive.add("p/2.png", "8.PNG")
    both = [f"s-{index}.tar/{name}" for index in range(2) for name in ("dog/7.png", "8.PNG")]
    assert list_image_names("s-{0..1}.tar") == list_image_names("s-*.tar") == both
    os.mkdir("shards")
    os.rename("s-0.tar", "shards/s.tar")
    assert list_image_names("shards") == ["shards/s.tar/dog/7.png", "shards/s.tar/8.PNG"]
    Path("cut.tar").write_bytes(Path("s-1.tar").read_bytes()[:1200])
    with pytest.raises(DataError, match="truncated"):
        list_image_names("cut.tar")
    Path("x.tar.gz").write_bytes(b"\x1f\x8b" + bytes(600))
    with pytest.raises(DataError, match="gunzip"):
        list_image_names("x.tar.gz")


def test_parquet_of_bytes_structs_and_paths(image_files):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    contents = [Path(file).read_bytes() for file in image_files]
    pq.write_table(pa.table({"label": ["a", "b", "c"], "image": contents}), "bytes.parquet")
    assert list_image_names("bytes.parquet") == [f"bytes.parquet, row {row}" for row in range(3)]
    structs = [{"bytes": contents[0], "path": "x.png"}, {"bytes": None, "path": "p/1.png"}]
    pq.write_table(pa.table({"picture": structs}), "structs.parquet")
    assert list_image_names("structs.parquet") == ["structs.parquet, row 0", "p/1.png"]
    pq.write_table(pa.table({"label": ["a", "b", "c"], "path": image_files}), "paths.parquet")
    assert list_image_names("paths.parquet") == image_files
    with pytest.raises(UsageError, match="the image column is unknown"):
        pq.write_table(pa.table({"a": contents, "b": contents}), "two.parquet")
        list_image_names("two.parquet")
    assert len(list_image_names("two.parquet", column="b")) == 3
    pq.write_table(pa.table({"image": pa.array([None], pa.binary())}), "none.parquet")
    with pytest.raises(DataError, match="no image"):
        list_image_names("none.parquet")
    Path("junk.parquet").write_bytes(b"junk")
    with pytest.raises(DataError, match="Parquet"):
        list_image_names("junk.parquet")


@pytest.mark.parametrize("word", ["none.png", "none/**/*.png", "@none", "none-{0..2}.tar", "empty"])
def test_missing_sources_raise_immediately(image_files, word):
    os.makedirs("empty")
    with pytest.raises(DataError) as error:
        resolve_image_source([word])
    assert "none" in error.value.message or "no images in empty" in error.value.message
