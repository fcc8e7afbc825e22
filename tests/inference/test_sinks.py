"""Files of predictions: their content, and jobs that are stopped anywhere and resumed to the same file."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import tarfile
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import run_cli
from tests.inference.small_models import CLASSES, make_tiny_bundle, write_images
from vitreous.errors import UsageError
from vitreous.inference import pipeline
from vitreous.inference.predict import Embedding, Predictor, load
from vitreous.inference.rows import EmbeddingRows
from vitreous.inference.sinks import OutputFile
from vitreous.inference.sources import Item, resolve_image_source
from vitreous.tasks.classification import ClassFormat, Prediction

pytestmark = pytest.mark.usefixtures("without_pages")  # training is repeated many times

ODD_NAMES = [
    "a.png",
    "new\nline.png",
    'quo"te,.png',
    "=sum.png",
    "'=sum.png",
    os.fsdecode(b"\xff.png"),
    "bad.png",
    "é.png",
    "a.png",
]
JOB_OPTIONS = {"model": "m", "top": 2, "threshold": None}


def make_rows(kind: Any) -> list[Any]:
    """A result for each of the odd file names."""
    if isinstance(kind, ClassFormat):
        rows = [
            Prediction(name, ("=dog", "bee"), (0.75, 0.25 - n / 64), unsure=n == 3) for n, name in enumerate(ODD_NAMES)
        ]
        rows[7] = Prediction(ODD_NAMES[7])
        rows[6] = Prediction("bad.png", error="bad.png: no image\n=x")
    else:
        rows = [Embedding(name, np.array([n / 3, -n, 1e-9], np.float32)) for n, name in enumerate(ODD_NAMES)]
        rows[6] = Embedding("bad.png", error="bad.png: no image\n=x")
    return rows


def write_rows(path: str, kind: Any, rows: list[Any], resume: bool = False, stop: int | None = None) -> None:
    """Write the results, three at a time; stop after `stop` of them."""
    job = OutputFile(path, kind, JOB_OPTIONS, resume)
    try:
        names = [Item(row.path, b"") for row in rows]
        num_remaining = len(list(job.remaining(iter(names))))
        todo = rows[len(rows) - num_remaining : stop]
        for low in range(0, len(todo), 3):
            job.add(todo[low : low + 3])
        if stop is None and not job.is_finished:
            job.finish()
    finally:
        job.close()


def read_comparable(path: str) -> Any:
    """The content of a file in a form that can be compared."""
    if path.endswith(".npz"):
        with np.load(path) as archive:
            return [archive["embeddings"].tobytes(), archive["paths"].tolist(), archive["errors"].tolist()]
    if path.endswith(".parquet"):
        import pyarrow.parquet as pq

        return pq.read_table(path).to_pylist()
    return Path(path).read_bytes()


@pytest.fixture
def small_chunks(monkeypatch, tmp_path):
    for kind in (ClassFormat, EmbeddingRows):
        monkeypatch.setattr(kind, "rows_per_chunk", 2)
    monkeypatch.chdir(tmp_path)


FORMAT_SUFFIXES = [(kind, suffix) for kind in (ClassFormat(), EmbeddingRows()) for suffix in kind.formats]


def skip_without(suffix: str) -> None:
    """Skip the test if the format's library is not installed."""
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")


@pytest.mark.parametrize(
    ("kind", "suffix"), FORMAT_SUFFIXES, ids=lambda value: value if isinstance(value, str) else type(value).__name__
)
def test_resumed_job_writes_the_same_file(small_chunks, kind, suffix):
    skip_without(suffix)
    rows, uninterrupted, cut = make_rows(kind), f"whole{suffix}", f"cut{suffix}"
    write_rows(uninterrupted, kind, rows)
    for stop in range(len(rows)):
        write_rows(cut, kind, rows, stop=stop)
        with pytest.raises(UsageError, match="is not finished"):
            write_rows(cut, kind, rows)
        write_rows(cut, kind, rows, resume=True)
        assert read_comparable(cut) == read_comparable(uninterrupted) and not os.path.exists(f"{cut}.parts")
        os.unlink(f"{cut}.job.json")
        os.unlink(cut)
    described = json.loads(Path(f"{uninterrupted}.job.json").read_text())
    assert described == {"finished": True, "rows": len(rows), "unreadable": 1, "settings": JOB_OPTIONS}


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_file_truncated_at_any_byte_is_resumed(small_chunks, suffix):
    kind, rows, uninterrupted = ClassFormat(), make_rows(ClassFormat()), f"whole{suffix}"
    write_rows(uninterrupted, kind, rows)
    content = Path(uninterrupted).read_bytes()
    write_rows(f"cut{suffix}", kind, rows, stop=0)
    description = Path(f"cut{suffix}.job.json").read_text()
    for size in range(0, len(content), 7):
        Path(f"cut{suffix}").write_bytes(content[:size])
        Path(f"cut{suffix}.job.json").write_text(description)
        write_rows(f"cut{suffix}", kind, rows, resume=True)
        assert Path(f"cut{suffix}").read_bytes() == content, size
        assert json.loads(Path(f"cut{suffix}.job.json").read_text())["unreadable"] == 1


def test_resuming_with_other_options_or_images_is_rejected(small_chunks):
    kind, rows = ClassFormat(), make_rows(ClassFormat())
    write_rows("x.jsonl", kind, rows, stop=4)
    content = Path("x.jsonl").read_bytes()
    with pytest.raises(UsageError, match="top 2, now 3"):
        OutputFile("x.jsonl", kind, {**JOB_OPTIONS, "top": 3}, True)
    for other_rows, match in (
        (rows[1:], "image 1 in x.jsonl is a.png, but this job has"),
        ([rows[0], *rows[2:]], "image 2 in x.jsonl is new"),
        (rows[:2], "but this job has no more images"),
    ):
        with pytest.raises(UsageError, match=match):
            write_rows("x.jsonl", kind, other_rows, resume=True)
        assert Path("x.jsonl").read_bytes() == content
    with pytest.raises(UsageError, match="unknown format"):
        OutputFile("x.txt", kind, JOB_OPTIONS)
    Path("y.jsonl").write_text("mine")
    with pytest.raises(UsageError, match="has unknown settings"):
        OutputFile("y.jsonl", kind, JOB_OPTIONS, True)
    Path("x.jsonl.job.json").write_text("junk")
    with pytest.raises(UsageError, match="is not a job file"):
        OutputFile("x.jsonl", kind, JOB_OPTIONS, True)


def test_names_and_probabilities_round_trip_exactly(small_chunks):
    pytest.importorskip("pyarrow")
    rows = make_rows(ClassFormat())
    for suffix in ClassFormat.formats:
        write_rows(f"p{suffix}", ClassFormat(), rows)
    lines = [json.loads(line) for line in Path("p.jsonl").read_bytes().split(b"\n")[:-1]]
    assert [line["path"] for line in lines] == ODD_NAMES
    assert [[pair["probability"] for pair in line["classes"]] for line in lines] == [
        list(row.probabilities) for row in rows
    ]
    text = Path("p.csv").read_bytes().decode("utf-8", "surrogateescape")
    cells = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [row["path"].removeprefix("'") for row in cells if row["rank"] in ("", "1")] == ODD_NAMES
    assert not any(cell.startswith(("=", "+", "-", "@")) for row in cells for cell in row.values())
    table = read_comparable("p.parquet")
    assert [row["path"] if row["path_bytes"] is None else os.fsdecode(row["path_bytes"]) for row in table] == ODD_NAMES
    assert table[6]["error"] == "bad.png: no image\n=x" and table[6]["classes"] is None and table[3]["unsure"]
    rows = make_rows(EmbeddingRows())
    for suffix in EmbeddingRows.formats:
        write_rows(f"e{suffix}", EmbeddingRows(), rows)
    with np.load("e.npz", allow_pickle=False) as archive:
        assert archive["paths"].tolist() == ODD_NAMES and np.isnan(archive["embeddings"][6]).all()
        values = np.delete(archive["embeddings"], 6, 0)
    assert np.array_equal(values, [row.values for row in rows if row.values is not None])
    lines = [json.loads(line) for line in Path("e.jsonl").read_bytes().split(b"\n")[:-1]]
    assert np.array_equal(np.array([line["embedding"] for n, line in enumerate(lines) if n != 6], np.float32), values)
    assert np.array_equal(
        np.array([row["embedding"] for n, row in enumerate(read_comparable("e.parquet")) if n != 6], np.float32), values
    )


@pytest.fixture(scope="module")
def bundle_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "bundle"
    make_tiny_bundle().save(folder)
    return str(folder)


def test_predict_command_stops_and_resumes(bundle_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "PIPELINE_CHUNK", 2)
    write_images(tmp_path / "p", 7)
    (tmp_path / "p" / "4.png").write_bytes(b"junk")
    predictions = load(bundle_folder).predict(sorted(map(str, Path("p").iterdir())), 2, "skip")
    iterate_predictions = Predictor.predictions
    monkeypatch.setattr(
        Predictor, "predictions", lambda *given: interrupt_after_two_chunks(iterate_predictions(*given))
    )
    words = ["predict", bundle_folder, "p", "--out", "x.jsonl", "--top", "2"]
    stopped = run_cli(*words)
    assert stopped.returncode == 130 and len(Path("x.jsonl").read_text().splitlines()) == 4
    monkeypatch.setattr(Predictor, "predictions", iterate_predictions)
    refused = run_cli(*words)
    assert refused.returncode == 2 and "--resume" in refused.stderr
    result = run_cli(*words, "--resume", "--json")
    summary = json.loads(result.stdout)
    assert (
        result.returncode == 3
        and (summary["images"], summary["unreadable"]) == (7, 1)
        and "x.jsonl already contains 4 images" in result.stderr
    )
    lines = [json.loads(line) for line in Path("x.jsonl").read_text().splitlines()]
    assert lines == [ClassFormat().to_dict(prediction) for prediction in predictions]
    again = run_cli(*words, "--resume")
    assert again.returncode == 3 and "x.jsonl is complete: 7 images" in again.stderr
    assert run_cli("predict", bundle_folder, "p", "--resume").returncode == 2
    assert run_cli("predict", bundle_folder, "p", "--out", "x.jsonl", "--top", "1", "--resume").returncode == 2
    assert run_cli("predict", bundle_folder, "p", "--out", "y.jsonl", "--bad-images", "stop").returncode == 3
    assert [json.loads(line)["path"] for line in Path("y.jsonl").read_text().splitlines()] == [
        row.path for row in predictions[:4]
    ]


def interrupt_after_two_chunks(chunks):
    """Yield two chunks, then raise KeyboardInterrupt."""
    yield from islice(chunks, 2)
    raise KeyboardInterrupt


def test_embed_command_matches_python(bundle_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = write_images(tmp_path / "p", 3)
    result = run_cli("embed", bundle_folder, *files)
    assert result.returncode == 0, result.stderr
    with np.load("embeddings.npz") as archive:
        assert archive["paths"].tolist() == files and np.array_equal(
            archive["embeddings"], load(bundle_folder).embed(files)
        )
    shutil.copytree(bundle_folder, tmp_path / "copy")
    assert run_cli("embed", bundle_folder, *files, "--out", "x.csv").returncode == 2
    assert run_cli("embed", bundle_folder, *files, "--precision", "int8", "--engine", "openvino").returncode == 2


def test_csv_option_writes_all_ranks(bundle_folder, tmp_path):
    files = write_images(tmp_path, 2)
    result = run_cli("predict", bundle_folder, *files, "--csv", str(tmp_path / "x.csv"), "--top", "4")
    assert result.returncode == 0 and "0.png" in result.stdout
    rows = list(csv.reader((tmp_path / "x.csv").read_text().splitlines()))
    assert rows[0] == ["path", "rank", "class", "probability", "error", "unsure"] and len(rows) == 9
    assert {row[2] for row in rows[1:]} == {name if name[0] != "=" else f"'{name}" for name in CLASSES}


@pytest.mark.slow
def test_memory_is_independent_of_the_number_of_images(bundle_folder, tmp_path):
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(out, "PNG")
    peaks = []
    for count in (300, 1500):
        archive_path = str(tmp_path / f"{count}.tar")
        with tarfile.open(archive_path, "w") as archive:
            for index in range(count):
                member = tarfile.TarInfo(f"some/folder/of/images/{index:08}.png")
                member.size = out.tell()
                out.seek(0)
                archive.addfile(member, out)
        predictor = load(bundle_folder)
        format = predictor.prediction_format(4)
        job = OutputFile(f"{archive_path}.jsonl", ClassFormat(), JOB_OPTIONS)
        tracemalloc.start()
        for rows in predictor.predictions(job.remaining(iter(resolve_image_source([archive_path]))), format):
            job.add(rows)
        job.finish()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert job.num_rows == count
    assert peaks[1] < peaks[0] + 300_000, peaks  # 1200 predictions alone would take more than 600,000 bytes
