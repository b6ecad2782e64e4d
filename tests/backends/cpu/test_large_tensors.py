"""Tensors of more than 32 MiB, whose results are stored past the caches: the same bits as those of a few rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import pytest
import torch
from cpu_values import rounded
from torch import Tensor

import fusedops

pytestmark = pytest.mark.usefixtures("on_cpu")

LEAST = 2**25 + 1  # bytes
ROWS = 40


class Large(NamedTuple):
    """A call on rows.

    Attributes:
        call: returns the outputs for some rows of its tensors.
        columns: the length of a row of each tensor.
    """

    call: Callable[..., Tensor | tuple[Tensor, ...]]
    columns: tuple[int, ...]


def _losses(logits: Tensor) -> Tensor:
    target = torch.arange(len(logits)).flip(0)
    target = torch.where(target % 4 == 2, -100, target % logits.shape[-1])
    return fusedops.cross_entropy(logits, target, reduction="none", label_smoothing=0.1)


def _rotated(dim: int) -> Callable[..., Tensor]:
    def call(q: Tensor, angles: Tensor) -> Tensor:
        heads = q[None] if dim == -2 else q[None, :, None]
        return fusedops.rotary_embedding(heads, None, angles, angles.flip(-1), seq_dim=dim)[0].view(q.shape)

    return call


def _norms(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    return *fusedops.add_rms_norm(x, residual), fusedops.layer_norm(x)


CALLS = {
    **{f"norms of {n}": Large(_norms, (n, n)) for n in (4096, 96, 65)},
    **{f"swiglu of {n}": Large(fusedops.swiglu, (2 * n,)) for n in (4096, 4100, 33)},
    **{f"swiglu of {n} pairs": Large(partial(fusedops.swiglu, interleaved=True), (2 * n,)) for n in (4096, 4100, 33)},
    **{f"cross_entropy of {n}": Large(_losses, (n,)) for n in (32000, 4100, 33)},
    **{f"rotary of {n} pairs, {dim}": Large(_rotated(dim), (64, n)) for n in (32, 31) for dim in (-2, -3)},
}


def _run(large: Large, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs, and the gradients of the tensors of the size of the first."""
    leaves = [tensor.detach().requires_grad_(tensor.shape == tensors[0].shape) for tensor in tensors]
    outputs = large.call(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    values = [y.detach() for y in outputs]
    return [*values, *torch.autograd.grad(outputs, [leaf for leaf in leaves if leaf.requires_grad], values)]


# each kernel has both dtypes between its calls, and 16-bit numbers the odd sizes
@pytest.mark.parametrize(
    ("name", "dtype"), list(zip(CALLS, itertools.cycle((torch.float32, torch.bfloat16, torch.bfloat16)))), ids=str
)
def test_the_bits_are_those_of_a_few_rows(name: str, dtype: torch.dtype) -> None:
    large = CALLS[name]
    rows = LEAST // dtype.itemsize // (large.columns[0] // (2 if "swiglu" in name else 1)) + ROWS
    tensors = [rounded((rows, n), dtype, seed) for seed, n in enumerate(large.columns)]
    for whole, few in zip(_run(large, tensors), _run(large, [tensor[-ROWS:] for tensor in tensors]), strict=True):
        assert torch.equal(whole[-ROWS:], few)
