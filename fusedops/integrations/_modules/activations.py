"""GELU modules, of one torch op or of several (GPT-2's, GPT-J's, Phi's), recognised by their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from fusedops import ops
from fusedops._torch import is_traced
from fusedops.integrations._replacement import Replacement, own_class
from fusedops.integrations._trial.source import reason_of_source
from fusedops.integrations._trial.twin import (
    called,
    has_tensors,
    is_replaced_elsewhere,
    near,
    numbers,
    parameters_of,
    without_hooks,
)
from fusedops.integrations._trial.whole import TOKENS, seen_whole

_NAME = "gelu"

Form = Literal["tanh", "none"]

_TOLERANCE = 1e-6  # of float64; GELU by tanh differs from GELU by erf by 5e-4, and a rounded sqrt(2 / pi) by 1e-9
_NARROW = 2.0**-5  # of bfloat16, with a rounding of each function


@dataclass(frozen=True)
class Activation(Replacement):
    """The settings of a replaced GELU."""

    approximate: Form
    is_one_kernel: bool  # of torch
    op: str = "bias_gelu"

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the GELU of the one argument."""
        (x,) = (*args, *kwargs.values())
        if self.is_one_kernel and not is_gelu_served(x):
            return own_class(module).forward(module, x)
        return ops.bias_gelu(x, approximate=self.approximate)


def is_gelu_served(x: Tensor) -> bool:
    """Return True where the op is faster than torch's own function, which is one kernel too.

    On a CPU torch's takes 1.6 to 5 times as long; on other devices both read and write the same bytes, and a compiler
    joins torch's to what stands beside it.
    """
    return x.is_cpu and not is_traced()


def recognised_activation(module: Module) -> Replacement | str | None:
    """Return the replacement of a GELU, the reason why it is left, or None for a module that is none.

    >>> recognised_activation(torch.nn.GELU())
    Activation(approximate='none', is_one_kernel=True, op='bias_gelu')
    >>> recognised_activation(torch.nn.ReLU())
    """
    if has_tensors(module) or any(True for _ in module.children()):
        return None
    arguments = parameters_of(own_class(module).forward)
    if arguments is None or len(arguments) != 1 or arguments[0].kind is not arguments[0].POSITIONAL_OR_KEYWORD:
        return None
    named = _NAME in own_class(module).__name__.lower()
    if isinstance(module, torch.jit.ScriptModule) or is_replaced_elsewhere(module):
        return "another library has replaced its forward" if named else None
    alone = without_hooks(module)
    if alone is None:
        return "it cannot be copied, and is not called itself" if named else None
    reason = reason_of_source([module])
    if reason is not None:
        return reason if named else None
    x, count = numbers(0, 64, dtype=torch.float64), _Calls()
    with torch.random.fork_rng(devices=[]), count:
        result = called(alone.train(False), x)
    for form in ("tanh", "none"):
        if near(result, torch.nn.functional.gelu(x, approximate=form), _TOLERANCE) and result.dtype == x.dtype:
            return _whole(Activation(form, count.calls == 1), alone)
    return "its results are not those of bias_gelu" if named else None


def _whole(found: Activation, alone: Module) -> Replacement | str:
    """Return the GELU, or what its forward does beside it."""
    calls = ((numbers(1, *shape, 8, dtype=torch.float64),) for shape in TOKENS)
    gelu = partial(torch.nn.functional.gelu, approximate=found.approximate)
    for dtype, factor in product((torch.float64, torch.float32, torch.bfloat16), (1.0, 1e3)):
        x = numbers(2, 64, dtype=dtype) * factor
        result = called(own_class(alone).forward, alone, x.clone())
        if not near(result, gelu(x), _NARROW) or result.dtype is not dtype:
            return "its results are not those of bias_gelu"
    return seen_whole(found, alone, own_class(alone).forward, gelu, calls, _TOLERANCE, narrow=True)


class _Calls(TorchFunctionMode):
    """Counts the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and count it where its result is a tensor."""
        result = func(*args, **(kwargs or {}))
        self.calls += isinstance(result, Tensor)
        return result
