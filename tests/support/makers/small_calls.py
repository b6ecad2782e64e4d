"""Small calls of applied models, which are left to torch: here they are the ops', so that tests reach these."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from unittest.mock import patch

from fusedops.integrations import _small

_LEAST = _small.LEAST


@contextmanager
def no_call_is_small() -> Generator[None]:
    """Let the ops compute calls of any size."""
    with patch.object(
        _small, "LEAST", {op: least._replace(with_gradient=0, without=0) for op, least in _LEAST.items()}
    ):
        yield


@contextmanager
def calls_may_be_small() -> Generator[None]:
    """Leave small calls to torch, as outside of tests."""
    with patch.object(_small, "LEAST", _LEAST):
        yield
