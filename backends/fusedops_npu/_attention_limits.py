"""A limit of the vendor's attention that no class of :mod:`fusedops.constraints` states."""

from __future__ import annotations

from collections.abc import Iterator

from fusedops.constraints import Arguments, Boundary, Constraint, Reason, ReasonCode


class NotWider(Constraint):
    """The last dim of the values is at most that of the keys; narrower values are padded."""

    reads_metadata_only = True
    code = ReasonCode.SIZE
    reads_shapes = True

    def __init__(self, name: str, keys: str) -> None:
        super().__init__(name)
        self.keys = keys

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.keys)

    def expression(self, constants: dict[str, object]) -> str:
        return f"{self.name}.shape[3] <= {self.keys}.shape[3]"

    def reasons(self, args: Arguments) -> list[Reason]:
        values, keys = (args[name] for name in self.names)
        if values.shape[3] <= keys.shape[3]:
            return []
        given, needed = f"dim 3 of {self.name} = {values.shape[3]}", f"at most that of {self.keys}, {keys.shape[3]}"
        fix = f"split {self.name} into parts of at most {keys.shape[3]}, and concatenate the results"
        return [Reason(self.code, given, needed, fix)]

    def describe(self) -> str:
        return f"{self.name}: dim 3 at most that of {self.keys}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        values, keys = (args[name] for name in self.names)
        for width in (1, keys.shape[3], keys.shape[3] + 1):
            changed = {**args, self.name: values.replace(shape=(*values.shape[:3], width))}
            yield Boundary(f"{self.name} dim 3 = {width}", changed, width <= keys.shape[3])
