"""One call, run and compared: with float64, with the contract's promises, and with itself."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fusedops
from fusedops import InvalidInputError, NoBackendError
from fusedops._contract.signature import with_floats
from fusedops.dtypes import CODES
from fusedops.errors import FusedOpsWarning
from fusedops.testing import OPS
from tests.fuzz.call import LAYOUTS, Made
from tests.fuzz.compare import Answer, compare
from tests.fuzz.effects import (
    Wrong,
    assert_layout,
    assert_no_alias,
    assert_same_bits,
    assert_same_form,
    assert_unchanged,
    called,
    contents,
)
from tests.fuzz.situations import check_situation


@dataclass(frozen=True)
class Outcome:
    """The end of a call that is right.

    Attributes:
        forward: the backend that served it; "invalid" or "refused" where none did.
        backward: the backend that served its gradient, or "".
        undetermined: elements that depend on rounding, and were not compared.
        excused: the results that differ and that a deviation of the backend excuses.
    """

    forward: str
    backward: str = ""
    undetermined: int = 0
    excused: tuple[str, ...] = ()


def check(
    name: str,
    args: Mapping[str, Any],
    backend: str,
    *,
    grads: tuple[str, int] = ("contiguous", 0),
    mode: str = "grad",
    channel: str = "argument",
    fallback: Any = "silent",
    adapt: Any = "none",
    situation: str = "",
) -> Outcome:
    """Make a call twice, with its gradients, and compare it.

    Args:
        name: the op.
        args: every argument by parameter. The gradients of tensors with requires_grad are wanted.
        backend: the policy.
        grads: the layout of the outputs' gradients, and the seed of their numbers.
        mode: "grad", "no_grad" or "inference".
        channel: how the policy is given: "argument", "use" or "set_policy".
        fallback: the fallback level.
        adapt: the adapt setting.
        situation: what the call gets into after it was compared, of ``SITUATIONS``; empty for nothing.

    Raises:
        Wrong: a result, an error or a side effect is not as the contract has it.
    """
    op = OPS[name]
    given = dict(args)
    kernel_policy = {"backend": backend} if channel == "argument" else {}
    with (
        policy_block(backend, channel, fallback, adapt),
        mode_block(mode),
        warnings.catch_warnings(record=True) as given_warnings,
    ):
        warnings.simplefilter("always")
        outcome = _expected_error(op, given, kernel_policy)
        before = contents(given)
        if isinstance(outcome, type):
            _raises(op, given, kernel_policy, outcome)
            assert_unchanged(given, before)
            return Outcome("invalid" if outcome is InvalidInputError else "refused")
        torch.manual_seed(3)
        complete = with_floats(op.prepared(op.bind((), given)), op.float_indices)
        drawn = torch.get_rng_state()
        results: list[tuple[tuple[Tensor, ...], dict[str, Tensor]]] = []
        for _ in range(2):
            torch.manual_seed(3)
            counts = _counts()
            outputs = called(op, given, kernel_policy)
            if any(y is None for y in outputs):  # an output that the call does not have is empty in kernels
                outputs = tuple(like if y is None else y for y, like in zip(outputs, op.as_tuple(op.empty(*complete))))
            if not torch.equal(torch.get_rng_state(), drawn):
                raise Wrong("got another state of torch's generator after the call than the contract gives")
            assert_layout(op, outputs, complete)
            assert_no_alias(outputs, given, "output")
            gradients, incoming = gradients_of(op.outputs, outputs, given, grads) if mode == "grad" else ({}, ())
            _served(_counts() - counts, name, outcome, bool(gradients))
            assert_unchanged(given, before)
            results.append((outputs, gradients))
        assert_same_bits(*results)
        if situation:

            def make(changed: Mapping[str, Any]) -> tuple[Tensor, ...]:
                torch.manual_seed(3)
                ys = called(op, changed, kernel_policy or {"backend": backend})
                return tuple(like if y is None else y for y, like in zip(ys, results[0][0]))

            check_situation(situation, op, given, make, results[0][0], grads[1])
    outputs, gradients = results[0]
    undetermined, excused = compare(Answer(op, complete, incoming, outputs), gradients, outcome)
    # numpy's RuntimeWarning: Triton's interpreter computes with it
    fine = (FusedOpsWarning, RuntimeWarning)
    others = [str(w.message) for w in given_warnings if not issubclass(w.category, fine)]
    if others:
        raise Wrong(f"got a warning: {others[0]}")
    return Outcome(outcome.backend or "", (outcome.backward or "") if gradients else "", undetermined, excused)


@contextlib.contextmanager
def policy_block(backend: str, channel: str, fallback: Any, adapt: Any) -> Iterator[None]:
    if channel == "set_policy":
        fusedops.set_policy(backend, fallback=fallback, adapt=adapt)
        try:
            yield
        finally:
            fusedops.set_policy(None)
    else:
        with fusedops.use(backend if channel == "use" else None, fallback=fallback, adapt=adapt):
            yield


def mode_block(mode: str) -> contextlib.AbstractContextManager[Any]:
    return {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]()


def _expected_error(op: Any, args: Mapping[str, Any], policy: Mapping[str, Any]) -> Any:
    """Return the decision for the call, or the type of the error that it must raise."""
    wants = torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in args.values())
    try:
        decision = fusedops.explain(op.name, **args, **policy)
    except InvalidInputError:
        return InvalidInputError
    return NoBackendError if decision.backend is None or (wants and decision.backward is None) else decision


def _raises(op: Any, args: Mapping[str, Any], policy: Mapping[str, Any], error: type[Exception]) -> None:
    state = torch.get_rng_state()
    try:
        op.function(**args, **policy)
    except error:
        if not torch.equal(state, torch.get_rng_state()):
            raise Wrong(f"got a random number drawn by a call that raises {error.__name__}") from None
        return
    except Exception as other:
        raise Wrong(f"got {type(other).__name__} ({other}), expected {error.__name__}, as explain has it") from other
    raise Wrong(f"got a result, expected {error.__name__}, as explain has it")


def gradients_of(
    names: Sequence[str], outputs: Sequence[Tensor], args: Mapping[str, Any], grads: tuple[str, int]
) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """Return the gradient of each leaf, by the first parameter that it is given for, and the outputs' gradients.

    Outputs of integers, which have none, are the last ones.
    """
    leaves: dict[int, str] = {}
    for name, tensor in args.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            leaves.setdefault(id(tensor), name)
    incoming = tuple(_incoming(y, *grads) for y in outputs if y.is_floating_point())
    if not leaves:
        return {}, incoming
    before = contents(dict(zip(names, incoming)))
    with_graph = [(y, g) for y, g in zip(outputs, incoming) if y.requires_grad]
    found = torch.autograd.grad(
        [y for y, _ in with_graph], [args[name] for name in leaves.values()], [g for _, g in with_graph]
    )
    gradients = dict(zip(leaves.values(), found))
    assert_unchanged(dict(zip(names, incoming)), before)
    for name, gradient in gradients.items():
        assert_same_form(gradient, args[name].detach(), f"gradient of {name}")
    assert_no_alias(found, args, "gradient")
    return gradients, incoming


def _incoming(y: Tensor, layout: str, seed: int) -> Tensor:
    if y.dtype in CODES:
        return torch.ones_like(y)
    form = layout if y.dim() >= LAYOUTS[layout].rank and y.numel() and not LAYOUTS[layout].floating else "contiguous"
    dtype = str(y.dtype).removeprefix("torch.")
    space: dict[str, Any] = {"torch": torch}
    exec("\n".join(Made(tuple(y.shape), dtype, str(y.device), seed=seed, layout=form).lines("g")), space)
    return space["g"] / 3


def _counts() -> Any:
    counts: Counter[tuple[str, str, str]] = Counter()
    for each in fusedops.stats().counts:
        counts[each.op, each.direction, each.backend] += each.calls
    return counts


def _served(runs: Any, name: str, decision: Any, with_gradient: bool) -> None:
    if not runs[name, "forward", decision.backend]:
        raise Wrong(f"got runs of {sorted(runs)}, expected {decision.backend} to serve, as explain has it")
    backward = {backend for op, direction, backend in runs if op == name and direction == "backward"}
    if with_gradient and not backward <= {decision.backward}:
        raise Wrong(f"got backward by {sorted(backward)}, expected {decision.backward}, as explain has it")
