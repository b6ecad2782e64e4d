"""Folders of the repository."""

from __future__ import annotations

import pathlib

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
SUPPORT = ROOT / "tests" / "support"
# the folders that hold the helper modules of the tests, for the path of a process that pytest does not start
SUPPORT_FOLDERS = [SUPPORT, *filter(pathlib.Path.is_dir, SUPPORT.iterdir())]
EXAMPLE_PLUGIN = ROOT / "tests" / "example_plugin" / "fusedops-backend-example"
