"""Constraints on one tensor's dtype and layout."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fusedops._contract.constraint import Arguments, constant, listed, plain
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._report.reason import Reason, ReasonCode
from fusedops.constraints.tensors import TensorConstraint
from fusedops.dtypes import CODES, STORAGE

FLOATING = tuple(STORAGE)
MASKS = (torch.bool, torch.uint8)


class DType(TensorConstraint):
    """The dtype of a tensor is one of ``dtypes``.

    >>> import torch
    >>> from fusedops.constraints import DType
    >>> DType("x", torch.float16, torch.bfloat16).describe()
    'x: float16 or bfloat16'
    """

    code = ReasonCode.DTYPE

    def __init__(self, name: str, *dtypes: torch.dtype) -> None:
        super().__init__(name)
        if not dtypes or not all(isinstance(dtype, torch.dtype) for dtype in dtypes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"DType({name!r}): got {dtypes!r}, expected torch dtypes; to fix: give at least one")
        self.dtypes = dtypes

    def expression(self, constants: dict[str, object]) -> str:
        return f"{self.name}.dtype in {constant(constants, frozenset(self.dtypes))}"

    def accepts(self, tensor: Any) -> bool:
        return tensor.dtype in self.dtypes

    def given(self, tensor: Any) -> str:
        return f"{self.name} of {plain(tensor.dtype)}"

    def needed(self, tensor: Any) -> str:
        return listed([plain(dtype) for dtype in self.dtypes])

    def rule(self) -> str:
        return listed([plain(dtype) for dtype in self.dtypes])

    def fix_of(self, tensor: Any) -> str:
        return f"convert {self.name} to {self.needed(tensor)}"

    def values(self, tensor: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        for dtype in FLOATING if tensor.dtype in FLOATING else MASKS:
            yield f"{self.name} {plain(dtype)}", tensor.replace(dtype=dtype)

    def examples(self, args: Arguments) -> Mapping[str, Any]:
        spec: TensorSpec | None = args[self.name]
        if spec is None:
            return {}
        return {f"{self.name} {plain(dtype)}": spec.replace(dtype=dtype) for dtype in self.dtypes}


class _Strided(DType):
    """A tensor of some dtypes that is strided: neither sparse nor nested.

    The compiled check does not test for a nested tensor, which takes 0.05 us: an op's check tests its first tensor, and
    reading the shape of another nested tensor raises.
    """

    def expression(self, constants: dict[str, object]) -> str:
        return f"{super().expression(constants)} and {self.name}.layout is {constant(constants, torch.strided)}"

    def reasons(self, args: Arguments) -> list[Reason]:
        tensor = args[self.name]
        if tensor is None:
            return []
        if tensor.is_nested:
            fix = f"pad it, as in {self.name}.to_padded_tensor(0.0)"
            return [Reason(ReasonCode.LAYOUT, f"{self.name} as a nested tensor", "a strided tensor", fix)]
        if tensor.layout is not torch.strided:
            fix = f"convert it, as in {self.name}.to_dense()"
            return [Reason(ReasonCode.LAYOUT, f"{self.name} of layout {tensor.layout}", "a strided tensor", fix)]
        return super().reasons(args)


class Floating(_Strided):
    """A strided tensor of float16, bfloat16, float32 or float64.

    Args:
        name: the tensor argument.
        or_codes: True where int8 and float8_e4m3fn are accepted too, numbers that another argument multiplies.

    >>> from fusedops.constraints import Floating
    >>> Floating("x").describe()
    'x: float16, bfloat16, float32 or float64'
    """

    def __init__(self, name: str, or_codes: bool = False) -> None:
        super().__init__(name, *FLOATING, *(CODES if or_codes else ()))

    def fix_of(self, tensor: Any) -> str:
        return f"convert it, as in {self.name}.float()"


class Between(Floating):
    """A strided floating tensor whose numbers are usually between two bounds, such as logarithms up to 0.

    No constraint reads the numbers, and kernels get any. The calls of the conformance kit keep to the bounds.

    Args:
        name: the tensor argument.
        low: the lower bound. None: there is none, and -inf is among the numbers.
        high: the upper bound.

    >>> from fusedops.constraints import Between
    >>> Between("decay", None, 0.0).describe()
    'decay: float16, bfloat16, float32 or float64'
    """

    def __init__(self, name: str, low: float | None, high: float) -> None:
        super().__init__(name)
        lower = -sys.float_info.max if low is None else low
        if type(lower) is not float or type(high) is not float or not -math.inf < lower < high < math.inf:
            raise ValueError(
                f"Between({name!r}): got {low!r} and {high!r}, expected finite floats, the lower one first, which may "
                f"be None; to fix: write 0.0, 1.0"
            )
        self.low = low
        self.high = high


class Bytes(_Strided):
    """A strided tensor of uint8, such as a packed weight.

    >>> from fusedops.constraints import Bytes
    >>> Bytes("packed").describe()
    'packed: uint8'
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, torch.uint8)

    def fix_of(self, tensor: Any) -> str:
        return f"view the bytes of {self.name}, as in {self.name}.view(torch.uint8)"


class Int8(_Strided):
    """A strided tensor of int8, such as a weight that is rounded to 8 bits.

    Args:
        name: the tensor argument.
        or_floating: True where floating numbers are accepted too, which the op rounds.

    >>> from fusedops.constraints import Int8
    >>> Int8("weight").describe(), Int8("x", or_floating=True).describe()
    ('weight: int8', 'x: float16, bfloat16, float32, float64 or int8')
    """

    def __init__(self, name: str, or_floating: bool = False) -> None:
        super().__init__(name, *(FLOATING if or_floating else ()), torch.int8)

    def fix_of(self, tensor: Any) -> str:
        if len(self.dtypes) > 1:
            return f"convert it, as in {self.name}.float()"
        return f"round it to 8 bits, as in fusedops.quantization.quantize_rows({self.name}.float())"


class Integers(_Strided):
    """A strided tensor of int64, such as a seed for each row. No constraint reads the numbers.

    >>> from fusedops.constraints import Integers
    >>> Integers("seed").describe()
    'seed: int64'
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, torch.int64)


class Mask(_Strided):
    """A strided tensor of bool or uint8, where True or non-zero means masked out.

    >>> import fusedops, torch
    >>> from fusedops.constraints import Mask
    >>> print(Mask("mask").reasons({"mask": fusedops.TensorSpec((4, 4))})[0])
    got mask of float32, expected bool or uint8; to fix: for an additive mask pass mask < 0: True means masked out
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, *MASKS)

    def fix_of(self, tensor: Any) -> str:
        if tensor.dtype.is_floating_point:
            return f"for an additive mask pass {self.name} < 0: True means masked out"
        return f"pass {self.name} != 0: True means masked out"


class Classes(_Strided):
    """A strided tensor of integers, each the index of a class, such as the target of a loss.

    No constraint reads the indices. The conformance kit makes indices of the classes of ``of``.

    Args:
        name: the tensor argument.
        of: the tensor that has the classes. None: the op's first one.
        dim: the dim of that tensor whose size is the number of classes.
        ignored: the parameter with the index that marks ignored rows, or None.
        integers: True where int32 is accepted beside int64.
        sentinels: True where an index that is no class is accepted, and selects nothing.

    >>> from fusedops.constraints import Classes
    >>> Classes("target").describe()
    'target: int64'
    """

    def __init__(
        self,
        name: str,
        of: str | None = None,
        dim: int = -1,
        ignored: str | None = None,
        integers: bool = False,
        sentinels: bool = False,
    ) -> None:
        super().__init__(name, torch.int64, *([torch.int32] if integers else []))
        self.sentinels = sentinels
        self.of = of
        self.dim = dim
        self.ignored = ignored

    def fix_of(self, tensor: Any) -> str:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            return f"pass the index of each class, as in {self.name}.argmax(-1)"
        return f"convert it, as in {self.name}.long()"


class Offsets(_Strided):
    """A strided tensor of non-decreasing integers, each the end of a group of rows: a cumulative sum of counts.

    No constraint reads the ends. The conformance kit makes ends of groups of the rows of ``of``.

    Args:
        name: the tensor argument.
        of: the tensor that has the rows. None: the op's first one.
        dim: the dim of the rows in that tensor, whose size no end exceeds.
        bounds: True where the start of the first group comes before the ends, as in cu_seqlens of packed sequences.

    >>> from fusedops.constraints import Offsets
    >>> Offsets("offsets").describe()
    'offsets: int32 or int64'
    """

    def __init__(self, name: str, of: str | None = None, dim: int = 0, bounds: bool = False) -> None:
        super().__init__(name, torch.int32, torch.int64)
        self.of = of
        self.dim = dim
        self.bounds = bounds

    def fix_of(self, tensor: Any) -> str:
        return f"pass the end of each group of rows, as in counts.cumsum(0), with {self.name}.long()"

    @staticmethod
    def within(offsets: torch.Tensor, rows: int) -> torch.Tensor:
        """Return offsets as int64, made valid for any kernel, without waiting for their device.

        Args:
            offsets: (N,), int32 or int64.
            rows: the number of rows. An offset outside [0, rows] is clamped, and one below the offset before it
                is replaced by that.

        >>> import torch
        >>> from fusedops.constraints import Offsets
        >>> Offsets.within(torch.tensor([-1, 3, 2, 9]), 5)
        tensor([0, 3, 3, 5])
        """
        return offsets.long().clamp(0, rows).cummax(0).values


class Lengths(_Strided):
    """A strided tensor of integers, each a number of rows from 0 to the product of some sizes.

    No constraint reads the numbers.

    Args:
        name: the tensor argument.
        sizes: tensors, and the dim of each whose size is a factor of the largest number.

    >>> from fusedops.constraints import Lengths
    >>> Lengths("seqused_k", ("block_table", 1), ("k", 1)).describe()
    'seqused_k: int32 or int64'
    """

    def __init__(self, name: str, *sizes: tuple[str, int]) -> None:
        super().__init__(name, torch.int32, torch.int64)
        self.sizes = sizes

    def fix_of(self, tensor: Any) -> str:
        return f"pass the length of each sequence, as in {self.name}.long()"


class Slots(_Strided):
    """A strided tensor of int64, the place of each token in pages: page * size + offset, or -1 for none.

    No constraint reads the numbers. The conformance kit makes places of which none is there twice.

    Args:
        name: the tensor argument.
        of: the tensor of the pages, (pages, size, ...).

    >>> from fusedops.constraints import Slots
    >>> Slots("slots", "k_cache").describe()
    'slots: int64'
    """

    def __init__(self, name: str, of: str) -> None:
        super().__init__(name, torch.int64)
        self.of = of

    def fix_of(self, tensor: Any) -> str:
        return f"pass the place of each token, page * size + offset, as in {self.name}.long()"


class Indices(_Strided):
    """A strided tensor of integers, the places of rows in a tensor, each at most once in a row, and -1 for none.

    No constraint reads the numbers. The conformance kit makes places in any order.

    Args:
        name: the tensor argument.
        of: the tensor that has the rows.
        dim: the dim of the rows in that tensor.

    >>> from fusedops.constraints import Indices
    >>> Indices("indices", "k", 2).describe()
    'indices: int32 or int64'
    """

    def __init__(self, name: str, of: str, dim: int) -> None:
        super().__init__(name, torch.int32, torch.int64)
        self.of, self.dim = of, dim

    def fix_of(self, tensor: Any) -> str:
        return f"pass the place of each row, as in {self.name}.long()"


class LogSums(_Strided):
    """A strided tensor of float32 or float64, each the logarithm of a sum of exponentials: -inf for an empty sum.

    No constraint reads the numbers. The calls of the conformance kit have some that are -inf.

    >>> from fusedops.constraints import LogSums
    >>> LogSums("lse").describe()
    'lse: float32 or float64'
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, torch.float32, torch.float64)

    def fix_of(self, tensor: Any) -> str:
        return f"pass {self.name} as attention returns it; in 16 bits it has lost what the weights depend on"


class OneElement(_Strided):
    """A strided tensor of one element, whose dtype is one of ``dtypes``, such as a seed.

    >>> import torch
    >>> from fusedops.constraints import OneElement
    >>> OneElement("seed", torch.int64).describe()
    'seed: int64, one element'
    """

    def expression(self, constants: dict[str, object]) -> str:
        return f"{super().expression(constants)} and {self.name}.numel() == 1"

    def reasons(self, args: Arguments) -> list[Reason]:
        reasons, tensor = super().reasons(args), args[self.name]
        if reasons or tensor is None or tensor.numel() == 1:
            return reasons
        given = f"{self.name} of {tensor.numel()} elements"
        return [Reason(ReasonCode.SIZE, given, "one element", f"pass one element, as in {self.name}[:1]")]

    def rule(self) -> str:
        return f"{super().rule()}, one element"

    def examples(self, args: Arguments) -> Mapping[str, Any]:
        spec: TensorSpec | None = args[self.name]
        if spec is None:
            return {}
        return {f"{self.name} {shape}": spec.replace(shape=shape) for shape in ((), (1,), (1, 1))}
