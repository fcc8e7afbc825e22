"""Messages use keywords in Python, and options on the command line."""

from __future__ import annotations

import ast
import re

import pytest

from tests.test_architecture import PACKAGE, PACKAGE_FILES, parse_file
from vitreous.errors import FOREIGN_OPTIONS, OPTION_VALUES, UsageError, options_to_keywords

#: words that follow an option in prose
SENTENCE_WORDS = """
above adds and applies are at belong beside cannot changes chooses compares copies costs counts decodes does each exclude
frames goes has hides images is it keeps makes must name names nearer need needs of on or out outside places plans reads
requires samples say says sets smaller still takes than that the to trains vectors where which with writes
"""


@pytest.mark.parametrize(
    "text, expected",
    [
        ("use --image-size 240, or --patch-size 3", "use image_size=240, or patch_size=3"),
        ("--abstain is for single-label models", "abstain is for single-label models"),
        ("a --lr above 0", "a lr above 0"),
        ("use --engine torch.", "use engine='torch'."),
        ("--interval 0.2 0.1 cannot be", "interval=(0.2, 0.1) cannot be"),
        ("add --native-aspect, or leave it out", "add native_aspect=True, or leave it out"),
        ("use --no-compile", "use compile=False"),
        ("set its new path: --vae FOLDER", "set its new path: vae=FOLDER"),
        ("--group-by 'a b'", "group_by='a b'"),
        ("--license apache-2.0 states one", "licence='apache-2.0' states one"),
        ("use --optimizer.betas 0.9 0.95", "use settings={'optimizer.betas': ['0.9', '0.95']}"),
        ("continue it: vitreous train --resume --out runs/a", "continue it: vitreous.train(resume=True, out='runs/a')"),
        (
            "train a model that does: vitreous train DATA --recipe dit",
            "train a model that does: vitreous.train(DATA, recipe='dit')",
        ),
        ("use `vitreous predict RUN IMAGES --out FOLDER`", "use `vitreous predict RUN IMAGES --out FOLDER`"),
        ("torchrun --nproc-per-node N -m vitreous train …", "torchrun --nproc-per-node N -m vitreous train …"),
    ],
)
def test_options_become_keywords(text, expected):
    assert options_to_keywords(text) == expected
    assert str(UsageError("x", text)) == f"x\n  {expected}" and UsageError("x", text).hint == text


def test_option_values_are_distinguished_from_prose():
    """Every word after an option in the package is an option value or a word of prose."""
    known_words = {*OPTION_VALUES.split(), *SENTENCE_WORDS.split()}
    unknown = set()
    for path in PACKAGE_FILES:
        if path.is_relative_to(PACKAGE / "cli") or path.is_relative_to(PACKAGE / "apps" / "bench"):
            continue
        nodes = parse_file(path)[1]
        outside = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in outside:
                for option, word in re.findall(r"--([a-z][a-z0-9.-]*) ([a-z][a-z-]*+)(?![\w:/.]*[\w/])", node.value):
                    if word not in known_words and option not in FOREIGN_OPTIONS:
                        unknown.add((path.name, option, word))
    assert not unknown


def test_errors_name_keywords_in_python_and_options_on_the_cli(tmp_path, capsys):
    import vitreous
    from vitreous.cli.main import main

    with pytest.raises(UsageError) as caught:
        vitreous.create("ViT-B/16", image_size=225)
    assert str(caught.value) == (
        "image size 225 is not divisible by patch size 16\n  use image_size=224, or patch_size=15"
    )
    with pytest.raises(SystemExit):
        main(["train", "digits", "--model", "ViT-32x2/4", "--image-size", "9", "--dry-run"])
    assert "--image-size 8" in capsys.readouterr().err
