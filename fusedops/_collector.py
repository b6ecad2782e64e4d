"""paused: Python's garbage collector stands still while fusedops is imported.

What an import makes stays, and it makes enough for one collection of all objects, torch's too, which takes 0.1 s.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def paused() -> Generator[None]:
    """Let nothing be collected in a block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
