"""A limit of the vendor's attention that no class of :mod:`fusedops.constraints` states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fusedops import TensorSpec
from fusedops.constraints import Beside, ReasonCode


class NotWider(Beside):
    """The last dim of the values is at most that of the keys; narrower values are padded."""

    code = ReasonCode.SIZE
    reads_shapes = True

    def expression(self, constants: dict[str, object]) -> str:
        return f"{self.name}.shape[3] <= {self.other}.shape[3]"

    def accepts(self, values: Any, keys: Any) -> bool:
        return values.shape[3] <= keys.shape[3]

    def rule(self) -> str:
        return f"dim 3 at most that of {self.other}"

    def given(self, values: Any, keys: Any) -> str:
        return f"dim 3 of {self.name} = {values.shape[3]}"

    def needed(self, values: Any, keys: Any) -> str:
        return f"at most that of {self.other}, {keys.shape[3]}"

    def fix_of(self, values: Any, keys: Any) -> str:
        return f"split {self.name} into parts of at most {keys.shape[3]}, and concatenate the results"

    def values(self, values: TensorSpec, keys: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        for width in (1, keys.shape[3], keys.shape[3] + 1):
            yield f"{self.name} dim 3 = {width}", values.replace(shape=(*values.shape[:3], width))
