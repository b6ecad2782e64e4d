"""A constraint of this plugin's own."""

import math
from collections.abc import Iterator

from fusedops.constraints import Value, constant


class PowerOfTwo(Value):
    """A number is a power of two, as 0.125 is: the vendor's kernel adds it to the exponent."""

    def expression(self, constants: dict[str, object]) -> str:
        """Return Python source that is true if the constraint is met."""
        return f"{constant(constants, math.frexp)}({self.name})[0] == 0.5"

    def accepts(self, value: float) -> bool:
        """Return the same for a value."""
        return math.frexp(value)[0] == 0.5

    def rule(self) -> str:
        """Return the accepted values as a phrase."""
        return "a power of two"

    def values(self) -> Iterator[float]:
        """Yield values just inside and just outside."""
        yield from (0.25, 2.0, 0.3, -0.5)
