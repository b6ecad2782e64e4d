"""Gated activations of the fake torch_npu. Sources as in ``__init__.py``, and

* D4: op-plugin, ``docs/.../torch_npu-npu_swiglu.md``: 1 to 8 dimensions, float16, float32, bfloat16, ``dim`` of an even
  size, "no non-contiguous, no empty tensor".
* D6: op-plugin, ``docs/.../torch_npu-npu_geglu.md``: approximate 1 is tanh, 0 is erf; the right half is the gate
  unless ``activate_left``.
* R3: ops-nn, ``activation/swi_glu/op_kernel/swi_glu_bf16.hpp``: float32 arithmetic, one rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu

_device = torch_npu._device
_library = torch_npu._library


def _require_packed(name: str, input: torch.Tensor, dim: int) -> None:
    torch_npu._require_npu(name, input=input)
    if input.dtype not in torch_npu._FLOATS:
        torch_npu._refuse(name, f"input must be float16, bfloat16 or float32; it is {input.dtype}.")
    if not 1 <= input.dim() <= 8:
        torch_npu._refuse(name, f"input must have 1 to 8 dimensions; it has {input.dim()}.")
    if input.shape[dim] % 2:
        torch_npu._refuse(name, f"dimension {dim} of input must be even; it is {input.shape[dim]}.")
    if input.numel() == 0 or not input.is_contiguous():
        torch_npu._refuse(name, "input must be contiguous and must not be empty.")


def _halves(input: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = _device.on_cpu(input).float().chunk(2, dim)
    return first, second


def _swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    _require_packed("npu_swiglu", input, dim)
    torch_npu._log("npu_swiglu", input, dim=dim)
    gate, up = _halves(input, dim)
    # no source states the result for a gate of -inf; here it is the limit, 0
    s = torch.sigmoid(gate)
    return _device.to_device((gate.masked_fill(s == 0, 0.0) * s * up).to(input.dtype).contiguous())


def _swiglu_backward(grad_output: torch.Tensor, input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    name = "npu_swiglu_backward"
    _require_packed(name, input, dim)
    torch_npu._require_npu(name, grad_output=grad_output)
    size = input.shape[dim] // 2
    if grad_output.dtype != input.dtype or grad_output.shape != input.narrow(dim, 0, size).shape:
        torch_npu._refuse(name, "grad_output must have the dtype of input, and half of its size.")
    if not grad_output.is_contiguous():
        torch_npu._refuse(name, "grad_output must be contiguous.")
    torch_npu._log(name, grad_output, input, dim=dim)
    gate, up = _halves(input, dim)
    grad, s = _device.on_cpu(grad_output).float(), torch.sigmoid(gate)
    gate = gate.masked_fill(s == 0, 0.0)
    both = torch.cat((grad * up * s * (1 + gate * (1 - s)), grad * gate * s), dim)
    return _device.to_device(both.to(input.dtype))


def _gelu_halves(
    name: str, input: torch.Tensor, dim: int, approximate: int, activate_left: bool
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return gate, up and the form. D6: the right half is the gate unless activate_left; 1 is tanh, 0 is erf."""
    _require_packed(name, input, dim)
    if approximate not in (0, 1):
        torch_npu._refuse(name, f"approximate must be 0 or 1; it is {approximate}.")
    left, right = _halves(input, dim)
    gate, up = (left, right) if activate_left else (right, left)
    # no source states the result for a gate of -inf; here it is the limit, 0
    return gate.clamp(min=-32.0), up, ("none", "tanh")[approximate]


def _geglu(
    input: torch.Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up, form = _gelu_halves("npu_geglu", input, dim, approximate, activate_left)
    torch_npu._log("npu_geglu", input, dim=dim, approximate=approximate, activate_left=activate_left)
    gelu = torch.nn.functional.gelu(gate.double(), approximate=form).float()
    return tuple(_device.to_device(each.to(input.dtype).contiguous()) for each in (gelu * up, gelu))  # type: ignore


def _geglu_grad(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    gelu: torch.Tensor,
    dim: int = -1,
    approximate: int = 1,
    activate_left: bool = False,
) -> torch.Tensor:
    name = "npu_geglu_grad"
    gate, up, form = _gelu_halves(name, input, dim, approximate, activate_left)
    torch_npu._require_npu(name, grad_output=grad_output, gelu=gelu)
    if not grad_output.shape == gelu.shape == gate.shape or not grad_output.dtype == gelu.dtype == input.dtype:
        torch_npu._refuse(name, "grad_output and gelu must have the dtype of input, and half of its size.")
    if not grad_output.is_contiguous():
        torch_npu._refuse(name, "grad_output must be contiguous.")
    torch_npu._log(name, grad_output, input, gelu, dim=dim, approximate=approximate, activate_left=activate_left)
    grad = _device.on_cpu(grad_output).float()
    dgate = torch.ops.aten.gelu_backward(grad * up, gate.clamp(max=32.0), approximate=form)
    dup = grad * _device.on_cpu(gelu).float()
    both = (dgate, dup) if activate_left else (dup, dgate)
    return _device.to_device(torch.cat(both, dim).to(input.dtype))


_KERNELS: dict[str, Any] = {  # R1
    "npu_swiglu(Tensor input, int dim=-1) -> Tensor": _swiglu,
    "npu_swiglu_backward(Tensor grad_output, Tensor input, int dim=-1) -> Tensor": _swiglu_backward,
    "npu_geglu(Tensor input, int dim=-1, int approximate=1, bool activate_left=False) -> (Tensor, Tensor)": _geglu,
    "npu_geglu_grad(Tensor grad_output, Tensor input, Tensor gelu, int dim=-1, int approximate=1, "
    "bool activate_left=False) -> Tensor": _geglu_grad,
}
for _schema, _kernel in _KERNELS.items():
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _kernel, "PrivateUse1")

npu_swiglu = torch.ops.npu.npu_swiglu
npu_swiglu_backward = torch.ops.npu.npu_swiglu_backward
npu_geglu = torch.ops.npu.npu_geglu
npu_geglu_grad = torch.ops.npu.npu_geglu_grad
