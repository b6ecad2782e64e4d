"""Checks that several ops share. On the hot path: what passes comes first, words are made only for what fails."""

from __future__ import annotations

import reprlib
from typing import Any

import torch
from torch import Tensor

from fusedops._spec import TensorSpec

FLOATING = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
STRIDED = torch.strided
FLOATING_WORDS = "float16, bfloat16, float32 or float64"


def broadcasts(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    """Whether a tensor of shape ``small`` broadcasts to ``large`` without changing it."""
    missing = len(large) - len(small)
    if missing < 0:
        return False
    # only of one rank: (6,) == (batch, 5, 6) would tie a traced call to batch != 6
    if missing == 0 and small == large:
        return True
    # a loop and reversed(), not all(...) and a slice: a generator and a new torch.Size cost 0.7 us more
    for size, full in zip(reversed(small), reversed(large)):
        if size != full and size != 1:
            return False
    return True


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a tensor or a TensorSpec."""
    return isinstance(value, (Tensor, TensorSpec))


def kind(value: object) -> str:
    """What ``value`` is, in two words, for a message."""
    return f"a tensor of {value.numel()} elements" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def word(value: object) -> str:
    """A value in a message. Of a tensor nothing is read; and Python refuses to write out an int of 5000 digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return kind(value) if isinstance(value, Tensor) else reprlib.repr(value)


def wrong_layout(name: str, value: Any) -> str | None:
    """What is wrong with the layout of the tensor ``value``, or None."""
    if value.is_nested:
        return f"{name} is a nested tensor; needs a strided one; pad it, as in {name}.to_padded_tensor(0.0)"
    if value.layout is not STRIDED:
        return f"{name} is {value.layout}; needs a strided tensor; convert it, as in {name}.to_dense()"
    return None


def wrong_tensor(name: str, value: Any) -> str | None:
    """What is wrong with ``value`` as a floating tensor, or None."""
    if not is_tensor(value):
        return f"{name} is {kind(value)}; needs a torch.Tensor; convert it with torch.as_tensor"
    if value.dtype not in FLOATING:
        return f"{name} is {value.dtype}; needs {FLOATING_WORDS}; convert it, as in {name}.float()"
    return wrong_layout(name, value)


def wrong_beside(name: str, value: Any, x: Any) -> str | None:
    """What is wrong with ``value`` as a tensor that broadcasts to ``x`` on the same device, or None."""
    if value.device != x.device:
        return f"{name} is on {value.device} and x on {x.device}; needs one device; move it with {name}.to(x.device)"
    if not broadcasts(value.shape, x.shape):
        given, wanted = tuple(value.shape), tuple(x.shape)
        return (
            f"{name} has shape {given}, which does not broadcast to x {wanted}; needs each size, from the last, to be "
            f"1 or x's; give it sizes of 1 where it repeats"
        )
    return None


def any_nested(*values: Any) -> bool:
    """Whether one of them is a nested tensor, of which torch gives no shape. To ask each one first takes 0.06 us."""
    return any(isinstance(value, Tensor) and value.is_nested for value in values)


def is_long(value: int) -> bool:
    """Whether torch takes the int as a number: it has at most 64 bits, with its sign."""
    return -(2**63) <= value < 2**63


def is_probability(p: Any) -> bool:
    """Whether ``p`` is a number in [0, 1]."""
    return isinstance(p, (float, int)) and 0 <= p <= 1


def is_seed(seed: Any) -> bool:
    """Whether ``seed`` is None, a 64-bit number (signed or unsigned), or a tensor of one int64."""
    if isinstance(seed, int):
        return -(2**63) <= seed < 2**64
    if not is_tensor(seed):
        return seed is None
    return seed.dtype == torch.int64 and seed.layout is STRIDED and not seed.is_nested and seed.numel() == 1


def wrong_dropout(p: Any, training: Any, seed: Any, x: Any) -> str | None:
    """What is wrong with the arguments of a dropout, or None."""
    if not is_probability(p):
        return f"p is {word(p)}; needs a number in [0, 1], the probability of dropping an element; 0.1 drops a tenth"
    if not isinstance(training, bool):
        return f"training is {word(training)}; needs True or False; pass module.training or bool(...)"
    if not is_seed(seed):
        given = f"{seed.dtype} of {seed.numel()} elements" if is_tensor(seed) else word(seed)
        return f"seed is {given}; needs None, a 64-bit integer, or an int64 tensor of one element; None draws one"
    if not is_tensor(seed) and training and p > 0:
        return (
            f"seed is {word(seed)}; needs an int64 tensor of one element in the registered op; call the public "
            f"function, which draws or makes it"
        )
    if is_tensor(seed) and seed.device != x.device:
        return f"seed is on {seed.device} and x on {x.device}; needs one device; move it with seed.to(x.device)"
    return None
