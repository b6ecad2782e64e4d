"""Variants of a call: other shapes, dtypes, numbers, layouts and contents, pairwise over all of them, or each twice.

They are made from the op's cases and constraints: an op or a constraint of a plugin has them too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops._contract.constraint import Constraint
from fusedops._contract.op import Op
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._report.direction import Direction
from fusedops.constraints import SameShape
from fusedops.dtypes import STORAGE
from fusedops.testing._calls import Call, followed, is_of_numbers, tensors
from fusedops.testing._contents import contents_of, tiny
from fusedops.testing._kernel_calls import KernelCalls
from fusedops.testing._layouts import Form, layouts
from fusedops.testing._pairwise import each_option, pairwise
from fusedops.testing._roles import indices, slots

GRADIENTS = "the gradient of the output"
_SCALE = 2  # a call of large sizes has at most so many times the elements that the kit is run with
# of the op whose kernels were checked last, by all that they depend on. It is replaced whole, in any thread
_kept: tuple[Op | None, list[tuple[tuple[Any, ...], list[Variant]]]] = (None, [])
_TINY = 1e-12
_RANKS = (0, 1, 2, 3, 5, 8)
_LEADING = (2, 1, 3, 1, 1, 1)  # sizes before the last two, from the last
_SIZES = {  # the last two
    "one column": (5, 1),
    "even": (4, 64),
    "more rows than columns": (7, 5),
    "4099 rows": (4099, 2),
    "4099 columns": (1, 4099),
}


_PLAIN: Mapping[str, Any] = MappingProxyType({})  # no tensor has another layout, or holds other numbers


class Variant(NamedTuple):
    """One call. Not a frozen dataclass, whose changed copy takes twice the time: a kernel has thousands.

    Attributes:
        call: its arguments; each tensor as a spec.
        forms: the layout of each tensor that is not contiguous, and of the outputs' gradients.
        fills: what the tensors hold that do not hold the usual random numbers: each changes them.
        save: True where a forward kernel is asked for the saved values too.
        changes: what differs from the op's case, as text.
        excuse: the deviation that excuses the call, where the backend declares it.
    """

    call: Call
    forms: Mapping[str, Form] = _PLAIN
    fills: Mapping[str, Callable[[Tensor], Tensor]] = _PLAIN
    save: bool = True
    changes: tuple[str, ...] = ()
    excuse: str = ""

    @property
    def label(self) -> str:
        """The name of the call."""
        return ", ".join(self.changes) or "as in the op's case"

    def tensors(self, op: Op, seed: int = 0) -> dict[str, Any]:
        """Return the call with real tensors."""
        real = tensors(op, self.call, seed)
        for name, fill in self.fills.items():
            real[name] = fill(real[name])
        for name, form in self.forms.items():
            if name in real:
                real[name] = form(real[name])
        return real


class _Axis(NamedTuple):
    """One thing that varies.

    Attributes:
        options: the labels of its values.
        change: returns the variant with one of them, None where it has no such value.
        hiding: the labels of values that may hide the others, such as p = 1.
    """

    options: tuple[str, ...]
    change: Callable[[Variant, str], Variant | None]
    hiding: frozenset[str] = frozenset()


_Begun = dict[tuple[int, ...], Variant | None]


def variants(subject: KernelCalls, direction: Direction) -> list[Variant]:
    """Return the calls that the kernel takes, such that every two values of two axes meet where they can.

    In a brief run every value is in two calls. The first call is the plain one.

    They follow from the op and the kernel's constraints: those of one op are kept, for all kernels.
    """
    global _kept
    if _kept[0] is not subject.op:
        _kept = (subject.op, [])
    kept = _kept[1]
    key = (direction, subject.device, subject.elements, subject.brief, tuple(subject.constraints(direction)))
    known = next((calls for other, calls in kept if other == key), None)
    if known is None:
        known = _made(subject, direction)
        kept.append((key, known))
    return known


def _made(subject: KernelCalls, direction: Direction) -> list[Variant]:
    for base in subject.bases(direction)[:1]:
        axes = list(_axes(subject, base, direction))
        taken: dict[tuple[Any, ...], bool] = {}
        # a base is taken, however large the smallest call is that the constraints accept; and so are the even sizes
        given = [value for value in base.values() if isinstance(value, TensorSpec)]
        even = prod((*base[subject.op.parameters[0]].shape[:-2], *_SIZES["even"]))
        most = max(_SCALE * subject.elements, even, *(value.numel() for value in given))

        by_identity: dict[int, bool] = {}
        begun: _Begun = {(): Variant(base)}  # by the options of the first axes

        def made(row: tuple[int, ...], axes: list[_Axis] = axes, begun: _Begun = begun) -> Variant | None:
            if row not in begun:
                changed = len(row)  # axes, up to the last one that is not at its plain option
                while changed and not row[changed - 1]:
                    changed -= 1
                variant = begun[()] if not changed else made(row[: changed - 1])
                if changed and variant is not None:
                    axis = axes[changed - 1]
                    variant = axis.change(variant, axis.options[row[changed - 1] - 1])
                begun[row] = variant
            return begun[row]

        def valid(
            row: tuple[int, ...],
            taken: dict[tuple[Any, ...], bool] = taken,
            by_identity: dict[int, bool] = by_identity,
            most: int = most,
        ) -> bool:
            variant = made(row)
            if variant is None:
                return False
            if (known := by_identity.get(id(variant.call))) is not None:
                return known
            key = (*map(_kind, variant.call.values()), *variant.call.values())
            if key not in taken:
                small = all(v.numel() <= most for v in variant.call.values() if isinstance(v, TensorSpec))
                taken[key] = small and subject.takes(variant.call, direction) and not _rounded(subject, variant.call)
            by_identity[id(variant.call)] = taken[key]  # ``begun`` keeps the call
            return taken[key]

        sizes = [len(axis.options) + 1 for axis in axes]
        hiding = [frozenset(at for at, label in enumerate(axis.options, 1) if label in axis.hiding) for axis in axes]
        chosen = (each_option if subject.brief else pairwise)(sizes, hiding, valid)
        rows = [variant for row in chosen if (variant := made(row)) is not None]
        return list({variant.label: variant for variant in rows}.values())
    return []


def _kind(value: object) -> type:
    return type(value)  # 1, 1.0 and True are equal


def _rounded(subject: KernelCalls, call: Call) -> bool:
    """Return True where a tensor is rounded to the output's dtype: the float64 answer is of the unrounded one."""
    floating = [v.dtype for v in call.values() if is_of_numbers(v)]
    output = subject.output_dtype(call)
    return output in STORAGE and any(torch.promote_types(dtype, output) != output for dtype in floating)


def _axes(subject: KernelCalls, base: Call, direction: Direction) -> Iterator[_Axis]:
    op = subject.op
    first, distinct = op.parameters[0], [each.name for each in (*indices(op), *slots(op))]
    yield _rank_axis(op, base)
    yield _size_axis(op, base)
    for name in op.parameters:
        if op.types[name].endswith("| None") and base[name] is not None:
            yield _absent_axis(subject, name)
    for constraint in op.constraints:
        examples = constraint.examples(base)
        if examples:
            yield _example_axis(subject, constraint, base, examples)
    for name in tiny(op, direction):
        yield _Axis((f"{name} = {_TINY:g}",), partial(_with_tiny, name))
    for name, spec in base.items():
        if isinstance(spec, TensorSpec):
            yield _layout_axis(name, spec, {"repeated"} if name in distinct else ())
            fills = contents_of(op, name, spec, direction)
            if fills:
                yield _fill_axis(name, fills)
    if direction == "backward":
        yield _layout_axis(GRADIENTS, base[first])
    elif op.saved:
        yield _Axis(("no gradient wanted",), _without_saved)


def _with_tiny(name: str, variant: Variant, label: str) -> Variant:
    return _changed(variant, label, {**variant.call, name: _TINY})


def _without_saved(variant: Variant, label: str) -> Variant:
    return _changed(variant, label, save=False)


def _rank_axis(op: Op, base: Call) -> _Axis:
    """Return the axis of the first tensor's rank."""
    first = op.parameters[0]
    shape: tuple[int, ...] = base[first].shape
    ranks = {f"{first} {rank}-d": rank for rank in _RANKS if rank != len(shape)}

    def change(variant: Variant, label: str) -> Variant | None:
        sizes = (1, 1, *shape)[-2:]
        return _changed(variant, label, followed(op, variant.call, first, _of_rank(ranks[label], *sizes)))

    return _Axis(tuple(ranks), change)


def _size_axis(op: Op, base: Call) -> _Axis:
    """Return the axis of the sizes of the first tensor's last two dimensions."""
    first = op.parameters[0]
    rows, columns = (1, 1, *base[first].shape)[-2:]
    beside = {"one row": (1, columns), "twice the sizes": (2 * rows, 2 * columns)}  # for constraints on sizes
    sizes = {f"{first} of {label}": pair for label, pair in (beside | _SIZES).items()}

    def change(variant: Variant, label: str) -> Variant | None:
        shape: tuple[int, ...] = variant.call[first].shape
        last = sizes[label][-len(shape) :] if shape else ()
        changed = (*shape[: len(shape) - len(last)], *last)
        return None if changed == shape else _changed(variant, label, followed(op, variant.call, first, changed))

    return _Axis(tuple(sizes), change)


def _of_rank(rank: int, rows: int, columns: int) -> tuple[int, ...]:
    leading = tuple(reversed((_LEADING * rank)[: max(rank - 2, 0)]))
    return (*leading, rows, columns)[len(leading) + 2 - rank :]


def _absent_axis(subject: KernelCalls, name: str) -> _Axis:
    """Return the axis of an optional argument: None where the op can do without, and draws nothing for it."""

    def change(variant: Variant, label: str) -> Variant | None:
        call = subject.complete({**variant.call, name: None})
        return _changed(variant, label, call) if call[name] is None else None

    return _Axis((f"{name} None",), change)


def _example_axis(subject: KernelCalls, constraint: Constraint, base: Call, examples: Mapping[str, Any]) -> _Axis:
    """Return the axis of a constraint's examples, for the call that they are put into. What takes its sizes follows."""
    op = subject.op
    name = constraint.name
    alike = [each.name for each in op.constraints if isinstance(each, SameShape) and each.other == name]
    followers = [each for each in op.constraints if each.name != name and name in each.names]

    known: dict[int, Mapping[str, Any]] = {}  # by the identity of a call, which ``begun`` keeps

    def change(variant: Variant, label: str) -> Variant | None:
        if (current := known.get(id(variant.call))) is None:
            current = known[id(variant.call)] = constraint.examples(variant.call)
        if label not in current or current[label] == variant.call[name]:
            return None
        call = {**variant.call, name: current[label]}
        for other in alike:
            if isinstance(call[other], TensorSpec) and call[other].shape != current[label].shape:
                call[other] = call[other].replace(shape=current[label].shape)
        for each in followers:
            call[each.name] = each.fitted(call)
        return _changed(variant, label, call)

    labels = tuple(label for label, value in examples.items() if value != base[name])
    # where a number is 0, or 1 and no more is allowed, other arguments may have no effect
    takes = {number: subject.allows({**base, name: number}) for number in (0.5, 2.0)}
    hiding = [0] * takes[0.5] + [1] * (takes[0.5] and not takes[2.0])
    return _Axis(labels, change, frozenset(label for label in labels if _is_one_of(examples[label], hiding)))


def _is_one_of(value: Any, numbers: Sequence[int]) -> bool:
    return type(value) in (int, float) and value in numbers


def _layout_axis(name: str, spec: TensorSpec, without: Collection[str] = ()) -> _Axis:
    labels = {f"{name} {form}": form for form in layouts(spec) if form not in without}

    def change(variant: Variant, label: str) -> Variant | None:
        current = variant.call.get(name, next(iter(variant.call.values())))
        form = None if current is None else layouts(current).get(labels[label])
        return None if form is None else _changed(variant, label, forms={**variant.forms, name: form})

    return _Axis(tuple(labels), change)


def _fill_axis(name: str, fills: Mapping[str, Any]) -> _Axis:
    def change(variant: Variant, label: str) -> Variant | None:
        if variant.call[name] is None:
            return None
        content = fills[label]
        excuse = content.excuse or variant.excuse
        return _changed(variant, label, fills={**variant.fills, name: content.fill}, excuse=excuse)

    return _Axis(tuple(fills), change, frozenset(label for label, each in fills.items() if each.hides))


def _changed(variant: Variant, label: str, call: Call | None = None, **fields: Any) -> Variant:
    return variant._replace(call=call or variant.call, changes=(*variant.changes, label), **fields)
