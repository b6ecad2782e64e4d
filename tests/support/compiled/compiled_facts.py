"""Facts of Triton kernels that ``triton_aot.py`` compiles, in a fork of a process that has imported it: see there."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from fork_server import ForkServer
from repository import ROOT

#: A tensor's first ``empty_like`` on the device meta imports what takes a second.
_PRELOAD = "import triton_aot, torch; torch.empty_like(torch.empty(1, device='meta'))"
_COMPILE = """
import json, signal
signal.alarm({seconds})
from triton_aot import facts_of
print(json.dumps(facts_of(json.loads({cases!r}))))
"""


def compiler(folder: pathlib.Path) -> ForkServer:
    """Return a process with all imports of the programs that compile; folder: of Triton's cache."""
    path = [str(ROOT), *sys.path]
    environ = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    return ForkServer(f"import sys; sys.path[:0] = {path!r}; {_PRELOAD}", environ)


def compiled_facts(cases: Sequence[dict[str, Any]], server: ForkServer, seconds: int = 900) -> list[dict[str, Any]]:
    """Return the facts of each case.

    Args:
        cases: as ``triton_aot.facts_of`` takes them.
        server: made by ``compiler``; the cases are compiled in one fork of it.
        seconds: that it may take.
    """
    return server.run(_COMPILE.format(seconds=seconds, cases=json.dumps([*cases])))


def each(cases: Mapping[str, dict[str, Any]]) -> list[Any]:
    """Return the parameters of a test of each case, by name. One that is "long" is compiled by `make test-long`."""
    return [pytest.param(name, marks=[pytest.mark.long] * case.get("long", False)) for name, case in cases.items()]


def wanted(cases: Mapping[str, dict[str, Any]], request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Return the cases without those that are "long", but for those that this run has a test of."""
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    return {name: case for name, case in cases.items() if not case.get("long") or name in asked}
