"""The time of every backend of this machine for the ops that one of them has: ``python -m benchmarks.shared_ops FILE``.

FILE is a run such as ``python -m benchmarks --modes inference --elements 4194304 --without torch.compile --ops rms_norm
... --out FILE``. Printed are a Markdown table with a line for each call, and how often each backend is the fastest. A
tie is a win for each: a time of at most 1.05 times the fastest one's.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PLAIN = "torch"
TIE = 1.05
_PREFIX = "fusedops."
_Call = tuple[str, str, str, tuple[int, ...]]  # op, dtype, case, shape


def calls(records: Sequence[Mapping[str, Any]]) -> dict[_Call, dict[str, float]]:
    """Return the milliseconds of each provider by call, in the order of the run; a backend without its prefix."""
    times: dict[_Call, dict[str, float]] = {}
    for row in records:
        if row["provider"] == PLAIN or row["provider"].startswith(_PREFIX):
            call = row["op"], row["dtype"], row["case"], tuple(row["shape"])
            times.setdefault(call, {})[row["provider"].removeprefix(_PREFIX)] = row["ms_p50"]
    return times


def table(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table with a line for each call; the fastest provider is bold."""
    times = calls(records)
    providers = [PLAIN, *sorted({name for row in times.values() for name in row} - {PLAIN})]
    yield f"| call | dtype | {' | '.join('plain torch' if name == PLAIN else name for name in providers)} |"
    yield "|---" * (len(providers) + 2) + "|"
    for (op, dtype, case, shape), row in sorted(times.items(), key=lambda item: item[0][0]):
        least = min(row.values())
        cells = ["-" if name not in row else _marked(row[name], least) for name in providers]
        yield f"| {op}, {case} {shape} | {dtype} | {' | '.join(cells)} |"


def wins(records: Sequence[Mapping[str, Any]]) -> str:
    """Return for how many calls each backend is the fastest, of those that it takes; plain torch is left out."""
    won: Counter[str] = Counter()
    took: Counter[str] = Counter()
    for row in calls(records).values():
        backends = {name: time for name, time in row.items() if name != PLAIN}
        took.update(backends.keys())
        won.update(name for name, time in backends.items() if time <= TIE * min(backends.values()))
    return ", ".join(f"{name} {won[name]} of {took[name]}" for name in sorted(took, key=lambda n: (-won[n], n)))


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a run."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _marked(time: float, least: float) -> str:
    text = f"{time:.3f}" if time < 1 else f"{time:.2f}"
    return f"**{text}**" if time == least else text


def main(arguments: Sequence[str]) -> int:
    """Print the table and the wins."""
    records = [record for path in arguments for record in read(Path(path))]
    print("\n".join([*table(records), "", wins(records)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
