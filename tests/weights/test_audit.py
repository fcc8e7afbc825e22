"""Audit of the package's source: functions that could execute loaded data are used only in the files listed here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent.parent / "vitreous"
PACKAGE_FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}

#: modules and functions that may be used only in these files; an empty set allows no file
ALLOWED_FILES = {
    "torch.load": {"weights/unpickle.py"},
    "torch.export.load": {"apps/export/formats.py"},  # verifies a file right after exporting it
    "pickletools": {"weights/pickled.py"},  # parses the instructions of a pickle without executing them
    "pickle": {"weights/pickled.py"},  # executes scanned instructions, with each name replaced by a description
}
FORBIDDEN_CALLS = {"eval", "exec", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    *(
        "torch.load",
        "torch.jit.load",
        "torch.export.load",
        "torch.hub.load",
        "torch.package.PackageImporter",
        "torch.classes.load_library",
    ),
    *(
        "os.system",
        "os.popen",
        "yaml.load",
        "yaml.load_all",
        "yaml.unsafe_load",
        "yaml.full_load",
        "numpy.load",
        "np.load",
    ),
    *("torch.serialization.add_safe_globals", "shutil.unpack_archive", "importlib.util.spec_from_file_location"),
}
FORBIDDEN_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "shelve",
    "marshal",
    "pickletools",
}
FORBIDDEN_METHODS = {"extractall", "extract", "unsafe_load", "find_class"}


def find_dangerous_names(tree: ast.AST) -> set[str]:
    """Return the dangerous modules and functions that a source uses."""
    names_found, alias = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                alias[name.asname or name.name.split(".")[0]] = name.name if name.asname else name.name.split(".")[0]
                names_found |= {name.name.split(".")[0]} & FORBIDDEN_MODULES
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names_found |= {node.module.split(".")[0]} & FORBIDDEN_MODULES
            for name in node.names:
                alias[name.asname or name.name] = f"{node.module}.{name.name}"
    safe_loads = [  # numpy loads with `allow_pickle=False` are safe
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and any(ast.unparse(keyword) == "allow_pickle=False" for keyword in node.keywords)
    ]
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)):
            head, dot, attributes = ast.unparse(node).partition(".")
            full = alias.get(head, head) + dot + attributes
            names_found |= {full} & FORBIDDEN_ATTRIBUTES - ({"numpy.load"} if id(node) in safe_loads else set())
            if isinstance(node, ast.Name):
                names_found |= {node.id} & FORBIDDEN_CALLS
            elif node.attr in FORBIDDEN_METHODS:
                names_found.add(node.attr)
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                is_disabled = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in ("allow_pickle", "shell", "trust_remote_code") and not is_disabled:
                    names_found.add(f"{keyword.arg}=True")
                if keyword.arg == "weights_only" and ast.unparse(keyword.value) != "True":
                    names_found.add("weights_only=False")
    return names_found


@pytest.mark.parametrize("folder", sorted({name.partition("/")[0] for name in PACKAGE_FILES}))
def test_no_file_executes_loaded_data(folder):
    for name, path in PACKAGE_FILES.items():
        if name.partition("/")[0] == folder:
            names_found = find_dangerous_names(ast.parse(path.read_text("utf-8")))
            assert not {finding for finding in names_found if name not in ALLOWED_FILES.get(finding, set())}, name


def test_torch_load_uses_weights_only():
    tree = ast.parse(PACKAGE_FILES["weights/unpickle.py"].read_text("utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"]
    assert [{k.arg: ast.unparse(k.value) for k in call.keywords}["weights_only"] for call in calls] == ["True"]


@pytest.mark.parametrize(
    "source,name",
    [
        ("import pickle", "pickle"),
        ("from pickle import loads as read", "pickle"),
        ("import torch as t\nt.load('x')", "torch.load"),
        ("from torch import load\nload('x', weights_only=True)", "torch.load"),
        ("import torch\nread = torch.load", "torch.load"),
        ("import torch\ntorch.jit.load('x')", "torch.jit.load"),
        ("from torch import jit\njit.load('x')", "torch.jit.load"),
        ("from torch.export import load\nload('x')", "torch.export.load"),
        ("f(allow_pickle=True)", "allow_pickle=True"),
        ("f(allow_pickle=yes)", "allow_pickle=True"),
        ("f('ls', shell=True)", "shell=True"),
        ("f(weights_only=False)", "weights_only=False"),
        ("eval('1')", "eval"),
        ("run = exec", "exec"),
        ("import yaml\nyaml.load(x)", "yaml.load"),
        ("from os import system\nsystem('ls')", "os.system"),
        ("archive.extractall()", "extractall"),
        ("import numpy as np\nnp.load('x')", "numpy.load"),
        ("eval('1', allow_pickle=False)", "eval"),
    ],
)
def test_the_audit_detects_dangerous_code(source, name):
    assert name in find_dangerous_names(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "re.compile('x')",
        "f(allow_pickle=False)",
        "import numpy\nnumpy.load(x, allow_pickle=False)",
        "yaml.safe_load(x)",
        "import zipfile",
    ],
)
def test_the_audit_lets_the_harmless_pass(source):
    assert find_dangerous_names(ast.parse(source)) == set()
