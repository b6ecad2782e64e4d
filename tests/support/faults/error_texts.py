"""A table of error texts: what is called and what it raises.

The texts are in a file beside the test, with its name and the suffix ``.txt``: a line ``[name]``, then the text.
``pytest --write-texts`` writes those that have changed.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import fusedops

# what was given, what is needed, and what to do
FORM = "got .*(?:expected|needs) .*to fix|^no backend takes this call.* given .*to fix"


class Pin(NamedTuple):
    """A call, what it raises, and a pattern of the form of the text."""

    call: Callable[[], Any]
    error: type[BaseException]
    form: str


def read_texts(path: pathlib.Path) -> dict[str, str]:
    """Return the texts of a file by name."""
    parts = re.split(r"^\[(.+)\]\n", path.read_text("utf-8"), flags=re.M)
    return {name: text.rstrip("\n") for name, text in zip(parts[1::2], parts[2::2])}


def with_placeholders(text: str) -> str:
    """Return the text with a placeholder for the list of all ops, so that a new op changes no file of texts."""
    return text.replace(", ".join(fusedops.ops.__all__), "{ops}")


def without_torch_texts(error: BaseException) -> str:
    """Return the text with placeholders for the parts that torch writes, which differ by version of torch."""
    text = re.sub(r"DeviceMesh\(.+?\)(?= and others|, expected)", "{mesh}", str(error))
    of_torch = isinstance(error.__cause__, RuntimeError)
    return text.replace(str(error.__cause__), "{torch's own}") if of_torch else text


class Table:
    """The pinned texts of one test file.

    Args:
        test_file: its path; the texts are in a file beside it with the suffix ``.txt``.
        *fixtures: what its tests use.
    """

    def __init__(self, test_file: str, *fixtures: str) -> None:
        self.path = pathlib.Path(test_file).with_suffix(".txt")
        self.fixtures = fixtures
        self.pins: dict[str, Pin] = {}

    def pin(self, name: str, call: Callable[[], Any], error: type[BaseException], form: str = FORM) -> None:
        """Add a row: a call, what it raises, and a pattern of the form of the text."""
        assert name not in self.pins, name
        self.pins[name] = Pin(call, error, form)

    def check(self, name: str, write: bool = False) -> None:
        """Assert that the call raises the pinned text, or write what it raises."""
        row = self.pins[name]
        with pytest.raises(row.error) as raised:
            row.call()
        assert type(raised.value) is row.error
        text = with_placeholders(without_torch_texts(raised.value))
        assert re.search(row.form, text, re.S), f"got the text {text!r}, expected one like {row.form!r}"
        texts = read_texts(self.path)
        if write and texts.get(name) != text:
            texts[name] = text
            rows = [f"[{each}]\n{texts[each]}\n" for each in [*self.pins, *(texts.keys() - self.pins)] if each in texts]
            self.path.write_text("\n".join(rows), encoding="utf-8")
        assert text == read_texts(self.path).get(name), f"if it is intended: pytest --write-texts {self.path.stem}.py"

    def tests(self, absent: tuple[str, ...] = ()) -> tuple[Callable[..., None], Callable[[], None]]:
        """Return the tests of the rows, and of the file, which has a text for each row and ``absent`` ones."""

        @pytest.mark.usefixtures("clean_fusedops", *self.fixtures)
        @pytest.mark.parametrize("name", self.pins)
        def test_a_text(name: str, pytestconfig: pytest.Config) -> None:
            self.check(name, pytestconfig.getoption("--write-texts"))

        def test_no_text_is_left_over() -> None:
            assert set(self.pins) == set(read_texts(self.path)) - set(absent)

        return test_a_text, test_no_text_is_left_over
