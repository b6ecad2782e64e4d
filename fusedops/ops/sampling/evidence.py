"""Evidence of sample: cases, tolerances, error bounds, bytes, the unfused form."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.evidence import Case, Evidence, Rows, finite_size, tolerances
from fusedops.ops.sampling.arguments import OF_ROWS, SampleArgs

_TOLERANCE = tolerances((1e-6, 1e-6), (1e-14, 1e-13))


def unfused(a: SampleArgs) -> tuple[Tensor, Tensor]:
    """Compute the op as transformers does: warpers, two sorts and torch.multinomial, by torch's generator."""
    z = a.logits.float()
    if a.mask is not None:
        z = z.masked_fill(a.mask.bool(), -torch.inf)
    if a.temperature is not None:
        z = z / a.temperature[..., None]
    unfiltered = z
    if a.top_k is not None:
        last = z.sort(-1, descending=True).values.gather(-1, a.top_k.clamp(1, z.shape[-1])[..., None] - 1)
        z = z.masked_fill((z < last) & (a.top_k > 0)[..., None], -torch.inf)
    if a.top_p is not None:
        ascending, ids = z.sort(-1)
        dropped = ascending.softmax(-1).cumsum(-1) <= 1 - a.top_p[..., None]
        dropped[..., -1:] = False
        z = z.masked_fill(dropped.scatter(-1, ids, dropped), -torch.inf)
    if a.min_p is not None:
        p = z.softmax(-1)
        z = z.masked_fill(p < a.min_p[..., None] * p.amax(-1, keepdim=True), -torch.inf)
    p = z.softmax(-1).nan_to_num(nan=1.0)
    token = torch.multinomial(p.reshape(-1, p.shape[-1]), 1).view(p.shape[:-1])
    of = unfiltered if a.return_log_prob == "unfiltered" else z
    return token, of.log_softmax(-1).gather(-1, token[..., None])[..., 0]


def error_bound(absolute: float, a: SampleArgs) -> tuple[Tensor, Tensor]:
    """Return the error of the log probability: that of a logit, divided by the temperature. Tokens have none."""
    size = finite_size(a.logits).amax(-1)
    if a.temperature is not None:
        size = size / a.temperature.double()
    return torch.zeros_like(size), (absolute * (1 + size)).nan_to_num(nan=0.0, posinf=torch.inf)


def min_bytes(logits: Any, *rest: Any) -> Mapping[Any, int]:
    """Read the logits, write a token for each row."""
    return {"forward": prod(logits.shape) * logits.dtype.itemsize + prod(logits.shape[:-1]) * 8}


def _call(rows: tuple[int, ...], vocabulary: int, *tensors: str, **others: Any) -> dict[str, Any]:
    """Return the call of so many rows, with a tensor for each of these arguments."""
    named = {"seed": rows, "position": rows, **dict.fromkeys(tensors, rows)}
    return {"logits": (*rows, vocabulary), **named, **others}


def _case(name: str, rows: int, vocabulary: int, source: str, *tensors: str, **others: Any) -> Case:
    return Case(name, _call((rows,), vocabulary, *tensors, **others), source)


_FILTERED: dict[str, Any] = {"top_k": 50, "top_p": 0.9}
_LARGE = 151936
SAMPLE = Evidence(
    formula="the kept token of the largest logit / temperature + noise(seed, position, token)",
    cases=[
        _case("every_option", 9, 70, "", *OF_ROWS[:4], mask=(9, 70), return_log_prob="filtered"),
        _case("plain", 5, 33, "", return_log_prob="unfiltered"),
        _case("warm", 4, 1001, "", "temperature", return_log_prob="unfiltered"),
        _case("nucleus", 7, 515, "Holtzman et al. 2019", "top_p", return_log_prob="filtered"),
        _case("top_k", 3, 131, "GPT-2", "top_k", "temperature"),
        _case("min_p", 5, 260, "Nguyen et al. 2024", "min_p", "temperature", return_log_prob="filtered"),
        _case("qwen", 3, 2000, "Qwen3, part of the vocabulary", temperature=0.6, top_k=20, return_log_prob="filtered"),
    ],
    tolerance=_TOLERANCE,
    gradient_tolerance=_TOLERANCE,
    error_bound=error_bound,
    min_bytes=min_bytes,
    unfused=unfused,
    sample=lambda batch, length: _call((batch, length), 12, "top_p", temperature=0.7, return_log_prob="unfiltered"),
    large=[
        _case("Qwen3, 8 rows", 8, _LARGE, "", temperature=0.6, **_FILTERED),
        _case("Qwen3, 8 rows, no filter", 8, _LARGE, ""),
    ],
    sweep=lambda rows, width: _call((rows,), width, temperature=0.6, **_FILTERED),
    rows=[
        Rows(
            f"rows of {vocabulary}",
            lambda count, vocabulary=vocabulary: _call((count,), vocabulary, *OF_ROWS, return_log_prob="unfiltered"),
            dict.fromkeys(("logits", *OF_ROWS, "token", "log_prob"), 0),
        )
        for vocabulary in (67, 2501)
    ],
    sharded=("the dims of `logits` but the last", "those of rows as `logits`", "no gradient"),
)
