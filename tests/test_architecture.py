"""The structure of the package: allowed imports between rooms, and size limits."""

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
)  # the guides are 400 lines per file and 60 per function
MAX_LOOP_LINES = 60
MAX_POSITIONAL_PARAMETERS = 4  # maximum positional parameters of a constructor

#: each room may import from its layer's own rooms and from the layers above
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
    },  # these rooms do not import each other
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
    """A file's syntax tree and all its nodes."""
    tree = ast.parse(path.read_text())
    return tree, list(ast.walk(tree))


def list_imports(path: Path) -> set[str]:
    """All modules of the package that a file imports, anywhere in the file."""
    modules = set()
    for node in parse_file(path)[1]:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vitreous":
            modules |= {
                f"{node.module}.{alias.name}" if node.module == "vitreous.nn" else node.module for alias in node.names
            }
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names if alias.name.split(".")[0] == "vitreous"}
    return modules


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
#: one test per room instead of per file: reporting thousands of tests would take longer than running them
in_each_room = pytest.mark.parametrize(
    "files", FILES_BY_ROOM.values(), ids=[name or "package" for name in FILES_BY_ROOM]
)


@in_each_room
def test_imports_follow_the_layers(files):
    for path in files:
        if path.parent == PACKAGE and path.stem.startswith("__"):
            continue
        room = get_room(get_module_name(path))
        for module in list_imports(path):
            imported_room = get_room(module)
            assert module != "vitreous", f"{path} imports the package module, which imports every room"
            assert imported_room == room or get_layer(imported_room) < get_layer(room), (
                f"{get_module_name(path)} ({room}) imports {module} ({imported_room})"
            )


def find_import_cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected components of more than one node (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[set[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for neighbour in graph[node]:
            if neighbour not in order:
                visit(neighbour)
            if neighbour in stack:
                low[node] = min(low[node], low[neighbour])
        if low[node] == order[node]:
            component = set(stack[stack.index(node) :])
            del stack[stack.index(node) :]
            components.extend([component] if len(component) > 1 else [])

    for node in graph:
        if node not in order:
            visit(node)
    return components


def import_graph() -> dict[str, set[str]]:
    """{module: modules it imports}, including lazy and typing-only imports; `from package import module` counts as an
    import of the module."""
    modules = {get_module_name(path): path for path in PACKAGE_FILES}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        targets = list_imports(path)
        for node in parse_file(path)[1]:
            if isinstance(node, ast.ImportFrom) and node.module:
                targets |= {f"{node.module}.{alias.name}" for alias in node.names}
        graph[name] = {target for target in targets if target in modules and target not in (name, "vitreous")}
    return graph


def test_tarjan_finds_only_cycles():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert find_import_cycles(graph) == [{"a", "b", "c"}]


def test_there_are_no_import_cycles():
    assert not find_import_cycles(import_graph())


def test_layers_list_every_room():
    actual_rooms = {get_room(get_module_name(path)) for path in PACKAGE_FILES} - {"", "__main__", "apps"}
    assert sorted(name for rooms in LAYERS for name in rooms) == sorted(actual_rooms)


def test_data_imports_no_model_and_nn_only_torch():
    for path in PACKAGE_FILES:
        room = path.relative_to(PACKAGE).parts[0]
        if room == "data":
            assert not any(get_room(m) in ("models", "nn") for m in list_imports(path)), path
        if room == "nn":
            assert list_libraries(path) <= {"torch", "vitreous", *sys.stdlib_module_names}, path


def test_peer_libraries_are_imported_only_where_allowed():
    for path in PACKAGE_FILES:
        if path.parent == PACKAGE / "apps" / "bench" / "peers" or path == PACKAGE / "models" / "libraries.py":
            continue
        assert not list_libraries(path) & {"timm", "transformers"}, path


@in_each_room
def test_files_and_functions_are_within_size_limits(files):
    for path in files:
        assert len(path.read_text().splitlines()) <= MAX_FILE_LINES, path
        for node in parse_file(path)[1]:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                check_budget(node, f"{get_module_name(path)}: {node.name}")


def check_budget(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> None:
    """Check the number of lines and parameters of a function."""
    assert node.end_lineno - node.lineno + 1 <= MAX_FUNCTION_LINES, f"{name} is too long"
    arguments = [
        a.arg
        for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if a.arg not in ("self", "cls", "ctx")
    ]
    assert len(arguments) <= MAX_PARAMETERS, f"{name} takes {len(arguments)} parameters"
    fields = ("with_options", "transformer_config")  # of a config, as in `dataclasses.replace`
    # the keywords are those of another library
    foreign = ("create_untrained_model", "__call__", "from_pretrained", *fields)
    if name.startswith(("vitreous.nn.", "vitreous.models.")) and node.name not in foreign:
        assert node.args.kwarg is None, f"{name} takes **{node.args.kwarg and node.args.kwarg.arg}"


def is_keyword_only(node: ast.AnnAssign) -> bool:
    """Whether a dataclass field is not a positional parameter: keyword-only, not initialised, or a class variable."""
    call = node.value if isinstance(node.value, ast.Call) else None
    options = {k.arg: getattr(k.value, "value", None) for k in call.keywords} if call else {}
    return options.get("kw_only") is True or options.get("init") is False or "ClassVar" in ast.unparse(node.annotation)


def count_positional_parameters(node: ast.ClassDef) -> tuple[int, bool]:
    """The number of positional parameters of a class's constructor, 0 if inherited, and whether the class is a frozen
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
def list_names_with_many_arguments() -> frozenset[str]:
    """Names that the package calls with more than `MAX_POSITIONAL_PARAMETERS` positional arguments, by the last part of
    the name."""
    calls = (node for path in PACKAGE_FILES for node in parse_file(path)[1] if isinstance(node, ast.Call))
    long = [call.func for call in calls if len(call.args) > MAX_POSITIONAL_PARAMETERS]
    return frozenset(func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in long)


def list_long_constructors(path: Path) -> list[str]:
    """Classes of a file whose constructor has more than `MAX_POSITIONAL_PARAMETERS` positional parameters. A frozen
    dataclass, such as a config, may have more if the package never passes that many."""
    names = []
    for node in parse_file(path)[1]:
        if isinstance(node, ast.ClassDef):
            count, frozen = count_positional_parameters(node)
            if count > MAX_POSITIONAL_PARAMETERS and not (frozen and node.name not in list_names_with_many_arguments()):
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
    counted = [count_positional_parameters(node) for node in ast.parse(code).body]
    assert counted == [(2, False), (1, True), (1, False), (0, False)]


def test_the_training_loop_is_short():
    tree = ast.parse((PACKAGE / "training" / "loop.py").read_text())
    loop = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run_training_loop")
    assert loop.end_lineno - loop.body[1].lineno + 1 <= MAX_LOOP_LINES


@in_each_room
def test_public_objects_have_docstrings(files):
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
            inherited = (
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
            missing = [m.name for m in members if not ast.get_docstring(m) and m.name not in inherited]
            assert not missing, f"{name}: {node.name} has methods without docstrings"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{name}: {node.name} has no docstring"


def test_only_models_check_model_classes():
    """Other rooms use a method or attribute of the config, model or family entry, so that a new family needs one
    entry."""
    families = {"ViT", "BiT", "Swin", "ViTAdapter", "Segmenter", "Detector", "DiT", "ForeignModel"}
    families |= {entry.rpartition(":")[2] for entry in FAMILIES.values()}
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
                assert not names & families, (
                    f"{get_module_name(path)}, line {node.lineno}: use a method of the model instead"
                )


@pytest.mark.parametrize(
    "app", sorted(path.name for path in (PACKAGE / "apps").iterdir() if (path / "__init__.py").exists())
)
def test_every_app_has_a_short_readme(app):
    """The README has the command and the tests, and all files in it exist."""
    app_folder = PACKAGE / "apps" / app
    text = (app_folder / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 45 and "`vitreous " in text and f"`tests/apps/{app}`" in text
    assert (PACKAGE.parent / "tests" / "apps" / app).is_dir()
    names = set(re.findall(r"`([\w/]+\.py)`", text))
    assert names and all((app_folder / name).is_file() or (PACKAGE.parent / name).is_file() for name in names)
    assert all((app_folder / link).exists() for link in re.findall(r"\]\(([^)]+)\)", text))


def list_defined_names(path: Path) -> set[str]:
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
    """Scripts run rarely, so moved names would otherwise be missed until then."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vitreous."):
            path_stem = PACKAGE.parent / node.module.replace(".", "/")
            module = (
                path_stem.with_suffix(".py") if path_stem.with_suffix(".py").is_file() else path_stem / "__init__.py"
            )
            submodules = {file.stem for file in path_stem.glob("*.py")} | {
                file.parent.name for file in path_stem.glob("*/*.py")
            }
            missing = {alias.name for alias in node.names} - list_defined_names(module) - submodules
            assert not missing, f"line {node.lineno}: {node.module} has no {', '.join(sorted(missing))}"
