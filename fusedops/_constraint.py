"""What a limit of a kernel is, whatever it is on: its reasons, its cases at the edge, and the check made of several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch

Arguments = Mapping[str, Any]


class ReasonCode(str, Enum):
    """Why a backend does not serve a call. A closed list, so that tests and tools never read message texts."""

    RANK = "rank"
    SIZE = "size"
    DTYPE = "dtype"
    SCALAR = "scalar"
    PRESENCE = "presence"
    CAPABILITY = "capability"
    DEVICE = "device"
    NO_KERNEL = "no-kernel"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"
    SHARD = "shard"  # of a DTensor, where only the whole tensor will do


@dataclass(frozen=True)
class Reason:
    """One reason of a refusal. It cannot be built without a code and all four texts."""

    code: ReasonCode
    detail: str  # the whole, as a sentence: "dim -1 of x is 500; needs a multiple of 32 in [32, 4096]"
    given: str
    needed: str
    fix: str

    def __post_init__(self) -> None:
        if not isinstance(self.code, ReasonCode):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"a Reason needs a code from ReasonCode, got {self.code!r}")
        if not (self.detail and self.given and self.needed and self.fix):
            raise ValueError(f"a Reason needs detail, given, needed and fix, got {self!r}")

    def to_dict(self) -> dict[str, str]:
        """The reason as JSON-ready data."""
        return {
            "code": self.code.value,
            "detail": self.detail,
            "given": self.given,
            "needed": self.needed,
            "fix": self.fix,
        }


@dataclass(frozen=True)
class Boundary:
    """One case at an edge of a limit: ``args`` differ from the base case in one value, and are taken or not."""

    label: str
    args: Arguments
    taken: bool


@dataclass(frozen=True, eq=False)  # identity hash: a constraint object is a key on the hot path
class Constraint(ABC):
    """One limit of one kernel, on the argument called ``name``."""

    name: str

    @property
    @abstractmethod
    def code(self) -> ReasonCode:
        """The code of every reason that this limit gives."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every argument that the limit looks at."""
        return (self.name,)

    @abstractmethod
    def expression(self, constants: dict[str, object]) -> str:
        """Python source that is true where the call is taken; values it needs go into ``constants``. Not for None."""

    def test(self, constants: dict[str, object]) -> str:
        """:meth:`expression`, also true where the argument is None."""
        return f"({self.name} is None or ({self.expression(constants)}))"

    @abstractmethod
    def reasons(self, args: Arguments) -> list[Reason]:
        """Why the call is refused; empty where it is taken. Equal to the compiled check by a property test."""

    @abstractmethod
    def describe(self) -> str:
        """The limit as a phrase for the support table."""

    @abstractmethod
    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        """Cases just inside and just outside the limit, made from a call ``args`` that is taken."""

    def to_dict(self) -> dict[str, object]:
        """The limit as JSON-ready data."""
        fields: dict[str, object] = {"type": type(self).__name__}
        for key, value in vars(self).items():
            fields[key] = plain(value)
        return fields


def compile_check(parameters: Sequence[str], limits: Sequence[Constraint]) -> Callable[..., Constraint | None] | None:
    """Builds the hot path's check: a function of the call's arguments, in order, that returns the limit that refuses.

    Args:
        parameters: the op's parameter names, in order.
        limits: the kernel's limits, tested in this order.

    Returns:
        A function that returns the refusing constraint, or None where the call is taken; or None when there are no
        limits, so that the caller can skip the call altogether.
    """
    if not limits:
        return None
    constants: dict[str, object] = {}
    lines = [f"def check({', '.join(parameters)}):"]
    for position, limit in enumerate(limits):
        lines.append(f"    if not {limit.test(constants)}: return limit_{position}")
        constants[f"limit_{position}"] = limit
    exec(compile("\n".join(lines), "<fusedops limits>", "exec"), constants)
    return constants["check"]  # type: ignore[return-value]


def plain(value: object) -> object:
    """A value of a limit as JSON-ready data."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Constraint):
        return value.to_dict()
    if isinstance(value, tuple):
        return [plain(item) for item in cast("tuple[object, ...]", value)]
    return value
