"""Which kernels promise that a row has the same bits whatever the other rows are, and why the others do not.

Measured on a CPU by the check "rows" of the conformance kit, with torch 2.13, 1 to 4,096 rows and 1 to 8 threads.
"""

from __future__ import annotations

from typing import Literal

#: A part of a tensor that is shorter than a vector is computed by another function, and where the parts are follows
#: from the number of rows and of threads.
VECTORS = (
    "torch computes the last elements of a thread's part by another function than whole vectors, and which they are "
    "follows from the number of rows and of threads"
)
SUMS = "torch's mean of a row is taken in another order where there are many rows"
PRODUCTS = "torch's matrix products select a kernel, and with it the order of a sum, by the number of rows"
PLACE = "which elements are kept follows from the place of a row in the batch"


def on_cpu() -> dict[str, Literal[True] | str]:
    """Return the promise for a CPU alone: torch's sums on an accelerator may be cut by the number of rows."""
    return {"cpu": True, "*": "the order of torch's sums on an accelerator may follow from the number of rows"}
