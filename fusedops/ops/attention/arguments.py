"""Arguments and results of attention: defaults made explicit, empty results, the bounds of packed sequences."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from fusedops._contract.constraint import Arguments, Constraint, is_tensor
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._named_tuple import NamedTuple
from fusedops._report.reason import ReasonCode
from fusedops._storages import freed_error, is_freed
from fusedops.constraints import (
    Alignment,
    Beside,
    DimMultiple,
    Finite,
    Flag,
    Floating,
    Mask,
    Offsets,
    Rank,
    SameDevice,
    SameDims,
    SameDType,
    ScoreMask,
    Value,
    Window,
    broadcasts,
    constant,
)
from fusedops.constraints.attention import OfQueriesAndKeys
from fusedops.constraints.relations import may_broadcast
from fusedops.constraints.tensors import possible
from fusedops.dtypes import compute_dtype
from fusedops.errors import InvalidInputError
from fusedops.tensor_cache import cached_for

#: Of a grid with blocks that have no rows: an estimate, not measured. Such a block reads two bounds and ends.
MOST_BLOCKS = 2**14


def prepare_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with ``causal`` as a text: True where Sq == Sk is "upper_left", False is "none".

    "lower_right" of one query without a window is "none" too: it masks nothing, and more kernels accept it.
    """
    causal = args[5]
    if causal is True and _square(args[0], args[1]):
        text = "upper_left"
    elif causal is False or (type(causal) is str and causal == "lower_right" and _sees_every_key(args[0], args[6])):
        text = "none"
    else:
        return args  # a constraint refuses any other value
    return (*args[:5], text, *args[6:])


def for_heads(indices: Any) -> Any:
    """Return indices of keys with a dim of heads, (B, 1, Sq, K), where they have none."""
    if not is_tensor(indices) or indices.is_nested or indices.layout is not torch.strided or indices.dim() != 3:
        return indices
    if isinstance(indices, TensorSpec):
        return indices.replace(shape=(indices.shape[0], 1, *indices.shape[1:]))
    return indices[:, None]


def have_one_length(q: Any, k: Any) -> bool:
    """Return True where q (B, S, H, D) and k (B, T, D) have as many queries as keys."""
    if not (is_tensor(q) and is_tensor(k)) or q.is_nested or k.is_nested or q.dim() != 4 or k.dim() != 3:
        return False
    return bool(q.shape[1] == k.shape[1])


def wanted(results: Any, return_lse: bool) -> Any:
    """Return out, or (out, lse) with ``return_lse``. Under torch.fx.symbolic_trace the results are one proxy."""
    return results if return_lse or type(results) is not tuple else cast("Any", results)[0]


def _sees_every_key(q: Any, window: Any) -> bool:
    if window is not None or not is_tensor(q) or q.is_nested or q.dim() != 4:
        return False
    length: Any = q.shape[2]
    return isinstance(length, int) and length == 1  # a symbolic size, or one of torch.jit.trace, is any length


def _square(q: Any, k: Any) -> bool:
    if not (is_tensor(q) and is_tensor(k)) or q.is_nested or k.is_nested or q.dim() != 4 or k.dim() != 4:
        return False
    return bool(q.shape[2] == k.shape[2])


def empty(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return empty outputs: the dims of out in memory in the order of q's, where v is not wider."""
    lse = q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))
    size = v.shape[3]
    if size > q.shape[3]:
        return q.new_empty((*q.shape[:3], size)), lse
    return torch.empty_like(q[..., :size]), lse


# ----------------------------------------------------------------------------------------------------- varlen_attention


def prepare_packed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with ``causal`` as a text: False is "none".

    Where queries and keys have the same bounds, True and "lower_right" are "upper_left": more kernels accept it.
    """
    bounds_of_keys, causal = args[4], args[6]
    if causal is False:
        text = "none"
    elif bounds_of_keys is None and (causal is True or (type(causal) is str and causal == "lower_right")):
        text = "upper_left"
    else:
        return args  # a constraint refuses any other value
    return (*args[:6], text, *args[7:])


def bounds_of_keys(q: Any, k: Any, cu_seqlens_q: Any, cu_seqlens_k: Any) -> Any:
    """Return None for the bounds of keys that are those of the queries, of as many rows."""
    if cu_seqlens_k is not cu_seqlens_q or not (is_tensor(q) and is_tensor(k)) or q.is_nested or k.is_nested:
        return cu_seqlens_k
    return None if q.dim() > 0 and k.dim() > 0 and q.shape[0] == k.shape[0] else cu_seqlens_k


class Sequence(NamedTuple):
    """One of several packed sequences: the places of its queries and of its keys."""

    queries: slice
    keys: slice

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of its queries and of its keys."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start


def sequences_of(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, queries: int, keys: int) -> list[Sequence]:
    """Return the sequences that have a query, which a kernel reads once: a device is waited for.

    Args:
        cu_seqlens_q: (B + 1,), int32 or int64. On the meta device, where it has no numbers, one sequence has all rows.
        cu_seqlens_k: (B + 1,), or None for the same.
        queries: T.
        keys: Tk.

    Raises:
        InvalidInputError: on a CPU a bound is below the one before it, below 0, or above the number of rows.

    >>> import torch
    >>> from fusedops.ops.attention.arguments import sequences_of
    >>> sequences_of(torch.tensor([0, 2, 2, 5]), None, 5, 5)[1].lengths
    (3, 3)
    """
    if cu_seqlens_q.is_meta:
        return [Sequence(slice(0, queries), slice(0, keys))]
    of_queries = _bounds("cu_seqlens_q", cu_seqlens_q, queries, "q")
    of_keys = of_queries if cu_seqlens_k is None else _bounds("cu_seqlens_k", cu_seqlens_k, keys, "k")
    parts = [[*map(slice, bounds, bounds[1:])] for bounds in (of_queries, of_keys)]
    return [Sequence(*each) for each in zip(*parts) if each[0].start < each[0].stop]


def _bounds(name: str, cu_seqlens: Tensor, rows: int, of: str) -> list[int]:
    """Return the bounds as integers: those on a CPU checked, others clamped, as the reference does."""
    if is_freed(cu_seqlens):
        raise freed_error("varlen_attention", name)
    values: list[int] = cast("Any", cu_seqlens).tolist()
    bounds: list[int] = []
    before = 0
    for n, bound in enumerate(values):
        if not before <= bound <= rows and cu_seqlens.is_cpu:
            after = f" after {before}" if n else ""
            raise InvalidInputError(
                f"varlen_attention: got {name}[{n}] = {bound}{after}, expected the start of a sequence from {before} "
                f"to {rows}, the rows of {of}; to fix: pass 0 and the sums of the lengths, as in "
                f"torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"
            )
        before = min(max(bound, before), rows)
        bounds.append(before)
    return bounds


class Pages(NamedTuple):
    """The keys of sequences in pages.

    Attributes:
        tokens: (Tk,), int64, the index of each key in the pages, one sequence after the other.
        bounds: (B + 1,), int64, of the sequences in these.
    """

    tokens: Tensor
    bounds: Tensor


def pages_of(block_table: Tensor, seqused_k: Tensor, pages: int, size: int) -> Pages:
    """Return the keys that sequences use: a device is waited for.

    Args:
        block_table: (B, M), int32 or int64, the pages of each sequence.
        seqused_k: (B,), int32 or int64, the number of keys of each.
        pages: of the cache.
        size: the number of keys of a page.

    Raises:
        InvalidInputError: on a CPU a number of keys is below 0 or above M * size, or a page that is used is none.

    >>> import torch
    >>> from fusedops.ops.attention.arguments import pages_of
    >>> pages_of(torch.tensor([[3, 1]]), torch.tensor([3]), 4, 2)
    Pages(tokens=tensor([6, 7, 2]), bounds=tensor([0, 3]))
    """
    most = block_table.shape[1] * size
    if block_table.is_meta:
        length = most if pages else 0
        return Pages(block_table.new_empty(length, dtype=torch.int64), block_table.new_zeros(2, dtype=torch.int64))
    check_lengths(seqused_k, most)
    used = seqused_k.long().clamp(0, most if pages else 0)
    numbers = torch.arange(most, device=used.device)
    sequence, number = (numbers < used[:, None]).nonzero(as_tuple=True)
    page = block_table.long()[sequence, number // max(size, 1)]
    if block_table.is_cpu and page.numel() and not 0 <= int(page.min()) <= int(page.max()) < pages:
        raise InvalidInputError(
            f"paged_attention: got pages from {int(page.min())} to {int(page.max())} in block_table, expected those of "
            f"k, 0 to {pages - 1}; to fix: pass the pages of the keys that seqused_k counts"
        )
    bounds = torch.nn.functional.pad(used.cumsum(0), (1, 0))
    return Pages(page.clamp(0, max(pages - 1, 0)) * size + number % max(size, 1), bounds)


def check_lengths(seqused_k: Tensor, most: int) -> None:
    """Raise an InvalidInputError where a number of keys on a CPU is below 0 or above ``most``.

    >>> import torch
    >>> from fusedops.ops.attention.arguments import check_lengths
    >>> check_lengths(torch.tensor([0, 3]), 4)
    """
    if not seqused_k.is_cpu or not seqused_k.numel():
        return
    low, high = (int(each) for each in seqused_k.aminmax())
    if low < 0 or high > most:
        raise InvalidInputError(
            f"paged_attention: got seqused_k from {low} to {high}, expected from 0 to {most}, the keys that the pages "
            f"of a row of block_table have; to fix: pass the number of keys of each sequence"
        )


class StoreKvArgs(NamedTuple):
    """The arguments of store_kv."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def check_written(a: StoreKvArgs) -> None:
    """Raise an InvalidInputError for an argument that cannot be written.

    Two of its elements are in one place of memory, or it was made in inference mode, which has ended.

    >>> import torch
    >>> from fusedops.ops.attention.arguments import StoreKvArgs, check_written
    >>> k, cache = torch.zeros(1, 1, 2), torch.zeros(3, 4, 1, 2)
    >>> check_written(StoreKvArgs(k, k, cache, cache, torch.tensor([11])))
    """
    scales = [(name, each) for name, each in (("k_scale", a.k_scale), ("v_scale", a.v_scale)) if each is not None]
    of_tokens = [(name, each) for name, each in scales if each.dim() == 3]
    for name, tensor in (("k_cache", a.k_cache), ("v_cache", a.v_cache), *of_tokens):
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise InvalidInputError(
                f"store_kv: got {name} that was made in inference mode, expected one whose writes torch counts; to "
                f"fix: call it in torch.inference_mode(), or make {name} outside of it"
            )
        strides = tensor.stride()
        if 0 in strides and any(size > 1 and not stride for size, stride in zip(tensor.shape, strides)):
            raise InvalidInputError(
                f"store_kv: got {name} with strides {strides}, expected memory for each element, as it is written; to "
                f"fix: pass {name}.contiguous(), and keep that"
            )


def check_slots(slots: Tensor, count: int) -> None:
    """Raise an InvalidInputError where a slot on a CPU is none of the cache.

    >>> import torch
    >>> from fusedops.ops.attention.arguments import check_slots
    >>> check_slots(torch.tensor([-1, 11]), 12)
    """
    if not slots.is_cpu or not slots.numel():
        return
    low, high = (int(each) for each in slots.aminmax())
    if low < -1 or high >= count:
        raise InvalidInputError(
            f"store_kv: got slots from {low} to {high}, expected -1, or from 0 to {count - 1}, those of k_cache; to "
            f"fix: pass page * size + offset of each token"
        )


class Bounds(NamedTuple):
    """Bounds of parts of packed sequences, which hold each query and each key once.

    Attributes:
        queries: (P + 1,), int32, the bounds of the parts in q.
        keys: (P + 1,), int32, the bounds of the parts in k and v.
    """

    queries: Tensor
    keys: Tensor


def parts_of(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    queries: int,
    keys: int,
    causal: str,
    window: tuple[int, int] | None,
) -> Bounds:
    """Return parts in which each query sees a key, or that have no keys; and in which a query sees each key, or none.

    The first queries of a sequence that see no key are a part of their own, as are its first keys that no query sees,
    and what is in no sequence. A diagonal at the lower right of the sequence is at the lower right of its rest. The
    device of the bounds is not waited for.

    Args:
        cu_seqlens_q: (B + 1,), int32 or int64.
        cu_seqlens_k: (B + 1,), or None for the same, with as many keys as queries.
        queries: T.
        keys: Tk.
        causal: "none" or "lower_right"; any where the bounds of queries and keys are the same.
        window: as of the op.

    >>> import torch
    >>> from fusedops.ops.attention.arguments import parts_of
    >>> parts_of(torch.tensor([1, 3]), torch.tensor([0, 4]), 3, 4, "none", None)
    Bounds(queries=tensor([0, 1, 1, 3, 3, 3], dtype=torch.int32), keys=tensor([0, 0, 0, 4, 4, 4], dtype=torch.int32))
    """
    of_q = Offsets.within(cu_seqlens_q, queries)
    of_k = of_q if cu_seqlens_k is None else Offsets.within(cu_seqlens_k, keys)
    zero, end_q, end_k = of_q.new_zeros(1), of_q.new_full((1,), queries), of_q.new_full((1,), keys)
    first_q, last_k = of_q[:1], of_k[-1:]
    if cu_seqlens_k is not None and (window is not None or causal == "lower_right"):
        most = max(queries, keys)
        left, right = (most, most) if window is None else (min(size, most) for size in window)
        missing = of_q.diff() - of_k.diff()  # keys of each sequence
        dead = (missing - (right if causal == "none" else 0)).clamp(min=0)
        unseen = (-missing - left).clamp(min=0)
        of_q, of_k = _split(of_q, dead), _split(of_k, unseen)
    return Bounds(
        torch.cat((zero, first_q, of_q, end_q, end_q)).to(torch.int32),
        torch.cat((zero, zero, of_k, last_k, end_k)).to(torch.int32),
    )


def _split(bounds: Tensor, first: Tensor) -> Tensor:
    """Return the bounds with one more in each sequence, after its ``first`` rows."""
    return torch.cat((torch.stack((bounds[:-1], bounds[:-1] + first), 1).flatten(), bounds[-1:]))


def longest_of(cu_seqlens: Tensor, rows: int) -> int:
    """Return the length of the longest sequence, or of the rows before or after all: a device is waited for.

    >>> import torch
    >>> from fusedops.ops.attention.arguments import longest_of
    >>> longest_of(torch.tensor([0, 2, 5]), 9)
    4
    """
    bounds = torch.nn.functional.pad(Offsets.within(cu_seqlens, rows), (1, 1))
    bounds[-1] = rows
    return int(bounds.diff().max())


def most_of(cu_seqlens: Tensor, rows: int, heads: int) -> int:
    """Return a number that no length passes: all rows, or the longest length where that is worth its wait.

    Kernels that need one on the host have a block for each 128 rows of it in each sequence and head: with B sequences
    up to B times as many blocks as have rows. The lengths are read where all rows would make a large grid, not while a
    CUDA graph is captured, and once for each tensor in a block of :func:`fusedops.tensor_cache.reuse`.

    >>> import torch
    >>> from fusedops.ops.attention.arguments import most_of
    >>> most_of(torch.tensor([0, 2, 5]), 5, 8), most_of(torch.tensor([0, 20_000, 100_000]), 100_000, 64)
    (5, 80000)
    """
    blocks = -(-rows // 128) * heads * (cu_seqlens.shape[0] - 1)
    if blocks <= MOST_BLOCKS or (cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()):
        return rows
    return cached_for(cu_seqlens, ("longest", rows), lambda: longest_of(cu_seqlens, rows))


class Lengths(NamedTuple):
    """Packed sequences as kernels of FlashAttention take them, whose results of each row are then the op's.

    Attributes:
        queries: (P + 1,), int32, contiguous.
        keys: (P + 1,), int32, contiguous.
        most_queries: a length that no sequence of queries passes.
        most_keys: the same of keys.
        left: keys before the diagonal that a query sees; -1 is every key.
        right: the same after the diagonal.
    """

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int
    left: int
    right: int


def lengths_of(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    causal: str,
    window: tuple[int, int] | None,
) -> Lengths:
    """Return the sequences of :func:`parts_of`, with numbers on the host that no length passes.

    An open side of a window is as long as the longest sequence of keys in release 2, which then is to be as long as the
    queries. With a longest of 1 it assumes one query for each sequence, so at least 2 is passed.

    >>> import torch
    >>> from fusedops.ops.attention.arguments import lengths_of
    >>> q, bounds = torch.zeros(5, 1, 8), torch.tensor([0, 2, 5])
    >>> lengths_of(q, q, bounds, None, "none", (3, 9))[2:]
    (5, 5, 3, 5)
    """
    parts = parts_of(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0], causal, window)
    most_q = most_of(cu_seqlens_q, q.shape[0], q.shape[1])
    most_k = max(most_q, most_q if cu_seqlens_k is None else most_of(cu_seqlens_k, k.shape[0], q.shape[1]))
    left, right = (-1, -1) if window is None else (min(size, most_k) for size in window)
    return Lengths(parts.queries, parts.keys, max(most_q, 2), most_k, left, right)


def lse_of_flash(out: Tensor, lse: Tensor) -> Tensor:
    """Return the op's lse, (T, Nq), of that of FlashAttention, (Nq, T).

    There a row without keys has inf, as has a row with NaN among its scores, whose out (T, Nq, D) is not 0.

    >>> import torch
    >>> from fusedops.ops.attention.arguments import lse_of_flash
    >>> lse_of_flash(torch.zeros(1, 2, 8), torch.tensor([[1.0], [torch.inf]]))
    tensor([[1., -inf]])
    """
    lse = lse.transpose(0, 1).nan_to_num(torch.nan, torch.nan, torch.nan)
    return lse.masked_fill_(lse.isnan() & (out[..., 0] == 0), -torch.inf).contiguous()


class KeyCount(Value):
    """A number of keys to choose: from 1 to that of the indices of int32."""

    none_is_met = False

    def expression(self, constants: dict[str, object]) -> str:
        return f"type({self.name}) is int and 0 < {self.name} < {2**31}"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, torch.SymInt) or (type(value) is int and 0 < value < 2**31)

    def rule(self) -> str:
        return "an integer from 1 to 2147483647"

    def values(self) -> Iterator[Any]:
        yield from (1, 7, 130, 0, -1, 2**31, 1.0, True, None)


class SharedKeys(Beside):
    """The tensor has keys for all heads of the queries (B, S, H, D): (B, T, D)."""

    code = ReasonCode.SIZE
    reads_shapes = True

    def expression(self, constants: dict[str, object]) -> str:
        shape, q = f"{self.name}.shape", f"{self.other}.shape"
        return f"{self.name}.dim() == 3 and {shape}[0] == {q}[0] and {shape}[2] == {q}[3]"

    def accepts(self, tensor: Any, other: Any) -> bool:
        if tensor.dim() != 3 or other.dim() != 4:
            return tensor.dim() == 3
        return possible(tensor.shape[0] == other.shape[0]) and possible(tensor.shape[2] == other.shape[3])

    def rule(self) -> str:
        return f"(B, T, D) of {self.other} (B, S, H, D)"

    def needed(self, tensor: Any, other: Any) -> str:
        return f"({other.shape[0]}, T, {other.shape[3]})" if other.dim() == 4 else self.rule()

    def fix_of(self, tensor: Any, other: Any) -> str:
        return f"pass one key for all heads of {self.other}, as in {self.name}.squeeze(1) of a dim of heads"

    def follow(self, args: Arguments) -> TensorSpec | None:
        values = self.arguments(args)
        if values is None or values[0].dim() != 3 or values[1].dim() != 4:
            return None
        return values[0].replace(shape=(values[1].shape[0], values[0].shape[1], values[1].shape[3]))

    def values(self, tensor: TensorSpec, other: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        if other.dim() == 4:
            b, d = other.shape[0], other.shape[3]
            yield from self.shaped(tensor, [(b, 5, d), (b, 5, d + 1), (b + 1, 5, d), (b, 1, 5, d), (5, d)])


class VisibleKeys(OfQueriesAndKeys):
    """The mask broadcasts to (B, S, T), the scores of q (B, S, H, D) and k (B, T, D)."""

    def expression(self, constants: dict[str, object]) -> str:
        fits = constant(constants, broadcasts)
        return f"{fits}({self.name}.shape, (*{self.q}.shape[:2], {self.k}.shape[1]))"

    def accepts(self, mask: Any, q: Any, k: Any) -> bool:
        return q.dim() != 4 or k.dim() != 3 or may_broadcast(mask.shape, (*q.shape[:2], k.shape[1]))

    def rule(self) -> str:
        return f"broadcasts to the queries of {self.q} and the keys of {self.k}"

    def needed(self, mask: Any, q: Any, k: Any) -> str:
        return f"a shape that broadcasts to {(*q.shape[:2], k.shape[1])}"

    def fix_of(self, mask: Any, q: Any, k: Any) -> str:
        return "give each dim the size of (B, S, T), or 1"

    def follow(self, args: Arguments) -> TensorSpec | None:
        values = self.arguments(args)
        if values is None or values[1].dim() != 4 or values[2].dim() != 3 or values[0].dim() > 3:
            return None
        sizes = (*values[1].shape[:2], values[2].shape[1])[3 - values[0].dim() :]
        return values[0].replace(shape=tuple(1 if own == 1 else size for own, size in zip(values[0].shape, sizes)))

    def values(self, mask: TensorSpec, q: TensorSpec, k: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        if q.dim() == 4 and k.dim() == 3:
            yield from self.examples({self.name: mask, self.q: q, self.k: k}).items()
            (b, s), t = q.shape[:2], k.shape[1]
            yield from self.shaped(mask, ((2, b, s, t), (s, t + 1), (s + 2, t)))

    def examples(self, args: Arguments) -> Mapping[str, Any]:
        mask, q, k = (args[name] for name in self.names)
        if mask is None or q.dim() != 4 or k.dim() != 3:
            return {}
        (b, s), t = q.shape[:2], k.shape[1]
        shapes = {"of each score": (b, s, t), "of queries and keys": (s, t), "of a padded batch": (b, 1, t)}
        return {f"{self.name} {kind}": mask.replace(shape=shape) for kind, shape in shapes.items()}


class SelectKeysArgs(NamedTuple):
    """The arguments of select_keys."""

    q: Tensor
    k: Tensor
    weights: Tensor
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    scale: float = 1.0
    causal: str = "none"
    mask: Tensor | None = None


def check_indices(indices: Tensor, keys: int) -> None:
    """Raise an InvalidInputError where an index on a CPU is no key, or a key is in a row twice.

    >>> import torch
    >>> from fusedops.ops.attention.arguments import check_indices
    >>> check_indices(torch.tensor([[3, -1, 0]]), 4)
    """
    if not indices.is_cpu or not indices.numel():
        return
    low, high = (int(each) for each in indices.aminmax())
    if low < -1 or high >= keys:
        raise InvalidInputError(
            f"sparse_attention: got indices from {low} to {high}, expected -1, or from 0 to {keys - 1}, the keys of k; "
            f"to fix: pass the indices of keys, as fusedops.select_keys returns them"
        )
    ordered = indices.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if bool(twice.any()):
        raise InvalidInputError(
            f"sparse_attention: got key {int(ordered[..., 1:][twice][0])} twice in a row of indices, expected each key "
            f"once; to fix: pass -1 in its other places"
        )


CONSTRAINTS: tuple[Constraint, ...] = (
    Floating("q"),
    Floating("k"),
    Floating("v"),
    Rank("q", 4),
    Rank("k", 4),
    Rank("v", 4),
    SameDevice("k", "q"),
    SameDevice("v", "q"),
    SameDType("k", "q"),
    SameDType("v", "q"),
    SameDims("k", "q", (0, 3)),
    SameDims("v", "k", (0, 1, 2)),
    DimMultiple("q", "k", 1),
    Mask("mask"),
    SameDevice("mask", "q"),
    ScoreMask("mask", "q", "k"),
    Finite("scale", optional=True),
    Alignment("causal", "q", "k", "upper_left", "lower_right"),
    Window("window"),
    Flag("return_lse"),
)


class SparseAttentionArgs(NamedTuple):
    """The arguments of sparse_attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    indices: Tensor
    mask: Tensor | None = None
    scale: float | None = None
    causal: str = "none"
    window: tuple[int, int] | None = None
    return_lse: bool = False


class SparseAttentionGradArgs(NamedTuple):
    """The arguments of the backward of sparse_attention."""

    grad_out: Tensor
    grad_lse: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    indices: Tensor
    mask: Tensor | None
    out: Tensor
    lse: Tensor
    scale: float | None
    causal: str
    window: tuple[int, int] | None
    return_lse: bool
    needs: tuple[bool, ...]


class AttentionArgs(NamedTuple):
    """The arguments of attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    scale: float | None = None
    causal: str = "none"
    window: tuple[int, int] | None = None
    return_lse: bool = False


class AttentionGradArgs(NamedTuple):
    """The arguments of the backward of attention."""

    grad_out: Tensor
    grad_lse: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    out: Tensor
    lse: Tensor
    scale: float | None
    causal: str
    window: tuple[int, int] | None
    return_lse: bool
    needs: tuple[bool, ...]


class VarlenAttentionArgs(NamedTuple):
    """The arguments of varlen_attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None = None
    scale: float | None = None
    causal: str = "none"
    window: tuple[int, int] | None = None
    return_lse: bool = False


class VarlenAttentionGradArgs(NamedTuple):
    """The arguments of the backward of varlen_attention."""

    grad_out: Tensor
    grad_lse: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None
    out: Tensor
    lse: Tensor
    scale: float | None
    causal: str
    window: tuple[int, int] | None
    return_lse: bool
    needs: tuple[bool, ...]


class PagedAttentionArgs(NamedTuple):
    """The arguments of paged_attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    block_table: Tensor
    seqused_k: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    scale: float | None = None
    causal: str = "none"
    window: tuple[int, int] | None = None
    return_lse: bool = False
