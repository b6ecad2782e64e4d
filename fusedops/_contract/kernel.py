"""Kernel: one backend's function for one op and direction, with its constraints, deviations and adaptations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from inspect import Signature, signature, unwrap
from types import ModuleType
from typing import Any, Literal, overload

from fusedops._contract.constraint import Constraint
from fusedops._contract.signature import spread
from fusedops._contract.values import loaded
from fusedops._named_tuple import NamedTuple
from fusedops._report.direction import Direction
from fusedops.errors import PluginError


class Deviation(NamedTuple):
    """A difference from the op's contract that the backend can neither correct nor refuse: a name and one sentence.

    >>> import fusedops
    >>> fusedops.Deviation("finite-fill", "masked scores are -10000, not -inf").name
    'finite-fill'
    """

    name: str
    sentence: str


class Adaptation(NamedTuple):
    """A change to the arguments of some calls that lets a kernel take them, and its cost.

    Args:
        name: short, for programs.
        sentence: the change, and how often it is made.
        cost: from the call's arguments, in the kernel's order, each tensor real or a ``TensorSpec``: the bytes written
            beside the result, 0 where it is free, None where the call does not need it.

    >>> import fusedops
    >>> fusedops.Adaptation("4-d", "x is viewed with 4 dimensions", lambda x, *_: None if x.dim() == 4 else 0).name
    '4-d'
    """

    name: str
    sentence: str
    cost: Callable[..., int | None]


class Replay(ABC):
    """A call of a kernel that can be made again: on the same memory, for the numbers that it holds then.

    >>> import fusedops
    >>> sorted(fusedops.Replay.__abstractmethods__)
    ['begin', 'end', 'joined']
    """

    @classmethod
    @abstractmethod
    def joined(cls, calls: Sequence[Any]) -> Callable[[], object]:
        """Return a function that makes calls of this class again, in order."""

    @classmethod
    @abstractmethod
    def begin(cls) -> bool:
        """Prepare for calls that follow one another closely. Returns True where :meth:`end` has to be called."""

    @classmethod
    @abstractmethod
    def end(cls) -> None:
        """End what begin began."""


class NamedFunction:
    """A function that is named as text, "module:name", and imported by its first call.

    Args:
        text: the module and the name.

    Attributes:
        check: called with the function when it is imported; raises if its parameters are not the expected ones.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.check: Callable[[Callable[..., Any]], None] | None = None

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The function, imported now."""
        function = spread(loaded(self.text))
        if self.check is not None:
            self.check(function)
        return function

    @property
    def __signature__(self) -> Signature:
        return signature(self.function)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


#: True for a kernel that promises it, else the reason why not. A mapping where that depends on the device type; "*" is
#: every other type.
RowsIndependent = Literal[True] | str | Mapping[str, Literal[True] | str]


@dataclass(frozen=True, eq=False)
class Kernel:
    """One backend's function for one op and direction, with its constraints. Made by :func:`kernel`.

    >>> import fusedops
    >>> from fusedops.constraints import Rank
    >>> @fusedops.kernel("bias_gelu", Rank("x", 2))
    ... def forward(x, bias, approximate): ...
    >>> isinstance(forward, fusedops.Kernel), forward.op, forward.constraints
    (True, 'bias_gelu', (Rank(name='x', ranks=(2,)),))
    """

    op: str
    direction: Direction
    function: Callable[..., Any]
    constraints: tuple[Constraint, ...] = ()
    source: str = ""
    deviations: tuple[Deviation, ...] = ()
    adaptations: tuple[Adaptation, ...] = ()
    device_types: tuple[str, ...] = ()
    prepare: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    rows_independent: RowsIndependent | None = None
    for_speed: tuple[Constraint, ...] = ()
    for_rows: Callable[..., Any] | None = None
    extra_error: Callable[..., Sequence[Any]] | None = None
    record: Callable[..., tuple[Any, Replay | None]] | None = None

    def why_rows_depend(self, device_type: str) -> str | None:
        """Return why results of a row may depend on other rows, on a device type; None where they do not."""
        value = self.rows_independent
        if isinstance(value, Mapping):
            value = value.get(device_type, value.get("*"))
        if isinstance(value, str):
            return value
        return None if value else "the kernel does not promise the same bits for any number of rows"

    def serves(self, device_type: str) -> bool:
        """Return True where the kernel serves this device type, if its backend does."""
        return not self.device_types or device_type in self.device_types

    @cached_property
    def call(self) -> Callable[..., Any]:
        """The function that computes: ``function``, or what ``prepare`` makes of it."""
        return self.function if self.prepare is None else self.prepare(self.function)

    def for_independent_rows(self) -> Kernel:
        """Return the kernel as a policy with ``rows="independent"`` calls it; or itself if that changes nothing."""
        if not self.for_speed and self.for_rows is None:
            return self
        kept = tuple(item for item in self.constraints if item not in self.for_speed)
        function, record = (self.for_rows, None) if self.for_rows else (self.function, self.record)
        return replace(self, function=function, constraints=kept, for_speed=(), for_rows=None, record=record)

    @property
    def location(self) -> str:
        """File and line of the function, or its name as text, for messages."""
        if isinstance(self.function, NamedFunction):
            return self.function.text
        code = getattr(unwrap(self.function), "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(self.function)


def kernel(
    op: str | Callable[..., Any],
    *constraints: Constraint,
    direction: Direction = "forward",
    source: str = "",
    deviations: Sequence[Deviation] = (),
    adapts: Sequence[Adaptation] = (),
    device_types: Sequence[str] = (),
    prepare: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    rows_independent: RowsIndependent | None = None,
    for_speed: Sequence[Constraint] = (),
    for_rows: Callable[..., Any] | None = None,
    extra_error: Callable[..., Sequence[Any]] | None = None,
    record: Callable[..., tuple[Any, Replay | None]] | None = None,
) -> Callable[[Callable[..., Any] | str], Kernel]:
    """Return a decorator that makes a function a kernel.

    Called with a text, "module:function", it makes a kernel of that function, which the first call imports.

    The function takes the op's parameters by position, in order, without defaults (and ``save`` after them where the op
    has saved values); of direction "backward", the parameters of the op's backward.

    Args:
        op: the public function, as in ``ops.scaled_masked_softmax``, or its name.
        *constraints: from :mod:`fusedops.constraints`, the cheapest first; all must be met.
        direction: "forward" or "backward".
        source: the vendor's function or document.
        deviations: differences from the contract that remain.
        adapts: changes to calls that the vendor's function would not take as they are.
        device_types: the device types that the kernel serves, if the backend has other kernels for its other device
            types. (): all that the backend serves.
        prepare: called with the function once the backend's probe has returned None. Returns a function with the same
            parameters to call instead, such as one of a library that the probe has loaded. None: the function itself
            is called.
        rows_independent: True where a row of each result has the same bits whatever the other rows are; else the reason
            why not. A mapping where that depends on the device type; "*" is every other type.
        for_speed: constraints that exclude calls which another backend merely runs faster; a policy with
            ``rows="independent"`` drops them.
        for_rows: a function with the same parameters that such a policy calls instead: it keeps the promise
            ``rows_independent``, and the kernel's own function, which is faster, does not. None: the kernel's own.
        extra_error: called with the function's arguments, on the CPU. Returns for each result what the kernel's own
            arithmetic adds to the op's error bound, a number or a tensor, inf where it may overflow; None for nothing.
        record: called with the function and its arguments. Returns the results, and a ``Replay`` that computes them
            again, from the numbers that the arguments have then, into the same memory; what the function checks in the
            values of a tensor is checked the first time alone. In place of the replay, or of ``record``, None: the
            function is called again, and its results are copied.

    >>> import torch, fusedops
    >>> from fusedops.constraints import DType
    >>> @fusedops.kernel("bias_gelu", DType("x", torch.float32), extra_error=lambda x, bias, approximate: [1e-4])
    ... def bias_gelu(x, bias, approximate):
    ...     return torch.nn.functional.gelu(x if bias is None else x + bias, approximate=approximate)
    >>> bias_gelu.direction
    'forward'
    """
    name = op if isinstance(op, str) else op.__name__

    def declare(function: Callable[..., Any] | str) -> Kernel:
        return Kernel(
            name,
            direction,
            NamedFunction(function) if isinstance(function, str) else spread(function),
            (*constraints, *for_speed),
            source,
            tuple(deviations),
            tuple(adapts),
            tuple(device_types),
            prepare,
            rows_independent,
            tuple(for_speed),
            for_rows and spread(for_rows),
            extra_error,
            record,
        )

    return declare


@overload
def kernels_of(*modules: ModuleType) -> tuple[Kernel, ...]: ...
@overload
def kernels_of(*modules: str, **of_ops: str | Sequence[str]) -> Sequence[Kernel]: ...
def kernels_of(*modules: ModuleType | str, **of_ops: str | Sequence[str]) -> Sequence[Kernel]:
    """Return the kernels that modules define, in the order of the modules and of their definitions.

    Those of modules that are given as text are imported when they are first needed, so that a program pays for those
    alone that it calls: as in ``kernels_of(rms_norm="mine.norms")``, by the calls of that op.

    Args:
        *modules: modules; or the names of some, "module" or "module:TUPLE_OF_KERNELS".
        **of_ops: names of the modules with the kernels of an op, one or several.

    >>> import types, fusedops
    >>> module = types.ModuleType("bias_gelu")
    >>> module.bias_gelu = fusedops.kernel("bias_gelu")(lambda x, bias, approximate: x)
    >>> [kernel.direction for kernel in fusedops.kernels_of(module)]
    ['forward']
    """
    if not of_ops and all(isinstance(module, ModuleType) for module in modules):
        return tuple(value for module in modules for value in vars(module).values() if isinstance(value, Kernel))
    named = [("", module if isinstance(module, str) else module.__name__) for module in modules]
    named += [(op, text) for op, texts in of_ops.items() for text in ([texts] if isinstance(texts, str) else texts)]
    return NamedKernels(named)


class NamedKernels(Sequence[Kernel]):
    """The kernels of modules that are named as text. A module is imported when a kernel in it is first needed.

    Args:
        modules: of each the op whose kernels it has, "" where these may be of any, and its name.
    """

    def __init__(self, modules: Sequence[tuple[str, str]]) -> None:
        self.modules = modules

    def of(self, op: str) -> tuple[Kernel, ...]:
        """Return the kernels of an op, imported now."""
        return tuple(each for name in self.modules if name[0] in ("", op) for each in _at(*name) if each.op == op)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: Any) -> Any:
        kernels: Any = self._all
        return kernels[index]

    @cached_property
    def _all(self) -> tuple[Kernel, ...]:
        return tuple(each for name in self.modules for each in _at(*name))


def _at(op: str, text: str) -> list[Kernel]:
    kernels: Sequence[Kernel] = loaded(text) if ":" in text else kernels_of(import_module(text))
    found = [each for each in kernels if op in ("", each.op)]
    if op and not found:
        raise PluginError(
            f"kernels_of: got no kernel for {op} in {text}, expected one; to fix: name the module that defines it"
        )
    return found


def ops_of(kernels: Sequence[Kernel]) -> tuple[str, ...]:
    """Return the ops that kernels are for. Imports nothing where these are named."""
    modules = kernels.modules if isinstance(kernels, NamedKernels) else [("", "")]
    named = [op for op, _ in modules]
    return tuple(dict.fromkeys(named if all(named) else [each.op for each in kernels]))
