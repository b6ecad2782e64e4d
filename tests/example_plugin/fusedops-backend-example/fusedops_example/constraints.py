"""A constraint of this plugin's own."""

import math
from collections.abc import Iterator

from fusedops.constraints import Arguments, Boundary, Constraint, Reason, ReasonCode, constant


class PowerOfTwo(Constraint):
    """A number is a power of two, as 0.125 is: the vendor's kernel adds it to the exponent."""

    code = ReasonCode.SCALAR

    def expression(self, constants: dict[str, object]) -> str:
        """Return Python source that is true where the constraint is met."""
        return f"{constant(constants, math.frexp)}({self.name})[0] == 0.5"

    def reasons(self, args: Arguments) -> list[Reason]:
        """Return why the arguments violate the constraint; empty where they meet it."""
        value = args[self.name]
        if value is None or math.frexp(value)[0] == 0.5:
            return []
        fix = f"multiply x by {self.name} before the call"
        return [Reason(self.code, f"{self.name} = {value}", "a power of two", fix)]

    def describe(self) -> str:
        """Return the constraint as a phrase for tables."""
        return f"{self.name}: a power of two"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        """Yield cases just inside and just outside, made from a call that meets the constraint."""
        for value, taken in ((0.25, True), (2.0, True), (0.3, False), (-0.5, False)):
            yield Boundary(f"{self.name} = {value}", {**args, self.name: value}, taken)
