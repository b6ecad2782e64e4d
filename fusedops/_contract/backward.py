"""BackwardCall: how a backward call is assembled from what forward saved, for autograd, torch.library and DTensor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch.compiler import is_dynamo_compiling

from fusedops._contract.values import Saved

Getter = Callable[[Sequence[Any]], tuple[Any, ...]]
_FLAGS = ("needs", "reuse")  # parameters of backward that are not values of forward


class BackwardCall:
    """The arguments of an op's backward: where each comes from.

    The parameters of backward are, in order: the gradients of the outputs (``grad`` for one output, else
    ``grad_<output>`` for each output but integers), then by name any of: an output, a saved value, a parameter of the
    op, ``<parameter>_dtype``, ``needs`` (a bool for each differentiable parameter: its gradient is wanted), and
    ``reuse`` (a bool: the saved values are not used again, and backward may change them in place and return them as
    gradients).

    Attributes:
        tensors: picks the tensors that backward takes from ``(*arguments, *outputs, *saved values)`` of forward.
        saved_indices: the indices of the saved values among these tensors.
        values: picks the numbers, texts and dtypes that backward takes from the op's arguments.
        arguments_of: orders ``(*grads, *tensors, *values, needs)`` as the parameters of backward.

    Args:
        op: the op's name, for messages.
        names: the parameters of backward.
        parameters: the op's parameters.
        tensors: the parameters that are tensors.
        outputs: the op's outputs.
        integers: the outputs that have no gradient.
        saved: the op's saved values. The parameters of their references are kept for backward too.
        differentiable: the parameters for which backward returns a gradient, in order.
        passed_through: the parameter whose gradient is the output's, or None.
        identity: True where the first parameter's gradient equals the output's; or None.
        addend: the second differentiable parameter, if it is added to the first: its gradient is the same but for its
            dtype; or None.
    """

    def __init__(
        self,
        op: str,
        names: Sequence[str],
        parameters: Sequence[str],
        tensors: Sequence[str],
        outputs: Sequence[str],
        integers: Sequence[str],
        saved: Sequence[Saved],
        differentiable: Sequence[str],
        passed_through: str | None,
        identity: Callable[..., bool] | None,
        addend: str | None,
    ) -> None:
        several = len(outputs) > 1
        self.grads = tuple(f"grad_{name}" if several else "grad" for name in outputs if name not in integers)
        kept = list(names[len(self.grads) :])
        if tuple(names[: len(self.grads)]) != self.grads:
            raise ValueError(f"op {op}: backward takes {tuple(names)}; it must begin with {self.grads}")
        # backward's arguments are picked from these values of forward
        saved_names = [value.name for value in saved]
        available = [*parameters, *outputs, *saved_names]
        dtypes = [name for name in kept if name not in available and name.removesuffix("_dtype") in parameters]
        unknown = [name for name in kept if name not in available and name not in dtypes and name not in _FLAGS]
        if unknown:
            raise ValueError(
                f"op {op}: backward takes {', '.join(unknown)}; it may take {', '.join(available)}, "
                f"<parameter>_dtype, needs and reuse"
            )
        self._saved = {value.name: (value, tuple(inspect.signature(value.reference).parameters)) for value in saved}
        for _, needed in self._saved.values():
            kept += [name for name in needed if name not in kept]
        self.outputs = tuple(outputs)
        is_tensor = {*tensors, *outputs, *saved_names}
        self.kept_tensors = tuple(name for name in kept if name in is_tensor)
        self.saved_indices = tuple(index for index, name in enumerate(self.kept_tensors) if name in saved_names)
        scalars = [name for name in kept if name in parameters and name not in is_tensor]
        self.tensors = _getter([available.index(name) for name in self.kept_tensors])
        self._scalar_names = scalars
        dtype_indices = [parameters.index(name.removesuffix("_dtype")) for name in dtypes]
        self.values = _with_dtypes(_getter([available.index(name) for name in scalars]), dtype_indices)
        order = [*self.grads, *self.kept_tensors, *scalars, *dtypes, "needs", "reuse"]
        self.reuses = "reuse" in names
        self._reuse_index = list(names).index("reuse") if self.reuses else -1
        self._passed_index = -1 if passed_through is None else parameters.index(passed_through)
        result_indices = {name: 2 + index for index, name in enumerate(differentiable)}  # after None and what is passed
        indices = (
            [parameters.index(name) for name in differentiable],
            [order.index(name) for name in names],
            [result_indices.get(name, int(name == passed_through)) for name in parameters],
        )
        self._getters = tuple(map(_getter, indices))
        self._traceable = tuple(map(_traceable_getter, indices))
        self.arguments_of = self._getters[1]
        self._without_needs = _traceable_getter([order.index(name) for name in names if name not in _FLAGS])
        self._identity = identity
        self._addend_dtype = None if addend is None else [*scalars, *dtypes].index(f"{addend}_dtype")

    def arguments(
        self, grads: Sequence[Any], tensors: Sequence[Any], values: Sequence[Any], needs: tuple[bool, ...]
    ) -> tuple[Any, ...]:
        """Return the arguments of backward, in order."""
        return self.arguments_of((*grads, *tensors, *values, needs, False))

    def without_reuse(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments of backward for a kernel that must not change the saved values."""
        if not self.reuses:
            return tuple(args)
        return (*args[: self._reuse_index], False, *args[self._reuse_index + 1 :])

    def differentiable_tensors(self, tensors: Sequence[Any], values: Sequence[Any]) -> tuple[Any, ...]:
        """Return the kept tensors, with the saved values recomputed from them so that they have a graph.

        For a second derivative: autograd recorded nothing of what a kernel computed.
        """
        if not self._saved:
            return tuple(tensors)
        kept = self.by_name(tensors, values)
        for name, (value, needed) in self._saved.items():
            if kept.get(name) is not None:
                kept[name] = value.reference(*(kept[arg] for arg in needed))
        return tuple(kept[name] for name in self.kept_tensors)

    def by_name(self, tensors: Sequence[Any], values: Sequence[Any]) -> dict[str, Any]:
        """Return the kept tensors and numbers by name."""
        return {**dict(zip(self.kept_tensors, tensors)), **dict(zip(self._scalar_names, values))}

    def gradients(
        self,
        grads: Sequence[Any],
        tensors: Sequence[Any],
        values: Sequence[Any],
        wanted: Sequence[bool],
        run: Callable[[tuple[Any, ...]], Any],
        look_at_values: bool = True,
        reuse: bool = False,
    ) -> tuple[Any, ...]:
        """Return one gradient for each parameter of the op, None where it has none. One that is not wanted is not read.

        Args:
            grads: the gradients of the outputs.
            tensors: what :meth:`tensors` returned in forward.
            values: what :meth:`values` returned in forward.
            wanted: for each parameter of the op, True where its gradient is wanted.
            run: computes backward from its arguments, by a kernel or otherwise. Called where a wanted gradient is not
                the output's.
            look_at_values: False in a trace, whose values ``identity`` must not read.
            reuse: True where the saved values are not used again.
        """
        needs_of, arguments_of, of_parameters = self._traceable if is_dynamo_compiling() else self._getters
        needs = needs_of(wanted)
        is_same = is_twice = False
        if self._identity is not None and needs[0] and look_at_values:
            is_same = self._identity(*self._without_needs((*grads, *tensors, *values)))
            needs = (not is_same, *needs[1:])
        elif self._addend_dtype is not None and needs[0] and needs[1]:
            is_twice = grads[0].dtype is values[self._addend_dtype]
            needs = (True, not is_twice, *needs[2:])
        computed: Sequence[Any] = (None,) * len(needs)
        if True in needs:
            results = run(arguments_of((*grads, *tensors, *values, needs, reuse)))
            computed = (results,) if len(needs) == 1 else results
            if False in needs:  # a kernel may return more than is wanted
                computed = tuple([gradient if need else None for gradient, need in zip(computed, needs)])
        if is_same:
            computed = (grads[0], *computed[1:])
        elif is_twice:
            computed = (computed[0], computed[0], *computed[2:])
        passed = grads[0] if self._passed_index >= 0 and wanted[self._passed_index] else None
        return of_parameters((None, passed, *computed))


def _getter(indices: list[int]) -> Getter:
    """Return a function that picks these indices out of a sequence, as a tuple."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return _traceable_getter(indices)


def _traceable_getter(indices: list[int]) -> Getter:
    """Return the function of :func:`_getter` in a form that dynamo can trace, unlike operator.itemgetter."""
    return lambda values: tuple([values[index] for index in indices])


def _with_dtypes(scalars: Getter, indices: list[int]) -> Getter:
    """Return ``scalars``, a getter of the op's arguments, with the dtypes of the tensors at these indices appended."""
    if not indices:
        return scalars
    return lambda args: (*scalars(args), *[args[index].dtype for index in indices])
