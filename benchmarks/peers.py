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
    # its gradient is written over the logits: the next call has other numbers, in the same time
    return lambda logits, target, *rest: loss(logits.flatten(0, -2), target.flatten())


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


def _only_sum_of_losses(args: Sequence[Any]) -> None:
    *_, bias, ignore_index, smoothing, z_loss, softcap, reduction, denominator, _ = args
    plain = not smoothing and not z_loss and softcap is None and denominator is None
    _only(plain and bias is None and ignore_index == -100 and reduction == "mean", "takes the plain mean alone here")


def liger_linear_loss() -> Function:
    """Return Liger's function of (x, weight, target)."""
    module = _module("liger_kernel.ops.fused_linear_cross_entropy")
    function = module.LigerFusedLinearCrossEntropyFunction
    return lambda x, weight, target: function.apply(x, weight, target)[0]


def quack_linear_loss() -> Function:
    """Return QuACK's function of (x, weight, target)."""
    function = _module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return lambda x, weight, target: function(x, weight, target)


def _linear_loss(load: Callable[[], Function]) -> Callable[[Sequence[Any]], Function]:
    def loaded(args: Sequence[Any]) -> Function:
        *_, bias, ignore_index, smoothing, z_loss, softcap, reduction, denominator, _ = args
        plain = not smoothing and not z_loss and softcap is None and denominator is None and bias is None
        _only(plain and ignore_index == -100 and reduction == "mean", "takes the plain mean alone here")
        function = load()
        return lambda x, weight, target, *rest: function(x, weight, target)

    return loaded


def _transformers_experts(args: Sequence[Any]) -> Function:
    _, _, _, up, down, up_bias, down_bias, activation, limit, alpha, offset, interleaved, transposed = args
    plain = activation == "swiglu" and limit is None and (alpha, offset) == (1.0, 0.0) and up_bias is down_bias is None
    _only(plain and not interleaved and not transposed, "takes plain SwiGLU here")
    sizes = {"num_local_experts": up.shape[0], "hidden_size": up.shape[2], "intermediate_size": down.shape[2]}
    config: Any = _module("transformers").MixtralConfig(**sizes)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module = _module("transformers.models.mixtral.modeling_mixtral").MixtralExperts(config)

    def function(x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, *rest: Any) -> Any:
        own = {"gate_up_proj": up, "down_proj": down}
        return torch.func.functional_call(module, own, (x, index, weights))

    return function


PEERS: dict[str, dict[str, Callable[[Sequence[Any]], Function]]] = {
    "scaled_masked_softmax": {"liger-kernel": _liger_softmax, "quack-kernels": _quack_softmax},
    "rms_norm": {"liger-kernel": _liger_rms_norm, "quack-kernels": _quack_rms_norm},
    "add_rms_norm": {"liger-kernel": _liger_add_rms_norm, "quack-kernels": _quack_add_rms_norm},
    "layer_norm": {"liger-kernel": _liger_layer_norm},
    "swiglu": {"liger-kernel": _liger_swiglu},
    "geglu": {"liger-kernel": _liger_geglu},
    "cross_entropy": {"liger-kernel": _liger_loss, "quack-kernels": _quack_loss},
    "linear_cross_entropy": {
        "liger-kernel": _linear_loss(liger_linear_loss),
        "quack-kernels": _linear_loss(quack_linear_loss),
    },
    "experts": {"transformers": _transformers_experts},
    "rotary_embedding": {"liger-kernel": _liger_rope, "flash-attn": _flash_attn_rotary},
}
