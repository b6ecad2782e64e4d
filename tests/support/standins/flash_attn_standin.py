"""A stand-in for flash-attn 2 and 3, on CPU tensors: the same functions, as strict, by ``flash_attn_formula``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from flash_attn_formula import (
    backward,
    forward,
    packed,
    packed_backward,
    packed_forward,
    problem,
    require,
    write,
)
from loopback import registered
from torch import Tensor

import fusedops_flash_attn
from fusedops_flash_attn import _package


class Call(NamedTuple):
    """A call that met the checks."""

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


calls: list[Call] = []


def _logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """Log the calls of a function, as they were written. Its signature stays."""

    def run(*args: Any, **kwargs: Any) -> Any:
        results = function(*args, **kwargs)
        calls.append(Call(function.__name__, args, kwargs))
        return results

    run.__name__ = function.__name__
    run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return run


# ------------------------------------------------------------------------------------------------------------ release 2


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    require(not dropout_p and not softcap and alibi_slopes is None, "not in the stand-in")
    require(not return_softmax, "return_softmax is only supported when p_dropout > 0.0")
    # R1: alone, a query sees all keys by its causal mask
    is_causal = causal and q.shape[1] > 1
    p = problem(2, q, k, v, softmax_scale, is_causal, window_size_left, window_size_right)
    result, lse = forward(2, p)
    out = torch.empty_like(q).copy_(result.transpose(1, 2))
    return out, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    require(not dropout_p and not softcap and alibi_slopes is None and rng_state is None, "not in the stand-in")
    p = problem(2, q, k, v, softmax_scale, causal, window_size_left, window_size_right, dout, out)
    require(type(deterministic) is bool, "incompatible function arguments")
    results = backward(p, dout, out, softmax_lse, k.shape[2], 2)
    write(q, results, (dq, dk, dv), softmax_lse, (q.shape[0], q.shape[2], q.shape[1]))
    return softmax_lse.new_empty(0)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    others = (alibi_slopes, block_table, leftpad_k, seqused_k)
    require(not (dropout_p or softcap or return_softmax or zero_tensors), "not in the stand-in")
    require(all(each is None for each in others), "not in the stand-in")
    given = packed(q, k, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
    result, lse = packed_forward(2, q, k, v, given, softmax_scale, causal, window_size_left, window_size_right)
    return torch.empty_like(q).copy_(result), lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    require(not (dropout_p or softcap or zero_tensors), "not in the stand-in")
    require(alibi_slopes is None and rng_state is None, "not in the stand-in")
    require(type(deterministic) is bool, "incompatible function arguments")
    given = packed(q, k, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
    options = (softmax_scale, causal, window_size_left, window_size_right)
    results = packed_backward(2, q, k, v, dout, out, softmax_lse, given, *options)
    write(q, results, (dq, dk, dv), softmax_lse, (q.shape[1], q.shape[0]))
    return softmax_lse.new_empty(0)


TWO = (
    _logged(_flash_attn_forward),
    _logged(_flash_attn_backward),
    _logged(_flash_attn_varlen_forward),
    _logged(_flash_attn_varlen_backward),
)


# ------------------------------------------------------------------------------------------------------------ release 3


def _flash_attn_forward(  # type: ignore[no-redef]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = (softmax_scale, causal, window_size_left, window_size_right)
    if cu_seqlens_q is not None:
        given = packed(q, k, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
        result, lse = packed_forward(3, q, k, v, given, *options)
        out = result.to(q.dtype, memory_format=torch.contiguous_format)
        return out, lse, q.new_empty(0), q.new_empty(0)
    result, lse = forward(3, problem(3, q, k, v, *options))
    out = result.transpose(1, 2).to(q.dtype, memory_format=torch.contiguous_format)
    return out, lse, q.new_empty(0), q.new_empty(0)


def _flash_attn_backward(  # type: ignore[no-redef]
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    require(not deterministic or q.shape[-1] <= 192, "Deterministic backward not supported for hdim 256.")
    options = (softmax_scale, is_causal, window_size_left, window_size_right)
    if cu_seqlens_q is not None:
        given = packed(q, k, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
        results = packed_backward(3, q, k, v, dout, out, softmax_lse, given, *options)
        write(q, results, (dq, dk, dv), softmax_lse, (q.shape[1], q.shape[0]))
        return softmax_lse.new_empty(0)
    p = problem(3, q, k, v, *options, dout, out)
    results = backward(p, dout, out, softmax_lse, k.shape[2], 3)
    write(q, results, (dq, dk, dv), softmax_lse, (q.shape[0], q.shape[2], q.shape[1]))
    return softmax_lse.new_empty(0)


THREE = (_logged(_flash_attn_forward), _logged(_flash_attn_backward))


# ----------------------------------------------------------------------------------------------------- the installation

_NAMES = ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface")


def _module(name: str, functions: tuple[Callable[..., Any], ...] = ()) -> ModuleType:
    module = ModuleType(name)
    for function in functions:
        setattr(module, function.__name__, function)
    return module


@contextmanager
def installed(two: str | None = "2.8.3", three: str | None = None) -> Iterator[list[Call]]:
    """Install releases of flash-attn by their versions; None: not installed. Yield the log of calls, empty."""
    versions = {"flash-attn": two, "flash_attn_3": three}
    with pytest.MonkeyPatch.context() as patch:
        for name in _NAMES:  # None in sys.modules: importing it raises ModuleNotFoundError
            patch.setitem(sys.modules, name, None)
        if two is not None:
            package = _module("flash_attn")
            package.__path__ = []
            patch.setitem(sys.modules, "flash_attn", package)
            patch.setitem(sys.modules, _NAMES[1], _module(_NAMES[1], TWO))
        if three is not None:
            patch.setitem(sys.modules, _NAMES[2], _module(_NAMES[2], THREE))
        patch.setattr(_package, "_version", lambda distribution: versions[distribution] or "")
        _package.installed.cache_clear()
        calls.clear()
        try:
            yield calls
        finally:
            _package.installed.cache_clear()


#: The backend as it is, for tensors on a CPU. Its name is another one: the entry point has "flash_attn".
NAME = "flash_attn_on_cpu"


@contextmanager
def flash_attn(three: bool = False) -> Iterator[list[Call]]:
    """Register the backend for the CPU, on the stand-in of one release. Yield the log of calls."""
    backend = replace(fusedops_flash_attn.fusedops_backend(), name=NAME, device_types=("cpu",), probe=lambda: None)
    versions = {"two": None, "three": "3.0.0"} if three else {}
    with installed(**versions) as log, registered(backend):
        yield log
