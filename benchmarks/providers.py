"""The providers of an op: each backend of fusedops, plain torch, compiled torch, and the installed peers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import fusedops
from fusedops import Op
from fusedops.ops import OPS
from fusedops.testing._timing import refusal, served_by

Function = Callable[..., Tensor]  # takes the op's arguments in order
plain_softmax: Function = OPS["scaled_masked_softmax"].unfused


def megatron_softmax(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Compute the fallback of Megatron's module: in float32, masked scores filled with -10000, cast back."""
    scores = x.float() * scale
    if causal:
        upper = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        mask = upper if mask is None else mask | upper
    return torch.softmax(scores if mask is None else scores.masked_fill(mask, -10000.0), -1).to(x.dtype)


def native_softmax(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Compute torch's own masked softmax, ``_masked_softmax``, or the plain chain if causal or without a mask."""
    if causal or mask is None:
        return plain_softmax(x, mask, scale, causal)
    return torch._masked_softmax(x * scale, mask.expand(x.shape), -1, 0)


def megatron_bias_gelu(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Compute the tanh form from elementary operations: Megatron's function before compilation."""
    u = x if bias is None else x + bias
    return 0.5 * u * (1.0 + torch.tanh(0.79788456 * u * (1 + 0.044715 * u * u)))


def providers(op: Op, args: Sequence[Any], device: str) -> tuple[dict[str, Function], dict[str, str]]:
    """Return the providers of a call, and those that are left out, with the reason."""
    functions: dict[str, Function] = {}
    skipped: dict[str, str] = {}
    for info in fusedops.backends():
        reason = refusal(info, op, args)
        if reason is not None:
            skipped[f"fusedops.{info.name}"] = reason
        else:
            functions[f"fusedops.{info.name}"] = served_by(info.name, op)
    functions["torch"] = op.unfused
    functions["torch.compile"] = torch.compile(op.unfused, dynamic=False)
    if op.name == "scaled_masked_softmax":
        functions["megatron's torch path"] = megatron_softmax
        if args[1] is not None and not args[3] and device == "cpu":  # on CUDA it supports other mask layouts
            functions["torch._masked_softmax"] = native_softmax
    if op.name == "bias_gelu" and args[2] == "tanh":
        functions["megatron's torch path"] = megatron_bias_gelu
    if device == "cuda":
        for name, load_peer in PEERS.get(op.name, {}).items():
            try:
                function = load_peer(args)
            except Exception as error:  # the peer is not installed, or does not support the call
                skipped[name] = f"{type(error).__name__}: {error}"
            else:
                functions[name] = function
    return functions, skipped


def _plain_softmax_only(args: Sequence[Any]) -> None:
    if args[1] is not None or args[3]:
        raise ValueError("has no masked or causal softmax")


def _liger(args: Sequence[Any]) -> Function:
    _plain_softmax_only(args)
    function = importlib.import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction
    return lambda x, mask, scale, causal: function.apply(x * scale)


def _quack(args: Sequence[Any]) -> Function:
    _plain_softmax_only(args)
    softmax = importlib.import_module("quack.softmax").softmax
    return lambda x, mask, scale, causal: softmax((x * scale).flatten(0, -2)).view_as(x)


def _transformer_engine(args: Sequence[Any]) -> Function:
    module = importlib.import_module("transformer_engine.pytorch.softmax")
    if args[3]:
        function = module.ScaledUpperTriangMaskedSoftmax
        return lambda x, mask, scale, causal: function.apply(x.flatten(0, -3), scale).view_as(x)
    if args[1] is None:
        function = module.ScaledSoftmax
        return lambda x, mask, scale, causal: function.apply(x, scale)
    function = module.ScaledMaskedSoftmax
    return lambda x, mask, scale, causal: function.apply(x, mask, scale)


def _attorch(args: Sequence[Any]) -> Function:
    _plain_softmax_only(args)
    function = importlib.import_module("attorch.softmax_layers").SoftmaxAutoGrad
    return lambda x, mask, scale, causal: function.apply(x * scale, False)


def _unsloth(args: Sequence[Any]) -> Function:
    raise ValueError("has none of these ops: its kernels are GLU, RMS norm, RoPE and losses")


def _flag_gems(args: Sequence[Any]) -> Function:
    flag_gems = importlib.import_module("flag_gems")

    def softmax(*call_args: Any) -> Tensor:
        with flag_gems.use_gems():
            return plain_softmax(*call_args)

    return softmax


def _loss_options(args: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of cross_entropy besides the tensors by name, without a denominator."""
    names = ("ignore_index", "label_smoothing", "z_loss", "softcap", "reduction")
    if args[-1] is not None:
        raise ValueError("has no denominator")
    return dict(zip(names, args[2:-1]))


def _liger_loss(args: Sequence[Any]) -> Function:
    options = _loss_options(args)
    options["lse_square_scale"] = options.pop("z_loss")
    module = importlib.import_module("liger_kernel.transformers.cross_entropy").LigerCrossEntropyLoss(**options)
    # its gradient is written over the logits
    return lambda logits, target, *rest: module(logits.clone().flatten(0, -2), target.flatten())


def _quack_loss(args: Sequence[Any]) -> Function:
    options = _loss_options(args)
    if options["label_smoothing"] or options["z_loss"] or options["softcap"] is not None:
        raise ValueError("has no label smoothing, z-loss or softcap")
    function = importlib.import_module("quack.cross_entropy").cross_entropy
    kept = {name: options[name] for name in ("ignore_index", "reduction")}
    return lambda logits, target, *rest: function(logits.flatten(0, -2), target.flatten(), **kept)


def _flag_gems_loss(args: Sequence[Any]) -> Function:
    flag_gems = importlib.import_module("flag_gems")

    def loss(*call_args: Any) -> Tensor:
        with flag_gems.use_gems():
            return OPS["cross_entropy"].unfused(*call_args)

    return loss


def _liger_rope(args: Sequence[Any]) -> Function:
    q, k, cos, _, interleaved, seq_dim = args
    if interleaved or k is None or seq_dim != -2 or cos.dim() != 2 or 2 * cos.shape[-1] != q.shape[-1]:
        raise ValueError("takes q and k with the heads first and halves of whole heads")
    function = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction
    # it keeps each entry twice, which a model does once for all layers
    doubled = [torch.cat((angle, angle), -1)[None] for angle in args[2:4]]
    return lambda q, k, *rest: function.apply(q, k, *doubled)


def _flash_attn_rotary(args: Sequence[Any]) -> Function:
    if args[2].dim() != 2:
        raise ValueError("takes cos and sin without a batch")
    rotary = importlib.import_module("flash_attn.layers.rotary").apply_rotary_emb

    def function(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int) -> Any:
        # it takes (B, S, N, D) by strides
        given = [x.transpose(1, 2) if seq_dim == -2 else x for x in (q, k) if x is not None]
        return tuple(rotary(x, cos, sin, interleaved=interleaved) for x in given)

    return function


PEERS: dict[str, dict[str, Callable[[Sequence[Any]], Function]]] = {
    "scaled_masked_softmax": {
        "liger-kernel": _liger,
        "quack-kernels": _quack,
        "TransformerEngine": _transformer_engine,
        "flag-gems": _flag_gems,
        "attorch": _attorch,
        "unsloth": _unsloth,
    },
    "cross_entropy": {"liger-kernel": _liger_loss, "quack-kernels": _quack_loss, "flag-gems": _flag_gems_loss},
    "rotary_embedding": {"liger-kernel": _liger_rope, "flash-attn": _flash_attn_rotary},
}
