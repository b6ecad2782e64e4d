"""Who can compute an op here: fusedops by backend, plain torch, compiled torch, and the peers that are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import fusedops
from fusedops._bench import PLAIN, on, plain_softmax, refusal
from fusedops._op import Op

Function = Callable[..., Tensor]  # takes the op's arguments in order


def megatron_softmax(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """What Megatron's module does where its kernel refuses: in float32, filled with -10000, cast back."""
    scores = x.float() * scale
    if causal:
        upper = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        mask = upper if mask is None else mask | upper
    return torch.softmax(scores if mask is None else scores.masked_fill(mask, -10000.0), -1).to(x.dtype)


def native_softmax(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Torch's own kernels with a mask in them: ``_masked_softmax``, or ``softmax`` where there is none to give."""
    if causal or mask is None:
        return plain_softmax(x, mask, scale, causal)
    return torch._masked_softmax(x * scale, mask.expand(x.shape), -1, 0)


def megatron_bias_gelu(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """The tanh form written out, as Megatron's function has it before a compiler sees it."""
    u = x if bias is None else x + bias
    return 0.5 * u * (1.0 + torch.tanh(0.79788456 * u * (1 + 0.044715 * u * u)))


def providers(op: Op, args: Sequence[Any], device: str) -> tuple[dict[str, Function], dict[str, str]]:
    """The providers of a call, and those left out with the reason."""
    found: dict[str, Function] = {}
    left: dict[str, str] = {}
    for info in fusedops.backends():
        why = refusal(info.name, op, tuple(args))
        if why is not None:
            left[f"fusedops.{info.name}"] = why
        else:
            found[f"fusedops.{info.name}"] = on(info.name, op)
    found["torch"] = PLAIN[op.name]
    found["torch.compile"] = torch.compile(PLAIN[op.name], dynamic=False)
    if op.name == "scaled_masked_softmax":
        found["megatron's torch path"] = megatron_softmax
        if args[1] is not None and not args[3] and device == "cpu":  # on CUDA it takes other layouts of a mask
            found["torch._masked_softmax"] = native_softmax
    if op.name == "bias_gelu" and args[2] == "tanh":
        found["megatron's torch path"] = megatron_bias_gelu
    if device == "cuda":
        for name, make in PEERS.get(op.name, {}).items():
            try:
                function = make(args)
            except Exception as error:  # a peer that is not here, or does not fit, is left out by name
                left[name] = f"{type(error).__name__}: {error}"
            else:
                found[name] = function
    return found, left


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

    def through(*call: Any) -> Tensor:
        with flag_gems.use_gems():
            return plain_softmax(*call)

    return through


PEERS: dict[str, dict[str, Callable[[Sequence[Any]], Function]]] = {
    "scaled_masked_softmax": {
        "liger-kernel": _liger,
        "quack-kernels": _quack,
        "TransformerEngine": _transformer_engine,
        "flag-gems": _flag_gems,
        "attorch": _attorch,
        "unsloth": _unsloth,
    },
}
