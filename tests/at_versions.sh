#!/usr/bin/env bash
# Makes an environment with given versions in build/versions, and runs a part of the tests in it: every backend, policy,
# dispatch, remembered calls, the command line, Triton's kernels by its interpreter and compiled ahead of time.
#
#   PYTHON=3.10 TORCH=torch==2.10.0 TRITON=triton==3.4.0 tests/at_versions.sh [OPTION OF PYTEST ...]
#
# PYTHON   a version, or an interpreter
# TORCH    what pip installs, or the folder of an environment of this Python that has torch: a plain torch==VERSION can
#          download the CUDA libraries, which take gigabytes
# TRITON   what pip installs, without its dependencies: torch's own may be another version
# TRANSFORMERS   what pip installs: with it, the tests of fusedops.integrations.transformers run, and no others
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH

interpreter() {  # print the interpreter of a version
    local candidate
    for candidate in "$1" "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then command -v "$candidate" && return; fi
    done
    echo "at_versions: got PYTHON=$1, expected an interpreter that is installed; to fix: install python$1 and its venv" \
        "with the package manager, or by \`pyenv install $1\`, or set PYTHON to its path" >&2
    return 2
}

python=$(interpreter "${PYTHON:-python3}")
torch=${TORCH:-torch}
triton=${TRITON:-triton}
transformers=${TRANSFORMERS:-}
label="$("$python" -c 'import platform; print(platform.python_version())')-$torch-$triton${transformers:+-$transformers}"
folder=build/versions/$(tr -c 'A-Za-z0-9.\n' - <<<"$label")

if [ ! -e "$folder/ready" ]; then
    "$python" -m venv --clear "$folder"
    pip=("$folder/bin/python" -m pip install --quiet)
    "${pip[@]}" --upgrade 'pip>=25.1'
    if [ -d "$torch" ]; then
        site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        (cd "$torch"/lib/python*/site-packages && pwd) >"$site/torch.pth"
    else
        "${pip[@]}" "$torch"
    fi
    numpy=numpy  # the interpreter of Triton 3.4 to 3.6 cannot loop with NumPy 2.4
    case "$triton" in *==3.[456]*) numpy='numpy<2.4' ;; esac
    # what the package needs beside torch, which may come from a folder that pip does not see
    "${pip[@]}" --group test setuptools pluggy rich "$numpy"
    "${pip[@]}" --no-deps "$triton"
    if [ -n "$transformers" ]; then "${pip[@]}" "$transformers"; fi
    touch "$folder/ready"
fi
"$folder/bin/python" -m pip install --quiet --no-build-isolation --no-deps --editable .
"$folder/bin/python" -c 'import platform, torch, triton
print(f"python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}")'

code=0
run() {  # run tests; all parts run, also after a failure
    "$folder/bin/python" -m pytest --quiet -p no:cacheprovider --numprocesses auto --maxprocesses 8 --dist worksteal "$@" || code=1
}
if [ -n "$transformers" ]; then
    "$folder/bin/python" -c 'import transformers; print("transformers", transformers.__version__)'
    run -m "not slow" tests/integrations/test_transformers_*.py "$@"
    exit $code
fi
run -m "not slow" tests/policy tests/cli tests/plugins/test_{registration,plugin_ops}.py tests/integrations/test_nn.py \
    tests/dispatch/test_{bind,call_paths,explain,no_backend,selected_kernel}.py \
    tests/dispatch/test_recent_calls.py tests/backends/cpu/test_{calls,remembered_calls}.py "$@"
run -m "not slow" -k "scaled_masked_softmax or add_rms_norm" tests/integrations/test_pytorch_{autograd,checkpoint,trace}.py "$@"
run tests/backends/triton/test_triton_compile_versions.py "$@"
# the conformance kit: ops that most backends have, and attention, which is all that some have; without the two checks that
# take minutes by Triton's interpreter
run -k "(swiglu or scaled_masked_softmax or (attention and (sdpa or flash_attn))) and not (triton and (calls or memory))" \
    tests/testing/test_conformance.py "$@"
exit $code
