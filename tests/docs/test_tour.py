"""The notebook examples/tour.ipynb: every cell runs, and its tables are there."""

from __future__ import annotations

from typing import Any

import pytest
from repository import ROOT

nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")


@pytest.mark.slow
def test_every_cell_runs_and_shows_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # with it, bench would measure the interpreter
    notebook: Any = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    before = [_tables(cell) for cell in notebook.cells]
    # an error in a cell is raised
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT / "examples")}}).execute()
    assert [_tables(cell) for cell in notebook.cells] == before
    assert sum(before) >= 5
    text = "\n".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "FallbackWarning: bias_gelu runs on" in text
    assert "no backend takes this call of bias_gelu" in text
    assert "x plain torch" in text


def _tables(cell: Any) -> int:
    return sum("<table" in output.get("data", {}).get("text/html", "") for output in cell.get("outputs", ()))
