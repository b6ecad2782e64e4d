"""The providers of an op: each backend of fusedops, plain torch, compiled torch, and the installed peers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fusedops
from benchmarks.peers import PEERS, Function
from fusedops import Op
from fusedops.ops import OPS
from fusedops.testing._timing import refusal, served_by

plain_softmax: Function = OPS["scaled_masked_softmax"].evidence.unfused


def megatron_softmax(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Compute the fallback of Megatron's module: in float32, masked scores filled with -10000, cast back."""
    scores = x.float() * scale
    if causal:
        upper = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        mask = upper if mask is None else mask | upper
    return torch.softmax(scores if mask is None else scores.masked_fill(mask, -10000.0), -1).to(x.dtype)


def softmax_alone(x: Tensor, mask: None, scale: float, causal: bool) -> Tensor:
    """Compute torch's softmax."""
    return torch.softmax(x, -1)


def native_softmax(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Compute torch's own masked softmax, ``_masked_softmax``, or the plain chain if causal or without a mask."""
    if causal or mask is None:
        return plain_softmax(x, mask, scale, causal)
    return torch._masked_softmax(x * scale, mask.expand(x.shape), -1, 0)


def megatron_bias_gelu(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Compute the tanh form from elementary operations: Megatron's function before compilation."""
    u = x if bias is None else x + bias
    return 0.5 * u * (1.0 + torch.tanh(0.79788456 * u * (1 + 0.044715 * u * u)))


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: str, *rest: Any) -> Tensor:
    """Compute torch's own fused attention."""
    seen = None if mask is None else mask == 0
    groups = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, seen, is_causal=causal != "none", scale=scale, enable_gqa=groups)


def providers(
    op: Op, args: Sequence[Any], device: str, without: Sequence[str] = ()
) -> tuple[dict[str, Function], dict[str, str]]:
    """Return the providers of a call that are wanted, and those that are left out, with the reason."""
    functions: dict[str, Function] = {}
    skipped: dict[str, str] = {}
    for info in fusedops.backends():
        reason = refusal(info, op, args)
        if reason is not None:
            skipped[f"fusedops.{info.name}"] = reason
        else:
            functions[f"fusedops.{info.name}"] = served_by(info.name, op)
    chain = op.evidence.unfused
    if op.name == "scaled_masked_softmax" and args[1] is None and args[2] == 1.0 and not args[3]:
        chain = softmax_alone  # a model without a scale has no pass for it
    functions["torch"] = chain
    if "torch.compile" not in without:  # what it imports takes seconds
        functions["torch.compile"] = torch.compile(chain, dynamic=False)
    if op.name == "scaled_masked_softmax":
        functions["megatron's torch path"] = megatron_softmax
        if args[1] is not None and not args[3] and device == "cpu":  # on CUDA it supports other mask layouts
            functions["torch._masked_softmax"] = native_softmax
    if op.name == "bias_gelu" and args[2] == "tanh":
        functions["megatron's torch path"] = megatron_bias_gelu
    if op.name == "attention" and args[6] is None and not args[7] and (args[3] is None or args[5] == "none"):
        functions["torch sdpa"] = sdpa
    if device == "cuda":
        for name, load_peer in PEERS.get(op.name, {}).items():
            try:
                function = load_peer(args)
            except Exception as error:  # the peer is not installed, or does not support the call
                skipped[name] = f"{type(error).__name__}: {error}"
            else:
                functions[name] = function
    return {name: function for name, function in functions.items() if name not in without}, skipped
