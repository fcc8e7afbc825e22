"""The tests marked `processor`, run as another kind of processor than this one: `python -m tests.other_processor`.

One with AVX-512 is taken down to AVX2, kernels included. One without is taken for an AVX512-BF16: bfloat16 is then
emulated, which is slow and right. Arguments go to pytest; its exit code is this program's.
"""

from __future__ import annotations

import os
import subprocess
import sys

from vitreous.machine import best_feature, capabilities

DOWN = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
UP = {"VITREOUS_CPU_ISA": "AVX512_CORE_BF16"}


def other_kind() -> dict[str, str]:
    """The variables that make another kind of this processor."""
    return DOWN if capabilities().get("avx512_f") else UP


def main(words: list[str]) -> int:
    """Run the marked tests as the other kind."""
    variables = other_kind()
    print(f"this processor: {best_feature() or 'no AVX2'}; tests marked `processor` with {variables}", flush=True)
    pytest = [sys.executable, "-m", "pytest", "-m", "processor and not slow", *words]
    return subprocess.run(pytest, env={**os.environ, **variables}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
