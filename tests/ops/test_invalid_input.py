"""Invalid arguments of scaled_masked_softmax by every path; test_argument_texts.py has the texts of the others."""

from __future__ import annotations

import warnings
from typing import Any

import numpy
import pytest
import torch
from ascend import ascend
from softmax_calls import MASK, SCALE, G, X, close, softmax, torch_op

from fusedops import InvalidInputError


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
