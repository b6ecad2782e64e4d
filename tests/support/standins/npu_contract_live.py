"""Run by npu_contract.py, where torch_npu can be imported though there is no CANN: prints what it found, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch_npu
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch_npu.op_plugin.meta import _meta_registrations

from fusedops_npu.attention.attention import attention, attention_backward
from fusedops_npu.bias.bias_gelu import bias_gelu, bias_gelu_backward
from fusedops_npu.experts.grouped_matmul import grouped_matmul, grouped_matmul_backward
from fusedops_npu.gated.geglu import geglu
from fusedops_npu.gated.swiglu import swiglu, swiglu_backward
from fusedops_npu.group_norm.group_norm import group_norm
from fusedops_npu.linear_attention.linear_attention import linear_attention
from fusedops_npu.losses.cross_entropy import cross_entropy, cross_entropy_backward
from fusedops_npu.norms.add_rms_norm import add_rms_norm, add_rms_norm_backward
from fusedops_npu.norms.rms_norm import rms_norm, rms_norm_backward
from fusedops_npu.rotary.rotary_embedding import rotary_embedding
from fusedops_npu.routing.top_k_routing import top_k_routing
from fusedops_npu.softmax.scaled_masked_softmax import scaled_masked_softmax, scaled_masked_softmax_backward

OPS = (
    "npu_scaled_masked_softmax",
    "npu_scaled_masked_softmax_backward",
    "npu_gelu",
    "npu_gelu_backward",
    "npu_rms_norm",
    "npu_rms_norm_backward",
    "npu_swiglu",
    "npu_swiglu_backward",
    "npu_geglu",
    "npu_geglu_grad",
    "npu_group_norm_silu",
    "npu_rotary_mul",
    "npu_cross_entropy_loss",
    "npu_cross_entropy_loss_backward",
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
    "npu_grouped_matmul",
    "npu_moe_gating_top_k",
    "npu_recurrent_gated_delta_rule",
)


class Seen(TorchDispatchMode):
    """Note the vendor's ops that run, with their arguments that are not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "npu":
            names = [argument.name for argument in func._schema.arguments]
            given = [name if isinstance(arg, torch.Tensor) else f"{name}={arg!r}" for name, arg in zip(names, args)]
            options = {name: value for name, value in (kwargs or {}).items() if value is not None}
            given += [
                name if isinstance(value, torch.Tensor) else f"{name}={value!r}" for name, value in options.items()
            ]
            self.calls.append(f"{func._schema.name.removeprefix('npu::')}({', '.join(given)})")
        return func(*args, **(kwargs or {}))


def calls(function: Callable[[], Any]) -> list[str]:
    with Seen() as seen:
        function()
    return seen.calls


def main() -> None:
    failures: list[str] = []
    derivatives: dict[str, str] = {}
    # the shape function of attention asks the device for its version, for a warning about dropout
    _meta_registrations.get_soc_version = lambda: 0
    with FakeTensorMode():
        x = torch.empty(2, 4, 64, 96, dtype=torch.bfloat16, device="npu:0", requires_grad=True)
        mask = torch.empty(2, 1, 64, 96, dtype=torch.bool, device="npu:0")
        for forward in (
            lambda: torch_npu.npu_scaled_masked_softmax(x, mask, 0.5, False),
            lambda: torch_npu.npu_gelu(x, approximate="tanh"),
            lambda: torch_npu.npu_rms_norm(x, x[0, 0, 0].detach())[0],
            lambda: torch_npu.npu_swiglu(x),
            lambda: torch_npu.npu_fusion_attention(x, x, x, 4, "BNSD")[0],
        ):
            (made,) = calls(forward)
            y = forward()
            (derivatives[made],) = calls(lambda y=y: torch.autograd.grad(y, x, torch.empty_like(y)))
        x = x.detach()
        weight, rstd = x[0, 0, 0], torch.empty(2, 4, 64, dtype=torch.float32, device="npu:0")
        two, three, dtype = (True, True), (True, True, True), torch.bfloat16
        target = torch.empty(2, 4, 64, dtype=torch.int64, device="npu:0")
        keys = torch.empty(2, 2, 96, 96, dtype=torch.bfloat16, device="npu:0")
        options = (-100, 0.0, 0.0, None, "mean", None)
        rows, ends = x[0, 0], torch.empty(4, dtype=torch.int64, device="npu:0")
        stack = torch.empty(4, 96, 96, dtype=torch.bfloat16, device="npu:0")
        # npu_geglu_grad is not called: its meta function returns two tensors for one (torch_npu 2.13)
        kernels: dict[str, Callable[[], Any]] = {
            "npu_scaled_masked_softmax": lambda: scaled_masked_softmax.function(x, mask, 0.5, False),
            "npu_scaled_masked_softmax_backward": lambda: scaled_masked_softmax_backward.function(x, x, 0.5, False),
            "npu_gelu": lambda: bias_gelu.function(x, x[0, 0, 0], "tanh"),
            "npu_gelu_backward": lambda: bias_gelu_backward.function(x, x, x[0, 0, 0], "none", (True, True)),
            "npu_rms_norm": lambda: rms_norm.function(x, weight, 1e-6, 0.0, True),
            "npu_rms_norm_backward": lambda: rms_norm_backward.function(x, x, rstd, weight, 0.0, two),
            "npu_rms_norm of a sum": lambda: add_rms_norm.function(x, x, weight, 1e-6, 1.0, True),
            "npu_rms_norm_backward of a sum": lambda: add_rms_norm_backward.function(
                x, x, x, rstd, None, 0.0, dtype, three
            ),
            "npu_cross_entropy_loss": lambda: cross_entropy.function(x, target, *options, True),
            "npu_cross_entropy_loss_backward": lambda: cross_entropy_backward.function(
                rstd[0, 0, 0], x, None, rstd, target, *options
            ),
            "npu_fusion_attention": lambda: attention.function(x, keys, keys, mask, None, "none", None, False),
            "npu_fusion_attention of a window": lambda: attention.function(
                x, keys, keys, None, 0.5, "lower_right", (7, 0), False
            ),
            "npu_fusion_attention_grad": lambda: attention_backward.function(
                x, rstd, x, keys, keys, mask, x, rstd, None, "none", None, False, three
            ),
            "npu_grouped_matmul": lambda: grouped_matmul.function(rows, stack, ends, None, False),
            "npu_grouped_matmul for the gradient of x": lambda: grouped_matmul_backward.function(
                rows, rows, stack, ends, None, False, (True, False, False)
            ),
            "npu_grouped_matmul for the gradient of the weight": lambda: grouped_matmul_backward.function(
                rows, rows, stack, ends, None, False, (False, True, False)
            ),
            "npu_moe_gating_top_k": lambda: top_k_routing.function(
                rows, 8, "sigmoid", x[0, 0, 0], 8, 4, "top2", True, 1e-20, 2.5, None
            ),
            "npu_recurrent_gated_delta_rule": lambda: linear_attention.function(
                x, x, x, x[..., 0].float(), x[..., 0], None, True, None, True, None
            ),
            "npu_recurrent_gated_delta_rule with a decay of each row": lambda: linear_attention.function(
                x, x, x, x, x[..., 0], 0.5, True, x.new_empty(2, 64, 96, 96), True, None
            ),
            "npu_geglu": lambda: geglu.function(x, None, "tanh", False),
            "npu_group_norm_silu": lambda: group_norm.function(x, 2, None, None, 1e-5, "silu", False),
            "npu_rotary_mul": lambda: rotary_embedding.function(x, None, x[0, 0, :, :48], x[0, 0, :, :48], False, -2),
            "npu_swiglu": lambda: swiglu.function(x, None, None, 1.0, 0.0, False),
            "npu_swiglu_backward": lambda: swiglu_backward.function(
                x[..., :48], x, None, None, 1.0, 0.0, False, (True, False)
            ),
        }
        for op, kernel in kernels.items():
            made = calls(kernel)
            if [call.partition("(")[0] for call in made] != [op.partition(" ")[0]]:
                failures.append(f"fusedops's kernel for {op} made the vendor's calls {made}; needs that one alone")
    schemas = {op: str(getattr(torch.ops.npu, op).default._schema) for op in OPS}
    exposed = [op for op in OPS if not hasattr(torch_npu, op)]
    failures += [f"torch_npu has no {op}" for op in exposed]
    print(json.dumps({"schemas": schemas, "derivatives": derivatives, "failures": failures}))


main()
