"""The tests marked `processor`, run as another kind of processor than this one: `python -m tests.other_processor`.

One with AVX-512 is taken down to AVX2, kernels included. One without is taken for an AVX512-BF16: bfloat16 is then
emulated, which is slow and right. Arguments go to pytest; its exit code is this program's.
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
    """The variables that make another kind of this processor."""
    return LOWERED_VARIABLES if get_cpu_features().get("avx512_f") else RAISED_VARIABLES


def marked_files() -> list[str]:
    """The files of tests that say `processor`, the name of the mark and of the fixture: to collect all the others takes
    longer than to run these."""
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    return [os.fspath(path) for path in files if "processor" in path.read_text("utf-8")]


def main(words: list[str]) -> int:
    """Run the marked tests as the other kind: of the files among the arguments, or else of all."""
    variables = get_other_processor_variables()
    if not any(Path(word.partition("::")[0]).exists() for word in words):
        words = [*words, *marked_files()]
    print(
        f"this processor: {get_best_cpu_feature() or 'no AVX2'}; tests marked `processor` with {variables}", flush=True
    )
    pytest = [sys.executable, "-m", "pytest", "-m", "processor and not slow", *words]
    return subprocess.run(pytest, env={**os.environ, **variables}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
