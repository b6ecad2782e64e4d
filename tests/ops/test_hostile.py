"""Hostile calls of each op: an invalid argument is an error of fusedops with the cause, an odd valid one is served.

No other error is allowed: no raw error of torch or of a backend, no warning, no crash. The valid calls are those of the
conformance kit, which compares their results; hostile_calls.py has what takes an argument's place.
"""

from __future__ import annotations

import inspect
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from calls import dtype_of, has_fixed_rank, has_kernels, options, shapes
from hostile_calls import LOOKS, bad_values, negated, valid_calls
from torch import Tensor

import fusedops
from fusedops import InvalidInputError, PolicyError, testing
from fusedops.constraints import Dim, Finite, LeadingDims, PackedRows
from fusedops.testing._expected import expected_forward

BACKENDS = ("eager", "npu,eager", "auto", "", " eager ; bias_gelu = eager", ";;")
WRONG_BACKENDS = ("eagle", 5, ["eager"], b"eager", "eager;;eager", "nosuch=eager", "eager,", object(), 1.0, ("eager",))
ONE = torch.tensor([7])
SEEDS = (None, 0, 3, -1, 2**64 - 1, -(2**63), ONE, ONE.view(()), ONE.view(1, 1), torch.arange(4)[2:3])


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", testing.OPS)
def test_a_bad_argument_is_an_error_with_its_cause(name: str) -> None:
    """400 valid calls with one or two arguments replaced."""
    op, valid = testing.OPS[name], valid_calls(name)
    for seed in range(400):
        dice = random.Random(seed)
        call = dict(dice.choice(valid))
        broken = dice.sample([*call], dice.choice((1, 1, 1, 2)))
        call |= {key: dice.choice(bad_values(op, call, key)) for key in broken}
        described = f"call {seed}: bad {' and '.join(broken)}"
        try:
            op.function(**call, backend=dice.choice((None, None, "eager")))
            outcome = "it is served"
        except Exception as error:  # any other than the expected one is a failure
            known = isinstance(error, InvalidInputError)
            fits = known and re.match(rf"{name}: got .+, expected .+; to fix: .+", str(error), re.S)
            outcome = "" if fits else f"{type(error).__name__}: {error}"
        assert not outcome, f"{described}: {outcome}"


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", testing.OPS)
def test_an_odd_tensor_has_the_results_of_a_plain_one(name: str, look: str) -> None:
    op = testing.OPS[name]
    for call in valid_calls(name)[::4]:
        odd = {key: LOOKS[look](value) if isinstance(value, Tensor) else value for key, value in call.items()}
        results = [op.as_tuple(op.call_public(*op.bind((), each), backend="eager")) for each in (odd, call)]
        if all(got is want is None or (want is not None and torch.equal(got, want)) for got, want in zip(*results)):
            continue
        # products of matrices round otherwise where a tensor starts at another address
        limits = expected_forward(op, op.prepared(op.bind((), call))).limits
        for output, (got, want) in zip(op.outputs, zip(*results, strict=True)):  # one of several may be left out
            assert (got is None) == (want is None)
            if got is not None:
                testing.assert_within(got.as_subclass(Tensor), want.double(), 2 * limits[f"output {output}"], look)


@pytest.mark.parametrize("name", testing.OPS)
def test_policies_of_a_call(name: str) -> None:
    op, call = testing.OPS[name], valid_calls(name)[0]
    with fusedops.use(fallback="silent"):
        for policy in BACKENDS:
            op.function(**call, backend=policy)
        for policy in WRONG_BACKENDS:
            with pytest.raises(PolicyError):
                op.function(**call, backend=policy)


@pytest.mark.parametrize("seed", SEEDS, ids=str)
def test_seeds(seed: Any) -> None:
    fusedops.bias_dropout(torch.ones(3, 5), seed=seed)
    fusedops.bias_dropout_add(torch.ones(3, 5), None, torch.ones(3, 5), seed=seed)


# the ops whose first tensor has any rank and any size; the others have theirs checked in their own tests
WITH_SIZES = {
    name
    for name, op in testing.OPS.items()
    if any(type(item) is PackedRows or (type(item) is Dim and item.at_most) for item in op.constraints)
}
OF_ANY_RANK = [name for name in testing.OPS if not has_fixed_rank(name) and name not in WITH_SIZES]


def least_call(name: str, x: Tensor) -> dict[str, Any]:
    """Return a call with x and what has no default: the other tensors are x, or its first row or column."""
    op, sizes = testing.OPS[name], shapes(name)
    if "seq_dim" in op.parameters:  # x is one head, and half of it rotates
        x = x if x.dim() > 2 else x[None]
        angle = x.detach()[(0,) * (x.dim() - 2)]
        return {"q": x, "k": None, "cos": angle[..., : x.shape[-1] // 4], "sin": angle[..., : x.shape[-1] // 4]}
    call = {key: options(name).get(key) for key, value in zip(op.parameters, op.defaults) if value is inspect._empty}
    rows = {item.name for item in op.constraints if isinstance(item, LeadingDims)}
    for key in op.required_tensors:
        if key in rows:
            call[key] = x.detach()[..., 0].to(dtype_of(name, key, x.dtype))
            continue
        row = (0,) * (x.dim() - len(sizes[key]))
        value = x if sizes[key] == sizes[op.parameters[0]] else x.detach()[row]
        if name == "linear":  # of one row: the output has rows times rows
            value = value[:1]
        call[key] = value.to(dtype_of(name, key, x.dtype))
    return call


def output_shape(name: str, call: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of the first output by the op's own statement of it."""
    op = testing.OPS[name]
    specs = {key: value.detach().to("meta") if isinstance(value, Tensor) else value for key, value in call.items()}
    return tuple(op.as_tuple(op.empty(*op.prepared(op.bind((), specs))))[0].shape)


def first_output(name: str, call: dict[str, Any], backend: str | None = None) -> Tensor:
    """Return the first output of a call."""
    op = testing.OPS[name]
    return op.as_tuple(op.function(**call, backend=backend))[0]


@pytest.mark.parametrize("name", [name for name in OF_ANY_RANK if has_kernels("triton", name)])
def test_triton_reads_no_memory_that_holds_the_negative(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("fusedops_triton.launch.launcher", reason="needs triton")
    seen: list[Tensor] = []

    def spy(self: Any, home: Tensor, *args: Any) -> Any:
        seen.extend(arg for arg in args if isinstance(arg, Tensor))
        return self._launch_with_triton(args)

    monkeypatch.setattr(launch.Launch, "__call__", spy)
    x = negated(torch.ones(2, 4)).requires_grad_()
    y = first_output(name, least_call(name, x), backend="triton")
    (grad,) = torch.autograd.grad(y, x, negated(torch.ones(y.shape)))
    assert grad.shape == x.shape
    assert len(seen) >= 3
    assert not any(tensor.is_neg() for tensor in seen)


NUMBERS_OF = [(name, item.name) for name, op in testing.OPS.items() for item in op.constraints if type(item) is Finite]


@pytest.mark.parametrize(("name", "option"), NUMBERS_OF)
def test_numbers_up_to_the_largest_of_float32(name: str, option: str) -> None:
    op = testing.OPS[name]
    call = dict(zip(op.parameters, testing.arguments(op, testing.Case("", op.evidence.sample(1, 4)), torch.float32)))
    largest = torch.finfo(torch.float32).max
    for backend in ("eager", None):
        for number in (largest, True, 1, np.float64(0.5)):
            op.function(**{**call, option: number}, backend=backend)
    for number in (largest * 1.001, 1e39, 1e300):
        with pytest.raises(InvalidInputError, match=rf"got {option} = .*, expected a Python number.*finite in float32"):
            op.function(**{**call, option: number})


# A call's own form is Python's business: a TypeError that names the argument
@pytest.mark.parametrize("name", testing.OPS)
def test_a_wrong_form_of_call_is_a_type_error(name: str) -> None:
    x = torch.ones(2, 3)
    for args, kwargs in (((), {}), ((x,) * 9, {}), ((x,), {"rate": 1}), ((x,), {"x": x})):
        with pytest.raises(TypeError, match=rf"^{name}\(\) "):
            getattr(fusedops, name)(*args, **kwargs)


# Sizes beyond any memory: on meta, and as empty tensors
@pytest.mark.parametrize("name", OF_ANY_RANK)
@pytest.mark.parametrize("shape", [(2**40, 2**14), (2**31, 4), (3, 2**31)], ids=str)
def test_more_elements_than_memory(name: str, shape: tuple[int, ...]) -> None:
    x = torch.empty(1, device="meta").expand(shape)
    call = least_call(name, x)
    y = first_output(name, call)
    assert (y.shape, y.device.type) == (output_shape(name, call), "meta")


NO_ELEMENTS = [(2**40, 0), (0, 2**40), (2**20, 2**20, 0), (2**31, 0, 2**20)]


@pytest.mark.parametrize(
    ("name", "shape"),
    # saved values have an element for each row, of which there may be none
    [
        (name, shape)
        for name in OF_ANY_RANK
        for shape in NO_ELEMENTS
        if not testing.OPS[name].saved or 0 in shape[:-1]
        if name not in ("linear", "linear_cross_entropy", "linear_log_probs")
        or shape[-2]  # the weight is x's last two dims, and has a class
        if name != "top_k_routing" or shape[-1]  # of which k are chosen
        if name != "merge_attention" or 0 in shape[:-1]  # lse has an element for each row
    ],
    ids=str,
)
def test_no_elements_in_many_rows(name: str, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, requires_grad=True)
    call = least_call(name, x)
    if shape[-1] < 2**30 and "bias" in testing.OPS[name].parameters:
        sizes = shape[-1:] if call.get("weight") is None else call["weight"].shape[:1]
        call["bias"] = torch.empty(sizes, requires_grad=True)
    y = first_output(name, call)
    y.backward(torch.empty(y.shape))
    assert y.shape == output_shape(name, call)
    assert x.grad is not None
    assert x.grad.shape == shape
