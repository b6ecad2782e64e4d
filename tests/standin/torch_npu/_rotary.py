"""Rotary embedding of the fake torch_npu. Sources as in ``__init__.py``, and

* D5: op-plugin, ``docs/.../torch_npu-npu_rotary_mul.md``: rank 3 or 4, D below 896 and even; "half" with B and N below
  1000, "interleave" with B * N below 1000 and tables of one batch; r1 and r2 of all of D.
* R4: ops-transformer, ``posembedding/rotary_position_embedding/op_host/rope_rotate_half_tiling.cpp``: "half" of
  (B, N, S, D) is refused at B * N > 8 * S.
* R5: op-plugin, ``RotaryMulKernelNpuOpApi.cpp``: r1 and r2 are cast to the dtype of the input; float32 arithmetic.
"""

from __future__ import annotations

import torch
import torch_npu

_device = torch_npu._device
_NAME = "npu_rotary_mul"


def _require(input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, mode: str) -> None:
    torch_npu._require_npu(_NAME, input=input, r1=r1, r2=r2)
    if input.dtype not in torch_npu._FLOATS:
        torch_npu._refuse(_NAME, f"input must be float16, bfloat16 or float32; it is {input.dtype}.")
    if input.dim() != 4 or r1.dim() != 4:  # the layouts of rank 3 are not used
        torch_npu._refuse(_NAME, "input, r1 and r2 must have 4 dimensions.")
    if not all(tensor.is_contiguous() and tensor.numel() for tensor in (input, r1, r2)):
        torch_npu._refuse(_NAME, "input, r1 and r2 must be contiguous and must not be empty.")
    dim = input.shape[-1]
    if dim >= 896 or dim % 2 or r1.shape[-1] != dim or r1.shape != r2.shape:
        torch_npu._refuse(_NAME, f"D must be even and below 896, and that of r1 and r2; it is {dim}.")
    heads_first = r1.shape[1] == 1 and r1.shape[2] == input.shape[2]
    heads, length = (input.shape[1], input.shape[2]) if heads_first else (input.shape[2], input.shape[1])
    batch = input.shape[0]
    wanted = (1, length) if heads_first else (length, 1)
    if tuple(r1.shape[1:3]) != wanted or r1.shape[0] not in (1, batch):
        torch_npu._refuse(_NAME, f"r1 of {tuple(r1.shape)} does not fit input of {tuple(input.shape)}.")
    if mode == "interleave":
        if r1.shape[0] != 1 or batch * heads >= 1000:
            torch_npu._refuse(_NAME, "interleave needs tables of one batch, and B * N below 1000.")
    elif mode != "half":
        torch_npu._refuse(_NAME, f"rotary_mode must be half or interleave; it is {mode!r}.")
    elif batch >= 1000 or heads >= 1000:
        torch_npu._refuse(_NAME, "B and N must be below 1000.")
    elif heads_first and batch * heads > 8 * length:
        torch_npu._refuse(_NAME, f"B * N must be at most 8 * S; it is {batch * heads} for S = {length}.")


def _rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    _require(input, r1, r2, rotary_mode)
    torch_npu._log(_NAME, input, r1, r2, rotary_mode=rotary_mode)
    x = _device.on_cpu(input).float()
    cos, sin = (_device.on_cpu(table).to(input.dtype).float() for table in (r1, r2))
    if rotary_mode == "half":
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return _device.to_device((x * cos + turned * sin).to(input.dtype))


torch_npu._library.define(  # R1
    "npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor"
)
torch_npu._library.impl(_NAME, _rotary_mul, "PrivateUse1")

npu_rotary_mul = torch.ops.npu.npu_rotary_mul
