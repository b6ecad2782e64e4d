"""Wrong kernels of select_keys and sparse_attention, for the list in ``wrong_kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from wrong_kernels import Run, wrong

from fusedops.ops.attention import formulas
from fusedops.ops.attention.arguments import SelectKeysArgs
from fusedops.ops.attention.select_keys import hidden_of

SELECT, SPARSE = "select_keys", "sparse_attention"


def scores(a: SimpleNamespace, relu: bool = True) -> Tensor:
    """Return the scores of all queries and keys."""
    products = a.scale * (a.q.float() @ a.k.float()[:, None].mT)
    products = torch.relu(products) if relu else products
    return (a.weights.float()[..., None] * products).sum(2)


def hidden(a: SimpleNamespace) -> Tensor | None:
    return hidden_of(SelectKeysArgs(a.q, a.k, a.weights, a.count, a.scale, a.causal, a.mask))


@wrong("a tie goes to the highest index", SELECT, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    masked, keys = hidden(a), a.k.shape[1]
    masked = None if masked is None else masked.expand(*a.q.shape[:2], keys).flip(-1)
    index = formulas.best_keys(scores(a).flip(-1), masked, a.count)
    index = torch.where(index < 0, keys, keys - 1 - index).sort(-1).values
    return torch.where(index == keys, -1, index).to(torch.int32)


@wrong("the weight of the next head", SELECT, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(weights=a.weights.roll(1, -1))


@wrong("relu is left out", SELECT, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return formulas.best_keys(scores(a, relu=False), hidden(a), a.count)


@wrong("a masked key is chosen", SELECT, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(mask=None)


@wrong("the diagonal starts at the upper left for every alignment", SELECT, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(causal="upper_left") if a.causal == "lower_right" else run()


@wrong("masked keys fill the row after the last one", SELECT, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    index = run()
    return torch.where(index < 0, 0, index)


@wrong("indices in the order of the scores", SELECT, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run().flip(-1)


@wrong("-1 is the last key", SPARSE, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(indices=torch.where(a.indices < 0, a.k.shape[2] - 1, a.indices))


@wrong("the indices of the first key head are those of all", SPARSE, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(indices=a.indices[:, :1].expand_as(a.indices))


@wrong("the last index of a row is left out", SPARSE, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(indices=a.indices[..., :-1])


@wrong("the mask of the key's place in the indices", SPARSE, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.mask is None else run(mask=a.mask.roll(1, -1))


@wrong("causal counts the places in the indices", SPARSE, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(causal="none")


@wrong("the gradient of a key that two queries choose is that of the last", SPARSE, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    indices = a.indices.clone()
    if indices.shape[2] > 1:
        indices[:, :, :-1] = torch.where((indices[:, :, :-1] == indices[:, :, -1:, :1]), -1, indices[:, :, :-1])
    gradients = run()
    return (gradients[0], *run(indices=indices)[1:])


@wrong("the gradient of a key is added twice", SPARSE, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    dq, dk, dv = run()
    if dk is None:
        return dq, dk, dv
    twice = torch.zeros(a.k.shape[2], dtype=torch.bool)
    first = a.indices[a.indices >= 0]
    twice[first[:1].long()] = True
    return dq, torch.where(twice[:, None], 2 * dk, dk), dv


@wrong("the gradient of the lse is left out", SPARSE, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(return_lse=False)


@wrong("the gradient of the values ignores the indices", SPARSE, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    every = torch.arange(a.k.shape[2]).expand(*a.indices.shape[:3], a.k.shape[2])
    return (*run()[:2], run(indices=every)[2])
