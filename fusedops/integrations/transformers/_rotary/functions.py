"""The rotary functions of models (Llama's, GPT-J's, DeepSeek's, Gemma 4's, Llama 4's), recognised by their results.

A function takes q and k, or one tensor, and the angles: cos and sin, sin and cos, or complex numbers. Its own code runs
on random numbers with each reading of its parameters, and is compared with the op.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fusedops import ops
from fusedops.dtypes import promoted
from fusedops.integrations._trial.source import reason_of_source
from fusedops.integrations._trial.twin import Raised, cached_weakly, called, near, numbers, pair_of
from fusedops.integrations._trial.whole import reason_of_calls
from fusedops.integrations.transformers._rotary.layouts import Layout, once

_TENSORS = ("q", "k", "cos", "sin")
_READINGS = (_TENSORS, ("q", "cos", "sin"), ("q", "sin", "cos"), ("q", "k", "cos"))  # the last one's cos is complex
_HEADS_DIM = "unsqueeze_dim"  # of cos, where the dim of the heads is put
_LAYOUTS: tuple[Layout, ...] = ("halves", "pairs", "once")
_RANKS = ((4, 3), (3, 2), (4, 2))  # of q and cos: with a batch, without, with one set of angles for all (Pixtral)
_S, _D, _PART = 64, 16, 8
_TOLERANCE = 1e-5
_NARROW = 2.0**-5  # of bfloat16: products and sums are rounded, cos is too


@dataclass(frozen=True)
class Rotation:
    """The arithmetic of a rotary function."""

    layout: Layout
    interleaved: bool = False
    last: bool = False  # the last elements of a head rotate, not the first ones
    negative: bool = False  # by the negative angles, as NanoChat
    apart: bool = False  # pairs are neighbours in q, and their elements in two halves of the result

    def __call__(self, op: Callable[..., Any], q: Tensor, k: Tensor | None, cos: Tensor, sin: Any, seq_dim: int) -> Any:
        """Return q and k, rotated by ``op``, which takes (q, k, cos, sin, interleaved, seq_dim)."""
        if self.layout == "complex":
            cos, sin = cos.real.contiguous(), cos.imag.contiguous()
        else:
            cos, sin = once(cos, self.layout), once(sin, self.layout)
        sin = -sin if self.negative else sin
        if not self.last and not self.apart:
            return op(q, k, cos, sin, self.interleaved, seq_dim)
        width = 2 * cos.shape[-1]
        before = [None if x is None or not self.last or x.shape[-1] == width else x[..., :-width] for x in (q, k)]
        if self.last:
            q, k = q[..., -width:], None if k is None else k[..., -width:]
        results: list[Any] = list(op(q, k, cos, sin, self.interleaved, seq_dim))
        if self.apart:
            results = [None if x is None else x.unflatten(-1, (-1, 2)).mT.flatten(-2) for x in results]
        return [x if first is None else torch.cat((first, x), -1) for x, first in zip(results, before)]


@dataclass(frozen=True)
class RotaryFunction:
    """The op with the parameters of a model's function.

    Attributes:
        rotation: the arithmetic.
        promotes: the results have the wider dtype of q and cos, not that of q.
        roles: of each parameter: q, k, cos, sin, the dim of the heads, or "" for one that is not taken.
        calls: (rank of q, rank of cos, dim of the heads or None) and the seq_dim of the calls that were compared.
    """

    rotation: Rotation
    promotes: bool
    roles: tuple[tuple[str, str], ...]
    calls: tuple[tuple[tuple[int, int, int | None], int], ...]

    def __call__(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the op, or the model's own function for a call of another kind than those that were compared."""
        roles, heads_dim = self.roles, None
        if len(args) == 4 <= len(roles) and not kwargs and roles[3][1] == "sin":
            q, k, cos, sin = args  # as most models call it: the rest takes as long as the rotation of one token
        else:
            values = self._values(args, kwargs)
            if values is None:
                return own(*args, **kwargs)
            q, k, cos, sin = values["q"], values.get("k"), values["cos"], values.get("sin")
            heads_dim = values.get(_HEADS_DIM)
        seq_dim = self._seq_dim(q, cos, heads_dim)
        if seq_dim is None:
            return own(*args, **kwargs)
        if self.promotes and cos.dtype != q.dtype:
            wide = promoted(q, cos)
            q, k = q.to(wide), None if k is None else k.to(wide)
        rotated = self.rotation(_op, q, k, cos, sin, seq_dim)
        return rotated[0] if k is None else tuple(rotated)

    def _values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments by role, or None for others than the op takes."""
        values: dict[str, Any] = {}
        for (name, role), value in zip(self.roles, args):
            values[role or name] = value
        for name, role in self.roles:
            if name in kwargs:
                values[role or name] = kwargs[name]
        roles = [role for _, role in self.roles]
        unknown = any(value is not None and role not in roles for role, value in values.items())
        absent = any(values.get(role) is None for role in _TENSORS if role in roles)
        return None if unknown or absent or len(values) != len(args) + len(kwargs) else values

    def _seq_dim(self, q: Tensor, cos: Tensor, heads_dim: int | None) -> int | None:
        """Return the op's seq_dim, or None for a call of another kind than those that were compared."""
        if cos.requires_grad:  # of positions that are learned, as MLCD's: the op has no gradient for them
            return None
        key = q.dim(), cos.dim(), heads_dim
        for compared, seq_dim in self.calls:
            if compared == key:  # some rotate a part of the tokens: DINOv3's first ones stay
                return seq_dim if q.shape[seq_dim] == cos.shape[-2] else None
        return None


def _op(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int) -> Any:
    return ops.rotary_embedding(q, k, cos, sin, interleaved=interleaved, seq_dim=seq_dim)


def _reference(q: Tensor, k: Tensor | None, *args: Any) -> Any:
    rotated = ops.OPS["rotary_embedding"].reference(q, k, *args)
    return (rotated[0], None) if k is None else rotated


@cached_weakly
def recognised_function(function: Any, name: str) -> RotaryFunction | str:
    """Return the op in the place of a function, or the reason why it is none. Computed once for each function."""
    own = partial(type(function).forward, function) if isinstance(function, Module) else function
    parameters = list(inspect.signature(own).parameters.values())
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    needed = sum(parameter.default is parameter.empty for parameter in parameters if parameter.name in names)
    tried, reason = False, reason_of_source((), own, subject=name)
    if reason is not None:
        return reason
    for reading in _READINGS:
        rest = [each for each in names if each != _HEADS_DIM]
        if not needed <= len(reading) <= len(rest):
            continue
        tried = True
        mapped = dict(zip(rest, reading))
        roles = tuple((each, _HEADS_DIM if each == _HEADS_DIM else mapped.get(each, "")) for each in names)
        for layout in _LAYOUTS if "sin" in reading else ("complex",):
            found = _recognised(own, roles, reading, layout)
            if found is not None:
                whole = _with_dtype(found, own) or f"the dtypes of the results of {name} follow another rule"
                return _reason_of_calls(found, own, reading, name) or whole
    if tried:
        return f"the results of {name} are not those of rotary_embedding"
    taken = ", ".join(map(str, parameters))
    return f"{name} takes {taken}, expected q, k, cos, sin or one tensor, cos, sin or q, k and complex angles"


def _rotations(layout: Layout) -> Iterator[Rotation]:
    for negative in (False, True):
        for interleaved, last in product((layout == "complex", layout != "complex"), (False, True)):
            yield Rotation(layout, interleaved, last, negative)
        yield Rotation(layout, True, negative=negative, apart=True)


def _recognised(own: Any, roles: Any, reading: tuple[str, ...], layout: Layout) -> RotaryFunction | None:
    """Return the function where its results are those of one rotation, with the calls for which they are."""
    dims = (None, 0, 1, 2) if any(role == _HEADS_DIM for _, role in roles) else (None,)
    for rotation in _rotations(layout):
        calls: list[tuple[tuple[int, int, int | None], int]] = []
        found = RotaryFunction(rotation, False, roles, ())
        for ranks, dim, seq_dim in product(_RANKS, dims, (-2, -3)):
            call = (*ranks, dim), seq_dim
            whole = _agree(found, own, reading, call, _D)
            if not whole:
                continue
            if _agree(found, own, reading, call, _PART) is False:
                calls.clear()  # parts of heads are rotated in another way
                break
            calls.append(call)
        if calls:
            return replace(found, calls=tuple(calls))
    return None


def _agree(
    found: RotaryFunction,
    own: Any,
    reading: tuple[str, ...],
    call: tuple[tuple[int, int, int | None], int],
    width: int,
    dtype: torch.dtype = torch.float32,
    angle_dtype: torch.dtype = torch.float32,
) -> Any:
    """Return the function's results where they agree with the op's, False where not, None where it raises."""
    (rank, cos_rank, dim), seq_dim = call
    values = _values(found.rotation.layout, rank, cos_rank, seq_dim, width, dtype, angle_dtype)
    options = {} if dim is None else {_HEADS_DIM: dim}
    result = called(own, *(values[name].clone() for name in reading), **options)
    if isinstance(result, Raised):
        return None
    results = pair_of(result) if "k" in reading else ((result,) if isinstance(result, Tensor) else None)
    if results is None:
        return False
    k = values["k"] if "k" in reading else None
    expected = found.rotation(_reference, values["q"], k, values["cos"], values["sin"], seq_dim)
    tolerance = _TOLERANCE if dtype == torch.float32 else _NARROW
    return results if all(near(*each, tolerance) for each in zip(results, expected)) else False


def _values(
    layout: Layout, rank: int, cos_rank: int, seq_dim: int, width: int, dtype: torch.dtype, angle_dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return random arguments. cos and sin lie on no circle: a rotation is linear in them."""
    batch = (2,)[: rank - 3]
    q, k = (numbers(seed, *batch, heads, _S, _D, dtype=dtype) for seed, heads in ((1, 3), (2, 1)))
    if seq_dim == -3:
        q, k = q.transpose(-2, -3).contiguous(), k.transpose(-2, -3).contiguous()
    leading = (2,)[: cos_rank - 2]
    cos, sin = (numbers(seed, *leading, _S, width // 2, dtype=angle_dtype) for seed in (5, 6))
    if layout == "complex":
        cos = torch.complex(cos.float(), sin.float())
    elif layout != "once":
        pairs = layout == "pairs"
        cos, sin = (each.repeat_interleave(2, -1) if pairs else torch.cat((each, each), -1) for each in (cos, sin))
    return {"q": q, "k": k, "cos": cos, "sin": sin}


def _reason_of_calls(found: RotaryFunction, own: Any, reading: tuple[str, ...], name: str) -> str | None:
    """Return what a function does beside a rotation, with several tokens or with one."""
    (rank, cos_rank, dim), seq_dim = found.calls[0]
    values = _values(found.rotation.layout, rank, cos_rank, seq_dim, _D, torch.float32, torch.float32)
    dims, large = {"q": seq_dim, "k": seq_dim, "cos": -2, "sin": -2}, {"q": 1e4, "k": 1e4}
    one = [values[each].narrow(dims[each], 0, 1) for each in reading]
    calls = [[values[each] * large.get(each, 1.0) for each in reading], one]
    options = {} if dim is None else {_HEADS_DIM: dim}

    def expected(*tensors: Tensor) -> Any:
        given = dict(zip(reading, tensors))
        rotated = found.rotation(_reference, given["q"], given.get("k"), given["cos"], given.get("sin"), seq_dim)
        return rotated if "k" in reading else rotated[0]

    angles = 2 if "sin" in reading else 1
    return reason_of_calls(partial(own, **options), expected, calls, _TOLERANCE, subject=name, fixed=angles)


def _with_dtype(found: RotaryFunction, own: Any) -> RotaryFunction | None:
    """Return the function with the rule for the dtype of its results, or None where it has another."""
    given = {role for _, role in found.roles}
    reading = next(each for each in _READINGS if {*each} == given & {*_TENSORS} and _in_order(each, found))
    narrow = torch.bfloat16
    mixed = _agree(found, own, reading, found.calls[0], _D, narrow)
    if found.rotation.layout == "complex":  # complex numbers are of float32
        return found if mixed and mixed[0].dtype == narrow else None
    same = _agree(found, own, reading, found.calls[0], _D, narrow, narrow)
    if not same or same[0].dtype != narrow or not mixed:
        return None
    return replace(found, promotes=mixed[0].dtype == torch.float32)


def _in_order(reading: tuple[str, ...], found: RotaryFunction) -> bool:
    return tuple(role for _, role in found.roles if role in _TENSORS) == reading
