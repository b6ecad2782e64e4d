"""Rows of a call: calls of some rows of another one, and the comparison of their results, row by row and bit by bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.evidence import Rows
from fusedops._contract.op import Op
from fusedops.testing._subject import Subject

Real = Mapping[str, Any]  # the arguments of a call by name, tensors real
Results = Mapping[str, Tensor]  # the results that have rows, by the name of the output, or of the gradient's argument

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def taken(rows: Rows, call: Real, index: Sequence[int]) -> dict[str, Any]:
    """Return the call of some rows of another one, in the order of ``index``; of consecutive ones with ``up_to``."""
    some = {**call, **{name: _some(rows, name, call[name], index, call) for name in rows.dims if name in call}}
    for offsets in set(rows.packed.values()):
        counts = [int(call[offsets][row + 1] - call[offsets][row]) for row in index]
        some[offsets] = torch.tensor([0, *accumulate(counts)]).to(call[offsets])
    for name, dim in rows.up_to.items():
        later = next(call[name].shape[dim] for name, dim in rows.dims.items() if name in call) - 1 - index[-1]
        some[name] = call[name].narrow(dim, 0, call[name].shape[dim] - later).contiguous()
    return some


def _some(rows: Rows, name: str, tensor: Any, index: Sequence[int], call: Real) -> Any:
    """Return some rows of an argument or result; the parts of positions are joined where it is packed."""
    if not isinstance(tensor, Tensor):
        return tensor
    positions: Sequence[int] = index
    if name in rows.packed:
        bounds = call[rows.packed[name]].tolist()
        positions = [at for row in index for at in range(bounds[row], bounds[row + 1])]
        if isinstance(index, range):
            positions = range(bounds[index[0]], bounds[index[-1] + 1])
    if isinstance(positions, range):  # in dim 0 a part of the same memory, at any address
        return tensor.narrow(rows.dims[name], positions.start, len(positions)).contiguous()
    return tensor.index_select(rows.dims[name], torch.tensor(positions, dtype=torch.long, device=tensor.device))


def filled(rows: Rows, call: Real, count: int, value: float) -> dict[str, Any]:
    """Return the call with a number in the floating tensors of its last ``count`` rows."""
    real = dict(call)
    for name, dim in rows.dims.items():
        tensor = call.get(name)
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            length = count
            if name in rows.packed:
                bounds = call[rows.packed[name]]
                length = int(bounds[-1] - bounds[-1 - count])
            real[name] = tensor.clone()
            real[name].narrow(dim, tensor.shape[dim] - length, length).fill_(value)
    return real


def moved(call: Real, elements: int) -> dict[str, Any]:
    """Return the call with each tensor at an address that is so many elements behind the start of its memory."""
    real = dict(call)
    for name, value in call.items():
        if isinstance(value, Tensor):
            memory = value.new_empty(value.numel() + elements)
            real[name] = memory[elements:].view(value.shape).copy_(value)
    return real


def results(subject: Subject, rows: Rows, call: Real, grads: Results | None) -> dict[str, Tensor]:
    """Return the results of a call that have rows: the outputs, or with ``grads`` the gradients."""
    op = subject.op
    if grads is None:
        with torch.no_grad():
            return _outputs(op, rows, subject.public(*call.values()))
    wanted = [name for name in op.differentiable if name in rows.dims and isinstance(call[name], Tensor)]
    real = {name: value.detach().requires_grad_() if name in wanted else value for name, value in call.items()}
    outputs = _outputs(op, rows, subject.public(*real.values()))
    chosen = [name for name in grads if name in outputs]
    gradients = torch.autograd.grad(
        [outputs[name] for name in chosen],
        [real[name] for name in wanted],
        [grads[name] for name in chosen],
    )
    return dict(zip(wanted, gradients))


def _outputs(op: Op, rows: Rows, returned: Any) -> dict[str, Tensor]:
    named = zip(op.outputs, op.as_tuple(returned))
    return {name: y for name, y in named if name in rows.dims and isinstance(y, Tensor)}


def gradients_of(rows: Rows, call: Real, outputs: Results) -> dict[str, Tensor]:
    """Return random gradients of the outputs."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(y.shape, generator=generator).to(y) for name, y in outputs.items() if y.is_floating_point()
    }


def some_of(rows: Rows, call: Real, tensors: Results, index: Sequence[int]) -> dict[str, Tensor]:
    """Return some rows of results."""
    return {name: _some(rows, name, tensor, index, call) for name, tensor in tensors.items()}


def assert_same_rows(
    rows: Rows, call: Real, want: Results, got: Results, index: Sequence[int], what: str, gradient: bool
) -> None:
    """Assert that results of some rows of a call have the bits of those rows in the results of the whole call.

    ``index`` has the rows of the whole that are compared; there may be more rows behind them.
    """
    for name, whole in want.items():
        wanted = _some(rows, name, whole, index, call)
        dim = rows.dims[name]
        tensor = got[name].narrow(dim, 0, wanted.shape[dim])
        if torch.equal(_as_integers(tensor), _as_integers(wanted)):
            continue
        differs = (_as_integers(tensor) != _as_integers(wanted)) & ~(tensor.isnan() & wanted.isnan()).cpu()
        if differs.any():  # the payload of a NaN is no part of a result
            result = f"the gradient of {name}" if gradient else name
            seen = _first_difference(rows, name, call, tensor, wanted, differs, index)
            raise AssertionError(f"{what}: got {seen} of {result}, expected the same bits as in the whole call")


def _first_difference(
    rows: Rows, name: str, call: Real, got: Tensor, want: Tensor, differs: Tensor, index: Sequence[int]
) -> str:
    dim = rows.dims[name]
    other = [at for at in range(differs.dim()) if at != dim]
    at = int((differs.any(other) if other else differs).nonzero()[0])
    row = at
    if name in rows.packed:
        bounds = call[rows.packed[name]]
        ends = list(accumulate(int(bounds[each + 1] - bounds[each]) for each in index))
        row = next(number for number, end in enumerate(ends) if at < end)
    one, two, apart = (each.select(dim, at) for each in (got, want, differs))
    far = ulps(one, two)
    size = f", by up to {far} ulp," if one.is_floating_point() else ""
    return f"another row {row} (row {index[row]} of the whole; {int(apart.sum())} of {apart.numel()} elements{size})"


def ulps(got: Tensor, want: Tensor) -> int:
    """Return the largest distance of two tensors of one dtype, in steps between neighbouring numbers of that dtype.

    >>> import torch
    >>> from fusedops.testing._rows import ulps
    >>> ulps(torch.tensor([1.0, 0.0]), torch.tensor([1.0 + 2**-22, -0.0]))
    2
    """
    one, two = (_ordered(each) for each in (got, want))
    return int((one - two).abs().max()) if one.numel() else 0


def _as_integers(tensor: Tensor) -> Tensor:
    """Return the bits as integers."""
    tensor = tensor.cpu().contiguous()
    return tensor.view(_SIGNED[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _ordered(tensor: Tensor) -> Tensor:
    """Return an integer for each number, in the order of the numbers: neighbours differ by 1."""
    if not tensor.is_floating_point():
        return tensor.cpu().long()
    bits = _as_integers(tensor).long()
    return torch.where(bits < 0, -(bits & (2 ** (8 * tensor.element_size() - 1) - 1)), bits)
