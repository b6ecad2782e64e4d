"""Writes docs/limits.md from the kernels' own declarations. `--check` fails where the file is stale."""

from __future__ import annotations

import sys
from pathlib import Path

from fusedops._op import OPS
from fusedops._registry import OWN_DISTRIBUTION, registry

PAGE = Path(__file__).parent / "limits.md"

# Read in the sources of Megatron-LM, apex, TransformerEngine and Slapo; of torch_npu in its documents and schemas
PEERS = {
    "scaled_masked_softmax": """
| peer | rank | Sk | other | dtypes | mask shapes |
|---|---|---|---|---|---|
| Megatron-LM | 4 | 16 < Sk <= 4096 | Sq, Sk and b * heads divisible by 4 | float16, bfloat16 | [b, 1, Sq, Sk] |
| apex | 4 | <= 16384 in Python, 4096 in the kernel | | float16, bfloat16 | [b, 1, Sq, Sk] |
| TransformerEngine | 4 | 16 < Sk < 16384, divisible by 8 | | float16, bfloat16 | [b, 1, Sq, Sk] |
| torch_npu | 4 | [32, 4096], divisible by 32 | Sq the same | float16, bfloat16, float32 | last two sizes as x's |

A fully masked row is 0 in the CUDA kernels of the first three, uniform (1 / Sk) in their own torch fallbacks and on
Ascend, NaN from `masked_fill(-inf)` and `softmax`. In fusedops it is 0 everywhere, and so is its gradient.
""",
    "bias_gelu": """
| peer | form | bias | in 16 bits |
|---|---|---|---|
| Megatron-LM, `bias_gelu_impl` | tanh | needed | each step rounded |
| Slapo, `BiasGeLUFunction` | tanh | needed | each step rounded |
| torch_npu, `npu_gelu` | tanh or exact | none: the sum is a pass of its own | |
| fusedops | tanh or exact | any shape that broadcasts, or None | computed in float32, rounded once |
""",
    "bias_dropout": """
| peer | what is dropped depends on | dtype of the result |
|---|---|---|
| Slapo, `bias_dropout` | the device | as torch promotes |
| torch_npu | there is no such op | |
| fusedops | the seed and the element's index alone | as torch promotes |
""",
    "bias_dropout_add": """
| peer | what is dropped depends on | dtype of the result |
|---|---|---|
| Megatron-LM, `get_bias_dropout_add` | the device, and fused or not | the residual's since 0.17, before that x's |
| torch_npu | there is no such op | |
| fusedops | the seed and the element's index alone | the residual's |
""",
}


def page() -> str:
    """The whole page."""
    lines = [
        "# The limits of each backend",
        "",
        "Made by `docs/make_limits.py` from what the kernels declare, the very limits that decide each call.",
        "",
    ]
    own = sorted((r for r in registry.records() if r.distribution == OWN_DISTRIBUTION), key=lambda r: r.name)
    for op in OPS.values():
        lines += [
            f"## {op.name}",
            "",
            f"`{op.formula}`",
            "",
            "| backend | devices | direction | limits |",
            "|---|---|---|---|",
        ]
        notes: list[str] = []
        adapted: list[str] = []
        for record in own:
            assert record.backend is not None, record.error
            kernels = [kernel for kernel in record.backend.kernels if kernel.op == op.name]
            # under TRITON_INTERPRET=1 triton serves the CPU too; the page is about the devices it is made for
            devices = [d for d in record.backend.device_types if (record.name, d) != ("triton", "cpu")]
            where = ", ".join("any" if device == "*" else device for device in devices)
            for item in kernels:
                limits = "; ".join(limit.describe() for limit in item.limits) or "none"
                lines.append(f"| {record.name} | {where} | {item.direction} | {limits} |")
                notes += [f"- **{record.name}**, {d.name}: {d.sentence}." for d in item.deviations]
                adapted += [f"- **{record.name}** {item.direction}, {a.name}: {a.sentence}." for a in item.adaptations]
            if not kernels:
                lines.append(f"| {record.name} | {where} | none | no kernel: eager serves |")
        if notes:
            lines += ["", "Deviations, differences from the contract that remain:", "", *notes]
        if adapted:
            lines += ["", "Adaptations, what is done to calls that need it; `explain` has the bytes:", "", *adapted]
        if op.padding is not None:
            dims = " and ".join(map(str, op.padding.dims))
            lines += ["", f'With `adapt="pad"`, `x` is padded in dims {dims} where a limit asks for a multiple.']
        lines += [
            "",
            "What peers take, read in their sources (torch_npu: in its documents and schemas):",
            PEERS[op.name],
        ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Writes the page, or checks it."""
    if "--check" not in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    fresh = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
    print("docs/limits.md is up to date" if fresh else "docs/limits.md is stale: run `make docs`")
    return 0 if fresh else 1


if __name__ == "__main__":
    sys.exit(main())
