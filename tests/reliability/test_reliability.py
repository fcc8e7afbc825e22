"""A subset of the reliability checks; `make reliability` runs all of them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.reliability.__main__ import QUICK_CHECKS

pytest.importorskip("fcntl")  # the checks need fork


@pytest.fixture(scope="module")
def run_quick_check(tmp_path_factory):
    """A function that runs a check and returns its result, in one process that has imported everything and forks."""
    words = [sys.executable, "-m", "tests.reliability", "--quick", "-"]
    errors = tmp_path_factory.mktemp("rig") / "stderr"
    pipe = subprocess.PIPE
    with open(errors, "w") as file, subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=file, text=True) as process:

        def run_check(name: str) -> dict:
            assert process.stdin and process.stdout
            print(name, file=process.stdin, flush=True)
            line = process.stdout.readline()
            assert line, errors.read_text()
            return json.loads(line)

        yield run_check
        process.communicate()


@pytest.mark.parametrize("name", QUICK_CHECKS)
def test_quick_reliability_checks(run_quick_check, name):
    result = run_quick_check(name)
    assert not result["misses"], "\n".join([result["line"], *result["misses"]])
    passed, tried = result["line"].removeprefix(f"{name}: ").split(",")[0].split(" of ")
    assert int(passed) == int(tried) > 0
