"""The values of constraints and reasons, checked when they are made; and a constraint without reasons."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fusedops
from fusedops.constraints import (
    Broadcasts,
    Capability,
    Dim,
    DType,
    Finite,
    Floating,
    LastDims,
    OneElement,
    OneOf,
    Present,
    Rank,
    Reason,
    ReasonCode,
    Scalar,
    When,
)

pytestmark = pytest.mark.usefixtures("no_compiled_backend")


@pytest.mark.parametrize("missing", ["given", "needed", "fix"])
def test_a_reason_without_a_text_cannot_be_built(missing: str) -> None:
    texts = {"given": "b", "needed": "c", "fix": "d"}
    assert Reason(ReasonCode.SIZE, **texts).detail == "got b, expected c"
    assert Reason(ReasonCode.SIZE, **texts, detail="a").detail == "a"
    with pytest.raises(ValueError, match="expected given, needed and fix; to fix: write all three texts"):
        Reason(ReasonCode.SIZE, **{**texts, missing: ""})


@pytest.mark.parametrize("code", [None, "", "size", "because"])
def test_a_reason_without_a_code_of_the_list_cannot_be_built(code: Any) -> None:
    with pytest.raises(ValueError, match=r"got Reason code .*, expected a ReasonCode; to fix: "):
        Reason(code, "b", "c", "d")


WRONG: dict[str, Any] = {
    "Rank, empty": lambda: Rank("x"),
    "Rank, both": lambda: Rank("x", 2, at_least=2),
    "Rank, a text": lambda: Rank("x", "4"),  # type: ignore[arg-type]
    "Rank, None": lambda: Rank("x", None),  # type: ignore[arg-type]
    "Rank, a float": lambda: Rank("x", at_least=2.0),  # type: ignore[arg-type]
    "Dim, empty": lambda: Dim("x", (-1,)),
    "Dim, no dims": lambda: Dim("x", (), at_least=1),
    "Dim, source": lambda: Dim("x", (-1,), at_most="__import__('os').getpid()"),  # type: ignore[arg-type]
    "Dim, a bool": lambda: Dim("x", (-1,), at_least=True),
    "Dim, zero": lambda: Dim("x", (-1,), multiple_of=0),
    "Dim, negative": lambda: Dim("x", (-1,), multiple_of=-8),
    "Dim, None among dims": lambda: Dim("x", (None,), at_least=1),  # type: ignore[arg-type]
    "Dim, an int for dims": lambda: Dim("x", -1, at_least=1),  # type: ignore[arg-type]
    "DType, empty": lambda: DType("x"),
    "DType, a text": lambda: DType("x", "float32"),  # type: ignore[arg-type]
    "OneElement, a text": lambda: OneElement("x", "int64"),  # type: ignore[arg-type]
    "Scalar, empty": lambda: Scalar("scale"),
    "Scalar, no values": lambda: Scalar("scale", one_of=()),
    "Scalar, nan": lambda: Scalar("scale", math.nan),
    "Scalar, a tensor": lambda: Scalar("scale", one_of=(torch.ones(1),)),  # type: ignore[arg-type]
    "Scalar, a text for values": lambda: Scalar("scale", one_of="no"),  # type: ignore[arg-type]
    "Scalar, a number for values": lambda: Scalar("scale", one_of=1.0),  # type: ignore[arg-type]
    "Finite, infinite": lambda: Finite("scale", at_least=math.inf),
    "Finite, a text": lambda: Finite("scale", at_least="0"),  # type: ignore[arg-type]
    "OneOf, empty": lambda: OneOf("approximate"),
    "LastDims, none": lambda: LastDims("weight", "x", 0),
    "LastDims, a flag": lambda: LastDims("weight", "x", True),
    "OneOf, a float": lambda: OneOf("approximate", 1.0),  # type: ignore[arg-type]
    "OneOf, a bool": lambda: OneOf("approximate", True),
    "OneOf, a text and an int": lambda: OneOf("approximate", "tanh", 1),
    "Finite, optional by an int": lambda: Finite("scale", optional=1),  # type: ignore[arg-type]
    "Capability, one number": lambda: Capability("x", (9,)),  # type: ignore[arg-type]
    "Capability, an int": lambda: Capability("x", 9),  # type: ignore[arg-type]
    "Capability, None": lambda: Capability("x", (None, 0)),  # type: ignore[arg-type]
    "Present, a text": lambda: Present("mask", "no"),  # type: ignore[arg-type]
    "When, a text": lambda: When("x", Rank("x", 4)),  # type: ignore[arg-type]
    "a name that is none": lambda: Rank("x.y", 4),
    "a name that is source": lambda: Broadcasts("mask", "x) or print(1"),
    "a name of another type": lambda: Floating(5),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("declare", WRONG.values(), ids=WRONG.keys())
def test_the_values_of_a_constraint_are_checked_when_it_is_made(declare: Any) -> None:
    with pytest.raises(ValueError, match=r"(got|expected) .*; to fix: "):
        declare()


class Silent(Dim):
    """A constraint that refuses and gives no reason."""

    def reasons(self, args: Any) -> list[Reason]:
        return []


def test_a_constraint_without_reasons_still_yields_one() -> None:
    @fusedops.kernel("bias_gelu", Silent("x", (-1,), at_most=3))
    def never(x: Any, bias: Any, approximate: Any) -> Any:
        raise AssertionError

    fusedops.register(fusedops.Backend("silent", ("cpu",), 500, (never,)))
    x = torch.ones(2, 5)
    with pytest.warns(
        fusedops.FallbackWarning,
        match=r"^bias_gelu runs on eager, not on silent: got .*x.*, expected x: dim -1 a size of at most 3; to fix: ",
    ):
        fusedops.bias_gelu(x)
    first = next(c for c in fusedops.explain("bias_gelu", x).candidates if c.backend == "silent")
    assert first.status == "refused"
    (reason,) = first.reasons
    assert reason.code is ReasonCode.SIZE
    with fusedops.use("silent", fallback="raise"), pytest.raises(fusedops.NoBackendError) as error:
        fusedops.bias_gelu(x)
    assert reason.detail in str(error.value)
    assert error.value.decision.candidates[0].reasons == (reason,)
