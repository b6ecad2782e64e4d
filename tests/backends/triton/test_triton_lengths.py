"""The table of docs/gpu.md: how many kernels are compiled where a length varies, and which lengths are enough."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from repository import ROOT

pytest.importorskip("triton", reason="triton is not installed")

PAGE = ROOT / "docs" / "gpu.md"
if not PAGE.exists():
    pytest.skip("needs docs/gpu.md, which is not beside the tests here", allow_module_level=True)

COUNT = """
import json, os
os.environ["FUSEDOPS_BACKEND"] = "triton"
import torch
import fusedops_triton
fusedops_triton._interpreted = lambda: True  # it takes tensors of the CPU, and a stub driver takes its launches
import triton_launches as made
made.pretend_to_compile()
import fusedops as F

def t(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16, requires_grad=True)

calls = {
    "rms_norm": lambda L: F.rms_norm(t(L, 1024), t(1024)),
    "layer_norm": lambda L: F.layer_norm(t(L, 1024), t(1024), t(1024)),
    "swiglu": lambda L: F.swiglu(t(L, 1024), t(L, 1024)),
    "rotary_embedding": lambda L: F.rotary_embedding(
        t(1, 2, L, 64), t(1, 2, L, 64), torch.empty(L, 32), torch.empty(L, 32)
    )[0],
    "cross_entropy": lambda L: F.cross_entropy(t(L, 1000), torch.zeros(L, dtype=torch.long)).sum(),
    "scaled_masked_softmax": lambda L: F.scaled_masked_softmax(t(1, 8, 1, L), None, 1.0),
    "bias_gelu": lambda L: F.bias_gelu(t(L, 1024), t(1024)),
    "top_k_routing": lambda L: F.top_k_routing(t(L, 64), 4)[0],
}
# of calls of wide rows, which take long, those around which a class ends
near = {n + d for n in (512, 1024, 2048, 4096) for d in (-17, -16, -8, -2, -1, 0, 1, 2, 3, 5, 8, 16, 17)}
some = sorted(n for n in {*range(1, 300), *near} if n <= 4096)
narrow = wanted[0] in ("scaled_masked_softmax", "rotary_embedding", "top_k_routing")
powers = {2**n for n in range(6, 13)}
lengths = {
    "any": range(1, 4097) if narrow else some,
    "8": range(8, 4097, 8),
    "64": range(64, 4097, 64),
    "enough": sorted(powers | {n + 64 for n in powers if n < 4096}),
}
found = {}
for kind, values in lengths.items():
    for name in wanted:
        kernels = set()
        for length in values:
            with made.recorded() as launches:
                y = calls[name](length)
                y.backward(torch.empty_like(y))
            kernels.update(launch[4] for launch in launches)
        found.setdefault(name, []).append(len(kernels))
print(json.dumps(found))
"""
ROWS = {
    name: [int(count) for count in counts.split("|") if count.strip()]
    for names, counts in re.findall(
        r"^\| (`[^:|]+): [^|]*\|([\d |]+)\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    for name in re.findall(r"`(\w+)`", names)
}


def test_the_page_has_a_row_for_each_call() -> None:
    assert set(re.findall(r'^    "(\w+)": lambda', COUNT, re.MULTILINE)) == set(ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_the_counts_of_the_page(name: str, program: Callable[[str], Any]) -> None:
    found = program(f"wanted = {json.dumps([name])}\n{COUNT}")[name]
    assert found[:3] == ROWS[name]
    assert found[3] == found[2], "a kernel of multiples of 64 that those beside the powers of two do not have"
