"""The kernels of the triton backend with other launch settings: warps, rows, block, and no limit of registers.

A table for whoever sets ``backends/fusedops_triton/launch/settings.py`` for a chip: for each call the default's time,
and the default's time divided by that of each other setting; above 1, the other one is faster. A place is empty where
a setting does not exist for the kernel, and has a text where the kernel does not run with it. Each setting is compiled.
Usage:

    python -m benchmarks.settings --ops rms_norm --dtypes bfloat16
"""

# ruff: noqa: TID251 - this file varies the settings of one backend

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple
from unittest import mock

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.calls import SWEEPS, arguments, cases
from fusedops import Case, Op, testing
from fusedops.testing import interleaved
from fusedops.testing._timing import backward_of, copy_of, floating, served_by, with_grad

#: A field of a setting, and what it is multiplied by; None: the limit goes.
VARIATIONS: dict[str, tuple[str, float | None]] = {
    "warps / 2": ("warps", 0.5),
    "warps x 2": ("warps", 2.0),
    "rows / 2": ("rows", 0.5),
    "rows x 2": ("rows", 2.0),
    "block / 2": ("block", 0.5),
    "block x 2": ("block", 2.0),
    "any registers": ("registers", None),
}
_MODES = ("forward", "backward")


class Row(NamedTuple):
    """A line of the table. ``others``: by the names of VARIATIONS, the gain over the default, or why there is none."""

    mode: str
    milliseconds: float
    percent: float
    others: dict[str, float | str]


def varied_setting(setting: Any, field: str, factor: float | None) -> Any:
    """Return a setting with another field; the same where the kernel has no such choice."""
    from fusedops_triton.launch import settings

    if field not in setting._fields:
        return setting
    if factor is None:
        return setting._replace(**{field: None})
    of_rows = getattr(setting, "on_chip", None)  # None: of flat tiles, or of sums over columns
    if (field == "block" and of_rows) or (field == "rows" and not (of_rows and setting.rows > 1)):
        return setting
    value = int(getattr(setting, field) * factor)
    most = {
        "warps": settings.chip.threads // settings.chip.lanes,
        "rows": settings.SHORT_ROWS,
        "block": settings.LARGEST_TILE if of_rows is None else sys.maxsize,
    }
    return setting._replace(**{field: value}) if 1 <= value <= most[field] else setting


@contextmanager
def varied(field: str, factor: float | None) -> Iterator[list[str]]:
    """Change the settings that kernels ask for; yield the names of the functions that gave a changed one."""
    from fusedops_triton.launch import launcher

    changed: list[str] = []

    def with_change(function: Callable[..., Any]) -> Callable[..., Any]:
        def changing(*args: Any, **kwargs: Any) -> Any:
            setting = function(*args, **kwargs)
            if not hasattr(setting, "warps"):
                return setting
            other = varied_setting(setting, field, factor)
            if other != setting:
                changed.append(function.__name__)
            return other

        return changing

    patches = [
        mock.patch.object(module, name, with_change(value))
        for at, module in list(sys.modules.items())
        if at.startswith("fusedops_triton.") and not at.endswith("settings")
        for name, value in list(vars(module).items())
        if isinstance(value, FunctionType) and value.__module__.endswith("settings")
    ]
    launcher.clear_layout_caches()
    for patch in patches:
        patch.start()
    try:
        yield changed
    finally:
        for patch in patches:
            patch.stop()
        launcher.clear_layout_caches()


def rows(op: Op, case: Case, dtype: torch.dtype, device: str, seconds: float) -> Iterator[Row]:
    """Measure a call, forward and backward, with each setting."""
    leaves, inputs = with_grad(op, arguments(op, case, dtype, device))
    call = served_by("triton", op)
    y = call(*leaves)
    grads = [torch.randn_like(each) for each in floating(y)]
    work = {"forward": lambda: call(*leaves), "backward": backward_of(y, inputs, grads)}
    copy = copy_of(torch.empty(leaves[0].shape, dtype=dtype, device=device))
    for mode in _MODES:
        times = interleaved({"call": work[mode], "copy": copy}, device, seconds)
        best = times["call"].p50
        moved = op.evidence.min_bytes(*leaves)[mode]
        percent = 100 * moved / best / (2 * leaves[0].nbytes / times["copy"].p50)
        others: dict[str, float | str] = {}
        for name, (field, factor) in VARIATIONS.items():
            with varied(field, factor) as changed:
                try:
                    work[mode]()
                    if changed:
                        others[name] = best / interleaved({"call": work[mode]}, device, seconds)["call"].p50
                except OutOfResources:  # registers, threads or shared memory
                    others[name] = "does not fit"
        yield Row(mode, best, percent, others)


def main(given: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", required=True, choices=list(testing.OPS))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--sweep", default="headline", choices=SWEEPS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--elements", type=int, default=2**28, help="of the largest tensor")
    parser.add_argument("--seconds", type=float, default=0.03, help="measuring time of each setting")
    options = parser.parse_args(given)
    where = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    print(f"launch settings on {where}, torch {torch.__version__}")
    print(f"{'call':52}{'ms':>10}{'% of copy':>11}" + "".join(f"{text:>14}" for text in VARIATIONS))
    for name in options.ops:
        op = testing.OPS[name]
        for dtype in options.dtypes:
            for case in cases(op, options.sweep, options.elements):
                for row in rows(op, case, getattr(torch, dtype), options.device, options.seconds):
                    label = f"{name}, {case.name}, {dtype}, {row.mode}"
                    others = (row.others.get(each, "") for each in VARIATIONS)
                    texts = (other if isinstance(other, str) else f"{other:.2f}" for other in others)
                    line = f"{label:52}{row.milliseconds:10.3f}{row.percent:11.0f}"
                    print(line + "".join(f"{text:>14}" for text in texts), flush=True)


if __name__ == "__main__":
    main()
