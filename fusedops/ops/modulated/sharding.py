"""The rule of the modulated norms for DTensors: each rank needs whole rows."""

from __future__ import annotations

from fusedops._contract.values import Sharding

# the gradients of what repeats over rows are partial sums, over the rows of a rank
SHARDING = Sharding(whole=(-1,))
