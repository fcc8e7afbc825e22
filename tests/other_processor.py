"""Run the tests marked `processor` as another kind of processor: `python -m tests.other_processor`.

A processor with AVX-512 is limited to AVX2, kernels included. A processor without is treated as an AVX512-BF16 one,
with slow but correct emulated bfloat16. Arguments are passed to pytest; its exit code is returned.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from vitreous.system.machine import get_best_cpu_feature, get_cpu_features

LOWERED_VARIABLES = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
RAISED_VARIABLES = {"VITREOUS_CPU_ISA": "AVX512_CORE_BF16"}


def get_other_processor_variables() -> dict[str, str]:
    """The variables that simulate another kind of processor."""
    return LOWERED_VARIABLES if get_cpu_features().get("avx512_f") else RAISED_VARIABLES


def find_marked_files() -> list[str]:
    """The test files that contain `processor`, the name of the mark and of the fixture: collecting all others would
    take longer than running these."""
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    return [os.fspath(path) for path in files if "processor" in path.read_text("utf-8")]


def main(words: list[str]) -> int:
    """Run the marked tests as the other processor: of the files in the arguments, or of all files."""
    variables = get_other_processor_variables()
    if not any(Path(word.partition("::")[0]).exists() for word in words):
        words = [*words, *find_marked_files()]
    print(
        f"this processor: {get_best_cpu_feature() or 'no AVX2'}; tests marked `processor` with {variables}", flush=True
    )
    pytest = [sys.executable, "-m", "pytest", "-m", "processor and not slow", *words]
    return subprocess.run(pytest, env={**os.environ, **variables}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
