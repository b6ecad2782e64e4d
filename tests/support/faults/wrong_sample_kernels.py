"""Wrong kernels of sample, for the list in ``wrong_kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from wrong_kernels import Run, wrong

SAMPLE = "sample"


@wrong("the noise is of the rank of a token, not of its id", SAMPLE, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    logits, ids = a.logits.sort(dim=-1, descending=True, stable=True)
    mask = None if a.mask is None else a.mask.expand(ids.shape).gather(-1, ids)
    token, log_prob = run(logits=logits, mask=mask)
    return ids.gather(-1, token.clamp(min=0)[..., None])[..., 0].where(token >= 0, token), log_prob


@wrong("the noise is of the number of the row too", SAMPLE, "forward", "rows")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(seed=a.seed + torch.arange(a.seed.numel()).view(a.seed.shape))


@wrong("the noise is that of the first row", SAMPLE, "forward", "rows")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(seed=a.seed.flatten()[:1].expand(a.seed.numel()).reshape(a.seed.shape))


@wrong("top_k keeps one token more", SAMPLE, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.top_k is None else run(top_k=a.top_k + 1)


@wrong("top_p is a hundredth less", SAMPLE, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.top_p is None else run(top_p=a.top_p * 0.99)


@wrong("top_p comes before the temperature", SAMPLE, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.top_p is None or a.temperature is None:
        return run()
    return run(logits=(a.logits.float() / a.temperature[..., None]).to(a.logits.dtype), temperature=None)


@wrong("min_p comes before the temperature", SAMPLE, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.min_p is None or a.temperature is None:
        return run()
    least = a.logits.float().log_softmax(-1)
    dropped = least < least.amax(-1, keepdim=True) + a.min_p.log()[..., None]
    return run(min_p=None, mask=dropped if a.mask is None else dropped | a.mask.bool())


@wrong("of equal logits the highest id wins at a temperature of 0", SAMPLE, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    token, log_prob = run()
    top = a.logits.gather(-1, token.clamp(min=0)[..., None])
    last = a.logits.shape[-1] - 1 - (a.logits == top).flip(-1).int().argmax(-1)
    return last.where(token >= 0, token), log_prob


@wrong("the log probability is that of all tokens where that of the kept ones is wanted", SAMPLE, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(return_log_prob="unfiltered" if a.return_log_prob == "filtered" else a.return_log_prob)


@wrong("the mask has the other polarity", SAMPLE, "forward", "masked_rows")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.mask is None else run(mask=~a.mask.bool())
