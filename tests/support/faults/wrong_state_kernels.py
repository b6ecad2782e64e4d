"""Wrong kernels that leave the process in another state, for the list in ``wrong_kernels``."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from wrong_kernels import Fault, Run, wrong


def _after(leave: Callable[[], object]) -> Fault:
    """Return a kernel that does this after its work."""

    def fault(run: Run, a: SimpleNamespace) -> Any:
        results = run()
        leave()
        return results

    return fault


def _round(mode: int) -> Callable[[], object]:
    return lambda: ctypes.CDLL(None).fesetround(mode)


DOWN, UP = 0x400, 0x800  # of x86: FE_DOWNWARD, FE_UPWARD
for _text, _op, _direction, _leave in (
    ("autocast is left on", "rms_norm", "forward", lambda: torch.set_autocast_enabled("cpu", True)),
    ("autocast has another dtype", "swiglu", "backward", lambda: torch.set_autocast_dtype("cpu", torch.float16)),
    ("autocast keeps no casts", "layer_norm", "forward", lambda: torch.set_autocast_cache_enabled(False)),
    ("numbers are rounded down", "bias_gelu", "forward", _round(DOWN)),
    ("numbers are rounded up", "scaled_masked_softmax", "backward", _round(UP)),
    ("grad mode is left off", "geglu", "forward", lambda: torch.set_grad_enabled(False)),
    ("grad mode is left off", "attention", "backward", lambda: torch.set_grad_enabled(False)),
    ("numpy is seeded", "bias_dropout", "forward", lambda: np.random.seed(0)),
    ("numpy's generator is drawn from", "rotary_embedding", "backward", lambda: np.random.rand(3)),
    ("garbage is not collected any more", "cross_entropy", "forward", gc.disable),
    (
        "deterministic algorithms are wanted, with warnings",
        "linear_cross_entropy",
        "backward",
        lambda: torch.set_deterministic_debug_mode("warn"),
    ),
):
    wrong(_text, _op, _direction, "state")(_after(_leave))
