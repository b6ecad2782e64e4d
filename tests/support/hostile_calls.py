"""Random and hostile calls of each op, and the check of what they give.

Validity is decided here, from how the call was made, and not by the code under test.
"""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from state import Tolerance
from torch import Tensor

import fusedops
from fusedops import InvalidInputError, PolicyError, TensorSpec, testing

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

WILD_SCALES = (3e38, -3e38, 2**62, 1e-320)  # at the ends of float32

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
        warnings.simplefilter("ignore")  # torch calls it beta
        return plain.to_sparse_csr()


def _nested(plain: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it a prototype
        return torch.nested.nested_tensor(list(plain))


def _quantised(plain: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated
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


VECTORS = ("none", "last", "last") * 6 + ("same", "longer", "larger", "elsewhere")
"""Of a weight (H,): "same" is valid for an x of one dimension alone."""

KINDS = ("none", "same", "last", "ones", "one") * 4 + ("longer", "larger", "elsewhere")


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
    if kinds is VECTORS:
        good = good and (kind == "last" or len(shape) == 1)
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


def of_shape(dice: Dice, shape: tuple[int, ...], x: Tensor, none: bool = False) -> Given:
    """An argument of a shape that goes with x, of any dtype and look; None one time in five, where that is valid."""
    other, dtype, look = dice.other(), dice.choice(DTYPES), dice.choice(LOOKS)
    if other is not None:
        return Given(other, False)
    if dice.random() < 0.2:
        return Given(None, none)
    device = x.device.type if dice.random() < 0.95 else ("meta" if x.device.type == "cpu" else "cpu")
    made = tensor(shape, dtype, look, device)
    if made is None:
        made, look = tensor(shape, dtype, "plain", device), "plain"
    return Given(made, dtype in FLOATING and look not in WRONG_LOOKS and device == x.device.type)


def check(name: str, call: dict[str, Given], dice: Dice) -> None:
    """Make the call, and compare the outcome with the one that the arguments require."""
    op, backend, gradient = testing.OPS[name], dice.often(BACKENDS, WRONG_BACKENDS), dice.random() < 0.25
    args = {key: value for key, (value, _) in call.items()}
    good = all(one.good for one in call.values())
    leaves = {}
    if gradient and good and args[op.parameters[0]].device.type == "cpu":
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
        assert re.match(rf"{name}: got .+, expected .+; to fix: .+", text, re.S), text
        return
    except PolicyError:
        assert not backend.good, "a known backend is refused"
        return
    assert good, "an invalid call is served"
    assert backend.good, "an unknown backend serves"
    torch.default_generator.manual_seed(5)
    whole = op.completed(op.bind((), args))
    for output, result, like in zip(op.outputs, op.each(y), op.each(op.empty(*whole)), strict=True):
        if args.get(op.output_of.get(output, op.parameters[0])) is None:
            assert result is None
            continue
        assert (result.shape, result.dtype, result.device) == (like.shape, like.dtype, like.device)
        assert result.is_contiguous()
    assert NUMBERS._version == 0, "an input was written"
    y = op.each(y)[0]
    if y.device.type == "meta" or args.get("scale") in WILD_SCALES:
        return  # no numbers; or numbers of which float32 and float64 have different ideas
    if "eps" in args:
        check_norm(name, args, y)
        return
    if "seq_dim" in args or "target" in args:  # a small loss may be the difference of large logits
        check_by_model(name, whole, y)
        return
    rounded = {key: _exact(value, args.get("residual")) for key, value in zip(op.parameters, whole)}
    grown = {key: value.requires_grad_() for key, value in rounded.items() if key in leaves}
    want = op.reference(*rounded.values())
    near(y.as_subclass(Tensor), want.to(y.dtype), op.evidence.tolerance[y.dtype], "y")
    if leaves:
        g = NUMBERS[: y.numel()].view(y.shape).to(y.dtype)
        got = torch.autograd.grad(y, list(leaves.values()), g)
        wanted = torch.autograd.grad(want, list(grown.values()), g.double())
        for (key, leaf), one, other in zip(leaves.items(), got, wanted):
            assert (one.shape, one.dtype) == (leaf.shape, leaf.dtype), key
            narrow = max(y.dtype, leaf.dtype, key=lambda d: torch.finfo(d).eps)
            allowed = op.evidence.gradient_tolerance[narrow]
            steep = max(1.0, abs(args.get("scale", 1.0)))  # the factor of softmax's gradient
            if y.isfinite().all():  # at an infinity the reference's is NaN, where there is a limit too
                near(one, other.to(leaf.dtype), Tolerance(steep * allowed.absolute, allowed.relative), key)


def check_norm(name: str, args: dict[str, Any], y: Tensor) -> None:
    """Compare a norm with its definition in the dtype of its arithmetic, in which large numbers overflow alike.

    Of rows that are not finite, or have next to no variance, only the place of the finite elements is compared.
    """
    op = testing.OPS[name]
    plain = {key: _plain(value) for key, value in args.items()}
    want = op.each(op.reference(*op.bind((), plain)))
    rows = (plain["x"] if op.single else want[1]).double()
    spread = (rows - rows.mean(-1, keepdim=True)).square().mean(-1, keepdim=True)
    calm = (spread.isfinite() & (spread > 1e-2)).expand(y.shape)
    narrow = max((value.dtype for value in plain.values() if isinstance(value, Tensor)), key=_coarseness)
    near(y.as_subclass(Tensor).detach()[calm], want[0][calm], op.evidence.tolerance[narrow], "y")


def check_by_model(name: str, whole: tuple[Any, ...], y: Tensor) -> None:
    """Compare the first output with float64 by the op's error model."""
    op, args = testing.OPS[name], tuple(map(_plain, whole))
    want = testing.expected(op, args)
    testing.assert_within(y.as_subclass(Tensor).detach(), want.y, want.limits[f"output {op.outputs[0]}"], "y")


def classes_of(dice: Dice, logits: Given) -> Given:
    """Classes for the rows of logits, some of them ignored; or what is no such tensor."""
    other = dice.other()
    if other is not None:
        return Given(other, False)
    known = isinstance(logits.value, Tensor) and not logits.value.is_nested and logits.value.dim() > 0
    shape = tuple(logits.value.shape[:-1]) if known else (4,)
    count = logits.value.shape[-1] if known else 4
    device = logits.value.device.type if known else "cpu"
    numbers = torch.arange(math.prod(shape)).view(shape)
    classes = torch.where(numbers % 5 == 3, -100, numbers * 7 % max(count, 1)).to(device)
    kind = dice.choice(("right",) * 12 + ("int32", "longer", "large", "low", "elsewhere"))
    if kind == "int32":
        return Given(classes.int(), False)
    if kind == "longer":
        return Given(classes[None], False)
    if kind == "elsewhere":
        return Given(torch.zeros(shape, dtype=torch.int64, device="meta" if device == "cpu" else "cpu"), False)
    if kind in ("large", "low") and device == "cpu" and classes.numel():
        classes = classes.clone()
        classes.view(-1)[0] = count if kind == "large" else -1
        return Given(classes, False)
    return Given(classes, True)


def _coarseness(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _plain(value: Any) -> Any:
    return value.detach().as_subclass(Tensor).clone() if isinstance(value, Tensor) else value


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
