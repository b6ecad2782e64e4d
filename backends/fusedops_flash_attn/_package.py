"""The installed releases of flash-attn, and their functions that return lse and those that take it back.

Release 2 is the distribution ``flash-attn``; release 3, for compute capability 9.0, is ``flash_attn_3``. Both may be
installed. Their public ``flash_attn_func`` keeps lse for its own backward, so the two functions that it is made of are
called here. tests/support/standins/flash_attn_signatures.json has their parameters, release by release.

Release 4 (``flash_attn.cute``) is a beta whose functions change from one to the next; it is not called.

Source: github.com/Dao-AILab/flash-attention, ``flash_attn/flash_attn_interface.py`` and
``hopper/flash_attn_interface.py``.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module, metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops.ops.attention.arguments import Lengths

INSTALL = "pip install 'flash-attn>=2.7' --no-build-isolation"
#: The first release whose functions have the parameters below. Before 2.1 a causal mask was aligned at the upper left.
SINCE_2, SINCE_3 = (2, 7), (3, 0)


class Band(NamedTuple):
    """The scale of a call and what masks its scores, as flash-attn takes it; the diagonal is at the lower right.

    Attributes:
        scale: the factor of the scores.
        causal: True for no key after the diagonal.
        left: keys before the diagonal that a query sees; -1 is every key.
        right: the same after the diagonal.
    """

    scale: float
    causal: bool
    left: int
    right: int


class Installed(NamedTuple):
    """The modules that are installed, or why there is none.

    Attributes:
        two: the module of release 2, or None.
        three: the module of release 3, or None.
        why: the reason where there is none of the two.
        fix: what to do then.
    """

    two: Any
    three: Any
    why: str = ""
    fix: str = ""


@cache
def installed() -> Installed:
    """Import what is installed."""
    three = _module("flash_attn_interface", "flash_attn_3", SINCE_3)
    two = _module("flash_attn.flash_attn_interface", "flash-attn", SINCE_2)
    reasons = [each for each in (two, three) if isinstance(each, str) and each]
    return Installed(
        None if isinstance(two, str) else two,
        None if isinstance(three, str) else three,
        "; ".join(reasons) or "flash-attn is not installed",
        INSTALL,
    )


def _module(name: str, distribution: str, since: tuple[int, int]) -> Any:
    """Return a module; a text where it cannot be used, "" where it is not installed."""
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return ""
        return f"import {name} raised {type(error).__name__}: {error}"
    except Exception as error:  # built for another torch, it raises ImportError for a symbol, or OSError
        return f"import {name} raised {type(error).__name__}: {error}; it was built for another torch than this one"
    version = _version(distribution)
    if _release(version) >= (*since, 1):
        return module
    return f"{distribution} {version or 'of an unknown release'} is installed; the backend needs {since[0]}.{since[1]}"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _release(version: str) -> tuple[int, int, int]:
    """Return major, minor, and 1, or 0 for what comes before a release such as "3.0.0b1"."""
    match = re.match(r"(\d+)\.(\d+)(?:\.\d+)*\.?(a|b|rc|dev)?", version)
    return (int(match[1]), int(match[2]), int(match[3] is None)) if match else (0, 0, 0)


def _has_release_3(device: torch.device) -> bool:
    """Return True where release 3 computes on a device: the only one, or before release 2 on compute capability 9.0."""
    found = installed()
    if found.two is None or found.three is None:
        return found.two is None
    return torch.cuda.get_device_capability(device) == (9, 0)


def forward(q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
    """Return out (B, Sq, Nq, D) and lse (B, Nq, Sq) of tensors (B, S, N, D)."""
    results: tuple[Tensor, ...]
    if _has_release_3(q.device):
        results = installed().three._flash_attn_forward(
            q,
            k,
            v,
            softmax_scale=band.scale,
            causal=band.causal,
            window_size_left=band.left,
            window_size_right=band.right,
        )
    else:
        results = installed().two._flash_attn_forward(
            q,
            k,
            v,
            dropout_p=0.0,
            softmax_scale=band.scale,
            causal=band.causal,
            window_size_left=band.left,
            window_size_right=band.right,
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=False,
        )
    return results[0], results[1]


def backward(
    grad_out: Tensor,
    given: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    band: Band,
) -> None:
    """Write the gradients of q, k and v.

    Args:
        grad_out: (B, Sq, Nq, D).
        given: q, k and v, (B, S, N, D).
        out: (B, Sq, Nq, D).
        lse: (B, Nq, Sq), float32, contiguous.
        gradients: tensors for the gradients of q, k and v, of their shapes.
        band: as forward got it.
    """
    dq, dk, dv = gradients
    deterministic = torch.are_deterministic_algorithms_enabled()
    if _has_release_3(grad_out.device):
        installed().three._flash_attn_backward(
            grad_out,
            *given,
            out,
            lse,
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=band.scale,
            is_causal=band.causal,
            window_size_left=band.left,
            window_size_right=band.right,
            deterministic=deterministic,
        )
    else:
        installed().two._flash_attn_backward(
            grad_out,
            *given,
            out,
            lse,
            dq,
            dk,
            dv,
            dropout_p=0.0,
            softmax_scale=band.scale,
            causal=band.causal,
            window_size_left=band.left,
            window_size_right=band.right,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=deterministic,
        )


def packed_forward(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, band: Band) -> tuple[Tensor, Tensor]:
    """Return out (T, Nq, D) and lse (Nq, T) of packed sequences, (T, N, D)."""
    results: tuple[Tensor, ...]
    if _has_release_3(q.device):
        results = installed().three._flash_attn_forward(
            q,
            k,
            v,
            cu_seqlens_q=lengths.queries,
            cu_seqlens_k=lengths.keys,
            max_seqlen_q=lengths.most_queries,
            max_seqlen_k=lengths.most_keys,
            softmax_scale=band.scale,
            causal=band.causal,
            window_size_left=band.left,
            window_size_right=band.right,
        )
    else:
        results = installed().two._flash_attn_varlen_forward(
            q,
            k,
            v,
            lengths.queries,
            lengths.keys,
            max_seqlen_q=lengths.most_queries,
            max_seqlen_k=lengths.most_keys,
            dropout_p=0.0,
            softmax_scale=band.scale,
            causal=band.causal,
            window_size_left=band.left,
            window_size_right=band.right,
        )
    return results[0], results[1]


def packed_backward(
    grad_out: Tensor,
    given: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    lengths: Lengths,
    band: Band,
) -> None:
    """Write the gradients of q, k and v of packed sequences.

    Args:
        grad_out: (T, Nq, D).
        given: q, k and v, (T, N, D).
        out: (T, Nq, D).
        lse: (Nq, T), float32, contiguous.
        gradients: tensors for the gradients of q, k and v, of their shapes.
        lengths: as forward got them.
        band: as forward got it.
    """
    dq, dk, dv = gradients
    deterministic = torch.are_deterministic_algorithms_enabled()
    if _has_release_3(grad_out.device):
        installed().three._flash_attn_backward(
            grad_out,
            *given,
            out,
            lse,
            cu_seqlens_q=lengths.queries,
            cu_seqlens_k=lengths.keys,
            max_seqlen_q=lengths.most_queries,
            max_seqlen_k=lengths.most_keys,
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=band.scale,
            is_causal=band.causal,
            window_size_left=band.left,
            window_size_right=band.right,
            deterministic=deterministic,
        )
    else:
        installed().two._flash_attn_varlen_backward(
            grad_out,
            *given,
            out,
            lse,
            dq,
            dk,
            dv,
            lengths.queries,
            lengths.keys,
            max_seqlen_q=lengths.most_queries,
            max_seqlen_k=lengths.most_keys,
            dropout_p=0.0,
            softmax_scale=band.scale,
            causal=band.causal,
            window_size_left=band.left,
            window_size_right=band.right,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=deterministic,
        )
