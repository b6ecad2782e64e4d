"""Random calls of an op, made from its cases and constraints, and from those of a backend's kernels."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fusedops
from fusedops import Op, TensorSpec
from fusedops.constraints import Finite, Flag, OneOf, Probability, Scalar
from fusedops.quantization import FORMATS, SCALED
from fusedops.testing import OPS
from fusedops.testing._calls import followed, shrunk, specs
from fusedops.testing._kernel_calls import KernelCalls
from fusedops.testing._roles import classes, indices, masks, offsets, one_elements, packed_parts, packed_rows, slots
from tests.fuzz.call import EXTREMES, LAYOUTS, OF_INTEGERS, Call, Made
from tests.fuzz.machine import Target
from tests.fuzz.situations import SITUATIONS

_SIZES = (0, 1, 1, 2, 3, 5, 7, 8, 13, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 255, 256, 257, 500, 511, 513)
_LONG = (1000, 1023, 1024, 1025, 2047, 2049, 3001, 4095, 4096, 4097, 8191, 8193)
_MOST = 2**24  # elements of a tensor in between: the comparison has several of them in float64
_FINITE = (1.0, 0.125, -0.7, 1, 2, 0, 0.0, -0.0, 1e-5, 50.0)
_WILD = (3e38, 1e39, -1e300, 2**62, 1e-320, -1e-40)
_RATES = (0, 0.0, 0.1, 0.5, 0.9, 1, 1.0, 1 - 1e-16, 1e-320)
_SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 2**40 + 7)
_LAYOUTS = ("contiguous",) * 4 + tuple(layout for layout in LAYOUTS if layout != OF_INTEGERS)


def generate(target: Target, seed: str) -> Call:
    """Return the call of that seed: the same one on every machine of the same versions."""
    return _Generator(target, random.Random(seed)).call()


@cache
def _bases(target: Target) -> list[dict[str, Any]]:
    """Return valid calls as specs: the op's cases, cut in size, and the smallest calls that the backend takes."""
    op = OPS[target.op]
    elements = min(target.elements, 2**15)
    cases = [
        specs(op, shrunk(case, elements, rows=1), torch.float32, target.device)
        for case in (*op.evidence.cases, *op.evidence.measured)
    ]
    calls = KernelCalls(target.backend, op, target.device, elements)
    taken = [call for call in calls.bases("forward") for _ in range(3)]
    fitting = [call for call in map(calls.complete, cases) if _fits(call, target)]
    return fitting + taken


def _fits(call: Mapping[str, Any], target: Target) -> bool:
    """Return True where every tensor is on the target's device and not too large."""
    tensors = [value for value in call.values() if isinstance(value, TensorSpec)]
    here = all(value.device_type == target.device and value.capability is None for value in tensors)
    if not here or any(value.numel() > target.elements for value in tensors):
        return False
    op = OPS[target.op]
    logits = (  # that the op computes
        call[item.name].numel() * math.prod(call[item.of].shape[item.dim :][:1])
        for item in classes(op)
        if item.of is not None and isinstance(call[item.name], TensorSpec) and isinstance(call[item.of], TensorSpec)
    )
    if any(elements > target.elements for elements in logits):
        return False
    # of tensors without elements a result may have 2**40
    of_call = (sum(value.numel() for value in tensors), *(size for value in tensors for size in value.shape))
    return max(of_call) <= 2**14 or _largest_of_reference(op, call) <= _MOST


class _Results(TorchDispatchMode):
    """Records the elements of the largest tensor that torch makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.largest = max(self.largest, *(each.numel() for each in tree_leaves(result) if isinstance(each, Tensor)), 0)
        return result


_largest: dict[tuple[str, str], int] = {}  # by op and call: each backend and device has the same cases


def _largest_of_reference(op: Op, call: Mapping[str, Any]) -> int:
    """Return the elements of the largest tensor that the op's reference makes, as the scores of attention."""
    values = [(value.shape, value.dtype) if isinstance(value, TensorSpec) else value for value in call.values()]
    key = op.name, repr(values)
    if key not in _largest:
        args = [
            torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, TensorSpec) else value
            for value in call.values()
        ]
        with _Results() as results, contextlib.suppress(Exception):  # of a call that the op refuses
            op.reference(*op.prepared(args))
        _largest[key] = results.largest
    return _largest[key]


class _Generator:
    """Draws one call."""

    def __init__(self, target: Target, dice: random.Random) -> None:
        self.target, self.dice, self.op = target, dice, OPS[target.op]
        self.first = self.op.parameters[0]
        record = KernelCalls(target.backend, self.op, target.device, target.elements)
        self.kernels = record

    def call(self) -> Call:
        invalid = self.dice.random() < 0.03  # it must be an InvalidInputError
        wanted = self.dice.random() < 0.8  # a call that the backend's kernel takes
        best = None
        for _ in range(40):
            call = self._shaped()
            if not _fits(call, self.target):
                continue
            allowed = self.kernels.allows(call)
            if allowed != invalid:
                best = best or call
                if invalid or not wanted or self.kernels.takes(call, "forward"):
                    best = call
                    break
        if best is None:
            best = dict(self.dice.choice(_bases(self.target)))
        return self._finished(best)

    # ------------------------------------------------------------------------------------------ shapes and dtypes

    def _shaped(self) -> dict[str, Any]:
        """Return a call as specs, near a valid one."""
        dice, op = self.dice, self.op
        call = dict(self._base())
        if dice.random() < 0.8:
            call = followed(op, call, self.first, self._shape(call[self.first].shape))
        edges = [*op.constraints, *self.kernels.constraints("forward")]
        # just inside or outside of a constraint, from a call that meets all
        if edges and dice.random() < 0.25 and self.kernels.allows(call):
            cases = [*dice.choice(edges).boundaries(call)]
            if cases and _fits(chosen := dict(dice.choice(cases).args), self.target):
                call = chosen
        for name, value in call.items():
            if name in op.required_tensors or not isinstance(value, TensorSpec):
                continue
            if dice.random() < 0.15:
                call[name] = None
            elif name not in one_elements(op) and dice.random() < 0.4:
                call[name] = value.replace(shape=self._narrowed(call[self.first].shape))
        self._dtypes(call)
        self._scalars(call)
        for constraint in packed_rows(op):
            if call[constraint.name] is not None and dice.random() < 0.9:
                call[constraint.name] = constraint.follow(call) or call[constraint.name]
        for constraint in packed_parts(op):
            if dice.random() < 0.95:
                call[constraint.name] = constraint.fitted(call)
        return call

    def _base(self) -> Mapping[str, Any]:
        dice, op = self.dice, self.op
        roll, sizes = dice.random(), (dice.choice(_SIZES), dice.choice(_SIZES))
        made = op.evidence.sweep if roll < 0.15 else op.evidence.sample if roll < 0.3 else None
        if made is not None and self._room(sizes):
            case = fusedops.testing.Case("", made(*sizes))
            call = self.kernels.complete(specs(op, case, torch.float32, self.target.device))
            if _fits(call, self.target):
                return call
        return dice.choice(_bases(self.target))

    def _shape(self, old: Sequence[int]) -> tuple[int, ...]:
        """Return a shape: of any rank up to 5, or of the old rank; small leading sizes, any last ones."""
        dice = self.dice
        rank = len(old) if dice.random() < 0.5 else dice.choice((0, 1, 2, 2, 3, 3, 4, 4, 5))
        budget = min(dice.choice((64, 256, 1024, 2**12, 2**14, 2**16)), self.target.elements)
        if dice.random() < 0.03:
            budget = self.target.elements
        shape: list[int] = []
        for place in range(rank):  # the last size first
            fitting = [size for size in (_SIZES + _LONG * (place < 2)) if size <= budget]
            if place >= 2:
                fitting = [size for size in fitting if size <= 65]
            if dice.random() < 0.93:
                fitting = [size for size in fitting if size]
            if place < len(old) and dice.random() < 0.3 and 0 < old[-1 - place] <= budget:
                fitting = [old[-1 - place]]
            shape.insert(0, dice.choice(fitting) if fitting else 1)
            budget //= max(shape[0], 1)
        return tuple(shape)

    def _narrowed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a shape that broadcasts to another one."""
        kept = shape[self.dice.randint(0, len(shape)) if self.dice.random() < 0.6 else 0 :]
        return tuple(1 if self.dice.random() < 0.3 else size for size in kept)

    def _room(self, sizes: Sequence[int]) -> bool:
        return math.prod(max(size, 1) for size in sizes) <= self.target.elements

    def _dtypes(self, call: dict[str, Any]) -> None:
        accepted = [*self.op.evidence.tolerance]
        dtype, mixed = self.dice.choice(accepted), self.dice.random() < 0.25
        for name, value in call.items():
            if isinstance(value, TensorSpec) and value.is_floating_point():
                call[name] = value.replace(dtype=self.dice.choice(accepted) if mixed else dtype)
            elif isinstance(value, TensorSpec) and name in masks(self.op):
                call[name] = value.replace(dtype=self.dice.choice((torch.bool, torch.uint8)))

    def _scalars(self, call: dict[str, Any]) -> None:
        dice = self.dice
        for constraint in self.op.constraints:
            name = constraint.name
            if isinstance(call.get(name), TensorSpec) or (call.get(name) is None and dice.random() < 0.5):
                continue
            if isinstance(constraint, Finite):
                choices: Sequence[Any] = _WILD if dice.random() < 0.05 else _FINITE
                if constraint.at_least is not None:
                    choices = [value for value in choices if value >= constraint.at_least]
                call[name] = dice.choice([*choices, call[name] if call[name] is not None else 1.0])
            elif isinstance(constraint, Probability):
                call[name] = dice.choice(_RATES)
            elif isinstance(constraint, Flag):
                call[name] = dice.random() < 0.5
            elif isinstance(constraint, OneOf):
                call[name] = dice.choice(constraint.choices)
            elif isinstance(constraint, Scalar) and constraint.one_of:
                call[name] = dice.choice(constraint.one_of)

    # --------------------------------------------------------------------------------------- tensors and policy

    def _finished(self, call: Mapping[str, Any]) -> Call:
        dice, op = self.dice, self.op
        args: dict[str, Any] = {name: self._made(call, name, value) for name, value in call.items()}
        self._alias(args)
        gradients = (*op.differentiable, *([op.passed_through] if op.passed_through else []))
        possible = [name for name in gradients if isinstance(args[name], Made)]
        mode = dice.choice(("grad",) * 6 + ("no_grad", "inference"))
        keep = 0.85 if mode == "grad" else 0.3
        wanted = tuple(name for name in possible if dice.random() < keep)
        others = [name for name in self.target.others if name != self.target.backend]
        policies = [self.target.backend] * 6
        policies += [f"{self.target.backend},{other}" for other in others]
        channel = dice.choice(("argument", "argument", "use", "use", "set_policy"))
        if channel != "argument":
            policies += [f"{op.name}={self.target.backend}"] * 2
        return Call(
            op.name,
            dice.choice(policies),
            args,
            wanted,
            (dice.choice(_LAYOUTS), dice.randrange(2**31)),
            mode,
            channel,
            dice.choice(("silent",) * 6 + ("raise", "warn")),
            dice.choice(("none", "none", "pad")),
            dice.choice(SITUATIONS) if dice.random() < 0.25 else "",
        )

    def _made(self, call: Mapping[str, Any], name: str, value: Any) -> Any:
        if not isinstance(value, TensorSpec):
            return value
        dice, op = self.dice, self.op
        dtype, seed = str(value.dtype).removeprefix("torch."), dice.randrange(2**31)
        shape = tuple(value.shape)
        layouts = [each for each in _LAYOUTS if self._possible(each, shape, value)]
        layout = dice.choice(layouts) if dice.random() < 0.6 else "contiguous"
        if value.is_floating_point():
            values, extremes = dice.choice(("normal",) * 6 + ("small", "large", "zero")), ()
            if shape and math.prod(shape) and dice.random() < 0.12:
                kinds = dice.sample([*EXTREMES], dice.choice((1, 1, 2, 3)))
                extremes = tuple((dice.randrange(math.prod(shape)), kind) for kind in kinds)
            return Made(shape, dtype, self.target.device, values, seed, extremes, layout)
        if name in one_elements(op):
            values = f"torch.full({{shape}}, {dice.choice((*_SEEDS, seed))})"
            layout = "contiguous" if dtype == "bool" else self._of_integers("contiguous")
            return Made(shape, dtype, self.target.device, values, seed, (), layout)
        if name in masks(op) or value.dtype == torch.bool:
            share = dice.choice((0.0, 0.1, 0.35, 0.35, 0.9, 1.0))
            values = f"torch.rand({{shape}}, {{generator}}) < {share}"
            return Made(shape, dtype, self.target.device, values, seed, (), layout, dice.random() < 0.4)
        values = "torch.zeros({shape})"
        for item in classes(op):
            if item.name == name:
                sizes, share = call[item.of or self.first].shape, dice.choice((0.0, 0.0, 0.3, 1.0))
                values = f"torch.randint({max(sizes[item.dim], 1) if sizes else 1}, {{shape}}, {{generator}})"
                ignored = None if item.ignored is None else call[item.ignored]
                if share and isinstance(ignored, int) and -(2**63) <= ignored < 2**63:
                    values += f".masked_fill(torch.rand({{shape}}, {{generator}}) < {share}, {ignored})"
        for item in offsets(op):
            if item.name == name:
                rows = (*call[item.of or self.first].shape[item.dim :], 0)[0]
                step = dice.choice((1, 1, 3, rows + 1))  # few different ends, all the same
                values = f"(torch.randint({rows + 1}, {{shape}}, {{generator}}) // {step} * {step}).sort(-1).values"
                if dice.random() < 0.3:  # a tail of few rows, or of none
                    values = f"{rows} - {values}.flip(-1)"
        for item in slots(op):
            if item.name == name and len(shape) == 1:
                cache = call[item.of].shape if isinstance(call[item.of], TensorSpec) else ()
                every = f"torch.randperm({math.prod(cache[:2])}, {{generator}})"
                values = f"torch.cat((torch.full({{shape}}, -1), {every}))[-{shape[0]}:]" if shape[0] else values
        for item in indices(op):
            if item.name == name:
                rows = (*call[item.of].shape[item.dim :], 0)[0]
                values = f"fusedops.testing.random_indices({{shape}}, {rows}, {{generator}})"
                if layout in ("expanded last", "expanded all"):  # a place twice in a row
                    layout = "contiguous"
        for item in packed_rows(op):
            if item.name == name and call[item.format] in (*FORMATS, *SCALED) and shape:
                values = f"fusedops.testing.random_packed({{shape}}, {call[item.format]!r}, {{generator}})"
        for item in packed_parts(op):
            if item.name == name and call[item.format] in SCALED:
                part = f"{item.part!r}, {{shape}}, torch.uint8, {call[item.format]!r}, {{generator}}"
                values = f"fusedops.testing.random_part({part})"
        return Made(shape, dtype, self.target.device, values, seed, (), self._of_integers(layout))

    def _of_integers(self, layout: str) -> str:
        """Return the layout, or that of a negated view."""
        return OF_INTEGERS if self.target.device == "cpu" and self.dice.random() < 0.2 else layout

    def _possible(self, layout: str, shape: tuple[int, ...], spec: TensorSpec) -> bool:
        kind = LAYOUTS[layout]
        if kind.floating and (spec.dtype not in (torch.float32, torch.float64) or self.target.device != "cpu"):
            return False
        return len(shape) >= kind.rank and (math.prod(shape) > 0 or layout == "contiguous")

    def _alias(self, args: dict[str, Any]) -> None:
        """Let a tensor share memory with another one, where one's shape is the other's or that of its part."""
        if self.dice.random() > 0.12:
            return
        names = [name for name, value in args.items() if isinstance(value, Made) and value.floating]
        pairs = [(one, other) for one in names for other in names if one != other]
        self.dice.shuffle(pairs)
        for one, other in pairs:
            small, large = args[one], args[other]
            part = len(large.shape) - len(small.shape)
            if small.dtype != large.dtype or part < 0 or large.shape[part:] != small.shape or 0 in large.shape:
                continue
            how = f"[{', '.join('0' * part)}]" if part else self.dice.choice(("same", ""))
            args[one] = Made(small.shape, small.dtype, small.device, alias=(other, how))
            return
