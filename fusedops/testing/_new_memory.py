"""Calls for which torch fills the memory of new tensors: what a kernel does not write, and what it reads before."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

_settings: Any = torch.utils.deterministic  # its setting is a property of the module's class


@contextmanager
def filled_memory() -> Generator[None]:
    """Fill new tensors with NaN, or the largest integer, in the block.

    torch does so where deterministic algorithms are wanted: these are on in the block, and one that torch lacks is a
    warning. Bits may be others than outside. Tensors whose memory a kernel gets from elsewhere are not filled.

    >>> with filled_memory():
    ...     torch.empty(2)
    tensor([nan, nan])
    """
    mode, fills = torch.get_deterministic_debug_mode(), _settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    _settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        _settings.fill_uninitialized_memory = fills
