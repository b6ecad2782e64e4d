"""A table of error texts: what is called, what it raises, and the three parts that the text must contain.

The whole texts are in a file beside the test, with its name and the suffix ``.txt``: a line ``[name]``, then the text.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import fusedops


class Pin(NamedTuple):
    """A call, what it raises, and the three parts of the text."""

    call: Callable[[], Any]
    error: type[BaseException]
    given: str
    needed: str
    do: str


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
    """The pinned texts of one test file."""

    def __init__(self, test_file: str) -> None:
        self.path = pathlib.Path(test_file).with_suffix(".txt")
        self.pins: dict[str, Pin] = {}

    def pin(self, name: str, call: Callable[[], Any], error: type[BaseException], *parts: str) -> None:
        """Add a row."""
        assert name not in self.pins, name
        self.pins[name] = Pin(call, error, *parts)

    def check(self, name: str) -> None:
        """Assert that the call raises the pinned text."""
        row = self.pins[name]
        with pytest.raises(row.error) as raised:
            row.call()
        assert type(raised.value) is row.error
        text = without_torch_texts(raised.value)
        pinned = with_placeholders(text)
        assert pinned == read_texts(self.path).get(name), (
            f"if it is intended, write in {self.path.name}\n[{name}]\n{pinned}"
        )
        for part in (row.given, row.needed, row.do):
            assert part, "a text has three parts"
            assert part in text, f"{part!r} is not in the text"

    def check_complete(self, absent: tuple[str, ...] = ()) -> None:
        """Assert that the file has a text for each row, and no other."""
        assert set(self.pins) == set(read_texts(self.path)) - set(absent)
