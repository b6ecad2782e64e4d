"""Attention of the fake torch_npu; its limits are in ``_attention_limits.py``. Sources as in ``__init__.py``, and

* R6: ops-transformer, ``op_kernel`` of ``flash_attention_score`` and of its gradient: float32 arithmetic; masked scores
  are replaced by the lowest finite float32, after the scale; the weights are rounded to the dtype of the inputs before
  the product with value, and divided by their sum after it; rows without a key are 0 with inner_precise 2, and where a
  band has such rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch_npu
from torch_npu._attention_limits import (
    COPIES,
    masked_by,
    require_defaults,
    require_saved,
    require_sizes,
    require_statistics,
    sequences_of,
)

_device = torch_npu._device
_library = torch_npu._library
_LOWEST = torch.finfo(torch.float32).min
_OPEN = 2147483647


def _groups(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Return float32 keys or values, one head for each query head, on the CPU."""
    return _device.on_cpu(tensor).float().repeat_interleave(heads // tensor.shape[1], 1)


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float, masked: torch.Tensor | None) -> torch.Tensor:
    scores = torch.matmul(_device.on_cpu(query).float(), _groups(key, query.shape[1]).transpose(-2, -1)) * scale
    return scores if masked is None else torch.where(masked, _LOWEST, scores)


def _parts(sequences: list[tuple[slice, slice]], *tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Yield [1, N, S, D] of each sequence: query, key, value and what else is of query."""
    for of_q, of_k in sequences:
        yield [each[of_k if at in (1, 2) else of_q].transpose(0, 1)[None] for at, each in enumerate(tensors)]


def _attend(
    tensors: list[torch.Tensor], scale: float, masked: torch.Tensor | None, zeroed: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return out, and the max and the sum of each row eight times, on the CPU."""
    query, key, value = tensors
    scores = _scores(query, key, scale, masked)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if zeroed:
        dead = top == _LOWEST
        weights, total = weights.masked_fill(dead, 0.0), total.masked_fill(dead, -_LOWEST)
    out = torch.matmul(weights.to(query.dtype).float(), _groups(value, query.shape[1])) / total
    return out.to(query.dtype).contiguous(), top.repeat(1, 1, 1, COPIES), total.repeat(1, 1, 1, COPIES)


def _gradients(
    tensors: list[torch.Tensor], statistics: tuple[torch.Tensor, torch.Tensor], scale: float, masked: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value in float32, on the CPU."""
    query, key, value, dy, attention_in = tensors
    heads = query.shape[1]
    scores, grad = _scores(query, key, scale, masked), _device.on_cpu(dy).float()
    top, total = statistics
    weights = torch.exp(scores - top) / total
    inner = (grad * _device.on_cpu(attention_in).float()).sum(-1, keepdim=True)
    dweights = torch.matmul(grad, _groups(value, heads).transpose(-2, -1))
    dscores = (weights * (dweights - inner)).to(query.dtype).float()
    weights = weights.to(query.dtype).float()
    dq = torch.matmul(dscores, _groups(key, heads)) * scale
    dk = torch.matmul(dscores.transpose(-2, -1), _device.on_cpu(query).float()) * scale
    dv = torch.matmul(weights.transpose(-2, -1), grad)
    shape = (key.shape[0], key.shape[1], heads // key.shape[1], *key.shape[2:])
    return dq, dk.view(shape).sum(2), dv.view(shape).sum(2)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _OPEN,
    next_tockens: int = _OPEN,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
    dropout_mask: torch.Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    name = "npu_fusion_attention"
    require_sizes(name, query, key, value, head_num, input_layout)
    others = {"pse": pse, "padding_mask": padding_mask, "prefix": prefix, "sink": sink}
    require_defaults(name, input_layout, softmax_layout, keep_prob, inner_precise, **others, dropout_mask=dropout_mask)
    sequences = sequences_of(name, query, key, input_layout, actual_seq_qlen, actual_seq_kvlen)
    options = {"sparse_mode": sparse_mode, "pre_tockens": pre_tockens, "next_tockens": next_tockens}
    if input_layout == "TND":
        out = query.new_full(query.shape, math.nan, device="cpu")
        top = torch.full((*query.shape[:2], COPIES), math.nan, dtype=torch.float32, device="cpu")
        results = [out, top, top.clone()]
        for (of_q, _), own in zip(sequences, _parts(sequences, query, key, value)):
            masked = masked_by(name, *own[:2], atten_mask, **options, packed=True)
            for whole, part in zip(results, _attend(own, scale, masked, False)):
                whole[of_q] = part[0].transpose(0, 1)
    else:
        masked = masked_by(name, query, key, atten_mask, **options)
        # R6: the option, or a band with rows that see no key, by its numbers
        dead = masked is not None and (inner_precise == 2 or (sparse_mode > 2 and bool(masked.all(-1).any())))
        results = list(_attend([query, key, value], scale, masked, dead))
    masks = () if atten_mask is None else (atten_mask,)
    ends = {} if actual_seq_qlen is None else {"ends": (list(actual_seq_qlen), list(actual_seq_kvlen))}
    torch_npu._log(name, query, key, value, *masks, **options, **ends, scale=scale)
    reserved = torch.empty(0, dtype=query.dtype, device="cpu")
    numels = head_num * sum((of_q.stop - of_q.start) * (of_k.stop - of_k.start) for of_q, of_k in sequences)
    out, top, total, reserved = (_device.to_device(each) for each in (*results, reserved))
    return out, top, total, reserved, seed, offset, numels


def _backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dy: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    softmax_max: torch.Tensor | None = None,
    softmax_sum: torch.Tensor | None = None,
    softmax_in: torch.Tensor | None = None,
    attention_in: torch.Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _OPEN,
    next_tockens: int = _OPEN,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    name = "npu_fusion_attention_grad"
    require_sizes(name, query, key, value, head_num, input_layout)
    others = {"pse": pse, "padding_mask": padding_mask, "prefix": prefix, "sink": sink}
    require_defaults(name, input_layout, softmax_layout, keep_prob, inner_precise, **others, softmax_in=softmax_in)
    sequences = sequences_of(name, query, key, input_layout, actual_seq_qlen, actual_seq_kvlen)
    assert softmax_max is not None
    assert softmax_sum is not None
    assert attention_in is not None
    require_saved(name, query, dy=dy, attention_in=attention_in)
    require_statistics(name, query, softmax_max=softmax_max, softmax_sum=softmax_sum)
    options = {"sparse_mode": sparse_mode, "pre_tockens": pre_tockens, "next_tockens": next_tockens}
    statistics = tuple(_device.on_cpu(tensor)[..., :1] for tensor in (softmax_max, softmax_sum))
    tensors = [query, key, value, dy, attention_in]
    if input_layout == "TND":
        results = [each.new_full(each.shape, math.nan, device="cpu", dtype=torch.float32) for each in tensors[:3]]
        for (of_q, of_k), own in zip(sequences, _parts(sequences, *tensors)):
            masked = masked_by(name, *own[:2], atten_mask, **options, packed=True)
            rows = tuple(each[of_q].transpose(0, 1)[None] for each in statistics)
            for whole, part, at in zip(results, _gradients(own, rows, scale_value, masked), (of_q, of_k, of_k)):
                whole[at] = part[0].transpose(0, 1)
    else:
        masked = masked_by(name, query, key, atten_mask, **options)
        results = list(_gradients(tensors, statistics, scale_value, masked))
    masks = () if atten_mask is None else (atten_mask,)
    ends = {} if actual_seq_qlen is None else {"ends": (list(actual_seq_qlen), list(actual_seq_kvlen))}
    given = (query, key, value, dy, softmax_max, softmax_sum, attention_in, *masks)
    torch_npu._log(name, *given, **options, **ends)
    results.append(torch.empty(0, device="cpu"))
    dq, dk, dv, dpse = (_device.to_device(each.to(query.dtype).contiguous()) for each in results)
    return dq, dk, dv, dpse, _device.to_device(torch.empty(0, dtype=torch.float32, device="cpu"))


_KERNELS: dict[str, Any] = {  # R1
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None, "
    "Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
    "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, "
    "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
    'bool sync=False, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, '
    "int offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)": _forward,
    "npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout, *, "
    "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? softmax_max=None, "
    "Tensor? softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, float scale_value=1., "
    "float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int seed=0, "
    "int offset=0, int numels=0, int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, "
    'int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, str softmax_layout="", Tensor? sink=None) '
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)": _backward,
}
for _schema, _kernel in _KERNELS.items():
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _kernel, "PrivateUse1")

npu_fusion_attention = torch.ops.npu.npu_fusion_attention
npu_fusion_attention_grad = torch.ops.npu.npu_fusion_attention_grad
