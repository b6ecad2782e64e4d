"""Limits: five uses of one declaration, and that they say the same."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedops import TensorSpec
from fusedops._op import OPS
from fusedops._registry import registry
from fusedops.constraints import (
    Capability,
    Constraint,
    Dim,
    DType,
    Present,
    Rank,
    Reason,
    ReasonCode,
    Scalar,
    When,
    compile_check,
)

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
    (Present("mask", present=False), "mask: not taken"),
    (Capability("x", (8, 0)), "compute capability at least 8.0"),
    (
        When(DType("x", F16), Scalar("scale", abs_at_most=1.0)),
        "scale: a value in [-1, 1] where x: float16",
    ),
]
ids = [f"{type(limit).__name__}-{number}" for number, (limit, _) in enumerate(EXAMPLES)]


def refuses(limits: list[Constraint], call: dict[str, Any]) -> bool:
    check = compile_check(PARAMETERS, limits)
    return check is not None and check(*(call[name] for name in PARAMETERS)) is not None


# ------------------------------------------------------------------------------------------- what each of the five says


@pytest.mark.parametrize(
    ("limit", "call", "code", "detail", "fix"),
    [
        (Rank("x", 4), {"x": TensorSpec((3, 4))}, "rank", "x has 2 dimensions; needs 4 dimensions",
         "view x with 4 dimensions, adding leading ones of size 1"),
        (Rank("x", 2, 3), {"x": TensorSpec((1, 2, 3, 4))}, "rank", "x has 4 dimensions; needs 2 or 3 dimensions",
         "merge leading dimensions of x until it has 3"),
        (Dim("x", (-1,), 32, 4096, 32), {"x": TensorSpec((64, 100))}, "size",
         "dim -1 of x is 100; needs a multiple of 32 in [32, 4096]", "pad dim -1 of x from 100 to 128"),
        (Dim("x", (-2,), 32, 4096, 32), {"x": TensorSpec((7, 100))}, "size",
         "dim -2 of x is 7; needs a multiple of 32 in [32, 4096]", "pad dim -2 of x from 7 to 32"),
        (Dim("x", (-1,), 32, 4096, 32), {"x": TensorSpec((64, 4128))}, "size",
         "dim -1 of x is 4128; needs a multiple of 32 in [32, 4096]", "split x so that dim -1 is at most 4096"),
        (DType("x", F16, BF16), {"x": TensorSpec((2, 2), F64)}, "dtype", "x is float64; needs float16 or bfloat16",
         "convert x to float16 or bfloat16"),
        (Scalar("scale", 1.0), {"scale": -1.5}, "scalar", "scale is -1.5; needs a value in [-1, 1]",
         "pass scale as a value in [-1, 1]"),
        (Present("mask"), {}, "presence", "mask is None; needs mask given", "call with mask given"),
        (Present("mask", False), {"mask": TensorSpec((2, 2), torch.bool)}, "presence",
         "mask is given; needs mask left out", "call with mask left out"),
        (Capability("x", (8, 0)), {"x": TensorSpec((2, 2), device="cuda", capability=(7, 5))}, "capability",
         "the device of x has compute capability 7.5; needs at least 8.0", "run on a newer device"),
        (When(DType("x", F16), Scalar("scale", 1.0)), {"x": TensorSpec((2, 2), F16), "scale": 3.0}, "scalar",
         "scale is 3.0; needs a value in [-1, 1] (with x: float16)", "pass scale as a value in [-1, 1]"),
    ],
)  # fmt: skip
def test_a_refusal_says_given_needed_and_what_to_do(
    limit: Constraint, call: dict[str, Any], code: str, detail: str, fix: str
) -> None:
    call = {**CALL, **call}
    assert refuses([limit], call)
    (reason,) = limit.reasons(call)
    assert (reason.code.value, reason.detail, reason.fix) == (code, detail, fix)
    assert reason.code is limit.code
    assert reason.given in detail
    assert reason.needed.partition(" (with")[0] in detail
    assert json.loads(json.dumps(reason.to_dict())) == {
        "code": code, "detail": detail, "given": reason.given, "needed": reason.needed, "fix": fix,
    }  # fmt: skip


def test_each_dimension_has_its_reason() -> None:
    found = Dim("x", (-2, -1), multiple_of=32).reasons({**CALL, "x": TensorSpec((33, 64, 31))})
    assert [reason.given for reason in found] == ["dim -1 of x is 31"]
    found = Dim("x", (-2, -1), multiple_of=32).reasons({**CALL, "x": TensorSpec((33, 31))})
    assert [reason.given for reason in found] == ["dim -2 of x is 33", "dim -1 of x is 31"]


@pytest.mark.parametrize(("limit", "sentence"), EXAMPLES, ids=ids)
def test_the_support_table_reads_well(limit: Constraint, sentence: str) -> None:
    assert limit.describe() == sentence


@pytest.mark.parametrize("limit", [limit for limit, _ in EXAMPLES], ids=ids)
def test_json_says_everything(limit: Constraint) -> None:
    data = limit.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["type"] == type(limit).__name__
    assert data.keys() == {"type", *vars(limit)}


def test_json_of_a_nested_limit() -> None:
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
        },
    }


@pytest.mark.parametrize("missing", ["detail", "given", "needed", "fix"])
def test_a_reason_without_words_cannot_be_built(missing: str) -> None:
    words = {"detail": "a", "given": "b", "needed": "c", "fix": "d"}
    Reason(ReasonCode.SIZE, **words)
    with pytest.raises(ValueError, match="a Reason needs detail, given, needed and fix"):
        Reason(ReasonCode.SIZE, **{**words, missing: ""})


@pytest.mark.parametrize("code", [None, "", "size", "because"])
def test_a_reason_without_a_code_of_the_list_cannot_be_built(code: Any) -> None:
    with pytest.raises(ValueError, match="code"):
        Reason(code, "a", "b", "c", "d")


@pytest.mark.parametrize(
    "declare",
    [
        lambda: Rank("x"),
        lambda: DType("x"),
        lambda: Dim("x", (-1,)),
        lambda: Dim("x", (), at_least=1),
        lambda: Scalar("scale"),
        lambda: Scalar("scale", one_of=()),
    ],
)
def test_a_limit_that_limits_nothing_is_a_mistake(declare: Any) -> None:
    with pytest.raises(ValueError, match="needs"):
        declare()


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
def dim_limits(draw: st.DrawFn) -> Dim:
    low, high, step = draw(bound), draw(bound), draw(st.one_of(st.none(), st.integers(1, 4)))
    if low is high is step is None:
        low = 1
    return Dim(draw(tensor_names), tuple(draw(st.lists(dims, min_size=1, max_size=3, unique=True))), low, high, step)


@st.composite
def scalar_limits(draw: st.DrawFn) -> Scalar:
    width = draw(st.one_of(st.none(), st.floats(0, 4), st.just(math.inf)))
    values = draw(st.one_of(st.none(), st.lists(scalars, min_size=1, max_size=3).map(tuple)))
    return Scalar("scale", 2 if width is None and values is None else width, values)


plain_limits = st.one_of(
    st.builds(lambda n, ranks: Rank(n, *ranks), tensor_names, st.lists(st.integers(0, 4), min_size=1, max_size=3)),
    dim_limits(),
    st.builds(lambda n, these: DType(n, *these), tensor_names, st.lists(dtypes, min_size=1, max_size=3)),
    scalar_limits(),
    st.builds(Present, names, st.booleans()),
    st.builds(Capability, tensor_names, st.tuples(st.integers(0, 10), st.integers(0, 9))),
)
limits = st.recursive(plain_limits, lambda inner: st.builds(When, inner, inner), max_leaves=4)
shapes = st.lists(sizes, max_size=4).map(tuple)
capabilities = st.one_of(st.none(), st.tuples(st.integers(0, 10), st.integers(0, 9)))
specs = st.builds(TensorSpec, shapes, dtypes, st.sampled_from(["cpu", "cuda", "npu:1"]), capabilities)
tensors = st.builds(lambda shape, dtype: torch.empty(shape, dtype=dtype), shapes, dtypes)


@given(
    st.lists(limits, max_size=4), st.one_of(specs, tensors), st.one_of(st.none(), specs, tensors),
    st.one_of(st.none(), scalars),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_the_compiled_check_refuses_exactly_when_there_are_reasons(
    limits: list[Constraint], x: Any, mask: Any, scale: Any
) -> None:
    call = {"x": x, "mask": mask, "scale": scale}
    refusing = [limit for limit in limits if limit.reasons(call)]
    check = compile_check(PARAMETERS, limits)
    assert (check(x, mask, scale) if check else None) is (refusing[0] if refusing else None)
    for limit in limits:
        assert json.dumps(limit.to_dict())
        assert limit.describe()


@given(st.lists(limits, min_size=1, max_size=3), st.one_of(specs))
@settings(max_examples=80, deadline=None)
def test_boundaries_of_any_limit_are_labelled_right(limits: list[Constraint], x: TensorSpec) -> None:
    call = {"x": x, "mask": TensorSpec((3, 3)), "scale": 1.0}
    for limit in limits:
        if refuses([limit], call):
            continue  # boundaries are made from a call that is taken
        for boundary in limit.boundaries(call):
            assert boundary.label
            assert boundary.taken == (not refuses([limit], dict(boundary.args))), boundary


def test_no_limits_is_no_check() -> None:
    assert compile_check(PARAMETERS, ()) is None


def test_none_is_met_by_every_limit_but_presence() -> None:
    nothing = {"x": None, "mask": None, "scale": None}
    for limit, _ in EXAMPLES:
        wanted = isinstance(limit, Present) and limit.present
        assert refuses([limit], nothing) == wanted
        assert bool(limit.reasons(nothing)) == wanted


def test_the_first_limit_that_refuses_is_named() -> None:
    rank, size = Rank("x", 4), Dim("x", (-1,), multiple_of=32)
    check = compile_check(PARAMETERS, (rank, size))
    assert check is not None
    assert check(TensorSpec((5, 5)), None, 1.0) is rank
    assert check(TensorSpec((1, 1, 5, 5)), None, 1.0) is size
    assert check(TensorSpec((1, 1, 5, 32)), None, 1.0) is None


# ------------------------------------------------------------------------------------ the limits of installed backends


def installed_limits() -> list[Any]:
    return [
        pytest.param(op, entry, limit, id=f"{record.name}-{op.name}-{direction}-{number}")
        for record in registry.records()
        for (name, direction), entry in record.entries.items()
        for op in [OPS[name]]
        for number, limit in enumerate(entry.kernel.limits)
    ]


def a_call_that_is_taken(op: Any, entry: Any) -> dict[str, Any]:
    """One from the op's cases, which no limit refuses; backward's own arguments take after x."""
    parameters = op.parameters if entry.kernel.direction == "forward" else op.backward_parameters
    for case in op.cases:
        for dtype in op.tolerance:
            args = {k: TensorSpec(v, dtype) if isinstance(v, tuple) else v for k, v in case.args.items()}
            if "mask" in args:
                args["mask"] = TensorSpec(args["mask"].shape, torch.bool)
            whole = dict(zip(op.parameters, op.complete(op.bind((), args))))
            call = {name: whole.get(name, args["x"]) for name in parameters}
            if entry.check is None or entry.check(*call.values()) is None:
                return call
    raise AssertionError(f"{entry.backend} takes none of the cases of {op.name}")


@pytest.mark.parametrize(("op", "entry", "limit"), installed_limits())
def test_boundaries_of_declared_limits_agree_with_the_check(op: Any, entry: Any, limit: Constraint) -> None:
    boundaries = list(limit.boundaries(a_call_that_is_taken(op, entry)))
    assert {boundary.taken for boundary in boundaries} == {True, False}, "a limit has two sides"
    alone = compile_check(tuple(boundaries[0].args), [limit])
    assert alone is not None
    for boundary in boundaries:
        assert (alone(*boundary.args.values()) is None) == boundary.taken, boundary.label
        assert (entry.check(*boundary.args.values()) is None) <= boundary.taken, boundary.label


def test_the_edges_that_the_vendor_documents_are_among_the_boundaries() -> None:
    record = registry.find("npu")
    assert record is not None
    entry = record.entries["scaled_masked_softmax", "forward"]
    call = a_call_that_is_taken(OPS["scaled_masked_softmax"], entry)
    labels = {b.label: b.taken for limit in entry.kernel.limits for b in limit.boundaries(call)}
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
    assert [taken for label, taken in labels.items() if label.startswith("mask (")] == [True, True, True, False]
    assert [labels[f"x {name}"] for name in ("float16", "bfloat16", "float32", "float64")] == [True, True, True, False]
