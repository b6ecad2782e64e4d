"""Bias + dropout + residual add, the end of each half of a transformer layer. Replaces Megatron's bias_dropout_add."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedops._op import Case, Direction, Op
from fusedops.errors import InvalidInputError
from fusedops.ops import _bias_dropout
from fusedops.ops._checks import (
    FLOATING,
    STRIDED,
    any_nested,
    broadcasts,
    is_probability,
    is_seed,
    wrong_beside,
    wrong_dropout,
    wrong_tensor,
)
from fusedops.ops._philox import as_seed, dropped, with_seed


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float = 0.5,
    *,
    training: bool = True,
    seed: int | Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """``residual + dropout(x + bias)``. No input is written, in evaluation either.

    The mask is a pure function of the seed and of each element's linear index, the same bits on every backend; nothing
    but the seed is kept for backward.

    Args:
        x: (...), float16, bfloat16, float32 or float64.
        bias: broadcastable to ``x``, usually (H,), any of the same dtypes, or None.
        residual: the shape of ``x``, any of the same dtypes. Where ``x`` or ``bias`` differ from it in dtype, they are
            taken in its dtype: a float32 residual stream stays float32.
        p: probability of dropping an element, in [0, 1]. Kept values are multiplied by 1 / (1 - p); p = 1 gives the
            residual exactly.
        training: False drops nothing, and draws no random number; so does p = 0.
        seed: a 64-bit number, or an int64 tensor of one element on the device of ``x``. None: drawn from torch's
            generator of that device.
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in force.

    Returns:
        (...), contiguous, the dtype of ``residual``. Computed in float32 (float64 for float64).

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: Megatron-LM, ``megatron/core/fusions/fused_bias_dropout.py``; Salmon et al. 2011 (Philox).
    """
    # what is not as annotated is left to validate, and its words
    plain = isinstance(x, Tensor) and isinstance(training, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if plain and is_probability(p) and is_seed(seed):
        seed = as_seed(seed, p, training, x)
    return OP.run(x, bias, residual, p, training, seed, backend)


def _validate(x: Any, bias: Any, residual: Any, p: Any, training: Any, seed: Any) -> None:
    try:
        if (
            x.dtype not in FLOATING
            or x.layout is not STRIDED
            or residual.dtype not in FLOATING
            or residual.layout is not STRIDED
            or residual.shape != x.shape
            or residual.get_device() != x.get_device()
            or residual.is_cpu is not x.is_cpu  # meta has the CPU's index
            or not is_probability(p)
            or (training is not True and training is not False)
        ):
            raise _invalid(x, bias, residual, p, training, seed)
        if bias is not None and (
            bias.dtype not in FLOATING
            or bias.layout is not STRIDED
            or bias.device != x.device
            or not broadcasts(bias.shape, x.shape)
        ):
            raise _invalid(x, bias, residual, p, training, seed)
        if (seed is not None or (training and p > 0)) and wrong_dropout(p, training, seed, x) is not None:
            raise _invalid(x, bias, residual, p, training, seed)
    except RuntimeError:
        if any_nested(x, bias, residual):
            raise _invalid(x, bias, residual, p, training, seed) from None
        raise
    except (AttributeError, TypeError):
        raise _invalid(x, bias, residual, p, training, seed) from None


def _invalid(x: Any, bias: Any, residual: Any, p: Any, training: Any, seed: Any) -> InvalidInputError:
    wrong = wrong_tensor("x", x) or wrong_tensor("residual", residual) or wrong_dropout(p, training, seed, x)
    if wrong is None and residual.shape != x.shape:
        given, wanted = tuple(residual.shape), tuple(x.shape)
        wrong = f"residual has shape {given}; needs the shape of x, {wanted}; expand the smaller one to it"
    wrong = (
        wrong or wrong_beside("residual", residual, x) or wrong_tensor("bias", bias) or wrong_beside("bias", bias, x)
    )
    return InvalidInputError(f"bias_dropout_add: {wrong}")


def _reference(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float = 0.5,
    *,
    training: bool = True,
    seed: Tensor | None = None,
) -> Tensor:
    out = residual.dtype
    wide = torch.promote_types(out, torch.float32)
    u = x.to(out).to(wide)
    if bias is not None:
        u = u + bias.to(out).to(wide)
    return (residual.to(wide) + dropped(u, p, seed if training and p > 0 else None)).to(out)


def _output(x: Tensor, bias: Tensor | None, residual: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(residual, memory_format=torch.contiguous_format)


def _min_bytes(x: Any, bias: Any, residual: Any, p: float, training: bool, seed: Any) -> Mapping[Direction, int]:
    """Read x and residual, write y. Backward as bias_dropout: the residual's gradient is g itself."""
    elements, size = math.prod(x.shape), residual.dtype.itemsize
    small = 0 if bias is None else math.prod(bias.shape) * bias.dtype.itemsize
    return {
        "forward": elements * (x.dtype.itemsize + 2 * size) + small,
        "backward": _bias_dropout.backward_bytes(x, bias, residual.dtype, p, training),
    }


OP = Op(
    name="bias_dropout_add",
    reference=_reference,
    backward=_bias_dropout.OP.backward,  # the same function: the residual's gradient is grad itself
    differentiable=("x", "bias"),
    passed_through="residual",
    identity=_bias_dropout.OP.identity,
    validate=_validate,
    output=_output,
    tolerance=_bias_dropout.OP.tolerance,
    gradient_tolerance=_bias_dropout.OP.gradient_tolerance,
    cases=tuple(
        Case(case.name, {**case.args, "residual": case.args["x"], "bias": case.args.get("bias")}, case.source)
        for case in _bias_dropout.OP.cases
    ),
    min_bytes=_min_bytes,
    formula="residual + dropout(x + bias, p)",
    complete=with_seed,
    doc=bias_dropout_add.__doc__ or "",
)
