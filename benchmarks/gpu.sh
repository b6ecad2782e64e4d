#!/usr/bin/env bash
# The checks that need a GPU: tests, compute-sanitizer if installed, benchmark. Results: benchmarks/results/<GPU>/
#   benchmarks/gpu.sh [PYTHON]    a Python with torch for the GPU, triton, pluggy, pytest, tqdm, matplotlib and the peers
#                                 to compare with; fusedops need not be installed, and nothing is downloaded
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
unset TRITON_INTERPRET
"$python" -c "import importlib.metadata as m; m.version('fusedops')" 2>/dev/null ||
    "$python" -m pip install --quiet --no-deps --no-index --no-build-isolation --editable . # for the entry points
export PYTHONPATH=$PWD:$PWD/backends:$PWD/tests
name=$("$python" -c "import torch; print(torch.cuda.get_device_name())")
out=benchmarks/results/$(tr 'A-Z ' 'a-z-' <<<"$name")
mkdir -p "$out"
tests=("$python" -m pytest --noconftest -o addopts= -o filterwarnings= -q tests/gpu)
"${tests[@]}" 2>&1 | tee "$out/tests.txt"
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck initcheck; do
        compute-sanitizer --tool "$tool" --error-exitcode 1 "${tests[@]}" -k sanitizer 2>&1 | tee "$out/$tool.txt"
    done
else
    echo "compute-sanitizer is not installed: skipped" | tee "$out/memcheck.txt"
fi
"$python" benchmarks/launch.py | tee "$out/launch.txt"
for sweep in large cases length size; do
    "$python" -m benchmarks --device cuda --sweep "$sweep" --out "$out/$sweep.jsonl"
done
echo "results are in $out: \`make docs\` adds them to docs/performance.md"
