"""The line of user code that a warning names: the first frame outside fusedops and the libraries that call it."""

from __future__ import annotations

import os
import sys

_FUSEDOPS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


def user_stack_level(*libraries: str) -> int:
    """Return the ``stacklevel`` of the first frame that belongs neither to fusedops, to torch nor to ``libraries``.

    It is for the function that calls this one: ``warnings.warn(text, stacklevel=user_stack_level())``.

    Args:
        *libraries: names of packages, such as ``"transformers"``; one that is not imported is left out.
    """
    internal = ("<fusedops", _FUSEDOPS, *map(_folder, ("torch", *libraries)))
    level, frame = 1, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_code.co_filename.startswith(internal):
        level, frame = level + 1, frame.f_back
    return level


def _folder(package: str) -> str:
    """Return the folder of an imported package, or a text that no file name starts with."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return os.path.join(os.path.dirname(file), "") if file else "<none"
