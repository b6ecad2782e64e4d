"""Facts of Triton kernels that ``triton_aot.py`` compiles, in a fork of a process that has imported it: see there."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

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
