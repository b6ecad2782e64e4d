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
import os, pathlib, subprocess, sys, fusedops, fusedops_cpu, fusedops_eager, fusedops_flash_attn, fusedops_npu, fusedops_sdpa, fusedops_triton, fusedops_zentorch
site, top = pathlib.Path(os.environ["PYTHONPATH"]), pathlib.Path(sys.argv[1])
for module in (fusedops, fusedops_cpu, fusedops_eager, fusedops_flash_attn, fusedops_npu, fusedops_sdpa, fusedops_triton, fusedops_zentorch):
    assert pathlib.Path(module.__file__).is_relative_to(site), f"{module.__file__} is not of the wheel"
names = sorted(path.name for path in site.iterdir() if not path.name.endswith((".dist-info", "__pycache__")))
assert names == ["_fusedops_pytest.py", "bin", "fusedops", "fusedops_cpu", "fusedops_eager", "fusedops_flash_attn", "fusedops_npu", "fusedops_sdpa", "fusedops_triton", "fusedops_zentorch"], names
for name in names[2:]:
    source = top / name if name == "fusedops" else top / "backends" / name
    files = {path.relative_to(source) for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    missing = files - {path.relative_to(site / name) for path in (site / name).rglob("*")}
    missing = {path for path in missing if path.parts[0] != "src" and "libfusedops_cpu" not in path.name}  # of the build
    assert not missing, f"{name} lacks {missing}"
assert (site / "fusedops" / "py.typed").exists(), "py.typed is missing"
assert [path.name for path in (site / "bin").iterdir()] == ["fusedops"], "the command line is missing"
# built where there is a compiler: a platform wheel with the library, else a pure one without it
libraries = list((site / "fusedops_cpu").glob("libfusedops_cpu-*"))
(tags,) = site.glob("fusedops-*.dist-info/WHEEL")
assert bool(libraries) == ("Root-Is-Purelib: false" in tags.read_text()), libraries
assert all(info.state != "failed" for info in fusedops.backends()), fusedops.backends()
assert not libraries or "cpu" in {info.name for info in fusedops.backends() if info.state == "ready"}, fusedops.backends()
for info in fusedops.backends():
    if info.state == "ready" and pathlib.Path(info.file).is_relative_to(site):
        op = "bias_gelu" if "bias_gelu" in info.ops else info.ops[0]
        results = [check.run() for check in fusedops.testing.checks(info.name, op=op, elements=2**12)]
        assert results and not [str(result) for result in results if result.failures], results
        print(f"{info.name}: {len(results)} checks of {op} passed")
subprocess.run([sys.executable, site / "bin" / "fusedops", "info"], check=True, stdout=subprocess.DEVNULL)
CHECK
# the pytest plugin of the wheel, and tests of a part: `make test` runs all on the sources, which have the same files
"$python" -m pytest -q -p no:cacheprovider --numprocesses 0 tests/policy/test_use.py --fusedops-elements 4096 \
    --fusedops-backend eager -k "test_use or bias_gelu"
