"""The pytest plugin: the fixture fusedops_isolated, and what it imports."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from repository import ROOT

# by name, not by the entry point, which exists where fusedops is installed
PLUGIN = ("-p", "no:fusedops", "-p", "_fusedops_pytest", "-p", "no:cacheprovider")


TEXT = """
    import os
    import fusedops

    def test_changes(fusedops_isolated):
        fusedops.register(fusedops.Backend("mine", ("cpu",), -1, ()))
        fusedops.set_policy("mine")
        os.environ["FUSEDOPS_FALLBACK"] = "raise"

    def test_nothing_is_left():
        assert "mine" not in {info.name for info in fusedops.backends()}
        assert fusedops.get_policy() == fusedops.Policy()
        assert "FUSEDOPS_FALLBACK" not in os.environ
"""


def test_the_fixture_undoes_a_tests_changes(tmp_path: pathlib.Path, program: Callable[..., Any]) -> None:
    """Also where it is what first loads the plugins. Tests of this project have it after they were loaded."""
    (tmp_path / "test_it.py").write_text(textwrap.dedent(TEXT))
    done = program("-m", "pytest", *PLUGIN, path=[ROOT, ROOT / "backends"], folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_the_plugin_imports_nothing_until_it_is_used(tmp_path: pathlib.Path) -> None:
    text = """
        import sys

        def test_it():
            assert "_fusedops_pytest" in sys.modules
            assert not {"torch", "fusedops"} & set(sys.modules)
    """
    (tmp_path / "test_it.py").write_text(textwrap.dedent(text))
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGIN],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
