"""The module of the loss, with the arguments of torch's."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from fusedops import ops
from fusedops.nn._repr import backend_repr


class CrossEntropyLoss(Module):
    """The module of :func:`fusedops.cross_entropy`, with the arguments of ``torch.nn.CrossEntropyLoss`` but ``weight``.

    The classes are the last dim of the input; torch has them in dim 1.

    Args:
        ignore_index: rows with this target have loss 0 and gradient 0.
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
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
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
