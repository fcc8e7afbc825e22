"""The public functions as seen by type checkers: classes by name, keywords, and rejected uses."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import vitreous
from tests.keywords import KEYWORDS_FILE, NAMES_FILE, render_file, render_names
from vitreous import keywords
from vitreous.keywords import ModelKeywords
from vitreous.models.config import (
    AttentionConfig,
    BiTConfig,
    DiTConfig,
    HeadConfig,
    MlpConfig,
    NormConfig,
    PositionConfig,
    RegularizationConfig,
    RotaryConfig,
    SwinAttentionConfig,
    SwinConfig,
    SwinMlpConfig,
    SwinNormConfig,
    SwinPositionConfig,
    ViTConfig,
)
from vitreous.models.configs.adapter import AdapterConfig
from vitreous.models.configs.detector import DetectorConfig
from vitreous.models.configs.hybrid import HybridConfig
from vitreous.models.configs.segmenter import SegmenterConfig
from vitreous.models.configs.video import VideoConfig
from vitreous.models.configs.vit_variants import SAMConfig
from vitreous.tasks import documents
from vitreous.tasks.metrics import METRICS
from vitreous.weights.create import TIMM_OPTION_NAMES

ROOT = Path(__file__).parents[1]
#: correct and incorrect uses: `# Type` is the type of the line's expression, `# error` marks a rejected line
TYPED_USES = """\
from typing import reveal_type
import numpy as np
import torch
from PIL import Image
import vitreous
from vitreous.sklearn import VitreousClassifier, VitreousRegressor
photo = Image.new("RGB", (8, 8))
from vitreous.models.config import NormConfig
images = torch.rand(1, 3, 224, 224)
reveal_type(vitreous.create("ViT-B/16"))  # ViT
reveal_type(vitreous.create("vit-b/16", num_classes=3, global_pool="avg", drop_path_rate=0.1))  # ViT
reveal_type(vitreous.create("Swin-T/4"))  # Swin
reveal_type(vitreous.create("BiT-R50x1"))  # BiT
reveal_type(vitreous.create("DiT-S/4"))  # DiT
model = vitreous.create(weights="runs/pets", num_classes=3)
reveal_type(model(images))  # Tensor
reveal_type(model.features(images))  # Tensor
reveal_type(model.num_features)  # int
reveal_type(vitreous.ViT(vitreous.ViTConfig())(images))  # Tensor
vitreous.save(model, "mine", classes=["cat", "dog"])
predictor = vitreous.load("runs/pets", precision="fp32")
reveal_type(predictor.predict("dog.jpg"))  # Prediction | ValuePrediction | ClassMap | ImageObjects
reveal_type(predictor.predict(["dog.jpg"], top=3))  # list[Prediction | ValuePrediction | ClassMap | ImageObjects]
reveal_type(predictor.predict("dog.jpg").names)  # tuple[str, ...]
reveal_type(predictor.segment("dog.jpg"))  # ClassMap
reveal_type(predictor.detect(["dog.jpg"], tiles=True))  # list[ImageObjects]
summary = vitreous.train("photos", epochs=3)
reveal_type(summary.get("val"))  # Metrics | None
reveal_type(vitreous.export("runs/pets")["exports"][0]["bytes"])  # int
VitreousClassifier(epochs=3).fit([photo, photo], ["cat", "dog"]).predict(["dog.jpg"])
VitreousRegressor().fit(np.zeros((2, 8, 8)), [0.5, 1.5])
vitreous.train("photos", epochs=3, model="ViT-S/16", lr_grid=[0.1, 0.2], settings={"optimizer.betas": ["0.9", "0.95"]})
vitreous.evaluate("runs/pets", protocol="knn", k=5, device="cpu")
vitreous.inspect("runs/pets", "dog.jpg", figures="rollout")
vitreous.create_loader("photos", image_size=224, augment=False)
vitreous.create("ViT-B/16", attention={"window": 7}, norm=NormConfig(eps=1e-5))
vitreous.create("ViT-B/16", attention={"windw": 7})  # error
vitreous.create("ViT-B/16", window=7)  # error
vitreous.create("ViT-B/16", num_clases=3)  # error
vitreous.create("ViT-B/16", features_only=True)  # error
vitreous.create("ViT-B/16", pretrained=True)  # error
vitreous.create_model("ViT-B/16")  # error
model(pixel_values=images)  # error
vitreous.load("runs/pets", precision="fp8")  # error
vitreous.train("photos", epoch=3)  # error
vitreous.evaluate("runs/pets", protocl="knn")  # error
vitreous.inspect("runs/pets", figure="rollout")  # error
vitreous.sample("runs/faces", "out.png", guidence=2.0)  # error
vitreous.create_loader("photos", epochs="three")  # error
predictor.predict("dog.jpg", bad_images="ignore")  # error
summary["vall"]  # error
VitreousClassifier(epochs="three")  # error
"""


def test_types_of_the_public_functions(tmp_path):
    if find_spec("pyright") is None:
        pytest.skip("pyright is not installed")
    (tmp_path / "uses.py").write_text(TYPED_USES)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)], "typeCheckingMode": "basic"}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "uses.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    findings = json.loads(done.stdout)["generalDiagnostics"]
    by_line = {finding["range"]["start"]["line"]: finding for finding in findings}
    lines = TYPED_USES.splitlines()
    refused = {index for index, finding in by_line.items() if finding["severity"] == "error"}
    assert refused == {index for index, line in enumerate(lines) if line.endswith("# error")}
    revealed = {index: line.rpartition("# ")[2] for index, line in enumerate(lines) if line.startswith("reveal_type")}
    assert {n: by_line[n]["message"].rpartition(" is ")[2].strip('"') for n in revealed} == revealed


MODEL_CONFIGS = (ViTConfig, HybridConfig, SAMConfig, VideoConfig, BiTConfig, SwinConfig, DiTConfig)
MODEL_CONFIGS += (AdapterConfig, SegmenterConfig, DetectorConfig)


def test_generated_keywords_are_up_to_date():
    """Compared as syntax trees, because the files are formatted by a tool that these tests do not require."""
    for path, rendered in ((KEYWORDS_FILE, render_file()), (NAMES_FILE, "\n".join(render_names()))):
        stored, generated = (ast.dump(ast.parse(text)) for text in (path.read_text("utf-8"), rendered))
        assert stored == generated, "run `python -m tests.keywords`"


def test_keywords_of_models_are_the_fields_of_their_configs():
    fields = {field.name for config_class in MODEL_CONFIGS for field in dataclasses.fields(config_class)}
    fields -= {"family", "image", "classes", "channels", "backbone"}
    fields |= set(TIMM_OPTION_NAMES) - {"patch"} | {"axial", "first_norm", "global_pool", "pretrained"}
    assert set(ModelKeywords.__annotations__) == fields


KEYWORD_GROUPS = {
    "positions": (keywords.PositionKeywords, (PositionConfig, SwinPositionConfig)),
    "attention": (keywords.AttentionKeywords, (AttentionConfig, SwinAttentionConfig)),
    "rotary": (keywords.RotaryKeywords, (RotaryConfig,)),
    "mlp": (keywords.MlpKeywords, (MlpConfig, SwinMlpConfig)),
    "norm": (keywords.NormKeywords, (NormConfig, SwinNormConfig)),
    "head": (keywords.HeadKeywords, (HeadConfig,)),
    "regularization": (keywords.RegularizationKeywords, (RegularizationConfig,)),
}


@pytest.mark.parametrize("group", KEYWORD_GROUPS)
def test_keywords_of_groups_are_the_fields_of_the_groups(group):
    keywords_class, configs = KEYWORD_GROUPS[group]
    assert set(keywords_class.__annotations__) == {
        field.name for config in configs for field in dataclasses.fields(config)
    }


def test_the_wheel_is_marked_as_typed():
    assert (ROOT / "vitreous" / "py.typed").is_file()


#: rooms in which every function must be typed, as in pyright's strict mode
STRICT_ROOMS = {"vitreous/nn", "vitreous/models", "vitreous/objectives", "vitreous/inference", "vitreous/tasks"}
#: public classes that are not attributes of `vitreous`, by module
PUBLIC_CLASSES = {
    "vitreous.inference.predict": ("Predictor",),
    "vitreous.jobs.loader": ("BatchLoader",),
    "vitreous.sklearn": ("VitreousClassifier", "VitreousRegressor", "VitreousEmbedder"),
}


def test_rooms_are_checked_strictly():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pyright"]
    assert set(settings["strict"]) >= STRICT_ROOMS and "vitreous" in settings["include"]
    assert settings["reportAttributeAccessIssue"] == "error"
    switched_off = {name for name, value in settings.items() if value in (False, "none") and name.startswith("report")}
    assert not switched_off
    files = [path for room in STRICT_ROOMS for path in (ROOT / room).rglob("*.py")]
    assert not [path for path in files if re.search(r"# pyright: (basic|standard|report)", path.read_text("utf-8"))]


def iterate_signatures(module: str, name: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The public functions or methods of this name in a module, including overloads and methods of its base classes
    there."""
    body = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8")).body
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            yield name, node
        elif isinstance(node, ast.ClassDef) and node.name == name:
            methods = [method for method in node.body if isinstance(method, ast.FunctionDef)]
            yield from (
                (f"{name}.{member.name}", member)
                for member in methods
                if member.name == "__init__" or member.name[0] != "_"
            )
            for base in node.bases:
                yield from iterate_signatures(module, ast.unparse(base).partition("[")[0])


PUBLIC_NAMES = [(home, name) for name, home in vitreous._MODULES.items()]
PUBLIC_NAMES += [(home, name) for home, names in PUBLIC_CLASSES.items() for name in names]


@pytest.mark.parametrize(("module", "name"), PUBLIC_NAMES)
def test_public_signatures_are_typed_without_any(module, name):
    signatures = list(iterate_signatures(module, name))
    assert signatures or name == "ViTConfig"
    for label, function in signatures:
        arguments = function.args
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        untyped = [
            parameter.arg
            for parameter in parameters
            if parameter is not None and parameter.annotation is None and parameter.arg not in ("self", "cls")
        ]
        assert not untyped and function.returns is not None, label
        annotations = [
            parameter.annotation
            for parameter in parameters
            if parameter is not None and parameter.annotation is not None
        ]
        type_names = {
            node.id
            for parameter in (*annotations, function.returns)
            for node in ast.walk(parameter)
            if isinstance(node, ast.Name)
        }
        assert "Any" not in type_names, label


def test_metric_documents_have_every_metric():
    assert documents.Metrics.__annotations__.keys() == METRICS.keys() | {
        "images",
        "unreadable",
        "interval",
        "primary",
        "better",
    }
