"""The seed of the dropout ops: a number as a tensor, and one that is drawn."""

from sys import modules
from typing import Any, cast

import torch
from torch import Tensor

from fusedops._contract.constraint import shown
from fusedops._contract.tensor_spec import TensorSpec
from fusedops.errors import InvalidInputError


def seed_tensor(name: str, seed: int | Tensor | None, x: Tensor) -> Tensor | None:
    """Return a seed given as a number as an int64 tensor of one element on the device of ``x``.

    Raises:
        InvalidInputError: the number has more than 64 bits, or the seed is of another type.
    """
    if seed is None or isinstance(seed, (Tensor, TensorSpec)):
        return seed
    if type(seed) is not int and hasattr(seed, "tracer"):  # a value of torch.fx.symbolic_trace
        return cast("Any", seed)
    if type(seed) is not int or not -(2**63) <= seed < 2**64:
        raise InvalidInputError(
            f"{name}: got seed = {shown(seed)}, expected None, a 64-bit integer, or an int64 tensor of one element; to "
            f"fix: pass None to have one drawn"
        )
    if not isinstance(x, (Tensor, TensorSpec)):  # pyright: ignore[reportUnnecessaryIsInstance]
        return seed  # type: ignore[return-value]  # the op's check reports x; torch.fx records the number
    if isinstance(x, TensorSpec):
        return TensorSpec((1,), torch.int64, x.device)  # type: ignore[return-value]
    # a 64-bit seed may be given as unsigned. Not torch.tensor(...), of which torch.jit.trace warns
    return torch.full((1,), seed - 2**64 if seed >= 2**63 else seed, device=x.device, dtype=torch.int64)


def prepare_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a dropout's arguments, which end with p, training and seed, with the seed as a tensor: drawn where needed.

    The seed comes from torch's generator of the device, so that manual_seed, fork_rng and CUDA graphs apply to it.
    """
    *others, p, training, seed = args
    x = args[0]
    if isinstance(seed, int):
        return (*others, p, training, seed_tensor("seed", seed, x))
    if not training or p == 0 or seed is not None:
        return args
    if isinstance(x, TensorSpec):
        return (*others, p, training, TensorSpec((1,), torch.int64, x.device))
    drawn = torch.randint(2**63 - 1, (1,), device=x.device, dtype=torch.int64)
    if type(x) is not Tensor and "torch.distributed.tensor" in modules:
        from fusedops._dispatch.distributed.dtensor import shared_draw

        drawn = shared_draw(drawn, x)
    return (*others, p, training, drawn)
