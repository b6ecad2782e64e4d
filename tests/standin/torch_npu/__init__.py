"""A fake torch_npu with the constraints of the vendor's documents and the deviations of the vendor's kernels.

Sources (R: read in source code, V: verified by running, D: documentation only):

* D1: the vendor's page "ScaledMaskedSoftmax & ScaledMaskedSoftmaxGrad".
* D2: op-plugin, ``docs/.../torch_npu-npu_scaled_masked_softmax.md``: fixed_triu_mask is "reserved, only False".
* D3: op-plugin, ``docs/.../torch_npu-npu_gelu.md``.
* D4: op-plugin, ``docs/.../torch_npu-npu_rms_norm.md``, for Atlas A2 and A3.
* R3: the CANN kernel, hicann/ops-nn ``norm/rms_norm``: gamma is multiplied in float32, and the result rounded once.
* R1: op-plugin, ``op_plugin/config/op_plugin_functions.yaml`` and ``derivatives.yaml`` (schemas, autograd formulas).
* R2: the kernels behind op-plugin: the fill, the scaling in float16, the masking by multiplication.
* V: the registry of torch_npu 2.13, run by us without a device.

If newer kernels are less strict than the documents, the fake follows the documents. A violated constraint raises a
RuntimeError.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import torch

__version__ = "2.13.0"

npu: Any = torch.npu
_device = npu._standin  # tests/standin/npu_device.py, however it was imported

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_FILL = -10000.0  # R2: the kernels fill a finite number, though D1 documents -inf


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a kernel: its tensors in the order of the schema, and its other arguments."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    options: dict[str, Any]


calls: list[Call] = []
"""The calls that satisfied the constraints, in order."""


def _log(name: str, *tensors: torch.Tensor, **options: Any) -> None:
    calls.append(Call(name, tuple(tuple(t.shape) for t in tensors), tuple(t.dtype for t in tensors), options))
    _device.calls[name] += 1


def _refuse(name: str, sentence: str) -> NoReturn:
    raise RuntimeError(f"{name}: {sentence}")


def _require_npu(name: str, **tensors: torch.Tensor | None) -> None:
    # R1: the ops have kernels only for PrivateUse1. (Without any device tensor, the dispatcher raises.)
    for argument, tensor in tensors.items():
        # R1: `Tensor mask`, not `Tensor? mask`; torch's dispatcher accepts None nevertheless.
        if tensor is None:
            _refuse(name, f"{argument} is required; it is None.")
        if tensor.device.type != "npu":
            _refuse(name, f"{argument} must be on an npu device; it is on {tensor.device}.")


def _require_scaled_masked_softmax(
    name: str, x_name: str, x: torch.Tensor, mask: torch.Tensor, fixed_triu_mask: bool
) -> None:
    _require_npu(name, **{x_name: x, "mask": mask})
    # D1, "x must be 4-D".
    if x.dim() != 4:
        _refuse(name, f"{x_name} must have 4 dimensions; it has {x.dim()}.")
    # D1, "supported dtypes: float16, bfloat16, float".
    if x.dtype not in _FLOATS:
        _refuse(name, f"{x_name} must be float16, bfloat16 or float32; it is {x.dtype}.")
    # D1, "the third and fourth dimension must be within [32, 4096]" and "divisible by 32".
    for dim in (2, 3):
        if not 32 <= x.shape[dim] <= 4096:
            _refuse(name, f"dimension {dim} of {x_name} must be within [32, 4096]; it is {x.shape[dim]}.")
        if x.shape[dim] % 32:
            _refuse(name, f"dimension {dim} of {x_name} must be divisible by 32; it is {x.shape[dim]}.")
    # D1, mask: "bool".
    if mask.dtype != torch.bool:
        _refuse(name, f"mask must be bool; it is {mask.dtype}.")
    # D1, "must be 4-D, the last two dimensions must be equal to x's".
    if mask.dim() != 4:
        _refuse(name, f"mask must have 4 dimensions; it has {mask.dim()}.")
    if mask.shape[2:] != x.shape[2:]:
        _refuse(
            name,
            f"the last two dimensions of mask must equal those of {x_name}, {tuple(x.shape[2:])}; "
            f"they are {tuple(mask.shape[2:])}.",
        )
    # D1, "the first two dimensions must be broadcastable to those of x".
    for dim in (0, 1):
        if mask.shape[dim] not in (1, x.shape[dim]):
            _refuse(name, f"dimension {dim} of mask must be 1 or {x.shape[dim]}; it is {mask.shape[dim]}.")
    # D2, "reserved, not finished, only False is supported". D1 still describes True.
    if fixed_triu_mask:
        _refuse(name, "fixed_triu_mask must be False; the feature is not finished.")


def _scaled_masked_softmax(
    x: torch.Tensor, mask: torch.Tensor, scale: float = 1, fixed_triu_mask: bool = False
) -> torch.Tensor:
    name = "npu_scaled_masked_softmax"
    _require_scaled_masked_softmax(name, "x", x, mask, fixed_triu_mask)
    _log(name, x, mask, scale=scale, fixed_triu_mask=fixed_triu_mask)
    values, masked = _device.on_cpu(x), _device.on_cpu(mask).float()
    if x.dtype == torch.float16:
        # R2, V by emulation: float16 is scaled in float16, and may overflow.
        scaled = (values * torch.tensor(scale, dtype=torch.float16, device="cpu")).float()
    else:
        scaled = values.float() * scale
    # R2: masked by multiplication, so inf and NaN at a masked position become NaN, and softmax spreads it over the row.
    y = torch.softmax(scaled * (1 - masked) + masked * _FILL, dim=-1).to(x.dtype)
    return _device.to_device(y.contiguous())


def _scaled_masked_softmax_backward(
    y_grad: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, scale: float, fixed_triu_mask: bool
) -> torch.Tensor:
    name = "npu_scaled_masked_softmax_backward"
    _require_scaled_masked_softmax(name, "y", y, mask, fixed_triu_mask)
    _require_npu(name, y_grad=y_grad)
    # R1: the operator has one type and one shape for y_grad and y.
    if y_grad.shape != y.shape or y_grad.dtype != y.dtype:
        _refuse(
            name,
            f"y_grad must have the shape and dtype of y, {tuple(y.shape)} {y.dtype}; "
            f"it has {tuple(y_grad.shape)} {y_grad.dtype}.",
        )
    _log(name, y_grad, y, mask, scale=scale, fixed_triu_mask=fixed_triu_mask)
    g, p, masked = _device.on_cpu(y_grad).float(), _device.on_cpu(y).float(), _device.on_cpu(mask).float()
    dx = p * (g - (g * p).sum(-1, keepdim=True)) * scale
    # R2: by multiplication here too.
    return _device.to_device((dx * (1 - masked)).to(y_grad.dtype))


def _require_gelu(name: str, approximate: str, **tensors: torch.Tensor) -> None:
    _require_npu(name, **tensors)
    for argument, tensor in tensors.items():
        # D3, "float16, float32, bfloat16" (the first Atlas training series: no bfloat16).
        if tensor.dtype not in _FLOATS:
            _refuse(name, f"{argument} must be float16, bfloat16 or float32; it is {tensor.dtype}.")
        # D3, "at most 8 dimensions".
        if tensor.dim() > 8:
            _refuse(name, f"{argument} must have at most 8 dimensions; it has {tensor.dim()}.")
    # D3, "none or tanh".
    if approximate not in ("none", "tanh"):
        _refuse(name, f"approximate must be 'none' or 'tanh'; it is {approximate!r}.")


def _gelu(self: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    _require_gelu("npu_gelu", approximate, self=self)
    _log("npu_gelu", self, approximate=approximate)
    values = _device.on_cpu(self).float()
    if approximate == "none":  # written out: torch's own kernel for AVX-512 returns NaN for inf (torch 2.13)
        y = 0.5 * values * (1 + torch.erf(values * 0.5**0.5))
    else:
        y = torch.ops.aten.gelu(values, approximate=approximate)
    return _device.to_device(y.to(self.dtype))


def _gelu_backward(grad_output: torch.Tensor, self: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    _require_gelu("npu_gelu_backward", approximate, grad_output=grad_output, self=self)
    _log("npu_gelu_backward", grad_output, self, approximate=approximate)
    # R1: the result has the broadcast shape of the two and their promoted dtype.
    dtype = torch.result_type(_device.on_cpu(grad_output), _device.on_cpu(self))
    grad, values = torch.broadcast_tensors(_device.on_cpu(grad_output).float(), _device.on_cpu(self).float())
    return _device.to_device(torch.ops.aten.gelu_backward(grad, values, approximate=approximate).to(dtype))


_RMS_DTYPES = {  # D4: the dtypes of input and gamma
    *((dtype, dtype) for dtype in _FLOATS),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
}


def _require_rms_norm(name: str, **tensors: torch.Tensor) -> None:
    _require_npu(name, **tensors)
    input, gamma = tensors["input"], tensors["gamma"]
    # D4, "2 to 8 dimensions".
    if not 2 <= input.dim() <= 8:
        _refuse(name, f"input must have 2 to 8 dimensions; it has {input.dim()}.")
    # D4, "the shape of gamma must equal the last dimensions of input".
    if not 1 <= gamma.dim() < input.dim() or gamma.shape != input.shape[-gamma.dim() :]:
        _refuse(name, f"gamma must have the last sizes of input, {tuple(input.shape)}; it has {tuple(gamma.shape)}.")
    # D4, the table of dtypes.
    if (input.dtype, gamma.dtype) not in _RMS_DTYPES:
        _refuse(name, f"input and gamma must be alike, or gamma float32; they are {input.dtype} and {gamma.dtype}.")


def _rms_rows(input: torch.Tensor, gamma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    rows = _device.on_cpu(input).float()
    return rows, _device.on_cpu(gamma).float(), [*range(-gamma.dim(), 0)]


def _rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06) -> tuple[torch.Tensor, torch.Tensor]:
    _require_rms_norm("npu_rms_norm", input=input, gamma=gamma)
    _log("npu_rms_norm", input, gamma, epsilon=epsilon)
    rows, factor, dims = _rms_rows(input, gamma)
    rstd = torch.rsqrt(rows.square().mean(dims, keepdim=True) + epsilon)
    y = (rows * rstd * factor).to(input.dtype)  # R3: once
    return _device.to_device(y.contiguous()), _device.to_device(rstd)


def _rms_norm_backward(
    dy: torch.Tensor, input: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    name = "npu_rms_norm_backward"
    _require_rms_norm(name, dy=dy, input=input, gamma=gamma, rstd=rstd)
    # R1: the operator has one type and one shape for dy and input, and a float32 rstd with sizes of 1 at the end.
    if dy.shape != input.shape or dy.dtype != input.dtype:
        _refuse(name, f"dy must be as input, {tuple(input.shape)} {input.dtype}; it is {tuple(dy.shape)} {dy.dtype}.")
    shape = (*input.shape[: input.dim() - gamma.dim()], *(1,) * gamma.dim())
    if rstd.shape != shape or rstd.dtype != torch.float32:
        _refuse(name, f"rstd must be float32 of shape {shape}; it is {rstd.dtype} of {tuple(rstd.shape)}.")
    _log(name, dy, input, gamma, rstd)
    rows, factor, dims = _rms_rows(input, gamma)
    root, grad = _device.on_cpu(rstd), _device.on_cpu(dy).float()
    normal = rows * root
    m = grad * factor
    dx = (m - normal * (m * normal).mean(dims, keepdim=True)) * root
    dgamma = (grad * normal).sum_to_size(gamma.shape)  # R1: float32, whatever gamma is
    return _device.to_device(dx.to(input.dtype).contiguous()), _device.to_device(dgamma.contiguous())


# R1; the first two also V.
_SCHEMAS = (
    "npu_scaled_masked_softmax(Tensor x, Tensor mask, Scalar scale=1, bool fixed_triu_mask=False) -> Tensor",
    "npu_scaled_masked_softmax_backward"
    "(Tensor y_grad, Tensor y, Tensor mask, Scalar scale, bool fixed_triu_mask) -> Tensor",
    "npu_gelu(Tensor input, *, str approximate='none') -> Tensor",
    "npu_gelu_backward(Tensor grad_output, Tensor input, *, str approximate='none') -> Tensor",
    "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_rms_norm_backward(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)",
)
_library = torch.library.Library("npu", "DEF")
for _schema in _SCHEMAS:
    _library.define(_schema)
for _op, _kernel in {
    "npu_scaled_masked_softmax": _scaled_masked_softmax,
    "npu_scaled_masked_softmax_backward": _scaled_masked_softmax_backward,
    "npu_gelu": _gelu,
    "npu_gelu_backward": _gelu_backward,
    "npu_rms_norm": _rms_norm,
    "npu_rms_norm_backward": _rms_norm_backward,
}.items():
    _library.impl(_op, _kernel, "PrivateUse1")
# V: the meta kernels do not check anything.
_library.impl("npu_scaled_masked_softmax", lambda x, mask, scale=1, fixed_triu_mask=False: torch.empty_like(x), "Meta")
_library.impl(
    "npu_scaled_masked_softmax_backward",
    lambda y_grad, y, mask, scale, fixed_triu_mask: torch.empty_like(y_grad),
    "Meta",
)
_library.impl("npu_gelu", lambda self, *, approximate="none": torch.empty_like(self), "Meta")
_library.impl("npu_gelu_backward", lambda grad_output, self, *, approximate="none": torch.empty_like(self), "Meta")


def _rms_norm_meta(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06) -> tuple[torch.Tensor, ...]:
    shape = (*input.shape[: input.dim() - gamma.dim()], *(1,) * gamma.dim())
    return torch.empty_like(input), torch.empty(shape, dtype=torch.float32, device=input.device)


_library.impl("npu_rms_norm", _rms_norm_meta, "Meta")
_library.impl(
    "npu_rms_norm_backward",
    lambda dy, input, gamma, rstd: (torch.empty_like(input), torch.empty_like(gamma, dtype=torch.float32)),
    "Meta",
)


def _save_softmax(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, mask, ctx.scale, ctx.fixed_triu_mask = inputs
    ctx.save_for_backward(output, mask)


def _differentiate_softmax(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    result, mask = ctx.saved_tensors
    dx = torch.ops.npu.npu_scaled_masked_softmax_backward(grad, result, mask, ctx.scale, ctx.fixed_triu_mask)
    return dx, None, None, None


def _save_gelu(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: torch.Tensor) -> None:
    ctx.approximate = keyword_only_inputs["approximate"]
    ctx.save_for_backward(inputs[0])


def _differentiate_gelu(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return torch.ops.npu.npu_gelu_backward(grad, *ctx.saved_tensors, approximate=ctx.approximate)


def _save_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _differentiate_rms_norm(ctx: Any, grad: torch.Tensor, grad_rstd: Any) -> tuple[Any, ...]:
    input, gamma, rstd = ctx.saved_tensors
    dx, dgamma = torch.ops.npu.npu_rms_norm_backward(grad, input, gamma, rstd)
    return dx, dgamma.to(gamma.dtype), None


torch.library.register_autograd(
    "npu::npu_rms_norm", _differentiate_rms_norm, setup_context=_save_rms_norm, lib=_library
)
torch.library.register_autograd(
    "npu::npu_scaled_masked_softmax", _differentiate_softmax, setup_context=_save_softmax, lib=_library
)
torch.library.register_autograd("npu::npu_gelu", _differentiate_gelu, setup_context=_save_gelu, lib=_library)

# torch_npu exports the ops themselves under these names, with the argument names and defaults of the schemas.
npu_scaled_masked_softmax = torch.ops.npu.npu_scaled_masked_softmax
npu_scaled_masked_softmax_backward = torch.ops.npu.npu_scaled_masked_softmax_backward
npu_gelu = torch.ops.npu.npu_gelu
npu_gelu_backward = torch.ops.npu.npu_gelu_backward
npu_rms_norm = torch.ops.npu.npu_rms_norm
npu_rms_norm_backward = torch.ops.npu.npu_rms_norm_backward

# the other ops are registered by a file for each family
from . import _attention, _cross_entropy, _delta_rule, _gated, _group_norm, _grouped, _rotary, _routing  # noqa: E402

npu_swiglu = _gated.npu_swiglu
npu_swiglu_backward = _gated.npu_swiglu_backward
npu_geglu = _gated.npu_geglu
npu_geglu_grad = _gated.npu_geglu_grad
npu_group_norm_silu = _group_norm.npu_group_norm_silu
npu_rotary_mul = _rotary.npu_rotary_mul
npu_cross_entropy_loss = _cross_entropy.npu_cross_entropy_loss
npu_cross_entropy_loss_backward = _cross_entropy.npu_cross_entropy_loss_backward
npu_fusion_attention = _attention.npu_fusion_attention
npu_fusion_attention_grad = _attention.npu_fusion_attention_grad
npu_grouped_matmul = _grouped.npu_grouped_matmul
npu_moe_gating_top_k = _routing.npu_moe_gating_top_k
npu_recurrent_gated_delta_rule = _delta_rule.npu_recurrent_gated_delta_rule
