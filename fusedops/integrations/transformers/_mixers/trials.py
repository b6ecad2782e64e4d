"""Calls by which the functions of hybrid models are compared with ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product
from typing import Any, cast

import torch
from torch import Tensor

from fusedops import ops
from fusedops.integrations._trial.twin import called, near, numbers
from fusedops.integrations._trial.whole import reason_of_calls
from fusedops.integrations.transformers._mixers.functions import Form, computed

_B, _S, _H, _G, _DK, _DV, _W = 2, 6, 4, 2, 5, 3, 4
_TOLERANCE = 2e-5  # of float32
_NARROW = 2.0**-5  # of bfloat16: transformers rounds the steps of a scan and the products of a convolution

_Call = dict[str, Any]

_FACTORS = (
    ("hidden_states", 1e4), ("conv_state", 1e4), ("value", 1e4), ("initial_state", 1e4), ("query", 1e-3), ("key", 1e-3),
    ("g", 30.0), ("beta", 3.0), ("dt", 50.0), ("A", 30.0), ("state", 1e4), ("initial_states", 1e4), ("B", 1e4),
    ("C", 1e4), ("z", 50.0), ("D", 1e4),
)  # fmt: skip


def reason_of_calls_of(function: Callable[..., Any], key: str, form: Form, name: str) -> str | None:
    """Return what a function does beside its form, with gradients, or None. A state is written by both."""
    for call in _CALLS[key](torch.float32):
        names = [each for each, value in call.items() if isinstance(value, Tensor) and each != form.state]

        def run(own: Callable[..., Any], *tensors: Tensor, call: _Call = call, names: list[str] = names) -> Any:
            written = {form.state: call[form.state].clone()} if form.state else {}
            given = {name: _repeated(each, call[name]) for name, each in zip(names, tensors)}
            return own(**{**call, **given, **written})

        calls = partial(run, function), partial(run, partial(_reference, form)), [[call[each] for each in names]]
        reason = reason_of_calls(*calls, _TOLERANCE, subject=name, asks=False)
        if reason is not None:
            return reason
    return None


def has_results_of(function: Callable[..., Any], key: str, form: Form) -> bool:
    """Return True where a function computes what its form does, with the same dtypes and changes of a state."""
    for dtype, tolerance in ((torch.float32, _TOLERANCE), (torch.bfloat16, _NARROW)):
        for call in chain(_CALLS[key](dtype), _limits(key) if dtype is torch.float32 else ()):
            own, expected = _results(form, call, function), _results(form, call, partial(_reference, form))
            if not own or len(own) != len(expected):
                return False
            if not all(near(a, b, tolerance) and a.dtype == b.dtype for a, b in zip(own, expected)):
                return False
    return True


def _limits(key: str) -> Iterator[_Call]:
    """Yield calls with large or small numbers in one tensor, which show a limit or an eps."""
    for call, (name, factor) in product(_CALLS[key](torch.float32), _FACTORS):
        if call.get(name) is not None:
            yield {**call, name: _repeated(call[name] * factor, call[name])}


def _repeated(x: Tensor, like: Tensor) -> Tensor:
    """Return x with its first element in each dim in which another tensor repeats one, as expand does."""
    return x[tuple(slice(1) if stride == 0 else slice(None) for stride in like.stride())].expand(x.shape)


def _results(form: Form, call: _Call, run: Callable[..., Any]) -> list[Tensor]:
    """Return the tensors among the results of a call, and the state that it writes; none where it has no result."""
    written = {name: call[name].clone() for name in (form.state,) if name}
    result: Any = called(run, **{**call, **written})
    each = cast("tuple[Any, ...]", result if isinstance(result, tuple) else (result,))
    results = [value for value in each if isinstance(value, Tensor)]
    return [*results, *written.values()] if results else []


def _reference(form: Form, **call: Any) -> Any:
    return computed(form, _REFERENCES[form.op], {name.lower(): value for name, value in call.items()})


def _convolution(x: Any, weight: Any, bias: Any, *, activation: Any, initial_state: Any = None, **_: Any) -> Any:
    return ops.OPS["causal_conv1d"].reference(x, weight, bias, activation or "none", initial_state)[0]


def _attention(
    q: Any,
    k: Any,
    v: Any,
    decay: Any = None,
    beta: Any = None,
    *,
    scale: Any = None,
    normalize: Any = False,
    initial_state: Any = None,
    return_state: Any = False,
    **_: Any,
) -> Any:
    options = scale, normalize, initial_state, return_state, None
    result = ops.OPS["linear_attention"].reference(q, k, v, decay, beta, *options)
    return result if return_state else result[0]


_REFERENCES = {"causal_conv1d": _convolution, "linear_attention": _attention}


def _convolutions(dtype: torch.dtype) -> Iterator[_Call]:
    weight, bias = numbers(2, _H, _W, dtype=dtype), numbers(3, _H, dtype=dtype)
    for positions, offset, activation in ((_S, None, None), (2, bias, "silu"), (_S, bias, None)):
        x = numbers(1, _B, _H, positions, dtype=dtype)
        yield {"hidden_states": x, "weight": weight, "bias": offset, "activation": activation}


def _next_convolutions(dtype: torch.dtype) -> Iterator[_Call]:
    state = numbers(4, _B, _H, _W, dtype=dtype)
    for call in _convolutions(dtype):
        yield {**call, "hidden_states": call["hidden_states"][..., :1], "conv_state": state}


def _delta_rules(by_rows: bool, dtype: torch.dtype) -> Iterator[_Call]:
    query, key = (numbers(seed, _B, _S, _H, _DK, dtype=dtype) for seed in (1, 2))
    decay = -numbers(4, _B, _S, _H, *((_DK,) if by_rows else ())).abs()
    call = {"query": query, "key": key, "value": numbers(3, _B, _S, _H, _DV, dtype=dtype), "g": decay}
    call["beta"] = numbers(5, _B, _S, _H, dtype=dtype).sigmoid()
    state = numbers(6, _B, _H, _DK, _DV)
    for normalized, before, last in ((True, None, False), (True, state, True), (False, state, True)):
        factor = 1.0 if normalized else 0.5  # keys of a length of about 1: the state does not grow
        options = {"use_qk_l2norm_in_kernel": normalized, "initial_state": before, "output_final_state": last}
        yield {**call, "query": query * factor, "key": key * factor, **options}


def _scans(dtype: torch.dtype) -> Iterator[_Call]:
    call: _Call = {"hidden_states": numbers(1, _B, _S, _H, _DV, dtype=dtype), "dt": numbers(2, _B, _S, _H, dtype=dtype)}
    call |= {"A": -numbers(3, _H).exp(), "B": numbers(4, _B, _S, _G, _DK, dtype=dtype)}
    call |= {"C": numbers(5, _B, _S, _G, _DK, dtype=dtype), "chunk_size": 4}
    bias, skip, state = numbers(6, _H, dtype=dtype), numbers(7, _H, dtype=dtype), numbers(8, _B, _H, _DV, _DK)
    yield {**call, "dt": call["dt"].abs()}
    call |= {"dt_bias": bias, "dt_softplus": True, "return_final_states": True}
    yield {**call, "D": skip, "initial_states": state}
    yield {**call, "dt_limit": (0.1, 0.5)}


def _next_scans(dtype: torch.dtype) -> Iterator[_Call]:
    dt, bias, skip = (numbers(seed, *size, 1, dtype=dtype).expand(*size, _DV) for seed, size in _NEXT.items())
    positive = dt[..., :1].abs().expand_as(dt)
    call: _Call = {"hidden_states": numbers(1, _B, _H, _DV, dtype=dtype), "dt": positive}
    call |= {"A": (-numbers(3, _H, 1, 1).exp()).expand(_H, _DV, _DK), "state": numbers(8, _B, _H, _DV, _DK)}
    call |= {"B": numbers(4, _B, _G, _DK, dtype=dtype), "C": numbers(5, _B, _G, _DK, dtype=dtype)}
    yield call
    yield {**call, "dt": dt, "dt_bias": bias, "dt_softplus": True, "D": skip}
    yield {**call, "dt": dt, "dt_bias": bias, "dt_softplus": True, "z": numbers(9, _B, _H, _DV, dtype=dtype)}


_NEXT = {2: (_B, _H), 6: (_H,), 7: (_H,)}
_CALLS: dict[str, Callable[[torch.dtype], Iterator[_Call]]] = {
    "convolution": _convolutions,
    "next convolution": _next_convolutions,
    "delta rule": lambda dtype: _delta_rules(False, dtype),
    "delta rule by rows": lambda dtype: _delta_rules(True, dtype),
    "scan": _scans,
    "next scan": _next_scans,
}
