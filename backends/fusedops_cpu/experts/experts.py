"""experts in the compiled library (``src/dot/experts.cpp``, ``experts_backward.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import ops
from fusedops.ops.experts.arguments import (
    GATED,
    LORA,
    ExpertsArgs,
    ExpertsGradArgs,
    QuantizedExpertsArgs,
    QuantizedExpertsGradArgs,
)
from fusedops_cpu._constraints import any_dtype
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.library import ACTIVATION_CODES, DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import Field, LibraryCall

_TENSORS = ("x", "weights", "up", "down", "up_bias", "down_bias", *LORA)


@library_kernel(
    ops.experts,
    *any_dtype(*_TENSORS),
    source="fusedops_cpu/src/dot/experts.cpp",
    rows_independent=True,
)
def experts(a: ExpertsArgs, save: bool) -> LibraryCall:
    """Compute each expert on the rows that chose it. The bits of a token do not depend on the other tokens."""
    tensors = every_dense(a.x, a.index, a.weights, a.up, a.down, a.up_bias, a.down_bias)
    y = torch.empty_like(a.x, memory_format=torch.contiguous_format)
    hidden = a.x.new_empty((a.index.numel(), a.up.shape[2 if a.transposed else 1])) if save else None
    options = (*options_of(a.activation, a.limit, a.alpha, a.offset, a.interleaved, a.transposed), *factors_of(a))
    fields = (*tensors, y, hidden, *dtypes_of(tensors), *_sizes(a.index, a.down, a.transposed), *options)
    return LibraryCall(library().experts_forward, fields, (y, hidden))


@library_kernel(
    ops.experts,
    *any_dtype("grad", *_TENSORS),
    direction="backward",
    source="fusedops_cpu/src/dot/experts_backward.cpp",
    rows_independent=True,
)
def experts_backward(a: ExpertsGradArgs) -> LibraryCall:
    """Compute the gradients from the inputs and the up-projections of forward."""
    tensors = every_dense(a.x, a.index, a.weights, a.up, a.down, a.up_bias, a.down_bias)
    factors = (a.up_lora, a.up_lora_b, a.down_lora, a.down_lora_b)
    results = empty_results((a.x, a.weights, a.up, a.down, a.up_bias, a.down_bias, *factors), a.needs)
    inputs = (dense(a.grad), *tensors[:5], tensors[6], dense(a.hidden))
    options = (*options_of(a.activation, a.limit, a.alpha, a.offset, a.interleaved, a.transposed), *factors_of(a))
    fields = (*inputs, *results, *dtypes_of(tensors), *_sizes(a.index, a.down, a.transposed), *options)
    return LibraryCall(library().experts_backward, fields, results)


def empty_results(tensors: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """Return empty tensors for the gradients that are wanted."""
    return tuple(
        torch.empty_like(tensor, memory_format=torch.contiguous_format) if tensor is not None and need else None
        for tensor, need in zip(tensors, needs)
    )


def factors_of(a: ExpertsArgs | ExpertsGradArgs | QuantizedExpertsArgs | QuantizedExpertsGradArgs) -> tuple[Field, ...]:
    """Return the fields of the factors of LoRA and of their scale."""
    fields: list[Field] = []
    for first, second in ((a.up_lora, a.up_lora_b), (a.down_lora, a.down_lora_b)):
        if first is None or second is None:
            fields += [None, None, 0, 0, 0]
        else:
            fields += [dense(first), dense(second), DTYPE_CODES[first.dtype], DTYPE_CODES[second.dtype], first.shape[1]]
    return (*fields, a.lora_scale)


def every_dense(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return tensors whose memory holds their values in order."""
    return tuple(None if tensor is None else dense(tensor) for tensor in tensors)


def dtypes_of(tensors: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    """Return the codes of the dtypes, and for the index the bytes of a number."""
    return tuple(0 if tensor is None else DTYPE_CODES.get(tensor.dtype, tensor.element_size()) for tensor in tensors)


def _sizes(index: Tensor, down: Tensor, transposed: bool) -> tuple[int, ...]:
    """Return the numbers of tokens, choices and experts, the width of a token and that of an activation."""
    inner, width = down.shape[1:] if transposed else (down.shape[2], down.shape[1])
    return (*index.shape, down.shape[0], width, inner)


def options_of(
    activation: str, limit: float | None, alpha: float, offset: float, interleaved: bool, transposed: bool
) -> tuple[float, ...]:
    """Return the fields of the activation, and whether weights are transposed."""
    if activation not in GATED:
        limit, alpha, offset = None, 1.0, 0.0
    bound = float("nan") if limit is None else limit
    return (ACTIVATION_CODES[activation], interleaved, transposed, bound, alpha, offset)
