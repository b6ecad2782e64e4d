"""scaled_masked_softmax on Ascend: torch_npu's kernel within its documented limits, corrected to the contract.

Source: torch_npu, "ScaledMaskedSoftmax & ScaledMaskedSoftmaxGrad", and the op-plugin kernels behind it. Corrected here:

- the kernel fills masked scores with -10000, so a fully masked row comes back uniform: it is set to 0;
- no mask, masks of fewer dimensions, [b, 1, 1, sk] and uint8 masks: the kernel wants 4-D bool with x's last two sizes;
- causal: ``fixed_triu_mask`` is reserved (only False), so the mask is a bool tensor, made once per size and device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fusedops import Deviation, kernel, ops
from fusedops.constraints import Dim, DType, Rank, Scalar, When

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_SOURCE = "torch_npu.npu_scaled_masked_softmax, documented for torch_npu 2.1 and later"


@kernel(
    ops.scaled_masked_softmax,
    DType("x", *_DTYPES),
    Rank("x", 4),
    Dim("x", (-2, -1), at_least=32, at_most=4096, multiple_of=32),
    # the kernel scales float16 in float16: a larger scale can overflow to inf, and inf - inf is NaN
    When(DType("x", torch.float16), Scalar("scale", abs_at_most=1.0)),
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
)
def scaled_masked_softmax(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, causal: bool = False) -> Tensor:
    """Within [32, 4096] and multiples of 32 in both last dimensions, as the vendor documents."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    form = _form(mask, causal, x)
    y = cast("Tensor", torch_npu.npu_scaled_masked_softmax(x, mask=form.mask, scale=scale, fixed_triu_mask=False))  # pyright: ignore
    return y if form.alive is None else y.mul_(form.alive)


@kernel(
    ops.scaled_masked_softmax,
    DType("y", *_DTYPES),
    Rank("y", 4),
    Dim("y", (-2, -1), at_least=32, at_most=4096, multiple_of=32),
    When(DType("y", torch.float16), Scalar("scale", abs_at_most=1.0)),
    direction="backward",
    source="torch_npu.npu_scaled_masked_softmax_backward",
)
def scaled_masked_softmax_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """The mask is not needed again: y is 0 where masked, so an all-False mask gives the same gradient."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    nothing = _no_mask(*y.shape[-2:], y.device)
    return torch_npu.npu_scaled_masked_softmax_backward(  # pyright: ignore
        grad, y, mask=nothing, scale=scale, fixed_triu_mask=False
    )


class _Form(NamedTuple):
    """A mask as the vendor's kernel takes it."""

    mask: Tensor  # (1 or b, 1 or h, Sq, Sk), bool, contiguous
    alive: Tensor | None  # (1 or b, 1 or h, Sq, 1), bool, False for fully masked rows; None where there are none


# One mask serves every layer of a model, so what is learnt of it is kept with it, weakly, by its version: an in-place
# change is noticed, and whether it has a fully masked row (one look by the host) is asked once a mask, not once a call.
_forms: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _form(mask: Tensor | None, causal: bool, x: Tensor) -> _Form:
    sq, sk = x.shape[-2:]
    if mask is None:
        # no row of a causal mask alone is fully masked: each query sees the first key
        return _Form(_causal_mask(sq, sk, x.device) if causal else _no_mask(sq, sk, x.device), None)
    if mask.is_inference():  # has no version: a change could not be noticed
        return _make_form(mask, causal, sq, sk)
    known = cast("dict[Any, _Form]", _forms.setdefault(mask, {}))
    key = (mask._version, causal, sq, sk)
    form = known.get(key)
    if form is None:
        for stale in [other for other in known if other[0] != mask._version]:
            del known[stale]
        form = known[key] = _make_form(mask, causal, sq, sk)
    return form


def _make_form(mask: Tensor, causal: bool, sq: int, sk: int) -> _Form:
    whole = mask.bool()
    while whole.dim() < 4:
        whole = whole.unsqueeze(0)
    if causal:
        whole = whole | _causal_mask(sq, sk, mask.device)
    whole = whole.expand(*whole.shape[:2], sq, sk).contiguous()
    dead = whole.all(-1, keepdim=True)
    return _Form(whole, ~dead if bool(dead.any()) else None)


@lru_cache(maxsize=16)  # a few lengths are in use at a time; each is Sq * Sk bytes on the device
def _no_mask(sq: int, sk: int, device: torch.device) -> Tensor:
    return torch.zeros((1, 1, sq, sk), dtype=torch.bool, device=device)


@lru_cache(maxsize=16)
def _causal_mask(sq: int, sk: int, device: torch.device) -> Tensor:
    return torch.ones((sq, sk), dtype=torch.bool, device=device).triu(1)[None, None]
