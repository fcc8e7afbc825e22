"""What installs the package and runs it elsewhere: wheel and sdist, container, CI, completion, and what is missing."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.conftest import parse_json_output, run_cli, run_command
from tests.wheel import STEPS, try_wheel
from vitreous.cli.completion import generate_completion_script
from vitreous.cli.main import VERBS
from vitreous.errors import install_hint
from vitreous.jobs.requirements import EXTRA_PURPOSES, build_install_commands, find_missing_requirements

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHECKOUT_ONLY = pytest.mark.skipif(not (ROOT / ".ci" / "run").exists(), reason="not a checkout")


def test_missing_requirements_are_reported_with_a_command(monkeypatch):
    extras = set(PROJECT["optional-dependencies"]) - {"test", "docs", "lint", "dev", "all"}
    assert set(EXTRA_PURPOSES) == {"", *extras}
    lines = ["numpy>=1", "no-such-thing>=2; extra == 'hub'", "numpy>=999; extra == 'serve'", "numpy; extra == 'lora'"]
    lines += ["no-such-thing; sys_platform == 'none' and extra == 'video'"]
    missing = find_missing_requirements(lines)
    assert {extra: absent for extra, absent in missing.items() if absent} == {
        "hub": ["no-such-thing>=2"],
        "serve": ["numpy>=999"],
    }
    (line,) = build_install_commands(missing)
    assert shlex.split(line) == [sys.executable, "-m", "pip", "install", "vitreous[hub,serve]"]
    assert shlex.split(build_install_commands({"": ["numpy"], "hub": []})[0])[-1] == "vitreous"
    monkeypatch.setattr("vitreous.jobs.requirements.lacks_cuda", lambda: True)
    assert build_install_commands({})[-1].endswith("pip install --force-reinstall torch torchvision")


def test_doctor_lists_every_extra():
    report = parse_json_output(run_cli("doctor", "--fix", "--json"))
    assert set(report["missing"]) == set(EXTRA_PURPOSES) and report["ok"]
    assert "web page and HTTP server" in run_cli("doctor", "--fix").stdout


def list_completions(script: str, *words: str) -> list[str]:
    """What bash would offer for the last word."""
    listed = " ".join(map(shlex.quote, words))
    code = f"{script}\nCOMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; COMP_LINE={shlex.quote(' '.join(words))}\n"
    code += "COMP_POINT=${#COMP_LINE}; _tyro_vitreous; printf '%s\\n' \"${COMPREPLY[@]}\""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, env=os.environ | {"PATH": path})
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_bash_completes_verbs_options_and_values():
    script = generate_completion_script("bash")
    assert list_completions(script, "vitreous", "tra") == ["train"]
    assert set(list_completions(script, "vitreous", "data", "")) >= {"check", "dedup", "convert", "pack"}
    assert "--image-size" in list_completions(script, "vitreous", "train", "--im")
    assert set(list_completions(script, "vitreous", "train", "--optimizer", "")) >= {"adamw", "muon"}
    assert "prog': 'vitreous'" in script and all(verb.split()[-1] in script for verb in VERBS)
    assert generate_completion_script("zsh").startswith("#compdef vitreous")


def test_completion_prints_only_the_script_without_torch():
    result = run_command("completion", "bash")
    assert result.returncode == 0 and result.stdout.startswith("#") and result.stderr == ""
    check = "import sys; from vitreous.cli.completion import generate_completion_script; generate_completion_script('bash'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "False", done.stderr


@CHECKOUT_ONLY
def test_the_container_runs_without_root_and_is_watched():
    text = (ROOT / "Containerfile").read_text()
    stages = {
        found[2]: body
        for body in re.split(r"(?=^FROM )", text, flags=re.MULTILINE)
        if (found := re.match(r"FROM (\S+) AS (\w+)", body))
    }
    assert set(stages) == {"wheel", "base", "cuda", "cpu"}
    for name in ("cuda", "cpu"):
        assert stages[name].startswith("FROM base") and stages[name].rstrip().endswith("USER 10001")
    assert "whl/cpu" in stages["cpu"] and "whl/cpu" not in stages["cuda"]
    health = re.search(r"HEALTHCHECK [^\n]*\\\n\s+CMD (\[.*\])", stages["base"])
    compile(json.loads(health[1])[2], "health", "exec")
    command = json.loads(re.search(r"^CMD (\[.*\])$", stages["base"], re.MULTILINE)[1])
    assert command[0] in VERBS and ":latest" not in text
    from importlib import import_module

    from vitreous.cli.main import parse_options

    options, _ = parse_options(import_module(VERBS["serve"][0]).Options, "serve", command[1:])
    assert (options.host, options.port) == ("0.0.0.0", 8000)


@CHECKOUT_ONLY
def test_ci_runs_on_every_supported_python():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yaml").read_text())["jobs"]
    pythons = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert jobs["check"]["strategy"]["matrix"]["python"] == pythons
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert ".ci/run" in [step.get("run") for step in jobs["check"]["steps"]]
    assert all("@v" in step["uses"] for step in steps if "uses" in step)
    shown = [step["run"] for step in steps if "vitreous " in step.get("run", "")]
    assert {shlex.split(line)[3] for line in shown} <= set(VERBS)


def build_packages(place: Path, python: Path) -> dict[str, bytes]:
    """Wheel and sdist of a copy of the checkout, name -> content, with the clock of the sources."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    for name in filter(None, listed):
        if not name.startswith(("benchmarks/", "docs/figures/")) and (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    words = [python, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", place / "dist"]
    environment = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run(words, cwd=place, check=True, capture_output=True, env=environment)
    return {path.name: path.read_bytes() for path in sorted((place / "dist").iterdir())}


@pytest.mark.slow
@CHECKOUT_ONLY
@pytest.mark.timeout(600)
def test_builds_are_reproducible_and_the_wheel_works(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "hatchling"], check=True)
    first, second = build_packages(tmp_path / "one", python), build_packages(tmp_path / "two", python)
    assert first == second and len(first) == 2
    (wheel,) = (tmp_path / "one" / "dist").glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("vitreous-")}
    assert packed == {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "vitreous").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", wheel], check=True)
    libraries = next(path for path in sys.path if (Path(path) / "torch").is_dir())
    (own,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (own / "libraries.pth").write_text(libraries + "\n")  # behind what is installed here
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for words in (["train", "digits", "--steps", "2", "--out", "run"], ["models", "dinov2-s14", "--weights"]):
        done = subprocess.run(
            [tmp_path / "venv" / "bin" / "vitreous", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    place = "import vitreous; print(vitreous.__file__)"
    imported_from = subprocess.run(
        [python, "-c", place], cwd=tmp_path, env=environment, capture_output=True, text=True
    ).stdout
    assert imported_from.startswith(str(tmp_path / "venv"))


@pytest.mark.slow
@CHECKOUT_ONLY
@pytest.mark.timeout(3 * 3600)
def test_every_verb_runs_from_the_wheel():
    tried = list(try_wheel())
    assert tried and {one.python: one.wrong for one in tried} == {one.python: {} for one in tried}
    untried = set(VERBS) - {" ".join(words[:2]) for words in STEPS.values()} - {words[0] for words in STEPS.values()}
    assert untried <= {"serve", "watch"} and all({"serve", "watch"} <= set(one.seconds) for one in tried)


def test_an_install_hint_names_the_extras():
    assert install_hint("serve") == "pip install 'vitreous[serve]'"
    assert install_hint("serve", "hub") == "pip install 'vitreous[serve,hub]'"
    assert install_hint(pip="/a/python -m pip") == "/a/python -m pip install vitreous"


def test_install_hints_use_one_command():
    """Modules call `install_hint`: only its docstring spells the command."""
    spelled = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "vitreous").rglob("*.py")
        if re.search(r"pip install ['\"]?vitreous|vitreous\[[a-z]", path.read_text("utf-8"))
    }
    assert spelled == {"vitreous/errors.py"}


@pytest.mark.parametrize(
    "page", ["README.md", *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.[mi][dp]*")))]
)
def test_pages_install_from_a_checkout(page):
    """`pip install .` and `pip install '.[serve]'` with extras that exist; error hints are shown as printed."""
    text = re.sub(r"error: .*\n +pip install .*", "", (ROOT / page).read_text("utf-8"))
    assert not re.findall(r"pip install ['\"]?vitreous|vitreous\[[a-z]", text)
    named = re.findall(r"pip install (?:-e )?('?\.\S*?)(?=[`\s]|$)", text)
    for target in named:
        found = re.fullmatch(r"\.|'\.\[([a-z]+(?:,[a-z]+)*)\]'", target)
        assert found, target
        assert set((found[1] or "test").split(",")) <= {*EXTRA_PURPOSES, "test", "dev", "docs", "lint"}, target
