"""Write the explorer page alone, for a look without the site: ``python docs/make_explorer.py FILE``."""

from __future__ import annotations

import sys
from pathlib import Path

from explorer.page import fragment

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>fusedops explorer</title>
<style>
  body { margin: 1rem; font: 16px/1.5 system-ui, sans-serif; }
  @media (prefers-color-scheme: dark) {
    body { color-scheme: dark; background: #131416; color: #ced0d6; --color-background-primary: #131416;
      --color-background-secondary: #1a1c1e; --color-background-border: #303335;
      --color-foreground-secondary: #9ca0a5; --color-brand-primary: #7ab3ff; }
  }
</style></head><body>
"""


def main() -> int:
    """Write the page."""
    if len(sys.argv) != 2:
        print("got no file, expected one; to fix: python docs/make_explorer.py build/explore.html")
        return 2
    Path(sys.argv[1]).write_text(f"{_HEAD}{fragment()}</body></html>\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
