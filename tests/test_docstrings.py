"""Public functions document the package's errors that they raise, and the shapes of arrays that they take or return."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.test_architecture import in_each_room

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
ERROR_NAMES = frozenset(
    ("VitreousError", "UsageError", "DataError", "WeightsError", "NonFiniteError", "ResourceError", "Refusal")
)
ARRAY_TYPE = re.compile(r"\b(Tensor|ndarray|NDArray)\b")
#: `(n, K)`, `(n,)`, `(..., D)`: short comma-separated elements; or words such as shape
SHAPE_PATTERN = re.compile(r"\((?:[^(),]{1,16},\s?)+[^(),]{0,16}\)|\bscalars?\b|\b[Ss]hapes?\b")


def iterate_public_functions(body: list[ast.stmt], outer: str = "") -> Iterator[tuple[FunctionNode, str]]:
    """Functions and methods without an underscore, each with its docstring and that of its class."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from iterate_public_functions(node.body, ast.get_docstring(node) or "")
        elif isinstance(node, FunctionNode) and (not node.name.startswith("_") or node.name == "__init__"):
            yield node, f"{ast.get_docstring(node) or ''} {outer}"


def list_raised_errors(function: FunctionNode) -> set[str]:
    """The package's errors that the function raises, nested functions excluded."""
    errors, nodes = set(), list(function.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            callee = node.exc.func
            errors.add(callee.id if isinstance(callee, ast.Name) else getattr(callee, "attr", ""))
        nodes += ast.iter_child_nodes(node)
    return errors & ERROR_NAMES


def has_array(function: FunctionNode) -> bool:
    """Whether a parameter or the result is annotated as an array."""
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    annotations = [argument.annotation for argument in arguments] + [function.returns]
    return any(annotation is not None and ARRAY_TYPE.search(ast.unparse(annotation)) for annotation in annotations)


def list_gaps(text: str) -> list[str]:
    """Errors and shapes missing in the docstrings of a file."""
    missing = []
    for function, docstring in iterate_public_functions(ast.parse(text).body):
        missing += [f"{function.name}: raises {e}" for e in sorted(list_raised_errors(function)) if e not in docstring]
        if has_array(function) and not SHAPE_PATTERN.search(docstring):
            missing.append(f"{function.name}: shapes")
    return missing


@in_each_room
def test_docstrings_give_shapes_and_errors(files: list[Path]):
    for path in files:
        assert not list_gaps(path.read_text()), path


def test_gaps_are_found():
    text = 'class A:\n    """A (n, K) table."""\n    def f(self, x: Tensor) -> None:\n        """F."""\n'
    assert list_gaps(text) == []
    assert list_gaps(text.replace("(n, K)", "(wide or not)")) == ["f: shapes"]
    text = 'async def g():\n    """G. Raises UsageError."""\n    if x:\n        raise UsageError("no")\n'
    assert list_gaps(text) == []
    assert list_gaps(text.replace("Raises UsageError", "Fails")) == ["g: raises UsageError"]
    assert list_gaps("def g():\n    def h():\n        raise DataError('no')\n    return h\n") == []
