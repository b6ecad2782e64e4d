"""Reading a file that this user alone can have written, and the user's cache folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class NotOwnFileError(OSError):
    """A file that another user may have written, that is too large, or that is not a regular file."""


def read_own_file(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file that belongs to this user and that no other user can write.

    A symbolic link is not followed, and a FIFO is not waited for.

    Args:
        path: the file.
        most_bytes: the largest size that is read.

    Raises:
        NotOwnFileError: the file is of another kind or owner, others can write it, or it is larger.
        OSError: it cannot be opened or read, or is a symbolic link.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    handle = os.open(path, flags)
    try:
        # of the opened file, not of the path: another file may be at the path by now
        problem = _problem(os.fstat(handle), most_bytes)
        if problem:
            raise NotOwnFileError(problem)
        content = b""
        while len(content) <= most_bytes and (part := os.read(handle, most_bytes + 1 - len(content))):
            content += part
    finally:
        os.close(handle)
    if len(content) > most_bytes:  # it has grown since
        raise NotOwnFileError(f"got more than {most_bytes} bytes")
    return content


def _problem(status: os.stat_result, most_bytes: int) -> str:
    if not stat.S_ISREG(status.st_mode):
        return f"got {stat.filemode(status.st_mode)}, expected a regular file"
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        return f"got a file of user {status.st_uid}, expected one of user {os.geteuid()}"
    if os.name == "posix" and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"got {stat.filemode(status.st_mode)}, expected a file that no other user can write"
    if status.st_size > most_bytes:
        return f"got {status.st_size} bytes, expected at most {most_bytes}"
    return ""


def cache_folder() -> Path | None:
    """Return the user's cache folder as the XDG specification defines it, or None for a user without a home folder."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(folder):
        return Path(folder)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # HOME is not set, and the user has no entry in the system's table
        return None
