"""What an op is: its signature, its meaning in plain torch, and the data for tests, benchmarks and docs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

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


class Padding(NamedTuple):  # a dataclass takes longer to make, at import
    """How a call of an op is made larger, so that its result, cropped, is the one asked for.

    Args:
        dims: those of the first parameter that can grow, from the end: (-2, -1).
        forward: ``(args, sizes) -> args``, the call with these dims grown to ``sizes``; its tensors are real, or all
            specs. The result grows with the first parameter.
        backward: the same for the arguments of backward, which gives one gradient, of the first parameter.
    """

    dims: tuple[int, ...]
    forward: Callable[[Sequence[Any], tuple[int, ...]], tuple[Any, ...]]
    backward: Callable[[Sequence[Any], tuple[int, ...]], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class Op:
    """The contract of one fused operation. Every backend's kernels mean what ``reference`` says.

    Args:
        name: as users call it, and as ``torch.ops.fusedops`` knows it.
        reference: plain differentiable torch, the meaning of the op. Its signature is the op's and each kernel's.
        backward: plain differentiable torch, all its parameters positional and without defaults. They are ``grad``
            (the output's gradient), then, by name, what forward keeps for it: ``y`` (the output), any of the op's own
            parameters, ``<parameter>_dtype``, and ``needs`` (for each of ``differentiable``: is its gradient wanted).
            As they belong to the op, any backend's backward can serve any forward. It returns one gradient
            for each of ``differentiable``, None where not wanted; a tuple where there are several.
        differentiable: the tensor parameters whose gradients backward computes.
        validate: raises InvalidInputError where the arguments break the contract. On the hot path.
        output: an empty tensor of the output's shape, dtype and device, made from the arguments.
        tolerance: of the output, by dtype of the first argument.
        gradient_tolerance: of the gradients. Wider: backward starts from what forward has rounded, and subtracts.
        cases: real calls.
        min_bytes: the fewest bytes any kernel must move for a call, by direction.
        formula: one line for the docs.
        passed_through: a tensor parameter whose gradient is ``grad`` itself, as a residual's is.
        identity: takes the arguments of backward except ``needs``; whether the first parameter's gradient is ``grad``
            itself too, as dropout's is where nothing is dropped: no kernel is asked for it then. None: it never is.
        unsharded: the dims of the first parameter that every rank needs whole, where the tensors are DTensors.
        padding: how a call is padded to sizes that a kernel takes; None where it cannot be, or would not help.
        complete: fills in what the public function draws or makes (a seed), for looking at a call without running it.
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
    passed_through: str | None = None
    identity: Callable[..., bool] | None = None
    unsharded: tuple[int, ...] = ()
    padding: Padding | None = None
    complete: Callable[[tuple[Any, ...]], tuple[Any, ...]] = lambda args: args

    run: Callable[..., torch.Tensor] = field(init=False)  # the hot path: every argument in order, then backend

    def __post_init__(self) -> None:
        from fusedops._dispatch import make_run  # which knows this class

        # now, not at first use: torch.compile cannot trace a cached property being made
        object.__setattr__(self, "run", make_run(self))

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
    def tensors(self) -> tuple[str, ...]:
        """The tensor parameters, by their annotations."""
        return tuple(n for n, p in self.signature.parameters.items() if str(p.annotation).startswith("Tensor"))

    @cached_property
    def cpu_key(self) -> tuple[str, str]:
        """The plan's key for CPU tensors, made once."""
        return (self.name, "cpu")

    @cached_property
    def cuda_key(self) -> tuple[str, str]:
        """The plan's key for CUDA tensors, made once."""
        return (self.name, "cuda")

    @cached_property
    def kept(self) -> tuple[tuple[str, int], ...]:
        """For each backward parameter after ``grad``: "y", "needs", "argument" or "dtype", and which argument."""
        found: list[tuple[str, int]] = []
        for name in self.backward_parameters[1:]:
            if name in ("y", "needs"):
                found.append((name, -1))
            elif name in self.parameters:
                found.append(("argument", self.parameters.index(name)))
            else:
                found.append(("dtype", self.parameters.index(name.removesuffix("_dtype"))))
        return tuple(found)

    def backward_args(self, grad: Any, y: Any, args: Sequence[Any], needs: tuple[bool, ...]) -> tuple[Any, ...]:
        """Arguments for a backward kernel, in order."""
        found = [grad]
        for what, at in self.kept:
            if what == "argument":
                found.append(args[at])
            elif what == "y":
                found.append(y)
            elif what == "needs":
                found.append(needs)
            else:
                found.append(args[at].dtype)
        return tuple(found)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of a call in the op's order, with defaults filled in."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidInputError(
                f"{self.name}: {error}; needs {without_annotations(self.signature)}; give each argument once, as there"
            ) from None
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
        return self.backward(*args)

    def positional(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which has the op's signature, as a function of positional arguments alone."""
        return as_positional(function, self.signature)


OPS: dict[str, Op] = {}  # every op by name; filled by fusedops/ops/__init__.py, which lists them


def without_annotations(signature: inspect.Signature) -> str:
    """A signature as a person writes it in a message."""
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


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
