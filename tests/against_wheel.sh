#!/usr/bin/env bash
# Runs tests against the built wheel, from a directory that holds neither the sources nor the backends: what is missing from
# the wheel fails here. Usage: tests/against_wheel.sh PYTHON, after `python -m build --wheel`.
set -euo pipefail
python=$(realpath --no-symlinks "$1")
top=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m pip install --quiet --no-deps --target "$work/site" "$top"/dist/fusedops-*.whl
cp -r "$top/tests" "$top/conftest.py" "$top/pyproject.toml" "$work"
cd "$work"
# ahead of the editable installation, which is of the same name
export PYTHONPATH="$work/site"
"$python" - "$top" <<'CHECK'
import os, pathlib, sys, fusedops, fusedops_cpu, fusedops_eager, fusedops_flash_attn, fusedops_npu, fusedops_sdpa, fusedops_triton
site, top = pathlib.Path(os.environ["PYTHONPATH"]), pathlib.Path(sys.argv[1])
for module in (fusedops, fusedops_cpu, fusedops_eager, fusedops_flash_attn, fusedops_npu, fusedops_sdpa, fusedops_triton):
    assert pathlib.Path(module.__file__).is_relative_to(site), f"{module.__file__} is not of the wheel"
names = sorted(path.name for path in site.iterdir() if not path.name.endswith((".dist-info", "__pycache__")))
assert names == ["_fusedops_pytest.py", "bin", "fusedops", "fusedops_cpu", "fusedops_eager", "fusedops_flash_attn", "fusedops_npu", "fusedops_sdpa", "fusedops_triton"], names
for name in names[2:]:
    source = top / name if name == "fusedops" else top / "backends" / name
    missing = {path.relative_to(source) for path in source.rglob("*.py")} - {path.relative_to(site / name) for path in (site / name).rglob("*.py")}
    assert not missing, f"{name} lacks {missing}"
assert (site / "fusedops" / "py.typed").exists(), "py.typed is missing"
assert [path.name for path in (site / "bin").iterdir()] == ["fusedops"], "the command line is missing"
# built where there is a compiler: a platform wheel with the library, else a pure one without it
libraries = list((site / "fusedops_cpu").glob("libfusedops_cpu-*"))
(tags,) = site.glob("fusedops-*.dist-info/WHEEL")
assert bool(libraries) == ("Root-Is-Purelib: false" in tags.read_text()), libraries
assert all(info.state != "failed" for info in fusedops.backends()), fusedops.backends()
CHECK
# `make test` runs all of this on the sources, whose files are the wheel's: here one op and each part of the core
"$python" -m pytest -q -p no:cacheprovider --numprocesses auto --dist worksteal \
  tests/testing/test_conformance_{eager,npu,sdpa,triton}.py tests/policy/test_{policy_grammar,policy_channels,use,environment}.py \
  tests/dispatch/test_{explain,explain_agrees,no_backend,fallback_warnings}.py tests/backends/npu/test_npu_{padding,bias,installation}.py \
  -k "not (test_conformance and not (bias_gelu or sdpa-attention))"
