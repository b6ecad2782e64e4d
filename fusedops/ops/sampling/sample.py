"""The draw of a token from logits. Replaces transformers' logits warpers and torch.multinomial, and torch_npu's
npu_top_k_top_p_sample.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Output
from fusedops._dispatch.call import call
from fusedops.constraints import (
    Between,
    Broadcasts,
    Dim,
    DType,
    Floating,
    Integers,
    LeadingDims,
    Mask,
    OneOf,
    Rank,
    SameDevice,
)
from fusedops.dtypes import compute_dtype, upcast
from fusedops.ops.sampling import formulas
from fusedops.ops.sampling.arguments import LOG_PROBS, NO_LOG_PROB, SampleArgs, prepare_args


def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor,
    position: int | Tensor,
    mask: Tensor | None = None,
    return_log_prob: bool | Literal["none", "unfiltered", "filtered"] = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Draw a token for each row of logits: the same one for the same row, seed and position, whatever else is there.

    The token is the kept one with the largest ``(logit - largest) / temperature + noise``, the noise a Gumbel number
    by Philox: key the seed; counter ``token // 4``, 0, and the position; word ``token % 4``. So neither the other rows
    of a batch, their order and filters, nor padding of the vocabulary with -inf changes it. It is the same on every
    backend, bit for bit. What is kept: the ``top_k`` largest logits, with all that equal the last of them; of these the
    fewest of the largest whose probabilities sum to at least ``top_p`` of theirs, of equal ones those of the lowest
    ids; and of these the ones with at least ``min_p`` times the largest probability. This is the order of transformers.

    Args:
        logits: (..., V), float16, bfloat16, float32 or float64, which is rounded to float32. V from 1 to 4,194,304.
        temperature: at least 0. 0 takes the largest logit, of equal ones that of the lowest id. This and the next five
            are a number, or a tensor (...) of one for each row.
        top_k: at least 0; 0 or None keeps all.
        top_p: in (0, 1]; 1 or None keeps all.
        min_p: in [0, 1]; 0 or None keeps all.
        seed: 64 bits: of a request.
        position: at least 0: of the token in its sequence.
        mask: broadcastable to ``logits``, bool or uint8. True: the token is not allowed.
        return_log_prob: True: also return the log probability of the token under ``softmax(logits / temperature)``, of
            all tokens. "filtered": among the kept tokens. Both are 0 at a temperature of 0.
        backend: a policy for this call alone, such as "cpu" or "npu,eager". None: the policy in effect.

    Returns:
        token (...), int64; with ``return_log_prob`` the pair (token, log_prob), log_prob (...), float32 (float64 for
        float64). A row with NaN or inf, without an allowed logit above -inf, or with a value of a tensor out of its
        range has the token -1 and log_prob NaN: no device is waited for. Neither has a gradient.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: transformers, ``generation/logits_process.py``; Salmon et al. 2011 (Philox); Maddison et al. 2014,
    arXiv:1411.0030 (the maximum of Gumbel noise).

    >>> import torch, fusedops
    >>> logits = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    >>> fusedops.sample(logits, top_k=2, seed=7, position=torch.tensor([0, 1]))
    tensor([1, 0])
    """
    options = (temperature, top_k, top_p, min_p, seed, position, mask, return_log_prob)
    args = prepare_args((logits, *options))
    results = call(OP, args, backend)
    # under torch.fx.symbolic_trace the results are one proxy
    return results if args[8] != NO_LOG_PROB or type(results) is not tuple else cast("Any", results)[0]


def reference(a: SampleArgs) -> tuple[Tensor, Tensor]:
    """Compute the op in plain torch."""
    z = a.logits.detach().float() + 0.0  # not -0
    right = (z < torch.inf).all(-1)
    z = z if a.mask is None else z.masked_fill(a.mask.bool(), -torch.inf)
    top = z.amax(-1, keepdim=True)
    right = right & (top[..., 0] > -torch.inf)
    d, greedy = z - top, None
    if a.temperature is not None:
        temperature = a.temperature.float()
        right = right & (temperature >= 0) & (temperature < torch.inf)
        greedy = temperature == 0
        factor = (1.0 / temperature).clamp(formulas.SMALLEST_FACTOR, formulas.LARGEST_FACTOR).masked_fill(greedy, 1.0)
        d = d * factor[..., None]
    exponentials = formulas.exponential(d)
    weights = (exponentials * formulas.UNIT).long()
    kept, right = _kept(a, z, exponentials, weights, right)
    noise = formulas.gumbel(a.seed, a.position, z.shape[-1])
    if greedy is not None:
        noise = noise.masked_fill(greedy[..., None], 0.0)
    token = torch.where(kept, d + noise, -torch.inf).argmax(-1)
    log_prob = torch.zeros_like(token, dtype=compute_dtype(a.logits.dtype))
    if a.return_log_prob != NO_LOG_PROB:
        if a.return_log_prob == "unfiltered":
            y = upcast(a.logits.detach())
            y = y if a.temperature is None else y / a.temperature.to(y.dtype)[..., None]
        else:
            y = torch.where(kept, d, -torch.inf).to(log_prob.dtype)
        log_prob = y.log_softmax(-1).gather(-1, token[..., None])[..., 0]
        log_prob = log_prob if greedy is None else log_prob.masked_fill(greedy, 0.0)
        log_prob = log_prob.masked_fill(~right, torch.nan)
    return token.masked_fill(~right, -1), log_prob


def _kept(a: SampleArgs, z: Tensor, exponentials: Tensor, weights: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens that the filters keep, and the rows of ``right`` whose values are in their ranges."""
    kept = z > -torch.inf
    ordered, ids = z.sort(dim=-1, descending=True, stable=True)
    if a.top_k is not None:
        right = right & (a.top_k >= 0)
        last = ordered.gather(-1, (a.top_k.clamp(1, z.shape[-1]) - 1)[..., None])
        kept = kept & ((z >= last) | (a.top_k == 0)[..., None])
    if a.top_p is not None:
        p = a.top_p.float()
        right = right & (p > 0) & (p <= 1)
        of_ordered = torch.where(kept, weights, 0).gather(-1, ids)
        before = of_ordered.cumsum(-1) - of_ordered
        needed = formulas.needed_sum(p, of_ordered.sum(-1)).clamp(min=1)[..., None]
        within = (before < needed) | (p == 1)[..., None]
        kept = kept & torch.zeros_like(kept).scatter(-1, ids, within)
    if a.min_p is not None:
        m = a.min_p.float()
        right = right & (m >= 0) & (m <= 1)
        kept = kept & (exponentials >= m[..., None])
    return kept, right


def empty(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return empty outputs."""
    shape = logits.shape[:-1]
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=compute_dtype(logits.dtype))


_OF_ROWS = [
    *(Between("temperature", 0.25, 2.0), Between("top_p", 0.05, 1.0), Between("min_p", 0.0, 0.3)),
    *(Integers("top_k"), Integers("seed"), Integers("position")),
]
OP = Op(
    sample,
    constraints=[
        Floating("logits"),
        Rank("logits", at_least=1),
        Dim("logits", (-1,), at_least=1, at_most=formulas.LARGEST_VOCABULARY),
        *_OF_ROWS,
        *(DType(name, torch.float32) for name in ("temperature", "top_p", "min_p")),
        *(SameDevice(each.name, "logits") for each in _OF_ROWS),
        *(LeadingDims(each.name, "logits") for each in _OF_ROWS),
        Mask("mask"),
        SameDevice("mask", "logits"),
        Broadcasts("mask", "logits"),
        OneOf("return_log_prob", *LOG_PROBS),
    ],
    reference=reference,
    outputs=(Output("token", integer=True), "log_prob"),
    empty=empty,
    prepare_args=prepare_args,
    sharding="fusedops.ops.sampling.sharding:SHARDING",
    evidence="fusedops.ops.sampling.evidence:SAMPLE",
)
