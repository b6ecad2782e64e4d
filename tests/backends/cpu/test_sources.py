"""The C++ sources: warnings, format, accuracy of the functions."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cpu_values import LEVELS, RUNS

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "backends" / "fusedops_cpu" / "src"
HERE = Path(__file__).parent
FLAGS = (
    *("-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
COMPILER = shutil.which("g++") or shutil.which("clang++")

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++ or clang++")


#: The -march options that this processor runs; an empty one on other architectures.
MARCHES = [f"-march={LEVELS[each]}" for each in RUNS] or [""]


def build(out: Path, level: str, *arguments: object) -> Path:
    assert COMPILER is not None
    march = [level] if level else []
    command = [COMPILER, *FLAGS, *march, f"-I{SOURCES}", *map(str, arguments), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.skipif(importlib.util.find_spec("clang_format") is None, reason="needs clang-format")
def test_format() -> None:
    files = sorted(path for folder in (SOURCES, HERE) for end in ("*.h", "*.cpp") for path in folder.rglob(end))
    assert files
    command = Path(sys.executable).with_name("clang-format")
    done = subprocess.run([command, "--dry-run", "--Werror", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


# FUNCTION: units in the last place of the result, units of 2**-23 (accuracy.cpp has the domains)
BOUNDS = {
    "exp": (2.0, 1.0),
    "exp2": (2.0, 1.0),
    "tanh": (2.0, 1.0),
    "gelu_tanh": (3.5, 2.0),
    "gelu_erf": (8.0, 2.5),
    "derivative_tanh": (20.0, 2.5),
    "derivative_erf": (20.0, 2.5),
    "exp_of_difference": (6.0, 1.0),
}
# The forms for bfloat16, which are forms of their own with AVX-512 only
NARROW = {
    "exp2_narrow": (12.0, 1.0),
    "exp_of_difference_narrow": (16.0, 6.0),
    "gelu_tanh_narrow": (12.0, 3.0),
    "gelu_erf_narrow": (24.0, 4.0),
    "derivative_tanh_narrow": (24.0, 4.0),
    "derivative_erf_narrow": (40.0, 4.0),
}


def check_accuracy(folder: Path, level: str, step: int) -> None:
    program = build(folder / "accuracy", level, "-O2", HERE / "accuracy.cpp")
    assert subprocess.run([program, "bits"], capture_output=True, text=True, check=True).stdout == "0 0\n"
    bounds = {**BOUNDS, **NARROW} if level.endswith("v4") else BOUNDS
    for function, (relative, absolute) in bounds.items():
        done = subprocess.run([program, function, str(step)], capture_output=True, text=True, check=True)
        ulps, ulps_at, scaled, scaled_at, wrong = map(float, done.stdout.split())
        assert ulps <= relative, f"{function}({ulps_at}) is {ulps} units off"
        assert scaled <= absolute, f"{function}({scaled_at}) is {scaled} units of 2**-23 off"
        assert not wrong, f"{function}: {wrong} wrong results at NaN, infinities and zeros"


@needs_compiler
@pytest.mark.parametrize("level", MARCHES)
def test_accuracy_of_a_sample(tmp_path: Path, level: str) -> None:
    check_accuracy(tmp_path, level, 4099)


def test_coefficients_are_the_best_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    fit_functions = importlib.import_module("fit_functions")
    assert fit_functions.tables_of_sources().keys() == fit_functions.TABLES.keys()
    assert not [name for name in fit_functions.TABLES if fit_functions.is_far(name)]


@needs_compiler
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("level", MARCHES)
def test_accuracy_of_all_float32_numbers(tmp_path: Path, level: str) -> None:
    check_accuracy(tmp_path, level, 1)
