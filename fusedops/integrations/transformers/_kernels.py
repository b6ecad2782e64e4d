"""fusedops as layers of the package kernels, by the names that transformers' layers have there.

kernels makes the ``forward`` of a layer the forward of a module, so the layers here have no members but ``forward``,
and read the attributes of the module that they replace.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module

from fusedops import ops
from fusedops.integrations.transformers._rotary import RotaryFunction, recognised_function


class _RMSNorm(Module):
    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != self.weight.dtype:  # the classes of this name differ in the dtype of the result
            cls = cast("Any", type(self))
            return cls.forward(self, hidden_states)
        return ops.rms_norm(hidden_states, self.weight, self.variance_epsilon)


class _RMSNormZeroCentered(Module):
    can_torch_compile = True
    has_backward = True

    def forward(self: Any, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, offset=1.0)


class _SwiGLUMLP(Module):
    can_torch_compile = True
    has_backward = True

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))


class _GeGLUMLP(Module):
    can_torch_compile = True
    has_backward = True

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(ops.geglu(self.gate_proj(x), self.up_proj(x)))


class _RotaryPosEmb(Module):
    can_torch_compile = True
    has_backward = True

    def forward(self: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        cls = cast("Any", type(self))
        form = _rotary_form(cls)
        function = None if form is None else RotaryFunction(*form)
        if function is None or not function.fits(q, cos, unsqueeze_dim):  # another rotation of the same name
            return cls.forward(self, q, k, cos, sin, unsqueeze_dim)
        return function(q, k, cos, sin, unsqueeze_dim)


_FORMS: dict[type[Any], Any] = {}


@torch.compiler.assume_constant_result
def _rotary_form(cls: type[Any]) -> Any:
    """Return the fields of the RotaryFunction that a function of transformers is, or None. Computed once for each."""
    if cls not in _FORMS:
        found = recognised_function("rotary_pos_emb", object.__new__(cls))
        _FORMS[cls] = None if isinstance(found, str) else (found.interleaved, found.layout, found.promotes)
    return _FORMS[cls]


_LAYERS: dict[str, type[Module]] = {
    "RMSNorm": _RMSNorm,
    "RMSNormZeroCentered": _RMSNormZeroCentered,
    "SwiGLUMLP": _SwiGLUMLP,
    "GeGLUMLP": _GeGLUMLP,
    "rotary_pos_emb": _RotaryPosEmb,
}


@dataclass(frozen=True)
class Layer:
    """A layer as kernels loads it. Nothing is downloaded.

    >>> Layer("RMSNorm").load().has_backward
    True
    """

    name: str

    def load(self) -> type[Module]:
        """Return the class whose forward becomes the module's."""
        return _LAYERS[self.name]

    def __str__(self) -> str:
        return f"fusedops, layer `{self.name}`"


def mapping(devices: Iterable[str] = ("cpu", "cuda", "rocm", "npu", "xpu")) -> dict[str, dict[str, Layer]]:
    """Return fusedops' layers for :func:`kernels.use_kernel_mapping` and ``register_kernel_mapping``.

    Each layer serves every mode of kernels, with gradients and under torch.compile. The op selects the backend for
    each call, so the layers of all devices are the same.

    Args:
        devices: the device types to map, as kernels names them.

    Returns:
        layers by the name that kernels has for them and by device.

    >>> from fusedops.integrations.transformers import mapping
    >>> sorted(mapping(["cpu", "npu"]))
    ['GeGLUMLP', 'RMSNorm', 'RMSNormZeroCentered', 'SwiGLUMLP', 'rotary_pos_emb']
    """
    names = tuple(devices)
    return {name: dict.fromkeys(names, Layer(name)) for name in _LAYERS}
