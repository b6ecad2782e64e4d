"""quantized_experts in the compiled library (``src/dot/experts.cpp``, ``experts_backward.cpp``)."""

from __future__ import annotations

import torch

from fusedops import ops
from fusedops.constraints import ScaleGroups
from fusedops.ops.experts.arguments import LORA, QuantizedExpertsArgs, QuantizedExpertsGradArgs
from fusedops.quantization import weights_of_row
from fusedops_cpu._constraints import any_dtype
from fusedops_cpu.experts.experts import dtypes_of, empty_results, every_dense, factors_of, options_of
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.library import library
from fusedops_cpu.launch.struct_call import Field, LibraryCall
from fusedops_cpu.quantized.quantized_linear import weight_fields

_TENSORS = ("x", "weights", "up_bias", "down_bias", *LORA)
# of 32 columns, which have one scale
_WHOLE_BLOCKS = (
    ScaleGroups("up", "up_scales", "up_format", 32, "up_zeros"),
    ScaleGroups("down", "down_scales", "down_format", 32, "down_zeros"),
)


@library_kernel(
    ops.quantized_experts,
    *any_dtype(*_TENSORS),
    *_WHOLE_BLOCKS,
    source="fusedops_cpu/src/dot/experts.cpp",
    rows_independent=True,
)
def quantized_experts(a: QuantizedExpertsArgs, save: bool) -> LibraryCall:
    """Compute each expert on the rows that chose it, by the products of quantized_linear."""
    tensors = every_dense(a.x, a.index, a.weights, None, None, a.up_bias, a.down_bias)
    y = torch.empty_like(a.x, memory_format=torch.contiguous_format)
    hidden = a.x.new_empty((a.index.numel(), a.up.shape[1])) if save else None
    fields = (*tensors, y, hidden, *dtypes_of(tensors), *_sizes(a), *_options(a), *_weights(a))
    return LibraryCall(library().quantized_experts_forward, fields, (y, hidden))


@library_kernel(
    ops.quantized_experts,
    *any_dtype("grad", *_TENSORS),
    *_WHOLE_BLOCKS,
    direction="backward",
    source="fusedops_cpu/src/dot/experts_backward.cpp",
    rows_independent=True,
)
def quantized_experts_backward(a: QuantizedExpertsGradArgs) -> LibraryCall:
    """Compute the gradients but those of up and down from the inputs and the up-projections of forward."""
    tensors = every_dense(a.x, a.index, a.weights, None, None, a.up_bias, a.down_bias)
    factors = (a.up_lora, a.up_lora_b, a.down_lora, a.down_lora_b)
    results = empty_results((a.x, a.weights, a.up_bias, a.down_bias, *factors), a.needs)
    inputs = (*every_dense(a.grad), *tensors[:5], tensors[6], *every_dense(a.hidden))
    fields = (*inputs, *results[:2], None, None, *results[2:], *dtypes_of(tensors), *_sizes(a), *_options(a))
    return LibraryCall(library().quantized_experts_backward, (*fields, *_weights(a)), results)


def _sizes(a: QuantizedExpertsArgs | QuantizedExpertsGradArgs) -> tuple[int, ...]:
    """Return the numbers of tokens, choices and experts, the width of a token and that of an activation."""
    return (*a.index.shape, *a.down.shape[:2], weights_of_row(a.down.shape[2], a.down_format or ""))


def _options(a: QuantizedExpertsArgs | QuantizedExpertsGradArgs) -> tuple[Field, ...]:
    return (*options_of(a.activation, a.limit, a.alpha, a.offset, a.interleaved, False), *factors_of(a))


def _weights(a: QuantizedExpertsArgs | QuantizedExpertsGradArgs) -> tuple[Field, ...]:
    # formats are texts, by the op's constraints
    return (
        *weight_fields(a.up_format or "", a.up, a.up_scales, a.up_global_scale, a.up_zeros),
        *weight_fields(a.down_format or "", a.down, a.down_scales, a.down_global_scale, a.down_zeros),
    )
