"""Values as JSON for the explorer page: Python's ints and floats stay different."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch


class UnsupportedError(ValueError):
    """Python that a formula must not have."""


def encoded(value: Any) -> Any:
    """Return a value as JSON: a number is a Python integer, and a float is ``{"float": text}``."""
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, (tuple, list, frozenset)):
        return [encoded(item) for item in cast("Sequence[Any]", value)]
    if isinstance(value, Mapping):
        return {str(key): encoded(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise UnsupportedError(f"got {value!r}, expected a number, a text, a dtype or a tuple; to fix: give one of these")
