"""Bias + GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415), the activation of a transformer's MLP. Replaces Megatron's
GeLUFunction, Slapo's BiasGeLUFunction, and the chain add -> gelu.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from fusedops._op import Case, Direction, Op, Tolerance
from fusedops.errors import InvalidInputError
from fusedops.ops._checks import FLOATING, STRIDED, any_nested, broadcasts, word, wrong_beside, wrong_tensor

Approximate = Literal["tanh", "none"]


def bias_gelu(
    x: Tensor, bias: Tensor | None = None, *, approximate: Approximate = "tanh", backend: str | None = None
) -> Tensor:
    """GELU of ``x + bias``.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64.
        bias: broadcastable to ``x``, usually (H,), any of the same dtypes, or None.
        approximate: "tanh", as Megatron and GPT-2 train with, or "none", the exact form by erf. They differ by up to
            4.7e-4.
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in force.

    Returns:
        (..., H), contiguous, the dtype of ``x + bias`` by torch's promotion. The sum and the function are computed in
        float32 (float64 for float64). The gradient of ``bias`` is summed in float32, in the same order on every run.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: Megatron-LM, ``megatron/core/fusions/fused_bias_gelu.py``; torch, ``torch.nn.functional.gelu``.
    """
    return OP.run(x, bias, approximate, backend)


_FORMS = frozenset(("tanh", "none"))  # no tuple: an array is compared with its elements, one by one


def _validate(x: Any, bias: Any, approximate: Any) -> None:
    try:
        if x.dtype not in FLOATING or x.layout is not STRIDED or approximate not in _FORMS:
            raise _invalid(x, bias, approximate)
        if bias is None:
            if x.is_nested:
                raise _invalid(x, bias, approximate)
        elif (
            bias.dtype not in FLOATING
            or bias.layout is not STRIDED
            or bias.device != x.device
            or not broadcasts(bias.shape, x.shape)
        ):
            raise _invalid(x, bias, approximate)
    except RuntimeError:
        if any_nested(x, bias):
            raise _invalid(x, bias, approximate) from None
        raise
    except (AttributeError, TypeError):
        raise _invalid(x, bias, approximate) from None


def _invalid(x: Any, bias: Any, approximate: Any) -> InvalidInputError:
    wrong = wrong_tensor("x", x)
    if wrong is None and not (isinstance(approximate, str) and approximate in _FORMS):
        wrong = f'approximate is {word(approximate)}; needs "tanh" or "none"; "none" is the exact form'
    wrong = wrong or wrong_tensor("bias", bias) or wrong_beside("bias", bias, x)
    return InvalidInputError(f"bias_gelu: {wrong}")


def _promoted(x: Any, bias: Any) -> torch.dtype:
    return x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)


def _sum(x: Tensor, bias: Tensor | None) -> Tensor:
    """``x + bias`` in the dtype of the arithmetic."""
    wide = torch.promote_types(_promoted(x, bias), torch.float32)
    return x.to(wide) if bias is None else x.to(wide) + bias.to(wide)


def _reference(x: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    return torch.nn.functional.gelu(_sum(x, bias), approximate=approximate).to(_promoted(x, bias))


def _backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    u = _sum(x, bias)
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi)
        t = torch.tanh(inner * u * (1 + 0.044715 * u * u))
        slope = 0.5 * (1 + t) + 0.5 * u * (1 - t * t) * inner * (1 + 3 * 0.044715 * u * u)
    else:
        slope = 0.5 * (1 + torch.erf(u / math.sqrt(2))) + u * torch.exp(-0.5 * u * u) / math.sqrt(2 * math.pi)
    du = grad.to(u.dtype) * slope
    dx = du.to(x.dtype) if needs[0] else None
    dbias = du.sum_to_size(bias.shape).to(bias.dtype) if bias is not None and needs[1] else None
    return dx, dbias


def _output(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    return torch.empty_like(x, dtype=_promoted(x, bias), memory_format=torch.contiguous_format)


def _min_bytes(x: Any, bias: Any, approximate: str) -> Mapping[Direction, int]:
    """Read x, write y; read g and x, write dx. The bias, and its gradient, are read and written once."""
    elements, wide = math.prod(x.shape), _promoted(x, bias).itemsize
    small = 0 if bias is None else math.prod(bias.shape) * bias.dtype.itemsize
    forward = elements * (x.dtype.itemsize + wide) + small
    return {"forward": forward, "backward": elements * (wide + 2 * x.dtype.itemsize) + 2 * small}


OP = Op(
    name="bias_gelu",
    reference=_reference,
    backward=_backward,
    differentiable=("x", "bias"),
    validate=_validate,
    output=_output,
    tolerance={
        torch.float16: Tolerance(1e-3, 1e-3),  # one rounding to an 11-bit mantissa
        torch.bfloat16: Tolerance(1e-2, 1.6e-2),  # one rounding to an 8-bit mantissa
        torch.float32: Tolerance(2e-6, 1.3e-6),  # the sigmoid form of tanh is within 5e-7
        torch.float64: Tolerance(1e-12, 1e-12),
    },
    gradient_tolerance={
        # absolute: dbias is a sum over rows; the tests have up to 2048 of them, each product below about 5
        torch.float16: Tolerance(4e-3, 2e-3),
        torch.bfloat16: Tolerance(3e-2, 1.6e-2),
        torch.float32: Tolerance(1e-4, 1e-5),
        torch.float64: Tolerance(1e-11, 1e-12),
    },
    cases=(
        Case("gpt3_6.7b_mlp", {"x": (2048, 16384), "bias": (16384,)}, "GPT-3 6.7B, 4 * 4096, one sequence"),
        Case("bert_large_mlp", {"x": (8, 512, 4096), "bias": (4096,), "approximate": "none"}, "BERT-large, erf"),
        Case("ragged", {"x": (3, 1000), "bias": (1000,)}, "no size is a power of two"),
        Case("no_bias", {"x": (4, 128, 3072)}, "GPT-2, the bias added by the linear layer"),
        Case("row_bias", {"x": (64, 96), "bias": (64, 1)}, "a bias for each row"),
        Case("full_bias", {"x": (16, 256), "bias": (16, 256)}, "a bias of x's own shape"),
    ),
    min_bytes=_min_bytes,
    formula="gelu(x + bias)",
    doc=bias_gelu.__doc__ or "",
)
