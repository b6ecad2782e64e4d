"""10,000 random and hostile calls of each op: each gives a right result, or says in fusedops's own words what is wrong.

What is valid is decided here, from how the call was made, and not by the code under test: a valid call must be served,
and rightly; any other must be an InvalidInputError (of ``backend=``, a PolicyError). Nothing else may come out: no raw
error of torch or of a backend, no warning, no crash.
"""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor

import fusedops
from fusedops import InvalidInputError, PolicyError, TensorSpec, testing
from fusedops._op import Tolerance

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NUMBERS = torch.randn(20000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3


class Given(NamedTuple):
    """One argument, and whether the op's contract allows it by itself."""

    value: Any
    good: bool


class Sub(Tensor):
    """A plain subclass: it goes through the registered op."""


class Posing:
    """Looks like a tensor to whoever asks for few attributes."""

    dtype, shape, device, is_cpu, layout, is_nested = torch.float32, (4, 4), torch.device("cpu"), True, torch.strided, 0

    def dim(self) -> int:
        return 2

    def get_device(self) -> int:
        return -1


# ------------------------------------------------------------------------------------------------------------ arguments

NO_TENSORS = (1.0, True, "x", [[1.0, 2.0]], (), {}, torch.float32, np.ones((4, 4), np.float32), np.float32(1), Posing())
NO_TENSORS += (TensorSpec((4, 4)), TensorSpec((4, 4), torch.bool), object(), 10**400, range(4), torch.Size([4, 4]))
SHAPES = (
    (4, 4),
    (2, 3, 5, 8),
    (3, 7),
    (1, 1),
    (2, 1, 33),
    (6,),
    (),
    (0,),
    (0, 5),
    (5, 0),
    (2, 0, 4),
    (3, 4, 0),
    (1, 2048),
)
SHAPES = SHAPES * 3 + ((2, 2, 2, 2, 2, 2, 2), (2, 1100), (1,) * 12, (130, 131))  # the last is cut into slabs
DTYPES = FLOATING * 14 + (torch.int8, torch.int64, torch.bool, torch.uint8, torch.complex64)
DTYPES += (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16)
WRONG_LOOKS = ("sparse", "compressed", "mkldnn", "nested", "quantised")
LOOKS = ("plain", "special", "transposed", "stepped", "expanded", "overlapping", "negated", "parameter") * 6
LOOKS += ("subclass", "huge stride", "offset", "inference", *WRONG_LOOKS)
DEVICES = ("cpu",) * 9 + ("meta",)
SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, 65504.0, 1.0])
SCALES = (1.0, 0.125, -0.7, 1, 0, -0.0, 1e-30, 50.0, True, np.float64(0.5))
WILD_SCALES = (3e38, 1e39, -1e300, 2**62, 1e-320)  # beyond what float32 can hold, or nearly
WRONG_SCALES = (math.nan, math.inf, -math.inf, 10**400, "1", None, [1.0], 1j, np.float32(1), torch.tensor(1.0))
WRONG_SCALES += (Fraction(1, 2), Decimal(1), torch.tensor([1.0, 2.0]), np.ones(3), 2**63, -(2**70))
FLAGS, WRONG_FLAGS = (True, False), (1, 0, None, "yes", np.True_, torch.tensor(True), torch.ones(2) > 0, np.ones(2), [])
RATES = (0, 0.0, 0.5, 0.1, 1, 1.0, True, 1e-320, 1 - 1e-16, -0.0, np.float64(0.3))
WRONG_RATES = (-0.1, 1.1, math.nan, math.inf, "0.5", None, [0.5], 1j, 10**400, torch.tensor(0.5), np.float32(0.3))
WRONG_RATES += (Fraction(1, 2), Decimal(0), torch.ones(2), np.ones(2))
ONE = torch.tensor([7])
SEEDS = (None, 0, 3, -1, 2**64 - 1, -(2**63), True, ONE, ONE.view(()), ONE.view(1, 1), torch.arange(4)[2:3])
SEEDS += (ONE.to("meta"),)
WRONG_SEEDS = (2**64, -(2**63) - 1, 1.5, "1", [1], np.int64(1), torch.tensor([1.0]), torch.arange(2), ONE.int())
WRONG_SEEDS += (ONE.to_sparse(), torch.empty(0, dtype=torch.int64), np.ones(1, int), TensorSpec((1,)))
FORMS, WRONG_FORMS = ("tanh", "none"), (None, "erf", "", "TANH", 1, True, ["tanh"], ONE, np.ones(2), b"tanh", {})
BACKENDS = (None,) * 30 + ("eager", "npu,eager", "auto", "", " eager ; bias_gelu = eager", ";;")
WRONG_BACKENDS = ("eagle", 5, ["eager"], b"eager", "eager;;eager", "nosuch=eager", "eager,", object(), 1.0, ("eager",))


class Dice(random.Random):
    """Draws the arguments of one call."""

    def often(self, good: tuple[Any, ...], bad: tuple[Any, ...]) -> Given:
        """One of ``good`` seven times in eight."""
        return Given(self.choice(bad), False) if self.random() < 0.125 else Given(self.choice(good), True)

    def other(self) -> Any:
        """No tensor, one time in ten; else None."""
        return self.choice(NO_TENSORS) if self.random() < 0.1 else None


def tensor(shape: tuple[int, ...], dtype: torch.dtype, look: str, device: str) -> Tensor | None:
    """A tensor of that look, or None where there is none of this shape, dtype and device."""
    size = math.prod(shape)
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device="meta") if look not in WRONG_LOOKS else None
    plain = NUMBERS[:size].view(shape)
    plain = plain > 0 if dtype is torch.bool else (plain if dtype.is_signed else plain.abs()).to(dtype)
    try:
        made = _LOOKS[look](plain)
    except (RuntimeError, IndexError, TypeError, UserWarning):  # of torch, which makes none
        return None
    return made if look == "nested" or tuple(made.shape) == shape else None


def _special(plain: Tensor) -> Tensor:
    flat = plain.flatten().clone()
    flat[::3] = SPECIAL.repeat(-(-flat.numel() // 8))[: flat[::3].numel()].to(plain.dtype)
    return flat.view(plain.shape)


def _stepped(plain: Tensor) -> Tensor:
    room = plain.new_zeros(*plain.shape[:-1], 2 * plain.shape[-1] + 1)
    room[..., 1::2] = plain
    return room[..., 1::2]


def _negated(plain: Tensor) -> Tensor:
    if plain.dtype is torch.float16:
        raise TypeError("torch itself loses the bit of one float16: torch.empty(()).copy_(z.conj().imag)")
    return torch.complex(torch.zeros_like(plain), -plain).conj().imag  # a view with the negative bit set


def _compressed(plain: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # beta, says torch
        return plain.to_sparse_csr()


def _nested(plain: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, says torch
        return torch.nested.nested_tensor(list(plain))


def _quantised(plain: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, says torch
        return torch.quantize_per_tensor(plain.float(), 0.1, 0, torch.qint8)


def _inference(plain: Tensor) -> Tensor:
    with torch.inference_mode():
        return plain.clone()


_LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: t,
    "special": _special,
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "stepped": _stepped,
    "expanded": lambda t: t[:1].expand(t.shape),
    "overlapping": lambda t: t.flatten().as_strided(t.shape, (1,) * t.dim()),
    "negated": _negated,
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "subclass": lambda t: t.as_subclass(Sub),
    "huge stride": lambda t: t.as_strided(t.shape, [s if n > 1 else 2**55 for n, s in zip(t.shape, t.stride())]),
    "offset": lambda t: torch.cat([t.new_zeros(5), t.flatten()])[5:].view(t.shape),
    "inference": _inference,
    "sparse": lambda t: t.to_sparse(),
    "compressed": _compressed,
    "mkldnn": lambda t: t.to_mkldnn(),
    "nested": _nested,
    "quantised": _quantised,
}


def main_tensor(dice: Dice, rank: int = 0) -> Given:
    """The first argument."""
    other = dice.other()
    if other is not None:
        return Given(other, False)
    shape, dtype, look, device = (dice.choice(of) for of in (SHAPES, DTYPES, LOOKS, DEVICES))
    made = tensor(shape, dtype, look, device)
    if made is None:
        made, look = tensor(shape, dtype, "plain", device), "plain"
    return Given(made, dtype in FLOATING and look not in WRONG_LOOKS and len(shape) >= rank)


KINDS = ("none", "same", "last", "ones", "one") * 4 + ("longer", "larger", "elsewhere")
MASKS = (torch.bool, torch.uint8) * 8 + (torch.float32, torch.int64, torch.complex64, torch.float16)


def beside(dice: Dice, x: Given, dtypes: tuple[torch.dtype, ...] = DTYPES, kinds: tuple[str, ...] = KINDS) -> Given:
    """An argument that goes with x: of its shape, of one that broadcasts to it, or of one that does not."""
    other, kind, dtype, look = dice.other(), dice.choice(kinds), dice.choice(dtypes), dice.choice(LOOKS)
    if other is not None:
        return Given(other, False)
    if kind == "none":
        return Given(None, True)
    known = isinstance(x.value, Tensor) and not x.value.is_nested
    shape = tuple(x.value.shape) if known else (4, 4)
    device = x.value.device.type if known else "cpu"
    good = dtype in (FLOATING if dtypes is DTYPES else (torch.bool, torch.uint8))
    if kind == "last":
        shape = shape[-1:]
    elif kind == "ones":
        shape = tuple(1 if at % 2 else size for at, size in enumerate(shape))
    elif kind == "one":
        shape = ()
    elif kind == "longer":
        shape, good = (1, *shape), False
    elif kind == "larger":
        shape, good = tuple(size + 2 * (at == len(shape) - 1) for at, size in enumerate(shape)), good and not shape
    elif kind == "elsewhere":
        device, good = ("meta" if device == "cpu" else "cpu"), False
    made = tensor(shape, dtype, look, device)
    if made is None:
        made, look = tensor(shape, dtype, "plain", device), "plain"
    return Given(made, good and look not in WRONG_LOOKS)


# ---------------------------------------------------------------------------------------------------------- the check


def check(name: str, call: dict[str, Given], dice: Dice) -> None:
    """Makes the call, and holds what comes out against what the arguments are."""
    op, backend, gradient = testing.OPS[name], dice.often(BACKENDS, WRONG_BACKENDS), dice.random() < 0.25
    args = {key: value for key, (value, _) in call.items()}
    good = all(one.good for one in call.values())
    leaves = {}
    if gradient and good and args["x"].device.type == "cpu":
        for key in (*op.differentiable, *filter(None, [op.passed_through])):
            value = args[key]
            if isinstance(value, Tensor) and not value.is_inference() and type(value) is Tensor:
                leaves[key] = args[key] = value.detach().requires_grad_()
        if any(isinstance(value, Tensor) and value.is_inference() for value in args.values()):
            return  # torch's own rule: an inference tensor cannot be kept for backward
    torch.default_generator.manual_seed(5)
    try:
        with fusedops.use("eager", fallback="silent"):
            y = getattr(fusedops, name)(**args, backend=backend.value)
    except InvalidInputError as refusal:
        text = str(refusal)
        assert not good, text
        assert re.match(rf"{name}: \w+ (is|has) .+; needs .+", text, re.S), text
        return
    except PolicyError:
        assert not backend.good, "a known backend is refused"
        return
    assert good, "an invalid call is served"
    assert backend.good, "an unknown backend serves"
    torch.default_generator.manual_seed(5)
    whole = op.complete(op.bind((), args))
    want = op.output(*whole)
    assert (y.shape, y.dtype, y.device) == (want.shape, want.dtype, want.device)
    assert y.is_contiguous()
    assert NUMBERS._version == 0, "an input was written"
    if y.device.type == "meta" or args.get("scale") in WILD_SCALES:
        return  # no numbers; or numbers of which float32 and float64 have different ideas
    rounded = {key: _exact(value, args.get("residual")) for key, value in zip(op.parameters, whole)}
    grown = {key: value.requires_grad_() for key, value in rounded.items() if key in leaves}
    want = op.call_reference(tuple(rounded.values()))
    near(y.as_subclass(Tensor), want.to(y.dtype), op.tolerance[y.dtype], "y")
    if leaves:
        g = NUMBERS[: y.numel()].view(y.shape).to(y.dtype)
        got = torch.autograd.grad(y, list(leaves.values()), g)
        wanted = torch.autograd.grad(want, list(grown.values()), g.double())
        for (key, leaf), one, other in zip(leaves.items(), got, wanted):
            assert (one.shape, one.dtype) == (leaf.shape, leaf.dtype), key
            narrow = max(y.dtype, leaf.dtype, key=lambda d: torch.finfo(d).eps)
            allowed = op.gradient_tolerance[narrow]
            steep = max(1.0, abs(args.get("scale", 1.0)))  # the factor of softmax's gradient
            if y.isfinite().all():  # at an infinity the reference's is NaN, where there is a limit too
                near(one, other.to(leaf.dtype), Tolerance(steep * allowed.absolute, allowed.relative), key)


def near(got: Tensor, want: Tensor, allowed: Any, what: str) -> None:
    """As testing.assert_within, which takes ten times as long."""
    got, want = got.detach().double(), want.detach().double()
    if not torch.isclose(got, want, allowed.relative, allowed.absolute, equal_nan=True).all():
        testing.assert_within(got, want, allowed, what)


def _exact(value: Any, residual: Any) -> Any:
    """A floating tensor in float64; beside a residual first in its dtype, as the contract has it."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    value = value.detach().as_subclass(Tensor).clone()
    return (value if residual is None else value.to(residual.dtype)).double()


# ------------------------------------------------------------------------------------------------------------ the tests


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors as small as these take four times as long with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def many(check_one: Callable[[Dice], None]) -> Callable[[], None]:
    """A test of 10,000 calls: 1000 seeds of Hypothesis's, ten calls of each.

    Hypothesis takes 1.7 ms for an example of its own, and a call with its check 0.4. Of a failure it shows the dice:
    ``check_one(Dice(...))`` makes that call again.
    """

    @settings(max_examples=1000, deadline=None, derandomize=True, database=None)
    @given(seed=st.integers(0, 2**60))
    def test(seed: int) -> None:
        for at in range(10):
            note(f"Dice({10 * seed + at})")
            check_one(Dice(10 * seed + at))

    return test


def seeded(dice: Dice, x: Given, others: dict[str, Given]) -> dict[str, Given]:
    """A dropout's call. A seed tensor lies where x does; but where nothing is dropped, nobody looks for it."""
    p, training, seed = dice.often(RATES, WRONG_RATES), dice.often(FLAGS, WRONG_FLAGS), dice.often(SEEDS, WRONG_SEEDS)
    drops = p.good and p.value > 0 and training.value is True
    if drops and isinstance(seed.value, Tensor) and isinstance(x.value, Tensor):
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


@pytest.mark.parametrize("name", testing.OPS)
def test_triton_reads_no_memory_that_holds_the_negative(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("fusedops_triton._launch", reason="needs triton")
    seen: list[Tensor] = []

    def spy(self: Any, home: Tensor, *args: Any) -> Any:
        seen.extend(arg for arg in args if isinstance(arg, Tensor))
        return self._launch(None, -1, args)

    monkeypatch.setattr(launch.Launch, "__call__", spy)
    x = _negated(torch.ones(2, 4)).requires_grad_()
    y = getattr(fusedops, name)(*{"bias_dropout_add": (x, x, x)}.get(name, (x,)), backend="triton")
    y.backward(_negated(torch.ones(2, 4)))
    assert len(seen) >= 4
    assert not any(tensor.is_neg() for tensor in seen)


def test_a_residual_is_needed_and_has_the_shape_of_x() -> None:
    x = torch.ones(2, 3)
    for residual in (None, torch.ones(3), torch.ones(2, 1), torch.ones(1, 2, 3)):
        with pytest.raises(InvalidInputError, match=r"^bias_dropout_add: residual "):
            fusedops.bias_dropout_add(x, None, residual, seed=1)


# A call's own form is Python's business: a TypeError that names the argument
@pytest.mark.parametrize("name", testing.OPS)
def test_a_wrong_form_of_call_is_a_type_error(name: str) -> None:
    x = torch.ones(2, 3)
    for args, kwargs in (((), {}), ((x,) * 9, {}), ((x,), {"rate": 1}), ((x,), {"x": x})):
        with pytest.raises(TypeError, match=rf"^{name}\(\) "):
            getattr(fusedops, name)(*args, **kwargs)


# Sizes that nothing can hold, as nobody can allocate them: on meta, and as empty tensors
@pytest.mark.parametrize("name", testing.OPS)
@pytest.mark.parametrize("shape", [(2**40, 2**14), (2**31, 3), (3, 2**31)], ids=str)
def test_more_elements_than_memory(name: str, shape: tuple[int, ...]) -> None:
    x = torch.empty(1, device="meta").expand(shape)
    y = getattr(fusedops, name)(*(x, None, x)[: 3 if name == "bias_dropout_add" else 1])
    assert (y.shape, y.device.type) == (shape, "meta")


@pytest.mark.parametrize("name", testing.OPS)
@pytest.mark.parametrize("shape", [(2**40, 0), (0, 2**40), (2**20, 2**20, 0), (2**31, 0, 2**20)], ids=str)
def test_no_elements_in_many_rows(name: str, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, requires_grad=True)
    bias = torch.empty(shape[-1:], requires_grad=True) if shape[-1] < 2**30 and "bias" in name else None
    args = {"bias_dropout_add": (x, bias, x), "scaled_masked_softmax": (x,)}.get(name, (x, bias))
    y = getattr(fusedops, name)(*args)
    y.backward(torch.empty(shape))
    assert y.shape == shape
    assert x.grad is not None
    assert x.grad.shape == shape
