"""The loss of language models, a function of transformers with the results of ForCausalLMLoss or ForMaskedLMLoss."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module

from fusedops import ops
from fusedops.integrations._trial.source import home_of
from fusedops.integrations._trial.twin import called, near, numbers
from fusedops.integrations.transformers._loss.deferred_logits import DeferredLogits, fused_loss

_ATTRIBUTE = "_loss_function"  # of a model, behind its property loss_function
_TOLERANCE = 1e-5


class Loss:
    """The loss function of a model: :func:`fusedops.cross_entropy` of the logits, which are not copied to float32.

    Args:
        shifts: the logits of a token are those of the next one, as in causal models.
        before: what the model had in this place, or None.

    >>> Loss(True)(torch.zeros(1, 3, 4), torch.tensor([[1, 2, 3]]), 4)
    tensor(1.3863)
    """

    op = "cross_entropy"

    def __init__(self, shifts: bool, before: Callable[..., Any] | None = None) -> None:
        self.shifts = shifts
        self.before = before

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: int | Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the mean over the labels that are not ignored, or the sum divided by ``num_items_in_batch``."""
        target = cast("Tensor", labels)
        if self.shifts:
            padded = target if shift_labels is not None else torch.nn.functional.pad(target, (0, 1), value=ignore_index)
            target = shift_labels if shift_labels is not None else padded[..., 1:]
        count = num_items_in_batch
        if isinstance(count, Tensor):
            count = count.to(logits.device, torch.float32)  # trainers count in integers
        rows, target = logits.reshape(-1, vocab_size), target.reshape(-1).to(logits.device)
        options: dict[str, Any] = {"ignore_index": ignore_index, "denominator": count}

        def made(rows: Tensor, target: Tensor) -> Tensor:
            rows = rows.plain("the loss") if isinstance(rows, DeferredLogits) else rows
            return ops.cross_entropy(rows, target, **options)

        loss = fused_loss(rows, target, made, **options) if isinstance(rows, DeferredLogits) else None
        loss = (made(rows, target) if loss is None else loss).float()
        return loss if not isinstance(count, Tensor) or count.dim() == 0 else loss.reshape(count.shape)


def recognised_loss(module: Any) -> Loss | str | None:
    """Return the replacement of a model's loss function, the reason why it is left, or None for a module without one.

    >>> recognised_loss(torch.nn.Linear(2, 2))
    """
    cls = cast("Any", type(module))
    if not hasattr(cls, "loss_function"):
        return None
    forward = inspect.unwrap(cls.forward)
    if "labels" not in inspect.signature(forward).parameters:
        return None
    if "loss_function" not in forward.__code__.co_names:
        return "its forward computes its loss itself"
    function = module.loss_function
    home = _other_home(function)
    if home is not None:
        return f"its loss calls {home}'s function"
    for shifts in (True, False):
        if _has_values_of(Loss(shifts), function):
            return Loss(shifts, module.__dict__.get(_ATTRIBUTE))
    return "its loss is not that of causal or masked language models"


def loss_of(module: Module) -> Loss | None:
    """Return the replacement of a model's loss function, or None."""
    loss = module.__dict__.get(_ATTRIBUTE)
    return loss if isinstance(loss, Loss) else None


def replace_loss(module: Any, loss: Loss) -> None:
    """Set the loss function of a model."""
    module.loss_function = loss


def restore_loss(module: Any) -> None:
    """Give a model the loss function that it had."""
    loss = loss_of(module)
    if loss is not None and loss.before is None:
        del module.__dict__[_ATTRIBUTE]
    elif loss is not None:
        module.loss_function = loss.before


def _other_home(function: Any) -> str | None:
    """Return whose a loss function is, or a function that it calls, where that is not transformers or torch."""
    if not isinstance(function, FunctionType):
        return home_of(function)
    called = [function.__globals__.get(name) for name in function.__code__.co_names]
    functions = [function, torch.nn.functional.cross_entropy, *called]
    homes = [home_of(each) for each in functions if isinstance(each, FunctionType)]
    return next((home for home in homes if not home.startswith(("transformers.", "torch."))), None)


def _has_values_of(loss: Loss, function: Callable[..., Any]) -> bool:
    logits, labels = numbers(1, 2, 5, 11) * 3, torch.tensor([[1, 4, -100, 7, 10], [0, -100, -100, 3, 2]], device="cpu")
    options: list[dict[str, Any]] = [
        {},
        {"num_items_in_batch": 9},
        {"num_items_in_batch": torch.tensor(9, device="cpu")},
        {"ignore_index": 3},
    ]
    if loss.shifts:
        options.append({"shift_labels": labels.roll(1, 1)})
    for dtype in (torch.float32, torch.bfloat16):
        rows = logits.to(dtype)
        for option in options:
            target = labels.clamp(min=0) if "ignore_index" in option else labels
            result = called(function, logits=rows.clone(), labels=target.clone(), vocab_size=11, **option)
            if not near(result, _expected(loss, rows, target, option), _TOLERANCE):
                return False
    return True


def _expected(loss: Loss, logits: Tensor, labels: Tensor, option: dict[str, Any]) -> Tensor:
    """Compute the loss by the reference of the op."""
    ignored = option.get("ignore_index", -100)
    target = labels
    if loss.shifts:
        last = torch.full_like(labels[:, :1], ignored)
        target = option.get("shift_labels", torch.cat((labels[:, 1:], last), 1))
    count = option.get("num_items_in_batch")
    denominator = None if count is None else torch.tensor([float(count)], dtype=torch.float32, device="cpu")
    rows = logits.reshape(-1, logits.shape[-1])
    args = (rows, target.reshape(-1), ignored, 0.0, 0.0, None, "mean", denominator)
    return ops.OPS["cross_entropy"].reference(*args).float()
