"""A share of the rig in every run of the tests; `make reliability` is the whole."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.reliability.__main__ import QUICK_CHECKS

pytest.importorskip("fcntl")  # a system that can fork


@pytest.fixture(scope="module")
def run_quick_check(tmp_path_factory):
    """Answers the name of a check with what passed; one process that has imported everything, and forks."""
    words = [sys.executable, "-m", "tests.reliability", "--quick", "-"]
    errors = tmp_path_factory.mktemp("rig") / "stderr"
    pipe = subprocess.PIPE
    with open(errors, "w") as file, subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=file, text=True) as process:

        def ask(name: str) -> dict:
            assert process.stdin and process.stdout
            print(name, file=process.stdin, flush=True)
            line = process.stdout.readline()
            assert line, errors.read_text()
            return json.loads(line)

        yield ask
        process.communicate()


@pytest.mark.parametrize("name", QUICK_CHECKS)
def test_quick_reliability_checks(run_quick_check, name):
    found = run_quick_check(name)
    assert not found["misses"], "\n".join([found["line"], *found["misses"]])
    passed, tried = found["line"].removeprefix(f"{name}: ").split(",")[0].split(" of ")
    assert int(passed) == int(tried) > 0
