"""The functions by which hybrid models mix positions (Qwen3-Next's, Kimi Linear's, Mamba-2's, LFM2's), by ops.

transformers writes a short convolution, the delta rule and Mamba-2's scan as functions of the model's file. Each has a
form here that takes the same arguments and calls an op; it returns None for a call that the op does not take.

Packed sequences come as ``cu_seqlens`` or ``cu_seq_lens_q``, their bounds, or as ``seq_idx``, a number for each token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

_SILU = ("silu", "swish")
_WIDTHS = range(2, 9)


class Form(NamedTuple):
    """A function of a model as a call of an op.

    Attributes:
        op: the name of the op.
        parameters: the names that the function's signature has, in this order at its start.
        call: takes the op and the arguments of the function by name.
        state: the parameter that is written in place, or "".
    """

    op: str
    parameters: tuple[str, ...]
    call: Callable[..., Any]
    state: str = ""


class _UnknownBoundsError(Exception):
    """The sequences of a call have no bounds that the ops take."""


def bounds_of(given: dict[str, Any], rows: int, positions: int) -> Tensor | None:
    """Return the bounds of the packed sequences of a call, int32, or None where no sequences are packed.

    Args:
        given: the keyword arguments of the call.
        rows: its batch, which packed sequences have once.
        positions: of x, which may begin with some that are no tokens.

    >>> bounds_of({"seq_idx": torch.tensor([[0, 0, 1]])}, 1, 3)
    tensor([0, 2, 3], dtype=torch.int32)
    >>> bounds_of({}, 2, 3)
    """
    bounds: Tensor | None = given.get("cu_seqlens")
    bounds = given.get("cu_seq_lens_q") if bounds is None else bounds
    index: Tensor | None = given.get("seq_idx")
    if rows != 1 and not (bounds is None and index is None):
        raise _UnknownBoundsError
    if bounds is not None or index is None:
        return None if bounds is None else bounds.to(torch.int32)
    changes = (index[0, 1:] != index[0, :-1]).nonzero().flatten() + 1
    bounds = torch.cat((changes.new_zeros(1), changes, changes.new_full((1,), index.shape[1])))
    return (bounds + (positions - index.shape[1])).to(torch.int32)


def _convolved(
    op: Any, hidden_states: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **given: Any
) -> Tensor | None:
    width = weight.shape[-1]
    if width not in _WIDTHS or not (activation is None or activation in _SILU):
        return None
    bounds = bounds_of(given, hidden_states.shape[0], hidden_states.shape[2])
    if bounds is not None and hidden_states.shape[2] == width:
        bounds = bounds + (width - bounds[-1])  # fewer tokens than W are padded on the left for a cache
    return op(hidden_states, weight, bias, activation=activation and "silu", cu_seqlens=bounds)


def _convolved_next(
    op: Any,
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Any = None,
    activation: Any = None,
    **_: Any,
) -> Tensor | None:
    """Compute one position, and move the inputs in conv_state, (B, C, W), by one."""
    width = weight.shape[-1]
    if width not in _WIDTHS or not (activation is None or activation in _SILU):
        return None
    if hidden_states.shape[2] != 1 or conv_state.shape[-1] != width:
        return None
    before = conv_state[..., 1:].clone()  # conv_state changes below, also where a backward needs it
    y = op(hidden_states, weight, bias, activation=activation and "silu", initial_state=before.to(hidden_states.dtype))
    conv_state[..., :-1].copy_(before)
    conv_state[..., -1:].copy_(hidden_states)
    return y


def _by_delta_rule(rank: int) -> Callable[..., Any]:
    def attended(
        op: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Any = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **given: Any,
    ) -> tuple[Tensor, Tensor | None] | None:
        if g.dim() != rank:
            return None
        bounds = bounds_of(given, query.shape[0], query.shape[1])
        options = {"normalize": use_qk_l2norm_in_kernel, "initial_state": initial_state, "cu_seqlens": bounds}
        result = op(query, key, value, g, beta, return_state=output_final_state, **options)
        out, state = result if output_final_state else (result, None)
        return out.to(query.dtype), state

    return attended


def _steps(dt: Tensor, bias: Tensor | None, positive: bool) -> Tensor:
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return softplus(dt) if positive else dt


def _scanned(
    op: Any,
    hidden_states: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Any = None,
    **given: Any,
) -> Tensor | tuple[Tensor, Tensor] | None:
    """Compute Mamba-2's scan; its states are (B, H, Dv, Dk), here views of the op's."""
    ranks = hidden_states.dim(), dt.dim(), a.dim(), b.dim(), 1 if d is None else d.dim()
    if ranks != (4, 3, 1, 4, 1) or z is not None:
        return None
    bounds = bounds_of(given, hidden_states.shape[0], hidden_states.shape[1])
    if bounds is not None and initial_states is not None:
        raise _UnknownBoundsError
    steps = _steps(dt, dt_bias, dt_softplus).clamp(*dt_limit)
    wide, before = hidden_states.float(), None if initial_states is None else initial_states.transpose(-1, -2)
    options = {"scale": 1.0, "initial_state": before, "return_state": return_final_states, "cu_seqlens": bounds}
    result = op(c.float(), b.float(), wide * steps[..., None], a.float() * steps, **options)
    out, state = result if return_final_states else (result, None)
    out = out if d is None else torch.addcmul(out, wide, d.float()[:, None])
    if state is None:
        return out
    return out, (state if bounds is None else state[-1:]).transpose(-1, -2)


def _stepped(
    op: Any,
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """Compute one position of Mamba-2's scan, and write the state, (B, H, Dv, Dk), in place."""
    ranks = state.dim(), hidden_states.dim(), dt.dim(), a.dim(), b.dim()
    if ranks != (4, 3, 3, 3, 3) or not (_is_repeated(dt, 1) and _is_repeated(a, 2)):
        return None
    if dt_bias is not None and not (dt_bias.dim() == 2 and _is_repeated(dt_bias, 1)):
        return None
    steps = _steps(dt[..., 0], None if dt_bias is None else dt_bias[..., 0], dt_softplus)
    wide = hidden_states.float()
    q, k, v, decay = c.float(), b.float(), wide * steps[..., None], a[:, 0, 0].float() * steps
    one = (each[:, None] for each in (q, k, v, decay))
    out, after = op(*one, scale=1.0, initial_state=state.transpose(-1, -2), return_state=True)
    state.copy_(after.transpose(-1, -2))
    out = out[:, 0]
    if d is not None:
        out = out + wide * d
    if z is not None:
        out = out * silu(z)
    return out.to(hidden_states.dtype)


def _is_repeated(tensor: Tensor, dims: int) -> bool:
    """Return True where the elements along the last dims are one, as expand makes them."""
    last = zip(tensor.shape[-dims:], tensor.stride()[-dims:])
    return all(size == 1 or stride == 0 for size, stride in last)


_DELTA = ("query", "key", "value", "g", "beta")
_SCAN = ("hidden_states", "dt", "A", "B", "C")
FORMS = {
    "convolution": Form("causal_conv1d", ("hidden_states", "weight", "bias", "activation"), _convolved),
    "next convolution": Form(
        "causal_conv1d",
        ("hidden_states", "conv_state", "weight", "bias", "activation"),
        _convolved_next,
        "conv_state",
    ),
    "delta rule": Form("linear_attention", _DELTA, _by_delta_rule(3)),
    "delta rule by rows": Form("linear_attention", _DELTA, _by_delta_rule(4)),
    "scan": Form("linear_attention", _SCAN, _scanned),
    "next scan": Form("linear_attention", ("state", *_SCAN), _stepped, "state"),
}


def computed(form: Form, op: Any, arguments: dict[str, Any]) -> Any:
    """Return the results of a call by its op, or None for a call that it does not take. Names are in lower case."""
    try:
        return form.call(op, **arguments)
    except _UnknownBoundsError:
        return None
