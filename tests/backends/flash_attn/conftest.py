"""Fixtures of the tests of the flash_attn backend, on the stand-in for the package."""

from __future__ import annotations

from collections.abc import Iterator

import flash_attn_standin
import pytest
from flash_attn_standin import NAME, Call

import fusedops


@pytest.fixture(params=[False, True], ids=["2", "3"])
def log(request: pytest.FixtureRequest) -> Iterator[list[Call]]:
    """The calls of the package, on a machine where the backend is first."""
    with flash_attn_standin.flash_attn(three=request.param) as calls, fusedops.use(NAME, fallback="raise"):
        yield calls
