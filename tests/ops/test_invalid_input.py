"""Invalid arguments of scaled_masked_softmax: the error by every path."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from ascend import ascend
from softmax_calls import MASK, SCALE, G, X, close, softmax, torch_op
from torch.autograd import forward_ad

from fusedops import InvalidInputError

INVALID: list[tuple[str, Callable[[], Any], str]] = [
    ("x list", lambda: softmax([[1.0]]),  # type: ignore[arg-type]
     "got x of type list, expected a torch.Tensor; to fix: convert it with torch.as_tensor"),
    ("x None", lambda: softmax(None), "got x = None, expected a torch.Tensor; to fix: pass x"),  # type: ignore[arg-type]
    ("x array", lambda: softmax(numpy.ones((2, 2))),  # type: ignore[arg-type]
     "got x of type ndarray, expected a torch.Tensor; to fix: convert it with torch.as_tensor"),
    ("x int", lambda: softmax(torch.ones(2, 2, dtype=torch.int32)),
     "got x of int32, expected float16, bfloat16, float32 or float64; to fix: convert it, as in x.float()"),
    ("x bool", lambda: softmax(torch.ones(2, 2, dtype=torch.bool)),
     "got x of bool, expected float16, bfloat16, float32 or float64; to fix: convert it, as in x.float()"),
    ("x complex", lambda: softmax(torch.ones(2, 2, dtype=torch.complex64)),
     "got x of complex64, expected float16, bfloat16, float32 or float64; to fix: convert it, as in x.float()"),
    ("x float8", lambda: softmax(torch.ones(2, 2).to(torch.float8_e5m2)),
     "got x of float8_e5m2, expected float16, bfloat16, float32 or float64; to fix: convert it, as in x.float()"),
    ("x rank 1", lambda: softmax(torch.ones(2)),
     "got x with 1 dimension, expected at least 2 dimensions; to fix: view x with 2 dimensions, with leading ones of "
     "size 1"),
    ("x rank 0", lambda: softmax(torch.ones(())),
     "got x with 0 dimensions, expected at least 2 dimensions; to fix: view x with 2 dimensions, with leading ones of "
     "size 1"),
    ("mask list", lambda: softmax(X, [True]),  # type: ignore[arg-type]
     "got mask of type list, expected a torch.Tensor or None; to fix: convert it with torch.as_tensor"),
    ("mask bool", lambda: softmax(X, True),  # type: ignore[arg-type]
     "got mask of type bool, expected a torch.Tensor or None; to fix: convert it with torch.as_tensor"),
    ("mask float", lambda: softmax(X, torch.zeros(5, 7)),
     "got mask of float32, expected bool or uint8; to fix: for an additive mask pass mask < 0: True means masked out"),
    ("mask int", lambda: softmax(X, torch.zeros(5, 7, dtype=torch.int64)),
     "got mask of int64, expected bool or uint8; to fix: pass mask != 0: True means masked out"),
    ("mask shape", lambda: softmax(X, torch.zeros(2, 7, dtype=torch.bool)),
     "got mask of shape (2, 7), expected a shape that broadcasts to x (2, 3, 5, 7): each size, from the last, 1 or x's"
     "; to fix: pass mask[:, None, None, :]"),
    ("mask rank", lambda: softmax(X, torch.zeros(1, 2, 3, 5, 7, dtype=torch.bool)),
     "got mask of shape (1, 2, 3, 5, 7), expected a shape that broadcasts to x (2, 3, 5, 7): each size, from the last, "
     "1 or x's; to fix: give mask sizes of 1 where it repeats"),
    ("scale tensor", lambda: softmax(X, None, torch.tensor(0.5)),  # type: ignore[arg-type]
     "got scale = a tensor of 1 element, expected a Python number, finite in float32; to fix: use scale.item()"),
    ("scale text", lambda: softmax(X, None, "0.5"),  # type: ignore[arg-type]
     "got scale = '0.5', expected a Python number, finite in float32; to fix: pass scale as "
     "a Python number, finite in float32"),
    ("scale None", lambda: softmax(X, None, None),  # type: ignore[arg-type]
     "got scale = None, expected a Python number, finite in float32; to fix: pass scale as "
     "a Python number, finite in float32"),
    ("scale complex", lambda: softmax(X, None, 1j),  # type: ignore[arg-type]
     "got scale = 1j, expected a Python number, finite in float32; to fix: pass scale as "
     "a Python number, finite in float32"),
    ("scale inf", lambda: softmax(X, None, float("inf")),
     "got scale = inf, expected a Python number, finite in float32; to fix: pass scale as "
     "a Python number, finite in float32"),
    ("scale nan", lambda: softmax(X, None, float("nan")),
     "got scale = nan, expected a Python number, finite in float32; to fix: pass scale as "
     "a Python number, finite in float32"),
    ("scale of float64", lambda: softmax(X, None, 1e39),
     "got scale = 1e+39, expected a Python number, finite in float32; to fix: pass scale as "
     "a Python number, finite in float32"),
    ("causal 1", lambda: softmax(X, causal=1), "got causal = 1, expected True or False; to fix: pass bool(causal)"),  # type: ignore[arg-type]
    ("causal None", lambda: softmax(X, causal=None),  # type: ignore[arg-type]
     "got causal = None, expected True or False; to fix: pass bool(causal)"),
]  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["", "inside a transform"])
@pytest.mark.parametrize(("wrong", "message"), [case[1:] for case in INVALID], ids=[case[0] for case in INVALID])
def test_invalid_input_states_got_expected_and_the_fix(wrong: Callable[[], Any], message: str, grad: bool) -> None:
    with forward_ad.dual_level() if grad else nullcontext(), pytest.raises(InvalidInputError) as error:
        wrong()
    assert str(error.value) == f"scaled_masked_softmax: {message}"
    assert isinstance(error.value, ValueError)


def test_a_mask_on_another_device_is_invalid() -> None:
    with ascend():
        mask = torch.zeros(5, 7, dtype=torch.bool, device="npu")
        with pytest.raises(InvalidInputError) as error:
            softmax(X, mask)
        assert str(error.value) == (
            "scaled_masked_softmax: got mask on npu:0 and x on cpu, expected one device; to fix: move it with "
            "mask.to(x.device)"
        )
        with pytest.raises(InvalidInputError, match="got mask on cpu and x on npu:0"):
            softmax(X.to("npu"), MASK)
    # torch gives meta and cpu the same index
    for x, mask in ((X, MASK.to("meta")), (X.to("meta"), MASK)):
        for way in (softmax, torch_op):
            with pytest.raises(InvalidInputError, match=f"got mask on {mask.device} and x on {x.device}"):
                way(x, mask)
    assert softmax(X.to("meta"), MASK.to("meta")).is_meta


def test_a_huge_integer_scale_is_invalid_too() -> None:
    with pytest.raises(InvalidInputError, match="got scale = an integer of"):
        softmax(X, None, 10**400)


@pytest.mark.parametrize("wrong", [{"dim": -1}, {"attn_mask": None}, {"fallback": "raise"}])
def test_an_unknown_keyword_is_a_type_error(wrong: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        softmax(X, **wrong)
    with pytest.raises(TypeError):
        softmax(X, None, 1.0, True)  # type: ignore[misc]  # causal is keyword-only


def test_numbers_of_numpy_and_bool_are_numbers() -> None:
    close(softmax(X, None, numpy.float64(0.5)), softmax(X, None, 0.5))
    close(softmax(X, None, 2), softmax(X, None, 2.0))


def test_nothing_is_warned_of_on_the_way() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = X.clone().requires_grad_()
        softmax(x, MASK, SCALE).backward(G)
