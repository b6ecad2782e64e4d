"""Constraints as data. One declaration gives five things.

From ``Dim("x", (-2, -1), at_least=32, at_most=4096, multiple_of=32)`` come

1. a compiled check for each call (:func:`compile_check`), built once, as dataclasses build their methods;
2. the reasons of a refusal: the value, the rule and the fix (:meth:`Constraint.reasons`);
3. the row of the support table (:meth:`Constraint.describe`);
4. boundary cases for tests (:meth:`Constraint.boundaries`);
5. JSON for other tools (:meth:`Constraint.to_dict`).

Constraints are about shapes, dtypes, device capability, numbers and presence; never about strides (a launcher handles
those), never about data. The same classes state what an op accepts and what a kernel accepts. None meets a
constraint on an argument; :class:`Present` requires the argument.

>>> import fusedops
>>> from fusedops.constraints import Dim
>>> x = fusedops.TensorSpec((8, 16, 500, 500))
>>> print(Dim("x", (-1,), multiple_of=32).reasons({"x": x})[0])
got dim -1 of x = 500, expected a multiple of 32; to fix: pad dim -1 of x from 500 to 512
"""

from fusedops._contract.constraint import Arguments as Arguments
from fusedops._contract.constraint import Boundary as Boundary
from fusedops._contract.constraint import Constraint as Constraint
from fusedops._contract.constraint import compile_check as compile_check
from fusedops._contract.constraint import constant as constant
from fusedops._contract.constraint import listed as listed
from fusedops._report.reason import Reason as Reason
from fusedops._report.reason import ReasonCode as ReasonCode
from fusedops.constraints.attention import Alignment as Alignment
from fusedops.constraints.attention import IndicesOfKeys as IndicesOfKeys
from fusedops.constraints.attention import ScoreMask as ScoreMask
from fusedops.constraints.attention import Window as Window
from fusedops.constraints.conditions import Capability as Capability
from fusedops.constraints.conditions import Present as Present
from fusedops.constraints.conditions import When as When
from fusedops.constraints.counts import Divisor as Divisor
from fusedops.constraints.dims import CacheScale as CacheScale
from fusedops.constraints.dims import DimMultiple as DimMultiple
from fusedops.constraints.dims import LastDims as LastDims
from fusedops.constraints.dims import LeadingDims as LeadingDims
from fusedops.constraints.dims import NotLarger as NotLarger
from fusedops.constraints.dims import Packed as Packed
from fusedops.constraints.dims import SameDims as SameDims
from fusedops.constraints.dims import SameSize as SameSize
from fusedops.constraints.dtypes import Between as Between
from fusedops.constraints.dtypes import Bytes as Bytes
from fusedops.constraints.dtypes import Classes as Classes
from fusedops.constraints.dtypes import DType as DType
from fusedops.constraints.dtypes import Floating as Floating
from fusedops.constraints.dtypes import Indices as Indices
from fusedops.constraints.dtypes import Int8 as Int8
from fusedops.constraints.dtypes import Integers as Integers
from fusedops.constraints.dtypes import Lengths as Lengths
from fusedops.constraints.dtypes import LogSums as LogSums
from fusedops.constraints.dtypes import Mask as Mask
from fusedops.constraints.dtypes import Offsets as Offsets
from fusedops.constraints.dtypes import OneElement as OneElement
from fusedops.constraints.dtypes import Slots as Slots
from fusedops.constraints.quantized import PackedPart as PackedPart
from fusedops.constraints.quantized import PackedRows as PackedRows
from fusedops.constraints.quantized import ScaleGroups as ScaleGroups
from fusedops.constraints.relations import Beside as Beside
from fusedops.constraints.relations import Broadcasts as Broadcasts
from fusedops.constraints.relations import SameDevice as SameDevice
from fusedops.constraints.relations import SameDType as SameDType
from fusedops.constraints.relations import SameShape as SameShape
from fusedops.constraints.relations import broadcasts as broadcasts
from fusedops.constraints.tensors import Dim as Dim
from fusedops.constraints.tensors import Rank as Rank
from fusedops.constraints.tensors import TensorConstraint as TensorConstraint
from fusedops.constraints.values import Count as Count
from fusedops.constraints.values import Finite as Finite
from fusedops.constraints.values import Flag as Flag
from fusedops.constraints.values import Integer as Integer
from fusedops.constraints.values import OneOf as OneOf
from fusedops.constraints.values import Probability as Probability
from fusedops.constraints.values import Scalar as Scalar
from fusedops.constraints.values import Value as Value

__all__ = [
    "Alignment",
    "Arguments",
    "Beside",
    "Boundary",
    "Broadcasts",
    "Between",
    "Bytes",
    "Capability",
    "Classes",
    "Constraint",
    "Count",
    "DType",
    "Dim",
    "DimMultiple",
    "Divisor",
    "Finite",
    "Flag",
    "Floating",
    "Integer",
    "LastDims",
    "LeadingDims",
    "Lengths",
    "LogSums",
    "Mask",
    "NotLarger",
    "Offsets",
    "OneElement",
    "OneOf",
    "Packed",
    "PackedRows",
    "Present",
    "Probability",
    "Rank",
    "Reason",
    "ReasonCode",
    "SameDType",
    "SameDevice",
    "SameDims",
    "SameShape",
    "SameSize",
    "Scalar",
    "ScoreMask",
    "TensorConstraint",
    "Value",
    "When",
    "Window",
    "broadcasts",
    "compile_check",
    "constant",
    "listed",
]
