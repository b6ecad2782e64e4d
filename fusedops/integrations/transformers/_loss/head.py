"""The head of a language model, a torch.nn.Linear or a subclass without a forward: in training it defers its logits."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Linear, Module

from fusedops._torch import TENSOR_TYPES, autocasts, is_plain, is_traced, is_transformed
from fusedops.errors import FusedOpsWarning
from fusedops.integrations._replacement import Replacement, own_class, replacement_of
from fusedops.integrations._trial.twin import called, is_replaced_elsewhere
from fusedops.integrations.transformers._loss.deferred_logits import deferred_logits
from fusedops.integrations.transformers._loss.losses import Loss, loss_of, recognised_loss

_AUTOCAST = (torch.float16, torch.bfloat16, torch.float32)  # the dtypes that autocast casts


@dataclass(frozen=True)
class Head(Replacement):
    """The settings of a head whose logits are deferred in training."""

    op: str = "linear_cross_entropy"
    when: str = "training"

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the logits, not made in a training step."""
        own = own_class(module).forward
        if not module.training or not torch.is_grad_enabled() or len(args) + len(kwargs) != 1:
            return own(module, *args, **kwargs)
        (x,) = (*args, *kwargs.values())
        weight, bias = module.weight, module.bias
        reason = _reason(x, weight, bias)
        if reason is None:
            return deferred_logits(x, weight, bias) if _is_product(x, weight) else own(module, *args, **kwargs)
        warnings.warn(
            f"fused_loss: got {reason}, expected plain tensors outside of torch.compile; the logits are made; to fix: "
            "leave fused_loss out of apply",
            FusedOpsWarning,
            stacklevel=2,
        )
        return own(module, x)


def _reason(x: Any, weight: Any, bias: Any) -> str | None:
    """Return why the logits of a training step have to be made, or None."""
    if is_traced():
        return "a head that torch.compile traces"
    if is_transformed():
        return "a head under a transform of torch.func"
    tensors = [each for each in (x, weight, bias) if each is not None]
    kinds: set[type[Any]] = {type(each) for each in tensors}
    if not kinds <= TENSOR_TYPES:
        if not all(getattr(each, "has_no_numbers", False) for each in tensors):  # all are, in a plan
            return f"a head with tensors of {', '.join(sorted(kind.__name__ for kind in kinds))}"
    elif not is_plain(tensors):
        return "a head that a torch dispatch mode or a meta device computes"
    dtypes = {each.dtype for each in tensors}
    wanted = _AUTOCAST if autocasts(x.device.type) else (*_AUTOCAST, torch.float64)
    if not dtypes.issubset(wanted) or (len(dtypes) > 1 and not autocasts(x.device.type)):
        return f"a head with tensors of {', '.join(sorted(map(str, dtypes)))}"
    return None


def _is_product(x: Tensor, weight: Tensor) -> bool:
    """Return True where the head's product has elements. An error of the call is torch's."""
    return (
        x.dim() > 0 and x.shape[-1] == weight.shape[1] and x.device == weight.device and x.numel() * weight.numel() > 0
    )


def heads_of(model: Module) -> dict[Module, str | None]:
    """Return the output embeddings of the models in a module, each with the reason why its loss is not fused, or None.

    >>> heads_of(torch.nn.Linear(2, 2))
    {}
    """
    heads: dict[Module, str | None] = {}
    for module in model.modules():
        get = getattr(module, "get_output_embeddings", None)
        head = called(get) if callable(get) else None
        if isinstance(head, Module):
            heads.setdefault(head, _reason_of_loss(module))
    return heads


def _reason_of_loss(module: Any) -> str | None:
    forward = inspect.unwrap(cast("Any", type(module)).forward)
    if {"CrossEntropyLoss", "cross_entropy"} & {*forward.__code__.co_names}:
        return None
    loss = loss_of(module) or recognised_loss(module)
    if isinstance(loss, Loss):
        return None
    return loss or "its forward takes no labels: the loss is computed elsewhere"


def has_fused_loss(head: Module) -> bool:
    """Return True for a head whose logits are deferred in training."""
    return isinstance(replacement_of(head), Head)


def recognised_head(head: Module, reason: str | None) -> Head | str:
    """Return the replacement of a head, or the reason why it is left.

    >>> recognised_head(torch.nn.Linear(2, 2), None)
    Head(op='linear_cross_entropy', when='training')
    """
    if reason is not None:
        return reason
    if is_replaced_elsewhere(head):
        return "another library has replaced its forward"
    if any(True for _ in head.children()):
        return "the head has layers of its own, such as an adapter's; to fix: leave the head out of the adapter"
    parameters = dict(head.named_parameters(recurse=False))
    weight = parameters.get("weight")
    if not parameters.keys() <= {"weight", "bias"} or weight is None or weight.dim() != 2:
        return "the head has no weight of two dims, such as a quantized one; to fix: leave the head out of quantization"
    if not weight.is_floating_point():
        return "the head's weight is quantized; to fix: leave the head out of quantization"
    if not isinstance(head, Linear) or own_class(head).forward is not Linear.forward:
        return "its class has a forward of its own"
    return Head()
