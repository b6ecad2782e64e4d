"""scaled_masked_softmax on Ascend: torch_npu's kernel within its documented constraints, corrected to the op.

Source: torch_npu, "ScaledMaskedSoftmax & ScaledMaskedSoftmaxGrad", and the op-plugin kernels behind it. Corrections:

- The kernel fills masked scores with -10000, so it returns a uniform row for a fully masked row. The row is set to 0.
- The kernel requires x and the mask to be 4-D, and the mask to be a bool tensor with the last two sizes of x. Other
  tensors are viewed and expanded.
- ``fixed_triu_mask`` is reserved (only False is supported), so the causal mask is a bool tensor, created once per size
  and device.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from fusedops import Adaptation, Deviation, kernel, ops
from fusedops.constraints import Dim, DType, Scalar, When
from fusedops.tensor_cache import cached_for
from fusedops_npu._row_order import NOT_PROMISED
from fusedops_npu.softmax._as_4d import ViewableAs4D, as_4d, as_4d_with_mask

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_SOURCE = "torch_npu.npu_scaled_masked_softmax, documented for torch_npu 2.1 and later"


def _is_supported_mask(mask: Any, sq: int, sk: int, causal: bool) -> bool:
    """Return True if the vendor's kernel supports the dtype and the last two sizes of the mask."""
    return not causal and mask.dtype == torch.bool and tuple(mask.shape[-2:]) == (sq, sk)


def _mask_cost(x: Any, mask: Any, scale: float, causal: bool) -> int | None:
    sq, sk = x.shape[-2:]
    if mask is None or _is_supported_mask(mask, sq, sk, causal):
        return None
    return prod(mask.shape[:-2]) * sq * sk


def _no_mask_cost(x: Any, mask: Any, scale: float, causal: bool) -> int | None:
    return None if mask is not None or causal else x.shape[-2] * x.shape[-1]


def _causal_cost(x: Any, mask: Any, scale: float, causal: bool) -> int | None:
    return x.shape[-2] * x.shape[-1] if causal else None


def _backward_mask_cost(grad: Any, y: Any, scale: float, causal: bool) -> int:
    return y.shape[-2] * y.shape[-1]


def _view_cost(x: Any, *_: Any) -> int | None:
    return None if x.dim() == 4 else 0


_VIEW_AS_4D = Adaptation("4-d", "viewed with 4 dimensions", _view_cost)
_NO_MASK_SENTENCE = "an all-False mask (1, 1, Sq, Sk) is created, once per size"


@kernel(
    ops.scaled_masked_softmax,
    DType("x", *_DTYPES),
    Dim("x", (-2, -1), at_least=32, at_most=4096, multiple_of=32),
    # the kernel scales float16 in float16: a larger scale can overflow to inf, and inf - inf is NaN
    When(DType("x", torch.float16), Scalar("scale", abs_at_most=1.0)),
    ViewableAs4D("mask", "x"),
    source=_SOURCE,
    deviations=(
        Deviation(
            "nonfinite-under-mask",
            "older kernels mask by multiplication, so inf or NaN at a masked position makes its row NaN",
        ),
        Deviation(
            "finite-fill",
            "masked scores are -10000, not -inf: if all other scores of a row are below about -9900, they contribute",
        ),
    ),
    adapts=(
        _VIEW_AS_4D,
        Adaptation("mask", "the mask is expanded to bool (..., Sq, Sk), once per mask", _mask_cost),
        Adaptation("no-mask", _NO_MASK_SENTENCE, _no_mask_cost),
        Adaptation("causal-mask", "the causal mask (1, 1, Sq, Sk) is created, once per size", _causal_cost),
    ),
    rows_independent=NOT_PROMISED,
)
def scaled_masked_softmax(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Compute the op. Sq and Sk are multiples of 32 in [32, 4096], as the vendor documents."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    if x.numel() == 0:
        # the vendor does not document empty tensors
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    sq, sk = x.shape[-2:]
    prepared = None
    if mask is None:
        # no row of a causal mask alone is fully masked: each query attends to the first key
        x_4d, mask_4d = as_4d(x), _causal_mask(sq, sk, x.device) if causal else _no_mask(sq, sk, x.device)
    else:
        x_4d, mask_4d = as_4d_with_mask(x, mask)
        prepared = _prepared_mask(mask, mask_4d, sq, sk, causal)
        mask_4d = mask_4d if prepared.mask is None else prepared.mask
    y = cast("Tensor", torch_npu.npu_scaled_masked_softmax(x_4d, mask=mask_4d, scale=scale, fixed_triu_mask=False))  # pyright: ignore
    if prepared is not None and prepared.masked_rows is not None:
        y.masked_fill_(prepared.masked_rows, 0.0)
    return y.contiguous().view(x.shape)


@kernel(
    ops.scaled_masked_softmax,
    DType("y", *_DTYPES),
    Dim("y", (-2, -1), at_least=32, at_most=4096, multiple_of=32),
    When(DType("y", torch.float16), Scalar("scale", abs_at_most=1.0)),
    direction="backward",
    source="torch_npu.npu_scaled_masked_softmax_backward",
    adapts=(_VIEW_AS_4D, Adaptation("no-mask", _NO_MASK_SENTENCE, _backward_mask_cost)),
    rows_independent=NOT_PROMISED,
)
def scaled_masked_softmax_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """Compute the gradient of x from y. y is 0 where masked, so an all-False mask gives the same gradient."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    if y.numel() == 0:
        return torch.empty_like(y, memory_format=torch.contiguous_format)
    no_mask = _no_mask(*y.shape[-2:], y.device)
    dx = torch_npu.npu_scaled_masked_softmax_backward(  # pyright: ignore
        as_4d(grad), as_4d(y), mask=no_mask, scale=scale, fixed_triu_mask=False
    )
    return cast("Tensor", dx).contiguous().view(y.shape)


class _PreparedMask:
    """A mask in the form that the vendor's kernel supports, for the sizes of a call. Cached per mask.

    Args:
        mask_4d: the mask, viewed with 4 dimensions.
        sq: number of queries.
        sk: number of keys.
        causal: True also masks k > q.

    Attributes:
        mask: (1 or b, 1 or h, Sq, Sk), bool, contiguous; None if the kernel supports the mask unchanged.
        masked_rows: (1 or b, 1 or h, Sq, 1), bool, True for fully masked rows; None if there are none. It is a tensor
            until ``count_call`` has checked.
    """

    def __init__(self, mask_4d: Tensor, sq: int, sk: int, causal: bool) -> None:
        combined = mask_4d.bool() | _causal_mask(sq, sk, mask_4d.device) if causal else mask_4d.bool()
        combined = combined.expand(*combined.shape[:2], sq, sk)
        # neither the mask nor a view of it: a cached value must not keep the tensor alive
        unchanged = _is_supported_mask(mask_4d, sq, sk, causal) and mask_4d.is_contiguous()
        self.mask = None if unchanged else combined.contiguous()
        self.masked_rows: Tensor | None = combined.all(-1, keepdim=True)
        self._calls = 0

    def count_call(self) -> _PreparedMask:
        """Count a call. The second call checks for fully masked rows, which synchronises with the device.

        The first call does not check: for a mask that is used once, filling the rows costs less than synchronising.
        """
        self._calls += 1
        if self._calls == 2 and self.masked_rows is not None and not bool(self.masked_rows.any()):
            self.masked_rows = None
        return self


def _prepared_mask(mask: Tensor, mask_4d: Tensor, sq: int, sk: int, causal: bool) -> _PreparedMask:
    """Return the cached prepared form of ``mask``, or create it. ``mask_4d`` is the mask viewed with 4 dimensions."""
    key = (tuple(mask_4d.shape), sq, sk, causal)
    return cached_for(mask, key, lambda: _PreparedMask(mask_4d, sq, sk, causal)).count_call()


@lru_cache(maxsize=16)  # programs use a few lengths at a time; each mask takes Sq * Sk bytes on the device
def _no_mask(sq: int, sk: int, device: torch.device) -> Tensor:
    return torch.zeros((1, 1, sq, sk), dtype=torch.bool, device=device)


@lru_cache(maxsize=16)
def _causal_mask(sq: int, sk: int, device: torch.device) -> Tensor:
    return torch.ones((sq, sk), dtype=torch.bool, device=device).triu(1)[None, None]
