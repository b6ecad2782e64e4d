"""The table of this backend: for each kernel its op, its function and its promise. None has a constraint.

A function is named as text and imported by its first call, or is one of ``_reference.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from fusedops import Kernel, kernel, ops
from fusedops_eager._reference import backward_of, forward_of
from fusedops_eager._row_order import PLACE, PRODUCTS, SUMS, VECTORS, on_cpu
from fusedops_eager.norms._errors import add_layer_norm_overflows, layer_norm_overflows

_Promise = Literal[True] | str | dict[str, Literal[True] | str]
_Function = str | Callable[..., Any]


def _both(
    op: Callable[..., Any],
    forward: _Function,
    backward: _Function,
    rows: _Promise,
    uses: str = "",
    backward_uses: str = "",
    backward_error: Callable[..., Any] | None = None,
    backward_rows: _Promise | None = None,
) -> tuple[Kernel, Kernel]:
    """Return the two kernels of an op.

    Args:
        op: the public function.
        forward: "family.module:function" in this package, or a function.
        backward: the same.
        rows: the promise that rows are independent, or why not.
        uses: the functions of torch that compute a part of forward.
        backward_uses: the functions of torch that compute a part of backward.
        backward_error: ``extra_error`` of backward.
        backward_rows: the promise of backward. None: that of forward.
    """

    def one(direction: Literal["forward", "backward"], named: _Function, uses: str, rows: _Promise) -> Kernel:
        module = named.partition(":")[0] if isinstance(named, str) else "_reference"
        source = f"{uses}fusedops_eager/{module.replace('.', '/')}.py"
        error = backward_error if direction == "backward" else None
        declare = kernel(op, direction=direction, source=source, rows_independent=rows, extra_error=error)
        return declare(f"fusedops_eager.{named}" if isinstance(named, str) else named)

    return (
        one("forward", forward, uses, rows),
        one("backward", backward, backward_uses, rows if backward_rows is None else backward_rows),
    )


def _formulas(op: Callable[..., Any], rows: _Promise) -> tuple[Kernel, Kernel]:
    """Return the two kernels of an op that compute its formulas."""
    return _both(op, forward_of(op.__name__), backward_of(op.__name__), rows)


_PAGED, _STORE = "attention.paged_attention:paged_attention", "attention.store_kv:store_kv"
_SELECT, _SPARSE = "attention.select_keys:select_keys", "attention.sparse_attention:sparse_attention"
KERNELS = (
    *_both(ops.attention, "attention._attention:attention", "attention._attention:attention_backward", PRODUCTS),
    *_both(
        ops.merge_attention,
        "attention.merge_attention:merge_attention",
        "attention.merge_attention:merge_attention_backward",
        VECTORS,
    ),
    *_both(
        ops.varlen_attention,
        "attention.varlen_attention:varlen_attention",
        "attention.varlen_attention:varlen_attention_backward",
        PRODUCTS,
    ),
    _both(ops.paged_attention, _PAGED, _PAGED, PRODUCTS)[0],
    _both(ops.select_keys, _SELECT, _SELECT, PRODUCTS)[0],
    *_both(ops.sparse_attention, _SPARSE, f"{_SPARSE}_backward", PRODUCTS),
    _both(ops.store_kv, _STORE, _STORE, True)[0],
    *_formulas(ops.bias_dropout, PLACE),
    *_formulas(ops.bias_dropout_add, PLACE),
    *_both(ops.bias_gelu, "bias._gelu:gelu_forward", "bias._gelu:gelu_backward", VECTORS),
    *_both(
        ops.causal_conv1d,
        "convolution._causal_conv:causal_conv1d",
        "convolution._causal_conv:causal_conv1d_backward",
        VECTORS,
    ),
    *_both(ops.experts, "experts._experts:experts", "experts._experts:experts_backward", PRODUCTS, "torch.mm, "),
    *_both(
        ops.grouped_matmul,
        "experts._grouped:forward",
        "experts._grouped:backward",
        PRODUCTS,
        "torch.mm, torch.nn.functional.grouped_mm, ",
    ),
    *_formulas(ops.geglu, VECTORS),
    *_both(ops.swiglu, "gated._gated:swiglu_forward", backward_of("swiglu"), VECTORS),
    *_both(ops.group_norm, "group_norm.group_norm:group_norm", "group_norm.group_norm:group_norm_backward", VECTORS),
    *_both(ops.linear, "linear.linear:linear", backward_of("linear"), PRODUCTS),
    *_both(
        ops.linear_attention,
        "linear_attention._linear_attention:linear_attention",
        "linear_attention._linear_attention:linear_attention_backward",
        PRODUCTS,
    ),
    *_both(
        ops.cross_entropy,
        "losses._cross_entropy:cross_entropy",
        "losses._cross_entropy:cross_entropy_backward",
        VECTORS,
    ),
    *_both(
        ops.linear_cross_entropy,
        "losses._linear_cross_entropy:linear_cross_entropy",
        "losses._linear_cross_entropy:linear_cross_entropy_backward",
        PRODUCTS,
        "torch.mm, ",
    ),
    *_both(
        ops.linear_log_probs,
        "losses._linear_log_probs:linear_log_probs",
        "losses._linear_log_probs:linear_log_probs_backward",
        PRODUCTS,
        "torch.mm, ",
    ),
    *_formulas(ops.gated_add, VECTORS),
    *_formulas(ops.gated_add_modulated_norm, VECTORS),
    *_formulas(ops.modulated_norm, VECTORS),
    *_both(
        ops.add_layer_norm,
        "norms._norms:add_layer_norm",
        "norms._norms:add_layer_norm_backward",
        on_cpu(),
        "torch.native_layer_norm, ",
        backward_uses="torch.native_layer_norm_backward, ",
        backward_error=add_layer_norm_overflows,
    ),
    *_both(
        ops.add_rms_norm, "norms._norms:add_rms_norm", "norms._norms:add_rms_norm_backward", SUMS, "torch.rms_norm, "
    ),
    *_formulas(ops.gated_rms_norm, VECTORS),
    *_both(
        ops.layer_norm,
        "norms._norms:layer_norm",
        "norms._norms:layer_norm_backward",
        on_cpu(),
        "torch.native_layer_norm, ",
        backward_uses="torch.native_layer_norm_backward, ",
        backward_error=layer_norm_overflows,
    ),
    *_both(ops.rms_norm, "norms._norms:rms_norm", "norms._norms:rms_norm_backward", SUMS, "torch.rms_norm, "),
    *_both(
        ops.int8_linear,
        "quantized.int8_linear:int8_linear",
        backward_of("int8_linear"),
        True,
        "torch.matmul, ",
        backward_rows=PRODUCTS,
    ),
    *_both(
        ops.quantized_experts,
        "experts.quantized_experts:quantized_experts",
        "experts.quantized_experts:quantized_experts_backward",
        PRODUCTS,
        "torch.mm, ",
    ),
    *_both(
        ops.quantized_linear,
        "quantized.quantized_linear:quantized_linear",
        "quantized.quantized_linear:quantized_linear_backward",
        PRODUCTS,
        "torch.addmm, ",
        backward_uses="torch.addmm, ",
    ),
    *_both(
        ops.rotary_embedding, "rotary._rotary:rotary_embedding", "rotary._rotary:rotary_embedding_backward", VECTORS
    ),
    *_formulas(ops.top_k_routing, on_cpu()),
    _both(ops.sample, forward_of("sample"), forward_of("sample"), on_cpu())[0],
    *_both(ops.scaled_masked_softmax, "softmax._softmax:softmax_forward", "softmax._softmax:softmax_backward", VECTORS),
)
