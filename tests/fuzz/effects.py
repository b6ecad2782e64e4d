"""What a call must leave alone, and the form of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops._verify.result_form import is_dense


class Wrong(AssertionError):
    """A call did what the contract excludes."""


def called(op: Any, args: Mapping[str, Any], policy: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the outputs of a call; of an op that writes arguments, copies of these that are written."""
    if op.written:
        return op.call_public(*op.bind((), args), backend=policy.get("backend"))
    return op.as_tuple(op.function(**args, **policy))


def contents(args: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the bytes of the whole storage of each tensor, with what lies between its elements."""
    found: dict[str, Tensor] = {}
    for name, tensor in args.items():
        if isinstance(tensor, Tensor):
            size = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
            whole = tensor.detach().as_strided((size,), (1,), 0)
            found[name] = _bytes(whole)
    return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def assert_unchanged(args: Mapping[str, Any], before: Mapping[str, Tensor]) -> None:
    after = contents(args)
    written = [name for name, content in after.items() if not torch.equal(content, before[name])]
    if written:
        raise Wrong(f"got {' and '.join(written)} written by the call, expected every input unchanged")


def assert_layout(op: Any, outputs: Sequence[Tensor], args: Sequence[Any]) -> None:
    with torch.no_grad():
        likes = op.as_tuple(op.empty(*args))
    for y, like, label in zip(outputs, likes, op.outputs):
        if op.written:  # a copy of an argument, which has that one's layout
            continue
        assert_same_form(y, like, f"output {label}")
        if not (is_dense(y) if label in op.permuted else y.is_contiguous()):
            raise Wrong(f"got output {label} with strides {y.stride()}, expected a contiguous one")


def assert_same_form(got: Tensor, like: Tensor, what: str) -> None:
    for attribute in ("shape", "dtype", "device"):
        mine, needed = getattr(got, attribute), getattr(like, attribute)
        if mine != needed:
            raise Wrong(f"got {what} with {attribute} {mine}, expected {needed}")


def assert_no_alias(results: Sequence[Tensor], args: Mapping[str, Any], what: str) -> None:
    for result in results:
        for name, tensor in args.items():
            if (
                isinstance(tensor, Tensor)
                and result.numel()
                and tensor.numel()
                and _address(result) == _address(tensor)
            ):
                raise Wrong(f"got an {what} that shares memory with {name}, expected memory of its own")


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def assert_same_bits(first: Any, second: Any) -> None:
    for what, one, other in [
        *(("output", a, b) for a, b in zip(first[0], second[0])),
        *((f"gradient of {name}", first[1][name], second[1][name]) for name in first[1]),
    ]:
        a, b = (_bytes(each) for each in (one, other))
        if not torch.equal(a, b):
            raise Wrong(f"got another {what} from the same call a second time, expected the same bits")
