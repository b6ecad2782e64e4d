"""Plots of a run: percent of a copy over row length, and speed-up over plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Rows = list[dict[str, Any]]


def draw(rows: Rows, stem: Path) -> None:
    """Write ``<stem>-length`` (for sweeps of row length) or ``<stem>-speedup``, as PNG and SVG."""
    if all(row["case"].startswith("length ") for row in rows):
        _save(_lengths(rows), stem, "length")
    else:
        _save(_bars(rows), stem, "speedup")


def _save(figure: Any, stem: Path, suffix: str) -> None:
    for extension in ("png", "svg"):
        figure.savefig(f"{stem}-{suffix}.{extension}", dpi=120, bbox_inches="tight")
    plt.close(figure)


def _panels(rows: Rows) -> list[tuple[str, str, str]]:
    return sorted({(row["op"], row["mode"], row["dtype"]) for row in rows})


def _lengths(rows: Rows) -> Any:
    panels = _panels(rows)
    figure, axes = plt.subplots(len(panels), 1, figsize=(8, 3.2 * len(panels)), squeeze=False)
    for axis, panel in zip(axes[:, 0], panels):
        panel_rows = [row for row in rows if (row["op"], row["mode"], row["dtype"]) == panel]
        for provider in dict.fromkeys(row["provider"] for row in panel_rows):
            line = [(row["shape"][-1], row["pct_of_copy"]) for row in panel_rows if row["provider"] == provider]
            style = {"linewidth": 2.5} if provider.startswith("fusedops") else {"linewidth": 1, "linestyle": "--"}
            axis.plot(*zip(*sorted(line)), marker="o", markersize=3, label=provider, **style)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_title(" ".join(panel), fontsize=10)
        axis.set_xlabel("row length")
        axis.set_ylabel("% of a copy")
        axis.grid(alpha=0.3)
    figure.suptitle(f"percent of a copy: {rows[0]['device']}, {rows[0]['threads']} threads", fontsize=10)
    _legend(figure, axes[0, 0])
    return figure


def _bars(rows: Rows) -> Any:
    """Draw one panel per mode and dtype, one group of bars per call, one bar per provider; torch is the line at 1."""
    modes, dtypes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("mode", "dtype"))
    calls = list(dict.fromkeys((row["op"], row["case"]) for row in rows))
    providers = [name for name in dict.fromkeys(row["provider"] for row in rows) if name != "torch"]
    shape = (len(modes) * len(dtypes), 1)
    figure, axes = plt.subplots(*shape, figsize=(max(6, len(calls)), 2.6 * shape[0] + 1), squeeze=False, sharex=True)
    for axis, (mode, dtype) in zip(axes[:, 0], [(mode, dtype) for mode in modes for dtype in dtypes]):
        for position, provider in enumerate(providers):
            bars = {
                calls.index((row["op"], row["case"])): row["speedup_over_torch"]
                for row in rows
                if (row["mode"], row["dtype"], row["provider"]) == (mode, dtype, provider)
            }
            x = [call + (position - (len(providers) - 1) / 2) * 0.8 / len(providers) for call in bars]
            axis.bar(x, list(bars.values()), 0.8 / len(providers), label=provider, color=f"C{position}")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_title(f"{mode}, {dtype}", fontsize=10)
        axis.set_ylabel("x torch")
        axis.grid(axis="y", alpha=0.3)
    axes[-1, 0].set_xticks(
        range(len(calls)), [f"{op}\n{case}" for op, case in calls], rotation=30, ha="right", fontsize=8
    )
    figure.suptitle(f"speed-up over plain torch: {rows[0]['device']}, {rows[0]['threads']} threads", fontsize=10)
    _legend(figure, axes[0, 0])
    return figure


def _legend(figure: Any, axis: Any) -> None:
    """Draw one legend for all panels, between the title and the first panel."""
    inches = figure.get_size_inches()[1]
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="upper center", bbox_to_anchor=(0.5, 1 - 0.35 / inches), ncols=len(labels), fontsize=8
    )
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.5 / inches))
