"""The structure: which room may import which, and budgets that may only fall."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from vitreous.models.families import FAMILIES

PACKAGE = Path(__file__).parent.parent / "vitreous"
PACKAGE_FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = (
    450,
    75,
    10,
)  # a file of 400 lines and a function of 60 are the guides
MAX_LOOP_LINES = 60
MAX_POSITIONAL_PARAMETERS = 4  # parameters of a constructor that may be given without their names

#: each row may import from itself and from the rows above it
LAYERS = [
    {"errors", "version"},
    {"system"},
    {"config"},
    {"nn.grid", "progress"},
    {"nn"},
    {"models", "data", "generation"},
    {"keywords"},
    {"tasks"},
    {"weights"},
    {"inference"},
    {"evaluation", "inspection"},
    {"objectives"},
    {"training"},
    {"reports"},
    {"recipes"},
    {"jobs"},
    {
        "apps.bench",
        "apps.curation",
        "apps.export",
        "apps.hub",
        "apps.server",
        "apps.studies",
        "sklearn",
    },  # none imports another
    {"cli"},
]


def get_room(module: str) -> str:
    """`vitreous.nn.grid` -> `nn.grid`; `vitreous.training.loop` -> `training`."""
    parts = module.split(".")[1:]
    if parts[:1] == ["apps"]:
        return ".".join(parts[:2])
    return "nn.grid" if parts[:2] in (["nn", "grid"], ["nn", "sizes"]) else parts[0] if parts else ""


def get_layer(name: str) -> int:
    return next(index for index, rooms in enumerate(LAYERS) if name in rooms)


@cache
def parse_file(path: Path) -> tuple[ast.Module, list[ast.AST]]:
    """A file's tree, and every node of it."""
    tree = ast.parse(path.read_text())
    return tree, list(ast.walk(tree))


def list_imports(path: Path) -> set[str]:
    """Every module of this package that a file imports, wherever in the file."""
    found = set()
    for node in parse_file(path)[1]:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vitreous":
            found |= {
                f"{node.module}.{alias.name}" if node.module == "vitreous.nn" else node.module for alias in node.names
            }
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "vitreous"}
    return found


def list_libraries(path: Path) -> set[str]:
    """The top-level package of everything that a file imports, by `import x` or `from x import`."""
    nodes = parse_file(path)[1]
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.split(".")[0] for name in names}


def get_module_name(path: Path) -> str:
    return ".".join(["vitreous", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")


FILES_BY_ROOM = {
    name: [path for path in PACKAGE_FILES if get_room(get_module_name(path)) == name]
    for name in sorted({*map(get_room, map(get_module_name, PACKAGE_FILES))})
}
#: a test for each room rather than for each file: thousands of tests would take longer to report than to run
in_each_room = pytest.mark.parametrize(
    "files", FILES_BY_ROOM.values(), ids=[name or "package" for name in FILES_BY_ROOM]
)


@in_each_room
def test_imports_follow_the_layers(files):
    for path in files:
        if path.parent == PACKAGE and path.stem.startswith("__"):
            continue
        own = get_room(get_module_name(path))
        for module in list_imports(path):
            other = get_room(module)
            assert module != "vitreous", f"{path} imports the package itself, which imports every room"
            assert other == own or get_layer(other) < get_layer(own), (
                f"{get_module_name(path)} ({own}) imports {module} ({other})"
            )


def find_import_cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected components of more than one node (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in graph[node]:
            if other not in order:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == order[node]:
            component = set(stack[stack.index(node) :])
            del stack[stack.index(node) :]
            found.extend([component] if len(component) > 1 else [])

    for node in graph:
        if node not in order:
            visit(node)
    return found


def import_graph() -> dict[str, set[str]]:
    """{module: modules it imports}, lazy and typing-only imports included; `from package import module` is of the
    module."""
    modules = {get_module_name(path): path for path in PACKAGE_FILES}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        targets = list_imports(path)
        for node in parse_file(path)[1]:
            if isinstance(node, ast.ImportFrom) and node.module:
                targets |= {f"{node.module}.{alias.name}" for alias in node.names}
        graph[name] = {target for target in targets if target in modules and target not in (name, "vitreous")}
    return graph


def test_tarjan_finds_a_circle_and_no_more():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert find_import_cycles(graph) == [{"a", "b", "c"}]


def test_there_are_no_import_cycles():
    assert not find_import_cycles(import_graph())


def test_layers_list_every_room():
    there = {get_room(get_module_name(path)) for path in PACKAGE_FILES} - {"", "__main__", "apps"}
    assert sorted(name for rooms in LAYERS for name in rooms) == sorted(there)


def test_data_knows_no_model_and_nn_no_library_but_torch():
    for path in PACKAGE_FILES:
        home = path.relative_to(PACKAGE).parts[0]
        if home == "data":
            assert not any(get_room(m) in ("models", "nn") for m in list_imports(path)), path
        if home == "nn":
            assert list_libraries(path) <= {"torch", "vitreous", *sys.stdlib_module_names}, path


def test_peer_libraries_are_imported_only_where_allowed():
    for path in PACKAGE_FILES:
        if path.parent == PACKAGE / "apps" / "bench" / "peers" or path == PACKAGE / "models" / "libraries.py":
            continue
        assert not list_libraries(path) & {"timm", "transformers"}, path


@in_each_room
def test_budgets(files):
    for path in files:
        assert len(path.read_text().splitlines()) <= MAX_FILE_LINES, path
        for node in parse_file(path)[1]:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                check_budget(node, f"{get_module_name(path)}: {node.name}")


def check_budget(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> None:
    """Check the lines and parameters of a function."""
    assert node.end_lineno - node.lineno + 1 <= MAX_FUNCTION_LINES, f"{name} is too long"
    arguments = [
        a.arg
        for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if a.arg not in ("self", "cls", "ctx")
    ]
    assert len(arguments) <= MAX_PARAMETERS, f"{name} takes {len(arguments)} parameters"
    fields = ("with_options", "transformer_config")  # of a config, as in `dataclasses.replace`
    foreign = ("create_untrained_model", "__call__", "from_pretrained", *fields)  # the keywords are of another library
    if name.startswith(("vitreous.nn.", "vitreous.models.")) and node.name not in foreign:
        assert node.args.kwarg is None, f"{name} takes **{node.args.kwarg and node.args.kwarg.arg}"


def is_keyword_only(node: ast.AnnAssign) -> bool:
    """Whether a field of a dataclass is no positional parameter: keyword-only, not initialised, or of the class."""
    call = node.value if isinstance(node.value, ast.Call) else None
    options = {k.arg: getattr(k.value, "value", None) for k in call.keywords} if call else {}
    return options.get("kw_only") is True or options.get("init") is False or "ClassVar" in ast.unparse(node.annotation)


def positional_parameters(node: ast.ClassDef) -> tuple[int, bool]:
    """How many positional parameters a class's own constructor has, 0 for an inherited one, and whether it is a frozen
    dataclass."""
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            return len(member.args.posonlyargs) + len(member.args.args) - 1, False
    decorator = next((ast.unparse(d) for d in node.decorator_list if "dataclass" in ast.unparse(d)), None)
    if decorator is None or "kw_only=True" in decorator:
        return 0, False
    count = 0
    for member in node.body:
        if isinstance(member, ast.AnnAssign):
            if "KW_ONLY" in ast.unparse(member.annotation):
                break
            count += not is_keyword_only(member)
    return count, "frozen=True" in decorator


@cache
def names_called_with_more() -> frozenset[str]:
    """What the package calls with more positional arguments than `POSITIONAL`, by the last part of its name."""
    calls = (node for path in PACKAGE_FILES for node in parse_file(path)[1] if isinstance(node, ast.Call))
    long = [call.func for call in calls if len(call.args) > MAX_POSITIONAL_PARAMETERS]
    return frozenset(func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in long)


def list_long_constructors(path: Path) -> list[str]:
    """Classes of a file whose constructor takes more than `POSITIONAL` positional parameters. A frozen dataclass may,
    as configs do, if the package never gives it so many."""
    names = []
    for node in parse_file(path)[1]:
        if isinstance(node, ast.ClassDef):
            count, frozen = positional_parameters(node)
            if count > MAX_POSITIONAL_PARAMETERS and not (frozen and node.name not in names_called_with_more()):
                names.append(node.name)
    return names


@in_each_room
def test_constructors_take_four_positional_parameters(files):
    assert not {get_module_name(path): names for path in files if (names := list_long_constructors(path))}


def test_positional_parameters_of_a_constructor_are_counted():
    code = "class A:\n    def __init__(self, a, b, *, c): ...\n"
    code += "@dataclass(frozen=True)\nclass B:\n    a: int\n    x: ClassVar[int] = 1\n    _: KW_ONLY\n    b: int\n"
    code += "@dataclass\nclass C:\n    a: int\n    b: int = field(kw_only=True)\n    c: int = field(init=False)\n"
    code += "@dataclass(kw_only=True)\nclass D:\n    a: int\n"
    counted = [positional_parameters(node) for node in ast.parse(code).body]
    assert counted == [(2, False), (1, True), (1, False), (0, False)]


def test_the_training_loop_is_short():
    tree = ast.parse((PACKAGE / "training" / "loop.py").read_text())
    loop = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run_training_loop")
    assert loop.end_lineno - loop.body[1].lineno + 1 <= MAX_LOOP_LINES


@in_each_room
def test_everything_public_has_a_docstring(files):
    for path in files:
        check_docstrings(*parse_file(path), get_module_name(path))


def check_docstrings(tree: ast.Module, nodes: list[ast.AST], name: str) -> None:
    """Check that a file, its classes, their public methods and its public functions have docstrings."""
    assert ast.get_docstring(tree), f"{name} has no docstring"
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            protocol = any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
            assert ast.get_docstring(node), f"{name}: {node.name} has no docstring"
            members = (
                []
                if protocol
                else [m for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")]
            )
            known = (
                "forward",
                "backward",
                "picture",
                "name",
                "take",
                "update",
                "config",
                "metrics",
                "summary",
                "bundle",
            )
            missing = [m.name for m in members if not ast.get_docstring(m) and m.name not in known]
            assert not missing, f"{name}: {node.name} has methods without docstrings"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{name}: {node.name} has no docstring"


def test_only_models_check_model_classes():
    """Other rooms ask a config, a model or its family's row, so that a new family is one row and not a search."""
    families = {"ViT", "BiT", "Swin", "ViTAdapter", "Segmenter", "Detector", "DiT", "ForeignModel"}
    families |= {row.rpartition(":")[2] for row in FAMILIES.values()}
    for path in PACKAGE_FILES:
        if path.relative_to(PACKAGE).parts[0] == "models" or path.relative_to(PACKAGE).parts[:2] == (
            "weights",
            "formats",
        ):
            continue
        for node in parse_file(path)[1]:
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("isinstance", "type")
            ):
                names = {n.id for argument in node.args for n in ast.walk(argument) if isinstance(n, ast.Name)}
                names |= {n.attr for argument in node.args for n in ast.walk(argument) if isinstance(n, ast.Attribute)}
                assert not names & families, f"{get_module_name(path)}, line {node.lineno}: ask the model instead"


@pytest.mark.parametrize(
    "app", sorted(path.name for path in (PACKAGE / "apps").iterdir() if (path / "__init__.py").exists())
)
def test_every_app_has_a_short_readme(app):
    """It names the command and the tests, and only files that exist."""
    home = PACKAGE / "apps" / app
    text = (home / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 45 and "`vitreous " in text and f"`tests/apps/{app}`" in text
    assert (PACKAGE.parent / "tests" / "apps" / app).is_dir()
    names = set(re.findall(r"`([\w/]+\.py)`", text))
    assert names and all((home / name).is_file() or (PACKAGE.parent / name).is_file() for name in names)
    assert all((home / link).exists() for link in re.findall(r"\]\(([^)]+)\)", text))


def defined_in(path: Path) -> set[str]:
    """Every name that a module defines or imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


SCRIPTS = sorted(path for folder in ("benchmarks", "docs") for path in (PACKAGE.parent / folder).rglob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(PACKAGE.parent).as_posix())
def test_scripts_import_names_that_exist(path):
    """Scripts run rarely: what moved in the package would be missed only then."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vitreous."):
            place = PACKAGE.parent / node.module.replace(".", "/")
            module = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
            submodules = {file.stem for file in place.glob("*.py")} | {
                file.parent.name for file in place.glob("*/*.py")
            }
            missing = {alias.name for alias in node.names} - defined_in(module) - submodules
            assert not missing, f"line {node.lineno}: {node.module} has no {', '.join(sorted(missing))}"
