"""Constraints on the masking of attention scores: a mask, the alignment of a causal mask, a window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from fusedops._contract.constraint import Arguments, Boundary, Constraint, constant, listed, shown
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._report.reason import Reason, ReasonCode
from fusedops.constraints.relations import broadcasts, may_broadcast
from fusedops.constraints.tensors import TensorConstraint, possible, resized
from fusedops.constraints.values import Value

ALIGNMENTS = ("upper_left", "lower_right")


class OfQueriesAndKeys(TensorConstraint):
    """The sizes of a tensor are those of queries and keys."""

    code = ReasonCode.SIZE
    reads_shapes = True

    def __init__(self, name: str, q: str, k: str) -> None:
        super().__init__(name)
        self.q, self.k = Constraint(q).name, Constraint(k).name

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.q, self.k)


class ScoreMask(OfQueriesAndKeys):
    """The mask broadcasts to the scores of queries and keys, (B, Nq, Sq, Sk).

    >>> from fusedops.constraints import ScoreMask
    >>> ScoreMask("mask", "q", "k").describe()
    'mask: broadcasts to the scores of q and k'
    """

    def expression(self, constants: dict[str, object]) -> str:
        fits = constant(constants, broadcasts)
        return f"{fits}({self.name}.shape, (*{self.q}.shape[:3], {self.k}.shape[2]))"

    def accepts(self, mask: Any, q: Any, k: Any) -> bool:
        return q.dim() != 4 or k.dim() != 4 or may_broadcast(mask.shape, (*q.shape[:3], k.shape[2]))

    def rule(self) -> str:
        return f"broadcasts to the scores of {self.q} and {self.k}"

    def needed(self, mask: Any, q: Any, k: Any) -> str:
        return f"a shape that broadcasts to {(*q.shape[:3], k.shape[2])}"

    def fix_of(self, mask: Any, q: Any, k: Any) -> str:
        return "give each dim the size of the scores (B, Nq, Sq, Sk), or 1"

    def values(self, mask: TensorSpec, q: TensorSpec, k: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        if q.dim() == k.dim() == 4:
            yield from self.examples({self.name: mask, self.q: q, self.k: k}).items()
            shapes = ((2, *q.shape[:3], k.shape[2]), (q.shape[2], k.shape[2] + 1), (q.shape[2] + 2, k.shape[2]))
            yield from self.shaped(mask, shapes)

    def examples(self, args: Arguments) -> Mapping[str, Any]:
        mask, q, k = (args[name] for name in self.names)
        if mask is None or q.dim() != 4 or k.dim() != 4:
            return {}
        (b, n, sq), sk = q.shape[:3], k.shape[2]
        shapes = {
            "of each score": (b, n, sq, sk),
            "of each head": (n, sq, sk),
            "of queries and keys": (sq, sk),
            "of a padded batch": (b, 1, 1, sk),
            "of each batch": (b, 1, sq, sk),
            "of keys": (sk,),
        }
        return {f"{self.name} {kind}": mask.replace(shape=shape) for kind, shape in shapes.items()}


class IndicesOfKeys(OfQueriesAndKeys):
    """The indices have a row for each query, of one head or of each key head: (B, 1 or Nk, Sq, K).

    >>> from fusedops.constraints import IndicesOfKeys
    >>> IndicesOfKeys("indices", "q", "k").describe()
    'indices: (B, Sq, K) or (B, 1 or Nk, Sq, K) of q and k'
    """

    def expression(self, constants: dict[str, object]) -> str:
        shape, q = f"{self.name}.shape", f"{self.q}.shape"
        heads = f"({shape}[1] == 1 or {shape}[1] == {self.k}.shape[1])"
        return f"{self.name}.dim() == 4 and {shape}[0] == {q}[0] and {shape}[2] == {q}[2] and {heads}"

    def accepts(self, indices: Any, q: Any, k: Any) -> bool:
        if indices.dim() != 4 or q.dim() != 4 or k.dim() != 4:
            return indices.dim() == 4
        batch, heads, queries = indices.shape[:3]
        of_heads = possible(heads == 1) or possible(heads == k.shape[1])
        return of_heads and possible(batch == q.shape[0]) and possible(queries == q.shape[2])

    def rule(self) -> str:
        return f"(B, Sq, K) or (B, 1 or Nk, Sq, K) of {self.q} and {self.k}"

    def needed(self, indices: Any, q: Any, k: Any) -> str:
        if q.dim() != 4 or k.dim() != 4:
            return self.rule()
        return f"({q.shape[0]}, {q.shape[2]}, K) or ({q.shape[0]}, 1 or {k.shape[1]}, {q.shape[2]}, K)"

    def fix_of(self, indices: Any, q: Any, k: Any) -> str:
        return f"pass the keys of each query of {self.q}, -1 for none"

    def follow(self, args: Arguments) -> TensorSpec | None:
        values = self.arguments(args)
        if values is None or any(each.dim() != 4 for each in values[1:]) or values[0].dim() not in (3, 4):
            return None
        indices, q, k = values
        heads = 1 if indices.dim() == 3 or indices.shape[1] == 1 else k.shape[1]
        return indices.replace(shape=(q.shape[0], heads, q.shape[2], indices.shape[-1]))

    def values(self, indices: TensorSpec, q: TensorSpec, k: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        if indices.dim() == q.dim() == k.dim() == 4:
            b, n, s, count = q.shape[0], k.shape[1], q.shape[2], indices.shape[3]
            sizes = ((b, 1, s, count), (b, n, s, count), (b, n, s, 1), (b, n + 1, s, count), (b, 1, s + 1, count))
            yield from self.shaped(indices, (*dict.fromkeys(sizes), (b + 1, 1, s, count), (s, count)))


class Alignment(Constraint):
    """The diagonal of a causal mask: "none", or one of ``alignments``, which are the same where Sq == Sk.

    "upper_left": query i sees the keys up to i. "lower_right": the last query sees every key.

    Args:
        name: the argument, "none", "upper_left" or "lower_right".
        q: the queries, (B, Nq, Sq, D).
        k: the keys, (B, Nk, Sk, D).
        alignments: the alignments accepted where Sq != Sk.
        dim: the dim of both that Sq and Sk are the sizes of.

    >>> from fusedops.constraints import Alignment
    >>> Alignment("causal", "q", "k", "upper_left").describe()
    "causal: 'none' or 'upper_left', or Sq == Sk"
    """

    code = ReasonCode.SCALAR
    none_is_met = False

    def __init__(self, name: str, q: str, k: str, *alignments: str, dim: int = 2) -> None:
        super().__init__(name)
        self.dim = dim
        if any(alignment not in ALIGNMENTS for alignment in alignments):
            raise ValueError(
                f"Alignment({name!r}): got {alignments!r}, expected some of {ALIGNMENTS}; to fix: give these"
            )
        self.q = Constraint(q).name
        self.k = Constraint(k).name
        self.alignments = alignments

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.q, self.k)

    def expression(self, constants: dict[str, object]) -> str:
        accepted, known = (constant(constants, frozenset(texts)) for texts in (("none", *self.alignments), _CAUSAL))
        test = f"{self.name} in {accepted}"
        if len(self.alignments) == len(ALIGNMENTS):
            return test
        return f"{test} or ({self.name} in {known} and {self.q}.shape[{self.dim}] == {self.k}.shape[{self.dim}])"

    def _accepts(self, value: Any, sq: Any, sk: Any) -> bool:
        if not isinstance(value, str) or value not in _CAUSAL:
            return False
        return value == "none" or value in self.alignments or possible(sq == sk)

    def reasons(self, args: Arguments) -> list[Reason]:
        value, q, k = (args[name] for name in self.names)
        if min(q.dim(), k.dim()) <= self.dim:
            return []
        sq, sk = q.shape[self.dim], k.shape[self.dim]
        if self._accepts(value, sq, sk):
            return []
        given = f"{self.name} = {shown(value)}"
        if value is True:
            return [
                Reason(
                    self.code,
                    f"{given} with {sq} queries and {sk} keys",
                    "'upper_left' (query i sees the keys up to i) or 'lower_right' (the last query sees every key)",
                    f"pass {self.name}='upper_left' for torch's is_causal, 'lower_right' for flash-attn's causal and "
                    f"for decoding with cached keys",
                )
            ]
        if isinstance(value, str) and value in _CAUSAL:
            fix = f"pass as many queries as keys, or the causal mask as a mask, with {self.name}=False"
            return [Reason(self.code, f"{given} with {sq} queries and {sk} keys", self._rule(), fix)]
        fix = f"pass {self.name} as False, or one of the two texts"
        return [Reason(self.code, given, "False, 'upper_left' or 'lower_right', or True where Sq == Sk", fix)]

    def _rule(self) -> str:
        choices = listed([repr(choice) for choice in ("none", *self.alignments)])
        return choices if len(self.alignments) == len(ALIGNMENTS) else f"{choices}, or Sq == Sk"

    def describe(self) -> str:
        return f"{self.name}: {self._rule()}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        _, q, k = (args[name] for name in self.names)
        own = q.shape[self.dim]
        for length in (own, own + 1):  # a call with as many queries as keys shows no difference
            changed = {**args, self.q: resized(q, self.dim, length)}
            for value in (*_CAUSAL, "diagonal"):
                label = f"{self.name} = {value!r}, {length} queries"
                yield Boundary(label, {**changed, self.name: value}, self._accepts(value, length, k.shape[self.dim]))

    def examples(self, args: Arguments) -> Mapping[str, Any]:
        _, q, k = (args[name] for name in self.names)
        if min(q.dim(), k.dim()) <= self.dim:
            return {}
        values = (value for value in _CAUSAL if self._accepts(value, q.shape[self.dim], k.shape[self.dim]))
        return {f"{self.name} = {value!r}": value for value in values}


class Window(Value):
    """A window of keys around the diagonal: None, or two ints of at least 0.

    Args:
        name: the argument, None or (keys before the diagonal, keys after it).

    >>> from fusedops.constraints import Window
    >>> Window("window").describe()
    'window: None, or two ints of at least 0'
    """

    def expression(self, constants: dict[str, object]) -> str:
        return f"{constant(constants, _is_window)}({self.name})"

    def accepts(self, value: Any) -> bool:
        return value is None or _is_window(value)

    def rule(self) -> str:
        return "None, or two ints of at least 0"

    def fix_of(self, value: Any) -> str:
        return f"pass {self.name}=(left, right), such as (127, 0) for the newest 128 keys, or None"

    def values(self) -> Iterator[Any]:
        yield from (None, (3, 1), (0, 0), (-1, 0), (2,), 4)


_CAUSAL = ("none", *ALIGNMENTS)


def _is_window(value: Any) -> bool:
    """Return True for two ints of at least 0, in a tuple, or in a list as torch's schemas pass them."""
    if not isinstance(value, (tuple, list)) or len(cast("list[Any]", value)) != 2:
        return False
    return all(type(size) is int and 0 <= size < 2**63 for size in cast("list[Any]", value))
