"""The formula of flash-attn's kernels with their checks, for the stand-in: float32, on tensors (B, S, N, D).

What it refuses, and what it computes where it differs from the op, is that of the sources (R: read in the source):

* R1: flash-attn 2.8.3, ``csrc/flash_attn/flash_api.cpp``: the checks, and how a window is brought to its form.
* R2: the same, ``src/softmax.h``, ``src/flash_fwd_kernel.h``: lse is inf for a row without a visible key and for a row
  with NaN; masked scores are -inf before they are scaled; probabilities are rounded to the dtype of the inputs.
* R3: flash-attn 3.0, ``hopper/flash_api.cpp``, ``hopper/softmax.h``: such an lse is -inf.
* R4: the kernels read 16 bytes at a time, unchecked: what is a misaligned address there is refused here.
* R5: CUDA driver API, ``cuTensorMapEncodeTiled``, by which release 3 reads: a stride is at least its dim's size, not 0.

Packed sequences (R1, R3): rows of no sequence, and rows past the longest length given, are not written; a sequence
without keys, or without queries, is written as 0, with the lse of a row without a key.

Tiles are not modeled: NaN at a masked key reaches every row, where the kernels have it reach the rows of its tile, and
no row of another sequence, where the tiles of release 3 end in the next one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor


def require(met: bool, sentence: str) -> None:
    """Raise RuntimeError, as a check of the kernels does."""
    if not met:
        raise RuntimeError(sentence)


class Problem(NamedTuple):
    """A call in the form of the kernels: (B, N, S, D) in float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    masked: Tensor
    scale: float
    dtype: torch.dtype


def problem(
    release: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Any,
    causal: Any,
    left: Any,
    right: Any,
    *others: Tensor,
    longest: tuple[int, int] | None = None,
) -> Problem:
    """Check a call as R1 and R3 do, and return it. longest: the lengths of packed sequences, of which this is one."""
    require(q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
    require(k.dtype == q.dtype, "query and key must have the same dtype")
    require(v.dtype == q.dtype, "query and value must have the same dtype")
    (b, sq, n, d), (sk, nk) = q.shape, k.shape[1:3]
    require(b > 0, "batch size must be positive")
    require(d <= 256, "FlashAttention forward only supports head dimension at most 256")
    require(d % 8 == 0, "query, key, value, and out_ must have a head_size that is a multiple of 8")
    require(nk > 0 and n % nk == 0, "Number of heads in key/value must divide number of heads in query")
    require(sq > 0 and sk > 0, "an empty grid: invalid configuration argument")
    require(max(b, n) <= 65535, "invalid configuration argument")
    for name, tensor, shape in (("k", k, (b, sk, nk, d)), ("v", v, (b, sk, nk, d))):
        require(tuple(tensor.shape) == shape, f"{name} must have shape {shape}")
    for tensor in (q, k, v, *others):
        require(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        aligned = tensor.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in tensor.stride()[:3])
        aligned = aligned and (release == 2 or all(tensor.stride()))  # R5
        require(aligned and not tensor.is_neg(), "CUDA error: misaligned address")  # R4
    require(type(scale) is float and type(causal) is bool, "incompatible function arguments")
    require(all(type(each) is int and -1 <= each < 2**31 for each in (left, right)), "incompatible function arguments")
    most_q, most_k = longest or (sq, sk)
    if release == 2:
        left, right = (-1 if each >= most_k else each for each in (left, right))
    else:
        left, right = -1 if left >= most_k - 1 else left, -1 if right >= most_q - 1 else right
    if causal:
        right = 0
    if max(left, right) >= 0:  # beside a closed side an open one is as long as the lengths
        left = left if left >= 0 else most_k if release == 2 else most_k - 1
        right = right if right >= 0 else most_k if release == 2 else most_q - 1
    diagonal = torch.arange(sq)[:, None] + sk - sq
    keys = torch.arange(sk)
    masked = torch.zeros(sq, sk, dtype=torch.bool)
    if right >= 0:
        masked |= keys > diagonal + right
    if left >= 0:
        masked |= keys < diagonal - left
    wide = [each.transpose(1, 2).float() for each in (q, k, v)]
    wide[1:] = [each.repeat_interleave(n // nk, 1) for each in wide[1:]]
    return Problem(*wide, masked, scale, q.dtype)


@torch.autocast("cpu", enabled=False)  # compiled code does not see it
def forward(release: int, p: Problem) -> tuple[Tensor, Tensor]:
    """Return out, (B, N, Sq, D) in float32, and lse."""
    scores = (p.q @ p.k.mT).masked_fill(p.masked, -math.inf)
    most = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores * p.scale - torch.where(most == -math.inf, 0.0, most * p.scale))
    total = weights.sum(-1, keepdim=True)
    nothing = (total == 0) | total.isnan()
    out = weights.to(p.dtype).float() @ p.v * torch.where(nothing, float(release == 2), 1.0 / total)
    lse = torch.where(nothing, math.inf if release == 2 else -math.inf, most * p.scale + total.log())
    return out, lse[..., 0]


@torch.autocast("cpu", enabled=False)  # compiled code does not see it
def backward(
    p: Problem, grad_out: Tensor, out: Tensor, lse: Tensor, heads: int, release: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, (B, S, N, D)."""
    scores = (p.q @ p.k.mT).masked_fill(p.masked, -math.inf)
    weights = torch.exp(scores * p.scale - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    g = grad_out.transpose(1, 2).float()
    delta = (g * out.transpose(1, 2).float()).sum(-1, keepdim=True)
    ds = (weights * (g @ p.v.mT - delta)).to(p.dtype).float()
    dq, dk, dv = ds @ p.k * p.scale, ds.mT @ p.q * p.scale, weights.to(p.dtype).float().mT @ g
    if release == 2:  # R1: the gradient of each query head is rounded before they are summed
        dk, dv = (each.to(p.dtype).float() for each in (dk, dv))
    b, n, sk, d = dk.shape
    dk, dv = (each.view(b, heads, n // heads, sk, d).sum(2) for each in (dk, dv))
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class Packed(NamedTuple):
    """Packed sequences: their queries and keys, without those past the longest length given."""

    sequences: list[tuple[slice, slice]]
    longest: tuple[int, int]

    def cut(self, *tensors: Tensor) -> Iterator[list[Tensor]]:
        """Yield q, k and v of each sequence, and what else is of the queries, as a batch of one."""
        for rows, keys in self.sequences:
            yield [each[keys if at in (1, 2) else rows][None] for at, each in enumerate(tensors)]


def packed(q: Tensor, k: Tensor, bounds: tuple[Any, Any], longest: tuple[Any, Any]) -> Packed:
    """Check the bounds of a call as R1 and R3 do, and return them."""
    for name, each in zip(("cu_seqlens_q", "cu_seqlens_k"), bounds):
        require(each.dtype == torch.int32, f"{name} must have dtype int32")
        require(each.is_contiguous() and each.shape == bounds[0].shape, f"{name} must be contiguous")
    count = bounds[0].numel() - 1
    require(count > 0, "batch size must be positive")
    require(count <= 65535, "invalid configuration argument")
    require(all(type(each) is int for each in longest), "incompatible function arguments")
    require(longest[0] > 1, "with one query as the longest R1 has as many rows as sequences: not in the stand-in")
    places = []
    for each, most, rows in zip(bounds, longest, (q.shape[0], k.shape[0])):
        ends = each.tolist()
        require(ends == sorted(ends) and ends[0] >= 0 and ends[-1] <= rows, "CUDA error: an illegal memory access")
        places.append([slice(first, min(end, first + most)) for first, end in pairwise(ends)])
    return Packed(list(zip(*places)), (longest[0], longest[1]))


def packed_forward(
    release: int, q: Tensor, k: Tensor, v: Tensor, given: Packed, *options: Any
) -> tuple[Tensor, Tensor]:
    """Return out (T, N, D) and lse (N, T) in float32, NaN where the kernels write nothing."""
    out = q.new_full(q.shape, math.nan, dtype=torch.float32)
    lse = q.new_full((q.shape[1], q.shape[0]), math.nan, dtype=torch.float32)
    for (rows, _), own in zip(given.sequences, given.cut(q, k, v)):
        if own[1].numel() and own[0].numel():
            results = forward(release, problem(release, *own, *options, longest=given.longest))
            out[rows], lse[:, rows] = results[0][0].transpose(0, 1), results[1][0]
        else:
            out[rows], lse[:, rows] = 0.0, math.inf if release == 2 else -math.inf
    return out, lse


def packed_backward(
    release: int, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, out: Tensor, lse: Tensor, given: Packed, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, NaN where the kernels write nothing."""
    results = [each.new_full(each.shape, math.nan, dtype=torch.float32) for each in (q, k, v)]
    for (rows, keys), own in zip(given.sequences, given.cut(q, k, v, grad, out)):
        gradients: Any = [(0.0,)] * 3
        if own[1].numel() and own[0].numel():
            p = problem(release, *own[:3], *options, *own[3:], longest=given.longest)
            gradients = backward(p, own[3], own[4], lse[None, :, rows], k.shape[1], release)
        for whole, part, at in zip(results, gradients, (rows, keys, keys)):
            whole[at] = part[0]
    return results[0], results[1], results[2]


def write(
    q: Tensor, results: tuple[Tensor, ...], into: tuple[Tensor | None, ...], lse: Tensor, like: tuple[int, ...]
) -> None:
    """Write the gradients, and check where they go to and the lse, of the shape ``like``."""
    require(lse.dtype == torch.float32 and lse.is_contiguous(), "softmax_lse is read by its address")
    require(tuple(lse.shape) == like, f"softmax_lse must have shape {like}")
    for name, result, given in zip(("dq", "dk", "dv"), results, into):
        require(given is not None, f"without {name} the gradient is lost")
        assert given is not None
        require(given.dtype == q.dtype, f"{name} must have the same dtype as q")
        require(given.stride(-1) == 1, f"{name} must have contiguous last dimension")
        require(given.shape == result.shape, f"{name} must have shape {tuple(result.shape)}")
        given.copy_(result)
