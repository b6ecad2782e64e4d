"""The launchers of the modulated norms and gated residuals (``src/elementwise/modulated.cpp``)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedops_cpu.launch.calls import results_of
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import Field, LibraryCall

SOURCE = "fusedops_cpu/src/elementwise/modulated.cpp"
Results = tuple[Tensor | None, ...]

_SHARED, _BY_BATCH, _BY_TOKEN = range(3)  # a GradientForm of ``src/api.h``


class Modulation(NamedTuple):
    """The arguments of the norm but its rows; ``scale`` None: no norm."""

    scale: Tensor | None = None
    shift: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    kind: str = "layer"
    offset: float = 0.0


class Gate(NamedTuple):
    """A tensor that is added to the rows, and its gate; ``y`` None: nothing."""

    y: Tensor | None = None
    gate: Tensor | None = None
    activation: str = "none"


def forward(rows: Tensor, gate: Gate, norm: Modulation, eps: float, save: bool) -> LibraryCall:
    """Return the call that computes z, s, the mean and rstd; None for what the arguments do not give.

    Args:
        rows: (B, S, H), float32, bfloat16 or float16, any strides.
        gate: y of the shape and dtype of rows, any strides; a gate that broadcasts to it, of any of the dtypes.
        norm: a scale and shift that broadcast to rows, a weight and bias (H,), of any of the dtypes.
        eps: added to the mean square.
        save: return the mean and rstd, (B, S), float32.
    """
    rows = dense(rows)
    y = gate.y if gate.y is None else dense(gate.y)
    z = None if norm.scale is None else torch.empty_like(rows)
    s = None if y is None else torch.empty_like(rows)
    mean = rows.new_empty(rows.shape[:-1], dtype=torch.float32) if save else None
    rstd = None if mean is None else torch.empty_like(mean)
    weight, bias = _vectors(norm)
    of_repeated = (*_repeated(norm.scale), *_repeated(norm.shift), *_repeated(gate.gate))
    numbers = (*_dtypes(rows, weight, bias), *rows.shape, int(norm.kind == "layer"), *_gate_numbers(gate))
    fields = (rows, y, weight, bias, z, s, mean, rstd, *of_repeated, *numbers, eps, norm.offset)
    return LibraryCall(library().modulated_forward, fields, (z, s, mean, rstd))


def backward(
    grad_z: Tensor | None,
    grad_s: Tensor | None,
    s: Tensor,
    saved: tuple[Tensor, Tensor] | None,
    gate: Gate,
    norm: Modulation,
    needs: tuple[bool, ...],
) -> LibraryCall | Results:
    """Return the gradients of rows, y, gate, scale, shift, weight and bias, or the call that computes them.

    Args:
        grad_z: (B, S, H), the gradient of z, of the dtype of s, any strides; None without a norm.
        grad_s: the same of s, or None without a gate.
        s: (B, S, H), what was normalized; read where there is a norm.
        saved: the mean and rstd, (B, S), float32; None without a norm.
        gate: as in the forward.
        norm: as in the forward; the values of shift are not read.
        needs: the gradients to compute; the others are None.

    Returns:
        Contiguous, of the shapes and dtypes of the arguments. Sums over rows are in float32, in one order.
    """
    y = gate.y if gate.y is None else dense(gate.y)
    like = torch.contiguous_format
    ds, dy = (torch.empty_like(s, memory_format=like) if need else None for need in needs[:2])
    repeated = (gate.gate, norm.scale, norm.shift)
    of_repeated = [_gradient(each, s) if need else (None, 0) for each, need in zip(repeated, needs[2:5])]
    weight, bias = _vectors(norm)
    vectors = [
        None if each is None or not need else torch.empty_like(each, memory_format=like)
        for each, need in zip((weight, bias), needs[5:])
    ]
    gradients = (ds, dy, *(out for out, _ in of_repeated), *vectors)
    if not s.numel():
        return tuple(
            None if out is None else torch.zeros_like(out if of is None else of, memory_format=like)
            for out, of in zip(gradients, (None, None, *repeated, None, None))
        )
    mean, rstd = (None, None) if saved is None else (dense(each) for each in saved)
    tensors: tuple[Field, ...] = (
        None if grad_z is None else dense(grad_z),
        None if grad_s is None else dense(grad_s),
        None if grad_z is None else dense(s),
        y,
        weight,
        bias,
        mean if norm.kind == "layer" else None,
        rstd,
        ds,
        dy,
        *vectors,
        *of_repeated[1],
        *of_repeated[2],
        *of_repeated[0],
        *_repeated(norm.scale),
        None,
        0 if norm.shift is None else DTYPE_CODES[norm.shift.dtype],
        0,
        0,
        *_repeated(gate.gate),
    )
    fields = (*tensors, *_dtypes(s, weight, bias), *s.shape, *_gate_numbers(gate), norm.offset)
    call = LibraryCall(library().modulated_backward, fields, gradients)
    if all(out is None or of is None or _is_like(out, of) for (out, _), of in zip(of_repeated, repeated)):
        return call
    ds, dy, *others = results_of(call)
    reduced = [None if of is None else _reduced(out, of) for out, of in zip(others, repeated)]
    return ds, dy, *reduced, *others[3:]


def _vectors(norm: Modulation) -> tuple[Tensor | None, Tensor | None]:
    weight, bias = (each if each is None else dense(each) for each in (norm.weight, norm.bias))
    return weight, bias


def _repeated(tensor: Tensor | None) -> tuple[Field, int, int, int]:
    """Return the fields of a Repeated of ``src/api.h``. Numbers that are not next to each other in a row are copied."""
    if tensor is None:
        return None, 0, 0, 0
    if tensor.is_neg() or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
        tensor = tensor.resolve_neg().contiguous()
    batch, token = (0, 0) if tensor.dim() == 1 else tensor.stride()[:2]
    shape = (1, 1, *tensor.shape)[-3:]
    return tensor, DTYPE_CODES[tensor.dtype], batch if shape[0] > 1 else 0, token if shape[1] > 1 else 0


def _gradient(tensor: Tensor | None, rows: Tensor) -> tuple[Tensor | None, int]:
    """Return memory for the gradient of what repeats over rows, and its GradientForm."""
    if tensor is None:
        return None, 0
    batches, tokens, columns = (1, 1, *tensor.shape)[-3:]
    if tokens > 1:
        return rows.new_empty((*rows.shape[:-1], columns), dtype=torch.float32), _BY_TOKEN
    form = _BY_BATCH if batches > 1 else _SHARED
    return torch.empty_like(tensor, memory_format=torch.contiguous_format), form


def _is_like(result: Tensor, tensor: Tensor) -> bool:
    return result.shape == tensor.shape and result.dtype is tensor.dtype


def _reduced(result: Tensor | None, tensor: Tensor) -> Tensor | None:
    """Return a gradient by token in the shape and dtype of its tensor: the sum over batches, in their order."""
    if result is None or _is_like(result, tensor):
        return result
    if result.shape[0] != tensor.shape[0]:
        total = result[:1].clone()
        for batch in range(1, result.shape[0]):
            total += result[batch]
        result = total
    return result.to(tensor.dtype)


def _dtypes(rows: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[int, ...]:
    """Return the codes of the dtypes; 0 for None."""
    return DTYPE_CODES[rows.dtype], *(0 if each is None else DTYPE_CODES[each.dtype] for each in (weight, bias))


def _gate_numbers(gate: Gate) -> tuple[int, int]:
    """Return 1 for a gate with one number for a row of several, and 1 for tanh."""
    by_row = gate.gate is not None and gate.y is not None and gate.gate.shape[-1] != gate.y.shape[-1]
    return int(by_row), int(gate.activation == "tanh")
