"""10,000 random and hostile calls of each op: each gives a correct result, or an error of fusedops with the cause.

A valid call must be served correctly; any other must be an InvalidInputError (of ``backend=``, a PolicyError). No other
error is allowed: no raw error of torch or of a backend, no warning, no crash. See hostile_calls.py for the calls.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from calls import dtype_of, has_fixed_rank, options, shapes
from hostile_calls import (
    KINDS,
    VECTORS,
    WILD_SCALES,
    Dice,
    Given,
    _negated,
    beside,
    check,
    classes_of,
    main_tensor,
    of_shape,
)
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor

import fusedops
from fusedops import InvalidInputError, TensorSpec, testing
from fusedops.constraints import Finite, LeadingDims

SCALES = (1.0, 0.125, -0.7, 1, 0, -0.0, 1e-30, 50.0, True, np.float64(0.5))

WRONG_SCALES = (math.nan, math.inf, -math.inf, 10**400, "1", None, [1.0], 1j, np.float32(1), torch.tensor(1.0))
WRONG_SCALES += (1e39, -1e300, Fraction(1, 2), Decimal(1), torch.tensor([1.0, 2.0]), np.ones(3), 2**63, -(2**70))

FLAGS, WRONG_FLAGS = (True, False), (1, 0, None, "yes", np.True_, torch.tensor(True), torch.ones(2) > 0, np.ones(2), [])

RATES = (0, 0.0, 0.5, 0.1, 1, 1.0, True, 1e-320, 1 - 1e-16, -0.0, np.float64(0.3))

WRONG_RATES = (-0.1, 1.1, math.nan, math.inf, "0.5", None, [0.5], 1j, 10**400, torch.tensor(0.5), np.float32(0.3))
WRONG_RATES += (Fraction(1, 2), Decimal(0), torch.ones(2), np.ones(2))

ONE = torch.tensor([7])

SEEDS = (None, 0, 3, -1, 2**64 - 1, -(2**63), ONE, ONE.view(()), ONE.view(1, 1), torch.arange(4)[2:3])
SEEDS += (ONE.to("meta"),)

WRONG_SEEDS = (2**64, -(2**63) - 1, 1.5, True, "1", [1], np.int64(1), torch.tensor([1.0]), torch.arange(2))
WRONG_SEEDS += (ONE.int(), ONE.to_sparse(), torch.empty(0, dtype=torch.int64), np.ones(1, int), TensorSpec((1,)))

FORMS, WRONG_FORMS = ("tanh", "none"), (None, "erf", "", "TANH", 1, True, ["tanh"], ONE, np.ones(2), b"tanh", {})

MASKS = (torch.bool, torch.uint8) * 8 + (torch.float32, torch.int64, torch.complex64, torch.float16)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors as small as these take four times as long with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def many(check_one: Callable[[Dice], None]) -> Callable[[int], None]:
    """Return a test of 2,500 calls, and of 7,500 others where it may be slow: ten for each seed of Hypothesis's.

    Hypothesis takes 1.7 ms for an example of its own, and a call with its check 0.4. Of a failure it shows the dice:
    ``check_one(Dice(...))`` makes that call again.
    """

    # Hypothesis derives both tests' seeds from one text: without a number of their own the calls would be the same
    @pytest.mark.parametrize(("calls", "first"), [(2_500, 0), pytest.param(7_500, 2**61, marks=pytest.mark.slow)])
    def test(calls: int, first: int) -> None:
        @settings(max_examples=calls // 10, deadline=None, derandomize=True, database=None)
        @given(seed=st.integers(first, first + 2**60))
        def check_calls(seed: int) -> None:
            for at in range(10):
                note(f"Dice({10 * seed + at})")
                check_one(Dice(10 * seed + at))

        check_calls()

    return test


def seeded(dice: Dice, x: Given, others: dict[str, Given]) -> dict[str, Given]:
    """Return a call of dropout. A seed tensor is valid on x's device alone, even where nothing is dropped."""
    p, training, seed = dice.often(RATES, WRONG_RATES), dice.often(FLAGS, WRONG_FLAGS), dice.often(SEEDS, WRONG_SEEDS)
    if isinstance(seed.value, Tensor) and isinstance(x.value, Tensor):
        seed = Given(seed.value, seed.good and seed.value.device == x.value.device)
    return {"x": x, **others, "p": p, "training": training, "seed": seed}


@many
def test_scaled_masked_softmax(dice: Dice) -> None:
    x = main_tensor(dice, rank=2)
    scale, causal = dice.often(SCALES + WILD_SCALES, WRONG_SCALES), dice.often(FLAGS, WRONG_FLAGS)
    call = {"x": x, "mask": beside(dice, x, MASKS), "scale": scale, "causal": causal}
    check("scaled_masked_softmax", call, dice)


@many
def test_bias_gelu(dice: Dice) -> None:
    x = main_tensor(dice)
    check("bias_gelu", {"x": x, "bias": beside(dice, x), "approximate": dice.often(FORMS, WRONG_FORMS)}, dice)


@many
def test_bias_dropout(dice: Dice) -> None:
    x = main_tensor(dice)
    check("bias_dropout", seeded(dice, x, {"bias": beside(dice, x)}), dice)


@many
def test_bias_dropout_add(dice: Dice) -> None:
    x = main_tensor(dice)
    residual = beside(dice, x, kinds=("same",) * 9 + KINDS[-3:])
    check("bias_dropout_add", seeded(dice, x, {"bias": beside(dice, x), "residual": residual}), dice)


EPSILONS = (1e-5, 0, 0.0, 1e-6, 1, True, 1e-30, np.float64(1e-5))
WRONG_EPSILONS = (-1e-6, math.nan, math.inf, 10**400, "1", None, [1.0], 1j, torch.tensor(1e-5), np.float32(1e-5))


def normed(dice: Dice, *others: str) -> dict[str, Given]:
    """Return a call of a norm with weight, bias and residual as named."""
    x = main_tensor(dice, rank=1)
    call = {"x": x, "eps": dice.often(EPSILONS, WRONG_EPSILONS)}
    for name in others:
        call[name] = beside(dice, x, kinds=("same",) * 9 + KINDS[-3:] if name == "residual" else VECTORS)
    return call


@many
def test_rms_norm(dice: Dice) -> None:
    check("rms_norm", {**normed(dice, "weight"), "offset": dice.often((0.0, 1, 1.0), WRONG_SCALES)}, dice)


@many
def test_add_rms_norm(dice: Dice) -> None:
    call = {**normed(dice, "residual", "weight"), "offset": dice.often((0.0, 1, 1.0), WRONG_SCALES)}
    check("add_rms_norm", call, dice)


@many
def test_layer_norm(dice: Dice) -> None:
    check("layer_norm", normed(dice, "weight", "bias"), dice)


@many
def test_add_layer_norm(dice: Dice) -> None:
    check("add_layer_norm", normed(dice, "residual", "weight", "bias"), dice)


LIMITS, WRONG_LIMITS = (
    (None, 0, 0.0, 1.5, 7, True, 3e38),
    (-1.0, -1, math.inf, math.nan, 1e39, "1", [1.0], torch.tensor(1.0)),
)


@many
def test_swiglu(dice: Dice) -> None:
    gate = main_tensor(dice)
    up = beside(dice, gate, kinds=("none", "same") * 6 + KINDS[-3:])
    if up.value is None and isinstance(gate.value, Tensor) and gate.good:  # packed
        gate = Given(gate.value, gate.value.dim() > 0 and gate.value.shape[-1] % 2 == 0)
    call = {
        "gate": gate,
        "up": up,
        "limit": dice.often(LIMITS, WRONG_LIMITS),
        "alpha": dice.often((1.0, 1, 1.702), WRONG_SCALES),
        "offset": dice.often((0.0, 1, 1.0, -0.5), WRONG_SCALES),
        "interleaved": dice.often(FLAGS, WRONG_FLAGS),
    }
    check("swiglu", call, dice)


@many
def test_geglu(dice: Dice) -> None:
    gate = main_tensor(dice)
    up = beside(dice, gate, kinds=("none", "same") * 6 + KINDS[-3:])
    if up.value is None and isinstance(gate.value, Tensor) and gate.good:  # packed
        gate = Given(gate.value, gate.value.dim() > 0 and gate.value.shape[-1] % 2 == 0)
    good = [one.value for one in (gate, up) if one.good and isinstance(one.value, Tensor)]
    if any(value.device.type == "cpu" and value.isinf().any() for value in good):
        return  # GELU of a negative gate becomes 0 sooner in float32 than in float64, and 0 * inf is NaN
    forms, flags = dice.often(FORMS, WRONG_FORMS), dice.often(FLAGS, WRONG_FLAGS)
    check("geglu", {"gate": gate, "up": up, "approximate": forms, "interleaved": flags}, dice)


LAYOUTS, WRONG_LAYOUTS = (-2, -2, -3), (-1, 2, 0, None, "-2", -2.0, True, [-2], torch.tensor(-2))
ANGLE_SHAPES = ("(S, R/2)", "of each batch", "of one batch", "of no pair") * 5
WRONG_ANGLE_SHAPES = ("doubled", "another length", "longer", "1-d", "elsewhere")


def angle_shape(dice: Dice, q: Tensor, seq_dim: int) -> Given:
    """Return a shape of cos and sin, and whether it goes with q."""
    length, half, lead = q.shape[seq_dim], q.shape[-1] // 2, tuple(q.shape[:-3])
    kind = dice.choice(ANGLE_SHAPES * 2 + WRONG_ANGLE_SHAPES)
    half = half if dice.random() < 0.5 else half // 2
    forms: dict[str, tuple[int, ...]] = {
        "of each batch": (*lead, length, half),
        "of one batch": (*(1 for _ in lead), length, half),
        "of no pair": (length, 0),
        "doubled": (length, q.shape[-1] + 2),
        "another length": (length + 1, half),
        "longer": (2, *lead, length, half),
        "1-d": (length,),
    }
    return Given(forms.get(kind, (length, half)), kind not in WRONG_ANGLE_SHAPES[:-1])


@many
def test_rotary_embedding(dice: Dice) -> None:
    q = main_tensor(dice, rank=3)
    seq_dim = dice.often(LAYOUTS, WRONG_LAYOUTS)
    call = {"q": q, "interleaved": dice.often(FLAGS, WRONG_FLAGS), "seq_dim": seq_dim}
    known = isinstance(q.value, Tensor) and not q.value.is_nested and q.value.dim() >= 3
    x = q.value if known else torch.ones(4, 4, 4)
    at = seq_dim.value if seq_dim.good else -2
    shape = list(x.shape)
    heads = -3 if at == -2 else -2
    shape[heads] = dice.choice((shape[heads], 1, 2, 0))
    call["k"] = of_shape(dice, tuple(shape), x, none=True)
    wanted = angle_shape(dice, x, at)
    for name in ("cos", "sin"):
        given = of_shape(dice, wanted.value, x)
        call[name] = Given(given.value, given.good and wanted.good)
    order = testing.OPS["rotary_embedding"].parameters
    check("rotary_embedding", {name: call[name] for name in order}, dice)


SMOOTHINGS, WRONG_SMOOTHINGS = (0.0, 0.1, 1, 0.5), (-0.1, 1.1, math.nan, "0.1", None, torch.tensor(0.5))
CAPS, WRONG_CAPS = (None, 1.0, 30, 5.0), (0.0, -1.0, math.inf, math.nan, "1", [1.0], torch.tensor(1.0))
INTEGERS, WRONG_INTEGERS = (-100,), (1.0, None, "1", 2**63, np.int64(1), True, ONE)
REDUCTIONS, WRONG_REDUCTIONS = ("mean", "sum", "none"), (None, "avg", "", 1, b"sum", ["sum"])


@many
def test_cross_entropy(dice: Dice) -> None:
    logits = main_tensor(dice, rank=1)
    if isinstance(logits.value, Tensor) and logits.good and logits.value.shape[-1] == 0:
        logits = Given(logits.value, False)
    call = {
        "logits": logits,
        "target": classes_of(dice, logits),
        "ignore_index": dice.often(INTEGERS, WRONG_INTEGERS),
        "label_smoothing": dice.often(SMOOTHINGS, WRONG_SMOOTHINGS),
        "z_loss": dice.often((0.0, 1e-4, 1), (-1.0, math.inf, "1", None, torch.tensor(1.0))),
        "softcap": dice.often(CAPS, WRONG_CAPS),
        "reduction": dice.often(REDUCTIONS, WRONG_REDUCTIONS),
    }
    check("cross_entropy", call, dice)


# the ops whose first tensor has any rank; the others have theirs checked in their own tests
OF_ANY_RANK = [name for name in testing.OPS if not has_fixed_rank(name)]


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
        call[key] = value.to(dtype_of(name, key, x.dtype))
    return call


def output_shape(name: str, call: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of the first output by the op's own statement of it."""
    op = testing.OPS[name]
    specs = {key: value.detach().to("meta") if isinstance(value, Tensor) else value for key, value in call.items()}
    return tuple(op.each(op.empty(*op.completed(op.bind((), specs))))[0].shape)


def first_output(name: str, call: dict[str, Any], backend: str | None = None) -> Tensor:
    """Return the first output of a call."""
    op = testing.OPS[name]
    return op.each(op.function(**call, backend=backend))[0]


@pytest.mark.parametrize("name", OF_ANY_RANK)
def test_triton_reads_no_memory_that_holds_the_negative(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("fusedops_triton._launch", reason="needs triton")
    seen: list[Tensor] = []

    def spy(self: Any, home: Tensor, *args: Any) -> Any:
        seen.extend(arg for arg in args if isinstance(arg, Tensor))
        return self._launch(None, -1, args)

    monkeypatch.setattr(launch.Launch, "__call__", spy)
    x = _negated(torch.ones(2, 4)).requires_grad_()
    y = first_output(name, least_call(name, x), backend="triton")
    (grad,) = torch.autograd.grad(y, x, _negated(torch.ones(y.shape)))
    assert grad.shape == x.shape
    assert len(seen) >= 3
    assert not any(tensor.is_neg() for tensor in seen)


def test_a_residual_is_needed_and_has_the_shape_of_x() -> None:
    x = torch.ones(2, 3)
    for residual in (None, torch.ones(3), torch.ones(2, 1), torch.ones(1, 2, 3)):
        with pytest.raises(InvalidInputError, match=r"^bias_dropout_add: got residual "):
            fusedops.bias_dropout_add(x, None, residual, seed=1)


NUMBERS_OF = [(name, item.name) for name, op in testing.OPS.items() for item in op.constraints if type(item) is Finite]


@pytest.mark.parametrize(("name", "option"), NUMBERS_OF)
def test_numbers_up_to_the_largest_of_float32(name: str, option: str) -> None:
    op = testing.OPS[name]
    call = dict(zip(op.parameters, testing.arguments(op, testing.Case("", op.evidence.sample(1, 4)), torch.float32)))
    largest = torch.finfo(torch.float32).max
    for backend in ("eager", None):
        op.function(**{**call, option: largest}, backend=backend)
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
        if name != "linear_cross_entropy" or shape[-2]  # the weight is x's last two dims, and has a class
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
