"""Indexers of models (DeepSeek-V3.2's, GLM-5's), which choose the keys that each query sees: by select_keys.

An indexer's forward computes the scores of all queries, heads and keys, and takes the best. A replaced one runs a copy
of its forward in which the product of q and k is not computed, but recorded, and so are its relu, the sum over heads
and the mask. The best are then chosen by :func:`fusedops.select_keys`. For anything else that the forward does with
what is recorded, the scores are computed as they were.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Module

from fusedops import ops
from fusedops._torch import is_plain_or_planned, is_traced
from fusedops.integrations._replacement import Replacement, own_body, own_class
from fusedops.integrations._trial.copied import copied, reason_not_to_copy
from fusedops.integrations._trial.twin import is_replaced_elsewhere
from fusedops.integrations.transformers._attention.functions import ATTENTION
from fusedops.integrations.transformers._rotary.modules import Rotary, functions_of

_NAMES = {"matmul", "relu", "topk"}
_B, _S = 2, 9


class _Recorded(NamedTuple):
    """The parts of scores that are not computed.

    Attributes:
        q: (B, S, H, D).
        k: (B, T, D).
        choose: :func:`fusedops.select_keys`.
        scale: of the products.
        relu: True where they are positive parts.
        weights: (B, S, H) of the sum over heads, or None.
        is_row: True where the dim of the sum is gone.
        mask: (B, S, T) or broadcastable, True for a key that is hidden, or None.
    """

    q: Tensor
    k: Tensor
    choose: Callable[..., Tensor]
    scale: float = 1.0
    relu: bool = False
    weights: Tensor | None = None
    is_row: bool = False
    mask: Tensor | None = None


class Scores:
    """Scores that are not computed, as a tensor that takes what indexers do with it."""

    def __init__(self, recorded: _Recorded) -> None:
        self._recorded = recorded

    def computed(self) -> Tensor:
        """Return the scores."""
        r = self._recorded
        scores = torch.matmul(r.q, r.k.mT[:, None]) * r.scale
        scores = torch.relu(scores) if r.relu else scores
        if r.weights is not None:
            scores = torch.matmul(r.weights[..., None, :], scores)
        scores = scores.squeeze(-2) if r.is_row else scores
        return scores if r.mask is None else scores.masked_fill(r.mask, -math.inf)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.computed(), name)

    @property
    def shape(self) -> torch.Size:
        """The shape of the scores."""
        r = self._recorded
        heads = r.q.shape[2:3] if r.weights is None else () if r.is_row else (1,)
        return torch.Size((*r.q.shape[:2], *heads, r.k.shape[1]))

    def __mul__(self, other: Any) -> Any:
        if type(other) is not float or self._recorded.relu:
            return self.computed() * other
        return Scores(self._recorded._replace(scale=self._recorded.scale * other))

    def __add__(self, other: Any) -> Any:
        return self.computed() + other

    def squeeze(self, dim: int) -> Any:
        """Return the scores without the dim of the sum over heads."""
        if self._recorded.weights is None or dim != -2:
            return self.computed().squeeze(dim)
        return Scores(self._recorded._replace(is_row=True))

    def masked_fill(self, mask: Tensor, value: float) -> Any:
        """Return the scores with keys that are hidden."""
        r = self._recorded
        if not r.is_row or value != -math.inf or r.mask is not None or mask.dtype != torch.bool:
            return self.computed().masked_fill(mask, value)
        return Scores(r._replace(mask=mask))

    def topk(self, k: int, dim: int = -1) -> Any:
        """Return the best scores of each row: their indices alone."""
        r = self._recorded
        if not r.is_row or not r.relu or dim != -1 or r.weights is None:
            return self.computed().topk(k, dim)
        return SimpleNamespace(indices=r.choose(r.q, r.k, r.weights, k, scale=r.scale, mask=r.mask))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the relu and the sum over heads; for other functions compute the scores."""
        first: Any = args[0] if args else None
        if func in (torch.relu, torch.nn.functional.relu) and type(first) is Scores and len(args) == 1:
            if first._recorded.weights is None:
                return Scores(first._recorded._replace(relu=True))
        elif func is torch.matmul and len(args) == 2 and type(args[1]) is Scores and is_plain_or_planned(first):
            r = args[1]._recorded
            if r.relu and r.weights is None and first.shape == (*r.q.shape[:2], 1, r.q.shape[2]):
                return Scores(r._replace(weights=cast("Tensor", first)[..., 0, :]))
        options: dict[str, Any] = kwargs or {}
        return func(*_computed(args), **{name: _computed(value) for name, value in options.items()})


def _computed(value: Any) -> Any:
    """Return the tensors in place of scores, also in a list or a tuple."""
    is_list, is_tuple = isinstance(value, list), isinstance(value, tuple)
    if not is_list and not is_tuple:
        return value.computed() if isinstance(value, Scores) else value
    each: list[Any] = [_computed(item) for item in value]
    return each if is_list else tuple(each)


class _Torch:
    """The module torch, whose matmul records the products of q (B, S, H, D) and k (B, 1, D, T).

    Args:
        choose: :func:`fusedops.select_keys`.
        meta: record those on the meta device alone; False: those on any other device.
    """

    def __init__(self, choose: Callable[..., Tensor], meta: bool = False) -> None:
        self._choose, self._meta = choose, meta

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def matmul(self, one: Any, other: Any) -> Any:
        """Return the product, or record it."""
        if not (is_plain_or_planned(one) and is_plain_or_planned(other) and one.dim() == other.dim() == 4):
            return torch.matmul(one, other)
        fits = other.shape[1] == 1 and one.shape[0] == other.shape[0] and one.dtype == other.dtype == torch.float32
        if not fits or (one.device.type == "meta") != self._meta or one.requires_grad or other.requires_grad:
            return torch.matmul(one, other)
        return Scores(_Recorded(one, other[:, 0].mT, self._choose))


@dataclass(frozen=True)
class Indexer(Replacement):
    """The settings of a replaced indexer.

    Attributes:
        original: its class.
        rotary: the replacement of its rotary functions, or None.
    """

    original: type[Module]
    rotary: Rotary | None
    op: str = "select_keys"
    copied: Callable[..., Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "copied", copy_of(self.original, self.rotary, _Torch(ops.select_keys)))

    def __reduce__(self) -> Any:
        return Indexer, (self.original, self.rotary)

    @property
    def ops(self) -> tuple[str, ...]:
        """Return the names of the ops."""
        return (self.op,) if self.rotary is None else (self.op, *self.rotary.ops)

    def among(self, chosen: set[str]) -> Replacement | None:
        """Return the replacement with these ops alone, or None where it has none of them."""
        rotary = None if self.rotary is None else self.rotary.among(chosen)
        return Indexer(self.original, cast("Rotary | None", rotary)) if self.op in chosen else rotary

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the copy of the module's forward, for the attention function that takes -1 for no key."""
        takes_indices = getattr(getattr(module, "config", None), "_attn_implementation", None) == ATTENTION
        if takes_indices and not is_traced():
            return self.copied(module, *args, **kwargs)
        forward = self.original.forward if self.rotary is None else self.rotary.copied
        return forward(module, *args, **kwargs)


def copy_of(original: type[Module], rotary: Rotary | None, recording: _Torch) -> Callable[..., Any]:
    """Return a copy of an indexer's forward that records scores."""
    functions = {} if rotary is None else functions_of(original, rotary.functions)
    return copied(original.forward, {**functions, "torch": cast("Any", recording)})


def recognised_indexer(module: Module, rotary: Callable[[Module], Rotary | str | None]) -> Indexer | None:
    """Return the replacement of an indexer, or None for another module.

    Its forward runs on tensors without numbers, and is replaced where it chooses keys by what is recorded.

    Args:
        module: any module.
        rotary: returns the replacement of a module's rotary functions.

    >>> recognised_indexer(torch.nn.Linear(2, 2), lambda module: None)
    """
    own: Any = own_body(module)
    if not isinstance(own, FunctionType) or not {*own.__code__.co_names} >= _NAMES:
        return None
    hidden, rotated = getattr(module, "hidden_size", None), getattr(module, "qk_rope_head_dim", None)
    if type(hidden) is not int or type(rotated) is not int or own.__globals__.get("torch") is not torch:
        return None
    cls = own_class(module)
    if is_replaced_elsewhere(module) or reason_not_to_copy(cls.forward) is not None:
        return None
    found = rotary(module)
    indexer = Indexer(cls, found if isinstance(found, Rotary) else None)
    latent = getattr(module, "q_lora_rank", hidden)
    return indexer if type(latent) is int and _chooses(module, indexer, hidden, latent, rotated) else None


def _chooses(module: Any, indexer: Indexer, hidden: int, latent: int, rotated: int) -> bool:
    """Return True where a forward chooses keys by what is recorded, and returns that."""
    chosen: list[Tensor] = []

    def choose(q: Tensor, k: Tensor, weights: Tensor, count: int, **options: Any) -> Tensor:
        chosen.append(q.new_empty((*q.shape[:2], count), dtype=torch.int32))
        return chosen[-1]

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device="meta", dtype=dtype)

    values: Mapping[str, Any] = {
        "hidden_states": made(_B, _S, hidden),
        "q_resid": made(_B, _S, latent),
        "position_embeddings": (made(_B, _S, rotated), made(_B, _S, rotated)),
        "attention_mask": made(_B, _S, _S, dtype=torch.bool),
        "position_ids": made(_B, _S, dtype=torch.int64),
    }
    parameters = [name for name in inspect.signature(indexer.original.forward).parameters if name in values]
    forward = copy_of(indexer.original, indexer.rotary, _Torch(choose, meta=True))
    try:
        with torch.no_grad():
            result = forward(_on_meta(module), **{name: values[name] for name in parameters})
    except Exception:  # of any module that was wrapped or changed: it keeps its forward
        return False
    return len(chosen) == 1 and isinstance(result, Tensor) and result.shape == chosen[0].shape


def _on_meta(module: Module) -> Module:
    """Return a copy with tensors of float32 on the meta device: those of a plan stay tensors of the plan by ``to``."""
    made = deepcopy(module)
    for each in made.modules():
        for name, parameter in [*each.named_parameters(recurse=False)]:
            setattr(each, name, torch.nn.Parameter(_float(parameter), requires_grad=False))
        for name, buffer in [*each.named_buffers(recurse=False)]:
            setattr(each, name, _float(buffer))
    return made


def _float(tensor: Tensor) -> Tensor:
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="meta")
