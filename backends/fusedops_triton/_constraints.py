"""The constraints that several kernels share."""

from __future__ import annotations

from fusedops.constraints import Dim

#: The longest row of kernels that count columns in 32 bits. The last block may end up to 2**16 columns behind the row.
LONGEST_ROW = 2**31 - 2**16


def row_length(name: str, dim: int = -1) -> Dim:
    """Return the constraint on a dim that such a kernel goes through in blocks."""
    return Dim(name, (dim,), at_most=LONGEST_ROW)
