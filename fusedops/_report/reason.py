"""Why a backend does not take a call, as data."""

from __future__ import annotations

from enum import Enum

from fusedops._named_tuple import NamedTuple


class ReasonCode(str, Enum):
    """All kinds of reasons why a call is invalid or refused, so that tests and tools need not parse messages.

    >>> from fusedops.constraints import ReasonCode
    >>> ReasonCode("dtype")
    <ReasonCode.DTYPE: 'dtype'>
    """

    TYPE = "type"
    LAYOUT = "layout"
    RANK = "rank"
    SIZE = "size"
    DTYPE = "dtype"
    SCALAR = "scalar"
    PRESENCE = "presence"
    CAPABILITY = "capability"
    DEVICE = "device"
    NO_KERNEL = "no-kernel"
    NOT_REGISTERED = "not-registered"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"
    ROWS = "rows"  # a row's result may depend on other rows, which the policy forbids
    SHARD = "shard"  # the call has a part of a DTensor where the kernel needs the whole


# codes that hold for every call on a device, whatever its arguments
NOT_ABOUT_ARGUMENTS = frozenset(
    {
        ReasonCode.DEVICE,
        ReasonCode.NO_KERNEL,
        ReasonCode.NOT_REGISTERED,
        ReasonCode.UNAVAILABLE,
    }
)


class _Texts(NamedTuple):
    code: ReasonCode
    given: str
    needed: str
    fix: str
    detail: str


class Reason(_Texts):
    """One reason of a refusal. Every text is required.

    Attributes:
        code: the kind of reason.
        given: what the call has, as a noun phrase: "dim -1 of x = 500".
        needed: what would be accepted: "a multiple of 32 in [32, 4096]".
        fix: what to do: "pad dim -1 of x from 500 to 512".
        detail: ``given`` and ``needed`` in one text. Made from them unless given.

    >>> from fusedops.constraints import Reason, ReasonCode
    >>> print(Reason(ReasonCode.RANK, "x with 1 dimension", "2 dimensions", "view x with 2 dimensions"))
    got x with 1 dimension, expected 2 dimensions; to fix: view x with 2 dimensions
    """

    __slots__ = ()

    def __new__(cls, code: ReasonCode, given: str, needed: str, fix: str, detail: str = "") -> Reason:
        if not isinstance(code, ReasonCode):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"got Reason code {code!r}, expected a ReasonCode; to fix: use one of its members")
        if not (given and needed and fix):
            raise ValueError(
                f"got a Reason with given={given!r}, needed={needed!r}, fix={fix!r}, expected given, needed and fix; "
                "to fix: write all three texts"
            )
        return super().__new__(cls, code, given, needed, fix, detail or f"got {given}, expected {needed}")

    def to_dict(self) -> dict[str, str]:
        """Return the reason as JSON-ready data."""
        return {**self._asdict(), "code": self.code.value}

    def __str__(self) -> str:
        return f"{self.detail}; to fix: {self.fix}"
