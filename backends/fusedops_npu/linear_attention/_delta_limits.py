"""The limits of npu_recurrent_gated_delta_rule that are not about sizes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fusedops.constraints import Arguments, Boundary, Dim, Present, Value


class Normalized(Value):
    """The call normalizes q and k: their elements are then from -1 to 1, as the vendor requires."""

    none_is_met = False

    def expression(self, constants: dict[str, object]) -> str:
        return f"{self.name} is True"

    def accepts(self, value: object) -> bool:
        return value is True

    def rule(self) -> str:
        return "True"

    def fix_of(self, value: object) -> str:
        return "use another backend where q and k must not be normalized"

    def values(self) -> Iterator[bool]:
        yield from (True, False)


class Unpacked(Present):
    """There are no packed sequences. The edge outside has few positions, unlike the op's own cases of packed ones."""

    def __init__(self, name: str) -> None:
        super().__init__(name, False, fix="use another backend for packed sequences")

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        yield from super().boundaries(args)
        q = args["q"]
        packed = {"q": q.replace(shape=(1, *q.shape[1:])), "initial_state": None}
        bounds = q.replace(shape=(3,), dtype=torch.int32)
        yield Boundary("two packed sequences", {**args, **packed, self.name: bounds}, False)


class ValueHeads(Dim):
    """v has at most 256 heads. The edges are multiples of the heads of q, as the op requires."""

    def __init__(self) -> None:
        super().__init__("v", (2,), at_most=256)

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        v, unit = args["v"], max(args["q"].shape[2], 1)
        most = 256 // unit * unit
        for heads in (most, most + unit):
            changed = v.replace(shape=(*v.shape[:2], heads, v.shape[3]))
            yield Boundary(f"{heads} heads of v", {**args, "v": changed}, heads == most)
