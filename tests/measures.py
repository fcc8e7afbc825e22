"""Measure the structure of the package: `python -m tests.measures`, or `make measures`.

Lower is better for each measure. `measures.json` in this folder has the committed values, and `tests/test_measures.py`
fails if one rises; `--write` stores the values of the working tree.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "vitreous"
MEASURES_FILE = Path(__file__).with_suffix(".json")
#: verbs of the field that may be a complete function name, with the argument or class as the object
FIELD_VERBS = frozenset(
    [
        "forward",
        "backward",
        "train",
        "eval",
        "step",
        "update",
        "close",
        "run",
        "main",
        "build",
        "setup",
        "fit",
        "predict",
        "load",
        "save",
        "reset",
        "flush",
        "write",
        "read",
        "softmax",
        "patchify",
        "unpatchify",
        "export",
        "evaluate",
        "inspect",
        "serve",
        "sample",
        "embed",
        "push",
        "soup",
        "convert",
        "create",
        "resize",
        "rotate",
        "crop",
        "normalize",
        "stack",
    ]
)
#: attributes that depend on the task of a model or dataset
TASK_ATTRIBUTES = frozenset(("multilabel", "pixel_classes", "object_classes", "of_clips", "native", "buckets"))
SMALL_FILE = 60  # lines
MAX_POSITIONAL_ARGUMENTS = 5  # arguments of a call of our own functions
# also methods of PyTorch and Pillow, whose calls are not counted
FOREIGN_NAMES = frozenset(("adamw", "transpose", "view"))
#: prints the number of files between `vitreous predict` and the logits: those on the threads' stacks when the model is
#: called, and those with functions that are called once more for each further image before that
TRACE_SCRIPT = """
    import contextlib, io, sys, tempfile, threading
    from collections import Counter
    from pathlib import Path
    import torch
    from PIL import Image
    import vitreous.models.vit as vit
    from vitreous.cli.main import main
    from vitreous.data.modalities.images import ImagePreprocess
    from vitreous.models.config import MlpConfig, ViTConfig
    from vitreous.weights.bundle import Bundle
    from vitreous.tasks.classification import Classification
    home = Path(tempfile.mkdtemp())
    config = ViTConfig(image=(16, 16), patch=(8, 8), width=32, depth=1, heads=1, mlp=MlpConfig(64), classes=2)
    Bundle(vit.ViT(config), Classification(("a", "b")), ImagePreprocess((16, 16))).save(home / "model")
    images = [str(home / f"{number}.png") for number in range(40)]
    for image in images:
        Image.new("RGB", (16, 16)).save(image)
    calls, stacks = Counter(), set()

    def name_of(frame):
        return frame.f_code.co_filename.rpartition("/vitreous/")[2] if "/vitreous/" in frame.f_code.co_filename else ""

    def note_call(frame, event, argument):
        if event != "call" or not (name := name_of(frame)):
            return
        calls[name, frame.f_code.co_qualname] += not stacks
        if frame.f_code.co_qualname == "ViT.forward":
            for frame in sys._current_frames().values():
                while frame := frame.f_back:
                    stacks.add(name_of(frame))

    def predict(count):
        calls.clear(), stacks.clear()
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            main(["predict", str(home / "model"), *images[:count], "--engine", "torch", "--precision", "fp32"])
        return Counter(calls)

    threading.setprofile(note_call)
    sys.setprofile(note_call)
    predict(1)  # imports what is imported lazily, and starts threads
    few, many = predict(2), predict(40)
    sys.setprofile(None)
    files = {name for name, function in many if many[name, function] >= few[name, function] + 38} | stacks - {""}
    print(*sorted(files), file=sys.stderr)
    print(len([name for name in files if name.partition("/")[0] not in ("models", "nn", "__main__.py")]))
"""


@cache
def parse_package() -> dict[Path, ast.Module]:
    """Parse every file of the package."""
    return {path: ast.parse(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def list_module_functions() -> list[str]:
    """Names of the module-level functions, without leading underscores."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        node.name.lstrip("_") for tree in parse_package().values() for node in tree.body if isinstance(node, functions)
    ]


def list_one_word_names() -> list[str]:
    """Module-level functions named by one word that is not a verb of the field."""
    return [name for name in list_module_functions() if "_" not in name and name not in FIELD_VERBS]


def compute_one_word_share() -> float:
    """Module-level functions with a one-word name, in percent."""
    return round(100 * len(list_one_word_names()) / len(list_module_functions()), 1)


def compute_participle_share() -> float:
    """Module-level functions named by a bare participle, in percent."""
    participles = [name for name in list_one_word_names() if name.endswith(("ed", "en", "wn", "ing"))]
    return round(100 * len(participles) / len(list_module_functions()), 1)


def count_files() -> int:
    """Files of the package."""
    return len(parse_package())


def count_small_files() -> int:
    """Files with fewer than 60 lines, except `__init__.py`."""
    paths = (path for path in parse_package() if path.name != "__init__.py")
    return sum(len(path.read_text("utf-8").splitlines()) < SMALL_FILE for path in paths)


def count_top_level_files() -> int:
    """Files directly in the package."""
    return len(list(PACKAGE.glob("*.py")))


def count_lines() -> int:
    """Lines of the package."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in parse_package())


def count_family_checks() -> int:
    """Checks of a model's family outside models/ and weights/formats/: comparisons of a config's `family`, and
    `isinstance` checks with a config of models/configs/."""
    trees = (tree for path, tree in parse_package().items() if not is_family_room(path.relative_to(PACKAGE)))
    return sum(is_family_test(node) for tree in trees for node in ast.walk(tree))


def is_family_room(path: Path) -> bool:
    """Whether a file of the package may depend on families."""
    return path.parts[0] == "models" or path.parts[:2] == ("weights", "formats")


def is_family_test(node: ast.AST) -> bool:
    """Whether a node compares a config's `family`, or checks whether an object is a config of a family."""
    if isinstance(node, ast.Compare):
        return any(is_family(side) for side in (node.left, *node.comparators))
    if not isinstance(node, ast.Call) or get_called_name(node) != "isinstance":
        return False
    names = {inner.id for inner in ast.walk(node.args[1]) if isinstance(inner, ast.Name)}
    return not names.isdisjoint(list_config_names())


def is_family(node: ast.expr) -> bool:
    """Whether an expression is the family of a config: `config.family`, `getattr(config, "family", "")`."""
    if isinstance(node, ast.Call) and get_called_name(node) == "getattr" and len(node.args) > 1:
        return ast.unparse(node.args[1]) == "'family'"
    return isinstance(node, ast.Attribute) and node.attr == "family"


@cache
def list_config_names() -> frozenset[str]:
    """Names of the model configs."""
    folder = PACKAGE / "models" / "configs"
    trees = (tree for path, tree in parse_package().items() if path.parent == folder)
    classes = (node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return frozenset(name for name in classes if name.endswith("Config"))


def count_task_checks() -> int:
    """Checks of the task or modality outside tasks/: conditions that read a task attribute, and nodes found by
    `is_task_test` anywhere."""
    rooms = {path: path.relative_to(PACKAGE).parts[0] for path in parse_package()}
    trees = [tree for path, tree in parse_package().items() if rooms[path] != "tasks"]
    conditions = sum(reads_task_attribute(condition) for tree in trees for condition in iterate_conditions(tree))
    return conditions + sum(is_task_test(node) for tree in trees for node in ast.walk(tree))


def iterate_conditions(tree: ast.Module) -> Iterator[ast.expr]:
    """The conditions of a file: in statements, expressions, comprehensions and assertions."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs


def reads_task_attribute(condition: ast.expr) -> bool:
    """Whether a condition reads one of `TASK_ATTRIBUTES`."""
    nodes = ast.walk(condition)
    return any(isinstance(node, ast.Attribute) and node.attr in TASK_ATTRIBUTES for node in nodes)


def is_task_test(node: ast.AST) -> bool:
    """Whether a node compares a task's name, checks for a class of tasks/, or checks for an attribute of some tasks:
    `task.name == "detection"`, `isinstance(task, Detection)`, `getattr(task, "masks", False)`."""
    if isinstance(node, ast.Compare):
        return any(is_task_name(side) for side in (node.left, *node.comparators))
    if not isinstance(node, ast.Call):
        return False
    if get_called_name(node) == "isinstance":
        names = {inner.id for inner in ast.walk(node.args[1]) if isinstance(inner, ast.Name)}
        return not names.isdisjoint(list_task_names())
    if get_called_name(node) in ("getattr", "hasattr"):
        return is_task(node.args[0]) or ast.unparse(node.args[1]).strip("'") in TASK_ATTRIBUTES
    return False


def is_task(node: ast.expr) -> bool:
    """Whether an expression is a task: `task`, `bundle.task`, `task_of(config)`."""
    if isinstance(node, ast.Call):
        return get_called_name(node) in ("task_of", "read_task", "task_from_json")
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")) == "task"


def is_task_name(node: ast.expr) -> bool:
    """Whether an expression is the name of a task: `bundle.task.name`, `Detection.name`."""
    if not isinstance(node, ast.Attribute) or node.attr not in ("name", "primary", "endpoint", "verb"):
        return False
    return is_task(node.value) or (isinstance(node.value, ast.Name) and node.value.id in list_task_names())


@cache
def list_task_names() -> frozenset[str]:
    """Names of the tasks: classes of tasks/ derived from `Task`."""
    trees = (tree for path, tree in parse_package().items() if path.parent == PACKAGE / "tasks")
    classes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return frozenset(node.name for node in classes if "Task" in {ast.unparse(base) for base in node.bases})


def count_long_positional_calls() -> int:
    """Calls of the package's functions and classes with more than five positional arguments, except functions with
    `*args`."""
    calls = (node for tree in parse_package().values() for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = list_defined_names() - list_variadic_names() - FOREIGN_NAMES
    return sum(len(call.args) > MAX_POSITIONAL_ARGUMENTS and get_called_name(call) in names for call in calls)


@cache
def list_variadic_names() -> frozenset[str]:
    """Names of the package's functions and methods with `*args`."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for tree in parse_package().values() for node in ast.walk(tree))
    return frozenset(node.name for node in nodes if isinstance(node, functions) and node.args.vararg)


@cache
def list_defined_names() -> frozenset[str]:
    """Names of all functions, methods and classes of the package."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = (node for tree in parse_package().values() for node in ast.walk(tree))
    return frozenset(node.name for node in nodes if isinstance(node, definitions))


def get_called_name(call: ast.Call) -> str:
    """The last part of a called name: `f` of `module.f(x)`, "" for other expressions."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def get_max_imports() -> int:
    """The number of modules of the package imported by its most dependent file, lazy imports included; the public
    module is excluded."""
    trees = ((path, tree) for path, tree in parse_package().items() if path != PACKAGE / "__init__.py")
    return max(len(list_imported_modules(tree)) for _, tree in trees)


def list_imported_modules(tree: ast.Module) -> set[str]:
    """Modules of the package that a file imports."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {node.module for node in nodes if node.module and node.module.startswith("vitreous.")}


def count_ignore_comments() -> int:
    """Comments that silence a type checker."""
    marks = re.compile(r"# (type|pyright): ignore")
    return sum(len(marks.findall(path.read_text("utf-8"))) for path in parse_package())


def count_predict_files() -> int:
    """Files outside models/ and nn/ between `vitreous predict` and the logits, as counted by `TRACE_SCRIPT`."""
    command = [sys.executable, "-c", textwrap.dedent(TRACE_SCRIPT)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return int(result.stdout.split()[-1])


MEASURES: dict[str, Callable[[], float]] = {
    "files": count_files,
    "files below 60 lines": count_small_files,
    "files at the top of the package": count_top_level_files,
    "lines": count_lines,
    "function names of one word, %": compute_one_word_share,
    "function names that are participles, %": compute_participle_share,
    "tests of the model family outside models/ and weights/": count_family_checks,
    "tests of the task outside tasks/": count_task_checks,
    "calls with more than five positional arguments": count_long_positional_calls,
    "imports of the most dependent file": get_max_imports,
    "files between `vitreous predict` and the logits": count_predict_files,
    "type: ignore comments": count_ignore_comments,
}


def main() -> None:
    """Print every measure with its committed value."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the values")
    arguments = parser.parse_args()
    committed = json.loads(MEASURES_FILE.read_text("utf-8")) if MEASURES_FILE.is_file() else {}
    values = {name: measure() for name, measure in MEASURES.items()}
    for name, value in values.items():
        print(f"{name:58} {value:>9,}   committed {committed.get(name, '-')}")
    if arguments.write:
        MEASURES_FILE.write_text(json.dumps(values, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
