"""First launches while a CUDA graph is captured, when a GPU's driver loads nothing. With a stub driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from repository import ROOT

pytestmark = pytest.mark.slow  # Triton's compiler
pytest.importorskip("triton", reason="triton is not installed")
if not (ROOT / "benchmarks").exists():
    pytest.skip("needs benchmarks/launch.py, which is not beside the tests here", allow_module_level=True)

START = """
import json
import torch
import triton_launches as made
import fusedops

def capturing(on):
    made.driver.capturing = on
    torch.cuda.is_initialized = lambda: on
    # the device of the stub's tensors is the CPU
    torch.cuda.is_current_stream_capturing = torch.cpu.is_current_stream_capturing = lambda: on

def outcome(call):
    made.driver.launches = []
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    functions = [launch[4] for launch in made.driver.launches]
    return [None if each is None else each[0].removeprefix("fusedops_softmax") for each in functions]

x = torch.zeros(2, 3, 8, 32)
softmax = lambda: made.softmax_forward(x, None, 0.3, False)
seen = []
"""


@pytest.mark.parametrize("way", ["", "triton.__version__ = '3.10.0'"], ids=["fast path", "through Triton"])
def test_a_first_launch_is_refused_with_the_fix_and_the_kernel_stays_usable(
    way: str, program: Callable[[str], Any]
) -> None:
    code = f"""
import triton
{way}
for on in (True, True, False, True):
    capturing(on)
    seen.append(outcome(softmax))
print(json.dumps(seen))
"""
    first, again, after, captured = program(START + code)
    assert first == again
    assert first[0] == "FusedOpsError"
    assert "fusedops_triton.softmax._softmax._forward_on_chip while a CUDA graph is captured" in first[1]
    assert "x float32[2, 3, 8, 32] of strides (768, 256, 32, 1)" in first[1]
    assert "to fix: before the capture call fusedops.warm_up(op, *args)" in first[1]
    assert after == captured == ["_forward_on_chip"]


def test_a_kernel_that_another_layout_has_loaded_is_launched(program: Callable[[str], Any]) -> None:
    code = """
softmax()
longer = torch.zeros(6, 3, 8, 32)  # another launch of the same compiled kernel
capturing(True)
print(json.dumps(outcome(lambda: made.softmax_forward(longer, None, 0.3, False))))
"""
    assert program(START + code) == ["_forward_on_chip"]


def test_warm_up_loads_what_the_capture_launches(program: Callable[[str], Any]) -> None:
    code = """
from fusedops_triton.kernels import KERNELS

# on the CPU, where no GPU is
kernels = tuple(each for each in KERNELS if each.op == "scaled_masked_softmax")
fusedops.register(fusedops.Backend("stub", ("cpu",), 200, kernels))
x.requires_grad_()

def step():
    y = fusedops.scaled_masked_softmax(x, scale=0.3)
    return torch.autograd.grad(y, x, torch.zeros_like(y))

state = torch.get_rng_state()
decision = fusedops.warm_up("scaled_masked_softmax", x, scale=0.3)
seen.append([decision.backend, decision.backward, torch.equal(state, torch.get_rng_state())])
capturing(True)
seen.append(outcome(step))
seen.append(outcome(lambda: fusedops.warm_up("scaled_masked_softmax", x, scale=0.3)))
print(json.dumps(seen))
"""
    decided, captured, refused = program(START + code)
    assert decided == ["stub", "stub", True]
    assert captured == ["_forward_on_chip", "_backward_on_chip"]
    assert refused[0] == "FusedOpsError"
    assert "expected a call before the capture" in refused[1]
