"""RMSNorm and LayerNorm in models, recognised by their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import Module

from fusedops import ops
from fusedops._torch import autocasts, is_traced
from fusedops.dtypes import compute_dtype, promoted
from fusedops.integrations._replacement import Replacement, own_body, own_class
from fusedops.integrations._trial.source import reason_of_source
from fusedops.integrations._trial.twin import (
    called,
    is_replaced_elsewhere,
    near,
    numbers,
    parameters_of,
    twin,
)
from fusedops.integrations._trial.whole import TOKENS, seen_whole

# of the dtype of the result where that of the weight differs: Gemma's, Llama's and T5's
Result = Literal["input", "promoted", "weight"]

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps")
_EPS_CONSTANTS = (1e-5, 1e-6, 1e-8, 1e-12)  # of modules that write it into their forward, as OLMo's
_TOLERANCE = 2e-5  # of float32; a variance with Bessel's correction differs by more up to 16384 elements
_NARROW = 2.0**-6  # of bfloat16, with a rounding before the weight


@dataclass(frozen=True)
class Norm(Replacement):
    """The settings of a replaced norm."""

    op: str
    eps: float | None  # None: of the dtype of the computation, as torch's RMSNorm has it
    offset: float
    has_weight: bool
    has_bias: bool
    result: Result
    wide_under_autocast: bool

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the norm of the one argument."""
        (x,) = (*args, *kwargs.values())
        if not is_traced() and x.is_inference() and torch.is_grad_enabled():
            x = x.clone()  # autograd keeps no tensor of inference mode; norms of several functions keep what they made
        weight = _parameter(module, "weight") if self.has_weight else None
        if self.wide_under_autocast and not x.is_cpu and autocasts(x.device.type):
            x = x.float()  # autocast's rule for torch's layer_norm on an accelerator
        # comparisons first: a Tensor.to that changes nothing takes 1 us
        if weight is not None and x.dtype != weight.dtype and self.result != "input":
            x = x.to(promoted(x, weight))
        eps = torch.finfo(compute_dtype(x.dtype)).eps if self.eps is None else self.eps
        if self.op == "rms_norm":
            y = ops.rms_norm(x, weight, eps, offset=self.offset)
            y = y + _parameter(module, "bias") if self.has_bias else y
        else:
            bias = _parameter(module, "bias") if self.has_bias else None
            factor = weight if weight is None or self.offset == 0 else weight + self.offset  # the op has no offset
            y = ops.layer_norm(x, factor, bias, eps)
        if weight is not None and y.dtype != weight.dtype and self.result == "weight":
            y = y.to(weight.dtype)
        return y


def _parameter(module: Any, name: str) -> Any:
    """Return a parameter, without the call of torch's __getattr__ where there is one of the name."""
    value = module._parameters.get(name)
    return getattr(module, name) if value is None else value  # a wrapper has a tensor or a property in its place


def recognised_norm(module: Module) -> Replacement | str | None:
    """Return the replacement of a norm, the reason why a norm is left, or None for a module that is no norm.

    >>> recognised_norm(torch.nn.RMSNorm(8, eps=1e-6)).op
    'rms_norm'
    >>> recognised_norm(torch.nn.GroupNorm(2, 8))
    'its results are those of neither rms_norm nor layer_norm'
    """
    if not _looks_like_a_norm(module):
        return None
    if is_replaced_elsewhere(module):
        return "another library has replaced its forward"
    parameters = dict(module.named_parameters(recurse=False))
    buffers = dict(module.named_buffers())
    if not buffers.keys() <= {"weight", "bias"}:
        return "it has buffers"
    parameters |= buffers
    others = sorted(parameters.keys() - {"weight", "bias"})
    if others:
        return f"it has a parameter {', '.join(others)}, expected a weight, a bias, or neither"
    if any(value.dim() != 1 for value in parameters.values()):
        return "its weight or bias does not have one dim"
    arguments = parameters_of(own_class(module).forward)
    if arguments is None or len(arguments) != 1 or arguments[0].kind is not arguments[0].POSITIONAL_OR_KEYWORD:
        names = ", ".join(argument.name for argument in arguments or ())
        return f"its forward takes {names}, expected one tensor"
    size = _size(module, parameters)
    if size < 2:
        return "the size of its weight is not known"
    reason = reason_of_source([module], tried=("float16", "half"))
    if reason is not None:
        return reason
    norm = next((norm for norm in _hypotheses(module, parameters) if _has_values_of(norm, module, size)), None)
    if norm is None:
        return "its results are those of neither rms_norm nor layer_norm"
    result = _result_rule(norm, module, size)
    return (
        _whole(replace(norm, result=result), module, size)
        if result
        else "the dtypes of its results follow another rule"
    )


def _whole(norm: Norm, module: Module, size: int) -> Replacement | str:
    """Return the norm, or what its forward does beside it."""
    tensors = _tensors(norm, size, torch.float32)
    calls = ((numbers(22, *shape, size),) for shape in TOKENS)
    own, forward = twin(module, tensors), own_class(module).forward
    return seen_whole(norm, own, forward, partial(_expected, norm, tensors=tensors), calls, _TOLERANCE)


def _looks_like_a_norm(module: Module) -> bool:
    if any(True for _ in module.children()) or isinstance(module, torch.jit.ScriptModule):
        return False
    return "norm" in own_class(module).__name__.lower() or "RMSNorm" in str(getattr(module, "kernel_layer_name", ""))


def _size(module: Module, parameters: Mapping[str, Tensor]) -> int:
    """Return H; the weight's, else that which the module states, else any."""
    if parameters:
        return int(next(iter(parameters.values())).shape[0])
    shape: Any = getattr(module, "normalized_shape", None)
    sizes: tuple[Any, ...] = tuple(cast("Sequence[Any]", shape)) if isinstance(shape, Sequence) else ()
    return int(sizes[0]) if len(sizes) == 1 else 16


def _hypotheses(module: Module, parameters: Mapping[str, Tensor]) -> Iterator[Norm]:
    stated: set[float | None] = {
        value for name in _EPS_NAMES if isinstance(value := getattr(module, name, None), float)
    }
    if not stated and any(getattr(module, name, 0.0) is None for name in _EPS_NAMES):
        stated = {None}
    has_weight, has_bias = "weight" in parameters, "bias" in parameters
    # torch's own function is on autocast's list for accelerators; norms written out are not
    code = getattr(own_body(module), "__code__", None)
    wide = code is not None and "layer_norm" in code.co_names
    for eps in sorted(stated, key=lambda eps: eps or 0.0) or _EPS_CONSTANTS:
        if not has_bias:
            for offset in (0.0, 1.0) if has_weight else (0.0,):
                yield Norm("rms_norm", eps, offset, has_weight, False, "input", False)
            if has_weight and "weight" in dict(module.named_buffers()):  # a buffer that is not used, as Falcon Mamba's
                yield Norm("rms_norm", eps, 0.0, False, False, "input", False)
        if has_weight and has_bias:  # diffusers'
            yield Norm("rms_norm", eps, 0.0, True, True, "input", False)
        if has_weight or not has_bias:
            for offset in (0.0, 1.0) if has_weight else (0.0,):
                yield Norm("layer_norm", eps, offset, has_weight, has_bias, "input", wide)


def _tensors(norm: Norm, size: int, dtype: torch.dtype, factor: float = 1.0) -> dict[str, Tensor | None]:
    weight = numbers(1, size, dtype=dtype) * factor if norm.has_weight else None
    return {"weight": weight, "bias": numbers(2, size, dtype=dtype) if norm.has_bias else None}


def _expected(norm: Norm, x: Tensor, tensors: dict[str, Tensor | None]) -> Tensor:
    weight, eps = tensors["weight"], torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    if norm.op == "rms_norm":
        y = ops.OPS["rms_norm"].reference(x, weight, eps, norm.offset)
        return y if tensors["bias"] is None else y + tensors["bias"]
    weight = None if weight is None else weight + norm.offset
    return ops.OPS["layer_norm"].reference(x, weight, tensors["bias"], eps)


def _has_values_of(norm: Norm, module: Module, size: int) -> bool:
    """Return True where the module's own forward agrees on inputs of several ranks and sizes, eps' own included.

    A row is 0, and a weight is as large as its inputs: a branch or a clamp is noticed.
    """
    agrees = False
    other = 2 if size == 3 else 3  # of the last dim, where that before it has the size
    for seed, shape in enumerate([(2, size), (2, 2, size), (1, 2, 2, size), (1, 1, 1, 2, size), (2, size, other)], 10):
        for factor in (1.0, (norm.eps or torch.finfo(torch.float32).eps) ** 0.5, 100.0, 1e9):
            tensors, x = _tensors(norm, size, torch.float32, max(factor, 1.0)), (numbers(seed, *shape) + 0.5) * factor
            x.view(-1, shape[-1])[0] = 0.0
            result = called(own_class(module).forward, twin(module, tensors), x.clone())
            if isinstance(result, Tensor):
                if norm.has_weight and shape[-1] != size:
                    return False  # a norm of another dim, as GroupNorm with one group
                if not near(result, _expected(norm, x, tensors), _TOLERANCE):
                    return False
                agrees = True  # a rank for which the forward raises is never seen in the model
    return agrees


def _result_rule(norm: Norm, module: Module, size: int) -> Result | None:
    """Return the rule for the dtype of the result, or None."""
    rules: list[Result] = ["input", "promoted", "weight"]
    if not _is_apart_from_autocast(norm, module, size):
        return None
    narrow, wide, half, double = torch.bfloat16, torch.float32, torch.float16, torch.float64
    pairs = [(narrow, narrow), (narrow, wide), (wide, narrow), (half, half), (half, wide), (wide, half)]
    # small numbers, where eps depends on the dtype; larger ones, whose squares float16 has, show a clamp
    factors = (30.0,) if norm.eps is not None else (0.03, 30.0)
    for (given, own), factor in product([*pairs, (double, double)], factors):
        tensors = _tensors(norm, size, own)
        x = numbers(20, 2, 2, size, dtype=given) * factor
        result = called(own_class(module).forward, twin(module, tensors), x.clone())
        if not isinstance(result, Tensor):
            continue  # torch's own norms refuse some pairs
        kept = own if norm.has_weight else given
        dtypes = {"input": given, "promoted": torch.promote_types(given, kept), "weight": kept}
        rules = [rule for rule in rules if dtypes[rule] == result.dtype]
        if not near(result, _expected(norm, x.float(), tensors), _NARROW):
            return None
    return rules[0] if rules else None


def _is_apart_from_autocast(norm: Norm, module: Module, size: int) -> bool:
    """Return True where the results of the module's own forward are the same under autocast."""
    tensors, x = _tensors(norm, size, torch.float32), numbers(21, 2, 2, size)

    def run() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return own_class(module).forward(twin(module, tensors), x.clone())

    result = called(run)
    if not isinstance(result, Tensor):
        return True  # of a rank that the model does not have
    return result.dtype is torch.float32 and near(result, _expected(norm, x, tensors), _TOLERANCE)
