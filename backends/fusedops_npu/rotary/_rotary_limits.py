"""The limits of npu_rotary_mul on the number of heads, which depend on several sizes."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from fusedops import TensorSpec
from fusedops.constraints import Arguments, Beside, Boundary, Constraint, Reason, ReasonCode, constant

_MOST = 1000
_HEADS_FIRST = "seq_dim -2, or N = S = 1"


def taken(x: Any, interleaved: bool, seq_dim: int) -> bool:
    """Return True where the vendor's op takes the number of heads of a tensor of ``x``'s shape."""
    if 0 in x.shape:  # the vendor's op is not called; of one dim, it is the gradient of a k that is None
        return True
    batch, heads, length = sizes(x, seq_dim)
    if interleaved:
        return batch * heads < _MOST
    tokens_first = seq_dim == -3 and (heads > 1 or length > 1)  # (B, 1, 1, D) is of both layouts
    return batch < _MOST and heads < _MOST and (tokens_first or batch * heads <= 8 * length)


def sizes(x: Any, seq_dim: int) -> tuple[int, int, int]:
    """Return B, N and S of a shape (..., N, S, D), or (..., S, N, D) with seq_dim -3."""
    heads, length = (-2, -3) if seq_dim == -3 else (-3, -2)
    return prod(x.shape[:-3]), x.shape[heads], x.shape[length]


class FewHeads(Constraint):
    """Halves: B and N below 1000, and B * N at most 8 * S with seq_dim -2, which the vendor's op refuses at run time.

    So it does with seq_dim -3 where N and S are 1: it cannot tell the layouts apart. Interleaved: B * N below 1000.
    """

    code = ReasonCode.SIZE

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, "interleaved", "seq_dim")

    def expression(self, constants: dict[str, object]) -> str:
        return f"{constant(constants, taken)}({self.name}, interleaved, seq_dim)"

    def reasons(self, args: Arguments) -> list[Reason]:
        x, interleaved, seq_dim = (args[name] for name in self.names)
        if x is None or taken(x, interleaved, seq_dim):
            return []
        batch, heads, length = sizes(x, seq_dim)
        given = f"{self.name} of B = {batch}, N = {heads}, S = {length}"
        if interleaved:
            return [Reason(self.code, given, f"B * N below {_MOST}", "split the batch")]
        if max(batch, heads) >= _MOST:
            return [Reason(self.code, given, f"B and N below {_MOST}", "split the batch or the heads")]
        fix = "transpose it, and pass seq_dim=-3" if heads > 1 or length > 1 else "split the batch"
        return [Reason(self.code, given, f"B * N at most 8 * S with {_HEADS_FIRST}", fix)]

    def describe(self) -> str:
        return (
            f"{self.name}: B and N below {_MOST}, B * N at most 8 * S with {_HEADS_FIRST}; B * N below {_MOST} if "
            "interleaved"
        )

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        x, _, seq_dim = (args[name] for name in self.names)
        if x is None or len(x.shape) < 3:  # the empty gradient of a k that is None
            return
        batch, _, length = sizes(x, seq_dim)
        most = 8 * length // max(batch, 1)
        for heads in (1, most, most + 1, _MOST - 1, _MOST):
            yield self._boundary(args, f"{heads} heads", _with_heads(x, seq_dim, heads))
        pairs = {**args, "interleaved": True}
        for heads in ((_MOST - 1) // max(batch, 1), (_MOST - 1) // max(batch, 1) + 1):
            yield self._boundary(pairs, f"{heads} heads, interleaved", _with_heads(x, seq_dim, heads))
        if len(x.shape) == 4 and seq_dim == -2:
            for many in (_MOST - 1, _MOST):
                yield self._boundary(args, f"{many} batches", x.replace(shape=(many, 1, _MOST // 8, x.shape[-1])))

    def _boundary(self, args: Arguments, label: str, x: Any) -> Boundary:
        edge = taken(x, args["interleaved"], args["seq_dim"])
        return Boundary(f"{self.name} with {label}", {**args, self.name: x}, edge)


def _with_heads(x: Any, seq_dim: int, heads: int) -> Any:
    """Return the spec with another number of heads."""
    at = len(x.shape) + (-2 if seq_dim == -3 else -3)
    return x.replace(shape=(*x.shape[:at], heads, *x.shape[at + 1 :]))


class WholeHead(Beside):
    """All of the last dim rotates: cos has half as many entries."""

    code = ReasonCode.SIZE

    def expression(self, constants: dict[str, object]) -> str:
        return f"2 * {self.name}.shape[-1] == {self.other}.shape[-1]"

    def accepts(self, angle: Any, x: Any) -> bool:
        return 2 * angle.shape[-1] == x.shape[-1]

    def rule(self) -> str:
        return f"half of the last dim of {self.other}"

    def given(self, angle: Any, x: Any) -> str:
        return f"{self.name} of {angle.shape[-1]} entries for heads of {x.shape[-1]}"

    def needed(self, angle: Any, x: Any) -> str:
        return f"half of the last dim of {self.other}: the vendor's op rotates all of it"

    def fix_of(self, angle: Any, x: Any) -> str:
        return f"if interleaved, pad {self.name} with 1 and sin with 0; if not, rotate {self.other}[..., :R] alone"

    def values(self, angle: TensorSpec, x: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        half = x.shape[-1] // 2
        for entries in (entries for entries in (half - 1, half, half + 1) if entries >= 0):
            yield f"{self.name} of {entries} entries", angle.replace(shape=(*angle.shape[:-1], entries))
