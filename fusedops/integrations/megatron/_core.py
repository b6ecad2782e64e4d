"""The parts of Megatron-core that the integration derives from, whatever the version.

Megatron warns at import of each optional package that is missing. The warnings are the installation's, not the call's.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from typing import Any


def core(name: str) -> Any:
    """Return a module of megatron.core, imported without the warnings of other packages that are missing.

    Raises:
        ModuleNotFoundError: megatron-core is not installed, or has no such module.

    >>> core("transformer.enums").AttnMaskType.causal.name
    'causal'
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(f"megatron.core.{name}")
        except ModuleNotFoundError as error:
            if error.name not in ("megatron", "megatron.core"):
                raise
            raise ModuleNotFoundError(
                f"fusedops.integrations.megatron: got no package {error.name}, expected megatron-core; to fix: pip "
                f"install megatron-core",
                name=error.name,
            ) from None


def version() -> str:
    """Return the version of megatron-core.

    >>> version().split(".")[0].isdigit()
    True
    """
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return str(core("package_info").__version__)
