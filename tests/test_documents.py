"""The page of JSON documents compared with the documents."""

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from vitreous.apps.server.openapi import DOCUMENT_SCHEMAS
from vitreous.tasks import documents
from vitreous.tasks.metrics import METRICS

PAGE = (Path(__file__).parents[1] / "docs" / "reference" / "documents.md").read_text("utf-8")
CLASSES = {node.name: node for node in ast.parse(inspect.getsource(documents)).body if isinstance(node, ast.ClassDef)}
JSON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "object": "any", "Row": "object"}


def read_section(title: str) -> dict[str, list[str]]:
    """Read the table of a section: the other cells of a row by each of its keys."""
    (section,) = re.findall(rf"^### {re.escape(title)}\n(.*?)(?=^#)", PAGE, re.MULTILINE | re.DOTALL)
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {key: cells for key_cell, *cells in rows[1:] for key in re.findall(r"`([^`]+)`", key_cell)}


def to_json_type(node: ast.expr) -> str:
    """Convert an annotation to the type in the page."""
    if isinstance(node, ast.Name):
        return f"[{node.id}](#{node.id.lower()})" if node.id in CLASSES else JSON_TYPES[node.id]
    if isinstance(node, ast.BinOp):
        return f"{to_json_type(node.left)} or {to_json_type(node.right)}"
    if isinstance(node, ast.Constant):
        return "null"
    assert isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if node.value.id == "Literal":
        return " or ".join(f"`{ast.literal_eval(part)}`" for part in parts)
    names = [to_json_type(part) for part in parts]
    if node.value.id in ("dict", "Mapping"):
        return "object" if names[1] == "any" else f"object of {names[1]}"
    return names[0] if node.value.id == "NotRequired" else f"array of {' and '.join(names)}"


def to_schema_text(schema: Any) -> str:
    """Convert the short form of a schema in `DOCUMENT_SCHEMAS` to the type in the page."""
    if isinstance(schema, dict):
        return schema["type"] if isinstance(schema.get("type"), str) and len(schema) < 4 else "object"
    if isinstance(schema, list):
        return f"array of {to_schema_text(schema[0])}"
    if isinstance(schema, tuple):
        return " or ".join(map(to_schema_text, schema))
    return "null" if schema is None else str(schema)


@pytest.mark.parametrize("name", CLASSES)
def test_the_page_has_the_keys_and_types_of_a_document(name):
    fields = {
        field.target.id: to_json_type(field.annotation)
        for field in CLASSES[name].body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    section = read_section(name)
    assert {key: cells[0] for key, cells in section.items()} == fields
    assert all(cells[-1] for cells in section.values())


def test_the_page_explains_each_metric():
    section = read_section("Metrics")
    assert {key: section[key][2] for key in METRICS} == {key: metric.explanation for key, metric in METRICS.items()}
    assert all(section[key][1] == "0 to 1" for key, metric in METRICS.items() if metric.is_share)


def test_the_page_has_the_documents_of_the_http_api():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.partition("## HTTP API")[2], re.MULTILINE))
    assert rows == {
        name: ", ".join(f"`{key}` ({to_schema_text(one)})" for key, one in fields.items())
        for name, fields in DOCUMENT_SCHEMAS.items()
    }


def check_keys(title: str, found: dict[str, Any], optional: frozenset[str] = frozenset()) -> None:
    """Check that a document has the keys of the page."""
    assert found.keys() - optional == read_section(title).keys() - optional, title


def test_documents_of_a_dataset(tmp_path):
    from PIL import Image

    from vitreous.apps.curation.check import check_dataset
    from vitreous.apps.curation.pack import pack_dataset
    from vitreous.cli.console import Console
    from vitreous.cli.data_dedup import Options, run

    for number in range(8):
        path = tmp_path / "photos" / "train" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((24, 24), 20 + 20 * number).save(path)
    photos = str(tmp_path / "photos")
    document, _ = check_dataset(photos, workers=0, image_size=16)
    check_keys("data check", document)
    assert {"level", "code", "message", "hint"} == document["findings"][0].keys()
    check_keys("data dedup", run(Options(data=photos, within=True, out=str(tmp_path / "o.csv"), workers=0), Console()))
    check_keys("data pack", pack_dataset(photos, tmp_path / "pack", workers=0), frozenset({"out"}))


def test_documents_of_commands_without_data():
    from vitreous.cli.console import Console
    from vitreous.cli.models import Options as ModelOptions
    from vitreous.cli.models import run as list_models
    from vitreous.cli.recipes import Options as RecipeOptions
    from vitreous.cli.recipes import run as list_recipes
    from vitreous.system.machine import describe_environment

    check_keys("models", list_models(ModelOptions(pattern="ViT-Ti/16"), Console())["models"][0])
    check_keys("recipes", list_recipes(RecipeOptions(), Console())["recipes"][0])
    keys = list(read_section("doctor"))
    assert list(describe_environment()) == keys[: keys.index("cuda") + 1]


def test_files_of_a_run(tmp_path):
    import vitreous

    options: dict[str, Any] = {"model": "ViT-16x1/8", "steps": 2, "batch_size": 16, "workers": 0, "device": "cpu"}
    summary = vitreous.train("digits", out=tmp_path / "run", keep_best=True, progress=False, **options)
    assert summary.keys() == read_section("RunSummary").keys() - {"lr_grid"}
    assert summary["selection"] is not None
    check_keys("selection", dict(summary["selection"]))
    check_keys("data.json", json.loads((tmp_path / "run" / "data.json").read_text()))
    check_keys("model.json", json.loads((tmp_path / "run" / "model" / "model.json").read_text()))
    known = {key for key in read_section("metrics.jsonl") if "/" not in key}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {key for line in lines for key in line if not key.startswith(("train/", "val/"))} == known
    document = vitreous.evaluate(tmp_path / "run", "digits", workers=0)
    unset = {"steps", "epochs", "seed", "exaflops", "flops_utilisation", "peak_memory_bytes"}
    assert document.keys() - unset == read_section("EvaluationDocument").keys() - {"clip_views", "protocol", "results"}
    assert document["evaluations"][0].keys() == read_section("EvaluationEntry").keys()
    assert document["most_confused"] is None or document["most_confused"].keys() == read_section("most_confused").keys()


#: keys that name nothing, or have a term of the field; pages may have them for their templates
VAGUE_KEYS = frozenset(
    [
        "answer",
        "answers",
        "picture",
        "pictures",
        "judged",
        "told",
        "kept",
        "taken",
        "said",
        "readings",
        "confused",
        "taken_for",
        "chosen_on",
        "leading",
        "bank",
        "feature_deviation",
        "why",
        "what",
        "way",
        "mend",
        "places",
        "place",
        "number_of",
        "made_by",
        "left_out",
        "contrary",
        "tells",
        "can",
    ]
)
PACKAGE = Path(documents.__file__).parents[1]


def test_no_key_of_a_document_is_vague():
    vague = []
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name == "pages" or "peers" in path.parts or path.parent.name == "figures":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            keys = node.keys if isinstance(node, ast.Dict) else ()
            vague += [
                f"{path.relative_to(PACKAGE)}: {key.value}"
                for key in keys
                if isinstance(key, ast.Constant) and key.value in VAGUE_KEYS
            ]
    assert not vague
