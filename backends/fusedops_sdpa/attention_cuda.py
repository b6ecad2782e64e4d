"""attention on an NVIDIA GPU by the three kernels that torch's scaled_dot_product_attention has there, with their lse.

``cudnn`` takes float16 and bfloat16, an additive mask, grouped heads and values of another width, and is the fastest on
compute capability 9 and 10. ``flash`` takes float16 and bfloat16, no mask, and heads of one size up to 256; it needs
compute capability 8.0. ``efficient`` takes float32 too, an additive mask, and values of another width. Which one
computes a call, :mod:`fusedops_sdpa._cuda_choice` has. Where none takes it, torch's ``scaled_dot_product_attention``
runs a path that keeps the scores of all queries and keys; it is not called here. Nothing here waits for the GPU.

The lse of all three is a natural logarithm: a backward may be another kernel's than its forward. Corrections:

- ``efficient`` reads the mask 16 bytes at a time: it becomes an additive one with rows of a multiple of 16 elements,
  once per mask, and is expanded to (B, Nq, Sq, Sk) without memory.
- Rows that see no key are set to 0 and their lse to -inf. For backward their lse is inf: each weight is exp(-inf).
- A causal mask at the upper left hides the keys after the last query: they are left out. The lengths are equal then, as
  ``flash`` requires: its own causal mask is aligned at the lower right.
- ``efficient`` pads lse to a multiple of 32 queries and reads it so in backward, out in the order (B, S, N, D). Not
  every release has grouped heads in it: keys and values are repeated, and their gradients summed.
- ``flash`` has inf as the lse of a row with NaN among its scores. It is set to NaN.
- ``cudnn`` keeps the plan of a backward by the sizes and strides of q, k, v and the mask, but the plan has the strides
  of out and of its gradient too (torch 2.10 to 2.13). They get those that forward gives out.

ROCm has other kernels behind the same functions. This file is not for them. All three have passed
their tests on an H200 with torch 2.11 and cuDNN 9.19.

Source: torch 2.10 to 2.13, ``aten/src/ATen/native/transformers/cuda/``: ``sdp_utils.cpp``, ``attention.cu``,
``attention_backward.cu``, ``flash_attn/flash_api.cpp``, ``mem_eff_attention/kernel_forward.h``, ``kernel_backward.h``;
``aten/src/ATen/native/cudnn/MHA.cpp``.
"""

from __future__ import annotations

import math
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops import Adaptation, Deviation, kernel, ops
from fusedops.constraints import Alignment, Capability, Dim, DType, Finite, Present, Scalar, When
from fusedops.ops.attention.arguments import AttentionArgs, AttentionGradArgs
from fusedops.tensor_cache import cached_for
from fusedops_sdpa import _torch
from fusedops_sdpa._corrections import dead_rows, without_elements, zero_gradients
from fusedops_sdpa._cuda_choice import BITS_16, kernel_of, seen_keys

_CUDNN = _torch.cudnn_attention
_CUDNN_BACKWARD = _torch.cudnn_attention_backward
_FLASH = _torch.flash_attention
_FLASH_BACKWARD = _torch.flash_attention_backward
_EFFICIENT = _torch.efficient_attention
_EFFICIENT_BACKWARD = _torch.efficient_attention_backward
_SOURCE = ", ".join(f"aten::_scaled_dot_product_{name}_attention" for name in ("cudnn", "flash", "efficient"))
_SOURCE_BACKWARD = ", ".join(f"{name}_backward" for name in _SOURCE.split(", "))

_LIMITS = (
    DType("q", *BITS_16, torch.float32),
    Present("window", False, fix="pass the window as a mask, as of masks.from_band(Sq, Sk, masks.band(...))"),
    Alignment("causal", "q", "k", "upper_left"),
    # rows are read 16 bytes at a time
    *(When(DType(name, *BITS_16), Dim(name, (3,), at_least=8, multiple_of=8)) for name in ("q", "v")),
    *(When(DType(name, torch.float32), Dim(name, (3,), at_least=4, multiple_of=4)) for name in ("q", "v")),
    Dim("q", (0, 1), at_most=65535),  # dims of CUDA's grid
    # the greatest score is taken, and masked scores are -inf, before they are scaled
    Finite("scale", 1e-30, optional=True),
    Capability("q", (5, 0)),
    When(DType("q", torch.bfloat16), Capability("q", (8, 0))),
)
_DEVIATIONS = (
    Deviation(
        "nonfinite-under-mask",
        "NaN or inf at a masked key may reach rows that mask it: whether there is one is known on the GPU alone",
    ),
    Deviation("nonfinite-scores", "lse may be NaN wherever a score is NaN or inf"),
)


def _row(keys: int) -> int:
    """Return the elements of a row of the additive mask."""
    return -(-keys // 16) * 16


def _mask_cost(q: Any, k: Any, v: Any, mask: Any, *_: Any) -> int | None:
    return None if mask is None else prod(mask.shape[:-1]) * _row(k.shape[2]) * q.dtype.itemsize


def _heads_cost(q: Any, k: Any, v: Any, mask: Any, scale: Any, causal: str, *_: Any) -> int | None:
    return _repeated(q, k, v, mask, causal, False)


def _repeated(q: Any, k: Any, v: Any, mask: Any, causal: str, backward: bool) -> int | None:
    """Return the bytes of the repeated keys and values, or None where the kernel takes grouped heads."""
    if q.shape[1] == k.shape[1] or kernel_of(q, k, v, mask, causal, backward) != "efficient":
        return None
    return q.shape[0] * q.shape[1] * seen_keys(q, k, causal) * (q.shape[3] + v.shape[3]) * q.dtype.itemsize


def _backward_mask_cost(grad_out: Any, grad_lse: Any, *args: Any) -> int | None:
    return _mask_cost(*args)


def _backward_heads_cost(
    grad_out: Any,
    grad_lse: Any,
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    out: Any,
    lse: Any,
    scale: Any,
    causal: str,
    *_: Any,
) -> int | None:
    return _repeated(q, k, v, mask, causal, True)


_MASK = "the mask becomes an additive one of the dtype of q, with rows of a multiple of 16 elements, once per mask"
_HEADS = "where neither cuDNN nor flash takes the call, as in float32, k and v are repeated"


@kernel(
    ops.attention,
    *_LIMITS,
    source=_SOURCE,
    deviations=_DEVIATIONS,
    adapts=(Adaptation("additive-mask", _MASK, _mask_cost), Adaptation("grouped-heads", _HEADS, _heads_cost)),
    device_types=("cuda",),
    rows_independent="torch selects a kernel of attention by the sizes of the call",
)
def attention(a: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op for any mask, where the diagonal is at the upper left."""
    if not (a.q.numel() and a.k.numel()):
        return without_elements(a.q, a.v)
    call = _Call.of(a.q, a.k, a.v, a.mask, a.causal, backward=False)
    if call.kernel == "cudnn":
        out, lse = _CUDNN(*call.tensors, call.expanded_bias(), True, 0.0, call.causal, False, scale=a.scale)[:2]
        lse = lse.squeeze(3)
    elif call.kernel == "flash":
        out, lse = _FLASH(*call.tensors, 0.0, call.causal, False, scale=a.scale)[:2]
        lse = lse.contiguous().nan_to_num_(math.nan, math.nan, math.nan)
    else:
        out, lse = _EFFICIENT(*call.tensors, call.expanded_bias(), True, 0.0, call.causal, scale=a.scale)[:2]
        lse = lse[:, :, : a.q.shape[2]].contiguous()
    if call.bias is not None:
        dead = dead_rows(call.bias, a.q.shape[2], call.causal)
        out.masked_fill_(dead[..., None], 0.0)
        lse.masked_fill_(dead, -math.inf)
    return out, lse


@kernel(
    ops.attention,
    *_LIMITS,
    Scalar("return_lse", one_of=(False,)),  # the kernels have no gradient of lse
    direction="backward",
    source=_SOURCE_BACKWARD,
    deviations=_DEVIATIONS[:1],
    adapts=(
        Adaptation("additive-mask", _MASK, _backward_mask_cost),
        Adaptation("grouped-heads", _HEADS, _backward_heads_cost),
    ),
    device_types=("cuda",),
    rows_independent="torch selects a kernel of attention by the sizes of the call",
)
def attention_backward(a: AttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v, where lse has none."""
    lse = a.lse
    q = a.q
    grad_out = a.grad_out
    if not (q.numel() and a.k.numel()):
        return zero_gradients((q, a.k, a.v), a.needs)
    if a.mask is not None:
        dead = lse == -math.inf
        lse = lse.masked_fill(dead, math.inf)
        q, grad_out = (each.masked_fill(dead[..., None], 0.0) for each in (q, grad_out))  # 0 * NaN is NaN
    call, grad_out, out = _Call.of(q, a.k, a.v, a.mask, a.causal, backward=True), _aligned(grad_out), _aligned(a.out)
    if call.kernel == "cudnn":
        results = list(_cudnn_backward(grad_out, call, out, lse, a.scale))
    elif call.kernel == "flash":
        results = list(_flash_backward(grad_out, call, out, lse, a.scale))
    else:
        results = list(_efficient_backward(grad_out, call, out, lse, a.scale))
        if a.k.shape[1] != q.shape[1]:
            results[1:] = [each.unflatten(1, (a.k.shape[1], -1)).sum(2) for each in results[1:]]
    if call.tensors[1].shape[2] != a.k.shape[2]:
        results[1:] = [_with_zeros(each, a.k.shape[2]) for each in results[1:]]
    return tuple(each if need else None for each, need in zip(results, a.needs))


class _Call(NamedTuple):
    """A call as torch's kernels take it.

    Attributes:
        tensors: q, k and v, aligned, without the keys that a causal mask hides from every query.
        bias: the mask as 0 and -inf, with 4 dims, which broadcasts to (B, Nq, Sq, Sk).
        causal: True for a causal mask, aligned at the upper left.
        kernel: "cudnn", "flash" or "efficient".
    """

    tensors: tuple[Tensor, Tensor, Tensor]
    bias: Tensor | None
    causal: bool
    kernel: str

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: str, *, backward: bool) -> _Call:
        chosen, keys = kernel_of(q, k, v, mask, causal, backward), seen_keys(q, k, causal)
        bias = None
        if mask is not None:
            bias = _additive(mask, q.dtype, k.shape[2])[..., :keys]
        if keys != k.shape[2]:
            k, v = k[:, :, :keys], v[:, :, :keys]
        if chosen == "efficient" and k.shape[1] != q.shape[1]:
            k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        if chosen == "cudnn" and 0 in q.stride():  # out in the order of an expanded q has no rows
            q = q.contiguous()
        return _Call((_aligned(q), _aligned(k), _aligned(v)), bias, causal != "none", chosen)

    def expanded_bias(self) -> Tensor | None:
        """Return the bias with the sizes of the scores, in the memory of the bias."""
        q, k, _ = self.tensors
        return None if self.bias is None else self.bias.expand(*q.shape[:3], k.shape[2])


def _additive(mask: Tensor, dtype: torch.dtype, keys: int) -> Tensor:
    """Return the mask as 0 and -inf, with 4 dims and aligned rows. Made once for each mask."""

    def make() -> Tensor:
        masked = mask.view(torch.uint8) != 0  # a bool may have any byte for True
        leading = (1,) * (4 - max(1, mask.dim())) + tuple(mask.shape[:-1])
        room = torch.zeros((*leading, _row(keys)), dtype=dtype, device=mask.device)
        return room[..., :keys].masked_fill_(masked, -math.inf)

    return cached_for(mask, ("aligned", dtype, keys), make)


def _aligned(tensor: Tensor) -> Tensor:
    """Return a tensor with rows at multiples of 16 bytes."""
    tensor = tensor.resolve_neg()
    if _is_aligned(tensor):
        return tensor
    if tensor.stride(3) == 1:  # with the dims in the same order, in which out is then returned
        tensor = tensor.clone()
        if _is_aligned(tensor):
            return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _is_aligned(tensor: Tensor) -> bool:
    step, (batch, heads, rows, last) = 16 // tensor.element_size(), tensor.stride()
    return last == 1 and not (batch % step or heads % step or rows % step or tensor.data_ptr() % 16)


def _cudnn_backward(
    grad_out: Tensor, call: _Call, out: Tensor, lse: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = call.tensors
    seed = q.new_empty((), dtype=torch.int64)  # of a dropout of 0
    grad_out, out = (_in_order_of(q, each) for each in (grad_out, out))
    bias, lengths = call.expanded_bias(), (q.shape[2], k.shape[2])
    lse = lse.contiguous().unsqueeze(3)
    return _CUDNN_BACKWARD(
        grad_out, q, k, v, out, lse, seed, seed, bias, None, None, *lengths, 0.0, call.causal, scale=scale
    )


def _in_order_of(q: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor like out with the strides that cuDNN's forward gives out: without gaps, in the order of q."""
    strides, step = [0] * 4, 1
    for dim in sorted(range(4), key=q.stride):
        strides[dim] = step
        step *= tensor.shape[dim]
    if all(size == 1 or ours == needed for size, ours, needed in zip(tensor.shape, tensor.stride(), strides)):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _flash_backward(
    grad_out: Tensor, call: _Call, out: Tensor, lse: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = call.tensors
    seed, offset = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)  # of a dropout of 0
    lengths = q.shape[2], k.shape[2]
    return _FLASH_BACKWARD(
        grad_out, q, k, v, out, lse, None, None, *lengths, 0.0, call.causal, seed, offset, scale=scale
    )


def _efficient_backward(
    grad_out: Tensor, call: _Call, out: Tensor, lse: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    seed = call.tensors[0].new_empty((), dtype=torch.int64)  # of a dropout of 0
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
    wants = [True, True, True, False]
    return _EFFICIENT_BACKWARD(
        grad_out, *call.tensors, call.expanded_bias(), out, lse, seed, seed, 0.0, wants, call.causal, scale=scale
    )[:3]


def _with_zeros(gradient: Tensor, keys: int) -> Tensor:
    """Return the gradient of all keys: 0 for those that no query sees."""
    whole = gradient.new_zeros((*gradient.shape[:2], keys, gradient.shape[3]))
    whole[:, :, : gradient.shape[2]] = gradient
    return whole
