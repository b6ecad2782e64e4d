"""What an op is: its signature, its meaning in plain torch, and the data for tests, benchmarks and docs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

import torch

from fusedops._spec import TensorSpec
from fusedops.errors import InvalidInputError

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Tolerance:
    """How far a backend may be from the float64 reference: ``|got - want| <= absolute + relative * |want|``."""

    absolute: float
    relative: float


@dataclass(frozen=True)
class Case:
    """A named call from a real model, from which tests and benchmarks are made. Tensors are given by their shapes."""

    name: str
    args: Mapping[str, Any]  # a tuple is a tensor's shape; anything else is passed as it is
    source: str = ""


@dataclass(frozen=True, eq=False)
class Op:
    """The contract of one fused operation. Every backend's kernels mean what ``reference`` says.

    Args:
        name: as users call it, and as ``torch.ops.fusedops`` knows it.
        reference: plain differentiable torch, the meaning of the op. Its signature is the op's and each kernel's.
        backward: plain differentiable torch. Its parameters are ``grad`` (the output's gradient), ``y`` (the output)
            and any of the op's own, by name: those are what forward keeps for backward, so that any backend's backward
            can serve any forward. It returns one gradient for each name in ``differentiable``, in that order.
        differentiable: the tensor parameters that have gradients.
        validate: raises InvalidInputError where the arguments break the contract. On the hot path.
        output: an empty tensor of the output's shape, dtype and device, made from the arguments.
        tolerance: of the output, by dtype of the first argument.
        gradient_tolerance: of the gradients. Wider: backward starts from what forward has rounded, and subtracts.
        cases: real calls.
        min_bytes: the fewest bytes any kernel must move for a call, by direction.
        formula: one line for the docs.
    """

    name: str
    reference: Callable[..., torch.Tensor]
    backward: Callable[..., Any]
    differentiable: tuple[str, ...]
    validate: Callable[..., None]
    output: Callable[..., torch.Tensor]
    tolerance: Mapping[torch.dtype, Tolerance]
    gradient_tolerance: Mapping[torch.dtype, Tolerance]
    cases: Sequence[Case]
    min_bytes: Callable[..., Mapping[Direction, int]]
    formula: str
    doc: str = ""

    @cached_property
    def signature(self) -> inspect.Signature:
        """The op's signature without ``backend``, which belongs to the frontend."""
        return inspect.signature(self.reference)

    @cached_property
    def backward_signature(self) -> inspect.Signature:
        """The signature of a backward kernel."""
        return inspect.signature(self.backward)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Parameter names in order."""
        return tuple(self.signature.parameters)

    @cached_property
    def backward_parameters(self) -> tuple[str, ...]:
        """Parameter names of backward in order."""
        return tuple(self.backward_signature.parameters)

    @cached_property
    def way(self) -> Callable[..., int]:
        """Which way a call with these arguments goes, see ``_dispatch.py``."""
        from fusedops._dispatch import make_way

        tensors = [name for name, p in self.signature.parameters.items() if str(p.annotation).startswith("Tensor")]
        return make_way(self.parameters, tensors, self.differentiable)

    @cached_property
    def cpu_key(self) -> tuple[str, str]:
        """The plan's key for CPU tensors, made once."""
        return (self.name, "cpu")

    @cached_property
    def cuda_key(self) -> tuple[str, str]:
        """The plan's key for CUDA tensors, made once."""
        return (self.name, "cuda")

    @cached_property
    def differentiable_positions(self) -> tuple[int, ...]:
        """Where the differentiable tensors stand among the arguments."""
        return tuple(self.parameters.index(name) for name in self.differentiable)

    @cached_property
    def backward_positions(self) -> tuple[int | None, ...]:
        """For each backward parameter after ``grad``: its position among forward's arguments, or None for ``y``."""
        return tuple(None if name == "y" else self.parameters.index(name) for name in self.backward_parameters[1:])

    def backward_args(self, grad: Any, y: Any, args: Sequence[Any]) -> tuple[Any, ...]:
        """Arguments for a backward kernel, in order."""
        return (grad, *(y if position is None else args[position] for position in self.backward_positions))

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of a call in the op's order, with defaults filled in."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidInputError(f"{self.name}{self.signature} was called with other arguments: {error}") from None
        bound.apply_defaults()
        return tuple(bound.arguments[name] for name in self.parameters)

    def specs(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments with each tensor replaced by its :class:`TensorSpec`."""
        return tuple(TensorSpec.of(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)

    def call_reference(self, args: Sequence[Any]) -> torch.Tensor:
        """The reference on arguments in the op's order."""
        return as_positional(self.reference, self.signature)(*args)

    def call_backward(self, args: Sequence[Any]) -> Any:
        """The reference backward on arguments in its order."""
        return as_positional(self.backward, self.backward_signature)(*args)

    def positional(self, function: Callable[..., Any], direction: Direction) -> Callable[..., Any]:
        """``function``, a kernel of this op, as a function of positional arguments alone (free where it already is)."""
        signature = self.signature if direction == "forward" else self.backward_signature
        return as_positional(function, signature)


OPS: dict[str, Op] = {}  # every op by name; filled by fusedops/ops/__init__.py, which lists them


def split(signature: inspect.Signature, args: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments in order, as the positional and the keyword-only ones."""
    names = list(signature.parameters)
    keyword_only = [name for name in names if signature.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY]
    count = len(names) - len(keyword_only)
    return tuple(args[:count]), dict(zip(keyword_only, args[count:]))


@cache  # one a kernel
def as_positional(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """A function of positional arguments that calls ``function`` with each argument by its own kind.

    Built once, as source: packing keyword arguments at each call costs 0.4 us more.
    """
    keyword_only = [name for name, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY]
    if not keyword_only:
        return function
    names = list(signature.parameters)
    passed = [f"{name}={name}" if name in keyword_only else name for name in names]
    return eval(f"lambda {', '.join(names)}: function({', '.join(passed)})", {"function": function})
