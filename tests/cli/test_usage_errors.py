"""Invalid options, values and arguments of a command get one message with a fix."""

from __future__ import annotations

import json
from importlib import import_module

import pytest

from vitreous.cli.main import VERBS, main
from vitreous.cli.usage_errors import explain_usage_error

CASES = {
    "train photos/ --epoch 3": ("unknown option --epoch", "did you mean --epochs?"),
    "train photos/ --flip 0": ("unknown option --flip", "did you mean --views.flip?"),
    "train photos/ --qqqqqq": ("unknown option --qqqqqq", "`vitreous train --help-all` lists all options"),
    "train photos/ --epochs abc": ("--epochs cannot be 'abc'", "use a number"),
    "train photos/ --batch-size 1.5": ("--batch-size cannot be '1.5'", "use a whole number"),
    "train photos/ --lr-grid 0.1 b": ("--lr-grid cannot be 'b'", "use a number"),
    "train photos/ --learning-rate=x": ("--learning-rate cannot be 'x'", "use a number"),
    "train photos/ --loss softmx": ("--loss cannot be 'softmx'", "did you mean softmax?"),
    "train photos/ --device": ("--device needs a value", "use --device STR"),
    "train photos/ --device --resume": ("--device needs a value", "use --device STR"),
    "train photos/ more/": ("unexpected argument 'more/'", "use vitreous train DATA"),
    "data convert boxes/": ("DIR is missing", "use vitreous data convert DATA DIR"),
    "completion fish": ("SHELL cannot be 'fish'", "use one of bash, zsh"),
}


@pytest.mark.parametrize("line", CASES)
def test_the_first_fault_is_explained(line):
    words = line.split()
    verb = " ".join(words[:2]) if " ".join(words[:2]) in VERBS else words[0]
    options_type = import_module(VERBS[verb][0]).Options
    error = explain_usage_error(options_type, verb, words[len(verb.split()) :])
    assert (error.message, error.hint, error.code) == (*CASES[line], 2)


@pytest.mark.parametrize("words", [["--epoch", "3"], ["--epochs", "abc"], ["--json", "--device"]])
def test_commands_print_one_error_and_exit_with_2(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", "photos/", *words])
    output = capsys.readouterr()
    assert end.value.code == 2 and output.err.startswith("error: ") and len(output.err.splitlines()) == 2
    if "--json" in words:
        assert json.loads(output.out)["error"] == {
            "message": "--device needs a value", "hint": "use --device STR", "code": 2,
        }  # fmt: skip
