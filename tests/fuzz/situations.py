"""Situations that a call gets into: freed, swapped and held tensors, meta tensors, another thread, filled memory."""

from __future__ import annotations

import contextvars
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops import InvalidInputError, NoBackendError, Op
from fusedops.dtypes import CODES
from fusedops.testing._new_memory import filled_memory
from tests.fuzz.effects import Wrong

Outputs = tuple[Tensor, ...]
Make = Callable[[Mapping[str, Any]], Outputs]


def check_situation(name: str, op: Op, args: Mapping[str, Any], make: Make, outputs: Outputs, seed: int) -> None:
    """Make a call that is right again, in a situation.

    Args:
        name: "freed", "swapped", "held", "meta", "thread" or "filled".
        op: the op.
        args: the arguments of the call by parameter.
        make: makes the call with such arguments, and returns its outputs.
        outputs: what it returned.
        seed: of the choice of a tensor.

    Raises:
        Wrong: it differs from the call, or is served where it must be refused.
    """
    dice = random.Random(seed)
    tensors = {key: value for key, value in args.items() if isinstance(value, Tensor) and value.numel()}
    if tensors:
        _CHECKS[name](op, args, make, outputs, dice.choice(sorted(tensors)))


def _freed(op: Op, args: Mapping[str, Any], make: Make, outputs: Outputs, chosen: str) -> None:
    freed = args[chosen].detach().clone(memory_format=torch.preserve_format)
    try:
        freed.untyped_storage().resize_(0)
    except NotImplementedError:  # the stand-in of a device
        return
    _refused(f"{chosen} whose storage was freed", lambda: make({**args, chosen: freed}))


def _swapped(op: Op, args: Mapping[str, Any], make: Make, outputs: Outputs, chosen: str) -> None:
    given = {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in args.items()}
    leaves = [given[key].requires_grad_() for key, value in args.items() if _wanted(value)]
    tensor = given[chosen]
    kept = {*op.backward_call.kept_tensors} & {*op.parameters}
    results = [y for y in make(given) if y.requires_grad]
    if not results or chosen not in kept or tensor.numel() < 2:
        return
    saved = [each for y in results for each in getattr(y.grad_fn, "saved_tensors", ())]
    if not any(each is tensor for each in saved):  # but a view of it, which keeps the memory and the sizes
        return
    del saved
    tensor.data = tensor.data.flatten()[:1].clone()
    grads = [torch.ones_like(y) for y in results]
    _refused(
        f"{chosen} of other sizes in backward", lambda: torch.autograd.grad(results, leaves, grads, allow_unused=True)
    )


def _held(op: Op, args: Mapping[str, Any], make: Make, outputs: Outputs, chosen: str) -> None:
    results = [y for y in make(args) if y.requires_grad]
    if not results:
        return
    held = [value for value in getattr(results[0].grad_fn, "saved_tensors", ()) if isinstance(value, Tensor)]
    before = [value.clone() for value in held]
    _gradients(args, tuple(results))
    for value, copy in zip(held, before):
        if not torch.equal(value.nan_to_num(), copy.nan_to_num()):
            raise Wrong(f"got a saved tensor of shape {tuple(value.shape)} changed by backward while it is held")


def _meta(op: Op, args: Mapping[str, Any], make: Make, outputs: Outputs, chosen: str) -> None:
    on_meta = {key: value.detach().to("meta") if isinstance(value, Tensor) else value for key, value in args.items()}
    try:
        results = make(on_meta)
    except NoBackendError:  # the policy allows no backend that serves meta tensors
        return
    for name, y, like in zip(op.outputs, results, outputs):
        got, expected = (_form(each, name in (*op.permuted, *op.outputs[: len(op.written)])) for each in (y, like))
        if got != expected:
            raise Wrong(f"got {name} of meta tensors as {got}, expected {expected}")


def _form(y: Tensor, permuted: bool) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
    """Return dtype, shape and strides.

    No strides of a dim of one element, of a tensor without elements, or of a result whose order the kernel chooses.
    """
    if permuted or not y.numel():
        return y.dtype, tuple(y.shape), ()
    return y.dtype, tuple(y.shape), tuple(stride if size != 1 else 0 for size, stride in zip(y.shape, y.stride()))


def _thread(op: Op, args: Mapping[str, Any], make: Make, outputs: Outputs, chosen: str) -> None:
    results: list[Any] = []
    threads = torch.get_num_threads()  # a new thread has torch's default, by which a matmul's bits differ

    inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def run() -> None:
        torch.set_num_threads(threads)
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients):  # of each thread its own
                results.append(make(args))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,))  # with the policy of the block
    thread.start()
    thread.join()
    if isinstance(results[0], BaseException):
        raise Wrong(f"got {results[0]!r} in another thread, expected a result") from results[0]
    for name, y, like in zip(op.outputs, results[0], outputs):
        if not torch.equal(_bits(y), _bits(like)):
            raise Wrong(f"got other bits of {name} in another thread")


def _filled(op: Op, args: Mapping[str, Any], make: Make, outputs: Outputs, chosen: str) -> None:
    plain = [*outputs, *_gradients(args, make(args))]
    with filled_memory():
        results = make(args)
        found = [*results, *_gradients(args, results)]
    for at, pair in enumerate(zip(found, plain)):
        value, like = (each.float() if each.dtype in CODES else each for each in pair)
        name = op.outputs[at] if at < len(outputs) else "a gradient"
        # deterministic algorithms, which torch has then, may have other bits
        same = value.isfinite() == like.isfinite() if value.is_floating_point() else value == like
        if not same.all():
            raise Wrong(f"got other elements of {name} where new memory is filled: one was not written, or read before")


def _gradients(args: Mapping[str, Any], results: Outputs) -> list[Tensor]:
    leaves = list({id(value): value for value in args.values() if _wanted(value)}.values())
    wanted = [y for y in results if y.requires_grad]
    ones = [torch.ones_like(y) for y in wanted]
    found = torch.autograd.grad(wanted, leaves, ones, allow_unused=True) if wanted else ()
    return [each for each in found if each is not None]


def _bits(value: Tensor) -> Tensor:
    return value.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _wanted(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _refused(what: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except InvalidInputError:
        return
    except Exception as error:
        raise Wrong(f"got {type(error).__name__} ({error}) for {what}, expected InvalidInputError") from error
    raise Wrong(f"got a result for {what}, expected InvalidInputError")


_CHECKS: Mapping[str, Callable[[Op, Mapping[str, Any], Make, Outputs, str], None]] = {
    "freed": _freed,
    "swapped": _swapped,
    "held": _held,
    "meta": _meta,
    "thread": _thread,
    "filled": _filled,
}
SITUATIONS: Sequence[str] = tuple(_CHECKS)
