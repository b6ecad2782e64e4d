"""The rotary functions of diffusers, recognised by their results, and their calls by ``rotary_embedding``.

A function takes one tensor and the angles: a pair (cos, sin), cos and sin, or complex numbers. Its own code runs on
random numbers with each form of a call, and is compared with the op. How many dims the positions have does not matter:
cos has a row for each token.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from textwrap import dedent
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fusedops import ops
from fusedops._torch import is_plain_or_planned, is_traced, is_transformed
from fusedops.integrations._trial.source import reason_of_source
from fusedops.integrations._trial.twin import called, near, numbers
from fusedops.integrations._trial.whole import reason_of_calls
from fusedops.integrations.diffusers._source import path_of, text_of
from fusedops.tensor_cache import cached_for

Kind = Literal["pair", "two", "complex"]
Options = tuple[tuple[str, Any], ...]

_B, _S, _N, _D = 2, 5, 3, 8
_TOLERANCE, _NARROW = 1e-5, 2.0**-5  # of float32; of bfloat16, where products and sums are rounded
_KINDS: tuple[Kind, ...] = ("pair", "two", "complex")
_X: dict[str, tuple[int, ...]] = {"BSND": (_B, _S, _N, _D), "BNSD": (_B, _N, _S, _D), "BSD": (_B, _S, _D)}
_ANGLES: dict[str, tuple[int, ...]] = {
    **{"S": (_S,), "BS": (_B, _S), "1S": (1, _S)},
    **{"BS1": (_B, _S, 1), "1S1": (1, _S, 1), "B1S": (_B, 1, _S), "11S": (1, 1, _S)},
}
_PAIRS = [  # an angle of as many dims as x has its tokens where x has them
    (x, shape)
    for x, shape in product(_X, _ANGLES)
    if len(shape) < 3 or (len(x) == 4 and x[1] == shape[1].replace("1", "N"))
]
_FIRST, _SECOND, _HALF = slice(None, None, 2), slice(1, None, 2), None  # of cos: even or odd entries; the first half


class _Entries(NamedTuple):
    """Where a function reads an angle: cos and sin have an entry for each pair, or one for each element of a head.

    Attributes:
        width: 1 or 2 entries for each pair.
        cos: the part of cos that is read; None: the first half.
        sin: of sin.
        twice: both entries are read, and must be equal.
    """

    width: int
    cos: slice | None
    sin: slice | None
    twice: Literal["", "pairs", "halves"] = ""

    def once(self, angles: Tensor, part: slice | None) -> Tensor:
        """Return cos or sin with an entry for each pair."""
        if self.width == 1:
            return angles
        return angles[..., : angles.shape[-1] // 2] if part is None else angles[..., part]


_ONCE = _Entries(1, None, None)
_READ = [_Entries(2, *parts) for parts in ((_FIRST, _SECOND), (_FIRST, _FIRST), (_SECOND, _SECOND), (_HALF, _HALF))]
_DOUBLED = [_Entries(2, _FIRST, _FIRST, "pairs"), _Entries(2, _HALF, _HALF, "halves")]


class Form(NamedTuple):
    """A call that was compared, and how the op computes it."""

    entries: _Entries
    interleaved: bool


class RotaryCalls(NamedTuple):
    """The calls of a function, with some options, that the op computes: by the kind and the shapes of arguments."""

    forms: dict[tuple[Kind, str, str, int], Form]

    def __call__(self, own: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Compute a call by the op, or by the function where it is no call that was compared."""
        result = None if is_traced() or is_transformed() else self._rotated(*args)
        return own(*args, **options) if result is None else result

    def _rotated(self, x: Tensor, *angles: Any) -> Tensor | None:
        kind, parts = _kind(angles)
        if kind is None or any(not is_plain_or_planned(each) for each in (x, *parts)):
            return None
        cos = parts[0]
        for name, seq in (("BSND", 1), ("BNSD", 2), ("BSD", 1)):
            if len(name) != x.dim():
                continue
            width = 2 * cos.shape[-1] // x.shape[-1] if x.shape[-1] else 0
            for shape in _shapes(cos, x.shape[0], x.shape[seq], seq, x.dim()):
                form = self.forms.get((kind, name, shape, width))
                if form is not None and 2 * cos.shape[-1] == width * x.shape[-1]:
                    return _computed(form, x, kind, parts, seq)
        return None


def _kind(angles: Any) -> tuple[Kind | None, tuple[Any, ...]]:
    """Return which kind of angles the arguments after x are, and the tensors."""
    if len(angles) == 2:
        return "two", angles
    if len(angles) == 1 and type(angles[0]) in (tuple, list) and len(angles[0]) == 2:
        return "pair", tuple(angles[0])
    is_complex = len(angles) == 1 and isinstance(angles[0], Tensor) and angles[0].is_complex()
    return ("complex", angles) if is_complex else (None, ())


def _shapes(cos: Tensor, batch: int, length: int, seq: int, rank: int) -> Iterator[str]:
    """Yield the names of the shape of cos, in which ``length`` is at the dim of x that ``seq`` has."""
    lead = tuple(cos.shape[:-1])
    firsts = [letter for letter, size in (("1", 1), ("B", batch)) if lead[:1] == (size,)]
    if lead == (length,):
        yield "S"
    elif len(lead) == 2 and lead[1] == length:
        yield from (f"{first}S" for first in firsts)
    elif len(lead) == 3 and rank == 4 and lead[seq] == length and lead[3 - seq] == 1:
        yield from (f"{first}{'S1' if seq == 1 else '1S'}" for first in firsts)


def _computed(form: Form, x: Tensor, kind: Kind, parts: tuple[Any, ...], seq: int) -> Tensor | None:
    """Return x, rotated by the op; None where cos or sin has two entries for a pair that may differ."""
    if kind == "complex":
        cos, sin = parts[0].real.contiguous(), parts[0].imag.contiguous()
    else:
        cos, sin = parts
        if cos.shape != sin.shape or not (cos.is_floating_point() and sin.is_floating_point()):
            return None
        is_planned = getattr(x, "has_no_numbers", False)  # in a plan both entries of a pair are taken to be equal
        twice = form.entries.twice
        if twice and not is_planned and not all(_has_equal_entries(each, twice) for each in parts):
            return None
        cos, sin = form.entries.once(cos, form.entries.cos), form.entries.once(sin, form.entries.sin)
    if cos.device != x.device or sin.device != x.device:
        return None
    return _rotate(ops.rotary_embedding, x, cos, sin, seq, form.interleaved)


def _rotate(op: Any, x: Tensor, cos: Tensor, sin: Tensor, seq: int, interleaved: bool) -> Tensor:
    if cos.dim() == 4:
        cos, sin = cos.squeeze(3 - seq), sin.squeeze(3 - seq)
    if cos.dim() == 3 and cos.shape[0] == 1:
        cos, sin = cos[0], sin[0]
    if x.dim() == 3:
        return op(x.unsqueeze(2), None, cos, sin, interleaved=interleaved, seq_dim=-3)[0].squeeze(2)
    return op(x, None, cos, sin, interleaved=interleaved, seq_dim=seq - 4)[0]


def _has_equal_entries(angles: Tensor, twice: str) -> bool:
    """Return True where both entries of each pair are equal. The numbers are read."""
    if angles.is_meta or (angles.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False

    def are_equal() -> bool:
        halves = angles.chunk(2, -1) if twice == "halves" else (angles[..., ::2], angles[..., 1::2])
        return torch.equal(*halves)

    return cached_for(angles, ("entries", twice), are_equal)


def recognised_calls(own: Any, name: str, options: Options) -> RotaryCalls | str:
    """Return the calls of a rotary function that the op computes, or the reason why there are none.

    >>> def rotate(x, freqs_cis):
    ...     x_rotated = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    ...     return torch.view_as_real(x_rotated * freqs_cis.unsqueeze(2)).flatten(3).type_as(x)
    >>> list(recognised_calls(rotate, "rotate", ()).forms)
    [('complex', 'BSND', 'BS', 1), ('complex', 'BSND', '1S', 1)]
    """
    reason = reason_of_source((), own, subject=name, tried=_of_autocast(own))
    if reason is not None:
        return reason
    function = partial(own, **dict(options))
    forms: dict[tuple[Kind, str, str, int], Form] = {}
    for kind, (x, shape) in product(_KINDS, _PAIRS):
        for width in (1,) if kind == "complex" else (1, 2):
            form = _form(function, kind, x, shape, width)
            if form is not None:
                forms[kind, x, shape, width] = form
    if not forms:
        return f"the results of {name} are not those of rotary_embedding"
    # where S is N, x of (B, S, N, D) looks like one of (B, N, S, D)
    heads = [each for each in forms if each[1] == "BNSD" and (each[0], "BSND", *each[2:]) in forms]
    if heads:
        return f"{name} takes heads before and after tokens"
    for (kind, x, shape, width), form in forms.items():
        reason = _reason_of_calls(function, form, kind, x, shape, width, name)
        if reason is not None:
            return reason
    return RotaryCalls(forms)


def _of_autocast(own: Any) -> set[str]:
    """Return the devices that a function names for an autocast alone, under which no call is made by the op."""
    source = text_of(own)
    tree = None if source is None else ast.parse(dedent(source[0]))
    named = [] if tree is None else [each.value for each in ast.walk(tree) if isinstance(each, ast.Constant)]
    calls = [] if tree is None else [each for each in ast.walk(tree) if isinstance(each, ast.Call) and each.args]
    given = [each.args[0] for each in calls if path_of(each.func).endswith("autocast")]
    devices = [each.value for each in given if isinstance(each, ast.Constant)]
    return {each for each in devices if isinstance(each, str) and named.count(each) == devices.count(each)}


def _seq(x: str) -> int:
    return 2 if x == "BNSD" else 1


def _angles(kind: Kind, shape: str, width: int, twice: str = "", length: int = _S) -> list[Tensor]:
    """Return cos and sin on no circle, or complex numbers: a rotation is linear in them."""
    sizes = [length if size == _S else size for size in _ANGLES[shape]]
    cos, sin = (numbers(seed, *sizes, _D // 2 if twice else _D * width // 2) for seed in (5, 6))
    if twice == "pairs":
        cos, sin = (each.repeat_interleave(2, -1) for each in (cos, sin))
    elif twice == "halves":
        cos, sin = (torch.cat((each, each), -1) for each in (cos, sin))
    return [torch.complex(cos, sin)] if kind == "complex" else [cos, sin]


def _called(own: Any, kind: Kind, x: Tensor, *angles: Tensor) -> Any:
    return own(x, angles) if kind == "pair" else own(x, *angles)


def _expected(form: Form, kind: Kind, x: str, value: Tensor, *angles: Tensor) -> Tensor:
    if kind == "complex":
        cos, sin = angles[0].real, angles[0].imag
    else:
        cos, sin = form.entries.once(angles[0], form.entries.cos), form.entries.once(angles[1], form.entries.sin)
    return _rotate(_reference, value, cos, sin, _seq(x), form.interleaved)


def _reference(q: Tensor, k: None, cos: Tensor, sin: Tensor, *, interleaved: bool, seq_dim: int) -> Any:
    return ops.OPS["rotary_embedding"].reference(q, k, cos, sin, interleaved, seq_dim)


def _form(own: Any, kind: Kind, x: str, shape: str, width: int) -> Form | None:
    """Return the form of a call with which the op computes the same, or None."""
    tried = [_ONCE] if width == 1 else [*_READ, *_DOUBLED]
    for twice in ("",) if width == 1 else ("", "pairs", "halves"):
        value, angles = numbers(1, *_X[x]), _angles(kind, shape, width, twice)
        result = called(_called, own, kind, value.clone(), *(each.clone() for each in angles))
        if not isinstance(result, Tensor) or result.shape != value.shape:
            return None
        for entries, interleaved in product((each for each in tried if each.twice == twice), (True, False)):
            form = Form(entries, interleaved)
            if not near(result, _expected(form, kind, x, value, *angles), _TOLERANCE) or result.dtype != value.dtype:
                continue
            narrow = value.bfloat16()
            rounded = called(_called, own, kind, narrow.clone(), *angles)
            fits = isinstance(rounded, Tensor) and rounded.dtype is torch.bfloat16
            return form if fits and near(rounded, _expected(form, kind, x, narrow, *angles), _NARROW) else None
    return None


def _reason_of_calls(own: Any, form: Form, kind: Kind, x: str, shape: str, width: int, name: str) -> str | None:
    """Return what a function does beside a rotation, with several tokens or with one."""
    calls: list[list[Tensor]] = []
    for length in (40, 1):
        sizes = [length if letter == "S" else size for letter, size in zip(x, _X[x])]
        calls.append([numbers(3, *sizes) * 1e3, *_angles(kind, shape, width, form.entries.twice, length)])
    run, expected = partial(_called, own, kind), partial(_expected, form, kind, x)
    return reason_of_calls(run, expected, calls, _TOLERANCE, subject=name, fixed=len(calls[0]) - 1)
