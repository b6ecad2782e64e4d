"""Print what pip would download for an installation, with sizes, and download none of it.

    python tools/downloads.py torch==2.13.0 --group demo

The arguments are those of ``pip install``. `make demo` and `make test` run this before they install.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlparse
from urllib.request import Request, url2pathname, urlopen

LISTED = 20_000_000  # bytes: smaller files are counted together


def planned(arguments: list[str]) -> list[dict[str, Any]]:
    """Return pip's plan: one entry for each package that is not installed.

    Raises:
        subprocess.CalledProcessError: pip finds no installation.
    """
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--report", str(report), *arguments]
        subprocess.run(command, check=True)
        return json.loads(report.read_text("utf-8"))["install"]


def size_of(url: str) -> int | None:
    """Return the bytes of a file, or None where its server does not state them."""
    parsed = urlparse(url)
    if parsed.scheme == "file":
        return Path(url2pathname(parsed.path)).stat().st_size
    try:
        with urlopen(Request(url, method="HEAD"), timeout=10) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, TypeError, ValueError):
        return None


def text(sizes: dict[str, int | None]) -> str:
    """Return the sentence: the large files by name, and the sum.

    >>> text({"torch 2.13.0": 190_000_000, "tqdm 4.70": 80_000, "sympy 1.14": 6_000_000})
    'torch 2.13.0 (190 MB) and 2 smaller packages: 196 MB'
    """
    if not sizes:
        return "nothing: everything is installed"
    large = {name: size for name, size in sizes.items() if size is not None and size >= LISTED}
    known = sum(size for size in sizes.values() if size is not None)
    unknown = sum(size is None for size in sizes.values())
    names = ", ".join(f"{name} ({size / 1e6:.0f} MB)" for name, size in large.items())
    rest = len(sizes) - len(large)
    smaller = f"{rest} smaller package{'s' * (rest > 1)}" if rest else ""
    and_unknown = f" and {unknown} of unknown size" if unknown else ""
    return f"{' and '.join(filter(None, (names, smaller)))}: {known / 1e6:.0f} MB{and_unknown}"


def warning(names: Iterable[str]) -> str:
    """Return a line for a plan with the CUDA libraries on a machine that may not need them, or nothing.

    >>> warning(["torch", "sympy"])
    ''
    """
    if not any(name.startswith(("nvidia-", "cuda-")) for name in names):
        return ""
    return (
        "The CUDA libraries are among them: gigabytes. For the CPU build stop here, and set PIP_INDEX_URL, or TORCH, "
        "as docs/start.md has it."
    )


def main() -> int:
    """Print the sentence, and the warning."""
    try:
        plan = planned(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        print("got no plan from pip, expected one; to fix: see its error above, and the install note in README.md")
        return error.returncode
    files = {f"{each['metadata']['name']} {each['metadata']['version']}": each["download_info"]["url"] for each in plan}
    print(f"To download into {sys.prefix}: {text({name: size_of(url) for name, url in files.items()})}", flush=True)
    if line := warning(files):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
