"""The kernel that runs: after a policy changes, for backward, when a kernel raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from softmax_calls import (
    MASK,
    X,
    backend_that_counts,
    counting_compilations,
    softmax,
    torch_op,
)

import fusedops
from fusedops import FusedOpsError, InvalidInputError, NoBackendError
from fusedops.constraints import Dim


@pytest.mark.parametrize("way", [softmax, torch_op], ids=["fusedops", "torch.ops"])
def test_a_kernels_own_error_reaches_the_user_and_nothing_else_is_tried(way: Any, fakes: Any) -> None:
    class Broken(Exception):
        pass

    def break_down(*args: Any, **kwargs: Any) -> Any:
        raise Broken("half way")

    fakes("second")
    fakes("first", run=break_down, priority=90)
    for x in (X, X.clone().requires_grad_()):
        with pytest.raises(Broken, match=r"^half way$") as error:
            way(x)
        assert not isinstance(error.value, FusedOpsError)
        assert fakes.ran == ["first"]
        fakes.ran.clear()


def test_the_argument_of_a_compiled_call_is_obeyed(fakes: Any) -> None:
    fakes("a", priority=-5)
    with counting_compilations() as graphs:
        compiled = torch.compile(lambda x: softmax(x, backend="a"), fullgraph=True, backend=backend_that_counts(graphs))
        compiled(X.clone().requires_grad_()).sum().backward()
        assert len(graphs) == 1
    assert fakes.ran == ["a", "a backward"]


def test_through_torch_ops_the_argument_lasts_until_backward(fakes: Any) -> None:
    # a policy of use() is looked up when backward runs: the registered op has no place to keep it
    fakes("a", priority=-5)
    y = torch_op(X.clone().requires_grad_(), backend="a")
    y.sum().backward()
    assert fakes.ran == ["a", "a backward"]


def test_no_kernel_sees_a_call_that_is_invalid(fakes: Any) -> None:
    fakes("a")
    for way in (softmax, torch_op):
        with pytest.raises(InvalidInputError):
            way(X, MASK[..., :3])
    assert fakes.ran == []


def test_refused_by_all_is_an_error_by_every_way(fakes: Any) -> None:
    fakes("a", Dim("x", (-1,), at_most=1))
    with fusedops.use("a", fallback="raise"):
        for way in (softmax, torch_op):
            for x in (X, X.clone().requires_grad_()):
                with pytest.raises(NoBackendError, match="got dim -1 of x = 7, expected a size of at most 1"):
                    way(x)
