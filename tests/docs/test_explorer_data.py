"""The data of the explorer page: constraints with a function each, formulas as nested lists, modules as one script."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import pytest
from repository import DOCS

sys.path.insert(0, str(DOCS))
from explorer.data import data_text, everything
from explorer.encoding import UnsupportedError
from explorer.formulas import Formulas
from explorer.modules import script

from fusedops.constraints import Dim


def test_a_type_of_constraint_without_a_function_is_an_error() -> None:
    data = everything()
    assert json.loads(data_text(data)) == json.loads(json.dumps(data))
    data["ops"]["rms_norm"]["kernels"][0]["constraints"].append({"type": "Even", "phrase": "x: even"})
    with pytest.raises(ValueError, match=r"got constraints of the types Even, expected those of .*kinds_\*\.js"):
        data_text(data)


def test_the_modules_become_one_script(tmp_path: pathlib.Path) -> None:
    (tmp_path / "main.js").write_text('import { two } from "./two.js";\nimport { one } from "./one.js";\none(two);\n')
    (tmp_path / "two.js").write_text('import { one } from "./one.js";\n\nexport const two = one(2);\n')
    (tmp_path / "one.js").write_text("export function one() {}\n")
    assert script(tmp_path).split() == ["function", "one()", "{}", "const", "two", "=", "one(2);", "one(two);"]
    (tmp_path / "one.js").write_text("export function one() {}\nconst two = 2;\n")
    with pytest.raises(ValueError, match=r"got two in one\.js and two\.js"):
        script(tmp_path)


def scaled(x: Any, mask: Any, times: int) -> int | None:
    if mask is None:
        return None
    return sum(times * size for size in x.shape if size > 1) + x.dtype.itemsize


def test_a_formula_is_a_function_as_data() -> None:
    formulas = Formulas()
    name = formulas.add(scaled)
    assert formulas.functions[name]["parameters"] == ["x", "mask", "times"]
    assert formulas.functions[name]["body"][0] == [
        "when",
        ["compare", ["var", "mask"], ["is", ["const", None]]],
        [["return", ["const", None]]],
        [],
    ]


def loop(x: Any) -> int:
    total = 0
    for size in x.shape:
        total += size
    return total


def strides(x: Any) -> Any:
    return x.shape[::2]


@pytest.mark.parametrize(
    ("function", "source"), [(loop, "for size in x.shape"), (strides, "x.shape[::2]"), (Dim, "Dim")]
)
def test_python_that_a_formula_cannot_have_is_an_error(function: Any, source: str) -> None:
    formulas = Formulas()
    with pytest.raises(UnsupportedError, match="expected") as error:
        formulas.add(function)
    assert source in str(error.value)
    assert formulas.functions == {}
