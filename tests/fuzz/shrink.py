"""The smallest call that still fails, found by leaving things out of one that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from fusedops import InvalidInputError, TensorSpec
from fusedops.testing import OPS
from tests.fuzz.call import Call, Made


def shrunk(call: Call, fails: Callable[[Call], bool], tries: int = 300) -> Call:
    """Return a simpler call that fails too.

    Args:
        call: a call that fails.
        fails: runs a call, and returns True where it fails in the same way.
        tries: how many calls may be run.
    """
    valid = _is_valid(call)
    again = True
    while again:
        again = False
        for simpler in _simpler(call):
            if tries == 0:
                return call
            if simpler == call or _is_valid(simpler) != valid:
                continue
            tries -= 1
            if fails(simpler):
                call, again = simpler, True
                break
    return call


def _simpler(call: Call) -> Iterator[Call]:
    """Yield calls with one thing less, the largest steps first."""
    yield replace(call, channel="argument", fallback="silent", adapt="none", grads=("contiguous", call.grads[1]))
    yield replace(call, mode="no_grad", wanted=())
    for name in call.wanted:
        yield replace(call, wanted=tuple(other for other in call.wanted if other != name))
    if "," in call.backend:
        yield replace(call, backend=call.backend.partition(",")[0])
    defaults = dict(zip(OPS[call.op].parameters, OPS[call.op].defaults))
    for name, value in call.args.items():
        if name not in OPS[call.op].required_tensors and defaults[name] != value and _plain(defaults[name]):
            yield _with(call, name, defaults[name])
    for name, made in call.tensors().items():
        if made.alias is not None:
            yield _with(call, name, replace(made, alias=None))
    yield from _smaller(call)
    for name, made in call.tensors().items():
        if made.layout != "contiguous":
            yield _with(call, name, replace(made, layout="contiguous"))
        for at in range(len(made.extremes)):
            yield _with(call, name, replace(made, extremes=made.extremes[:at] + made.extremes[at + 1 :]))
        if made.odd_bytes:
            yield _with(call, name, replace(made, odd_bytes=False))
        if made.floating:
            for values in ("zero", "one", "normal"):
                if made.values == values:
                    break
                yield _with(call, name, replace(made, values=values))
            if made.dtype != "float32":
                yield _with(call, name, replace(made, dtype="float32"))
                yield _all_float32(call)


def _plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _with(call: Call, name: str, value: Any) -> Call:
    args = {**call.args, name: value}
    for other, made in call.tensors().items():  # what shares memory with a tensor that changed no longer does
        if made.alias and made.alias[0] == name and other != name:
            args[other] = replace(made, alias=None)
    kept = tuple(other for other in call.wanted if isinstance(args[other], Made))
    return replace(call, args=args, wanted=kept)


def _all_float32(call: Call) -> Call:
    args = {n: replace(v, dtype="float32") if isinstance(v, Made) and v.floating else v for n, v in call.args.items()}
    return replace(call, args=args)


def _smaller(call: Call) -> Iterator[Call]:
    """Yield calls in which one size is smaller in every tensor that has it, or the leading dimension is gone."""
    tensors = call.tensors()
    rank = max((len(made.shape) for made in tensors.values()), default=0)
    if rank > 1:
        args = {
            n: _resized(v, v.shape[1:]) if n in tensors and len(v.shape) == rank else v for n, v in call.args.items()
        }
        yield replace(call, args=args)
    sizes = sorted({size for made in tensors.values() for size in made.shape if size > 1}, reverse=True)
    for old in sizes:
        for new in dict.fromkeys((1, 2, 32, old // 2, old // 32 * 32, old - 1)):
            if 0 < new < old:
                args = {
                    n: _resized(v, tuple(new if size == old else size for size in v.shape)) if n in tensors else v
                    for n, v in call.args.items()
                }
                yield replace(call, args=args)


def _resized(made: Made, shape: tuple[int, ...]) -> Made:
    """Return the tensor in another shape; its special values stay, at places that it has."""
    count = 1
    for size in shape:
        count *= size
    extremes = tuple((at % count, kind) for at, kind in made.extremes) if count else ()
    layout = made.layout if shape or made.layout in ("contiguous", "stepped", "offset", "negated") else "contiguous"
    if len(shape) < 2 and layout in ("transposed", "turned"):
        layout = "contiguous"
    alias = made.alias
    return replace(made, shape=shape, extremes=extremes, layout=layout, alias=alias)


def _is_valid(call: Call) -> bool:
    """Return True where the op accepts the call's shapes, dtypes and values."""
    given = {
        name: TensorSpec(value.shape, getattr(torch, value.dtype), value.device) if isinstance(value, Made) else value
        for name, value in call.args.items()
    }
    try:
        OPS[call.op].bound_specs((), given)
    except InvalidInputError:
        return False
    return True
