"""The constraints of ops: the compiled check of a call and the reason of an InvalidInputError agree."""

from __future__ import annotations

import copy
import decimal
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hostile_calls import valid_calls

import fusedops
from fusedops import TensorSpec
from fusedops.constraints import OneElement, Reason
from fusedops.testing import OPS
from fusedops.testing._calls import specs
from fusedops.testing._roles import classes, offsets

# what the path of a call takes for a violation too, see fusedops/_dispatch/call.py
ODD_VALUE = (AttributeError, TypeError, RuntimeError)


class Subclass(torch.Tensor):
    """A tensor that is not plain."""


class Symbolic(float):
    """A float of another class, as numpy's float64 is."""


def tensor(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> Any:
    """Return a tensor of zeros of one of several kinds."""
    if kind == "spec":
        return TensorSpec(shape, dtype, "npu:1")
    zeros = torch.zeros(shape, dtype=dtype, device="meta" if kind == "meta" else "cpu")
    if kind == "sparse":
        return zeros.to_sparse()
    if kind == "subclass":
        return zeros.as_subclass(Subclass)
    if kind == "parameter" and dtype.is_floating_point:
        return torch.nn.Parameter(zeros)
    if kind in ("nested", "jagged") and shape:
        layout = torch.jagged if kind == "jagged" else torch.strided
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own: the API of nested tensors is in prototype stage
            return torch.nested.nested_tensor([zeros, zeros], layout=layout)
    return zeros


KINDS = ("plain", "plain", "plain", "meta", "sparse", "subclass", "parameter", "nested", "jagged", "spec")
DTYPES = (torch.float32, torch.float16, torch.float64, torch.bool, torch.uint8, torch.int64, torch.complex64)
SHAPES = ((), (1,), (4,), (3, 4), (3, 1), (1, 4), (2, 3, 4), (2, 1, 1, 4), (2, 1, 3, 4), (0, 4), (5,))
ANYTHING = (
    None, "tanh", "none", "erf", 0, 1, -1, 0.5, 1.0, -0.0, 2.0, math.inf, -math.inf, math.nan, True, False, 2**63,
    -(2**70), 1j, decimal.Decimal("0.5"), Symbolic(0.5), Symbolic("nan"), np.float64(0.5), np.float32(0.5), np.int64(1),
    np.bool_(True), np.zeros(3), [1.0], (), {}, object(), torch.float32, torch.tensor(0.5), torch.ones(2),
)  # fmt: skip
FLOATS = (0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 5e-324, 1e-45, 3.4e38, 3.5e38, -1.8e308)
INTEGERS = (0, 1, -1, 2, 3, 4, 8, 127, -129, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63), 2**64)
Dice = random.Random


def any_tensor(dice: Dice) -> Any:
    return tensor(dice.choice(SHAPES), dice.choice(DTYPES), dice.choice(KINDS))


def likely(dice: Dice) -> Any:
    return tensor(dice.choice(SHAPES), dice.choice(DTYPES[:3]), "plain")


def anything(dice: Dice) -> Any:
    return dice.choice(ANYTHING)


def number(dice: Dice) -> float:
    return dice.choice((*FLOATS, dice.uniform(-2, 2), dice.uniform(0, 1), 10 ** dice.uniform(-50, 50)))


def integer(dice: Dice) -> int:
    return dice.choice((*INTEGERS, dice.randrange(-300, 300), dice.randrange(5)))


def usual(dice: Dice) -> float:
    return dice.choice((0.5, 1.0))


def none(dice: Dice) -> None:
    return None


VALUES: dict[str, tuple[Callable[[Dice], Any], ...]] = {
    "Tensor": (likely, likely, any_tensor, anything),
    "Tensor | None": (none, likely, any_tensor, anything),
    "float": (number, usual, anything),
    "float | None": (none, number, usual, anything),
    "int": (integer, anything),
    "int | None": (none, integer, anything),
    "bool": (lambda dice: dice.choice((False, True)), anything),
    "str": (lambda dice: dice.choice(("tanh", "none", "erf", "upper_left")), anything),
    "str | None": (none, lambda dice: dice.choice(("gelu", "relu2", "erf")), anything),
    "tuple[int, int] | None": (none, lambda dice: (dice.randint(-1, 5), integer(dice)), anything),
}
CALLS = 250  # of each op


def another(dice: Dice, value: Any, kind: str) -> Any:
    """Return another value of an argument: of a tensor also one that differs in its dtype alone."""
    if isinstance(value, torch.Tensor) and dice.random() < 0.25:
        return value.to(dice.choice(DTYPES))
    return dice.choice(VALUES[kind])(dice)


def violates(op: Any, args: tuple[Any, ...], check: Callable[..., Any] | None = None) -> bool | None:
    """Return what the compiled check finds: True or False; None where a tensor is not plain, or a value is odd."""
    try:
        violated = (check or op.check)(*args)
    except ODD_VALUE:
        return True
    if violated is None or type(violated).__name__ == "PlainFloat":  # the last condition: an integer is converted
        return False
    return None if type(violated).__name__ == "PlainTensor" else True


@pytest.mark.parametrize("name", OPS)
def test_the_check_the_reason_and_the_call_agree(name: str) -> None:
    """Valid calls with up to two arguments replaced, some without optional ones, and calls of any arguments."""
    op = OPS[name]
    valid = [op.prepared(op.bind((), call)) for call in valid_calls(name)]
    for seed in range(CALLS):
        dice = Dice(f"{name} {seed}")
        changed = dice.sample(op.parameters, dice.choice((1, 1, 2, len(op.parameters))))
        changed = dice.choice((changed, op.parameters[:1]))  # without it no call is valid
        call = dict(zip(op.parameters, dice.choice(valid)))
        if dice.random() < 0.5:
            call |= {parameter: None for parameter in call if op.types[parameter].endswith("| None")}
        if dice.random() < 0.25:  # what is wrong in one is wrong in all: no constraint on two of them is violated
            one, changed = any_tensor(dice), []
            call = {key: one if isinstance(value, torch.Tensor) else value for key, value in call.items()}
        args = tuple({**call, **{key: another(dice, call[key], op.types[key]) for key in changed}}.values())
        reason = op.invalid(args)
        assert reason is None or isinstance(reason, Reason)
        found = violates(op, args)
        if found is not None:
            assert found == (reason is not None), (seed, found, reason)
        if all(is_strided(value) for value in args if isinstance(value, torch.Tensor)):
            again = op.invalid(op.specs(args))
            assert (again and again.code) == (reason and reason.code), f"{seed}: the specs are judged as the call"
        if dice.random() < 1 / 6 and not {TensorSpec, Subclass} & {*map(type, args)}:
            call_is_served_or_refused(op, args)


def is_strided(tensor: torch.Tensor) -> bool:
    return not tensor.is_nested and tensor.layout is torch.strided


def call_is_served_or_refused(op: Any, args: tuple[Any, ...]) -> None:
    """Call the public function: a valid call has results, and any other is an InvalidInputError with the reason."""
    # numbers become tensors of one element before the check
    one = [constraint.name for constraint in op.constraints if isinstance(constraint, OneElement)]
    args = tuple(
        None if parameter in one and not isinstance(arg, torch.Tensor) else arg
        for parameter, arg in zip(op.parameters, args)
    )
    text = ""
    try:
        args = op.prepared(args)  # the public function accepts more than these, and its reason is of what it makes
    except AttributeError:  # of a first argument that is no tensor
        pass
    except fusedops.InvalidInputError as error:
        text = str(error)
    reason = op.invalid(args)
    if reason is None and not text:
        try:
            ys = op.as_tuple(op.call_public(*args, backend="eager"))
        except fusedops.InvalidInputError:
            assert classes(op) or offsets(op), "no constraint reads the elements of these, and of no others"
            return
        assert isinstance(ys[0], torch.Tensor)
        assert all(y is None or isinstance(y, torch.Tensor) for y in ys)  # one may be left out, at the end too
        assert len(ys) <= len(op.outputs)
    else:
        with pytest.raises(fusedops.InvalidInputError) as error:
            op.call_public(*args, backend="eager")
        assert str(error.value) == (text or f"{op.name}: {reason}")


@pytest.mark.parametrize("name", OPS)
def test_boundaries_of_an_ops_constraints_agree_with_its_check(name: str) -> None:
    op = OPS[name]
    sides: dict[str, set[bool]] = {}
    for case in op.evidence.cases:
        args = specs(op, case, torch.float32)
        call = dict(zip(op.parameters, op.prepared(op.bind((), args))))
        assert op.invalid(tuple(call.values())) is None
        for constraint in op.constraints:
            for boundary in constraint.boundaries(call):
                sides.setdefault(repr(constraint), set()).add(boundary.taken)
                invalid = op.invalid(tuple(boundary.args.values()))
                alone = constraint.reasons(boundary.args)
                assert (not alone) == boundary.taken, (constraint, boundary.label)
                assert (invalid is None) <= boundary.taken, (constraint, boundary.label)
                refused = violates(op, tuple(boundary.args.values()), op.check_any_kind)
                assert refused == (invalid is not None), (constraint, boundary.label)
    assert set(sides) == {repr(constraint) for constraint in op.constraints}


@pytest.mark.parametrize("name", OPS)
def test_every_case_and_sample_of_an_op_is_valid(name: str) -> None:
    op = OPS[name]
    for case in op.evidence.cases:
        assert set(case.args) <= set(op.parameters)
    assert op.evidence.sample is None or set(op.evidence.sample(2, 3)) <= set(op.parameters)
    assert op.constraints
    assert copy.copy(op).parameters == op.parameters


def test_integers_are_the_last_outputs() -> None:
    def doubled(x: torch.Tensor, backend: str | None = None) -> None:
        """Return nothing."""

    for outputs in (("y", fusedops.Output("chosen", integer=True), "z"), (fusedops.Output("chosen", integer=True),)):
        with pytest.raises(ValueError, match="integers last"):
            fusedops.Op(
                doubled, constraints=[], reference=doubled, backward=doubled, differentiable=("x",), outputs=outputs,
                evidence="none:NONE",
            )  # fmt: skip
