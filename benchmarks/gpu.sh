#!/usr/bin/env bash
# benchmarks/gpu.py on a machine with a GPU, from a checkout: wheels in .gpu/wheels are installed first, without an index,
# and .gpu/cifar10.tar.xz is taken for CIFAR-10. Usage: bash benchmarks/gpu.sh OUT [options of gpu.py]
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1
shift
if ls .gpu/wheels/*.whl > /dev/null 2>&1; then
	site=$(mktemp -d)
	python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" .gpu/wheels/*.whl
	export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
cifar=()
[ -e .gpu/cifar10.tar.xz ] && cifar=(--cifar "$PWD/.gpu/cifar10.tar.xz")
python3 benchmarks/gpu.py "$out" "${cifar[@]}" "$@"
