"""Folders of the repository."""

from __future__ import annotations

import pathlib

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
SUPPORT = ROOT / "tests" / "support"
EXAMPLE_PLUGIN = ROOT / "tests" / "example_plugin" / "fusedops-backend-example"
