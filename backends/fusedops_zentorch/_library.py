"""The compiled library of zentorch: where it is, whether it is for this torch, and its functions.

zentorch is released for each minor release of torch, which its first two numbers are. The library is linked against
torch's C++ symbols: with another release it does not load, or loads and reads other structures.

Source: zentorch 2.13.0.2, ``zentorch/__init__.py``.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch

import fusedops

DTYPES = (torch.float32, torch.bfloat16)

#: Why no kernel promises that a row has the same bits whatever the other rows are.
NOT_PROMISED = "zentorch's documents do not promise it"


def unavailable() -> fusedops.Unavailable | None:
    """Load the library; return why it cannot run here, else None."""
    release = ".".join(torch.__version__.split(".")[:2])
    install = f"pip install 'zentorch=={release}.*'"
    path = library_path()
    if path is None:
        return fusedops.Unavailable("zentorch is not installed", install)
    try:
        version = metadata.version("zentorch")
    except metadata.PackageNotFoundError:
        version = "of an unknown release"
    if version.split(".")[:2] != release.split("."):
        return fusedops.Unavailable(f"zentorch {version} is not for torch {release}", install)
    capability = torch.backends.cpu.get_cpu_capability()
    if capability != "AVX512":
        return fusedops.Unavailable(
            f"torch.backends.cpu.get_cpu_capability() is {capability!r}, and zentorch is made for AVX-512",
            "leave the calls to the other backends, which need no setting",
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return fusedops.Unavailable(f"the library of zentorch {version} does not load: {error}", install)
    return None


def library_path() -> Path | None:
    """Return the file of the library, without an import of zentorch; None where it is not installed."""
    spec = util.find_spec("zentorch")
    folders = spec.submodule_search_locations if spec is not None else None
    paths = [Path(folder) / "libzentorch.so" for folder in folders or ()]
    return next((path for path in paths if path.exists()), None)


@cache
def function(name: str) -> Any:
    """Return a function of the library, which the probe has loaded."""
    return getattr(torch.ops.zentorch, name).default
