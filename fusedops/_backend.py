"""What a plugin hands in: a backend with its kernels."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fusedops._op import Direction, Op, without_annotations
from fusedops.errors import PluginError

if TYPE_CHECKING:
    from fusedops._adapt import Adaptation
    from fusedops._constraint import Constraint

# Of what a plugin is written against: Backend, kernel, the limits, and the signatures of the ops and their backwards.
# The second number rises when a plugin that was right can be wrong.
API_VERSION = "0.1"

_COMPARISONS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Deviation:
    """A difference from the op's contract that the backend can neither correct nor refuse: a name and one sentence."""

    name: str
    sentence: str


@dataclass(frozen=True)
class Unavailable:
    """A probe's "not here": why, and what to do about it."""

    why: str
    fix: str


@dataclass(frozen=True, eq=False)
class Kernel:
    """One backend's function for one op and direction, with its limits. Made by :func:`kernel`."""

    op: str
    direction: Direction
    function: Callable[..., Any]
    limits: tuple[Constraint, ...] = ()
    source: str = ""
    deviations: tuple[Deviation, ...] = ()
    adaptations: tuple[Adaptation, ...] = ()

    @property
    def where(self) -> str:
        """File and line of the function, for messages."""
        code = getattr(self.function, "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(self.function)


def kernel(
    op: str | Callable[..., Any],
    *limits: Constraint,
    direction: Direction = "forward",
    source: str = "",
    deviations: Sequence[Deviation] = (),
    adapts: Sequence[Adaptation] = (),
) -> Callable[[Callable[..., Any]], Kernel]:
    """Declares the decorated function to be a kernel, with its limits beside it.

    Args:
        op: the public function, as in ``ops.scaled_masked_softmax``, or its name.
        *limits: from :mod:`fusedops.constraints`, the cheapest first; all must hold.
        direction: "forward" has the op's signature, "backward" that of the op's backward.
        source: the vendor function or document behind it.
        deviations: differences from the contract that remain.
        adapts: what is done to calls that the vendor's function would not take as they are.
    """
    name = op if isinstance(op, str) else op.__name__

    def declare(function: Callable[..., Any]) -> Kernel:
        return Kernel(name, direction, function, limits, source, tuple(deviations), tuple(adapts))

    return declare


@dataclass(frozen=True, eq=False)
class Backend:
    """A named set of kernels for some device types.

    Args:
        name: lower case, as users write it in a policy. Must equal the entry point's name.
        device_types: torch device types it serves, such as ("cuda",); ("*",) is every device.
        priority: the default order is from high to low. 0 is eager's; a backend for one device takes 100.
        kernels: made by :func:`kernel`.
        probe: called once, when a call, a policy or a user first needs the backend: None where it can run here, else
            :class:`Unavailable`. Import the vendor's library here, not when the plugin is imported.
        needs: what it runs on, for messages: "triton and an NVIDIA or AMD GPU".
        packages: distributions that it builds on, whose versions ``fusedops info`` shows.
        tools: commands that the driver of its devices brings, such as "nvidia-smi": with one on the path there is a
            device to serve, and ``fusedops doctor`` asks why nobody does.
        fusedops_api: the versions of ``fusedops.API_VERSION`` that the plugin is written for, such as ">=0.1,<0.2";
            with another the backend is refused. Empty: any.
    """

    name: str
    device_types: tuple[str, ...]
    priority: int
    kernels: Sequence[Kernel]
    probe: Callable[[], Unavailable | None] = lambda: None
    needs: str = ""
    packages: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    fusedops_api: str = ""

    def serves(self, device_type: str) -> bool:
        """Whether tensors on this device type are its business."""
        return "*" in self.device_types or device_type in self.device_types


def check_backend(backend: Backend, ops: Mapping[str, Op]) -> None:
    """Raises PluginError where a backend does not fit the ops, and names the culprit."""
    who = f"backend {backend.name!r}"
    if not backend.name.isidentifier() or backend.name != backend.name.lower() or backend.name == "auto":
        raise PluginError(
            f"{who}: a name needs to be a lower-case identifier other than 'auto', as policies are written with it; "
            f"rename it"
        )
    _check_api(who, backend.fusedops_api)
    if not isinstance(backend.priority, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PluginError(
            f"{who}: priority is {backend.priority!r}; needs a whole number, such as 100; 0 is a fallback's"
        )
    kinds: object = backend.device_types
    if not kinds or isinstance(kinds, str) or not all(isinstance(kind, str) for kind in backend.device_types):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PluginError(
            f"{who}: device_types is {backend.device_types!r}; needs a tuple, such as ('cuda',), or ('*',) for all"
        )
    seen: dict[tuple[str, Direction], Kernel] = {}
    for item in backend.kernels:
        if not isinstance(item, Kernel):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PluginError(
                f"{who}: {item!r} is no kernel; needs a function that is one; decorate it with "
                f"@fusedops.kernel(op, limits...)"
            )
        if item.op not in ops:
            known = ", ".join(sorted(ops))
            raise PluginError(
                f"{who}: {item.where} is a kernel for {item.op!r}, which is no op; the ops are {known}; name one "
                f"of these"
            )
        twin = seen.setdefault((item.op, item.direction), item)
        if twin is not item:
            raise PluginError(
                f"{who}: two {item.direction} kernels for {item.op}: {twin.where} and {item.where}; needs one; "
                f"remove the other"
            )
        _check_kernel(who, item, ops[item.op])
    for name, direction in seen:
        if direction == "backward" and (name, "forward") not in seen:
            raise PluginError(
                f"{who}: a backward kernel for {name} without a forward kernel; needs both; add the forward one"
            )


def _check_api(who: str, wanted: str) -> None:
    for part in wanted.split(",") if wanted else ():
        found = re.fullmatch(r"\s*([<>=!]=|[<>])\s*(\d+(?:\.\d+)*)\s*", part)
        if found is None:
            raise PluginError(
                f"{who}: fusedops_api is {wanted!r}; needs comparisons with a version, separated by commas, such as "
                f"'>=0.1,<0.2'"
            )
        if not _COMPARISONS[found[1]](_numbers(API_VERSION), _numbers(found[2])):
            raise PluginError(
                f"{who}: needs fusedops_api {wanted}; this fusedops has {API_VERSION}; install the release of the "
                f"backend that is for {API_VERSION}, or a fusedops that it is for"
            )


def _numbers(version: str) -> list[int]:
    numbers = [int(number) for number in version.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()  # 1.0 is 1
    return numbers


def _check_kernel(who: str, item: Kernel, op: Op) -> None:
    from fusedops._constraint import Constraint  # not at import, where it would cost 5 ms

    wanted = op.signature if item.direction == "forward" else op.backward_signature
    given = inspect.signature(item.function)
    here = f"{who}: {item.direction} kernel for {op.name} at {item.where}"
    wanted_text, given_text = without_annotations(wanted), without_annotations(given)
    if list(given.parameters) != list(wanted.parameters):
        raise PluginError(f"{here} takes {given_text}; needs the op's parameters, in order; write it as {wanted_text}")
    for name, parameter in wanted.parameters.items():
        other = given.parameters[name]
        if other.kind is not parameter.kind:
            raise PluginError(
                f"{here}: parameter {name!r} is {other.kind.description}; needs {parameter.kind.description}; "
                f"write it as {wanted_text}"
            )
        if other.default != parameter.default:
            raise PluginError(
                f"{here}: the default of {name!r} is {_default(other)}; needs {_default(parameter)}; write it as "
                f"{wanted_text}"
            )
    for limit in item.limits:
        if not isinstance(limit, Constraint):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PluginError(
                f"{here}: {limit!r} is no limit; needs one from fusedops.constraints; write one such as Rank('x', 4)"
            )
        for name in limit.names:
            if name not in wanted.parameters:
                raise PluginError(
                    f"{here}: limit {limit.describe()!r} is on {name!r}, which is no parameter; "
                    f"needs one of {', '.join(wanted.parameters)}; name that"
                )


def _default(parameter: inspect.Parameter) -> str:
    return "absent" if parameter.default is parameter.empty else repr(parameter.default)
