"""The kernels of other libraries for CUDA: for each op, functions that return a provider or raise for what it lacks.

Read in liger-kernel 0.8.5, quack-kernels 0.2.4 and flash-attn 2.8.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]  # takes the op's arguments in order


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _only(condition: bool, limits: str) -> None:
    if not condition:
        raise ValueError(limits)


def _plain_softmax(args: Sequence[Any]) -> None:
    _only(args[1] is None and args[2] == 1.0 and not args[3], "has no mask, scale or causal softmax")


def _liger_softmax(args: Sequence[Any]) -> Function:
    _plain_softmax(args)
    function = _module("liger_kernel.ops.softmax").LigerSoftmaxFunction
    return lambda x, mask, scale, causal: function.apply(x)


def _quack_softmax(args: Sequence[Any]) -> Function:
    _plain_softmax(args)
    softmax = _module("quack.softmax").softmax
    return lambda x, mask, scale, causal: softmax(x.flatten(0, -2)).view_as(x)


def _liger_rms_norm(args: Sequence[Any]) -> Function:
    function = _module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    return lambda x, weight, eps, offset: function.apply(x, weight, eps, offset, "gemma", False)


def _quack_rms_norm(args: Sequence[Any]) -> Function:
    _only(args[3] == 0.0, "has no offset")
    rmsnorm = _module("quack.rmsnorm").rmsnorm
    return lambda x, weight, eps, offset: rmsnorm(x, weight, eps=eps)


def _liger_add_rms_norm(args: Sequence[Any]) -> Function:
    _only(args[2] is not None, "needs a weight")
    function = _module("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction
    return lambda x, residual, weight, eps, offset: function.apply(x, residual, weight, eps, offset, "gemma", False)


def _quack_add_rms_norm(args: Sequence[Any]) -> Function:
    _only(args[4] == 0.0, "has no offset")
    rmsnorm = _module("quack.rmsnorm").rmsnorm
    return lambda x, residual, weight, eps, offset: rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True)


def _liger_layer_norm(args: Sequence[Any]) -> Function:
    _only(args[1] is not None and args[2] is not None, "needs a weight and a bias")
    function = _module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
    return lambda x, weight, bias, eps: function.apply(x, weight, bias, eps)


def _liger_swiglu(args: Sequence[Any]) -> Function:
    _, up, limit, alpha, offset, _ = args
    _only(up is not None and limit is None and (alpha, offset) == (1.0, 0.0), "takes two tensors, without a limit")
    function = _module("liger_kernel.ops.swiglu").LigerSiLUMulFunction
    return lambda gate, up, *rest: function.apply(gate, up)


def _liger_geglu(args: Sequence[Any]) -> Function:
    _only(args[1] is not None and args[2] == "tanh", "takes two tensors, with tanh")
    function = _module("liger_kernel.ops.geglu").LigerGELUMulFunction
    return lambda gate, up, *rest: function.apply(gate, up)


def _loss_options(args: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of cross_entropy besides the tensors by name, without a denominator."""
    _only(args[-1] is None, "has no denominator")
    return dict(zip(("ignore_index", "label_smoothing", "z_loss", "softcap", "reduction"), args[2:-1]))


def _liger_loss(args: Sequence[Any]) -> Function:
    options = _loss_options(args)
    options["lse_square_scale"] = options.pop("z_loss")
    loss = _module("liger_kernel.transformers.cross_entropy").LigerCrossEntropyLoss(**options)
    # its gradient is written over the logits
    return lambda logits, target, *rest: loss(logits.clone().flatten(0, -2), target.flatten())


def _quack_loss(args: Sequence[Any]) -> Function:
    options = _loss_options(args)
    plain = not options["label_smoothing"] and not options["z_loss"] and options["softcap"] is None
    _only(plain, "has no label smoothing, z-loss or softcap")
    function = _module("quack.cross_entropy").cross_entropy
    kept = {name: options[name] for name in ("ignore_index", "reduction")}
    return lambda logits, target, *rest: function(logits.flatten(0, -2), target.flatten(), **kept)


def _liger_rope(args: Sequence[Any]) -> Function:
    q, k, cos, _, interleaved, seq_dim = args
    whole = not interleaved and k is not None and seq_dim == -2 and cos.dim() == 2 and 2 * cos.shape[-1] == q.shape[-1]
    _only(whole, "takes q and k with the heads first and halves of whole heads")
    function = _module("liger_kernel.ops.rope").LigerRopeFunction
    # it keeps each entry twice, which a model does once for all layers
    doubled = [torch.cat((angle, angle), -1)[None] for angle in args[2:4]]
    return lambda q, k, *rest: function.apply(q, k, *doubled)


def _flash_attn_rotary(args: Sequence[Any]) -> Function:
    _only(args[2].dim() == 2, "takes cos and sin without a batch")
    rotary = _module("flash_attn.layers.rotary").apply_rotary_emb

    def function(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int) -> Any:
        # it takes (B, S, N, D) by strides
        given = [x.transpose(1, 2) if seq_dim == -2 else x for x in (q, k) if x is not None]
        return tuple(rotary(x, cos, sin, interleaved=interleaved) for x in given)

    return function


PEERS: dict[str, dict[str, Callable[[Sequence[Any]], Function]]] = {
    "scaled_masked_softmax": {"liger-kernel": _liger_softmax, "quack-kernels": _quack_softmax},
    "rms_norm": {"liger-kernel": _liger_rms_norm, "quack-kernels": _quack_rms_norm},
    "add_rms_norm": {"liger-kernel": _liger_add_rms_norm, "quack-kernels": _quack_add_rms_norm},
    "layer_norm": {"liger-kernel": _liger_layer_norm},
    "swiglu": {"liger-kernel": _liger_swiglu},
    "geglu": {"liger-kernel": _liger_geglu},
    "cross_entropy": {"liger-kernel": _liger_loss, "quack-kernels": _quack_loss},
    "rotary_embedding": {"liger-kernel": _liger_rope, "flash-attn": _flash_attn_rotary},
}
