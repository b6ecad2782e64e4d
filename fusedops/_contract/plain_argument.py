"""PlainTensor, PlainFloat: the conditions under which a kernel may be called directly with an argument."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusedops._contract.constraint import Arguments, Constraint, is_tensor
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._report.reason import Reason, ReasonCode
from fusedops._torch import TENSOR_TYPES

OPTIONAL_TYPES = TENSOR_TYPES | {type(None)}


class PlainTensor(Constraint):
    """The argument is a plain torch.Tensor: not a subclass (fake tensor, DTensor), nor anything else.

    Args:
        name: the argument.
        required: False where it may be None.
        check_nested: True if the check refuses a nested tensor.
        implied_by: tensors whose presence makes that test, of 0.05 us, redundant: a constraint on them reads this
            tensor's shape, which raises for a nested one.
    """

    code = ReasonCode.TYPE
    none_is_met = False

    def __init__(self, name: str, required: bool, check_nested: bool = False, implied_by: Sequence[str] = ()) -> None:
        super().__init__(name)
        self.required = required
        self.check_nested = check_nested
        self.implied_by = tuple(implied_by)

    def expression(self, constants: dict[str, object]) -> str:
        constants["tensor_types"] = TENSOR_TYPES
        is_none = "" if self.required else f"{self.name} is None or "
        present = "".join(f"{name} is not None or " for name in self.implied_by)
        return f"{is_none}type({self.name}) in tensor_types" + (
            f" and ({present}not {self.name}.is_nested)" if self.check_nested else ""
        )

    def reasons(self, args: Arguments) -> list[Reason]:
        """Return why the argument is not a tensor. A subclass or a spec has no reason: it is served in another way."""
        value = args[self.name]
        if is_tensor(value) or (value is None and not self.required):
            return []
        given = f"{self.name} = None" if value is None else f"{self.name} of type {type(value).__name__}"
        needed = "a torch.Tensor" if self.required else "a torch.Tensor or None"
        fix = f"pass {self.name}" if value is None else "convert it with torch.as_tensor"
        return [Reason(self.code, given, needed, fix)]

    def describe(self) -> str:
        return f"{self.name}: a tensor{'' if self.required else ' or None'}"


class AnyTensor(PlainTensor):
    """The argument is a tensor of any kind, such as a fake one or a DTensor, or a TensorSpec.

    Args:
        name: the argument.
        required: False where it may be None.
    """

    def expression(self, constants: dict[str, object]) -> str:
        constants["any_tensor"] = (Tensor, TensorSpec)
        is_none = "" if self.required else f"{self.name} is None or "
        return f"{is_none}isinstance({self.name}, any_tensor) and not getattr({self.name}, 'is_nested', False)"


class PlainFloat(Constraint):
    """The argument of a float parameter is not an int. It has no reasons: an int is converted."""

    none_is_met = False

    def expression(self, constants: dict[str, object]) -> str:
        return f"type({self.name}) is not int"

    def reasons(self, args: Arguments) -> list[Reason]:
        """Return no reason: an integer is valid."""
        return []

    def describe(self) -> str:
        return f"{self.name}: a number that is no integer"


def conditions(
    parameters: Sequence[str],
    float_indices: Sequence[int],
    tensors: Sequence[str],
    required: Sequence[str],
    constraints: Sequence[Constraint],
) -> tuple[Constraint, ...]:
    """Return the conditions on an op's tensors, then its constraints, then the conditions on its floats."""
    first = tensors[0]
    compared = [item.name for item in constraints if item.reads_shapes and first in item.names and item.name != first]
    plain = [PlainTensor(name, name in required, name == first, compared) for name in tensors]
    return (*plain, *constraints, *(PlainFloat(parameters[index]) for index in float_indices))
