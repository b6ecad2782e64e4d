"""The arguments of sample: a number for all rows, or one for each, becomes a tensor."""

from typing import Any

import torch
from torch import Tensor

from fusedops._contract.constraint import shown
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._named_tuple import NamedTuple
from fusedops.errors import InvalidInputError

NO_LOG_PROB = "none"
LOG_PROBS = (NO_LOG_PROB, "unfiltered", "filtered")


class SampleArgs(NamedTuple):
    """The arguments of sample. One of None has no effect."""

    logits: Tensor
    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    seed: Tensor
    position: Tensor
    mask: Tensor | None = None
    return_log_prob: str = NO_LOG_PROB


class _Number(NamedTuple):
    """A number for all rows.

    Args:
        dtype: of its tensor.
        low: the least number.
        high: the largest.
        rule: the numbers, in words.
        off: the numbers, and None, that are as no argument; () where there is none.
    """

    dtype: torch.dtype
    low: float
    high: float
    rule: str
    off: tuple[Any, ...]


_LARGEST, _LEAST_OF_P = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
_NUMBERS = {
    "temperature": _Number(torch.float32, 0, _LARGEST, "a number of at least 0, finite in float32", (1.0, None)),
    "top_k": _Number(torch.int64, 0, 2**63 - 1, "an integer of at least 0, or None", (0, None)),
    "top_p": _Number(torch.float32, _LEAST_OF_P, 1, "a number in (0, 1], or None", (1.0, None)),
    "min_p": _Number(torch.float32, 0, 1, "a number in [0, 1], or None", (0.0, None)),
    "seed": _Number(torch.int64, -(2**63), 2**64 - 1, "a 64-bit integer", ()),
    "position": _Number(torch.int64, 0, 2**63 - 1, "an integer of at least 0", ()),
}
OF_ROWS = tuple(_NUMBERS)
_CONVERTED = {torch.float32: (torch.float64, torch.bfloat16, torch.float16), torch.int64: (torch.int32,)}


def prepare_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with a tensor (...) in place of each number, and with the name of the log probability.

    Raises:
        InvalidInputError: a number is out of its range.
    """
    logits = args[0]
    if not isinstance(logits, (Tensor, TensorSpec)):
        return args  # the op's check reports it; torch.fx records the numbers
    rows = [of_rows("sample", name, value, logits) for name, value in zip(_NUMBERS, args[1:7])]
    log_prob = {False: NO_LOG_PROB, True: "unfiltered"}[args[8]] if type(args[8]) is bool else args[8]
    if log_prob is args[8] and all(new is old for new, old in zip(rows, args[1:7])):
        return args
    return (logits, *rows, args[7], log_prob)


def of_rows(caller: str, name: str, value: Any, logits: Tensor | TensorSpec) -> Any:
    """Return a number as a tensor of one for each row, None where it has no effect; a tensor in the dtype."""
    number = _NUMBERS[name]
    if isinstance(value, (Tensor, TensorSpec)):
        if value.dtype not in _CONVERTED[number.dtype]:
            return value  # the op's check reports a wrong one
        return value.replace(dtype=number.dtype) if isinstance(value, TensorSpec) else value.to(number.dtype)
    if value is None and number.off:
        return None
    return _filled(caller, name, value, logits)


def _filled(caller: str, name: str, value: Any, logits: Tensor | TensorSpec) -> Any:
    """Return a tensor of a number for each row, None where it has no effect."""
    number = _NUMBERS[name]
    symbolic = type(value) in (torch.SymInt, torch.SymFloat)
    kinds = (int, float) if number.dtype.is_floating_point else (int,)
    if not symbolic and (type(value) not in kinds or not number.low <= value <= number.high):
        raise InvalidInputError(
            f"{caller}: got {name} = {shown(value)}, expected {number.rule}, or a tensor of one for each row; to fix: "
            f"pass such a number"
        )
    if not symbolic and value in number.off:
        return None
    shape = tuple(logits.shape[:-1])
    if isinstance(logits, TensorSpec):
        return TensorSpec(shape, number.dtype, logits.device)
    if name == "seed" and not symbolic and value >= 2**63:  # a 64-bit seed may be given as unsigned
        value = value - 2**64
    return logits.new_full(shape, value, dtype=number.dtype)  # for a DTensor, one on its mesh
