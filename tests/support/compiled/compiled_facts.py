"""Facts of Triton kernels that ``triton_aot.py`` compiles, in processes of its own: see there."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from repository import SUPPORT


def compiled_facts(
    shares: Sequence[Sequence[dict[str, Any]]], folder: pathlib.Path, seconds: float = 900, program: str = "triton_aot"
) -> list[dict[str, Any]]:
    """Return the facts of each case, share by share.

    Args:
        shares: cases; each share is compiled by a process of its own, all at the same time.
        folder: of Triton's cache.
        seconds: that each process may take.
        program: the one that compiles, a file of tests/support/compiled.
    """
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(folder)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SUPPORT / "compiled" / f"{program}.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )
        for _ in shares
    ]  # fmt: skip
    for process, share in zip(processes, shares, strict=True):
        assert process.stdin is not None
        process.stdin.write(json.dumps([*share]))
        process.stdin.close()
        process.stdin = None  # communicate() would close it again
    facts: list[dict[str, Any]] = []
    for process in processes:
        out, err = process.communicate(timeout=seconds)
        facts += [json.loads(line)["facts"] for line in out.splitlines()]
        assert process.returncode == 0, f"after {len(facts)} compilations:\n{err}"
    return facts
