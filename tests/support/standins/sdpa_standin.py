"""A stand-in for torch's three attention kernels for CUDA, on CPU tensors: the same functions, as strict.

Each call is first given to torch's own function with tensors on the meta device: the dispatcher checks the arguments by
its schema, and the shapes of the results are compared. What is refused, and where the layout of results differs from
the op's, is that of the sources: torch's ``aten/src/ATen/native/transformers/cuda/``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import sdpa_packed_standin
import torch
from loopback import registered
from torch import Tensor
from torch.nn.attention import SDPBackend

import fusedops
import fusedops_sdpa
from fusedops_sdpa import _cuda_choice, _torch, attention_cuda, varlen_attention_cuda

FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
#: The name of the backend.
NAME = "sdpa_cuda_on_cpu"


class Call(NamedTuple):
    """A call that met the checks."""

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


calls: list[Call] = []


def require(met: bool, sentence: str) -> None:
    """Raise RuntimeError, as TORCH_CHECK does."""
    if not met:
        raise RuntimeError(sentence)


def _aligned(name: str, tensor: Tensor) -> None:
    step = 16 // tensor.element_size()
    require(tensor.stride(3) == 1, f"{name}: the last dim must be contiguous")
    require(not any(stride % step for stride in tensor.stride()[:3]), f"{name} is not correctly aligned")
    require(tensor.data_ptr() % 16 == 0 and not tensor.is_neg(), f"{name} is not correctly aligned")


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, scale: float | None, lower_right: int | None) -> Tensor:
    """Return the scores (B, N, Sq, Sk) in float32; ``lower_right`` shifts the diagonal of a causal mask."""
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    scores = q.float() @ k.float().mT
    if bias is not None:
        scores, factor = scores * factor + bias.float(), 1.0
    if lower_right is not None:
        after = torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None] + lower_right
        scores = scores.masked_fill(after, -math.inf)
    return scores * factor


def _as_bsnd(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (B, N, S, D) in the dtype, in memory as (B, S, N, D)."""
    return tensor.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


def _gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scores: Tensor, lse: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    weights = torch.exp(scores - lse[..., None])
    g = grad_out.float()
    delta = (g * out.float()).sum(-1, keepdim=True)
    ds = (weights * (g @ v.float().mT - delta)).to(q.dtype).float()
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    dq, dk, dv = ds @ k.float() * factor, ds.mT @ q.float() * factor, weights.to(q.dtype).float().mT @ g
    return _as_bsnd(dq, q.dtype), _as_bsnd(dk, q.dtype), _as_bsnd(dv, q.dtype)


def _check_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    (b, n, sq, d), (nk, sk) = q.shape, k.shape[1:3]
    require(q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
    require(k.dtype == v.dtype == q.dtype, "query, key and value must have the same dtype")
    require(d % 8 == 0 and 0 < d <= 256, "FlashAttention forward only supports head dimension at most 256")
    require(n % nk == 0, "Number of heads in key/value must divide number of heads in query")
    require(k.shape == v.shape == (b, nk, sk, d), "wrong shape")
    require(b > 0 and sq > 0 and sk > 0 and max(b, n) <= 65535, "invalid configuration argument")
    require(not causal or sq == sk, "its causal mask is aligned at the lower right")


@torch.autocast("cpu", enabled=False)  # compiled code does not see it
def flash(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None
) -> tuple[Any, ...]:
    require(dropout_p == 0.0 and return_debug_mask is False, "not in the stand-in")
    _check_flash(q, k, v, is_causal)
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        _aligned(name, tensor)
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = _weights(q, k, None, scale, k.shape[2] - q.shape[2] if is_causal else None)
    lse = scores.logsumexp(-1)
    out = torch.exp(scores - lse[..., None]).to(q.dtype).float() @ v.float()
    lse = torch.where(lse.isnan(), math.inf, lse)
    empty = q.new_empty(2, dtype=torch.uint64)
    return _as_bsnd(out, q.dtype), lse, None, None, q.shape[2], k.shape[2], empty, empty[0], q.new_empty(0)


@torch.autocast("cpu", enabled=False)  # compiled code does not see it
def flash_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    seed: Tensor,
    offset: Tensor,
    *,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    require(dropout_p == 0.0 and cum_seq_q is None and cum_seq_k is None, "not in the stand-in")
    require((max_q, max_k) == (q.shape[2], k.shape[2]), "wrong lengths")
    _check_flash(q, k, v, is_causal)
    require(not 192 < q.shape[3] <= 224, "no backward on compute capability 8.6, 8.9 and 12")
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        _aligned(name, tensor)
    require(lse.is_contiguous() and lse.shape == q.shape[:3] and lse.dtype == torch.float32, "lse by its address")
    heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
    scores = _weights(q, k, None, scale, k.shape[2] - q.shape[2] if is_causal else None)
    dq, dk, dv = _gradients(grad_out, q, k, v, out, scores, lse, scale)
    return dq, dk.unflatten(1, (heads, groups)).sum(2), dv.unflatten(1, (heads, groups)).sum(2)


def _check_efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        _aligned(name, tensor)
    (b, n, sq, d), (sk, dv) = q.shape, (k.shape[2], v.shape[3])
    require(q.dtype in (torch.float16, torch.bfloat16, torch.float32), "dtype")
    require(k.shape == (b, n, sk, d) and v.shape == (b, n, sk, dv), "wrong shape")
    step = 16 // q.element_size()
    require(d > 0 and d % step == 0 and dv > 0 and dv % step == 0, "the last dims must be divisible")
    require(b > 0 and sq > 0 and sk > 0 and max(b, n) <= 65535, "invalid configuration argument")
    if bias is not None:
        require(bias.dtype == q.dtype, "invalid dtype for bias - should match query's dtype")
        require(bias.shape == (b, n, sq, sk), "attn_bias: wrong shape")
        _aligned("attn_bias", bias)


@torch.autocast("cpu", enabled=False)  # compiled code does not see it
def efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    require(dropout_p == 0.0 and compute_log_sumexp is True, "not in the stand-in")
    _check_efficient(q, k, v, attn_bias)
    scores = _weights(q, k, attn_bias, scale, 0 if is_causal else None)
    lse = scores.logsumexp(-1)
    out = torch.exp(scores - lse[..., None]).to(q.dtype).float() @ v.float()  # NaN where a row sees no key
    padded = torch.full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), math.inf, dtype=torch.float32)
    padded[..., : lse.shape[2]] = torch.where(lse == -math.inf, math.nan, lse)
    seed = torch.empty((), dtype=torch.int64)
    return _as_bsnd(out, q.dtype), padded, seed, seed


@torch.autocast("cpu", enabled=False)  # compiled code does not see it
def efficient_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool,
    *,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, None]:
    require(dropout_p == 0.0 and grad_input_mask[3] is False, "not in the stand-in")
    _check_efficient(q, k, v, attn_bias)
    require(out.transpose(1, 2).is_contiguous(), "out is read as (B, S, N, D)")
    require(lse.is_contiguous() and lse.shape[2] % 8 == 0, "LSE is not correctly aligned (strideH)")
    require(lse.shape[2] == -(-q.shape[2] // 32) * 32, "lse is read in blocks of 32 queries")
    require(bool((lse[..., q.shape[2] :] == math.inf).all()), "the weights of queries in the padding must be 0")
    # a kernel that writes blocks that some query sees leaves the rest as it was allocated
    require(not is_causal or k.shape[2] <= q.shape[2], "the gradients of keys that no query sees")
    scores = _weights(q, k, attn_bias, scale, 0 if is_causal else None)
    return *_gradients(grad_out, q, k, v, out, scores, lse[..., : q.shape[2]], scale), None


def _check_cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
    (b, n, sq, d), (nk, sk), dv = q.shape, k.shape[1:3], v.shape[3]
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        _aligned(name, tensor)
    require(q.dtype in (torch.float16, torch.bfloat16), "other dtypes are read as float16")
    require(k.dtype == v.dtype == q.dtype, "query, key and value must have the same dtype")
    require(k.shape == (b, nk, sk, d) and v.shape == (b, nk, sk, dv) and n % nk == 0, "wrong shape")
    require(d % 8 == 0 and dv % 8 == 0 and (max(d, dv) <= 128 or (d, dv) in ((192, 128), (256, 256))), "head_dim")
    require(sq > 1 and sk > 1, "one query or one key")
    if bias is not None:
        require(bias.dtype == q.dtype and bias.shape == (b, n, sq, sk), "bias")
        _aligned("bias", bias)


@torch.autocast("cpu", enabled=False)  # compiled code does not see it
def cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None,
) -> tuple[Any, ...]:
    require(dropout_p == 0.0 and compute_log_sumexp is True and return_debug_mask is False, "not in the stand-in")
    _check_cudnn(q, k, v, attn_bias)
    keys, values = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = _weights(q, keys, attn_bias, scale, 0 if is_causal else None)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = torch.exp(scores - lse)  # NaN where a row sees no key
    out = (
        torch.empty_like(q[..., : v.shape[3]]) if v.shape[3] <= q.shape[3] else q.new_empty((*q.shape[:3], v.shape[3]))
    )
    out.copy_(weights.to(q.dtype).float() @ values.float())
    seed = torch.empty((), dtype=torch.int64)
    return out, lse.nan_to_num(nan=math.nan, neginf=math.nan), None, None, q.shape[2], k.shape[2], seed, seed, None


_plans: dict[Any, Any] = {}


@torch.autocast("cpu", enabled=False)  # compiled code does not see it
def cudnn_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    require(dropout_p == 0.0 and cum_seq_q is None and cum_seq_k is None, "not in the stand-in")
    require((max_q, max_k) == (q.shape[2], k.shape[2]), "wrong lengths")
    _check_cudnn(q, k, v, attn_bias)
    _aligned("grad_out", grad_out)
    _aligned("out", out)
    require(lse.is_contiguous() and lse.shape == (*q.shape[:3], 1) and lse.dtype == torch.float32, "lse")
    sizes = [(each.shape, each.stride()) for each in (q, k, v, attn_bias) if each is not None]
    strides = [[step for step, size in zip(each.stride(), each.shape) if size > 1] for each in (grad_out, out)]
    require(_plans.setdefault(str((sizes, is_causal, q.dtype)), strides) == strides, "the plan has other strides")
    tail = k.shape[2] % 128 == 64 and not (is_causal and attn_bias is None and q.shape[2] <= k.shape[2])
    require(not tail, "the keys after the last are not masked")
    heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    keys, values = (each.repeat_interleave(groups, 1) for each in (k, v))
    scores = _weights(q, keys, attn_bias, scale, 0 if is_causal else None)
    dq, dk, dv = _gradients(grad_out, q, keys, values, out, scores, lse.squeeze(3), scale)
    dk, dv = (each.unflatten(1, (heads, groups)).sum(2) for each in (dk, dv))
    return tuple(torch.empty_like(like).copy_(each) for like, each in zip((q, k, v), (dq, dk, dv)))  # pyright: ignore[reportReturnType]


FUNCTIONS = {
    "_CUDNN": cudnn,
    "_CUDNN_BACKWARD": cudnn_backward,
    "_FLASH": flash,
    "_FLASH_BACKWARD": flash_backward,
    "_EFFICIENT": efficient,
    "_EFFICIENT_BACKWARD": efficient_backward,
}


def _on_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _strict(own: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that checks a call by torch's own schema, logs it, and computes by the stand-in."""

    def run(*args: Any, **kwargs: Any) -> Any:
        forms = own(*map(_on_meta, args), **kwargs)
        results = function(*args, **kwargs)
        for form, result in zip(forms, results):
            if isinstance(form, Tensor) and isinstance(result, Tensor) and form.is_floating_point():
                require((form.shape, form.dtype) == (result.shape, result.dtype), f"the form of {function.__name__}")
        calls.append(Call(function.__name__, args, kwargs))
        return results

    return run


def backend() -> fusedops.Backend:
    """Return the kernels for CUDA as a backend for the CPU."""
    own = [each for each in fusedops_sdpa.fusedops_backend().kernels if each.serves("cuda")]
    kernels = tuple(replace(each, device_types=()) for each in own)
    return fusedops.Backend(NAME, ("cpu",), 60, kernels, optional=True)


def _as_strict(choice: SDPBackend) -> Callable[..., int]:
    """Return torch's function of the choice: the arguments must be as torch's own takes them."""
    own: Any = torch._fused_sdp_choice  # pyright: ignore[reportPrivateUsage]

    def sdp_choice(*args: Any, **options: Any) -> int:
        own(*map(_on_meta, args), **options)
        require(options["enable_gqa"] or args[0].shape[1] == args[1].shape[1], "grouped heads without the flag")
        return choice.value

    return sdp_choice


@contextmanager
def sdpa_on_cuda(capability: tuple[int, int] = (9, 0), choice: SDPBackend = FLASH) -> Iterator[list[Call]]:
    """Register the kernels for CUDA for the CPU, on the stand-in. Yield the log of calls.

    Args:
        capability: of the GPU.
        choice: what torch's scaled_dot_product_attention takes. A call of any size is large enough for cuDNN.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, function in FUNCTIONS.items():
            patch.setattr(attention_cuda, name, _strict(getattr(attention_cuda, name), function))
        packed = sdpa_packed_standin.forward, sdpa_packed_standin.backward
        for name, function in zip(("_FLASH", "_FLASH_BACKWARD"), packed):
            patch.setattr(varlen_attention_cuda, name, _strict(getattr(varlen_attention_cuda, name), function))
        patch.setattr(_cuda_choice, "capability_of", lambda device: capability)
        patch.setattr(_cuda_choice, "LEAST_WORK", 0)
        patch.setattr(_torch, "sdp_choice", _as_strict(choice))
        calls.clear()
        _plans.clear()
        with registered(backend()):
            yield calls
