"""verify finds each of some 200 planted errors: numbers, form and memory, in every op, forward and backward.

The calls hold one huge number, in a row of its own, that must hide none of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from calls import reference_kernels
from torch import Tensor

import fusedops
from fusedops import MismatchError, testing
from fusedops.testing import OPS

Results = tuple[Any, ...]
Change = Callable[[Results, tuple[Any, ...], dict[str, Any]], Any]  # results, arguments, what is kept between calls


def call(op: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Return the arguments of a call with one huge number, in the first row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 8, generator=generator).to(dtype)
    x[0, 0] = torch.finfo(dtype).min if op == "scaled_masked_softmax" else 3000.0
    bias, residual = (torch.randn(rows, 8, generator=generator).to(dtype) for rows in (1, 6))
    number = torch.tensor([7])
    return {
        "scaled_masked_softmax": (x, None, 0.5, False),
        "bias_gelu": (x, bias, "tanh"),
        "bias_dropout": (x, bias, 0.2, True, number),
        "bias_dropout_add": (x, bias, residual, 0.2, True, number),
    }[op]


def gradient(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    grad = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed + 100)).to(dtype)
    grad[0, 1] = 3000.0
    return grad


def run(op: str, direction: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Run forward, and backward where it is to be tested, by the planted kernels, and return what they return."""
    contract = OPS[op]
    args = call(op, seed, dtype)
    if direction == "forward":
        return [contract.call_public(*args, backend="planted")]
    names = [name for name in contract.differentiable if args[contract.parameters.index(name)] is not None]
    grown = [arg.clone().requires_grad_() if name in names else arg for name, arg in zip(contract.parameters, args)]
    wanted = [grown[contract.parameters.index(name)] for name in names]
    y = contract.call_public(*grown, backend="planted")
    return list(torch.autograd.grad(y, wanted, gradient(seed, dtype)))


def plant(op: str, direction: str, change: Change) -> None:
    """Register a backend whose kernels are the references; the results of one of them are changed."""
    kept: dict[str, Any] = {}
    kernels = []
    for kernel in reference_kernels(op, "planted", []):

        @functools.wraps(kernel.function)
        def planted(*args: Any, function: Any = kernel.function) -> Any:
            results = function(*args)
            if isinstance(results, tuple):
                return change(results, args, kept)
            changed = change((results,), args, kept)
            return changed[0] if isinstance(changed, tuple) and len(changed) == 1 else changed

        planted.__signature__ = inspect.signature(kernel.function)  # type: ignore[attr-defined]
        kernels.append(replace(kernel, function=planted) if kernel.direction == direction else kernel)
    fusedops.register(fusedops.Backend("planted", ("cpu",), 50, tuple(kernels)))


def largest(result: Tensor) -> tuple[int, ...]:
    """Return the place of the largest element of the last row."""
    flat = result.double().abs()
    column = int(flat.reshape(-1, flat.shape[-1])[-1].argmax())
    return (*(size - 1 for size in result.shape[:-1]), column)


def first(change: Callable[[Tensor], Any]) -> Change:
    """Return the change of the first result alone."""
    return lambda results, args, kept: (change(results[0]), *results[1:])


def last(change: Callable[[Tensor], Any]) -> Change:
    """Return the change of the last result alone, the gradient of the bias where there is one."""
    return lambda results, args, kept: (*results[:-1], change(results[-1]))


def at_largest(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def changed(result: Tensor) -> Tensor:
        result = result.clone()
        result[largest(result)] = change(result[largest(result)])
        return result

    return changed


def in_last_row(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def changed(result: Tensor) -> Tensor:
        result = result.clone()
        result[-1] = change(result[-1])
        return result

    return changed


def in_the_memory_of_the_input(results: Results, args: tuple[Any, ...], kept: dict[str, Any]) -> Any:
    return (args[0][:], *results[1:])


def with_a_written_input(results: Results, args: tuple[Any, ...], kept: dict[str, Any]) -> Any:
    args[0].detach()[1, 2] += 1
    return results


def with_an_input_written_unseen_by_torch(results: Results, args: tuple[Any, ...], kept: dict[str, Any]) -> Any:
    args[0].detach().numpy()[1, 2] += 1
    return results


def with_the_same_input_written_again(results: Results, args: tuple[Any, ...], kept: dict[str, Any]) -> Any:
    args[0].detach().mul_(1)  # autograd refuses what was saved of it, though no number changes
    return results


def in_a_buffer(results: Results, args: tuple[Any, ...], kept: dict[str, Any]) -> Any:
    buffer = kept.setdefault("buffer", torch.empty_like(results[0]))
    return (buffer.copy_(results[0])[:], *results[1:])


def in_memory_that_torch_does_not_own(results: Results, args: tuple[Any, ...], kept: dict[str, Any]) -> Any:
    buffer = kept.setdefault("buffer", results[0].clone().numpy())
    buffer[...] = results[0].numpy()
    return (torch.from_numpy(buffer), *results[1:])


def of_the_call_before(results: Results, args: tuple[Any, ...], kept: dict[str, Any]) -> Any:
    before, kept["before"] = kept.get("before", results[0]), results[0].clone()
    return (before, *results[1:])


NUMBERS: dict[str, Change] = {
    "one element is 0": first(at_largest(torch.zeros_like)),
    "one element has the other sign": first(at_largest(torch.neg)),
    "one element is 1 % off": first(at_largest(lambda value: value * 1.01)),
    "one element is NaN": first(at_largest(lambda value: float("nan"))),
    "one element is inf": first(at_largest(lambda value: float("inf"))),
    "one row is 0": first(in_last_row(torch.zeros_like)),
    "one row is 1 % off": first(in_last_row(lambda row: row * 1.01)),
    "one row is shifted": first(in_last_row(lambda row: row.roll(1))),
    "one row is another": first(lambda result: torch.cat([result[:-1], result[-2:-1]])),
    "all is 0 but the row of the huge number": first(lambda result: torch.cat([result[:1], 0 * result[1:]])),
    "one element of the last result is 1 % off": last(at_largest(lambda value: value * 1.01)),
}
FORM: dict[str, tuple[Change, str]] = {
    "a wider dtype": (first(lambda result: result.double()), "of dtype float64, expected float32"),
    "a narrower dtype": (last(lambda result: result.bfloat16()), "of dtype bfloat16, expected float32"),
    "gaps": (first(lambda result: torch.stack([result, result], -1)[..., 0]), "with strides (16, 2), expected"),
    "a row less": (first(lambda result: result[:-1]), "of shape (5, 8), expected (6, 8)"),
    "a dimension more": (first(lambda result: result[None]), "of shape (1, 6, 8), expected (6, 8)"),
    "no memory": (first(lambda result: result.to("meta")), "on meta, expected cpu"),
    "nothing": (first(lambda result: None), "as None, expected a Tensor"),
    "a list": (lambda results, args, kept: list(results), "as a list, expected"),
    "one result more": (lambda results, args, kept: (*results, results[0]), "as a tuple of"),
    "the memory of an input": (in_the_memory_of_the_input, "in the memory of the input"),
    "a written input": (with_a_written_input, "written, expected it unchanged"),
    "an input written by numpy": (with_an_input_written_unseen_by_torch, "written, expected it unchanged"),
    "an input written with its own numbers": (with_the_same_input_written_again, "written, expected it unchanged"),
    "a buffer": (in_a_buffer, "in the memory of the "),
    "a buffer of another library": (in_memory_that_torch_does_not_own, "in the memory of the "),
}
every_op = pytest.mark.parametrize("op", ["scaled_masked_softmax", "bias_gelu", "bias_dropout", "bias_dropout_add"])
every_direction = pytest.mark.parametrize("direction", ["forward", "backward"])


@every_direction
@every_op
def test_the_kernels_without_an_error_agree(op: str, direction: str) -> None:
    plant(op, direction, lambda results, args, kept: results)
    for against in ("reference", "eager"):
        with fusedops.verify(against) as report:
            kept_alive = [run(op, direction, seed) for seed in range(3)]
        assert report.mismatches == 0
        assert not report.skipped
        assert {row.count for row in report.rows} == {len(kept_alive)}


@pytest.mark.parametrize("name", NUMBERS)
@every_direction
@every_op
def test_wrong_numbers_are_found(op: str, direction: str, name: str) -> None:
    plant(op, direction, NUMBERS[name])
    for against in ("reference", "eager"):
        with fusedops.verify(against), pytest.raises(MismatchError) as error:
            run(op, direction)
        assert error.value.mismatch.direction == direction
        assert not error.value.mismatch.of_form


@pytest.mark.parametrize("name", FORM)
@every_direction
@every_op
def test_another_form_is_found(op: str, direction: str, name: str) -> None:
    change, text = FORM[name]
    plant(op, direction, change)
    alive = []
    with fusedops.verify("reference"), pytest.raises(MismatchError) as error:  # noqa: PT012
        alive.append(run(op, direction))  # a buffer is right until it is used again
        alive.append(run(op, direction, seed=1))
    assert text in error.value.mismatch.difference
    assert error.value.mismatch.of_form
    assert len(alive) == (name.startswith("a buffer"))


@every_op
def test_an_output_with_its_columns_first_is_found(op: str) -> None:
    plant(op, "forward", first(lambda result: result.mT.contiguous().mT))
    with fusedops.verify("reference"), pytest.raises(MismatchError) as error:
        run(op, "forward")
    assert "with strides (1, 6), expected (8, 1), as it is contiguous" in error.value.mismatch.difference


@every_op
def test_a_gradient_may_have_its_columns_first(op: str) -> None:
    plant(op, "backward", first(lambda result: result.mT.contiguous().mT))
    with fusedops.verify("reference") as report:
        run(op, "backward")
    assert report.rows
    assert report.mismatches == 0


@every_direction
@every_op
def test_the_result_of_the_call_before_is_found(op: str, direction: str) -> None:
    plant(op, direction, of_the_call_before)
    with fusedops.verify("reference"):
        run(op, direction)
        with pytest.raises(MismatchError):
            run(op, direction, seed=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@every_direction
@every_op
def test_an_element_just_beyond_its_limit_is_found_and_one_within_is_not(
    op: str, direction: str, dtype: torch.dtype
) -> None:
    contract, args = OPS[op], call(op, dtype=dtype)
    want = testing.expected(contract, args, grad=gradient(dtype=dtype))
    wanted, name = (want.y, "output y") if direction == "forward" else (want.gradients["x"], "gradient of x")
    place, limit = largest(wanted), want.limits[name]
    far = float(limit[place] + torch.finfo(dtype).eps * wanted[place].abs())  # and the rounding of what is planted

    def change(by: float) -> Change:
        return first(at_largest(lambda value: (wanted[place] + by).to(dtype)))

    factor = {"value": 0.0}
    plant(op, direction, lambda results, args, kept: change(factor["value"])(results, args, kept))
    with fusedops.verify("reference"):
        factor["value"] = 0.4 * float(limit[place])
        run(op, direction, dtype=dtype)
        for sign in (1, -1):
            factor["value"] = sign * 1.1 * far
            with pytest.raises(MismatchError):
                run(op, direction, dtype=dtype)
