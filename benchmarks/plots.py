"""Pictures of a run: percent of a copy against row length, and speed-up over plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Rows = list[dict[str, Any]]


def draw(rows: Rows, stem: Path) -> None:
    """Writes ``<stem>-length`` (for sweeps of row length) or ``<stem>-speedup``, as PNG and SVG."""
    if all(row["case"].startswith("length_") for row in rows):
        _save(_lengths(rows), stem, "length")
    else:
        _save(_bars(rows), stem, "speedup")


def _save(figure: Any, stem: Path, what: str) -> None:
    for kind in ("png", "svg"):
        figure.savefig(f"{stem}-{what}.{kind}", dpi=120, bbox_inches="tight")
    plt.close(figure)


def _panels(rows: Rows) -> list[tuple[str, str, str]]:
    return sorted({(row["op"], row["mode"], row["dtype"]) for row in rows})


def _lengths(rows: Rows) -> Any:
    panels = _panels(rows)
    figure, axes = plt.subplots(len(panels), 1, figsize=(8, 3.2 * len(panels)), squeeze=False)
    for axis, panel in zip(axes[:, 0], panels):
        mine = [row for row in rows if (row["op"], row["mode"], row["dtype"]) == panel]
        for provider in dict.fromkeys(row["provider"] for row in mine):
            line = [(row["shape"][-1], row["pct_of_copy"]) for row in mine if row["provider"] == provider]
            style = {"linewidth": 2.5} if provider.startswith("fusedops") else {"linewidth": 1, "linestyle": "--"}
            axis.plot(*zip(*sorted(line)), marker="o", markersize=3, label=provider, **style)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_title(" ".join(panel), fontsize=10)
        axis.set_xlabel("row length")
        axis.set_ylabel("% of a copy")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.suptitle(rows[0]["device"], fontsize=9)
    figure.tight_layout()
    return figure


def _bars(rows: Rows) -> Any:
    panels = _panels(rows)
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 3.4 * len(panels)), squeeze=False)
    for axis, panel in zip(axes[:, 0], panels):
        mine = [row for row in rows if (row["op"], row["mode"], row["dtype"]) == panel]
        names = list(dict.fromkeys(row["case"] for row in mine))
        providers = list(dict.fromkeys(row["provider"] for row in mine))
        for place, provider in enumerate(providers):
            bars = {row["case"]: row["speedup_over_torch"] for row in mine if row["provider"] == provider}
            at = [names.index(name) + (place - len(providers) / 2 + 0.5) * 0.8 / len(providers) for name in bars]
            axis.bar(at, list(bars.values()), 0.8 / len(providers), label=provider)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(range(len(names)), names, rotation=25, ha="right", fontsize=7)
        axis.set_title(" ".join(panel), fontsize=10)
        axis.set_ylabel("speed-up over torch")
        axis.legend(fontsize=7)
    figure.suptitle(rows[0]["device"], fontsize=9)
    figure.tight_layout()
    return figure
