"""Fixtures of the tests in this folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest


@pytest.fixture
def bad(fakes: Any) -> Any:
    """A maker of a backend "bad" whose results, forward or backward, are changed by a function."""
    # here, for pytest reads this file in the process that only distributes tests too
    from calls import reference_kernels
    from verify_cases import OP, changed

    import fusedops

    def make(
        forward: Callable[[Any], Any] | None = None,
        backward: Callable[[Any], Any] | None = None,
        op: str = OP.name,
    ):
        kernels = [
            replace(kernel, function=changed(kernel.function, change))
            for kernel, change in zip(reference_kernels(op, "bad", []), (forward, backward))
        ]
        fusedops.register(fusedops.Backend("bad", ("cpu",), 50, tuple(kernels)))

    return make
