#!/usr/bin/env bash
# The checks that need an Ascend device: conformance kit, tests, benchmark. The result is one file: build/npu.tar.gz
#   benchmarks/npu.sh [PYTHON]    a Python with torch, torch_npu, pluggy, pytest; CANN's set_env.sh was
#                                 sourced. fusedops need not be installed, and nothing is downloaded
# All steps run, even if one fails. CHECK, TESTS and BENCH are additional options of the three checks.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
"$python" -c "import importlib.metadata as m; m.version('fusedops')" 2>/dev/null ||
    "$python" -m pip install --quiet --no-deps --no-index --no-build-isolation --editable . || exit # for the entry points
export PYTHONPATH=$PWD:$PWD/backends:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}
state='import fusedops; (npu,) = [b for b in fusedops.backends() if b.name == "npu"]; print(npu.state, npu.why, npu.fix, sep="\n")'
mapfile -t npu < <("$python" -c "$state")
if [ "${npu[0]:-}" != ready ]; then
    printf 'the npu backend is not ready: %s\nto do: %s\n' "${npu[1]:-fusedops does not import}" "${npu[2]:-see above}" >&2
    exit 1
fi
build=${BUILD:-build}
out=$build/npu
rm -rf "$out"
mkdir -p "$out"
failed=()
step() { # NAME COMMAND...: print the output and write it to NAME.txt
    local name=$1
    shift
    printf '\n== %s\n' "$name"
    "$@" 2>&1 | tee "$out/$name.txt" || failed+=("$name")
}
git rev-parse HEAD >"$out/commit.txt" 2>/dev/null
command -v npu-smi >/dev/null && step npu-smi npu-smi info
cat "${ASCEND_TOOLKIT_HOME:-/none}"/*/version.info "${ASCEND_TOOLKIT_HOME:-/none}"/version.info >"$out/cann.txt" 2>/dev/null
step info "$python" -m fusedops info --json
step doctor "$python" -m fusedops doctor
step check "$python" -m fusedops check npu --json ${CHECK:-}
step tests "$python" -m pytest --noconftest -o addopts= -o filterwarnings= -q tests/npu ${TESTS:-}
for sweep in large cases; do
    # torch.compile supports this device only with the vendor's code generator
    step "benchmark-$sweep" "$python" -m benchmarks --device npu --sweep "$sweep" --without torch.compile \
        --out "$out/$sweep.jsonl" ${BENCH:-}
done
printf '%s\n' "${failed[@]:-none}" >"$out/failed.txt"
tar -czf "$build/npu.tar.gz" -C "$build" npu
printf '\nfailed: %s\n%s contains all results; please attach it to an issue\n' "${failed[*]:-none}" "$build/npu.tar.gz"
[ ${#failed[@]} -eq 0 ]
