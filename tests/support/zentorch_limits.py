"""What zentorch does at the limits that its backend declares or corrects: one JSON object, a text for each limit.

Run as a program: a call that writes past its memory ends a child alone.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fusedops_zentorch._library import function, unavailable

if unavailable() is not None:
    sys.exit("zentorch cannot run here")
torch.set_num_threads(1)
torch.manual_seed(0)
sdpa = function("zentorch_sdpa")


def near(result: Tensor, expected: Tensor) -> str:
    return "right" if torch.allclose(result.double(), expected.double(), rtol=0.02, atol=0.02) else "wrong"


def norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> str:
    weight = torch.ones(x.shape[-1]) if weight is None else weight
    expected = torch.rms_norm(x.double(), x.shape[-1:], weight.double(), eps)
    return near(function("zentorch_rms_norm")(x, weight, eps), expected)


def rows(*sizes: int) -> Tensor:
    return torch.randn(sizes or (2, 2, 33, 64)).bfloat16()


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float = 0.125, causal: bool = False, lse: bool = False) -> str:
    out = sdpa(q, k, v, 0.0, causal, scale=scale)
    scores = scale * q.double() @ k.double().mT
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    return near(out[1].detach(), scores.logsumexp(-1)) if lse else near(out[0], scores.softmax(-1) @ v.double())


def fully_masked_row() -> str:
    mask = torch.zeros(33, 33, dtype=torch.bfloat16)
    mask[5] = -math.inf
    lse = sdpa(rows().requires_grad_(), rows(), rows(), attn_mask=mask)[1].detach()
    return "its lse is -inf" if (lse[:, :, 5] == -math.inf).all() else "its lse is finite"


def delta_rule(batch: int = 1, decay: float = -0.5) -> str:
    q, k = (normalize(torch.randn(batch, 4, 1, 16), dim=-1) for _ in range(2))
    decays, bounds = torch.full((batch, 4, 1), -0.5), torch.tensor([0, 4], dtype=torch.int32)
    decays[:, 1] = decay
    chunks = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    options = 0.25, None, True, 64, bounds, *chunks
    rule = function("gdn_chunk_gated_delta_rule_fwd")
    out, _ = rule(q, k, torch.randn(batch, 4, 1, 16), decays, torch.rand(batch, 4, 1), *options)
    return "NaN" if out.isnan().any() else "finite"


def sum_before_its_rounding() -> str:
    x, residual = rows(64, 777), rows(64, 777)
    s = x + residual
    expected = torch.rms_norm(s.float(), (777,), None, 1e-6).bfloat16()
    function("zentorch_add_rms_norm_")(x, torch.ones(777), residual, 1e-6)
    return "the op's" if torch.equal(x, expected) and torch.equal(residual, s) else "other bits"


def weights_of_experts() -> str:
    up, down, x = rows(4, 192, 64), rows(4, 64, 96), rows(5, 64)
    before, index = up.clone(), torch.tensor([[0, 1]] * 5, dtype=torch.int32)
    moe = function("zentorch_fused_moe")
    moe(torch.empty_like(x), x, up, down, None, None, torch.ones(5, 2), index, False, "silu")
    return "unchanged" if torch.equal(up, before) else "overwritten"


def gradient() -> str:
    x = torch.randn(2, 64, requires_grad=True)
    function("zentorch_rms_norm")(x, torch.ones(64), 1e-6).sum().backward()
    return "none" if x.grad is None else "some"


LIMITS: dict[str, Callable[[], str]] = {
    "rms_norm": lambda: norm(torch.randn(8, 64)),
    "rms_norm of float16": lambda: norm(torch.randn(8, 64).half()),
    "rms_norm of float64": lambda: norm(torch.randn(8, 64).double()),
    "rms_norm with eps 0": lambda: norm(torch.randn(8, 64), eps=0.0),
    "rms_norm of 3 dims": lambda: norm(torch.randn(2, 3, 64)),
    "rms_norm of strides": lambda: norm(torch.randn(8, 128)[:, ::2]),
    "rms_norm with a weight of strides": lambda: norm(torch.randn(8, 64), torch.randn(128)[::2]),
    "add_rms_norm_ in bfloat16": sum_before_its_rounding,
    "gradient of rms_norm": gradient,
    "attention": lambda: attention(rows(), rows(), rows()),
    "lse without a gradient": lambda: attention(rows(), rows(), rows(), lse=True),
    "lse with a gradient": lambda: attention(rows().requires_grad_(), rows(), rows(), lse=True),
    "attention with scale 0": lambda: attention(rows(), rows(), rows(), scale=0.0),
    "causal attention of a negative scale": lambda: attention(rows(), rows(), rows(), scale=-0.5, causal=True),
    "attention of expanded keys": lambda: attention(rows(), rows(2, 2, 1, 64).expand(2, 2, 33, 64), rows()),
    "attention of values of another size": lambda: attention(rows(), rows(), rows(2, 2, 33, 32)),
    "attention without queries": lambda: attention(rows(2, 2, 0, 64), rows(), rows()),
    "attention with a fully masked row": fully_masked_row,
    "delta rule": delta_rule,
    "delta rule of a batch of 2": lambda: delta_rule(batch=2),
    "delta rule with a decay of -inf": lambda: delta_rule(decay=-math.inf),
    "weights of experts": weights_of_experts,
}


def in_a_child(limit: Callable[[], str]) -> Any:
    """Return the text of a limit, or the error or the signal that ended it."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        for stream in (1, 2):  # the library writes to both
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        try:
            text = limit()
        except RuntimeError as error:
            text = f"RuntimeError: {error}".splitlines()[0]
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    return text or f"status {status}"


if __name__ == "__main__":
    print(json.dumps({name: in_a_child(limit) for name, limit in LIMITS.items()}))
