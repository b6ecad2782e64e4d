"""Wrong kernels of quantized_experts, for the list in ``wrong_kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from wrong_kernels import Run, wrong
from wrong_packed_kernels import neighbours

from fusedops.quantization import SCALED

OP = "quantized_experts"


def next_expert(tensor: Any) -> Any:
    return None if tensor is None else tensor.roll(-1, 0)


@wrong("the halves of a byte are swapped", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    four_bits = a.up_format in SCALED and SCALED[a.up_format].bits == 4
    return run(up=(a.up >> 4) | (a.up << 4)) if four_bits else run()


@wrong("a scale is that of the block before", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.down_scales is None else run(down_scales=neighbours(a.down_scales))


@wrong("the codes are those of the next expert", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(up=next_expert(a.up), up_scales=next_expert(a.up_scales), up_zeros=next_expert(a.up_zeros))


@wrong("the scales are those of the next expert", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(down_scales=next_expert(a.down_scales))


@wrong("the global scale is that of the first expert", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.up_global_scale is None:
        return run()
    return run(up_global_scale=a.up_global_scale[:1].expand(len(a.up)).contiguous())


@wrong("the bias is that of the next expert", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(up_bias=next_expert(a.up_bias))


@wrong("the weights are rounded to float16", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.up_scales is None or not a.up_scales.is_floating_point():
        return run()
    return run(up_scales=a.up_scales.half().to(a.up_scales.dtype))


@wrong("zeros are left out", OP, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(down_zeros=None)


@wrong("the gradient of x reads the next expert", OP, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    _, *rest = run()
    return (run(up=next_expert(a.up))[0], *rest)


@wrong("the gradient of the bias is that of the next expert", OP, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dweights, dup, *rest = run()
    return dx, dweights, next_expert(dup), *rest


@wrong("LoRA is scaled twice", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(lora_scale=a.lora_scale**2)


@wrong("the first factor of LoRA is that of the next expert", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(down_lora=next_expert(a.down_lora))


@wrong("the gradient of a factor of LoRA is not scaled", OP, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    *rest, of_b = run()
    return *rest, None if of_b is None else of_b / a.lora_scale
