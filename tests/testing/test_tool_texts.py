"""Every text of verify, bind, the conformance kit, stats and launches, word for word."""

import importlib.metadata
import importlib.util
import os
import pathlib
import runpy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_calls import GOOD, INVALID, PLUGIN, POLICY, X, alone, made, unavailable, with_mine
from error_texts import Table
from state import without_backends
from torch import nn

import fusedops

TRITON = importlib.util.find_spec("triton") is not None  # without it the text of a capture is not shown
CORE = pathlib.Path(fusedops.__file__).parent
TABLE = Table(__file__, "fakes")
pin = TABLE.pin


def verifying(**how: Any) -> Callable[[], Any]:
    """A call of a kernel that is wrong, for it gives x."""

    def run() -> None:
        alone(made(result="x.clone()"))
        with fusedops.verify(against="reference", **how):
            fusedops.bias_gelu(X)

    return run


def with_unavailable(then: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        alone(GOOD, probe=unavailable)
        then()

    return run


def verify(against: str, **how: Any) -> Callable[[], Any]:
    return lambda: fusedops.verify(against, **how)


def compared(batch: Any) -> Callable[[], Any]:
    model = nn.Identity()
    return lambda: fusedops.testing.compare_models(model, model, [batch], run=lambda model, batch: torch.zeros(1, 3, 4))


def bind(*args: Any) -> Callable[[], Any]:
    return lambda: fusedops.bind(*args)


def checks(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    def run() -> Any:
        from fusedops.testing import checks

        return checks(*args, **kwargs)

    return run


def reproduce(*args: Any) -> Callable[[], Any]:
    def run() -> Any:
        from fusedops.testing import reproduce

        return reproduce(*args)

    return run


CHECK = "bias_gelu/forward/kernel"
pin("a mismatch", verifying(), fusedops.MismatchError)
pin("mismatches", verifying(raise_on_mismatch=False), fusedops.FusedOpsWarning)
pin("verify's every", verify("eager", every=0), INVALID)
pin("verify's every, a fraction", verify("eager", every=0.1), INVALID)
pin("verify's backend", verify("eagr"), POLICY)
pin("verify's kernel", with_unavailable(verify("mine")), POLICY)
pin("bind's op", bind("bias_gel"), POLICY)
pin("a batch without tokens", compared({}), INVALID)
pin("logits of other rows", compared({"input_ids": torch.zeros(1, 2, dtype=torch.long)}), INVALID)
pin("bind's x", bind("bias_gelu", fusedops.TensorSpec((2, 4))), INVALID)
pin("the kit's backend", checks("eagr"), POLICY)
pin("nothing", without_backends(checks("eager")), POLICY)
pin("the kit's op", checks("eager", op="bias_gel"), POLICY)
pin("the kit's machine", with_unavailable(checks("mine")), PLUGIN)
pin("the kit's device", with_mine(checks("mine", "meta")), PLUGIN)
pin("no device", with_mine(checks("mine", "gpu")), PLUGIN)
pin("the kit's check", with_mine(reproduce("mine", "values", "")), POLICY)
pin("the kit's case", with_mine(reproduce("mine", CHECK, "x")), POLICY)


def counting() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEDOPS_STATS", "yes")
        patch.setattr(os, "register_at_fork", lambda **_: None, raising=False)
        runpy.run_path(str(CORE / "_dispatch" / "selection" / "stats.py"))


pin("FUSEDOPS_STATS", counting, fusedops.FusedOpsWarning)


def captured() -> None:
    from triton.runtime.jit import JITFunction

    from fusedops_triton.launch import launcher

    kernel: Any = object.__new__(JITFunction)  # compiled and not loaded
    kernel.__module__, kernel.__name__ = "fusedops_triton.softmax._softmax", "_forward"
    kernel.arg_names = ["y_ptr", "x_ptr", "mask_ptr", "scale"]
    kernel.run = lambda *args, **kwargs: types.SimpleNamespace(module=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "_is_capturing", lambda: True)
        launcher.Launch(kernel, (1,), (), {}, 4)._launch_with_triton(
            (torch.empty(2, 4), torch.empty(4, 2).t(), None, 1.0)
        )


if TRITON:
    pin("a capture", captured, fusedops.FusedOpsError)

test_a_text, test_no_text_is_left_over = TABLE.tests(absent=() if TRITON else ("a capture",))
