"""Results are right whichever way the process rounds, as libraries of interval arithmetic set it (fesetround)."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from repository import ROOT

import fusedops_cpu
from fusedops.ops import OPS
from fusedops.testing._calls import tensors
from fusedops.testing._subject import Subject

pytestmark = [
    pytest.mark.usefixtures("on_cpu", "one_thread"),
    pytest.mark.skipif(sys.platform == "win32", reason="needs fesetround of the C library"),
]
SHIFT = 10 if platform.machine() == "x86_64" else 22  # of the field in the control register; arm64 swaps two modes
MODES = {"down": 1, "up": 2, "towards zero": 3} if SHIFT == 10 else {"down": 2, "up": 1, "towards zero": 3}


@contextmanager
def rounding(mode: int) -> Iterator[None]:
    """Let this thread round so; the kernels run in it."""
    library = ctypes.CDLL(None)
    assert library.fesetround(mode << SHIFT) == 0
    try:
        yield
    finally:
        library.fesetround(0)


# a draw, and integers that are rounded, are right to the bit, and others in another rounding
NEAREST = {name for name, op in OPS.items() if not op.has_gradient or not any(op.evidence.tolerance[torch.float32])}
OPS_OF_CPU = sorted({each.op for each in fusedops_cpu.fusedops_backend().kernels} - NEAREST)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPS_OF_CPU)
def test_an_op(name: str, mode: str) -> None:
    """All roundings of a sum go one way: the difference may be four times the tolerance."""
    subject = Subject("cpu", OPS[name], "cpu", 2**12)
    for base in subject.bases("forward"):
        args = tuple(tensors(subject.op, base).values())
        want, inputs = subject.answer(args)
        want = replace(want, limits={what: 4 * limit for what, limit in want.limits.items()})
        with rounding(MODES[mode]):
            outputs, gradients = subject.forward(args), subject.gradients(inputs, args)
        subject.assert_outputs(outputs, want, args)
        subject.assert_gradients(gradients, want, args)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="another processor has one instruction set")
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_another_instruction_set(capability: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", __file__]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{len(MODES) * len(OPS_OF_CPU)} passed" in done.stdout
