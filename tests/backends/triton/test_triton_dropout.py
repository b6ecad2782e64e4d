"""The dropout kernels of the triton backend, run by Triton's interpreter on a CPU, against float64."""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, set before triton is imported", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
from triton_bias_cases import DTYPES, NEEDS, check_dropout, seed_of

from fusedops import philox as _philox
from fusedops.ops.dropout import bias_dropout_add
from fusedops_triton._bias_dropout import dropout_backward, dropout_forward


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0, 0.1, 0.5, 0.9, 1, 1.0])
def test_dropout(p: float, dtype: torch.dtype) -> None:
    x, bias, residual = (torch.randn(shape).to(dtype) for shape in ((7, 36), (36,), (7, 36)))
    check_dropout(x, bias, None, p)
    y = check_dropout(x, bias, residual, p)
    assert p < 1 or torch.equal(y, residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_evaluation_drops_nothing(dtype: torch.dtype) -> None:
    x, bias, residual = (torch.randn(shape).to(dtype) for shape in ((7, 37), (37,), (7, 37)))
    for p, training in ((0.0, True), (0.3, False), (1.0, False)):
        check_dropout(x, bias, None, p, training, None)
        check_dropout(x, bias, residual, p, training, None)
        check_dropout(x, None, residual, p, training, 7)  # a seed, of no use


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 7), (3, 1001), (2, 2056)])
def test_dropout_row_lengths(rows: int, size: int) -> None:
    x, bias, residual = torch.randn(rows, size), torch.randn(size), torch.randn(rows, size)
    check_dropout(x, bias, None)
    check_dropout(x.to(torch.bfloat16), bias.to(torch.bfloat16), residual.to(torch.bfloat16))


@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize("bias_shape", [None, (8,), (6,), (6, 8), (8, 1)], ids=str)
def test_dropout_computes_what_is_needed(bias_shape: tuple[int, ...] | None, needs: tuple[bool, bool]) -> None:
    bias = None if bias_shape is None else torch.randn(bias_shape)
    x = torch.randn(*((8, 6) if bias_shape in ((6,), (8, 1)) else (6, 8)))
    check_dropout(x, bias, None, all_needs=(needs,))


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES[1:], repeat=3)), ids=str)
def test_dropout_of_mixed_dtypes(dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]) -> None:
    x, bias, residual = (torch.randn(s).to(d) for s, d in zip(((3, 8), (8,), (3, 8)), dtypes, strict=True))
    check_dropout(x, bias, residual)


def test_x_is_taken_in_the_dtype_of_the_residual() -> None:
    # float16 holds no 70000: x becomes infinity there, and it would not if it were only narrowed at the end
    x, residual = torch.tensor([70000.0, 1.0]), torch.tensor([-60000.0, 1.0], dtype=torch.float16)
    with pytest.warns(RuntimeWarning, match="overflow"):
        y = dropout_forward(x, None, residual, 0.0, True, None)
    assert torch.equal(y, bias_dropout_add.OP.reference(x, None, residual, 0.0, True, None))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nothing_leaks_from_dropped_elements() -> None:
    keep = _philox.keep_mask(seed_of(7), 0.5, (40,))
    for poison in (math.nan, math.inf):
        x = torch.ones(40).masked_fill(~keep, poison)
        assert torch.equal(dropout_forward(x, None, torch.ones(40), 0.5, True, seed_of(7)), 1 + 2 * keep.float())
        everything = torch.full((40,), poison)
        assert torch.equal(dropout_forward(everything, None, torch.ones(40), 1.0, True, seed_of(7)), torch.ones(40))
        dx, _ = dropout_backward(x, seed_of(7), None, 0.5, True, torch.float32, (True, False))
        assert torch.equal(dx, 2 * keep.float())


def test_a_seed_anywhere_in_memory() -> None:
    seeds, x = torch.tensor([1, 2, 3]), torch.randn(40)
    for seed in (seeds[1], seeds[1:2], seeds[1].view(1, 1, 1)):
        y = dropout_forward(x, None, None, 0.5, True, seed)
        assert torch.equal(y, dropout_forward(x, None, None, 0.5, True, seed_of(2)))
