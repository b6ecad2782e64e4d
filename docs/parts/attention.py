"""The block of docs/attention.md: which calls of attention each backend takes, from the constraints of its kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import fusedops
from fusedops import TensorSpec
from fusedops._plugins.registry import OWN_DISTRIBUTION, registry

OP = fusedops.ops.OPS["attention"]
B, N, S, D = 2, 8, 512, 64

# what differs from q, k and v of shape (2, 8, 512, 64) in bfloat16 on the backend's device, without mask and gradient
# of lse: the shape of a mask is that of a bool one
CALLS: dict[str, Mapping[str, Any]] = {
    "nothing masked": {},
    "`causal`, Sq = Sk": {"causal": True},
    '`causal="upper_left"`, Sq < Sk': {"sk": 2 * S, "causal": "upper_left"},
    '`causal="lower_right"`, Sq < Sk': {"sk": 2 * S, "causal": "lower_right"},
    '`causal="lower_right"`, Sq = 1: decoding': {"sq": 1, "causal": "lower_right"},
    "Sq = 4, Sk = 512, `window` and a mask": {"sq": 4, "causal": "lower_right", "window": (3, 0), "mask": (B, 1, 1, S)},
    "`causal` and `window`": {"causal": True, "window": (127, 0)},
    "`window` alone": {"window": (63, 63)},
    "`window` alone, Sq < Sk": {"sk": 2 * S, "window": (63, 63)},
    "mask (B, 1, 1, Sk): padding": {"mask": (B, 1, 1, S)},
    "mask (Sq, Sk)": {"mask": (S, S)},
    "mask (B, Nq, Sq, Sk)": {"mask": (B, N, S, S)},
    "mask and `causal`": {"mask": (B, 1, 1, S), "causal": True},
    "8 query heads, 2 key heads": {"nk": 2, "causal": True},
    "D = 80": {"d": 80, "dv": 80},
    "D = 36": {"d": 36, "dv": 36},
    "D = 256": {"d": 256, "dv": 256},
    "D = 512": {"d": 512, "dv": 512},
    "Dv < D": {"dv": 32},
    "float16": {"dtype": torch.float16},
    "float32": {"dtype": torch.float32},
    "float64": {"dtype": torch.float64},
    "the gradient of lse": {"return_lse": True},
}


def arguments(device: str, call: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of the op for one of the calls, as specs."""
    given = {"sq": S, "sk": S, "nk": N, "d": D, "dv": D, "dtype": torch.bfloat16, **call}
    shapes = (B, N, given["sq"], given["d"]), (B, given["nk"], given["sk"], given["d"])
    q, k, v = (TensorSpec(shape, given["dtype"], device) for shape in (*shapes, (*shapes[1][:3], given["dv"])))
    mask = TensorSpec(given["mask"], torch.bool, device) if "mask" in given else None
    options = {name: given[name] for name in ("causal", "window", "return_lse") if name in given}
    return OP.bound_specs((q, k, v, mask), options)


def takes(kernel: fusedops.Kernel, parameters: Sequence[str], args: Sequence[Any]) -> bool:
    """Return True where no constraint of a kernel refuses the arguments."""
    by_name = dict(zip(parameters, args))
    return not any(each.reasons(by_name) for each in kernel.constraints)


def cell(kernels: Sequence[fusedops.Kernel], device: str, call: Mapping[str, Any]) -> str:
    """Return which directions a backend takes of a call."""
    args = arguments(device, call)
    by_direction = {
        "forward": (OP.parameters, args),
        "backward": (OP.backward_parameters, OP.placeholder_backward_args(args)),
    }
    taken = {kernel.direction for kernel in kernels if takes(kernel, *by_direction[kernel.direction])}
    if "forward" not in taken:
        return "no"
    return "yes" if "backward" in taken else "forward"


def block(_: str = "") -> str:
    """Return the table: a row for each call, a column for each backend and device."""
    columns: dict[str, tuple[list[fusedops.Kernel], str]] = {}
    for record in sorted((r for r in registry.records() if r.distribution == OWN_DISTRIBUTION), key=lambda r: r.name):
        assert record.backend is not None, record.error
        kernels = [kernel for kernel in record.backend.kernels if kernel.op == OP.name]
        for device in record.backend.device_types if kernels else ():
            where = "any device" if device == "*" else device
            of_device = [kernel for kernel in kernels if kernel.serves(device)]
            columns[f"{record.name}: {where}"] = of_device, "cpu" if device == "*" else device
    lines = [f"| call | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name, call in CALLS.items():
        cells = (cell(kernels, device, call) for kernels, device in columns.values())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
