"""attention on a CPU by the kernel that torch's scaled_dot_product_attention has there, called with its lse.

``scaled_dot_product_attention`` runs another path, which keeps the scores of all queries and keys, where values have
another width than queries, and where a mask needs a gradient. Such calls are refused here. Corrections:

- torch masks by adding -inf, so a bool mask becomes an additive one, once per mask.
- The lse of a fully masked row is 0 in the kernel. It is set to -inf, and to 0 again for backward.
- -inf + NaN is NaN, and 0 * NaN too: a key that is masked out and not finite makes rows NaN. Results are looked at, and
  a call that has such keys is computed again without them.
- A row whose scores are NaN is 0 in the kernel where there are few keys: such a call is computed by the op's formula.
- Backward computes the scores again, in blocks of other sizes. Where they are so large that a rounding is a factor of
  the probabilities, exp(score - lse) may be inf: such gradients are computed by the op's formula.
- The kernel ignores the stride of the last dim.

Source: torch 2.13, ``aten/src/ATen/native/transformers/attention.cpp`` and ``native/cpu/FlashAttentionKernel.cpp``.
"""

from __future__ import annotations

import math
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops import Adaptation, kernel, ops
from fusedops.constraints import Alignment, Dim, Finite, Present, SameDims, Scalar, When
from fusedops.dtypes import compute_dtype
from fusedops.ops.attention.arguments import AttentionArgs, AttentionGradArgs
from fusedops.tensor_cache import cached_for
from fusedops_sdpa import _by_head
from fusedops_sdpa._corrections import dead_rows, without_elements, zero_gradients
from fusedops_sdpa._errors import backward_error, forward_error
from fusedops_sdpa._torch import flash_attention_for_cpu, flash_attention_for_cpu_backward

_SOURCE = "aten::_scaled_dot_product_flash_attention_for_cpu"
_LIMITS = (
    SameDims("v", "q", (3,)),
    Dim("q", (3,), at_least=1),  # of vectors without elements the kernel returns no lse
    Present("window", False, fix="pass the window as a mask, as of masks.from_band(Sq, Sk, masks.band(...))"),
    Alignment("causal", "q", "k", "upper_left"),
    # the kernel fills with -inf before it scales: -inf * 0 is NaN, -inf * -1 is inf
    When(Scalar("causal", one_of=("upper_left", "lower_right")), Finite("scale", 1e-30, optional=True)),
)
_LARGE = 2.0**-7  # times 1 / eps, an lse whose rounding changes the probabilities by 1/128


def _mask_cost(q: Any, k: Any, v: Any, mask: Any, *_: Any) -> int | None:
    return None if mask is None else prod(mask.shape) * q.dtype.itemsize


def _backward_mask_cost(grad_out: Any, grad_lse: Any, q: Any, k: Any, v: Any, mask: Any, *_: Any) -> int | None:
    return _mask_cost(q, k, v, mask)


_SENTENCE = "the mask becomes an additive one, of its own shape and the dtype of q, once per mask"


class _Arguments(NamedTuple):
    """The tensors of a call, as torch's kernel takes them."""

    q: Tensor
    k: Tensor
    v: Tensor


@kernel(
    ops.attention,
    *_LIMITS,
    source=_SOURCE,
    adapts=(Adaptation("additive-mask", _SENTENCE, _mask_cost),),
    device_types=("cpu",),
    rows_independent="torch cuts queries and keys into blocks by the number of queries",
    extra_error=forward_error,
)
def attention(a: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op where the head sizes are one, for any mask, and the diagonal is at the upper left."""
    if not (a.q.numel() and a.k.numel()):
        return without_elements(a.q, a.v)
    given, is_causal = _Arguments(*map(_rows, (a.q, a.k, a.v))), a.causal != "none"
    bias = None if a.mask is None else _additive(a.mask, a.q.dtype)
    out, lse = _forward(given, bias, a.scale, is_causal)
    finite = not (bias is not None or is_causal) or _is_finite(out)  # where lse is NaN or inf, out is NaN
    if not finite and _scores_may_overflow(given, a.scale):
        return _by_head.forward(*given, a.mask, a.scale, a.causal)
    if not finite:
        out, lse = _without_unseen(given, bias, a.scale, is_causal)
    out, lse = out.contiguous(), lse.contiguous()
    if bias is not None:
        dead = dead_rows(bias, a.q.shape[2], is_causal)
        lse = lse.masked_fill(dead, -math.inf)
        if not finite:  # a row of q that is not finite
            out = out.masked_fill(dead[..., None], 0.0)
    if not lse.all().item() and bool(((lse == 0) & (out == 0).all(-1)).any()):
        return _by_head.forward(*given, a.mask, a.scale, a.causal)
    return out, lse


@kernel(
    ops.attention,
    *_LIMITS,
    # the kernel has no gradient of lse
    Scalar("return_lse", one_of=(False,)),
    direction="backward",
    source=f"{_SOURCE}_backward",
    adapts=(Adaptation("additive-mask", _SENTENCE, _backward_mask_cost),),
    device_types=("cpu",),
    rows_independent="torch cuts queries and keys into blocks by the number of queries",
    extra_error=backward_error,
)
def attention_backward(a: AttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v, where lse has none."""
    lse = a.lse
    if not (a.q.numel() and a.k.numel()):
        return zero_gradients((a.q, a.k, a.v), a.needs)
    given, is_causal, grad_out = _Arguments(*map(_rows, (a.q, a.k, a.v))), a.causal != "none", _rows(a.grad_out)
    bias, dead = None, None
    if a.mask is not None:
        bias, dead = _additive(a.mask, a.q.dtype), lse == -math.inf
        lse = lse.masked_fill(dead, 0.0)
    if not torch.linalg.vector_norm(lse, math.inf).item() <= _LARGE / torch.finfo(lse.dtype).eps:
        gradients = _by_head.backward(grad_out, *given, a.mask, a.scale, a.causal)
        return tuple(gradient if need else None for gradient, need in zip(gradients, a.needs))
    gradients = _backward(grad_out, given, bias, a.out, lse, a.scale, is_causal)
    if (bias is not None or is_causal) and not _is_finite(gradients[0]):  # what is not finite, if masked, reaches dq
        if _scores_may_overflow(given, a.scale):
            gradients = _by_head.backward(grad_out, *given, a.mask, a.scale, a.causal)
            return tuple(gradient if need else None for gradient, need in zip(gradients, a.needs))
        gradients = _backward_without_unseen(grad_out, given, bias, dead, a.out, lse, a.scale, is_causal)
    return tuple(gradient if need else None for gradient, need in zip(gradients, a.needs))


def _rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dim has stride 1."""
    tensor = tensor.resolve_neg() if tensor.is_neg() else tensor
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _forward(a: _Arguments, bias: Tensor | None, scale: float | None, causal: bool) -> tuple[Tensor, Tensor]:
    return flash_attention_for_cpu(a.q, a.k, a.v, 0.0, causal, attn_mask=bias, scale=scale)


def _backward(
    grad_out: Tensor,
    a: _Arguments,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return flash_attention_for_cpu_backward(grad_out, a.q, a.k, a.v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask as 0 and -inf, with 4 dims. Made once for each mask."""

    def make() -> Tensor:
        masked = mask.view(torch.uint8) != 0  # a bool may have any byte for True
        return torch.zeros(mask.shape, dtype=dtype).masked_fill_(masked, -math.inf)[(None,) * (4 - mask.dim())]

    return cached_for(mask, ("additive", dtype), make)


def _is_finite(result: Tensor) -> bool:
    """Return True where a result has no NaN or inf.

    The norm of a small tensor is computed by one thread: to wake others, which sum() does, took 60 us.
    """
    dtype = torch.float32 if result.dtype is torch.float16 else None  # twice as fast as in float16
    if math.isfinite(torch.linalg.vector_norm(result, dtype=dtype).item()):  # pyright: ignore[reportUnknownArgumentType]
        return True
    least, most = result.aminmax()  # of finite numbers the squares may overflow
    return math.isfinite(least.item()) and math.isfinite(most.item())


def _scores_may_overflow(a: _Arguments, scale: float | None) -> bool:
    """Return True where a score of finite numbers may be infinite: where it is masked, the kernel adds -inf to it."""
    sizes = [each.double().abs().nan_to_num(nan=0.0, posinf=0.0).amax().item() for each in (a.q, a.k)]
    factor = max(abs(scale or 0.0), 1.0)  # scaled before or after the product
    return factor * sizes[0] * sizes[1] * a.q.shape[3] >= torch.finfo(compute_dtype(a.q.dtype)).max


def _bad_keys(a: _Arguments) -> Tensor:
    """Return the keys with a number that is not finite: (B, Nk, Sk, 1)."""
    return ~(a.k.isfinite() & a.v.isfinite()).all(-1, keepdim=True)


def _sees(a: _Arguments, bad: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    """Return the rows that see one of the keys ``bad``: (B, Nq, Sq, 1). With equal scores no visible weight is 0."""
    indicator = bad.float().expand(a.k.shape).contiguous()
    zeros = _Arguments(torch.zeros(a.q.shape), torch.zeros(a.k.shape), indicator)
    return _forward(zeros, None if bias is None else bias.float(), None, causal)[0][..., :1] > 0


def _without_unseen(a: _Arguments, bias: Tensor | None, scale: float | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute the results without keys that are not finite; a row that sees one is NaN."""
    bad = _bad_keys(a)
    clean = a._replace(k=a.k.masked_fill(bad, 0.0), v=a.v.masked_fill(bad, 0.0))
    out, lse = _forward(clean, bias, scale, causal)
    sees = _sees(a, bad, bias, causal)
    return out.masked_fill(sees, math.nan), lse.masked_fill(sees[..., 0], math.nan)


def _backward_without_unseen(
    grad_out: Tensor,
    a: _Arguments,
    bias: Tensor | None,
    dead: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients without keys that no row sees and rows that see no key; what sees such a key is NaN."""
    bad = _bad_keys(a)
    sees = _sees(a, bad, bias, causal)
    clean = a._replace(k=a.k.masked_fill(bad, 0.0), v=a.v.masked_fill(bad, 0.0))
    if dead is not None:
        clean = clean._replace(q=clean.q.masked_fill(dead[..., None], 0.0))
        grad_out = grad_out.masked_fill(dead[..., None], 0.0)
    out, lse = out.masked_fill(sees, 0.0), lse.masked_fill(sees[..., 0], 0.0)
    dq, dk, dv = _backward(grad_out, clean, bias, out, lse, scale, causal)
    heads = a.k.shape[1]
    reached = sees.reshape(sees.shape[0], heads, -1).any(-1)[..., None, None]
    return dq.masked_fill(sees, math.nan), dk.masked_fill(reached, math.nan), dv.masked_fill(reached, math.nan)
