"""The losses as modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter, init

from fusedops import ops
from fusedops.errors import InvalidInputError
from fusedops.nn._repr import backend_repr

# arguments of torch's classes that are accepted where they are None, and what to do where they are not
_INSTEAD = {
    "weight": "multiply the losses of reduction='none' by weight[target]",
    "size_average": "pass reduction",
    "reduce": "pass reduction",
    "out_features": "call a loss for each of its places",
    "options": "pass chunk",
}


def _refuse_given(module: str, **values: Any) -> None:
    """Raise InvalidInputError for an argument of torch's class that is not None."""
    for name, value in values.items():
        if value is not None:
            text = f"{module}: got {name} of {type(value).__name__}, expected None; to fix: {_INSTEAD[name]}"
            raise InvalidInputError(text)


class CrossEntropyLoss(Module):
    """The module of :func:`fusedops.cross_entropy`, with the arguments of ``torch.nn.CrossEntropyLoss``.

    The classes are the last dim of the input; torch has them in dim 1.

    Args:
        weight: None. torch's weights of the classes are not supported.
        size_average: None; use ``reduction``.
        ignore_index: rows with this target have loss 0 and gradient 0.
        reduce: None; use ``reduction``.
        reduction: "mean", "sum" or "none".
        label_smoothing: in [0, 1], as in torch.
        z_loss: at least 0, the weight of the square of the log-sum-exp.
        softcap: a positive number: logits are capped by ``softcap * tanh(logits / softcap)`` first; or None.
        backend: a policy for this module alone, such as "triton" or "npu,eager". None: the policy in effect.

    >>> import fusedops
    >>> fusedops.nn.CrossEntropyLoss(label_smoothing=0.1)
    CrossEntropyLoss(ignore_index=-100, reduction='mean', label_smoothing=0.1, z_loss=0.0, softcap=None)
    """

    def __init__(
        self,
        weight: None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        _refuse_given("CrossEntropyLoss", weight=weight, size_average=size_average, reduce=reduce)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.softcap = softcap
        self.backend = backend

    def forward(self, input: Tensor, target: Tensor, denominator: float | Tensor | None = None) -> Tensor:
        """Return the loss.

        Args:
            input: (..., V), the logits, float16, bfloat16, float32 or float64.
            target: (...), int64, in [0, V) or ``ignore_index``.
            denominator: what "mean" divides by: a number, or a tensor of one element. None: the number of targets that
                are not ignored, at least 1.

        Returns:
            () for "mean" and "sum", (...) for "none"; float32, or float64 for float64.

        Raises:
            InvalidInputError: an argument or a setting is not as above.
            NoBackendError: the policy forbids a fallback and its backend does not take the call.
        """
        return ops.cross_entropy(
            input,
            target,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            reduction=self.reduction,
            denominator=denominator,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        """Return the settings."""
        settings = f"ignore_index={self.ignore_index}, reduction={self.reduction!r}"
        settings += f", label_smoothing={self.label_smoothing}, z_loss={self.z_loss}, softcap={self.softcap}"
        return f"{settings}{backend_repr(self.backend)}"


class LinearCrossEntropyLoss(Module):
    """The module of :func:`fusedops.linear_cross_entropy`: the last layer of a language model with its loss.

    The parameters are those of ``torch.nn.Linear(size, classes)``, with the same names and initial values: its state
    dict loads. To share the weight of an embedding, assign ``module.weight = embedding.weight``.

    Args:
        in_features: H, the size of the last dimension of ``x``.
        num_classes: V.
        bias: True has a bias.
        ignore_index: rows with this target have loss 0; None: -100.
        label_smoothing: in [0, 1].
        z_loss: adds ``z_loss * logsumexp(logits)**2`` to each row.
        softcap: c > 0 replaces the logits by ``c * tanh(logits / c)``, or None.
        reduction: "mean", "sum" or "none".
        chunk: rows of a chunk, or None.
        device: of weight and bias.
        dtype: of weight and bias.
        weight: None. torch's weights of the classes are not supported.
        out_features: (). torch's losses of several dims are not supported.
        options: None; use ``chunk``.
        backend: a policy for this module alone, such as "triton" or "npu,eager". None: the policy in effect.

    >>> import torch, fusedops
    >>> loss = fusedops.nn.LinearCrossEntropyLoss(3, 4)
    >>> loss(torch.zeros(2, 3), torch.tensor([0, 3])), loss
    (tensor(1.3863, grad_fn=...), LinearCrossEntropyLoss(3, 4))
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        reduction: str = "mean",
        chunk: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weight: None = None,
        out_features: tuple[int, ...] = (),
        options: None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        _refuse_given("LinearCrossEntropyLoss", weight=weight, out_features=out_features or None, options=options)
        self.size = in_features
        self.classes = num_classes
        self.backend = backend
        self.ignore_index = -100 if ignore_index is None else ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.softcap = softcap
        self.reduction = reduction
        self.chunk = chunk
        factory: Any = {"device": device, "dtype": dtype}
        self.weight = Parameter(torch.empty((num_classes, in_features), **factory))
        self.bias: Parameter | None = Parameter(torch.empty(num_classes, **factory)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias as ``torch.nn.Linear`` does: uniform within 1 / sqrt(H)."""
        bound = self.size**-0.5 if self.size else 0.0
        init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, target: Tensor, denominator: float | Tensor | None = None) -> Tensor:
        """Return the loss.

        Args:
            x: (..., H), float16, bfloat16, float32 or float64.
            target: (...), int64.
            denominator: what "mean" divides by, a number or a tensor of one element; None: the rows that count.

        Returns:
            (), or (...) for reduction="none"; float32, or float64 for float64.

        Raises:
            InvalidInputError: an argument or a setting is not as above, or on a CPU a target is out of range.
            NoBackendError: the policy forbids a fallback and its backend does not take the call.
        """
        return ops.linear_cross_entropy(
            x,
            self.weight,
            target,
            self.bias,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            reduction=self.reduction,
            denominator=denominator,
            chunk=self.chunk,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        """Return the settings that are not the default."""
        defaults = {
            "ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "reduction": "mean",
            "chunk": None,
        }  # fmt: skip
        settings = [
            f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value
        ]
        bias = ["bias=True"] if self.bias is not None else []
        return ", ".join([str(self.size), str(self.classes), *bias, *settings]) + backend_repr(self.backend)
