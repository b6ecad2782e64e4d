"""The picture of README.md and docs/performance.md: the speed-up of each op, and what is slower than torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).parents[1] / "docs" / "_static" / "speed.svg"
WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 500, 180, 48, 88, 34, 12
SLOW_HEAD, SLOW_ROW, SLOW_LEFT, SLOW_ONE = 40, 18, 270, 150

STYLE = """
    text { font: 13px system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; fill: #1b2733 }
    .title { font-size: 15px; font-weight: 600 }
    .code { font: 12.5px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace }
    .small { font-size: 12px; fill: #4a5866 }
    .page { fill: #fcfcfd; stroke: #d5dbe1 }
    .forward { fill: #2c7a4b } .backward { fill: #7b9fd4 } .slower { fill: #b3443a }
    .one { stroke: #b3443a; stroke-width: 1.2; stroke-dasharray: 3 3 }
    @media (prefers-color-scheme: dark) {
      text { fill: #e3e8ee } .small { fill: #aab6c2 }
      .page { fill: #161b21; stroke: #36404b }
      .forward { fill: #4cae78 } .backward { fill: #5b7fb5 } .slower { fill: #d9695e }
    }
"""


def drawn(speedups: Mapping[str, tuple[float, float]], where: str, slower: Mapping[str, float]) -> str:
    """Return the SVG: two bars per op, forward and backward, the largest forward first; below them the slower calls.

    Args:
        speedups: by op, the speed-up over plain torch, forward and backward.
        where: dtype, size and machine, for the line below the title.
        slower: by call, the lowest ratio of a call that is slower than torch at some size.
    """
    bottom = TOP + ROW * len(speedups)
    height = bottom + SLOW_HEAD + SLOW_ROW * len(slower) + 12
    largest = max(max(pair) for pair in speedups.values())
    scale = (WIDTH - LEFT - RIGHT) / largest
    one = LEFT + scale
    words = "; ".join(f"{op} {forward:.1f} and {backward:.1f}" for op, (forward, backward) in speedups.items())
    words += f". Slower at some size: {'; '.join(f'{call} {ratio:.2f}' for call, ratio in slower.items())}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title desc">',
        '  <title id="title">Speed-up of each op over plain torch</title>',
        f'  <desc id="desc">{where}. Forward and backward: {words}.</desc>',
        f"  <style>{STYLE}  </style>",
        f'  <rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        '  <text class="title" x="16" y="26">Speed-up over plain torch</text>',
        f'  <text class="small" x="16" y="45">{where}</text>',
        f'  <rect class="forward" x="16" y="56" width="{BAR}" height="{BAR}"/>'
        '<text class="small" x="34" y="66">forward</text>',
        f'  <rect class="backward" x="92" y="56" width="{BAR}" height="{BAR}"/>'
        '<text class="small" x="110" y="66">backward</text>',
    ]
    order = sorted(speedups.items(), key=lambda item: -item[1][0])
    for at, (op, pair) in enumerate(order):
        y = TOP + ROW * at
        lines.append(f'  <text class="code" x="{LEFT - 8}" y="{y + BAR + 4}" text-anchor="end">{op}</text>')
        for below, (kind, ratio) in enumerate(zip(("forward", "backward"), pair)):
            top = y + below * BAR
            end = LEFT + ratio * scale
            lines.append(
                f'  <rect class="{kind}" x="{LEFT}" y="{top}" width="{ratio * scale:.1f}" height="{BAR - 1}"/>'
                f'<text class="small" x="{end + 5:.1f}" y="{top + BAR - 2}">{ratio:.1f}</text>'
            )
    lines.append(f'  <path class="one" d="M{one:.1f} {TOP - 4}V{bottom - 6}"/>')
    lines.append(f'  <text class="small" x="{one:.1f}" y="{TOP - 8}" text-anchor="start">torch: 1</text>')
    lines += _slower(slower, bottom)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _slower(slower: Mapping[str, float], top: int) -> list[str]:
    """Return the lines of the calls that are slower than torch, by a scale of their own."""
    one = SLOW_LEFT + SLOW_ONE
    first = top + SLOW_HEAD
    lines = [
        f'  <text class="title" x="16" y="{top + 20}">Slower than torch: the lowest of all sizes</text>',
        f'  <path class="one" d="M{one} {first - 6}V{first + SLOW_ROW * len(slower) - 2}"/>',
        f'  <text class="small" x="{one - 50}" y="{first - 10}">torch: 1</text>',
    ]
    for at, (call, ratio) in enumerate(sorted(slower.items(), key=lambda item: item[1])):
        y = first + SLOW_ROW * at
        lines.append(
            f'  <text class="small" x="{SLOW_LEFT - 8}" y="{y + BAR - 2}" text-anchor="end">{call}</text>'
            f'<rect class="slower" x="{SLOW_LEFT}" y="{y}" width="{ratio * SLOW_ONE:.1f}" height="{BAR - 1}"/>'
            f'<text class="small" x="{one + 8}" y="{y + BAR - 2}">{ratio:.2f}</text>'
        )
    return lines
