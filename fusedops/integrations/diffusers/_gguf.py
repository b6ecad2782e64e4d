"""The linear layers of a GGUF file in diffusers, by ``quantized_linear``: no weight is unpacked for a call.

diffusers unpacks the whole weight to float16 for each call, and rounds it to the layer's ``compute_dtype``. The op
takes each weight as exactly what the format stands for, so its results differ by those roundings.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fusedops import ops
from fusedops._torch import TENSOR_TYPES, is_traced, is_transformed
from fusedops.integrations._replacement import Replacement, own_class
from fusedops.integrations._trial.twin import is_replaced_elsewhere
from fusedops.quantization import FORMATS, block_of

_MODULE, _NAME = "diffusers.quantizers.gguf.utils", "GGUFLinear"


@dataclass(frozen=True)
class GgufLinear(Replacement):
    """The settings of a replaced layer: the format of its weight."""

    format: str
    op: str = "quantized_linear"

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer by the op; by its own forward where the weight or the argument is of another kind."""
        (x,) = (*args, *kwargs.values())
        weight = module.weight
        if (
            is_traced()
            or is_transformed()
            or type(x) not in TENSOR_TYPES
            or x.dtype is not module.compute_dtype
            or _format_of(weight) != self.format
            or _has_own_kernel(weight)
        ):
            return own_class(module).forward(module, *args, **kwargs)
        bias: Tensor | None = None if module.bias is None else module.bias.to(x.dtype)
        return ops.quantized_linear(x, weight.as_tensor(), bias, format=self.format)


def recognised_gguf(module: Module) -> Replacement | str | None:
    """Return the replacement of a linear layer of a GGUF file, the reason why it is left, or None for another module.

    >>> recognised_gguf(torch.nn.Linear(2, 2))
    """
    library = sys.modules.get(_MODULE)
    if library is None or own_class(module) is not getattr(library, _NAME):
        return None
    if is_replaced_elsewhere(module):
        return "another library has replaced its forward"
    weight: Any = module.weight
    name = _format_of(weight)
    if name is None:
        return "its weight is not loaded"
    if name not in FORMATS:
        return f"its weight is in {name}, expected one of {', '.join(FORMATS)}"
    if _has_own_kernel(weight):
        return "diffusers has a kernel of its own for it on this device"
    columns: Any = module.in_features
    if columns % block_of(name):
        return f"a row has {columns} weights, no multiple of {block_of(name)}, the block of {name}"
    return GgufLinear(name)


def _format_of(weight: Any) -> str | None:
    """Return the name of the format of a packed weight, or None for another one."""
    kind = getattr(weight, "quant_type", None)
    if kind is None or weight.dtype is not torch.uint8 or weight.dim() != 2 or not hasattr(weight, "as_tensor"):
        return None
    return str(getattr(kind, "name", kind))


def _has_own_kernel(weight: Any) -> bool:
    return bool(weight.is_cuda) and getattr(sys.modules[_MODULE], "ops", None) is not None
