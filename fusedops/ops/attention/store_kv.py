"""New keys and values of some tokens, rounded to the numbers of a cache in pages and written there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Output
from fusedops._dispatch.call import call
from fusedops.constraints import (
    Between,
    CacheScale,
    DType,
    Floating,
    Present,
    Rank,
    SameDevice,
    SameDims,
    SameDType,
    SameSize,
    Slots,
    When,
)
from fusedops.dtypes import CODES, STORAGE
from fusedops.errors import InvalidInputError
from fusedops.ops.attention.arguments import StoreKvArgs, check_slots, check_written

_MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Write the keys and values of some tokens into a cache in pages, for :func:`fusedops.paged_attention`.

    ``k_cache`` and ``v_cache`` are written in index, and so are scales of each token; nothing is returned. Token n goes
    to the page ``slots[n] // size``, at ``slots[n] % size``. A cache of the dtype of ``k`` gets the numbers as they
    are. In one of int8 or float8_e4m3fn a number is ``x / scale``, computed in float32, and rounded half to even: in
    int8 after it is limited to +-127 (NaN is 0), in float8_e4m3fn to +-448; 0 where the scale is 0. Scales of heads, or
    of pages and heads, are read. Those of tokens and heads are written: the largest magnitude of a head's numbers,
    divided by 127 or 448. There are no gradients.

    Args:
        k: (T, Nk, D), float16, bfloat16, float32 or float64.
        v: (T, Nk, Dv), the dtype of ``k``.
        k_cache: (pages, size, Nk, D), the dtype of ``k``, int8 or float8_e4m3fn. No two elements are the same memory.
        v_cache: (pages, size, Nk, Dv), the dtype of ``k_cache``.
        slots: (T,), int64, page * size + offset, or -1 for a token that is not written. One outside of the cache is an
            InvalidInputError on a CPU, before anything is written, and not written on another device. With a slot
            twice, it is not defined which token it gets.
        k_scale: float32, (Nk,), (pages, Nk), or (pages, size, Nk), which is written. Required with a cache of int8 or
            float8_e4m3fn alone.
        v_scale: the same for ``v``.
        backend: a policy for this call alone, such as "cpu" or "npu,eager". None: the policy in effect.

    Raises:
        InvalidInputError: an argument is not as above, or requires a gradient.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: vLLM, ``reshape_and_cache_flash``.

    >>> import torch, fusedops
    >>> k, cache, scale = torch.tensor([[[0.5, -1.0]]]), torch.zeros(2, 4, 1, 2, dtype=torch.int8), torch.zeros(2, 4, 1)
    >>> fusedops.store_kv(k, k, cache, cache.clone(), torch.tensor([5]), k_scale=scale, v_scale=scale.clone())
    >>> cache[1, 1], scale[1, 1] * 127
    (tensor([[  64, -127]], dtype=torch.int8), tensor([1.]))
    """
    args = (k, v, k_cache, v_cache, slots, k_scale, v_scale)
    has_gradient = torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in args)
    if has_gradient and OP.invalid(args) is None:
        raise InvalidInputError(
            "store_kv: got a tensor that requires a gradient, expected none, as a cache has no gradients; to fix: call "
            "it under torch.no_grad()"
        )
    call(OP, args, backend)


def written(a: StoreKvArgs) -> tuple[Tensor, ...]:
    """Write the tokens, by torch's functions, and return what is written; an empty tensor for a scale that is None."""
    if not a.slots.is_meta:
        pages, size = a.k_cache.shape[:2]
        check_written(a)
        check_slots(a.slots, pages * size)
        tokens = ((a.slots >= 0) & (a.slots < pages * size)).nonzero()[:, 0]
        slots = a.slots[tokens]
        index = (torch.div(slots, max(size, 1), rounding_mode="floor"), slots % max(size, 1))
        _write(a.k[tokens], a.k_cache, a.k_scale, index)
        _write(a.v[tokens], a.v_cache, a.v_scale, index)
    return results_of(a)


def results_of(a: StoreKvArgs) -> tuple[Tensor, ...]:
    """Return the arguments that a call writes, an empty tensor for each that is None."""
    scales = (a.k.new_empty(0) if each is None else each for each in (a.k_scale, a.v_scale))
    return (a.k_cache, a.v_cache, *scales)


def _write(x: Tensor, cache: Tensor, scale: Tensor | None, index: tuple[Tensor, Tensor]) -> None:
    if scale is None:
        cache.index_put_(index, x.to(cache.dtype))
        return
    wide, most = x.float(), _MOST[cache.dtype]
    if scale.dim() == 3:
        largest = wide.abs().amax(-1) if x.shape[-1] else wide.new_zeros(wide.shape[:-1])
        of_token = largest / most
        scale.index_put_(index, of_token.to(scale.dtype))
    else:
        of_token = (scale if scale.dim() == 1 else scale[index[0]]).float().expand(x.shape[:-1])
    numbers = torch.where(of_token[..., None] == 0, 0.0, wide / of_token[..., None]).clamp(-most, most)
    codes = numbers.round().nan_to_num(0.0).to(torch.int8) if cache.dtype == torch.int8 else numbers.to(cache.dtype)
    cache.view(torch.int8).index_put_(index, codes.view(torch.int8))


def reference(a: StoreKvArgs) -> tuple[Tensor, ...]:
    """Compute what is written in plain torch, as new tensors."""
    scales = (None if each is None else each.clone() for each in (a.k_scale, a.v_scale))
    return written(StoreKvArgs(a.k, a.v, a.k_cache.clone(), a.v_cache.clone(), a.slots, *scales))


def empty(*args: Any) -> tuple[Tensor, ...]:
    """Return empty tensors like those that are written."""
    return tuple(map(torch.empty_like, results_of(StoreKvArgs(*args))))


_ARE_CODES, _ARE_FLOATING = DType("k_cache", *CODES), DType("k_cache", *STORAGE)
OP = Op(
    store_kv,
    constraints=[
        Floating("k"),
        Floating("v"),
        Floating("k_cache", or_codes=True),
        Floating("v_cache", or_codes=True),
        Rank("k", 3),
        Rank("v", 3),
        Rank("k_cache", 4),
        Rank("v_cache", 4),
        SameDevice("v", "k"),
        SameDevice("k_cache", "k"),
        SameDevice("v_cache", "k"),
        SameDType("v", "k"),
        When(_ARE_FLOATING, SameDType("k_cache", "k")),
        SameDType("v_cache", "k_cache"),
        SameDims("v", "k", (0, 1)),
        SameSize("k_cache", 2, "k", 1),
        SameSize("k_cache", 3, "k", 2),
        SameSize("v_cache", 3, "v", 2),
        SameDims("v_cache", "k_cache", (0, 1, 2)),
        Slots("slots", "k_cache"),
        SameDevice("slots", "k"),
        Rank("slots", 1),
        SameSize("slots", 0, "k", 0),
        *(
            constraint
            for name, of in (("k_scale", "k_cache"), ("v_scale", "v_cache"))
            for constraint in (
                Between(name, 0.01, 0.1),
                DType(name, torch.float32),
                SameDevice(name, "k"),
                CacheScale(name, of),
                When(_ARE_CODES, Present(name)),
                When(_ARE_FLOATING, Present(name, False)),
            )
        ),
    ],
    reference=reference,
    outputs=tuple(
        Output(f"written_{name}", of=name, written=True) for name in ("k_cache", "v_cache", "k_scale", "v_scale")
    ),
    empty=empty,
    evidence="fusedops.ops.attention.evidence:STORE",
)
