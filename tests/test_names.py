"""Identifiers are searchable: none is one of the vague words below."""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterator
from pathlib import Path

from tests.test_architecture import PACKAGE_FILES, in_each_room, parse_file

#: vague words; `several` should be multilabel, and a `way` a hint
FORBIDDEN_WORDS = frozenset(
    [
        "found",
        "told",
        "kept",
        "keep_",
        "said",
        "begun",
        "several",
        "came",
        "grown",
        "looking",
        "looked",
        "made",
        "further",
        "there",
        "bare",
        "solo",
        "team",
        "still",
        "hollow",
        "each",
        "what",
        "such",
        "here",
        "those",
        "them",
        "way",
        "far",
        "how",
    ]
)
#: allowed words, with the reason: they are keywords of the public API
PUBLIC_WORDS = {"how": "load(how=), soup(how=): InferenceOptions, documented"}


def iterate_identifiers(tree: ast.AST) -> Iterator[str]:
    """Names that a file defines: functions, classes, parameters, attributes and local variables."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name


@in_each_room
def test_identifiers_name_something(files: list[Path]):
    for path in files:
        vague = {
            name for name in iterate_identifiers(parse_file(path)[0]) if name in FORBIDDEN_WORDS
        } - PUBLIC_WORDS.keys()
        assert not vague, path


def test_every_kind_of_identifier_is_found():
    code = "def found(told, *said):\n    kept = 1\n    self.made = 2\n    for each in x: pass\nclass came: pass\n"
    code += "try: pass\nexcept E as way: pass\nwith a as far: pass\nsome = lambda what: 0\nwhile (there := 0): pass\n"
    assert {*iterate_identifiers(ast.parse(code))} >= {
        "found",
        "told",
        "said",
        "kept",
        "made",
        "each",
        "came",
        "way",
        "far",
        "what",
        "there",
    }


def test_different_functions_have_different_names():
    """`run` is the entry point of each verb's module, `main` that of a process, and `create` has overloads."""
    files_by_name = collections.defaultdict(set)
    for path in PACKAGE_FILES:
        for node in parse_file(path)[1]:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.col_offset == 0:
                files_by_name[node.name].add(path)
    assert {name for name, paths in files_by_name.items() if len(paths) > 1} == {"main", "run"}
