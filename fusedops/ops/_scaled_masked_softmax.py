"""Scaled masked softmax, the attention probabilities. Replaces Megatron's and apex's ScaledMaskedSoftmax family,
torch_npu's npu_scaled_masked_softmax, and the chain scale -> masked_fill -> softmax.

This file is the whole contract: what is accepted, what it means, its gradient, how exact, on which sizes it matters.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fusedops._op import Case, Direction, Op, Padding, Tolerance
from fusedops._spec import TensorSpec
from fusedops.errors import InvalidInputError
from fusedops.ops._checks import (
    FLOATING,
    STRIDED,
    any_nested,
    broadcasts,
    is_long,
    is_tensor,
    kind,
    word,
    wrong_beside,
    wrong_layout,
    wrong_tensor,
)


def scaled_masked_softmax(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, causal: bool = False, backend: str | None = None
) -> Tensor:
    """Softmax over the last dimension of ``scale * x``, with masked positions left out.

    ``y = softmax(where(masked, -inf, scale * x), dim=-1)``: scale first, then mask. A masked position has probability
    exactly 0, whatever ``x`` holds there; a row whose positions are all masked is exactly 0, and so is its gradient.

    Args:
        x: (..., Sq, Sk), rank >= 2, float16, bfloat16, float32 or float64. Attention scores.
        mask: bool or uint8, broadcastable to ``x``; True or non-zero means masked out (the opposite of torch's
            scaled_dot_product_attention). None masks nothing.
        scale: a finite number. Never rounded to the dtype of ``x``.
        causal: also masks key k for query q where k > q, both counted from 0 (the first query sees the first key
            only, also where Sq != Sk). Joined with ``mask`` by "or".
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in force.

    Returns:
        (..., Sq, Sk), contiguous, the dtype of ``x``. Computed in float32 (float64 for float64).

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: Megatron-LM, ``megatron/core/fusions/fused_softmax.py``; torch_npu, ``npu_scaled_masked_softmax``.
    """
    return OP.run(x, mask, scale, causal, backend)


_MASKS = frozenset((torch.bool, torch.uint8))
_MAX = sys.float_info.max


def _validate(x: Any, mask: Any, scale: Any, causal: Any) -> None:
    # on the hot path: the tests that pass come first and cost least; words are made only when one fails
    try:
        if (
            x.dtype not in FLOATING
            or x.layout is not STRIDED
            or x.dim() < 2
            or not (-_MAX <= scale <= _MAX if isinstance(scale, float) else isinstance(scale, int) and is_long(scale))
            or (causal is not True and causal is not False)
        ):
            raise _invalid(x, mask, scale, causal)
        if mask is None:
            if x.is_nested:
                raise _invalid(x, mask, scale, causal)
        elif (
            mask.dtype not in _MASKS
            or mask.layout is not STRIDED
            or mask.device != x.device
            or not broadcasts(mask.shape, x.shape)
        ):
            raise _invalid(x, mask, scale, causal)
    except RuntimeError:
        if any_nested(x, mask):
            raise _invalid(x, mask, scale, causal) from None
        raise
    except (AttributeError, TypeError):
        raise _invalid(x, mask, scale, causal) from None


def _invalid(x: Any, mask: Any, scale: Any, causal: Any) -> InvalidInputError:
    return InvalidInputError(f"scaled_masked_softmax: {_what_is_wrong(x, mask, scale, causal)}")


def _what_is_wrong(x: Any, mask: Any, scale: Any, causal: Any) -> str:
    """One sentence: what was given, what is needed, what to do."""
    if wrong := wrong_tensor("x", x):
        return wrong
    if x.dim() < 2:
        return f"x has {x.dim()} dimensions; needs (..., Sq, Sk); add one, as in x.unsqueeze(0)"
    if not isinstance(scale, (int, float)):
        return f"scale is {kind(scale)}; needs a Python number; use float(scale), or scale.item() of a tensor"
    if not -_MAX <= scale <= _MAX or (isinstance(scale, int) and not is_long(scale)):
        return f"scale is {word(scale)}; needs a finite number; 1 / sqrt(head size) is usual"
    if not isinstance(causal, bool):
        return f"causal is {word(causal)}; needs True or False; pass bool(causal)"
    if not is_tensor(mask):
        return f"mask is {kind(mask)}; needs a bool tensor or None; convert it with torch.as_tensor"
    if mask.dtype not in _MASKS:
        if mask.dtype.is_floating_point:
            return (
                f"mask is {mask.dtype}; needs bool or uint8, True where masked out; of an additive mask take mask < 0"
            )
        return f"mask is {mask.dtype}; needs bool or uint8, True where masked out; convert it with mask != 0"
    hint = "; for padding of shape (b, sk) pass mask[:, None, None, :]" if mask.device == x.device else ""
    return wrong_layout("mask", mask) or f"{wrong_beside('mask', mask, x)}{hint}"


def _masked(x: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """The positions that ``mask`` and ``causal`` mask together, broadcastable to x, or None."""
    masked = None if mask is None else mask.bool()
    if causal:
        upper = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        masked = upper if masked is None else masked | upper
    return masked


def _reference(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, causal: bool = False) -> Tensor:
    wide = (x if x.dtype == torch.float64 else x.float()) * scale
    masked = _masked(x, mask, causal)
    if masked is None:
        return torch.softmax(wide, -1).to(x.dtype)
    # a fully masked row would be softmax of -inf alone, NaN: it is computed over zeros and zeroed after
    dead = masked.expand(x.shape).all(-1, keepdim=True)
    y = torch.softmax(wide.masked_fill(masked, -math.inf).masked_fill(dead, 0.0), -1)
    return y.masked_fill(masked, 0.0).to(x.dtype)


def _backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    wide_grad, wide_y = (grad, y) if y.dtype == torch.float64 else (grad.float(), y.float())
    return (scale * wide_y * (wide_grad - (wide_grad * wide_y).sum(-1, keepdim=True))).to(y.dtype)


def _padded(args: Sequence[Any], sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """Keys beyond Sk are masked out; queries beyond Sq are computed from the keys there are, and cut off."""
    x, mask, scale, causal = args
    if mask is not None or sizes[1] > x.shape[-1]:
        mask = _padded_mask(mask, x, sizes)
    return _zero_padded(x, sizes), mask, scale, causal


def _padded_backward(args: Sequence[Any], sizes: tuple[int, ...]) -> tuple[Any, ...]:
    grad, y, scale, causal = args
    return _zero_padded(grad, sizes), _zero_padded(y, sizes), scale, causal


def _zero_padded(x: Any, sizes: tuple[int, ...]) -> Any:
    sq, sk = x.shape[-2:]
    if isinstance(x, TensorSpec):
        return replace(x, shape=(*x.shape[:-2], *sizes))
    return torch.nn.functional.pad(x, (0, sizes[1] - sk, 0, sizes[0] - sq))


def _padded_mask(mask: Any, x: Any, sizes: tuple[int, ...]) -> Any:
    """(..., 1 or Sq, Sk) of the padded call, bool; made once a mask."""
    sq, sk = x.shape[-2:]
    rows = 1 if mask is None or mask.dim() < 2 else mask.shape[-2]
    shape = (*(() if mask is None else mask.shape[:-2]), sizes[0] if rows > 1 else 1, sizes[1])
    if isinstance(x, TensorSpec):
        return TensorSpec(shape, torch.bool, x.device)
    if mask is None:
        return _keys_beyond(sk, sizes[1], x.device)

    def make() -> Tensor:
        made = torch.ones(shape, dtype=torch.bool, device=x.device)
        made[..., :sk] = False
        made[..., :rows, :sk] = mask
        return made

    from fusedops.facts import learnt  # not at import: few programs pad

    return learnt(mask, ("padded", sq, sk, sizes), make)


@lru_cache(maxsize=16)  # a few lengths are in use at a time; each is Sk bytes on the device
def _keys_beyond(sk: int, size: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # it outlives the mode, and what is learnt of it is kept by its version
        return (torch.arange(size, device=device) >= sk)[None]


def _output(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _min_bytes(x: Any, mask: Any, scale: float, causal: bool) -> Mapping[Direction, int]:
    """Read x and mask, write y; read g and y, write dx. Causal reads nothing above the diagonal."""
    size = x.dtype.itemsize
    elements = math.prod(x.shape)
    sq, sk = x.shape[-2:]
    kept = sum(min(q + 1, sk) for q in range(sq)) * (elements // max(sq * sk, 1)) if causal else elements
    mask_bytes = 0 if mask is None else math.prod(mask.shape)
    return {"forward": size * (kept + elements) + mask_bytes, "backward": size * (2 * kept + elements)}


_ASCEND = "torch_npu, typical cases of npu_scaled_masked_softmax"

OP = Op(
    name="scaled_masked_softmax",
    reference=_reference,
    backward=_backward,
    differentiable=("x",),
    validate=_validate,
    output=_output,
    tolerance={
        torch.float16: Tolerance(1e-3, 1e-3),  # one rounding to an 11-bit mantissa, and denormal probabilities
        torch.bfloat16: Tolerance(1e-3, 1.6e-2),  # one rounding to an 8-bit mantissa
        torch.float32: Tolerance(2e-6, 1e-5),  # exp of scores near 30 loses about 5 bits of 24
        torch.float64: Tolerance(1e-14, 1e-12),
    },
    gradient_tolerance={
        # y * (g - sum(g * y)) from the rounded y: half a unit in the last place of y, times |g| + |sum| of up to 5
        torch.float16: Tolerance(2e-3, 2e-3),
        torch.bfloat16: Tolerance(1e-2, 1.6e-2),
        torch.float32: Tolerance(5e-6, 1e-5),
        torch.float64: Tolerance(1e-13, 1e-12),
    },
    cases=(
        Case("gpt2_small", {"x": (2, 12, 64, 64), "mask": (2, 1, 1, 64), "scale": 0.125}, "GPT-2, 12 heads of 64"),
        Case("causal", {"x": (2, 4, 64, 64), "scale": 0.125, "causal": True}, "decoder, training"),
        Case("causal_padded", {"x": (2, 4, 64, 96), "mask": (2, 1, 1, 96), "causal": True}, "decoder, padded batch"),
        Case("ragged", {"x": (3, 5, 100), "mask": (3, 5, 100)}, "a length that Ascend refuses"),
        Case("decode", {"x": (4, 8, 1, 129), "mask": (4, 1, 1, 129), "scale": 0.088}, "one query, cached keys"),
        Case("ascend_1", {"x": (1, 8, 4096, 4096), "mask": (1, 1, 4096, 4096)}, _ASCEND),
        Case("ascend_2", {"x": (4, 32, 2048, 2048), "mask": (4, 1, 2048, 2048)}, _ASCEND),
        Case("ascend_3", {"x": (8, 16, 512, 2048), "mask": (8, 16, 512, 2048)}, _ASCEND),
        Case("ascend_4", {"x": (8, 16, 512, 1536), "mask": (8, 16, 512, 1536)}, _ASCEND),
        Case("ascend_5", {"x": (8, 16, 512, 1024), "mask": (8, 16, 512, 1024)}, _ASCEND),
        Case("ascend_6", {"x": (8, 16, 512, 512), "mask": (8, 16, 512, 512)}, _ASCEND),
        Case("ascend_7", {"x": (8, 16, 512, 256), "mask": (8, 16, 512, 256)}, _ASCEND),
        Case("ascend_8", {"x": (4, 4, 2048, 2048), "mask": (4, 4, 2048, 2048)}, _ASCEND),
    ),
    min_bytes=_min_bytes,
    unsharded=(-1,),
    padding=Padding((-2, -1), _padded, _padded_backward),
    formula="softmax(where(masked, -inf, scale * x), dim=-1)",
    doc=scaled_masked_softmax.__doc__ or "",
)
