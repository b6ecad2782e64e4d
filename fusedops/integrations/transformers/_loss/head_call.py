"""A call of a head in a training step, from whose tensors the loss or the logits are computed later."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusedops.errors import InvalidInputError

FIX = "use the loss alone, or evaluate with model.eval(), or leave fused_loss out of apply"


@dataclass(eq=False)
class HeadCall:
    """A call of a head, a linear layer, with its tensors.

    Attributes:
        x: (..., H), its input.
        weight: (V, H).
        bias: (V,), or None.
        autocast: the dtype of autocast, or None.
        kept: the tensors from which logits are made, each with its version and the address of its memory.
        requires_grad: of the logits.
        watched: True where the gradient of the logits is asked for.
        warned: True where the logits were made.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    autocast: torch.dtype | None
    kept: list[tuple[Tensor, int, int]] = field(default_factory=list[Any])
    requires_grad: bool = False
    watched: bool = False
    warned: bool = False

    def __post_init__(self) -> None:
        """Keep the versions of the head's tensors."""
        for each in (self.x, self.weight, self.bias):
            if each is not None:
                self.keep(each)
                self.requires_grad |= each.requires_grad

    def keep(self, tensor: Tensor) -> None:
        """Keep the version of a tensor from which logits are made."""
        self.kept.append((tensor, tensor._version, tensor.data_ptr()))

    def check(self) -> None:
        """Raise InvalidInputError where a tensor has other numbers than in the call."""
        if any(each._version != version or each.data_ptr() != address for each, version, address in self.kept):
            raise InvalidInputError(
                "fused_loss: got a use of a training step's logits after a change of the head's weight or input, "
                f"expected one before it, since they are made from these on their first use; to fix: {FIX}"
            )

    def operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return x, weight and bias in the dtype of the logits."""
        if self.autocast is None:
            return self.x, self.weight, self.bias
        bias = None if self.bias is None else self.bias.to(self.autocast)
        return self.x.to(self.autocast), self.weight.to(self.autocast), bias

    def logits(self) -> Tensor:
        """Compute the numbers of the logits."""
        self.check()
        return torch.nn.functional.linear(*self.operands()).contiguous()
