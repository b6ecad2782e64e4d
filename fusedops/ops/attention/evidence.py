"""Data of attention: its arguments, cases, bytes and shards, the chain without fused ops, and other libraries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from fusedops import masks
from fusedops._contract.constraint import is_tensor
from fusedops._contract.values import Case, Sharding
from fusedops.ops.attention import formulas


def canonical(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with ``causal`` as a text: True where Sq == Sk is "upper_left", False is "none".

    "lower_right" of one query without a window is "none" too: it masks nothing, and more kernels take it.
    """
    causal = args[5]
    if causal is True and _square(args[0], args[1]):
        text = "upper_left"
    elif causal is False or (type(causal) is str and causal == "lower_right" and _sees_every_key(args[0], args[6])):
        text = "none"
    else:
        return args  # a constraint refuses what is no text
    return (*args[:5], text, *args[6:])


def wanted(results: Any, return_lse: bool) -> Any:
    """Return the results of a call as its caller wants them. torch.fx.symbolic_trace, which records it, has one."""
    return results if return_lse or type(results) is not tuple else cast("Any", results)[0]


def _sees_every_key(q: Any, window: Any) -> bool:
    if window is not None or not is_tensor(q) or q.is_nested or q.dim() != 4:
        return False
    length: Any = q.shape[2]
    return isinstance(length, int) and length == 1  # a symbolic size, or one of torch.jit.trace, is any length


def _square(q: Any, k: Any) -> bool:
    if not (is_tensor(q) and is_tensor(k)) or q.is_nested or k.is_nested or q.dim() != 4 or k.dim() != 4:
        return False
    return bool(q.shape[2] == k.shape[2])


def empty(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return empty outputs."""
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((*q.shape[:3], v.shape[3])), lse


def unfused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    causal: str,
    window: tuple[int, int] | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the op as models do without fused ops: a fully masked row is NaN."""
    sizes = q.shape[2], k.shape[2]
    masked = masks.from_band(*sizes, masks.band(*sizes, causal, window), q.device)
    if mask is not None:
        masked = mask.bool() if masked is None else masked | mask.bool()
    keys, values = formulas.for_each_query_head(k, q), formulas.for_each_query_head(v, q)
    scores = q @ keys.transpose(-2, -1) * formulas.scale_of(q, scale)
    if masked is not None:
        scores = scores.masked_fill(masked, -math.inf)
    lse = torch.logsumexp(scores.float(), -1) if return_lse else scores.new_zeros(q.shape[:3])
    return torch.softmax(scores, -1) @ values, lse


def min_bytes(q: Any, k: Any, v: Any, mask: Any, *rest: Any) -> Mapping[Any, int]:
    """Read q, k, v and mask, write out and lse; read these again with the gradient of out, write three gradients."""
    size = q.dtype.itemsize
    inputs = size * sum(math.prod(each.shape) for each in (q, k, v))
    outputs = size * math.prod(q.shape[:3]) * v.shape[3] + max(size, 4) * math.prod(q.shape[:3])
    masked = 0 if mask is None else math.prod(mask.shape)
    return {"forward": inputs + outputs + masked, "backward": 2 * inputs + 2 * outputs + masked}


def _dims_of(given: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    """Return the dims of q that the dims of lse and of its gradient go with."""
    return dict.fromkeys(("lse", "grad_lse"), (-4, -3, -2))


def _whole_of(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the heads where a rank's part would not be whole groups: each rank needs key heads of its own."""
    heads = given["k"].shape[1]
    if heads <= 1:
        return ()  # it is whole on each rank
    # a mask or a gradient that is sharded alone cuts the other tensors too
    dims = {name: _dims_of(given).get(name, range(-each.ndim, 0)) for name, each in given.items() if is_tensor(each)}
    mesh = given["k"].device_mesh
    places = {name: given[name].placements for name in dims}
    ranks = math.prod(
        mesh.size(at)
        for at in range(mesh.ndim)
        if any(-3 in dims[name] and each[at].is_shard(dims[name].index(-3)) for name, each in places.items())
    )
    return (-3,) if heads % ranks else ()


_SAMPLE = {"scale": 0.3, "causal": "lower_right", "return_lse": True}


def sample(batch: int, length: int) -> Mapping[str, Any]:
    """Return a small call for tests."""
    keys = (batch, 1, length + 2, 8)
    mask = (batch, 1, length, length + 2)
    return {"q": (batch, 8, length, 8), "k": keys, "v": keys, "mask": mask, **_SAMPLE}


def _heads(b: int, nq: int, nk: int, sq: int, sk: int, d: int) -> dict[str, Any]:
    return {"q": (b, nq, sq, d), "k": (b, nk, sk, d), "v": (b, nk, sk, d)}


def sweep(rows: int, width: int) -> Mapping[str, Any]:
    """Return the call of a benchmark over lengths: the width is the number of keys."""
    return {**_heads(1, 16, 16, rows, width, 64), "causal": "lower_right"}


CASES = [  # a window is a list here: a tuple is the shape of a tensor
    Case("gpt2_small", {**_heads(1, 12, 12, 64, 64, 64), "causal": "upper_left"}, "GPT-2, 12 heads of 64"),
    Case("llama3_8b", {**_heads(1, 32, 8, 32, 32, 128), "causal": "upper_left"}, "Llama 3 8B, 8 key heads"),
    Case("bert_padded", {**_heads(2, 12, 12, 48, 48, 64), "mask": (2, 1, 1, 48)}, "BERT, a padded batch"),
    Case("mistral_window", {**_heads(1, 8, 2, 96, 96, 64), "causal": "upper_left", "window": [31, 0]}, "Mistral"),
    Case("decode", {**_heads(4, 8, 8, 1, 129, 64), "causal": "lower_right", "return_lse": True}, "cached keys"),
    Case("prefill", {**_heads(2, 4, 4, 17, 51, 32), "causal": "lower_right"}, "a part of a prompt, cached keys"),
    Case("masked", {**_heads(2, 4, 2, 40, 40, 32), "mask": (2, 4, 40, 40), "return_lse": True}),
    Case("ragged", {**_heads(1, 3, 1, 33, 45, 40), "mask": (33, 45), "scale": 0.3}, "no size is a power of two"),
]
LARGE = [
    Case("causal", {**_heads(2, 16, 16, 2048, 2048, 64), "causal": "upper_left"}),
    Case("padded", {**_heads(2, 16, 16, 2048, 2048, 64), "mask": (2, 1, 1, 2048)}),
    Case("grouped", {**_heads(2, 16, 4, 2048, 2048, 64), "causal": "upper_left"}),
]
SHARDING = Sharding(
    whole=(-2, -1),
    whole_of=_whole_of,
    dims_of=_dims_of,
    reason="a row needs all its keys, and a group all its query heads: sharded keys are context parallelism, which "
    "is not this op",
)
PEERS = """
| peer | causal, Sq != Sk | True in a bool mask | fully masked row | window | grouped heads |
|---|---|---|---|---|---|
| torch, `scaled_dot_product_attention` | upper left | seen | 0 | none | `enable_gqa` |
| flash-attn, `flash_attn_func` | lower right | no mask | 0 | `window_size` | yes |
| torch_npu, `npu_fusion_attention` | by `sparse_mode` | masked out | 0 with `inner_precise=2` | `sparse_mode=4` | yes |
| fusedops | by name | masked out | 0 | `window` | yes |
"""
