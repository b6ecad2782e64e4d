"""The causal convolution in plain torch: the inputs of each tap, packed sequences, the state, and the gradients.

*Tap* w of W multiplies the input ``W - 1 - w`` positions before the output. *Before* are the W - 1 inputs that come
before a sequence: zeros, or its initial state. The state after a sequence is its last W - 1 inputs, which are the
initial state's where the sequence is shorter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusedops._named_tuple import NamedTuple
from fusedops.constraints import Offsets
from fusedops.dtypes import no_autocast
from fusedops.ops.gated.formulas import activated

NONE, SILU = "none", "silu"


class Packed(NamedTuple):
    """The packed sequences of a row of S positions, from their N + 1 bounds.

    Attributes:
        first: the first position of each sequence, (N,) int64.
        length: of each sequence, (N,) int64.
        sequence: of each position, (S,) int64, in [0, N] where no sequence has it.
        offset: of each position within its sequence, (S,) int64.
        inside: True for a position of a sequence, (S,).
    """

    first: Tensor
    length: Tensor
    sequence: Tensor
    offset: Tensor
    inside: Tensor


def packed_of(cu_seqlens: Tensor, positions: int) -> Packed:
    """Return the packed sequences."""
    bounds = Offsets.within(cu_seqlens, positions)
    position = torch.arange(positions, device=bounds.device)
    number = torch.searchsorted(bounds, position, right=True) - 1
    count = bounds.shape[0] - 1
    inside = (number >= 0) & (number < count)
    sequence = number.clamp(min=0)
    return Packed(bounds[:-1], bounds.diff(), sequence, (position - bounds[sequence]).clamp(min=0), inside)


def taps(x: Tensor, width: int, initial_state: Tensor | None, packed: Packed | None) -> list[Tensor]:
    """Return the input of each tap at each position, ``width`` tensors of the shape of x.

    Args:
        x: (B, C, S).
        width: W.
        initial_state: (B, C, W - 1), of packed sequences (N, C, W - 1), of the dtype of x; None for zeros.
        packed: the sequences; None where each batch is one.
    """
    size = x.shape[-1]
    if packed is None:
        whole = extended(x, width, initial_state)
        return [whole[..., w : w + size] for w in range(width)]
    padded = pad(x, (width - 1, 0))
    shifted = [padded[..., w : w + size] for w in range(width)]
    return [
        tap.where(packed.offset >= width - 1 - w, _before(tap, w, width, initial_state, packed))
        for w, tap in enumerate(shifted)
    ]


def extended(x: Tensor, width: int, initial_state: Tensor | None) -> Tensor:
    """Return x after the W - 1 inputs before it, (B, C, W - 1 + S)."""
    if initial_state is None:
        return pad(x, (width - 1, 0))
    with no_autocast(x.device.type):  # which has no float64
        return torch.cat((initial_state, x), -1)


def _before(tap: Tensor, w: int, width: int, initial_state: Tensor | None, packed: Packed) -> Tensor:
    """Return the input of tap w at each position, if it is one before the sequence."""
    if initial_state is None or not initial_state.shape[0]:
        return torch.zeros_like(tap)
    at = (packed.offset + w).clamp(max=width - 2)
    return initial_state[packed.sequence.clamp(max=initial_state.shape[0] - 1), :, at].t()[None]


def preactivation(inputs: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the sum of the taps and the bias, (B, C, S).

    Args:
        inputs: of each tap.
        weight: (C, W).
        bias: (C,), or None.
    """
    total = inputs[0] * weight[:, 0, None]
    for w in range(1, len(inputs)):
        total = total + inputs[w] * weight[:, w, None]
    return total if bias is None else total + bias[:, None]


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, initial_state: Tensor | None, packed: Packed | None
) -> Tensor:
    """Return y in the dtype of the arithmetic. The arguments have it too."""
    z = preactivation(taps(x, weight.shape[1], initial_state, packed), weight, bias)
    y = activated(z, SILU)[0] if activation == SILU else z
    return y if packed is None else y.masked_fill(~packed.inside, 0.0)


def final_state(x: Tensor, width: int, initial_state: Tensor | None, packed: Packed | None) -> Tensor:
    """Return the last W - 1 inputs of each sequence, (B, C, W - 1), of packed sequences (N, C, W - 1)."""
    if packed is None:
        return extended(x, width, initial_state)[..., x.shape[-1] :]
    steps = torch.arange(width - 1, device=x.device)
    index = packed.length[:, None] - (width - 1) + steps  # within the sequence, negative before it
    at = packed.first[:, None] + index + (width - 1)
    last = pad(x, (width - 1, 0))[0][:, at].transpose(0, 1)
    if initial_state is None:
        before = torch.zeros_like(last)
    else:
        kept = (index + width - 1).clamp(max=width - 2)[:, None].expand(initial_state.shape)
        before = initial_state.gather(-1, kept)
    return last.where((index >= 0)[:, None], before)


class Gradients(NamedTuple):
    """The gradients, in the dtype of the arithmetic, with the shapes of the arguments."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    initial_state: Tensor


def linear_gradients(
    g: Tensor, grad_state: Tensor | None, inputs: list[Tensor], weight: Tensor, packed: Packed | None
) -> Gradients:
    """Return the gradients from ``g``, that of the sum of the taps, (B, C, S).

    Args:
        g: 0 where no sequence has the position.
        grad_state: the gradient of the state; None for 0.
        inputs: of each tap.
        weight: (C, W).
        packed: the sequences; None where each batch is one.
    """
    width, size = weight.shape[1], g.shape[-1]
    of_weight = torch.stack([(g * tap).sum((0, 2)) for tap in inputs], -1)
    whole = g.new_zeros((*g.shape[:-1], width - 1 + size))  # of the inputs before x, then of x
    for w in range(width):
        own = g if packed is None else g.masked_fill(packed.offset < width - 1 - w, 0.0)
        whole = whole + pad(own * weight[:, w, None], (w, width - 1 - w))
    if packed is None:
        if grad_state is not None:
            whole = whole + pad(grad_state, (size, 0))
        return Gradients(whole[..., width - 1 :], of_weight, g.sum((0, 2)), whole[..., : width - 1])
    before = _gradient_before(g, weight, packed)
    if grad_state is not None:
        steps = torch.arange(width - 1, device=g.device)
        index = packed.length[:, None] - (width - 1) + steps
        at = (packed.first[:, None] + index + width - 1)[:, None].expand(grad_state.shape)
        of_x = grad_state.masked_fill((index < 0)[:, None], 0.0)
        flat = at.transpose(0, 1).flatten(1)[None]
        whole = whole.scatter_add(-1, flat, of_x.transpose(0, 1).flatten(1)[None])
        moved = steps - packed.length[:, None]  # the index in the state of each number of the initial state
        kept = grad_state.gather(-1, moved.clamp(min=0)[:, None].expand(grad_state.shape))
        before = before + kept.masked_fill((moved < 0)[:, None], 0.0)
    return Gradients(whole[..., width - 1 :], of_weight, g.sum((0, 2)), before)


def _gradient_before(g: Tensor, weight: Tensor, packed: Packed) -> Tensor:
    """Return the gradient by the taps of the inputs before each packed sequence, (N, C, W - 1)."""
    width, count = weight.shape[1], packed.first.shape[0]
    before = g.new_zeros(count, g.shape[1], width - 1)
    padded = pad(g, (0, 1))  # a position to read for an empty sequence at the end
    for index in range(width - 1):
        at = (packed.first + index).clamp(max=g.shape[-1])
        own = padded[0][:, at].t().masked_fill((packed.length <= index)[:, None], 0.0)
        # tap w at this index reads number index + w
        before = before + pad(own[..., None] * weight[:, : width - 1 - index], (index, 0))
    return before


def slope_of(inputs: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the derivative of silu at the sum of the taps."""
    return activated(preactivation(inputs, weight, bias), SILU)[1]


def gradients(
    grad_y: Tensor,
    grad_state: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    packed: Packed | None,
    activation: str,
) -> Gradients:
    """Return the gradients in the dtype of the arithmetic. The arguments have it too; grad_state may be None for 0."""
    inputs = taps(x, weight.shape[1], initial_state, packed)
    g = grad_y * slope_of(inputs, weight, bias) if activation == SILU else grad_y
    if packed is not None:
        g = g.masked_fill(~packed.inside, 0.0)
    return linear_gradients(g, grad_state, inputs, weight, packed)
