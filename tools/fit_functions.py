"""The coefficients of the functions of the ``cpu`` backend (``src/math``), fitted again.

    python tools/fit_functions.py          # the largest error of each table of the sources, and of the best one
    python tools/fit_functions.py EXP_16   # and the best coefficients of one, in double precision

A table is a polynomial whose largest error in an interval is to be small, relative to the function or absolute. The
best one follows by Lawson's method: least squares, weighed again and again by the errors that are left. That of the
sources is rounded to float32, so its error is larger. One that is above ``MOST`` times the best one, and above what its
function needs, exits with 1.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

SOURCES = Path(__file__).parents[1] / "backends" / "fusedops_cpu" / "src" / "math"
MOST = 1.5
POINTS = 501
LN_2, NORMAL_END = math.log(2), 13.2689

Numbers = Any  # an array of float64
Function = Callable[[Numbers], Numbers]


class Table(NamedTuple):
    """A table of coefficients, that of the lowest degree first.

    Args:
        function: what the polynomial is for, of numbers in the interval.
        begin: of the interval.
        end: of the interval.
        terms: the number of coefficients.
        fixed: what is added to the polynomial times ``factor``.
        factor: what the polynomial is multiplied by.
        variable: what it is a polynomial of.
        unit: what an error is divided by; default: the function.
        enough: an error that the function can have; default: half of what the last rounding to float32 adds.
    """

    function: Function
    begin: float
    end: float
    terms: int
    fixed: Function = np.zeros_like
    factor: Function = np.ones_like
    variable: Function = np.asarray
    unit: Function | None = None
    enough: float = 2.0**-25

    def basis(self) -> tuple[Numbers, Numbers]:
        """Return the columns that the coefficients multiply, and what their sum is to be, both divided by the unit."""
        # Chebyshev's points: the largest errors are at the ends
        x = (self.begin + self.end) / 2 + (self.end - self.begin) / 2 * np.cos(np.linspace(0, math.pi, POINTS))
        x = x[np.abs(x) > 1e-9]
        f = self.function(x)
        unit = np.abs(f) if self.unit is None else self.unit(x)
        powers = self.variable(x)[:, None] ** np.arange(self.terms)
        return powers * (self.factor(x) / unit)[:, None], (f - self.fixed(x)) / unit

    def error(self, coefficients: Numbers) -> float:
        """Return the largest error."""
        columns, wanted = self.basis()
        return float(np.abs(columns @ coefficients - wanted).max())

    def best(self) -> Numbers:
        """Return the coefficients with the smallest largest error."""
        columns, wanted = self.basis()
        weights: Numbers = np.full(len(wanted), 1 / len(wanted))
        best: Numbers = np.zeros(self.terms)
        least, solve = math.inf, cast("Any", np.linalg).lstsq
        for _ in range(300):
            root = np.sqrt(weights)
            found = solve(columns * root[:, None], wanted * root, rcond=None)[0]
            errors = np.abs(columns @ found - wanted)
            if errors.max() < least:
                best, least = found, float(errors.max())
            weights = weights * errors
            weights = np.maximum(weights / weights.sum(), 1e-30)
        return best


def normal_quotient(u: Numbers) -> Numbers:
    """Return Phi(u) * exp(u * u / 2)."""
    return np.array([0.5 * math.erfc(-x / math.sqrt(2)) * math.exp(x * x / 2) for x in u])


def _square(x: Numbers) -> Numbers:
    return x * x


def _cube(x: Numbers) -> Numbers:
    return x**3


def _one_more(x: Numbers) -> Numbers:
    return 1 + x


def _line_of_exp2(f: Numbers) -> Numbers:
    return 1 + f * LN_2


def _of_z(z: Numbers) -> Numbers:
    return normal_quotient(1 - z)


def _u_of_t(t: Numbers) -> Numbers:
    return -(1 / t - 1) / 0.45 * math.sqrt(2)


def _of_t(t: Numbers) -> Numbers:
    return normal_quotient(_u_of_t(t))


def _phi_of_t(t: Numbers) -> Numbers:
    """Return the unit of an error of Phi."""
    return np.exp(_u_of_t(t) ** 2 / 2)


def _less(cut: float, z: Numbers) -> Numbers:
    return z - cut


def _expm1(lanes: int) -> Table:
    end = LN_2 / 2 / lanes
    return Table(np.exp, -end, end, 5 if lanes == 1 else 2, fixed=_one_more, factor=_square)


def _exp2(lanes: int) -> Table:
    return Table(np.exp2, -0.5 / lanes, 0.5 / lanes, 2, fixed=_line_of_exp2, factor=_square)


def _narrow(function: Function, end: float) -> Table:
    return Table(function, -end, end, 2, fixed=np.ones_like, factor=np.asarray)


def _pieces(name: str, terms: int, from_cut: bool, enough: float) -> dict[str, Table]:
    """Return the polynomials of the normal distribution: 4 for each power of two of z = 1 - u, by the bits of z."""
    pieces = dict[str, Table]()
    for index in range(16):
        power = 2.0 ** ((index // 4 + 1) % 4)
        begin, end = power * (1 + index % 4 / 4), power * (1 + (index % 4 + 1) / 4)
        cut = begin if from_cut else 0.0
        piece = Table(_of_z, begin, min(end, 1 + NORMAL_END), terms, enough=enough)
        pieces[f"{name}[{index}]"] = piece._replace(variable=partial(_less, cut))
    return pieces


TABLES = {
    "EXP_8": _expm1(8),
    "EXP_16": _expm1(16),
    "EXP": _expm1(1),
    "EXP_NARROW_16": _narrow(np.exp, LN_2 / 32),
    "EXP2_8": _exp2(8),
    "EXP2_16": _exp2(16),
    "EXP2": Table(np.exp2, -0.5, 0.5, 6, fixed=np.ones_like, factor=np.asarray),
    "EXP2_NARROW_16": _narrow(np.exp2, 1 / 32),
    "TANH": Table(np.tanh, 1e-3, 0.55, 4, fixed=np.asarray, factor=_cube, variable=_square),
    "ERFC": Table(_of_t, 1 / (1 + 0.45 * NORMAL_END / math.sqrt(2)), 1, 7, factor=np.asarray, unit=_phi_of_t),
    **_pieces("coefficients", 6, True, 2.0**-23),
    **_pieces("narrow", 5, False, 2.0**-18),
}


def tables_of_sources() -> dict[str, Numbers]:
    """Return the tables that the sources have, by name."""
    found = dict[str, Numbers]()
    for path in sorted(SOURCES.glob("*.h")):
        text = path.read_text("utf-8")
        for name, numbers in re.findall(r"constexpr float (\w+)\[\] = \{(.*?)\};", text, re.DOTALL):
            products = [re.findall(r"-?[\d.e-]+(?=f)", number) for number in numbers.split(",")]
            found[name] = np.array([math.prod(map(float, product)) for product in products])
        for name, numbers in re.findall(r" float (\w+)\[\d\]\[16\] = \{(.*?)\};", text, re.DOTALL):
            columns = np.array(re.findall(r"-?[\d.e-]+(?=f)", numbers), dtype=np.float64).reshape(-1, 16)
            found |= {f"{name}[{index}]": columns[:, index] for index in range(16)}
    return found


def is_far(name: str) -> bool:
    """Return whether a table of the sources has a larger error than it needs to."""
    table = TABLES[name]
    error = table.error(tables_of_sources()[name])
    return error > table.enough and error > MOST * table.error(table.best())


def main(names: list[str]) -> int:
    """Print the errors; return 1 where a table of the sources is far from the best one."""
    stored = tables_of_sources()
    print(f"{'table':16} {'error':>9} {'best':>9}")
    for name, table in TABLES.items():
        best = table.best()
        print(f"{name:16} {table.error(stored[name]):9.2e} {table.error(best):9.2e}", flush=True)
        if name in names:
            print("    " + ", ".join(f"{number:.10g}f" for number in best))
    return int(any(map(is_far, TABLES)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
