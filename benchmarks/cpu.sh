#!/usr/bin/env bash
# The CPU measurements of docs/performance.md. No other program may run on the machine during the measurement.
#   benchmarks/cpu.sh [PYTHON [FOLDER]]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
out=${2:-benchmarks/results/out}
run() { "$python" -m benchmarks --device cpu --modes forward backward --seconds 0.3 "$@"; }
run --allocator tuned --threads 2 --out "$out/large-tuned-2.jsonl"
run --allocator tuned --threads 2 --dtypes float32 --sweep length-masked --elements $((2 ** 22)) --ops scaled_masked_softmax \
    --out "$out/length-tuned-2.jsonl"
mkdir -p "$out/sizes"
"$python" -m benchmarks.cpu_sizes --threads 2 --allocator tuned --dtypes float32 bfloat16 --out "$out/sizes/tuned-2.jsonl"
"$python" -m benchmarks.compiled --threads 2 --out "$out/compiled-tuned-2.jsonl"
