"""Cross entropy of the fake torch_npu. Sources as in ``__init__.py``, and

* D7: op-plugin, ``docs/.../torch_npu-npu_cross_entropy_loss.md``: input [N, C], float16, bfloat16 or float32, N from 1
  to 200000; target int64 [N] in [0, C); a negative ignore_index means none; with a gradient label_smoothing only in its
  default; z-loss is not supported.
* R4: ops-nn, ``loss/cross_entropy_loss/op_kernel``: float32 arithmetic; loss and log_prob have the input's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu

_device = torch_npu._device
_library = torch_npu._library


def _require(name: str, rows_name: str, rows: torch.Tensor, target: torch.Tensor, reduction: str) -> None:
    torch_npu._require_npu(name, **{rows_name: rows, "target": target})
    if rows.dim() != 2 or rows.dtype not in torch_npu._FLOATS:
        torch_npu._refuse(name, f"{rows_name} must be [N, C] of float16, bfloat16 or float32.")
    if not 0 < rows.shape[0] <= 200000:
        torch_npu._refuse(name, f"N must be in [1, 200000]; it is {rows.shape[0]}.")
    if target.dtype != torch.int64 or tuple(target.shape) != (rows.shape[0],):
        torch_npu._refuse(name, "target must be int64 of shape [N].")
    places = _device.on_cpu(target)
    if bool(((places < 0) | (places >= rows.shape[1])).any()):
        torch_npu._refuse(name, "target must be in [0, C): a negative ignore_index means none.")
    if not (rows.is_contiguous() and target.is_contiguous()):
        torch_npu._refuse(name, f"{rows_name} and target must be contiguous.")
    if reduction not in ("mean", "sum", "none"):
        torch_npu._refuse(name, f"reduction must be mean, sum or none; it is {reduction!r}.")


def _reduced(loss: torch.Tensor, reduction: str) -> torch.Tensor:
    return loss if reduction == "none" else (loss.mean() if reduction == "mean" else loss.sum()).view(1)


def _loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
    return_zloss: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    name = "npu_cross_entropy_loss"
    _require(name, "input", input, target, reduction)
    if weight is not None or label_smoothing or lse_square_scale_for_zloss or return_zloss or ignore_index >= 0:
        torch_npu._refuse(name, "the fake supports the default arguments alone.")
    torch_npu._log(name, input, target, reduction=reduction)
    # by float64: in float32 torch's own on a CPU is off by 1e-4 for long rows
    log_prob = torch.log_softmax(_device.on_cpu(input).double(), -1).float()
    loss = _reduced(-log_prob.gather(1, _device.on_cpu(target)[:, None])[:, 0], reduction)
    results = (loss, log_prob, torch.empty(0, device="cpu"), torch.empty(0, device="cpu"))
    return tuple(_device.to_device(each.to(input.dtype).contiguous()) for each in results)  # type: ignore


def _backward(
    grad_loss: torch.Tensor,
    log_prob: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    grad_zloss: torch.Tensor | None = None,
    lse_for_zloss: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
) -> torch.Tensor:
    name = "npu_cross_entropy_loss_backward"
    _require(name, "log_prob", log_prob, target, reduction)
    torch_npu._require_npu(name, grad_loss=grad_loss)
    others = (weight, grad_zloss, lse_for_zloss)
    if any(each is not None for each in others) or label_smoothing or lse_square_scale_for_zloss or ignore_index >= 0:
        torch_npu._refuse(name, "the fake supports the default arguments alone.")
    rows = log_prob.shape[0]
    if grad_loss.dtype != log_prob.dtype or tuple(grad_loss.shape) != ((rows,) if reduction == "none" else (1,)):
        torch_npu._refuse(name, "grad_loss must have the dtype of log_prob, and one element for each loss.")
    torch_npu._log(name, grad_loss, log_prob, target, reduction=reduction)
    grad = _device.on_cpu(grad_loss).float() / (rows if reduction == "mean" else 1)
    dx = torch.exp(_device.on_cpu(log_prob).float())
    dx.scatter_add_(1, _device.on_cpu(target)[:, None], torch.full((rows, 1), -1.0, dtype=torch.float32, device="cpu"))
    return _device.to_device((dx * grad.view(-1, 1)).to(log_prob.dtype))


_KERNELS: dict[str, Any] = {  # R1
    "npu_cross_entropy_loss(Tensor input, Tensor target, Tensor? weight=None, str reduction='mean', "
    "int ignore_index=-100, float label_smoothing=0.0, float lse_square_scale_for_zloss=0.0, "
    "bool return_zloss=False) -> (Tensor, Tensor, Tensor, Tensor)": _loss,
    "npu_cross_entropy_loss_backward(Tensor grad_loss, Tensor log_prob, Tensor target, Tensor? weight=None, "
    "Tensor? grad_zloss=None, Tensor? lse_for_zloss=None, str reduction='mean', int ignore_index=-100, "
    "float label_smoothing=0.0, float lse_square_scale_for_zloss=0.0) -> Tensor": _backward,
}
for _schema, _kernel in _KERNELS.items():
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _kernel, "PrivateUse1")

npu_cross_entropy_loss = torch.ops.npu.npu_cross_entropy_loss
npu_cross_entropy_loss_backward = torch.ops.npu.npu_cross_entropy_loss_backward
