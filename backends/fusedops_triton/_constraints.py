"""The constraints that several kernels share, and why some do not promise independent rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fusedops import TensorSpec
from fusedops.constraints import Arguments, Boundary, Capability, Constraint, Dim, DType, OneOf, Rank
from fusedops.quantization import SCALED, bytes_of_row, weights_of_row

#: The longest row of kernels that count columns in 32 bits. The last block may end up to 2**16 columns behind the row.
LONGEST_ROW = 2**31 - 2**16
# why a kernel does not promise that a row has the same bits whatever the other rows are
PARTS = "torch adds the sums of parts of a sample, in an order that may follow from the number of samples"
PLACE = "which elements are kept follows from the place of a row in the batch"
PRODUCTS = "torch's matrix products select a kernel, and with it the order of a sum, by the number of rows"
GROUPED = "torch's grouped_mm may order its sums by the number of rows"
FEW_ROWS = "a program has fewer rows where there are few, and its sums another order"
TWO_FORMS = "a program of several rows has two forms, by the number of rows, whose sums differ in the interpreter"
MEAN_LENGTH = "packed sequences are computed in chunks, or one position after another, by their mean length"
ORDER = "a few rows are summed in another order than tiles of many, or than torch's products, by their number"


class HasScales(OneOf):
    """The format of a packed weight has a tensor of scales."""

    def __init__(self, weight: str) -> None:
        super().__init__(f"{weight}_format", *SCALED)
        self.weight = weight

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        """Yield a call with the formats, and one with a weight of GGUF, whose codes have another size."""
        yield from super().boundaries(args)
        codes: TensorSpec = args[self.weight]
        size = bytes_of_row(weights_of_row(codes.shape[-1], args[self.name]), "Q8_0")
        if size is not None:
            parts = dict.fromkeys(f"{self.weight}_{part}" for part in ("scales", "global_scale", "zeros"))
            weight = codes.replace(shape=(*codes.shape[:-1], size))
            yield Boundary("Q8_0", {**args, **parts, self.weight: weight, self.name: "Q8_0"}, False)


class DecayOfHeads(Rank):
    """A decay is one for each head. With one for each row of a state, the products of a chunk are no plain matmuls."""

    def needed(self, tensor: Any) -> str:
        return "one decay for each head, (B, S, Hv): chunks of a decay of each row are no plain matmuls"

    def fix_of(self, tensor: Any) -> str:
        return f"pass {self.name} as (B, S, Hv), or use another backend"


def supported(*names: str) -> tuple[Constraint, ...]:
    """Return the constraints of every kernel, on the tensors whose dtypes decide in which dtype a call is computed.

    The kernels compute in float32. Those of torch serve float64, for which a GPU has 1/2 to 1/64 of the arithmetic, and
    in whose products Triton 3.6 ends in an assertion. Triton supports NVIDIA GPUs from Ampere on.
    """
    return (
        Capability(names[0], (8, 0)),
        *(DType(name, torch.float16, torch.bfloat16, torch.float32) for name in names),
    )


def row_length(name: str, dim: int = -1) -> Dim:
    """Return the constraint on a dim that such a kernel goes through in blocks."""
    return Dim(name, (dim,), at_most=LONGEST_ROW)
