"""fusedops as a kernel of the package kernels: layers for models of transformers, and the ops as functions.

An installed fusedops is used where it is at least as new as the one in this folder. The ops select the backend of each
call, as anywhere else.
"""

import importlib.util
import sys
from pathlib import Path

VERSION = "@VERSION@"  # written by tools/kernels_repository.py

_installed = importlib.util.find_spec("fusedops")
if _installed is None or _installed.origin is None:  # no origin: a folder of that name, such as one with a clone
    sys.path.append(str(Path(__file__).parent / "packages"))  # last: it takes the place of nothing that is installed
import fusedops


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


if _numbers(fusedops.__version__) < _numbers(VERSION):
    raise ImportError(
        f"got fusedops {fusedops.__version__}, installed in {Path(fusedops.__file__).parent}, expected at least "
        f"{VERSION}; to fix: upgrade it, or uninstall it: this kernel has its own"
    )

from fusedops.ops import *

from . import layers as layers
