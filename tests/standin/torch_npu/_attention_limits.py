"""What the fake torch_npu's attention refuses. Sources as in ``__init__.py``, and

* D8: op-plugin, ``docs/.../torch_npu-npu_fusion_attention.md``: float16, bfloat16 or float32, one dtype; key and value
  of one shape; B from 1 to 2M, N from 1 to 256 and a multiple of that of key, S from 1 to 1M, D from 1 to 768;
  atten_mask bool or uint8, 1 is masked, [B, N, Sq, Skv], [B, 1, Sq, Skv], [1, 1, Sq, Skv] or [Sq, Skv]; padding_mask
  is not supported; the modes 2, 3 and 4 take the triangle of 2048 x 2048, and other masks give wrong results; the two
  sides of a band intersect, and are those of the mask. Packed sequences, TND: T from 1 to 1M, at most 1K sequences;
  actual_seq_qlen and actual_seq_kvlen are sums of lengths, of one number; atten_mask [maxSq, maxSkv], without a fully
  masked row; with softmax_layout "TND" the max and the sum are [T, N, 8], without it their heads are first.
* D9: ops-transformer, ``docs/aclnnFlashAttentionScoreGrad.md``: softmax_max and softmax_sum float32 of [B, N, Sq, 8].
* R6: ops-transformer, ``flash_attention_score_tiling_general.cpp``: the modes as bands.

The fake supports the layouts BNSD and TND and the modes 0, 2, 3 and 4, without dropout. With TND, no mask of mode 0 and
no order of max and sum but "TND"; rows after the last end are NaN, where the vendor writes nothing. The page allows
sequences of length 0; the fake refuses those with queries or with keys alone, whose result the page does not have.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch_npu

_device = torch_npu._device
COPIES = 8  # of each row's max and sum


def require_sizes(
    name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, layout: str
) -> None:
    packed = layout == "TND"
    tensors = {"query": query, "key": key, "value": value}
    torch_npu._require_npu(name, **tensors)
    for argument, tensor in tensors.items():
        if tensor.dtype not in torch_npu._FLOATS or tensor.dtype != query.dtype:
            torch_npu._refuse(name, f"{argument} must be float16, bfloat16 or float32, as query; it is {tensor.dtype}.")
        if tensor.dim() != (3 if packed else 4):
            torch_npu._refuse(name, f"{argument} must have {3 if packed else 4} dimensions; it has {tensor.dim()}.")
    if packed:
        query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
    b, n, sq, d = query.shape
    if key.shape != value.shape:
        torch_npu._refuse(name, f"key and value must have one shape; got {tuple(key.shape)}, {tuple(value.shape)}.")
    if key.shape[0] != b or key.shape[3] != d:
        torch_npu._refuse(name, f"B and D of key must be those of query, {b} and {d}; got {tuple(key.shape)}.")
    if head_num != n or key.shape[1] == 0 or n % key.shape[1]:
        torch_npu._refuse(name, f"head_num {head_num} must be N of query, {n}, a multiple of {key.shape[1]}.")
    for what, size, most in (
        ("B", b, 2_000_000),
        ("N", n, 256),
        ("Sq", sq, 1_000_000),
        ("Skv", key.shape[2], 1_000_000),
        ("D", d, 768),
    ):
        if not 1 <= size <= most:
            torch_npu._refuse(name, f"{what} must be in [1, {most}]; it is {size}.")


def require_defaults(
    name: str, layout: str, of_statistics: str, keep_prob: float, inner_precise: int, **others: Any
) -> None:
    if layout not in ("BNSD", "TND"):
        torch_npu._refuse(name, f"the fake supports the layouts BNSD and TND; got {layout!r}.")
    if of_statistics != ("TND" if layout == "TND" else ""):
        torch_npu._refuse(name, f"the fake supports softmax_layout TND with TND alone; got {of_statistics!r}.")
    if keep_prob != 1.0 or inner_precise not in (0, 1, 2):
        torch_npu._refuse(name, "the fake supports keep_prob 1, and inner_precise 0, 1 and 2.")
    given = [argument for argument, value in others.items() if value is not None and not isinstance(value, str)]
    given += [argument for argument, value in others.items() if isinstance(value, str) and value]
    if given:
        torch_npu._refuse(name, f"the fake does not support {', '.join(given)}.")


def sequences_of(
    name: str, query: torch.Tensor, key: torch.Tensor, layout: str, ends_q: Any, ends_k: Any
) -> list[tuple[slice, slice]]:
    """Return the queries and the keys of each sequence; of another layout than TND the sizes, of each batch."""
    if layout != "TND":
        if ends_q is not None or ends_k is not None:
            torch_npu._refuse(name, "the fake does not support actual_seq_qlen and actual_seq_kvlen of BNSD.")
        return [(slice(0, query.shape[2]), slice(0, key.shape[2]))] * query.shape[0]
    if not ends_q or not ends_k or len(ends_q) != len(ends_k):
        torch_npu._refuse(name, "the size of actual_seq_qlen and actual_seq_kvlen must be the same and not be empty.")
    if len(ends_q) > 1024:
        torch_npu._refuse(name, f"actual_seq_qlen must have at most 1024 numbers; it has {len(ends_q)}.")
    both: list[list[slice]] = []
    for argument, given, tensor in (("actual_seq_qlen", ends_q, query), ("actual_seq_kvlen", ends_k, key)):
        bounds = [0, *given]
        if any(type(end) is not int for end in given) or bounds != sorted(bounds) or bounds[-1] > tensor.shape[0]:
            torch_npu._refuse(name, f"{argument} must be sums of lengths, of {tensor.shape[0]} rows; it is {given}.")
        both.append([slice(start, end) for start, end in pairwise(bounds)])
    sequences = list(zip(*both))
    if any((of_q.stop == of_q.start) != (of_k.stop == of_k.start) for of_q, of_k in sequences):
        torch_npu._refuse(name, "the fake does not support a sequence of queries without keys, or of keys alone.")
    return [(of_q, of_k) for of_q, of_k in sequences if of_q.stop > of_q.start]


def masked_by(
    name: str,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    sparse_mode: int,
    pre_tockens: int,
    next_tockens: int,
    packed: bool = False,
) -> torch.Tensor | None:
    """Return what is masked, broadcastable to (B, N, Sq, Skv), on the CPU. packed: of one of packed sequences."""
    masked = _masked_by(name, query, key, mask, sparse_mode, pre_tockens, next_tockens)
    if packed and mask is not None and sparse_mode == 0:
        torch_npu._refuse(name, "the fake supports no atten_mask of sparse_mode 0 with the layout TND.")
    if packed and masked is not None and bool(masked.all(-1).any()):
        torch_npu._refuse(name, "with the layout TND atten_mask must not mask all of a row.")
    return masked


def _masked_by(
    name: str, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, mode: int, before: int, after: int
) -> torch.Tensor | None:
    (b, n, sq, _), sk = query.shape, key.shape[2]
    if mask is None:
        if mode:
            torch_npu._refuse(name, f"sparse_mode {mode} needs its atten_mask.")
        return None
    torch_npu._require_npu(name, atten_mask=mask)
    if mask.dtype not in (torch.bool, torch.uint8):
        torch_npu._refuse(name, f"atten_mask must be bool or uint8; it is {mask.dtype}.")
    values = _device.on_cpu(mask)
    if mask.dtype == torch.uint8 and bool((values > 1).any()):
        torch_npu._refuse(name, "atten_mask must be 0 or 1.")
    values = values.bool()
    offsets = torch.arange(sk, device="cpu") - torch.arange(sq, device="cpu")[:, None]  # key - query
    if mode == 0:
        if tuple(mask.shape) not in {(b, n, sq, sk), (b, 1, sq, sk), (1, 1, sq, sk), (sq, sk)}:
            torch_npu._refuse(
                name,
                f"atten_mask must be [B, N, Sq, Skv], [B, 1, Sq, Skv], [1, 1, Sq, Skv] or [Sq, Skv], of {b}, {n}, {sq} "
                f"and {sk}; it is {tuple(mask.shape)}.",
            )
        if bool((((offsets > after) | (-offsets > before)) & ~values).any()):
            torch_npu._refuse(name, "pre_tockens and next_tockens must be those of atten_mask.")
        return values
    if mode not in (2, 3, 4):
        torch_npu._refuse(name, f"the fake supports sparse_mode 0, 2, 3 and 4; got {mode}.")
    if tuple(mask.shape) != (2048, 2048) or not torch.equal(_words(values), _triangle()):
        torch_npu._refuse(name, f"sparse_mode {mode} needs the triangle of 2048 x 2048.")
    if mode < 4:
        return offsets > (0 if mode == 2 else sk - sq)
    for side, other, size in ((before, after, sq), (after, before, sk)):
        if side < 0 and (other < -side or -side >= size):
            torch_npu._refuse(name, f"pre_tockens {before} and next_tockens {after} must intersect.")
    return (offsets > after + sk - sq) | (-offsets > before + sq - sk)


def _words(values: torch.Tensor) -> torch.Tensor:
    """Return eight bool values as one number: a tenth of the time to compare four million of them."""
    return values.contiguous().view(torch.int64)


@cache
def _triangle() -> torch.Tensor:
    return _words(torch.ones(2048, 2048, dtype=torch.bool, device="cpu").triu(1))


def require_saved(name: str, query: torch.Tensor, **tensors: torch.Tensor) -> None:
    torch_npu._require_npu(name, **tensors)
    for argument, tensor in tensors.items():
        if tensor.shape != query.shape or tensor.dtype != query.dtype:
            torch_npu._refuse(name, f"{argument} must have the shape and dtype of query; it is {tuple(tensor.shape)}.")


def require_statistics(name: str, query: torch.Tensor, **tensors: torch.Tensor) -> None:
    torch_npu._require_npu(name, **tensors)
    shape = (*query.shape[:-1], COPIES)
    for argument, tensor in tensors.items():
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
            torch_npu._refuse(name, f"{argument} must be float32 of {shape}; it is {tuple(tensor.shape)}.")
        copies = _device.on_cpu(tensor).nan_to_num()
        if not torch.equal(copies, copies[..., :1].expand(shape)):
            torch_npu._refuse(name, f"{argument} must have each number {COPIES} times.")
