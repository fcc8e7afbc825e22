"""Generate the reference pages of recipes, config.yaml and the HTTP API from the package."""

from __future__ import annotations

import ast
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from plain_text import escape, to_markdown

from vitreous.config import TaggedUnion, get_annotated_hints, get_tagged_union, to_builtins

RECIPES, CONFIG, HTTP = "reference/recipes", "reference/config.md", "reference/http-api.md"
YAML_TYPES: dict[Any, str] = {int: "integer", float: "number", str: "text", bool: "true or false", NoneType: "null"}
#: module of vitreous.recipes -> heading of the table of its recipes, in the order of the page
RECIPE_GROUPS = {
    "ours": "Defaults",
    "pretrain": "ViT paper: training from scratch",
    "finetune": "Fine-tuning from weights",
    "encoder": "Fine-tuning of self-supervised encoders",
    "augreg": "AugReg and plain ViT",
    "deit": "DeiT and DeiT III",
    "vit5": "ViT-5",
    "swin": "Swin Transformer",
    "regression": "Regression",
    "unlabelled": "Self-supervised pre-training",
    "dinov3": "DINOv3 and distillation of features",
    "contrastive": "Images and texts",
    "video": "Video",
    "dense": "Semantic segmentation",
    "detect": "Object detection and instance segmentation",
    "generate": "Image generation",
}


def recipe_pages() -> dict[str, str]:
    """Return path -> content of the pages of recipes: an index, and one page per recipe."""
    from vitreous.recipes.registry import RECIPES as recipes

    pages = {f"{RECIPES}/index.md": recipe_index()}
    return pages | {f"{RECIPES}/{name}.md": recipe_page(name) for name in recipes}


def recipe_index() -> str:
    """Return the index page: a table per group of recipes, with a published result of each recipe."""
    from vitreous.cli.recipes import describe_recipe, format_length
    from vitreous.recipes.registry import RECIPES as recipes
    from vitreous.recipes.registry import build_example_run

    groups: dict[str, list[str]] = {title: [] for title in RECIPE_GROUPS.values()}
    for recipe in recipes.values():
        summary = describe_recipe(recipe, build_example_run(recipe.name))
        published = "; ".join(f"{result} ({model}, {data})" for model, data, result in recipe.published[:1])
        cells = [
            f"[{recipe.name}]({recipe.name}.md)",
            recipe.about,
            format_length(summary),
            f"{summary['lr']:g}",
            published,
        ]
        title = RECIPE_GROUPS[recipe.make.__module__.rpartition(".")[2]]
        groups[title].append(format_row([cells[0], *map(escape, cells[1:])]))
    about = (
        f"{len(recipes)} sets of hyperparameters, most of them as published. `vitreous train DATA --recipe NAME` "
        "trains with one, and every setting can be changed: `--lr 0.001`, `--optimizer.betas 0.9 0.95`. Without "
        "`--recipe`, vitreous chooses one of the defaults from the data. Published results are the authors', not "
        "measured here."
    )
    lines = ["# Training recipes", "", about, ""]
    for title, rows in groups.items():
        titles = ["recipe", "for", "length", "learning rate", "published"]
        lines += [f"## {title}", "", *table_head(titles), *rows, ""]
    return "\n".join(lines)


def recipe_page(name: str) -> str:
    """Return the page of a recipe, as `vitreous recipes NAME` prints it: text, command, models, settings, results."""
    from vitreous.cli.recipes import list_recipe_settings, print_recipe
    from vitreous.recipes.registry import RECIPES as recipes
    from vitreous.recipes.registry import build_example_run

    recipe, document = recipes[name], print_recipe(name, SilentConsole())
    text = re.sub(r"^(vitreous .*)$", r"```text\n\1\n```", to_markdown(recipe.text), flags=re.MULTILINE)
    lines = [f"# Recipe {name}: {escape(recipe.about)}", "", f"Source: {escape(recipe.source)}.", "", text, ""]
    lines += ["## Models", "", *table_head(["model", "pixels", "epochs", "steps", "learning rate"])]
    for row in document["models"]:
        cells = (row["model"], row["image_size"], f"{row['epochs']:.4g}", f"{row['steps']:,}", f"{row['lr']:g}")
        lines.append(format_row(cells))
    run = document["run"]
    lines += ["", f"On {recipe.data}: {run['data']['images']:,} training images.", ""]
    for dataset_type, length in recipe.lengths:
        lines += [
            f"Epochs on other datasets ({dataset_type}): {length.num_samples:,.0f} / training images, {length.text}.",
            "",
        ]
    lines += ["## Settings", "", *table_head(["setting", "value"])]
    lines += [format_row((f"`{path}`", f"`{value}`")) for path, value in list_recipe_settings(build_example_run(name))]
    if recipe.published:
        lines += ["", "## Published results", "", "As published by the authors, not measured here.", ""]
        lines += table_head(["model", "data", "result"]) + [format_row(map(escape, row)) for row in recipe.published]
    return "\n".join(lines) + "\n"


class SilentConsole:
    """A replacement of `Console` that prints nothing."""

    def table(self, *_: Any) -> None:
        """Ignore a table."""

    def print_line(self, *_: Any) -> None:
        """Ignore a line."""


def config_page() -> str:
    """Return the page of config.yaml: every field by its path, with type, default and description."""
    from vitreous.training.run import Run

    about = (
        "The file `config.yaml` determines a run. Each field is also an option of `vitreous train`, by its path: "
        "`--optimizer.betas 0.9 0.95`. The recipe and the data set the fields that you leave out; `vitreous train DATA "
        "--dry-run` prints the result. Where a section has variants, `name` (of models: `family`) selects one."
    )
    lines = ["# Configuration file: config.yaml", "", about, ""]
    described: set[type[Any]] = set()
    for title, config_type in list_config_sections(Run):
        lines += [] if config_type in described else config_section(title, config_type)
        described.add(config_type)
    return "\n".join(lines)


def list_config_sections(config_type: type[Any], path: str = "", variant: str = "") -> Iterator[tuple[str, type[Any]]]:
    """Yield (title, dataclass) of a config, of its nested configs, and of their variants; a class may occur repeatedly.

    `path` is the path of the config in the file, `variant` the variant to which it belongs.
    """
    yield f"{path} {variant}".strip() or "Run", config_type
    for name, hint in get_annotated_hints(config_type).items():
        field_path, union = f"{path}.{name}".strip("."), get_tagged_union(hint)
        if union and not (
            path and name in ("encoder", "backbone")
        ):  # the config of a nested model, whose fields are already listed
            for choice in union.table:
                yield from list_config_sections(union.get_class(choice), field_path, f"({union.key}: {choice})")
        elif is_dataclass(hint) and isinstance(hint, type):
            yield from list_config_sections(hint, field_path, variant)


def config_section(title: str, config_type: type[Any]) -> list[str]:
    """Return the Markdown lines of a dataclass: its docstring, and a table of its fields."""
    hints, comments = get_annotated_hints(config_type), read_field_comments(config_type)
    rows = []
    for field in fields(config_type):
        if field.init:
            value_type = escape(yaml_type(hints[field.name]))
            rows.append(
                (f"`{field.name}`", value_type, format_field_default(field), escape(comments.get(field.name, "")))
            )
    text = to_markdown(inspect.cleandoc(config_type.__doc__ or ""))
    table = [*table_head(["field", "type", "default", "description"]), *map(format_row, rows), ""] if rows else []
    return [f"## {title}", "", text, "", *table]


def read_field_comments(config_type: type[Any]) -> dict[str, str]:
    """Return field name -> description for a dataclass and its bases: the string below the field, or its comment."""
    descriptions: dict[str, str] = {}
    for base in reversed(config_type.__mro__[:-1]):
        if not is_dataclass(base):
            continue
        source = textwrap.dedent(inspect.getsource(base))
        comments = {
            token.start[0]: (token.string.lstrip("#: ").strip(), not token.line[: token.start[1]].strip())
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        (tree,) = ast.parse(source).body
        body = list(getattr(tree, "body", ()))
        for node, following in zip(body, [*body[1:], None], strict=True):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            above, line = [], node.lineno - 1
            while line in comments and comments[line][1]:
                above.insert(0, comments[line][0])
                line -= 1
            same_line = comments.get(node.end_lineno or node.lineno, ("", True))
            text = " ".join(above) if above else ("" if same_line[1] else same_line[0])
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = " ".join(str(following.value.value).split())
            descriptions |= {node.target.id: text} if text else {}
    return descriptions


def yaml_type(hint: Any) -> str:
    """Return the type of a field in YAML, such as `text`, `integer`, `list of number` or `section`."""
    arguments = get_args(hint)
    if get_origin(hint) is Annotated:
        return (
            "section" if any(isinstance(marker, TaggedUnion) for marker in arguments[1:]) else yaml_type(arguments[0])
        )
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(yaml_type, arguments)))
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if get_origin(hint) is tuple:
        item_types = list(dict.fromkeys(yaml_type(argument) for argument in arguments if argument is not Ellipsis))
        return (
            f"list of {' and '.join(item_types)}"
            if Ellipsis in arguments
            else f"{len(arguments)} x {' and '.join(item_types)}"
        )
    return YAML_TYPES.get(hint, "section")


def format_field_default(field: Field[Any]) -> str:
    """Format the default of a field in YAML; an empty string if the field is required or a section."""
    if field.default is MISSING:
        return ""
    value = to_builtins(field.default)
    if isinstance(value, dict):
        return ""
    if value == "":
        return '`""`'
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"


def http_page() -> str:
    """Return the page of the HTTP API, with endpoints, errors and documents, from the server's OpenAPI description."""
    from vitreous.apps.server.openapi import ERROR_DESCRIPTIONS, build_openapi_document
    from vitreous.apps.server.settings import ServerLimits

    document = build_openapi_document(ServerLimits())
    about = (
        "`vitreous serve RUN` provides these endpoints; the server returns their OpenAPI description at "
        "`/openapi.json`. [Serving](../guides/serving.md) explains limits, tokens and proxies, with examples for curl."
    )
    lines = ["# HTTP API", "", about, "", escape(document["info"]["description"]), "", "## Endpoints", ""]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            lines += [f"### {method.upper()} {path}", "", *endpoint_lines(operation)]
    errors = ERROR_DESCRIPTIONS | {"404": "not available for this model"}
    lines += ["## Errors", "", "Every error has the document [Error](#error).", "", *table_head(["status", "meaning"])]
    lines += [format_row((f"`{code}`", escape(text))) for code, text in sorted(errors.items())]
    lines += ["", "## Documents", ""]
    for name, schema in document["components"]["schemas"].items():
        lines += [f"### {name}", "", *table_head(["key", "type"])]
        lines += [format_row((f"`{key}`", type_name(value))) for key, value in schema["properties"].items()]
        lines += [""]
    return "\n".join(lines)


def endpoint_lines(operation: dict[str, Any]) -> list[str]:
    """Return the Markdown lines of an endpoint: summary, parameters, body and responses."""
    lines = [f"{escape(operation['summary'])}.", ""]
    if parameters := operation.get("parameters"):
        lines += table_head(["parameter", "in", "type", "description"])
        for entry in parameters:
            cells = (f"`{entry['name']}`", entry["in"], type_name(entry["schema"]), escape(entry["description"]))
            lines.append(format_row(cells))
        lines.append("")
    if body := operation.get("requestBody"):
        content_types = [
            f"`{content_type}`" for content_type in body["content"] if not content_type.startswith(("image/", "video/"))
        ]
        content_types += [
            f"`{family}/*`" for family in ("image", "video") if any(name.startswith(family) for name in body["content"])
        ]
        lines += [
            f"Body: {', '.join(content_types)}."
            + (f" {escape(body['description'])}." if "description" in body else ""),
            "",
        ]
        schema = body["content"].get("application/json", {}).get("schema", {})
        if schema.get("properties"):
            lines += table_head(["key", "type", "description"])
            for key, value in schema["properties"].items():
                lines.append(format_row((f"`{key}`", type_name(value), escape(value["description"]))))
            lines.append("")
    for code, response in operation["responses"].items():
        if code == "200":
            content_types = [
                f"{type_name(value['schema'])} (`{content_type}`)"
                for content_type, value in response["content"].items()
            ]
            lines += [f"Response: {', '.join(content_types)}.", ""]
    return lines


def type_name(schema: dict[str, Any]) -> str:
    """Format the type of a JSON schema: `array of number`; a document is a link to its section."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(type_name(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"array of {type_name(schema['items'])}" if "items" in schema else "array"
    if schema.get("type") == "object" and "properties" in schema:
        return f"object with {', '.join(f'`{key}`' for key in schema['properties'])}"
    json_type = schema.get("type", "any")
    limits = [f"{word} {schema[key]:,}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema]
    return " ".join([json_type if isinstance(json_type, str) else " or ".join(json_type), *limits])


def table_head(titles: list[str]) -> list[str]:
    """Return the header line and the separator line of a Markdown table."""
    return [format_row(titles), format_row(["---"] * len(titles))]


def format_row(cells: Any) -> str:
    """Format cells as a row of a Markdown table."""
    return f"| {' | '.join(str(cell).replace('|', '&#124;') for cell in cells)} |"
