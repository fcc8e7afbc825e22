"""Children that read pickled weights, forked from a process that has imported torch.

They replace those of `vitreous.weights.pickled.run_unpickle_child` and start in milliseconds instead of seconds.

python -P tests/forked.py reads one order per line; for each it prints a line of JSON: exit code, stdout.
"""

from __future__ import annotations

import io
import json
import os
import select
import subprocess
import sys
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from types import ModuleType

WEIGHTS_FOLDER = (
    Path(__file__).parents[1] / "vitreous" / "weights"
)  # the folder of `unpickle`, which imports no module of the package


class ForkingReader:
    """Replaces `run_unpickle_child`. The process starts with the first order, and again after a timeout."""

    process: subprocess.Popen[str] | None = None

    def __call__(self, order: str, seconds: float) -> subprocess.CompletedProcess[str]:
        """Run a child and return its result. Raises subprocess.TimeoutExpired."""
        if self.process is None:
            command, environment = [sys.executable, "-P", __file__], {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
            self.process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment)
        assert self.process.stdin and self.process.stdout
        print(order, file=self.process.stdin, flush=True)
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            self.close()
            raise subprocess.TimeoutExpired("a forked child", seconds)
        code, text = json.loads(self.process.stdout.readline())
        return subprocess.CompletedProcess("a forked child", code, text, "")

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def run_order(unpickle: ModuleType, order: str) -> None:
    """In a child: execute an order and print the result."""
    text = io.StringIO()
    sys.stdin = io.StringIO(order)
    with redirect_stdout(text):
        code = unpickle.main()
    os.write(1, (json.dumps([code, text.getvalue()]) + "\n").encode())


def main() -> None:
    """Fork a child for each line."""
    import safetensors.torch  # noqa: F401  imported once for all children
    import torch  # noqa: F401

    sys.path.append(os.fspath(WEIGHTS_FOLDER))
    unpickle = import_module("unpickle")
    for order in sys.stdin:
        child = os.fork()
        if child == 0:
            run_order(unpickle, order)
            os._exit(0)
        if status := os.waitpid(child, 0)[1]:
            print(json.dumps([os.waitstatus_to_exitcode(status), ""]), flush=True)


if __name__ == "__main__":
    main()
