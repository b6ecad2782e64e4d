"""Wrong kernels of experts, for the list in ``wrong_kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from wrong_kernels import Run, wrong

EXPERTS = "experts"


@wrong("a sentinel is the last expert", EXPERTS, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(index=a.index.where(a.index < len(a.up), len(a.up) - 1))


@wrong("an index of -1 counts from the end", EXPERTS, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(index=a.index.where(a.index >= 0, a.index + len(a.up)))


@wrong("the weight of a choice is applied twice", EXPERTS, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(weights=a.weights * a.weights)


@wrong("an expert that a token has twice counts once", EXPERTS, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    again = (a.index[:, :, None] == a.index[:, None, :]).tril(-1).any(-1)
    return run(index=a.index.masked_fill(again, -1))


@wrong("the bias of down is not weighted", EXPERTS, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    y, hidden = run(down_bias=None)
    if a.down_bias is None:
        return y, hidden
    known = (a.index >= 0) & (a.index < len(a.up))
    biases = a.down_bias[a.index.clamp(0, len(a.up) - 1)] * known[..., None]
    return y + biases.sum(1).to(y.dtype), hidden


@wrong("the weight of a sentinel has a gradient", EXPERTS, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dweights, *rest = run()
    return (dx, None if dweights is None else dweights.masked_fill(a.index >= len(a.up), 1.0), *rest)


@wrong("the gradient of x is that of the first choice", EXPERTS, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    _, *rest = run()
    first = a.index.clone()
    first[:, 1:] = -1
    return (run(index=first)[0], *rest)


@wrong("the last expert has no gradient", EXPERTS, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dweights, *rest = run()
    for each in rest:
        if each is not None:
            each[-1:] = 0
    return (dx, dweights, *rest)


@wrong("LoRA is scaled twice", EXPERTS, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(lora_scale=a.lora_scale**2)


@wrong("the second factor of LoRA is that of the next expert", EXPERTS, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(up_lora_b=None if a.up_lora_b is None else a.up_lora_b.roll(-1, 0))


@wrong("the gradient of x is without LoRA", EXPERTS, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    _, *rest = run()
    return (run(up_lora=None, up_lora_b=None)[0], *rest)
