"""Constraints: five uses of one declaration, and that they agree."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state import backend_records, kernel_entry

from fusedops import TensorSpec
from fusedops.constraints import (
    Between,
    Broadcasts,
    Capability,
    Classes,
    Constraint,
    Count,
    Dim,
    Divisor,
    DType,
    Finite,
    Flag,
    Floating,
    Integer,
    LastDims,
    LeadingDims,
    LogSums,
    Mask,
    Offsets,
    OneElement,
    OneOf,
    Packed,
    Present,
    Probability,
    Rank,
    SameDevice,
    SameDType,
    SameShape,
    SameSize,
    Scalar,
    When,
    compile_check,
)
from fusedops.testing import OPS

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
PARAMETERS = ("x", "mask", "scale")
CALL: dict[str, Any] = {"x": TensorSpec((2, 3, 64, 96)), "mask": None, "scale": 1.0}

# One of each, as kernels declare them, with the sentence of the support table
EXAMPLES: list[tuple[Constraint, str]] = [
    (Rank("x", 4), "x: 4-D"),
    (Rank("x", 2, 3, 4), "x: 2, 3 or 4-D"),
    (
        Dim("x", (-2, -1), at_least=32, at_most=4096, multiple_of=32),
        "x: dim -2 and -1 a multiple of 32 in [32, 4096]",
    ),
    (Dim("x", (-1,), at_least=2), "x: dim -1 a size of at least 2"),
    (Dim("x", (-1,), at_most=4096), "x: dim -1 a size of at most 4096"),
    (Dim("x", (0,), multiple_of=8), "x: dim 0 a multiple of 8"),
    (DType("x", F16, BF16, F32), "x: float16, bfloat16 or float32"),
    (Scalar("scale", abs_at_most=1.0), "scale: a value in [-1, 1]"),
    (Scalar("scale", one_of=(1.0, 0.125)), "scale: 1.0 or 0.125"),
    (Present("mask"), "mask: required"),
    (Present("mask", present=False), "mask: not accepted"),
    (Capability("x", (8, 0)), "compute capability at least 8.0"),
    (
        When(DType("x", F16), Scalar("scale", abs_at_most=1.0)),
        "scale: a value in [-1, 1] if x: float16",
    ),
    (Rank("x", at_least=2), "x: at least 2 dimensions"),
    (Floating("x"), "x: float16, bfloat16, float32 or float64"),
    (Mask("mask"), "mask: bool or uint8"),
    (OneElement("mask", torch.int64), "mask: int64, one element"),
    (Finite("scale"), "scale: a Python number, finite in float32"),
    (Finite("scale", at_least=0.5), "scale: a Python number of at least 0.5, finite in float32"),
    (Probability("scale"), "scale: a number in [0, 1]"),
    (Flag("scale"), "scale: True or False"),
    (OneOf("scale", "tanh", "none"), "scale: 'tanh' or 'none'"),
    (Finite("scale", at_least=0.0, optional=True), "scale: a Python number of at least 0, finite in float32, or None"),
    (OneOf("scale", -2, -3), "scale: -2 or -3"),
    (Broadcasts("mask", "x"), "mask: broadcasts to x"),
    (SameDType("mask", "x"), "mask: the dtype of x"),
    (Packed("x", "mask"), "x: an even last dim where mask is None"),
    (SameShape("mask", "x"), "mask: the shape of x"),
    (LastDims("mask", "x"), "mask: the shape of the last dim of x"),
    (LastDims("mask", "x", 2), "mask: the shape of the last 2 dims of x"),
    (LeadingDims("mask", "x"), "mask: the shape of x without its last dim"),
    (SameDevice("mask", "x"), "mask: on the device of x"),
    (SameSize("mask", -2, "x", 0), "mask: dim -2 of the size of dim 0 of x"),
    (Count("scale"), "scale: a positive integer, or None"),
    (Divisor("scale", "x"), "scale: a divisor of the last size of x"),
    (Classes("mask"), "mask: int64"),
    (LogSums("x"), "x: float32 or float64"),
    (Offsets("mask"), "mask: int32 or int64"),
    (Between("x", None, 0.0), "x: float16, bfloat16, float32 or float64"),
    (OneElement("mask", F16, BF16), "mask: float16 or bfloat16, one element"),
    (Integer("scale"), "scale: a 64-bit integer"),
]
ids = [f"{type(constraint).__name__}-{number}" for number, (constraint, _) in enumerate(EXAMPLES)]


def refuses(constraints: list[Constraint], call: dict[str, Any]) -> bool:
    return compile_check(PARAMETERS, constraints)(*(call[name] for name in PARAMETERS)) is not None


# ------------------------------------------------------------------------------------------- the five uses


X = TensorSpec((3, 4))
REASONS: list[tuple[Constraint, dict[str, Any], str, str, str, str]] = [
    (Rank("x", 4), {"x": X}, "rank", "x with 2 dimensions", "4 dimensions",
     "view x with 4 dimensions, with leading ones of size 1"),
    (Rank("x", 2, 3), {"x": TensorSpec((1, 2, 3, 4))}, "rank", "x with 4 dimensions", "2 or 3 dimensions",
     "merge leading dimensions of x until it has 3"),
    (Rank("x", at_least=2), {"x": TensorSpec((4,))}, "rank", "x with 1 dimension", "at least 2 dimensions",
     "view x with 2 dimensions, with leading ones of size 1"),
    (Dim("x", (-1,), 32, 4096, 32), {"x": TensorSpec((64, 100))}, "size", "dim -1 of x = 100",
     "a multiple of 32 in [32, 4096]", "pad dim -1 of x from 100 to 128"),
    (Dim("x", (-2,), 32, 4096, 32), {"x": TensorSpec((7, 100))}, "size", "dim -2 of x = 7",
     "a multiple of 32 in [32, 4096]", "pad dim -2 of x from 7 to 32"),
    (Dim("x", (-1,), 32, 4096, 32), {"x": TensorSpec((64, 4128))}, "size", "dim -1 of x = 4128",
     "a multiple of 32 in [32, 4096]", "split x so that dim -1 is at most 4096"),
    (DType("x", F16, BF16), {"x": TensorSpec((2, 2), F64)}, "dtype", "x of float64", "float16 or bfloat16",
     "convert x to float16 or bfloat16"),
    (Floating("x"), {"x": TensorSpec((2, 2), torch.int64)}, "dtype", "x of int64",
     "float16, bfloat16, float32 or float64", "convert it, as in x.float()"),
    (Floating("x"), {"x": torch.eye(2).to_sparse()}, "layout", "x of layout torch.sparse_coo", "a strided tensor",
     "convert it, as in x.to_dense()"),
    (Mask("mask"), {"mask": X}, "dtype", "mask of float32", "bool or uint8",
     "for an additive mask pass mask < 0: True means masked out"),
    (Mask("mask"), {"mask": TensorSpec((3, 4), torch.int64)}, "dtype", "mask of int64", "bool or uint8",
     "pass mask != 0: True means masked out"),
    (OneElement("mask", torch.int64), {"mask": TensorSpec((3,), torch.int64)}, "size", "mask of 3 elements",
     "one element", "pass one element, as in mask[:1]"),
    (Scalar("scale", 1.0), {"scale": -1.5}, "scalar", "scale = -1.5", "a value in [-1, 1]",
     "pass scale as a value in [-1, 1]"),
    (Finite("scale"), {"scale": math.nan}, "scalar", "scale = nan", "a Python number, finite in float32",
     "pass scale as a Python number, finite in float32"),
    (Finite("scale", at_least=0.0), {"scale": -1}, "scalar", "scale = -1",
     "a Python number of at least 0, finite in float32",
     "pass scale as a Python number of at least 0, finite in float32"),
    (Finite("scale"), {"scale": torch.ones(1)}, "scalar", "scale = a tensor of 1 element",
     "a Python number, finite in float32",
     "use scale.item()"),
    (Probability("scale"), {"scale": 1.5}, "scalar", "scale = 1.5", "a number in [0, 1]",
     "pass scale as a number in [0, 1]"),
    (Flag("scale"), {"scale": 1}, "scalar", "scale = 1", "True or False", "pass bool(scale)"),
    (OneOf("scale", "tanh", "none"), {"scale": "erf"}, "scalar", "scale = 'erf'", "'tanh' or 'none'",
     "pass scale as 'tanh' or 'none'"),
    (OneOf("scale", -2, -3), {"scale": -2.0}, "scalar", "scale = -2.0", "-2 or -3", "pass scale as -2 or -3"),
    (Finite("scale", at_least=0.0, optional=True), {"scale": -1.0}, "scalar", "scale = -1.0",
     "a Python number of at least 0, finite in float32, or None",
     "pass scale as a Python number of at least 0, finite in float32, or None"),
    (SameDType("mask", "x"), {"mask": TensorSpec((3, 4), F16)}, "dtype", "mask of float16", "the dtype of x, float32",
     "convert it, as in mask.to(x.dtype)"),
    (Packed("x", "mask"), {"x": TensorSpec((2, 7))}, "size", "x of shape (2, 7) and no mask",
     "an even last dim, which holds x and mask", "pass mask, or pack it into x"),
    (Present("mask"), {}, "presence", "mask = None", "a mask", "call it with a mask"),
    (Present("mask", False), {"mask": TensorSpec((2, 2), torch.bool)}, "presence", "a mask", "no mask",
     "call it with no mask"),
    (Capability("x", (8, 0)), {"x": TensorSpec((2, 2), device="cuda", capability=(7, 5))}, "capability",
     "compute capability 7.5 of the device of x", "at least 8.0", "run on a newer device"),
    (When(DType("x", F16), Scalar("scale", 1.0)), {"x": TensorSpec((2, 2), F16), "scale": 3.0}, "scalar",
     "scale = 3.0", "a value in [-1, 1] (with x: float16)", "pass scale as a value in [-1, 1]"),
    (Broadcasts("mask", "x"), {"x": X, "mask": TensorSpec((3,))}, "size", "mask of shape (3,)",
     "a shape that broadcasts to x (3, 4): each size, from the last, 1 or x's",
     "give mask sizes of 1 where it repeats"),
    (Broadcasts("mask", "x"), {"x": TensorSpec((2, 3, 4, 5)), "mask": TensorSpec((2, 5))}, "size",
     "mask of shape (2, 5)", "a shape that broadcasts to x (2, 3, 4, 5): each size, from the last, 1 or x's",
     "pass mask[:, None, None, :]"),
    (LastDims("mask", "x"), {"x": X, "mask": TensorSpec((3,))}, "size", "mask of shape (3,)",
     "the shape of the last dim of x, (4,)", "pass a mask of shape (4,)"),
    (LastDims("mask", "x"), {"x": X, "mask": TensorSpec((1, 4))}, "size", "mask of shape (1, 4)",
     "the shape of the last dim of x, (4,)", "pass mask.view(4,)"),
    (LeadingDims("mask", "x"), {"x": X, "mask": TensorSpec((4,), torch.int64)}, "size", "mask of shape (4,)",
     "the shape of x without its last dim, (3,)", "pass a mask of shape (3,)"),
    (LeadingDims("mask", "x"), {"x": X, "mask": TensorSpec((3, 1), torch.int64)}, "size", "mask of shape (3, 1)",
     "the shape of x without its last dim, (3,)", "pass mask.view(3,)"),
    (LeadingDims("mask", "x"), {"x": TensorSpec((2, 9, 4)), "mask": TensorSpec((2, 4), torch.int64)}, "size",
     "mask of shape (2, 4)", "the shape of x without its last dim, (2, 9)",
     "move the second dim of x to the end, as in x.movedim(1, -1)"),
    (Classes("mask"), {"mask": TensorSpec((3,))}, "dtype", "mask of float32", "int64",
     "pass the index of each class, as in mask.argmax(-1)"),
    (Classes("mask"), {"mask": TensorSpec((3,), torch.int32)}, "dtype", "mask of int32", "int64",
     "convert it, as in mask.long()"),
    (LogSums("x"), {"x": TensorSpec((3,), torch.bfloat16)}, "dtype", "x of bfloat16", "float32 or float64",
     "pass x as attention returns it; in 16 bits it has lost what the weights depend on"),
    (Offsets("mask"), {"mask": TensorSpec((3,), torch.uint8)}, "dtype", "mask of uint8", "int32 or int64",
     "pass the end of each group of rows, as in counts.cumsum(0), with mask.long()"),
    (SameSize("mask", -1, "x", 0), {"x": X, "mask": TensorSpec((3, 4))}, "size",
     "mask of shape (3, 4) and x of (3, 4)", "dim -1 of mask of the size of dim 0 of x",
     "pass mask with a dim -1 of 3"),
    (Count("scale"), {"scale": 0}, "scalar", "scale = 0", "a positive integer, or None",
     "pass scale as a positive integer, or None"),
    (Divisor("scale", "x"), {"scale": 3, "x": X}, "scalar", "scale = 3", "a divisor of the last size of x, 4",
     "pass scale as a divisor of the last size of x, 4"),
    (Integer("scale"), {"scale": True}, "scalar", "scale = True", "a 64-bit integer", "pass scale as a 64-bit integer"),
    (SameShape("mask", "x"), {"x": X, "mask": TensorSpec((4,))}, "size", "mask of shape (4,)", "the shape of x, (3, 4)",
     "expand the smaller one to it"),
    (SameDevice("mask", "x"), {"x": X, "mask": TensorSpec((4,), device="npu:1")}, "device",
     "mask on npu:1 and x on cpu", "one device", "move it with mask.to(x.device)"),
]  # fmt: skip


@pytest.mark.parametrize(("constraint", "call", "code", "has", "needed", "fix"), REASONS)
def test_a_refusal_states_what_the_call_has_what_is_needed_and_the_fix(
    constraint: Constraint, call: dict[str, Any], code: str, has: str, needed: str, fix: str
) -> None:
    call = {**CALL, **call}
    assert refuses([constraint], call)
    (reason,) = constraint.reasons(call)
    assert (reason.code.value, reason.given, reason.needed, reason.fix) == (code, has, needed, fix)
    assert str(reason) == f"got {has}, expected {needed}; to fix: {fix}"
    assert json.loads(json.dumps(reason.to_dict())) == {
        "code": code, "detail": f"got {has}, expected {needed}", "given": has, "needed": needed, "fix": fix,
    }  # fmt: skip


def test_each_dimension_has_its_reason() -> None:
    found = Dim("x", (-2, -1), multiple_of=32).reasons({**CALL, "x": TensorSpec((33, 64, 31))})
    assert [reason.given for reason in found] == ["dim -1 of x = 31"]
    found = Dim("x", (-2, -1), multiple_of=32).reasons({**CALL, "x": TensorSpec((33, 31))})
    assert [reason.given for reason in found] == ["dim -2 of x = 33", "dim -1 of x = 31"]


@pytest.mark.parametrize(("constraint", "sentence"), EXAMPLES, ids=ids)
def test_the_support_table_reads_well(constraint: Constraint, sentence: str) -> None:
    assert constraint.describe() == sentence


@pytest.mark.parametrize("constraint", [constraint for constraint, _ in EXAMPLES], ids=ids)
def test_json_is_complete(constraint: Constraint) -> None:
    data = constraint.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["type"] == type(constraint).__name__
    assert data.keys() == {"type", *vars(constraint)} - {"code"}


def test_json_of_a_nested_constraint() -> None:
    assert When(DType("x", F16), Dim("x", (-1,), at_least=32)).to_dict() == {
        "type": "When",
        "name": "x",
        "condition": {"type": "DType", "name": "x", "dtypes": ["float16"]},
        "then": {
            "type": "Dim",
            "name": "x",
            "dims": [-1],
            "at_least": 32,
            "at_most": None,
            "multiple_of": None,
            "fix": "",
        },
    }


# ---------------------------------------------------------------------------------------- compiled check equals reasons

sizes = st.integers(0, 9)
dims = st.integers(-4, 3)
dtypes = st.sampled_from([F16, BF16, F32, F64])
scalars = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True), st.integers(-4, 4), st.booleans(), st.sampled_from([0.5, -0.5, 1.0])
)
tensor_names = st.sampled_from(["x", "mask"])
names = st.sampled_from(PARAMETERS)
bound = st.one_of(st.none(), sizes)


@st.composite
def dim_constraints(draw: st.DrawFn) -> Dim:
    low, high, step = draw(bound), draw(bound), draw(st.one_of(st.none(), st.integers(1, 4)))
    if low is high is step is None:
        low = 1
    return Dim(draw(tensor_names), tuple(draw(st.lists(dims, min_size=1, max_size=3, unique=True))), low, high, step)


@st.composite
def scalar_constraints(draw: st.DrawFn) -> Scalar:
    width = draw(st.one_of(st.none(), st.floats(0, 4)))
    values = draw(st.one_of(st.none(), st.lists(scalars, min_size=1, max_size=3).map(tuple)))
    return Scalar("scale", 2 if width is None and values is None else width, values)


plain_constraints = st.one_of(
    st.builds(lambda n, at_least: Rank(n, at_least=at_least), tensor_names, st.integers(0, 4)),
    st.builds(Floating, tensor_names),
    st.builds(Mask, tensor_names),
    st.builds(OneElement, tensor_names, dtypes),
    st.builds(Classes, tensor_names),
    st.builds(LogSums, tensor_names),
    st.builds(Offsets, tensor_names),
    st.builds(Between, tensor_names, st.sampled_from((None, 0.0)), st.just(1.0)),
    st.builds(Integer, st.just("scale")),
    st.builds(Count, st.just("scale")),
    st.builds(Divisor, st.just("scale"), st.just("x")),
    st.builds(SameSize, st.just("mask"), st.integers(-4, 3), st.just("x"), st.integers(-4, 3)),
    st.builds(Finite, st.just("scale"), st.one_of(st.none(), st.integers(-2, 2), st.floats(-2, 2))),
    st.builds(Probability, st.just("scale")),
    st.builds(Flag, st.just("scale")),
    st.builds(OneOf, st.just("scale"), st.sampled_from(["tanh", "none"])),
    st.builds(
        lambda kind: kind("mask", "x"), st.sampled_from([Broadcasts, SameShape, SameDevice, LastDims, LeadingDims])
    ),
    st.builds(lambda n, ranks: Rank(n, *ranks), tensor_names, st.lists(st.integers(0, 4), min_size=1, max_size=3)),
    dim_constraints(),
    st.builds(lambda n, these: DType(n, *these), tensor_names, st.lists(dtypes, min_size=1, max_size=3)),
    scalar_constraints(),
    st.builds(Present, names, st.booleans()),
    st.builds(Capability, tensor_names, st.tuples(st.integers(0, 10), st.integers(0, 9))),
)
constraints = st.recursive(plain_constraints, lambda inner: st.builds(When, inner, inner), max_leaves=4)
shapes = st.lists(sizes, max_size=4).map(tuple)
capabilities = st.one_of(st.none(), st.tuples(st.integers(0, 10), st.integers(0, 9)))
specs = st.builds(TensorSpec, shapes, dtypes, st.sampled_from(["cpu", "cuda", "npu:1"]), capabilities)
tensors = st.builds(lambda shape, dtype: torch.empty(shape, dtype=dtype), shapes, dtypes)


@given(
    st.lists(constraints, max_size=4), st.one_of(specs, tensors), st.one_of(st.none(), specs, tensors),
    st.one_of(st.none(), scalars),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_the_compiled_check_refuses_exactly_when_there_are_reasons(
    constraints: list[Constraint], x: Any, mask: Any, scale: Any
) -> None:
    call = {"x": x, "mask": mask, "scale": scale}
    refusing = [constraint for constraint in constraints if constraint.reasons(call)]
    check = compile_check(PARAMETERS, constraints)
    assert check(x, mask, scale) is (refusing[0] if refusing else None)
    for constraint in constraints:
        assert json.dumps(constraint.to_dict())
        assert constraint.describe()


@given(st.lists(constraints, min_size=1, max_size=3), st.one_of(specs))
@settings(max_examples=40, deadline=None)
def test_boundaries_of_any_constraint_are_labelled_right(constraints: list[Constraint], x: TensorSpec) -> None:
    call = {"x": x, "mask": TensorSpec((3, 3)), "scale": 1.0}
    for constraint in constraints:
        if refuses([constraint], call):
            continue  # boundaries are made from a call that is taken
        for boundary in constraint.boundaries(call):
            assert boundary.label
            assert boundary.taken == (not refuses([constraint], dict(boundary.args))), boundary


def test_without_constraints_every_call_is_accepted() -> None:
    assert compile_check(PARAMETERS, ())(None, None, None) is None


def test_none_is_met_by_every_constraint_but_presence_and_numbers() -> None:
    nothing = {"x": None, "mask": None, "scale": None}
    for constraint, _ in EXAMPLES:
        required = isinstance(constraint, Present) and constraint.present
        number = isinstance(constraint, (Finite, Integer, Probability, Flag, OneOf))
        wanted = required or (number and not getattr(constraint, "optional", False))
        assert refuses([constraint], nothing) == wanted, constraint
        assert bool(constraint.reasons(nothing)) == wanted, constraint


class Counted:
    """A spec that counts the reads of its attributes."""

    def __init__(self, spec: TensorSpec) -> None:
        self.spec, self.reads = spec, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.reads[name] += 1
        return getattr(self.spec, name)


def test_a_check_reads_the_shape_of_a_required_tensor_once() -> None:
    constraints = (Rank("x", 4), Dim("x", (-1,), multiple_of=32), Dim("x", (0,), at_least=2))
    x = Counted(TensorSpec((2, 1, 5, 32)))
    assert compile_check(PARAMETERS, constraints, never_none=("x",))(x, None, 1.0) is None
    assert x.reads == {"shape": 1}


def test_the_first_constraint_that_refuses_is_named() -> None:
    rank, size = Rank("x", 4), Dim("x", (-1,), multiple_of=32)
    check = compile_check(PARAMETERS, (rank, size))
    assert check(TensorSpec((5, 5)), None, 1.0) is rank
    assert check(TensorSpec((1, 1, 5, 5)), None, 1.0) is size
    assert check(TensorSpec((1, 1, 5, 32)), None, 1.0) is None


# -------------------------------------------------------------------------------- the constraints of installed backends


INSTALLED = {
    "-".join((record.name, entry.kernel.op, entry.kernel.direction, *entry.kernel.device_types)): entry
    for record in backend_records()
    for entry in record.kernels
    if entry.kernel.constraints
}


def a_call_that_is_taken(op: Any, entry: Any) -> dict[str, Any]:
    """One from the op's cases, which no constraint refuses; backward's own arguments take after x."""
    parameters = op.parameters if entry.kernel.direction == "forward" else op.backward_parameters
    for case in op.evidence.cases:
        for dtype in op.evidence.tolerance:
            args = {k: TensorSpec(v, dtype) if isinstance(v, tuple) else v for k, v in case.args.items()}
            if "mask" in args:
                args["mask"] = TensorSpec(args["mask"].shape, torch.bool)
            whole = dict(zip(op.parameters, op.prepared(op.bind((), args))))
            call = {name: whole.get(name, whole[op.parameters[0]]) for name in parameters}
            if entry.check(*call.values()) is None:
                return call
    raise AssertionError(f"{entry.backend} takes none of the cases of {op.name}")


@pytest.mark.parametrize("entry", INSTALLED.values(), ids=INSTALLED)
def test_boundaries_of_declared_constraints_agree_with_the_check(entry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if entry.backend == "cpu":  # as on the processors on which all its kernels are chosen
        from fusedops_cpu.launch.library import library

        monkeypatch.setattr(library(), "is_ahead_of_mkl", True)
    call = a_call_that_is_taken(OPS[entry.kernel.op], entry)
    for constraint in entry.kernel.constraints:
        check_boundaries(entry, constraint, call)


def check_boundaries(entry: Any, constraint: Constraint, call: dict[str, Any]) -> None:
    rule = constraint.describe()
    boundaries = list(constraint.boundaries(call))
    presence = constraint.then if isinstance(constraint, When) else constraint
    if isinstance(presence, Present) and call[constraint.name] is None:  # a call of this op has another tensor
        boundaries += constraint.boundaries({**call, constraint.name: call[next(iter(call))]})
    if all(boundary.taken for boundary in boundaries):  # it is about another value of an argument, such as a window
        values = [
            (own.name, value) for own in OPS[entry.kernel.op].constraints for value in own.examples(call).values()
        ]
        boundaries += [each for name, value in values for each in constraint.boundaries({**call, name: value})]
    assert {boundary.taken for boundary in boundaries} == {True, False}, f"a constraint has two sides: {rule}"
    alone = compile_check(tuple(boundaries[0].args), [constraint])
    for boundary in boundaries:
        assert (alone(*boundary.args.values()) is None) == boundary.taken, (rule, boundary.label)
        assert (entry.check(*boundary.args.values()) is None) <= boundary.taken, (rule, boundary.label)


def test_the_edges_that_the_vendor_documents_are_among_the_boundaries() -> None:
    entry = kernel_entry("npu", "scaled_masked_softmax")
    call = a_call_that_is_taken(OPS["scaled_masked_softmax"], entry)
    labels = {b.label: b.taken for constraint in entry.kernel.constraints for b in constraint.boundaries(call)}
    for dim in ("-2", "-1"):
        at = f"x dim {dim} ="
        assert not labels[f"{at} 31"]
        assert labels[f"{at} 32"]
        assert not labels[f"{at} 33"]
        assert not labels[f"{at} 48"]
        assert labels[f"{at} 4064"]
        assert labels[f"{at} 4096"]
        assert not labels[f"{at} 4097"]
        assert not labels[f"{at} 4128"]
    # any rank is viewed with 4 dimensions, but for a mask that skips between the leading ones
    assert [taken for label, taken in labels.items() if label.startswith("leading sizes")] == [True, True, True, False]
    assert [labels[f"x {name}"] for name in ("float16", "bfloat16", "float32", "float64")] == [True, True, True, False]
