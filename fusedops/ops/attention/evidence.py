"""Evidence of attention and of its parts: cases, bytes, the unfused form, tolerances."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fusedops import masks
from fusedops._contract.evidence import Case, Evidence, Rows, rows_of_two_widths, tolerances
from fusedops._contract.tensor_spec import TensorSpec
from fusedops.ops.attention import formulas
from fusedops.ops.attention.arguments import (
    AttentionArgs,
    PagedAttentionArgs,
    SelectKeysArgs,
    SparseAttentionArgs,
    VarlenAttentionArgs,
    sequences_of,
)
from fusedops.ops.attention.error_bounds import (
    error_bound,
    gradient_error_bound,
    merge_error_bound,
    merge_gradient_error_bound,
    packed_error_bound,
    packed_gradient_error_bound,
    paged_error_bound,
    pin_choice,
    sparse_error_bound,
    sparse_gradient_error_bound,
)
from fusedops.ops.attention.paged_attention import dense
from fusedops.ops.attention.select_keys import hidden_of
from fusedops.ops.attention.sparse_attention import dense as dense_of_chosen
from fusedops.ops.attention.store_kv import written


def unfused(a: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op as models do without fused ops: a fully masked row is NaN."""
    sizes = a.q.shape[2], a.k.shape[2]
    masked = masks.from_band(*sizes, masks.band(*sizes, a.causal, a.window), a.q.device)
    if a.mask is not None:
        masked = a.mask.bool() if masked is None else masked | a.mask.bool()
    keys, values = formulas.for_each_query_head(a.k, a.q), formulas.for_each_query_head(a.v, a.q)
    scores = a.q @ keys.transpose(-2, -1) * formulas.scale_of(a.q, a.scale)
    if masked is not None:
        scores = scores.masked_fill(masked, -math.inf)
    lse = torch.logsumexp(scores.float(), -1) if a.return_lse else scores.new_zeros(a.q.shape[:3])
    return torch.softmax(scores, -1) @ values, lse


def min_bytes(q: Any, k: Any, v: Any, mask: Any, *rest: Any) -> Mapping[Any, int]:
    """Read q, k, v and mask, write out and lse; read these again with the gradient of out, write three gradients."""
    size = q.dtype.itemsize
    inputs = size * sum(math.prod(each.shape) for each in (q, k, v))
    outputs = size * math.prod(q.shape[:3]) * v.shape[3] + max(size, 4) * math.prod(q.shape[:3])
    masked = 0 if mask is None else math.prod(mask.shape)
    return {"forward": inputs + outputs + masked, "backward": 2 * inputs + 2 * outputs + masked}


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
    # first: of a kernel without masks, the kit varies the first case. Here no more rows of q are no more of k
    Case("cross", _heads(2, 4, 2, 19, 45, 64), "the decoder of T5: as many keys as the encoder has positions"),
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
PEERS = """
| peer | causal, Sq != Sk | True in a bool mask | fully masked row | window | grouped heads |
|---|---|---|---|---|---|
| torch, `scaled_dot_product_attention` | upper left | seen | 0 | none | `enable_gqa` |
| flash-attn, `flash_attn_func` | lower right | no mask | 0 | `window_size` | yes |
| torch_npu, `npu_fusion_attention` | by `sparse_mode` | masked out | 0 with `inner_precise=2` | `sparse_mode=4` | yes |
| fusedops | by name | masked out | 0 | `window` | yes |
"""


_QUERIES: dict[str, int] = dict.fromkeys(("q", "mask", "out", "lse"), 2)
_LSE = {"return_lse": True}


def _masked_queries(count: int) -> Mapping[str, Any]:
    return {**_heads(1, 4, 2, count, 150, 24), "mask": (1, 1, count, 150), **_LSE}


def _prompt(count: int) -> Mapping[str, Any]:
    return {**_heads(1, 2, 1, count, 150 + count, 24), "causal": "lower_right", **_LSE}


def _sequences(count: int) -> Mapping[str, Any]:
    return {**_heads(count, 2, 1, 3, 19, 24), "causal": "lower_right", **_LSE}


ATTENTION = Evidence(
    formula="softmax(where(masked, -inf, scale * q @ k.mT)) @ v",
    cases=CASES,
    # absolute: of the weighted mean of |v|. Probabilities are rounded to the inputs' dtype, then the sum is
    tolerance=tolerances((8e-6, 2e-6), (2e-14, 1e-14), absolute=0.0, absolute_roundings=1.5),
    # absolute: of each term of a sum in 16 bits; out, the probabilities and their gradients are rounded
    gradient_tolerance=tolerances((2e-5, 2e-6), (5e-14, 1e-14), absolute=0.0, absolute_roundings=2.5),
    error_bound=error_bound,
    gradient_error_bound=gradient_error_bound,
    min_bytes=min_bytes,
    unfused=unfused,
    sample=sample,
    large=LARGE,
    sweep=sweep,
    rows=[
        Rows("queries", _masked_queries, _QUERIES),
        Rows("queries behind cached keys", _prompt, _QUERIES, up_to={"k": 2, "v": 2}),
        Rows("sequences", _sequences, dict.fromkeys(("q", "k", "v", "out", "lse"), 0)),
    ],
    peers=PEERS,
    sharded=(
        "`q`: batch, heads and the sequence",
        "`k`, `v`: batch and heads, replicated where there is one head; whole key heads on each rank; the sequence, or "
        "replicated; `mask`: batch, heads and queries likewise, replicated where its size is 1, its keys whole",
        "as q, k, v; of a replicated k and v with sharded heads or a sharded sequence of q: `Partial`",
    ),
)


# ----------------------------------------------------------------------------------------------------- merge_attention


def _merge(*shape: int) -> dict[str, Any]:
    """Return the tensors of a call."""
    return {"out_a": shape, "lse_a": shape[:-1], "out_b": shape, "lse_b": shape[:-1]}


def merge_unfused(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the op as ring attention does without fused ops: two empty parts are NaN."""
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = torch.exp(lse_a - lse)[..., None], torch.exp(lse_b - lse)[..., None]
    return (weight_a * out_a + weight_b * out_b).to(torch.promote_types(out_a.dtype, out_b.dtype)), lse


def merge_min_bytes(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Mapping[Any, int]:
    """Read both parts, write out and lse; read both and the gradients of these, write four gradients."""
    sizes = [math.prod(each.shape) * each.dtype.itemsize for each in (out_a, out_b, lse_a, lse_b)]
    results = max(sizes[:2]) + max(sizes[2:])
    return {"forward": sum(sizes) + results, "backward": 2 * sum(sizes) + results}


def merge_sample(batch: int, length: int) -> Mapping[str, Any]:
    """Return a small call for tests."""
    return _merge(batch, 2, length, 8)


def merge_sweep(rows: int, width: int) -> Mapping[str, Any]:
    """Return the call of a benchmark over lengths."""
    return _merge(rows, width)


MERGE = Evidence(
    formula="exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b, lse = logaddexp(lse_a, lse_b)",
    cases=[
        Case("ring_llama3_8b", _merge(1, 32, 64, 128), "a ring over the keys of Llama 3 8B"),
        Case("packed", _merge(257, 8, 64), "packed sequences beside a shared prefix"),
        Case("decode", _merge(4, 32, 1, 128), "one query beside a cached prefix"),
        Case("ragged", _merge(3, 5, 33, 41), "no size is a power of two"),
    ],
    large=[Case("ring_llama3_8b", _merge(1, 32, 4096, 128), "a ring over the keys of Llama 3 8B")],
    tolerance=tolerances((1e-6, 1e-6), (1e-15, 1e-15)),
    gradient_tolerance=tolerances((1e-6, 1e-6), (2e-15, 1e-15)),
    error_bound=merge_error_bound,
    gradient_error_bound=merge_gradient_error_bound,
    min_bytes=merge_min_bytes,
    unfused=merge_unfused,
    sample=merge_sample,
    sweep=merge_sweep,
    rows=rows_of_two_widths(_merge, *_merge(1, 1), "out", "lse"),
    sharded=(
        "any dim except the last",
        "`out_b` as `out_a`; `lse_a` and `lse_b` likewise",
        "as the tensors",
    ),
)


# ----------------------------------------------------------------------------------------------------- varlen_attention


def _packed(rows: int, keys: int, nq: int, nk: int, d: int, sequences: int, **options: Any) -> dict[str, Any]:
    """Return the tensors of a call; with as many keys as queries, the bounds of both are the same."""
    bounds = {} if keys == rows else {"cu_seqlens_k": (sequences + 1,)}
    tensors = {"q": (rows, nq, d), "k": (keys, nk, d), "v": (keys, nk, d), "cu_seqlens_q": (sequences + 1,)}
    return {**tensors, **bounds, **options}


def packed_unfused(a: VarlenAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op as models do without it: padded to the longest sequence, with a mask."""
    sequences = sequences_of(a.cu_seqlens_q, a.cu_seqlens_k, a.q.shape[0], a.k.shape[0])
    out, lse = (
        a.q.new_zeros((*a.q.shape[:2], a.v.shape[2])),
        a.q.new_full(a.q.shape[:2], -math.inf, dtype=torch.float32),
    )
    if not sequences:
        return out, lse
    queries, keys, values = (
        pad_sequence([each[slices[at]] for slices in sequences], batch_first=True).transpose(1, 2)
        for each, at in ((a.q, 0), (a.k, 1), (a.v, 1))
    )
    sizes = [each.lengths for each in sequences]
    bands = torch.ones(len(sizes), 1, queries.shape[2], keys.shape[2], dtype=torch.bool, device=a.q.device)
    for hidden, (sq, sk) in zip(bands, sizes):
        masked = masks.from_band(sq, sk, masks.band(sq, sk, a.causal, a.window), a.q.device)
        hidden[:, :sq, :sk] = False if masked is None else masked
    results = unfused(AttentionArgs(queries, keys, values, bands, a.scale, "none", None, a.return_lse))
    for at, each in enumerate(sequences):
        out[each.queries] = results[0][at, :, : each.lengths[0]].transpose(0, 1)
        lse[each.queries] = results[1][at, :, : each.lengths[0]].transpose(0, 1).float()
    return out, lse


def packed_min_bytes(q: Any, k: Any, v: Any, *rest: Any) -> Mapping[Any, int]:
    """Read q, k and v, write out and lse; read these again with the gradient of out, write three gradients."""
    size = q.dtype.itemsize
    inputs = size * sum(math.prod(each.shape) for each in (q, k, v))
    outputs = math.prod(q.shape[:2]) * (size * v.shape[2] + max(size, 4))
    return {"forward": inputs + outputs, "backward": 2 * inputs + 2 * outputs}


def packed_sample(batch: int, length: int) -> Mapping[str, Any]:
    """Return a small call for tests."""
    return _packed(batch, batch, 4, 1, length + 3, 3, scale=0.3, causal="upper_left", return_lse=True)


def packed_sweep(rows: int, width: int) -> Mapping[str, Any]:
    """Return the call of a benchmark over lengths."""
    return _packed(rows, rows, 16, 16, width, 32, causal="upper_left")


PACKED = Evidence(
    formula="attention of each of several packed sequences",
    cases=[
        Case("prefill", _packed(24, 40, 4, 1, 32, 6, causal="lower_right", return_lse=True), "prompts, cached keys"),
        Case("llama3_8b", _packed(64, 64, 32, 8, 128, 4, causal="upper_left"), "Llama 3 8B, packed documents"),
        Case("bert", _packed(150, 150, 12, 12, 64, 5), "BERT without padding"),
        Case("mistral_window", _packed(96, 96, 8, 2, 64, 3, causal="upper_left", window=[31, 0]), "Mistral"),
        Case("decode", _packed(16, 300, 8, 8, 64, 16, causal="lower_right"), "one query of some of 16 sequences"),
        Case("ragged", _packed(33, 45, 3, 1, 40, 7, window=[3, 2], scale=0.3), "no size is a power of two"),
    ],
    large=[
        Case("causal", _packed(16384, 16384, 16, 16, 64, 32, causal="upper_left")),
        Case("grouped", _packed(16384, 16384, 16, 4, 64, 32, causal="upper_left")),
    ],
    tolerance=ATTENTION.tolerance,
    gradient_tolerance=ATTENTION.gradient_tolerance,
    error_bound=packed_error_bound,
    gradient_error_bound=packed_gradient_error_bound,
    min_bytes=packed_min_bytes,
    unfused=packed_unfused,
    sample=packed_sample,
    sweep=packed_sweep,
    rows=[
        Rows(
            "sequences",
            lambda count: _packed(3 * count, 9 * count, 4, 2, 24, count, causal="lower_right", return_lse=True),
            dict.fromkeys(("q", "k", "v", "out", "lse"), 0),
            packed={**dict.fromkeys(("q", "out", "lse"), "cu_seqlens_q"), **dict.fromkeys(("k", "v"), "cu_seqlens_k")},
        )
    ],
    sharded=(
        "`q`: heads",
        "`k`, `v`: heads, replicated where there is one; whole key heads on each rank; bounds replicated, or plain",
        "as q, k, v; of a replicated k and v with sharded heads of q: `Partial`",
    ),
)


# ------------------------------------------------------------------------------------------------------ paged_attention


def _paged(
    rows: int, pages: int, size: int, nq: int, nk: int, d: int, sequences: int, table: int, **options: Any
) -> dict[str, Any]:
    """Return the tensors of a call: sequences of at most ``table`` pages."""
    cache = (pages, size, nk, d)
    tensors = {"q": (rows, nq, d), "k": cache, "v": cache, "cu_seqlens_q": (sequences + 1,)}
    return {**tensors, "block_table": (sequences, table), "seqused_k": (sequences,), **options}


def _codes(scales: tuple[int, ...], *sizes: int, **options: Any) -> dict[str, Any]:
    """Return the tensors of a call whose cache is of int8."""
    call = _paged(*sizes, **options)
    cache = TensorSpec(call["k"], torch.int8)
    return {**call, "k": cache, "v": cache, "k_scale": scales, "v_scale": scales}


def paged_unfused(a: PagedAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op as models do without it: the cache is gathered and unpacked for each call."""
    out, lse = packed_unfused(dense(a))
    return out.to(a.q.dtype), lse


def paged_min_bytes(q: Any, k: Any, v: Any, cu_seqlens_q: Any, block_table: Any, *rest: Any) -> Mapping[Any, int]:
    """Read q and the pages of the table, write out and lse."""
    share = min(math.prod(block_table.shape) / max(k.shape[0], 1), 1.0)
    cache = sum(math.prod(each.shape) * each.dtype.itemsize for each in (k, v))
    rows = math.prod(q.shape[:2])
    return {"forward": rows * (q.dtype.itemsize * (q.shape[2] + v.shape[3]) + 4) + int(share * cache)}


PAGED = Evidence(
    formula="varlen_attention of the keys and values in the pages of each sequence, times their scales",
    cases=[
        Case("decode", _paged(5, 12, 16, 8, 2, 64, 5, 3, causal="lower_right", return_lse=True), "a token of each"),
        Case("mixed", _paged(29, 9, 8, 4, 4, 40, 4, 5, causal="lower_right", window=[9, 0]), "prompts and tokens"),
        Case("pages_of_one_key", _paged(7, 300, 1, 4, 1, 24, 3, 270, scale=0.3), "more keys than a part of a kernel"),
        Case("codes", _codes((1, 1, 2, 1), 7, 9, 16, 4, 2, 64, 3, 7, causal="lower_right", return_lse=True), "int8"),
        Case("codes_by_token", _codes((9, 8, 3, 1), 11, 9, 8, 3, 3, 20, 4, 3), "a scale for each token and head"),
        Case("codes_by_page", _codes((9, 1, 2, 1), 2, 9, 32, 4, 2, 128, 2, 9, window=[70, 3]), "a scale for each page"),
    ],
    large=[Case("llama3_8b", _codes((1, 1, 8, 1), 8, 512, 256, 32, 8, 128, 8, 32, causal="lower_right"), "8 x 8192")],
    tolerance=ATTENTION.tolerance,
    gradient_tolerance={},
    error_bound=paged_error_bound,
    min_bytes=paged_min_bytes,
    unfused=paged_unfused,
    sample=lambda batch, length: _paged(batch, batch + 1, length, 4, 2, 16, batch, 2, causal="lower_right"),
    sweep=lambda rows, width: _paged(rows, 128, 16, 16, 4, width, rows, 64, causal="lower_right"),
    rows=[
        Rows(
            "sequences",
            lambda count: _paged(3 * count, 7, 8, 4, 2, 24, count, 4, causal="lower_right", return_lse=True),
            dict.fromkeys(("q", "block_table", "seqused_k", "out", "lse"), 0),
            packed=dict.fromkeys(("q", "out", "lse"), "cu_seqlens_q"),
        )
    ],
    sharded=(
        "`q`: heads",
        "`k`, `v` and their scales: heads, whole key heads on each rank; the others replicated",
        "none",
    ),
)


# ------------------------------------------------------------------------------------------------------------ store_kv


def _stored(
    tokens: int, pages: int, size: int, heads: int, d: int, dv: int, scales: Any = (), dtype: torch.dtype = torch.int8
) -> dict[str, Any]:
    """Return the tensors of a call; with ``scales`` of a cache of codes."""
    caches = {"k_cache": (pages, size, heads, d), "v_cache": (pages, size, heads, dv)}
    tensors = {"k": (tokens, heads, d), "v": (tokens, heads, dv), "slots": (tokens,)}
    if not scales:
        return {**tensors, **caches}
    codes = {name: TensorSpec(shape, dtype) for name, shape in caches.items()}
    return {**tensors, **codes, "k_scale": scales, "v_scale": scales}


def store_min_bytes(k: Any, v: Any, k_cache: Any, v_cache: Any, *rest: Any) -> Mapping[Any, int]:
    """Read k and v, write as many numbers of the caches."""
    each = ((k, k_cache), (v, v_cache))
    return {"forward": sum(math.prod(new.shape) * (new.dtype.itemsize + old.dtype.itemsize) for new, old in each)}


_WRITTEN = ("k_cache", "v_cache", "k_scale", "v_scale")
STORE = Evidence(
    formula="k_cache, v_cache of a slot = round(k / scale), round(v / scale)",
    cases=[
        Case("prompt", _stored(19, 5, 8, 2, 64, 64), "numbers as they are"),
        Case("tokens", _stored(6, 5, 16, 3, 20, 33, (5, 16, 3)), "a scale for each token and head, which is written"),
        Case("heads", _stored(9, 4, 7, 8, 128, 128, (8,)), "int8"),
        Case("pages", _stored(11, 21, 1, 4, 24, 8, (21, 4)), "a scale for each page of one token"),
        Case("tokens_e4m3", _stored(7, 3, 4, 2, 96, 40, (3, 4, 2), torch.float8_e4m3fn), "float8_e4m3fn"),
        Case("heads_e4m3", _stored(5, 3, 4, 2, 30, 17, (2,), torch.float8_e4m3fn), "float8_e4m3fn"),
    ],
    large=[Case("llama3_8b", _stored(8192, 512, 32, 8, 128, 128, (512, 32, 8)), "a prompt")],
    tolerance=tolerances((0.0, 0.0), (0.0, 0.0), roundings=0.0),
    gradient_tolerance={},
    min_bytes=store_min_bytes,
    unfused=written,
    sample=lambda batch, length: _stored(batch * length, batch, length, 2, 16, 16),
    sweep=lambda rows, width: _stored(rows, max(rows // 8, 1), 16, 8, width, width, (max(rows // 8, 1), 16, 8)),
    rows=[
        Rows(
            "heads",
            lambda count: _stored(6, 5, 8, count, 24, 24, (5, 8, count)),
            {"k": 1, "v": 1, **dict.fromkeys((*_WRITTEN, *(f"written_{name}" for name in _WRITTEN)), 2)},
        )
    ],
    sharded=("none", "none: the call writes in place, so a DTensor is refused", "none"),
)


# --------------------------------------------------------------------------------------------------------- select_keys


def _selection(b: int, s: int, t: int, h: int, d: int, count: int, **options: Any) -> dict[str, Any]:
    """Return a call."""
    return {"q": (b, s, h, d), "k": (b, t, d), "weights": (b, s, h), "count": count, **options}


def select_unfused(a: SelectKeysArgs) -> Tensor:
    """Compute the op as models do: the scores of all queries, heads and keys, and torch.topk, whose ties are open."""
    scores = torch.relu(a.q.float() @ a.k.float().mT[:, None] * a.scale)
    scores = (a.weights.float()[..., None, :] @ scores)[..., 0, :]
    hidden = hidden_of(a)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    best = scores.topk(min(a.count, scores.shape[-1]), -1)
    index = best.indices.masked_fill(best.values == -math.inf, -1).to(torch.int32)
    return torch.nn.functional.pad(index, (0, a.count - index.shape[-1]), value=-1)


def select_min_bytes(q: Any, k: Any, weights: Any, count: int, *rest: Any) -> Mapping[Any, int]:
    """Read q, k and weights, write the index."""
    read = sum(math.prod(each.shape) * each.dtype.itemsize for each in (q, k, weights))
    return {"forward": read + math.prod(q.shape[:2]) * count * 4}


_OF_QUERIES: dict[str, int] = dict.fromkeys(("q", "weights", "mask", "index"), 1)
SELECT = Evidence(
    formula="the keys of the largest sums over heads of weights * relu(scale * q @ k)",
    cases=[
        Case("masked", _selection(2, 7, 45, 3, 20, 12, mask=(2, 7, 45)), "no size is a power of two"),
        Case(
            "deepseek_v32", _selection(1, 9, 150, 64, 128, 32, causal="lower_right", scale=0.125), "a part of a prompt"
        ),
        Case("decode", _selection(3, 1, 301, 8, 64, 40, mask=(3, 1, 301), scale=0.125), "cached keys"),
        Case("few", _selection(1, 37, 37, 2, 16, 50, causal="upper_left"), "fewer keys than are asked for"),
        Case("ties", _selection(1, 21, 530, 1, 8, 300), "half of the scores of one head are 0"),
    ],
    large=[
        Case("prompt of 2,048", _selection(1, 2048, 2048, 16, 128, 512, causal="upper_left", scale=0.125)),
        Case("a token", _selection(1, 1, 32768, 64, 128, 2048, scale=0.125)),
    ],
    tolerance=ATTENTION.tolerance,
    gradient_tolerance={},
    pin_choice=pin_choice,
    min_bytes=select_min_bytes,
    unfused=select_unfused,
    sample=lambda batch, length: _selection(batch, length, length + 2, 2, 8, 4, causal="lower_right"),
    sweep=lambda rows, width: _selection(1, rows, width, 4, 64, min(width, 64), causal="lower_right"),
    rows=[
        Rows("queries", lambda count: _selection(1, count, 150, 4, 24, 20, mask=(1, count, 150)), _OF_QUERIES),
        Rows(
            "queries behind cached keys",
            lambda count: _selection(1, count, 150 + count, 3, 24, 20, causal="lower_right"),
            _OF_QUERIES,
            up_to={"k": 1},
        ),
    ],
    sharded=("batch", "batch", "none"),
)


# ---------------------------------------------------------------------------------------------------- sparse_attention


def _chosen(
    b: int, nq: int, nk: int, sq: int, sk: int, d: int, count: int, heads: int = 1, **options: Any
) -> dict[str, Any]:
    """Return a call; indices for one head, or for each key head."""
    return {**_heads(b, nq, nk, sq, sk, d), "indices": (b, heads, sq, count), **options}


def sparse_unfused(a: SparseAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op as models do: with a mask of all keys but those that are chosen."""
    return unfused(dense_of_chosen(a))


def sparse_min_bytes(q: Any, k: Any, v: Any, indices: Any, *rest: Any) -> Mapping[Any, int]:
    """Read q, the indices and the keys and values once, write out and lse; as of attention in backward."""
    of_indices = math.prod(indices.shape) * indices.dtype.itemsize
    return {direction: size + of_indices for direction, size in min_bytes(q, k, v, None).items()}


_LATENT = {**_chosen(1, 16, 1, 9, 300, 48, 270), "v": (1, 1, 300, 32)}
SPARSE = Evidence(
    formula="softmax(where(masked or not chosen, -inf, scale * q @ k.mT)) @ v",
    cases=[
        Case("expanded", _chosen(2, 4, 4, 19, 45, 24, 12, causal="lower_right"), "the keys of each head of MLA"),
        Case("latent", {**_LATENT, "causal": "lower_right", "return_lse": True}, "one latent key head of MLA"),
        Case("grouped", _chosen(1, 6, 2, 21, 37, 40, 20, heads=2, mask=(1, 6, 21, 37), scale=0.3), "a mask by head"),
        Case("decode", _chosen(3, 8, 2, 1, 129, 64, 40, mask=(3, 1, 1, 129), return_lse=True), "cached keys"),
        Case("window", _chosen(1, 3, 1, 33, 33, 8, 40, causal="upper_left", window=[9, 0]), "more places than keys"),
    ],
    large=[
        Case("latent", _chosen(1, 16, 1, 512, 2048, 64, 256, causal="lower_right")),
        Case("expanded", _chosen(1, 8, 8, 512, 2048, 64, 256, causal="lower_right")),
    ],
    tolerance=ATTENTION.tolerance,
    gradient_tolerance=ATTENTION.gradient_tolerance,
    error_bound=sparse_error_bound,
    gradient_error_bound=sparse_gradient_error_bound,
    min_bytes=sparse_min_bytes,
    unfused=sparse_unfused,
    sample=lambda batch, length: _chosen(batch, 4, 1, length, length + 2, 8, 4, causal="lower_right", return_lse=True),
    sweep=lambda rows, width: _chosen(1, 8, 2, rows, width, 64, min(64, width), causal="lower_right"),
    rows=[
        Rows(
            "queries",
            lambda count: _chosen(1, 4, 2, count, 150, 24, 20, mask=(1, 1, count, 150), return_lse=True),
            {**_QUERIES, "indices": 2},
        ),
        Rows(
            "sequences",
            lambda count: _chosen(count, 2, 1, 3, 19, 24, 7, causal="lower_right", return_lse=True),
            dict.fromkeys(("q", "k", "v", "indices", "out", "lse"), 0),
        ),
    ],
    sharded=(
        "`q`: batch and heads",
        "`k`, `v`, `indices`: batch and heads, replicated where there is one head; whole key heads on each rank; "
        "`mask` likewise",
        "as q, k, v; of a replicated k and v with sharded heads: `Partial`",
    ),
)
