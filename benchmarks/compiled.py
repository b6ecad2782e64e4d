"""Compare two forms of an op in code compiled by Inductor: one node of the graph, and traced for fusion.

    python -m benchmarks.compiled [--out FILE] [--threads N]

Each block has an op between neighbours that Inductor can fuse. Three forms are measured: the op as one node of the
graph, which runs the eager backend; its reference, traced, which Inductor fuses with the neighbours; and the block
without compilation.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fusedops
from benchmarks.machine import TUNED, environment
from benchmarks.memory import peak_bytes
from fusedops import Op
from fusedops.ops import OPS
from fusedops.testing import interleaved
from fusedops.testing._timing import copy_of

Block = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]


def attention(softmax: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a block: scores plus a bias, softmax, and a factor on its result."""
    return lambda x, other, mask: softmax(x + other, mask, 0.125, False) * 0.5


def mlp(gelu: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the middle of a gated MLP: gelu of one half, times the other."""
    return lambda x, other, bias: gelu(x * 0.5, bias, "tanh") * other


def residual(add: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the end of a layer at inference: bias and residual, then the scale of the next norm."""
    return lambda x, other, bias: add(x, bias, other, 0.0, False, None) * 1.5


BLOCKS: dict[str, tuple[Block, str, tuple[int, ...], tuple[int, ...]]] = {
    "scores, softmax, factor": (attention, "scaled_masked_softmax", (4, 16, 512, 1024), (4, 1, 512, 1024)),
    "factor, gelu, gate": (mlp, "bias_gelu", (8192, 4096), (4096,)),
    "residual, factor": (residual, "bias_dropout_add", (8192, 4096), (4096,)),
}


def _positional(op: Op) -> Callable[..., Tensor]:
    """Return the public function of an op, for arguments by position."""
    return lambda *args: op.function(**dict(zip(op.parameters, args)))


def _work(function: Callable[..., Tensor], leaves: list[Tensor], mode: str) -> Callable[[], object]:
    if mode == "forward":
        return lambda: function(*leaves)
    y, inputs = function(*leaves), [leaf for leaf in leaves if leaf.requires_grad]
    grad = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, inputs, grad, retain_graph=True)


def main() -> None:
    """Measure the blocks one after the other, and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--elements", type=int, default=2**25)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/out/compiled.jsonl"))
    options = parser.parse_args()
    if os.environ.get("GLIBC_TUNABLES") != TUNED:
        os.environ["GLIBC_TUNABLES"] = TUNED
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.compiled", *sys.argv[1:]])
    torch.set_num_threads(options.threads)
    fusedops.set_policy("eager")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", encoding="utf-8") as file:
        for name, (block, op_name, shape, small) in BLOCKS.items():
            op = OPS[op_name]
            shape = (max(1, shape[0] * options.elements // 2**25), *shape[1:])
            x, other = torch.randn(shape), torch.randn(shape)
            third = torch.rand(shape[0], *small[1:]) < 0.3 if len(small) > 1 else torch.randn(small)
            args = (x, other, third)
            leaves = [arg.clone().requires_grad_() if arg.is_floating_point() else arg for arg in args]
            public = _positional(op)
            # bound as defaults, so that dynamo sees plain functions
            one_node = torch.compile(block(public), dynamic=False)
            traced = torch.compile(block(lambda *args, op=op: op.reference(*args)), dynamic=False)
            forms: dict[str, Callable[..., Tensor]] = {
                "fusedops.eager": one_node,
                "traced through": traced,
                "not compiled": block(public),
            }
            for mode in ("forward", "backward"):
                work = {form: _work(function, leaves, mode) for form, function in forms.items()}
                times = interleaved({**work, "copy": copy_of(x)}, "cpu", options.seconds)
                for form, function in work.items():
                    row: dict[str, Any] = {
                        "op": op_name,
                        "case": name,
                        "dtype": "float32",
                        "mode": mode,
                        "provider": form,
                        "shape": list(shape),
                        "ms_p50": round(times[form].p50, 4),
                        "ms_p20": round(times[form].p20, 4),
                        "ms_p80": round(times[form].p80, 4),
                        "copies": round(times[form].p50 / times["copy"].p50, 3),
                        "peak_bytes": peak_bytes(function, "cpu"),
                        "elements": prod(shape),
                        **environment("cpu", options.threads, "tuned"),
                    }
                    file.write(json.dumps(row) + "\n")
                    print(f"{name:26} {mode:9} {form:16} {row['ms_p50']:9.2f} ms {row['copies']:6.2f} copies")


if __name__ == "__main__":
    main()
