"""docs/tutorials/production.md: the commands run, the server replies as on the page, and SIGHUP replaces the model."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.inference.server_client import wait_until
from tests.tutorials.runner import DOCS, Step, check_exit_codes, check_fixed_lines, read_steps, run_steps

PAGE = (DOCS / "tutorials" / "production.md").read_text("utf-8")
PAGE_ADDRESS = "http://127.0.0.1:8000"
SHORT = ("--steps", "3", "--batch-size", "16", "--workers", "0")
BLOCK_TORCH = "import runpy, sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"


class ServedModel:
    """A running `vitreous serve`: its process, its address and its log."""

    def __init__(self, command: str, home: Path) -> None:
        self.log = home / "server.log"
        words = [sys.executable, "-m", *shlex.split(command), "--port", "0", "--decoders", "1"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                words, cwd=home, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("serving "), self.log.read_text()
        self.address = line.split()[-1]

    def read_version(self) -> str:
        """The version of the served model."""
        with urllib.request.urlopen(f"{self.address}/v1/model", timeout=60) as response:
            return json.load(response)["version"]

    def reload(self) -> None:
        """Send SIGHUP, and wait until another model is served."""
        version = self.read_version()
        self.process.send_signal(signal.SIGHUP)
        wait_until(lambda: self.read_version() != version)
        wait_until(lambda: '"event": "reloaded"' in self.log.read_text())

    def stop(self) -> None:
        """Stop with SIGTERM; the exit code must be 0."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0


def run_shell(step: Step, home: Path, address: str) -> Step:
    """Run a command of another program. `python FILE` runs without PyTorch."""
    command = step.command.replace(PAGE_ADDRESS, address)
    if command.startswith("python "):
        command = f"{shlex.quote(sys.executable)} -c {shlex.quote(BLOCK_TORCH)} {command.removeprefix('python ')}"
    result = subprocess.run(["bash", "-c", command], cwd=home, capture_output=True, text=True, timeout=120)
    return Step(step.command, step.printed, result.returncode, result.stdout, result.stderr)


def to_pattern(line: str) -> str:
    """A regular expression for a line of the page in which numbers, versions and request IDs may differ."""
    return re.sub(
        r"[0-9a-f]{16}|[0-9a-f]{12}|\\?[0-9]+(?:\\\.[0-9]+)?(?:e-?[0-9]+)?", r"[0-9a-f.e+-]+", re.escape(line)
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_run(tmp_path):
    pytest.importorskip("onnxruntime")
    if shutil.which("curl") is None:
        pytest.skip("the page uses curl")
    (script,) = re.findall(r"```text\n(# classify\.py\n.*?)```", PAGE, re.DOTALL)
    (tmp_path / "classify.py").write_text(script, "utf-8")
    server, finished = None, []
    try:
        for step in read_steps(PAGE):
            is_serving = step.command.startswith("vitreous serve")
            if is_serving and server is None:
                server = ServedModel(step.command, tmp_path)
                assert any(line.startswith("serving ViT-64x6/2 (") for line in step.printed)
            elif is_serving:
                assert server is not None
                port = server.address.rpartition(":")[2]
                (result,) = run_steps([Step(f"{step.command} --port {port}", step.printed)], tmp_path)
                error = result.error.replace(f"port {port}", "port 8000")
                finished.append(Step(step.command, step.printed, result.returncode, result.output, error))
            elif step.command.startswith("kill -HUP"):
                assert server is not None
                server.reload()
            elif step.command.startswith(("vitreous ", "python -c")):
                seed = "1" if "runs/digits-2" in step.command else "0"  # the same steps give the same version
                finished += run_steps([step], tmp_path, {"digits": (*SHORT, "--seed", seed)})
            else:
                result = run_shell(step, tmp_path, server.address if server else "")
                assert result.returncode == 0, f"{step.command}\n{result.error}"
                if step.command.startswith("curl"):
                    for line in step.printed:
                        assert line == "…" or re.search(to_pattern(line), result.output), f"{line}\n{result.output}"
    finally:
        if server is not None:
            server.stop()
    check_exit_codes(finished)
    check_fixed_lines(finished)
    assert (tmp_path / "runs" / "digits" / "model.onnx").is_file() and (tmp_path / "odd.csv").is_file()
