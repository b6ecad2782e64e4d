"""scaled_masked_softmax on Ascend: torch_npu's kernel within its documented limits, corrected to the contract.

Source: torch_npu, "ScaledMaskedSoftmax & ScaledMaskedSoftmaxGrad", and the op-plugin kernels behind it. Corrected here:

- the kernel fills masked scores with -10000, so a fully masked row comes back uniform: it is set to 0;
- x is 4-D there, and the mask too, a bool tensor with x's last two sizes: others are viewed and expanded so;
- causal: ``fixed_triu_mask`` is reserved (only False), so the mask is a bool tensor, made once per size and device.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from fusedops import Adaptation, Deviation, kernel, ops
from fusedops.constraints import Dim, DType, Scalar, When
from fusedops.facts import learnt
from fusedops_npu._four import Folds, four, four_with

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_SOURCE = "torch_npu.npu_scaled_masked_softmax, documented for torch_npu 2.1 and later"


def _as_given(mask: Any, sq: int, sk: int, causal: bool) -> bool:
    """Whether the vendor's kernel takes the mask as it is, but for its leading dims."""
    return not causal and mask.dtype == torch.bool and tuple(mask.shape[-2:]) == (sq, sk)


def _mask_cost(x: Any, mask: Any, scale: float, causal: bool) -> int | None:
    sq, sk = x.shape[-2:]
    if mask is None or _as_given(mask, sq, sk, causal):
        return None
    return prod(mask.shape[:-2]) * sq * sk


def _no_mask_cost(x: Any, mask: Any, scale: float, causal: bool) -> int | None:
    return None if mask is not None or causal else x.shape[-2] * x.shape[-1]


def _causal_cost(x: Any, mask: Any, scale: float, causal: bool) -> int | None:
    return x.shape[-2] * x.shape[-1] if causal else None


def _backward_mask_cost(grad: Any, y: Any, scale: float, causal: bool) -> int:
    return y.shape[-2] * y.shape[-1]


def _four_cost(x: Any, *_: Any) -> int | None:
    return None if x.dim() == 4 else 0


_FOUR = Adaptation("4-d", "viewed with 4 dimensions", _four_cost)
_NO_MASK = "an all-False mask (1, 1, Sq, Sk) is made, once a size"


@kernel(
    ops.scaled_masked_softmax,
    DType("x", *_DTYPES),
    Dim("x", (-2, -1), at_least=32, at_most=4096, multiple_of=32),
    # the kernel scales float16 in float16: a larger scale can overflow to inf, and inf - inf is NaN
    When(DType("x", torch.float16), Scalar("scale", abs_at_most=1.0)),
    Folds("mask", "x"),
    source=_SOURCE,
    deviations=(
        Deviation(
            "nonfinite-under-mask",
            "older kernels mask by multiplication, so inf or NaN at a masked position makes its row NaN",
        ),
        Deviation(
            "finite-fill",
            "masked scores are -10000, not -inf: in a row whose other scores are all below about -9900 they take part",
        ),
    ),
    adapts=(
        _FOUR,
        Adaptation("mask", "the mask is expanded to bool (..., Sq, Sk), once a mask", _mask_cost),
        Adaptation("no-mask", _NO_MASK, _no_mask_cost),
        Adaptation("causal-mask", "the causal mask (1, 1, Sq, Sk) is made, once a size", _causal_cost),
    ),
)
def scaled_masked_softmax(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, causal: bool = False) -> Tensor:
    """Within [32, 4096] and multiples of 32 in both last dimensions, as the vendor documents."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    if x.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)  # the documents do not speak of such
    sq, sk = x.shape[-2:]
    form = None
    if mask is None:
        # no row of a causal mask alone is fully masked: each query sees the first key
        whole, given = four(x), _causal_mask(sq, sk, x.device) if causal else _no_mask(sq, sk, x.device)
    else:
        whole, given = four_with(x, mask)
        form = _form(mask, given, sq, sk, causal)
        given = given if form.mask is None else form.mask
    y = cast("Tensor", torch_npu.npu_scaled_masked_softmax(whole, mask=given, scale=scale, fixed_triu_mask=False))  # pyright: ignore
    if form is not None and form.dead is not None:
        y.masked_fill_(form.dead, 0.0)
    return y.contiguous().view(x.shape)


@kernel(
    ops.scaled_masked_softmax,
    DType("y", *_DTYPES),
    Dim("y", (-2, -1), at_least=32, at_most=4096, multiple_of=32),
    When(DType("y", torch.float16), Scalar("scale", abs_at_most=1.0)),
    direction="backward",
    source="torch_npu.npu_scaled_masked_softmax_backward",
    adapts=(_FOUR, Adaptation("no-mask", _NO_MASK, _backward_mask_cost)),
)
def scaled_masked_softmax_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """The mask is not needed again: y is 0 where masked, so an all-False mask gives the same gradient."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    if y.numel() == 0:
        return torch.empty_like(y, memory_format=torch.contiguous_format)
    nothing = _no_mask(*y.shape[-2:], y.device)
    dx = torch_npu.npu_scaled_masked_softmax_backward(  # pyright: ignore
        four(grad), four(y), mask=nothing, scale=scale, fixed_triu_mask=False
    )
    return cast("Tensor", dx).contiguous().view(y.shape)


class _Form:
    """What is known of a mask, for the sizes of a call.

    Attributes:
        mask: (1 or b, 1 or h, Sq, Sk), bool, contiguous; None where the mask itself will do.
        dead: (1 or b, 1 or h, Sq, 1), bool, True for fully masked rows; None once it is known that there are none.
    """

    def __init__(self, given: Tensor, sq: int, sk: int, causal: bool) -> None:
        whole = given.bool() | _causal_mask(sq, sk, given.device) if causal else given.bool()
        whole = whole.expand(*whole.shape[:2], sq, sk)
        # not the mask itself, nor a view of it: what is learnt of a tensor must not keep it
        self.mask = None if _as_given(given, sq, sk, causal) and given.is_contiguous() else whole.contiguous()
        self.dead: Tensor | None = whole.all(-1, keepdim=True)
        self._calls = 0

    def used(self) -> _Form:
        """Counts a call. The second one asks the device whether any row is fully masked, and waits for the answer.

        Not the first: the rows of a mask that serves one call are filled unasked, which costs less than to wait.
        """
        self._calls += 1
        if self._calls == 2 and self.dead is not None and not bool(self.dead.any()):
            self.dead = None
        return self


def _form(mask: Tensor, given: Tensor, sq: int, sk: int, causal: bool) -> _Form:
    """What is known of ``mask``; ``given`` is the mask viewed with 4 dimensions."""
    return learnt(mask, (tuple(given.shape), sq, sk, causal), lambda: _Form(given, sq, sk, causal)).used()


@lru_cache(maxsize=16)  # a few lengths are in use at a time; each is Sq * Sk bytes on the device
def _no_mask(sq: int, sk: int, device: torch.device) -> Tensor:
    return torch.zeros((1, 1, sq, sk), dtype=torch.bool, device=device)


@lru_cache(maxsize=16)
def _causal_mask(sq: int, sk: int, device: torch.device) -> Tensor:
    return torch.ones((sq, sk), dtype=torch.bool, device=device).triu(1)[None, None]
