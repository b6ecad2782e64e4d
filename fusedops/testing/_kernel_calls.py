"""Calls of one op that one backend's kernels take, as specs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.constraint import Constraint
from fusedops._contract.op import Op
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._plugins.record import PreparedKernel
from fusedops._plugins.registry import registry
from fusedops._report.direction import Direction
from fusedops.testing._calls import Call, dtype_name, followed, specs
from fusedops.testing._empty import empty_outputs, empty_saved
from fusedops.testing._roles import offsets

_ROWS = (9, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 3)  # the last for kernels of few rows
_COLUMNS = (33, 8, *_ROWS[1:-1])
_GROUPED = 6  # times as many leading entries where they are in groups
# (each leading size, rows, columns), the smallest and most odd first: constraints on sizes are met by one of them
_last: dict[Direction, tuple[tuple[Any, ...], list[Call]]] = {}  # the newest by direction, as in _variants.py
_SIZES = sorted(product((2, 1), _ROWS, _COLUMNS), key=lambda s: (_ROWS.index(s[1]) + _COLUMNS.index(s[2]), -s[0]))
# where a leading dim has the groups, of positions, the rows are heads: few, for kernels do the same for each
_OF_HEADS = sorted(_SIZES, key=lambda s: s[1] != _ROWS[-1])


class KernelCalls:
    """One backend's kernels for one op, on one device, and the calls that they take.

    Args:
        backend: its name.
        op: the op.
        device: where the tensors are.
        elements: the size to which the op's named cases are cut, about.
        brief: True for fewer calls, see :func:`fusedops.testing.checks`.
    """

    def __init__(self, backend: str, op: Op, device: str, elements: int, *, brief: bool = False) -> None:
        record = registry.find(backend)
        assert record is not None
        record.probe()  # what the backend prepares after it is what the checks call
        self.backend = backend
        self.op = op
        self.device = device
        self.elements = elements
        self.brief = brief
        of_device = [each for each in record.kernels if each.kernel.serves(torch.device(device).type)]
        self.kernels: dict[Direction, PreparedKernel] = {
            each.kernel.direction: each for each in of_device if each.kernel.op == op.name
        }

    def constraints(self, direction: Direction) -> Sequence[Constraint]:
        """Return the constraints that the kernel declares."""
        return self.kernels[direction].kernel.constraints

    def deviations_of(self, direction: Direction) -> frozenset[str]:
        """Return the names of the deviations that the kernel declares; of all, where there is no such kernel."""
        kernels = [self.kernels[direction]] if direction in self.kernels else self.kernels.values()
        return frozenset(d.name for kernel in kernels for d in kernel.kernel.deviations)

    def arguments_of(self, call: Call, direction: Direction) -> dict[str, Any]:
        """Return what the kernel of that direction gets for a call, by its own parameters, as specs."""
        if direction == "forward":
            return call
        args = tuple(call.values())
        outputs = [self._spec(y) for y in empty_outputs(self.op, args)]
        saved = [self._spec(value) for value in empty_saved(self.op, args)]
        return self.assembled(outputs[: len(self.op.with_gradient)], outputs, saved, args, self.needs(args))

    def output_dtype(self, call: Call) -> torch.dtype:
        """Return the dtype of the first output."""
        return empty_outputs(self.op, tuple(call.values()))[0].dtype

    def _spec(self, tensor: Tensor) -> TensorSpec:
        return TensorSpec(tuple(tensor.shape), tensor.dtype, self.device)

    def assembled(
        self,
        grads: Sequence[Any],
        outputs: Sequence[Any],
        saved: Sequence[Any],
        args: Sequence[Any],
        needs: tuple[bool, ...],
    ) -> dict[str, Any]:
        """Return the arguments of backward by name, real or as specs."""
        call = self.op.backward_call
        values = call.arguments(grads, call.tensors((*args, *outputs, *saved)), call.values(args), needs)
        return dict(zip(self.op.backward_parameters, values))

    def allows(self, call: Call) -> bool:
        """Return True where the op accepts the call, on any backend."""
        try:  # as Op.validate, without the reasons of a refusal, which take longer than the rest
            return self.op.check_any_kind(*call.values()) is None
        except (AttributeError, TypeError, RuntimeError):
            return self.op.invalid(tuple(call.values())) is None

    def takes(self, call: Call, direction: Direction) -> bool:
        """Return True where the op accepts the call and the kernel's constraints are met."""
        if not self.allows(call):
            return False
        if direction == "backward" and not call[self.op.parameters[0]].is_floating_point():
            return False  # of integers there is no gradient
        kernel = self.kernels[direction]
        if kernel.unconditional:
            return True
        args = tuple(call.values())
        if direction == "forward":
            return kernel.check(*args) is None
        # without saved values, on which a backward kernel has no constraints: their references take long
        outputs = [self._spec(y) for y in empty_outputs(self.op, args)]
        saved = [None] * len(self.op.saved)
        grads = outputs[: len(self.op.with_gradient)]
        return kernel.check(*self.assembled(grads, outputs, saved, args, self.needs(args)).values()) is None

    def named(self) -> Iterator[tuple[str, Call]]:
        """Yield the op's named cases in every dtype, float32 first."""
        for dtype in sorted(self.op.evidence.tolerance, key=lambda dtype: dtype != torch.float32):
            for case in self.op.evidence.cases:
                yield f"{case.name} {dtype_name(dtype)}", self.complete(specs(self.op, case, dtype, self.device))

    def complete(self, call: Mapping[str, Any]) -> Call:
        """Return the call with every parameter, in the op's order."""
        return dict(zip(self.op.parameters, self.op.prepared(self.op.bind((), call))))

    def bases(self, direction: Direction) -> list[Call]:
        """Return small calls that the kernel takes: one for each set of tensors that is present, most tensors first.

        Each check of a kernel begins with them: they are kept, for where constraints refuse most, many are tried.
        """
        key = (self.kernels[direction], self.op, self.device)
        if _last.get(direction, ((), []))[0] != key:
            _last[direction] = (key, self._found_bases(direction))
        return [dict(call) for call in _last[direction][1]]

    def _found_bases(self, direction: Direction) -> list[Call]:
        smallest: dict[tuple[str, ...], Call] = {}
        for _, case in self.named():
            present = tuple(name for name in self.op.tensors if case[name] is not None)
            if present not in smallest and (call := self._small(case, direction)):
                smallest[present] = call
        return [smallest[present] for present in sorted(smallest, key=len, reverse=True)]

    def _small(self, case: Call, direction: Direction) -> Call | None:
        first = self.op.parameters[0]
        rank = case[first].dim()
        # so many entries of a leading dim in groups that some groups have several
        grouped = {each.dim for each in offsets(self.op) if each.of in (None, first)}
        factors = [_GROUPED if dim in grouped else 1 for dim in range(rank - 2)]
        for size, rows, columns in _SIZES if _GROUPED not in factors else _OF_HEADS:
            call = followed(self.op, case, first, (*(size * factor for factor in factors), rows, columns)[-rank:])
            if self.takes(call, direction):
                return call
        return None

    def needs(self, args: Sequence[Any]) -> tuple[bool, ...]:
        """Return True for each gradient that exists."""
        return tuple(args[self.op.parameters.index(name)] is not None for name in self.op.differentiable)
