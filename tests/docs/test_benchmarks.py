"""The benchmark: it runs, its records are complete, it finds slower ops, and its page is made of its files alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import DOCS, ROOT, load

import fusedops
from benchmarks import __main__ as command_line
from benchmarks import report
from fusedops.testing import interleaved

speed = load(DOCS / "parts" / "speed.py")

COLUMNS = {
    "op", "mode", "case", "dtype", "shape", "provider", "ms_p50", "ms_p20", "ms_p80", "min_bytes", "gb_per_s",
    "copy_gb_per_s", "pct_of_copy", "copies", "speedup_over_torch", "peak_bytes", "max_error", "device", "driver",
    "torch", "triton", "python", "fusedops", "commit", "threads", "allocator", "idle_ns",
}  # fmt: skip


SMALL = ("--elements", "4096", "--seconds", "0.001", "--dtypes", "float32", "--without", "torch.compile")


def bench(program: Any, *options: object) -> subprocess.CompletedProcess[str]:
    return program("-m", "benchmarks", *SMALL, *options, path=[ROOT], folder=ROOT)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, program: Any) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("bench") / "large-default-1.jsonl"
    done = bench(program, "--threads", "1", "--out", out)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


@pytest.mark.slow
def test_a_run(run: tuple[Path, str]) -> None:
    out, expected = run
    rows = report.read(out)
    assert all(set(row) == COLUMNS for row in rows)
    assert {(row["op"], row["mode"]) for row in rows} == {
        (name, mode)
        for name, op in fusedops.testing.OPS.items()
        for mode in ("inference", "forward", "backward")[: 3 if op.has_gradient else 2]
    }
    providers = {row["provider"] for row in rows if row["op"] == "scaled_masked_softmax"}
    peers = {name for name in providers if not name.startswith("fusedops.")}  # other backends may be installed
    assert "fusedops.eager" in providers
    assert peers == {"torch", "megatron's torch path", "torch._masked_softmax"}
    for row in rows:
        assert row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
        assert row["peak_bytes"] > 0 or fusedops.testing.OPS[row["op"]].written
        if row["provider"] == "fusedops.eager" and row["max_error"] is not None:  # "nan" would be a TypeError
            assert row["max_error"] < 1e-5, row
    assert f"{len(rows)} measurements" in expected


@pytest.mark.slow
def test_a_report_of_a_folder(run: tuple[Path, str], tmp_path: Path) -> None:
    copy = tmp_path / "gpu" / "large.jsonl"
    copy.parent.mkdir()
    copy.write_text(run[0].read_text())
    (tmp_path / "gpu" / "steps.jsonl").write_text('{"step": "tests"}\n')
    command = [sys.executable, "-m", "benchmarks", "report", str(tmp_path / "gpu")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    for picture in ("png", "svg"):
        assert copy.with_name(f"large-speedup.{picture}").stat().st_size > 1000
    page = (tmp_path / "gpu" / "report.md").read_text()
    device = report.read(copy)[0]["device"]
    assert page.startswith(f"## {device}: large calls, float32\n")
    assert "\nfloat32:\n\n| call | mode | backend |" in page
    assert "| bias_gelu, tanh | forward | eager |" in page
    assert "![Plot of the run large: speed-up over plain torch](large-speedup.png)" in page


def test_only_undisturbed_calls_count() -> None:
    disturbed = [False]
    calls = count()

    def work() -> None:  # every second call is slow, as on a machine with other programs
        disturbed[0] = next(calls) % 2 == 1
        time.sleep(0.02 if disturbed[0] else 0)

    def idle() -> bool:
        expected, disturbed[0] = not disturbed[0], False
        return expected

    assert interleaved({"work": work}, "cpu", 0.001, idle)["work"].p80 < 10
    assert interleaved({"work": work}, "cpu", 0.1)["work"].p80 >= 20
    with pytest.raises(TimeoutError, match=r"not idle: 0\.2 s were not enough for one, two"):
        interleaved({"one": int, "two": int}, "cpu", 0.001, lambda: False)


def test_a_machine_that_is_never_idle_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [*SMALL, "--ops", "bias_gelu", "--cases", "tanh", "--modes", "forward", "--device", "cpu"]
    monkeypatch.setattr(
        sys, "argv", ["benchmarks", *small, "--idle", "0", "--seconds", "1e-4", "--out", str(tmp_path / "none.jsonl")]
    )
    assert command_line.main() == 0
    assert "left out: bias_gelu tanh forward: the machine is not idle" in "".join(capsys.readouterr())
    assert (tmp_path / "none.jsonl").read_text() == ""


@pytest.mark.slow
def test_a_table_has_each_figure_of_its_rows(run: tuple[Path, str]) -> None:
    rows = [row for row in report.read(run[0]) if row["op"] == "bias_gelu" and row["case"] == "tanh"]
    rows = [row for row in rows if row["provider"] != "fusedops.cpu"]  # where the library is built
    lines = report.table(rows)
    mine = {row["mode"]: row for row in rows if row["provider"] == "fusedops.eager"}
    chain = {row["mode"]: row for row in rows if row["provider"] == "torch"}
    assert lines[0] == "float32:"
    assert len(lines) == 4 + len(mine) == 7
    for line in lines[4:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        row = mine[cells[1]]
        assert cells[4] == f"{row['copies']:.2f}"
        assert cells[6] == f"{chain[cells[1]]['ms_p50'] / row['ms_p50']:.2f}"


@pytest.mark.slow
def test_compare_finds_slower_ops(run: tuple[Path, str], tmp_path: Path, program: Any) -> None:
    stored = tmp_path / "stored.jsonl"
    for factor, code, expected in (
        (1000.0, 0, "0 of"),
        (0.0001, 1, "slower: bias_gelu forward erf float32 fusedops.eager"),
    ):
        rows: list[dict[str, Any]] = report.read(run[0])
        stored.write_text("".join(json.dumps({**row, "copies": row["copies"] * factor}) + "\n" for row in rows))
        options = ["--threads", "1", "--ops", "bias_gelu", "--modes", "forward", "--out", str(tmp_path / "new.jsonl")]
        done = bench(program, *options, "--compare", str(stored))
        assert done.returncode == code, done.stderr
        assert expected in done.stdout


def test_a_committed_run_is_of_one_commit() -> None:
    found = [path for path in report.RESULTS.rglob("*.jsonl") if path.name != "steps.jsonl"]  # beside the others
    assert speed.SHOWN in found
    for path in found:
        commits = {row["commit"] for row in report.read(path)}
        assert len(commits) == 1, f"{path} is of several commits"
        assert re.fullmatch(r"[0-9a-f]{40}", commits.pop()), f"{path} is not of one committed state"


def test_every_committed_run_is_on_a_page() -> None:
    """A run that no page shows is of kernels that are gone: it leaves the repository."""
    texts = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    committed = [path for path in report.RESULTS.rglob("*") if path.is_file() and "out" not in path.parts]
    assert [path.name for path in committed if f"[{path.name}](" not in texts] == []


def test_the_first_table_and_the_picture_have_every_measured_op() -> None:
    rows = report.read(speed.SHOWN)
    measured = {row["op"] for row in rows}
    page, picture = ((DOCS / name).read_text(encoding="utf-8") for name in ("performance.md", "_static/speed.svg"))
    table = page.partition("\n| op |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| \[(\w+)\]", table, re.M)) == measured
    assert set(re.findall(r'class="code"[^>]*>(\w+)<', picture)) == measured
    packed = {row["op"] for row in report.read(speed.PACKED)}
    (cpu,) = (backend for backend in fusedops.backends() if backend.name == "cpu")
    assert measured | packed <= set(cpu.ops)
    assert all(f"[{op}](ops.md#{op})" in page for op in cpu.ops)
    row = next(
        row
        for row in rows
        if (row["op"], row["form"], row["direction"], row["dtype"], row["elements"], row["provider"])
        == ("rms_norm", "rms", "backward", "float32", 2**25, "fusedops")
    )
    assert f"| {row['speedup']:.2f} | {speed.percent(row):.0f} |" in table
    assert speed.percent(row) == pytest.approx(150 / row["copies"], rel=1e-3)  # reads x and its gradient, writes one
    assert f">{row['speedup']:.1f}<" in picture
    assert all(f">{call}<" in picture and f">{ratio:.2f}<" in picture for call, ratio in speed.lowest(rows).items())


def test_every_ratio_below_the_limit_is_listed() -> None:
    row = {"op": "rms_norm", "form": "rms", "direction": "forward", "dtype": "float32", "provider": "fusedops"}
    rows = [{**row, "elements": 64, "speedup": 0.5}, {**row, "elements": 2**20, "speedup": 0.94}]
    rows += [{**row, "elements": 2**22, "speedup": 0.95}, {**row, "provider": "kernel", "elements": 1, "speedup": 0.1}]
    lines = list(speed.slow_table(rows, "the run"))
    assert "2 of the 3 ratios" in lines[0]
    assert lines[4:] == ["| rms_norm, rms, forward | 0.50 | 64 to 1 Mi; float32 |"]


def test_the_calls_of_the_size_tables_run() -> None:
    """Each case computes the same as its chain of torch calls, so the times are of the same work."""
    from benchmarks.cpu_cases import CASES

    for op, make, form in CASES:
        torch.manual_seed(0)
        work = make(2**12, torch.float32, form)
        got, expected = getattr(fusedops, op)(*work.args, **work.options), work.plain()
        pairs = zip(got, expected) if isinstance(got, tuple) else [(got, expected)]
        for mine, plain in pairs:
            assert mine.shape == plain.shape, (op, form)
            if form != "training":  # torch draws other random numbers
                torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "index.md"], ids=lambda page: page.stem)
def test_the_numbers_of_the_first_screen_are_those_of_the_runs(page: Path) -> None:
    text = re.sub(r"\s+", " ", page.read_text("utf-8"))
    rows, gpu = report.read(speed.SHOWN), report.read(speed.GPU / "headline.jsonl")
    ratios = [ratio for pair in speed.speedups(rows).values() for ratio in pair]
    lowest = min(speed.lowest(rows).values())
    assert f" {min(ratios):.1f} to {max(ratios):.0f} times as fast as plain torch, and at worst {lowest:.2f} " in text
    named = re.compile(
        r"fusedops.triton forward (\w+_norm|scaled_masked_softmax|swiglu|rotary_embedding|cross_entropy)"
    )
    shown = [row["pct_of_copy"] for row in gpu if named.fullmatch(f"{row['provider']} {row['mode']} {row['op']}")]
    assert f" run forward at {min(shown):.0f} to {max(shown):.0f} % of the speed of a copy" in text


def test_the_table_of_products_has_a_row_for_each_dtype_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import row_order

    monkeypatch.setattr(row_order, "SHAPES", ((64, 64),))
    lines = row_order.table([1, 2]).splitlines()
    assert lines[0] == "| dtype | weight | 1 thread | 2 threads |"
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| float32", "| bfloat16", "| float16", "| float64"]
    assert row_order.counts_that_differ(torch.int64, (4, 4), 2) == []  # sums of integers have no order
