"""The table of this backend: for each kernel its op, its function, its constraints and its promise.

A function is named as text and imported by its first call, so that importing this package does not import triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from fusedops import Deviation, Kernel, kernel, ops
from fusedops.constraints import Capability, Constraint, Dim, DType, OneOf, ScaleGroups
from fusedops.quantization import SCALED
from fusedops_triton._constraints import (
    FEW_ROWS,
    GROUPED,
    LONGEST_ROW,
    MEAN_LENGTH,
    ORDER,
    PARTS,
    PLACE,
    PRODUCTS,
    TWO_FORMS,
    DecayOfHeads,
    HasScales,
    row_length,
    supported,
)


def _both(
    op: Callable[..., Any],
    forward: str,
    backward: str,
    *constraints: Constraint,
    gradients: tuple[Constraint, ...] | None = None,
    uses: str = "",
    rows: Literal[True] | str = True,
) -> tuple[Kernel, Kernel]:
    """Return the two kernels of an op.

    Args:
        op: the public function.
        forward: "family.module:function" in this package.
        backward: the same.
        *constraints: of forward.
        gradients: the constraints of backward; None where they are forward's.
        uses: the function of torch that computes a part.
        rows: the promise that rows are independent, or why not.
    """

    def one(direction: Literal["forward", "backward"], name: str, constraints: tuple[Constraint, ...]) -> Kernel:
        source = f"{uses}fusedops_triton/{name.partition(':')[0].replace('.', '/')}.py"
        declare = kernel(op, *constraints, direction=direction, source=source, rows_independent=rows)
        return declare(f"fusedops_triton.{name}")

    of_backward = constraints if gradients is None else gradients
    return one("forward", forward, constraints), one("backward", backward, of_backward)


def _whole_rows(name: str) -> Dim:
    """Return the constraint on the length of rows that a program holds whole, beside what modulates them."""
    return Dim(name, (-1,), at_most=8192)


def _summed_rows(name: str) -> tuple[Dim, ...]:
    """Return the same for backward, with the batches and tokens whose parts are programs along an axis of a grid."""
    return (_whole_rows(name), Dim(name, (0,), at_most=2**15), Dim(name, (1,), at_most=2**23))


#: Blocks of one scale, and a minimum, of 32 weights; and all formats with a tensor of scales.
_PACKED = (OneOf("format", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *SCALED), row_length("packed", 0))

#: The rows of experts are counted in 32 bits.
_ROUTED = (
    Dim("index", (0,), at_most=2**24),
    Dim("index", (1,), at_most=2**6),
    Dim("up", (-2, -1), at_most=LONGEST_ROW),
)

NONFINITE_KEYS = Deviation(
    "nonfinite-under-mask",
    "NaN or inf in a value that causal or a window hides from some queries may reach their rows, where one program has "
    "them and a query that sees it",
)
NONFINITE_SCORES = Deviation("nonfinite-scores", "a row whose scores are all -inf is 0, and the lse of inf is NaN")

KERNELS = (
    kernel(
        ops.sample,
        *supported("logits"),
        source="fusedops_triton/sampling/_sample.py",
        rows_independent=True,
    )("fusedops_triton.sampling._sample:sample"),
    kernel(
        ops.paged_attention,
        *supported("q"),
        Dim("q", (2,), at_most=256),  # a program holds whole rows
        Dim("v", (3,), at_most=256),
        source="fusedops_triton/attention/_paged.py",
        deviations=(NONFINITE_KEYS, NONFINITE_SCORES),
        rows_independent=True,
    )("fusedops_triton.attention._paged:paged_attention"),
    kernel(
        ops.store_kv,
        *supported("k"),
        Dim("k", (2,), at_most=2**14),  # a program holds whole rows
        Dim("v", (2,), at_most=2**14),
        source="fusedops_triton/attention/_store.py, torch.index_put_",
        rows_independent=True,
    )("fusedops_triton.attention._store:store_kv"),
    *_both(
        ops.merge_attention,
        "attention._merge:merge_forward",
        "attention._merge:merge_backward",
        *supported("out_a", "lse_a", "out_b", "lse_b"),
        Dim("out_a", (-1,), at_most=4096),  # a program holds whole rows
    ),
    kernel(
        ops.select_keys,
        *supported("q", "weights"),
        row_length("k", 1),
        source="fusedops_triton/attention/_select.py",
        rows_independent=True,
    )("fusedops_triton.attention._select:select_keys"),
    *_both(
        ops.sparse_attention,
        "attention._sparse:sparse_attention",
        "attention._sparse:sparse_attention_backward",
        *supported("q"),
        Dim("q", (-1,), at_most=1024),  # a program has a whole row of the gradient
        Dim("v", (-1,), at_most=512),  # a program has whole rows of some heads
    ),
    *_both(
        ops.bias_dropout,
        "bias._bias_dropout:bias_dropout",
        "bias._bias_dropout:dropout_backward",
        *supported("x", "bias"),
        gradients=supported("grad"),
        rows=PLACE,
    ),
    *_both(
        ops.bias_dropout_add,
        "bias._bias_dropout:dropout_forward",
        "bias._bias_dropout:dropout_backward",
        *supported("x", "bias", "residual"),
        gradients=supported("grad"),
        rows=PLACE,
    ),
    *_both(ops.bias_gelu, "bias._bias_gelu:gelu_forward", "bias._bias_gelu:gelu_backward", *supported("x", "bias")),
    *_both(
        ops.causal_conv1d,
        "convolution._causal_conv:causal_conv1d",
        "convolution._causal_conv_backward:causal_conv1d_backward",
        *supported("x", "weight", "bias"),
    ),
    *_both(
        ops.experts,
        "experts._experts:experts",
        "experts._experts:experts_backward",
        *supported("x", "up", "down"),
        *_ROUTED,
        uses="torch.nn.functional.grouped_mm, ",
        rows=GROUPED,
    ),
    *_both(
        ops.group_norm,
        "group_norm._group_norm:group_norm",
        "group_norm._group_norm:group_norm_backward",
        *supported("x"),
        Dim("x", (0, 1), at_most=2**15),  # a grid has so many programs along its second and third axis
        rows=PARTS,
    ),
    *_both(
        ops.grouped_matmul,
        "experts._grouped_matmul:products_forward",
        "experts._grouped_matmul:products_backward",
        *supported("x", "weight"),
        Dim("x", (0,), at_most=2**30),  # the rows are counted in 32 bits
        Dim("weight", (-2, -1), at_most=LONGEST_ROW),
        uses="torch.nn.functional.grouped_mm, ",
        rows=GROUPED,
    ),
    *_both(ops.geglu, "gated._gated:geglu", "gated._gated:geglu_backward", *supported("gate", "up")),
    *_both(ops.swiglu, "gated._gated:swiglu", "gated._gated:swiglu_backward", *supported("gate", "up")),
    *_both(
        ops.linear_attention,
        "linear_attention._linear_attention:linear_attention",
        "linear_attention._linear_attention_backward:linear_attention_backward",
        *supported("q", "k", "v", "decay", "beta", "initial_state"),
        DecayOfHeads("decay", 3),
        Dim("q", (1,), at_most=2**30),  # positions are counted in 32 bits
        Dim("q", (3,), at_most=256),  # rows of a state: a program has some columns of it in registers
        Dim("v", (3,), at_most=2**20),  # elements of a state are counted in 32 bits too
        rows=MEAN_LENGTH,
    ),
    *_both(
        ops.cross_entropy,
        "losses._cross_entropy:cross_entropy",
        "losses._cross_entropy:cross_entropy_backward",
        *supported("logits"),
        row_length("logits"),
    ),
    *_both(
        ops.linear_cross_entropy,
        "losses._linear_cross_entropy:linear_cross_entropy",
        "losses._linear_cross_entropy:linear_cross_entropy_backward",
        *supported("x", "weight"),
        row_length("weight", 0),
        uses="torch.mm, ",
        rows=PRODUCTS,
    ),
    *_both(
        ops.linear_log_probs,
        "losses._linear_log_probs:linear_log_probs",
        "losses._linear_log_probs:linear_log_probs_backward",
        *supported("x", "weight"),
        row_length("weight", 0),
        uses="torch.mm, ",
        rows=PRODUCTS,
    ),
    *_both(
        ops.gated_add,
        "modulated._modulated:gated_add",
        "modulated._modulated_backward:gated_add_backward",
        *supported("residual", "y", "gate"),
        _whole_rows("residual"),
        gradients=(*supported("grad", "y", "gate"), *_summed_rows("grad")),
    ),
    *_both(
        ops.gated_add_modulated_norm,
        "modulated._modulated:gated_add_modulated_norm",
        "modulated._modulated_backward:gated_add_modulated_norm_backward",
        *supported("residual", "y", "gate", "scale", "shift"),
        _whole_rows("residual"),
        gradients=(*supported("s", "y", "gate", "scale", "shift"), *_summed_rows("s")),
    ),
    *_both(
        ops.modulated_norm,
        "modulated._modulated:modulated_norm",
        "modulated._modulated_backward:modulated_norm_backward",
        *supported("x", "scale", "shift"),
        _whole_rows("x"),
        gradients=(*supported("x", "scale", "shift"), *_summed_rows("x")),
    ),
    *_both(
        ops.add_layer_norm,
        "norms._norm:add_layer_norm",
        "norms._norm_backward:add_layer_norm_backward",
        *supported("x", "residual"),
        gradients=supported("s"),
    ),
    *_both(
        ops.add_rms_norm,
        "norms._norm:add_rms_norm",
        "norms._norm_backward:add_rms_norm_backward",
        *supported("x", "residual"),
        gradients=supported("s"),
    ),
    *_both(
        ops.gated_rms_norm,
        "norms._gated_norm:gated_rms_norm",
        "norms._gated_norm:gated_rms_norm_backward",
        *supported("x", "gate"),
        Dim("x", (-1,), at_most=8192),  # of one group, a program holds the whole row
    ),
    *_both(ops.layer_norm, "norms._norm:layer_norm", "norms._norm_backward:layer_norm_backward", *supported("x")),
    *_both(ops.rms_norm, "norms._norm:rms_norm", "norms._norm_backward:rms_norm_backward", *supported("x")),
    kernel(
        ops.int8_linear,
        Capability("x", (8, 0)),
        DType("x", torch.float16, torch.bfloat16, torch.float32, torch.int8),
        DType("bias", torch.float16, torch.bfloat16, torch.float32),
        source="fusedops_triton/quantized/_int8.py",
        rows_independent=True,
    )("fusedops_triton.quantized._int8:int8_linear"),
    kernel(
        ops.int8_linear,
        *supported("grad"),
        direction="backward",
        source="torch.matmul, fusedops/ops/quantized/int8_linear.py",
        rows_independent=PRODUCTS,
    )("fusedops.ops.quantized.int8_linear:backward"),
    *_both(
        ops.quantized_linear,
        "quantized._quantized:quantized_linear",
        "quantized._quantized:quantized_linear_backward",
        *supported("x"),
        *_PACKED,
        gradients=(*supported("grad"), *_PACKED),
        uses="torch.mm, ",
        rows=ORDER,
    ),
    *_both(
        ops.quantized_experts,
        "experts._quantized_experts:quantized_experts",
        "experts._quantized_experts:quantized_experts_backward",
        *supported("x"),
        *map(HasScales, ("up", "down")),
        *(ScaleGroups(name, f"{name}_scales", f"{name}_format", 16, f"{name}_zeros") for name in ("up", "down")),
        *_ROUTED,
        uses="torch.nn.functional.grouped_mm, ",
        rows=GROUPED,
    ),
    *_both(
        ops.rotary_embedding,
        "rotary._rotary:rotary_embedding",
        "rotary._rotary:rotary_embedding_backward",
        *supported("q", "k", "cos", "sin"),
        gradients=supported("grad_rotated_q", "grad_rotated_k", "cos", "sin"),
    ),
    *_both(
        ops.top_k_routing,
        "routing._routing:top_k_routing",
        "routing._routing:top_k_routing_backward",
        *supported("logits"),
        Dim("logits", (-1,), at_most=4096),  # a program holds all experts
        rows=FEW_ROWS,
    ),
    *_both(
        ops.scaled_masked_softmax,
        "softmax._softmax:softmax_forward",
        "softmax._softmax:softmax_backward",
        *supported("x"),
        row_length("x"),
        gradients=(*supported("y"), row_length("y")),
        rows=TWO_FORMS,
    ),
)
