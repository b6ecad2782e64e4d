"""The version of another library that an integration needs, checked before its first import."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version


def require(distribution: str, oldest: str, extra: str) -> None:
    """Raise ImportError, with the fix, where a distribution is missing or older than ``oldest``.

    >>> require("torch", "2.10", "triton")
    """
    fix = f"expected {oldest} or later; to fix: pip install '{distribution}>={oldest}', or fusedops with [{extra}]"
    try:
        got = version(distribution)
    except PackageNotFoundError:
        raise ImportError(f"got no {distribution}, {fix}", name=distribution) from None
    if _numbers(got) < _numbers(oldest):
        raise ImportError(f"got {distribution} {got}, {fix}", name=distribution)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
