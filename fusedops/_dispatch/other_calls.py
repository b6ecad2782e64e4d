"""Calls with arguments that no kernel takes as they are: tensors of other kinds, values of a trace, invalid ones."""

from __future__ import annotations

from sys import modules
from typing import TYPE_CHECKING, Any

from fusedops._contract.plain_argument import PlainTensor
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._dispatch.registered.registration import call_registered
from fusedops.errors import InvalidInputError

if TYPE_CHECKING:
    from fusedops._contract.constraint import Constraint
    from fusedops._contract.op import Op


def serve_other_tensors(op: Op, args: tuple[Any, ...], backend: str | None, violated: Constraint | None) -> Any:
    """Serve a call on tensors of other kinds by the registered op, or raise InvalidInputError.

    Args:
        op: the op.
        args: every argument.
        backend: a policy for this call alone, or None.
        violated: the constraint that the op's check found violated; None in a dispatch mode.
    """
    if violated is not None and not isinstance(violated, PlainTensor):
        return raise_or_record(op, args, backend)
    tracer = _fx_tracer(args)
    if tracer is not None:
        return _recorded(op, args, backend, tracer)
    op.validate(args)
    specs = [name for name, arg in zip(op.parameters, args) if isinstance(arg, TensorSpec)]
    if specs:
        raise InvalidInputError(
            f"{op.name}: got {specs[0]} as a TensorSpec, expected a torch.Tensor; to fix: pass it to fusedops.explain"
        )
    return call_registered(op, args, backend)


def raise_or_record(op: Op, args: tuple[Any, ...], backend: str | None) -> Any:
    """Raise InvalidInputError; under torch.fx, record the call instead."""
    tracer = _fx_tracer(args)
    if tracer is not None:
        return _recorded(op, args, backend, tracer)
    op.validate(args)
    raise AssertionError(f"the compiled check of {op.name} refuses what its constraints accept: {args!r}")


def _fx_tracer(args: tuple[Any, ...]) -> Any:
    """Return the tracer of torch.fx.symbolic_trace where an argument is one of its values, or None."""
    fx = modules.get("torch.fx")
    return None if fx is None else next((arg.tracer for arg in args if isinstance(arg, fx.Proxy)), None)


def _recorded(op: Op, args: tuple[Any, ...], backend: str | None, tracer: Any) -> Any:
    """Record a call of the public function, which draws a seed and selects a backend each time that the graph runs."""
    return tracer.create_proxy("call_function", op.function, (), {**dict(zip(op.parameters, args)), "backend": backend})
