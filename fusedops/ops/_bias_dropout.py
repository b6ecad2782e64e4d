"""Bias + dropout. Replaces Slapo's bias_dropout and the chain add -> dropout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedops._op import Case, Direction, Op, Tolerance
from fusedops.errors import InvalidInputError
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


def bias_dropout(
    x: Tensor,
    bias: Tensor | None = None,
    p: float = 0.5,
    *,
    training: bool = True,
    seed: int | Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Dropout of ``x + bias``.

    The mask is a pure function of the seed and of each element's linear index, the same bits on every backend; nothing
    but the seed is kept for backward.

    Args:
        x: (...), float16, bfloat16, float32 or float64.
        bias: broadcastable to ``x``, usually (H,), any of the same dtypes, or None.
        p: probability of dropping an element, in [0, 1]. Kept values are multiplied by 1 / (1 - p).
        training: False drops nothing, and draws no random number; so does p = 0.
        seed: a 64-bit number, or an int64 tensor of one element on the device of ``x``. None: drawn from torch's
            generator of that device.
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in force.

    Returns:
        (...), contiguous, the dtype of ``x + bias`` by torch's promotion. Computed in float32 (float64 for float64).

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: Srivastava et al. 2014 (dropout); Salmon et al. 2011 (Philox); Slapo, ``slapo.op.fused_bias``.
    """
    # what is not as annotated is left to validate, and its words
    plain = isinstance(x, Tensor) and isinstance(training, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if plain and is_probability(p) and is_seed(seed):
        seed = as_seed(seed, p, training, x)
    return OP.run(x, bias, p, training, seed, backend)


def _validate(x: Any, bias: Any, p: Any, training: Any, seed: Any) -> None:
    try:
        if (
            x.dtype not in FLOATING
            or x.layout is not STRIDED
            or not is_probability(p)
            or (training is not True and training is not False)
        ):
            raise _invalid(x, bias, p, training, seed)
        if bias is None:
            if x.is_nested:
                raise _invalid(x, bias, p, training, seed)
        elif (
            bias.dtype not in FLOATING
            or bias.layout is not STRIDED
            or bias.device != x.device
            or not broadcasts(bias.shape, x.shape)
        ):
            raise _invalid(x, bias, p, training, seed)
        if (seed is not None or (training and p > 0)) and wrong_dropout(p, training, seed, x) is not None:
            raise _invalid(x, bias, p, training, seed)
    except RuntimeError:
        if any_nested(x, bias):
            raise _invalid(x, bias, p, training, seed) from None
        raise
    except (AttributeError, TypeError):
        raise _invalid(x, bias, p, training, seed) from None


def _invalid(x: Any, bias: Any, p: Any, training: Any, seed: Any) -> InvalidInputError:
    wrong = wrong_tensor("x", x) or wrong_dropout(p, training, seed, x)
    if wrong is None:
        wrong = wrong_tensor("bias", bias) or wrong_beside("bias", bias, x)
    return InvalidInputError(f"bias_dropout: {wrong}")


def _promoted(x: Any, bias: Any) -> torch.dtype:
    return x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)


def _reference(
    x: Tensor, bias: Tensor | None = None, p: float = 0.5, *, training: bool = True, seed: Tensor | None = None
) -> Tensor:
    out = _promoted(x, bias)
    wide = torch.promote_types(out, torch.float32)
    u = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    return dropped(u, p, seed if training and p > 0 else None).to(out)


def _backward(
    grad: Tensor,
    seed: Tensor | None,
    bias: Tensor | None,
    p: float,
    training: bool,
    x_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    du = dropped(grad.to(torch.promote_types(grad.dtype, torch.float32)), p, seed if training and p > 0 else None)
    dx = du.to(x_dtype, copy=True) if needs[0] else None
    dbias = du.sum_to_size(bias.shape).to(bias.dtype, copy=True) if bias is not None and needs[1] else None
    return dx, dbias


def _identity(
    grad: Tensor, seed: Tensor | None, bias: Tensor | None, p: float, training: bool, x_dtype: torch.dtype
) -> bool:
    return _unchanged(grad.dtype, x_dtype, p, training)


def _unchanged(dtype: torch.dtype, x_dtype: torch.dtype, p: float, training: bool) -> bool:
    """Whether the gradient of x is the one given, which has ``dtype``."""
    return (p == 0 or not training) and x_dtype is dtype


def _output(x: Tensor, bias: Tensor | None, p: float, training: bool, seed: Tensor | None) -> Tensor:
    return torch.empty_like(x, dtype=_promoted(x, bias), memory_format=torch.contiguous_format)


def _min_bytes(x: Any, bias: Any, p: float, training: bool, seed: Any) -> Mapping[Direction, int]:
    """Read x, write y; read g, write dx. The bias, and its gradient, are read and written once; no mask is stored."""
    elements, dtype = math.prod(x.shape), _promoted(x, bias)
    small = 0 if bias is None else math.prod(bias.shape) * bias.dtype.itemsize
    return {
        "forward": elements * (x.dtype.itemsize + dtype.itemsize) + small,
        "backward": backward_bytes(x, bias, dtype, p, training),
    }


def backward_bytes(x: Any, bias: Any, dtype: torch.dtype, p: float, training: bool) -> int:
    """Read g (of ``dtype``), write dx, unless it is g itself, and the gradient of the bias."""
    elements = math.prod(x.shape)
    small = 0 if bias is None else math.prod(bias.shape) * bias.dtype.itemsize
    if _unchanged(dtype, x.dtype, p, training):
        return 0 if bias is None else elements * dtype.itemsize + small
    return elements * (dtype.itemsize + x.dtype.itemsize) + small


OP = Op(
    name="bias_dropout",
    reference=_reference,
    backward=_backward,
    differentiable=("x", "bias"),
    identity=_identity,
    validate=_validate,
    output=_output,
    tolerance={
        torch.float16: Tolerance(1e-3, 1e-3),  # one rounding to an 11-bit mantissa
        torch.bfloat16: Tolerance(1e-2, 1.6e-2),  # one rounding to an 8-bit mantissa
        torch.float32: Tolerance(1e-6, 1e-6),
        torch.float64: Tolerance(1e-12, 1e-12),
    },
    gradient_tolerance={
        # absolute: dbias is a sum over rows; the tests have up to 2048 of them
        torch.float16: Tolerance(4e-3, 2e-3),
        torch.bfloat16: Tolerance(3e-2, 1.6e-2),
        torch.float32: Tolerance(1e-4, 1e-5),
        torch.float64: Tolerance(1e-11, 1e-12),
    },
    cases=(
        Case("gpt2_small", {"x": (8, 1024, 768), "bias": (768,), "p": 0.1, "seed": 1}, "GPT-2, after the MLP"),
        Case("ragged", {"x": (3, 1001), "bias": (1001,), "p": 0.5, "seed": 2**40 + 7}, "elements not divisible by 4"),
        Case("no_bias", {"x": (4, 33, 96), "p": 0.9, "seed": -5}),
        Case("evaluation", {"x": (4, 128), "bias": (128,), "p": 0.1, "training": False}),
        Case("all_dropped", {"x": (4, 128), "bias": (128,), "p": 1.0, "seed": 3}),
    ),
    min_bytes=_min_bytes,
    formula="dropout(x + bias, p)",
    complete=with_seed,
    doc=bias_dropout.__doc__ or "",
)
