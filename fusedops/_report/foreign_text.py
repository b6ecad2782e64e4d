"""Texts of users and plugins, made safe for a message: no control characters, no endless lines."""

from __future__ import annotations

LONGEST = 300  # characters of one foreign text in a message
_LONGEST_LINE = 4000  # of a whole message: a call's given arguments and the line that reproduces it take up to 2000


def printable(text: str, longest: int = LONGEST) -> str:
    r"""Return a text of a user or plugin for a message: control characters are escaped, and a long text is cut.

    Args:
        text: any. New lines and tabs stay, as messages of exceptions have them.
        longest: the number of characters above which the middle is left out.

    >>> printable("cpu\x1b[31m")
    'cpu\\x1b[31m'
    >>> printable("cpu," * 1000, longest=40)
    'cpu,cpu,cpu,cpu,cpu,...of 4000 characters'
    """
    if len(text) > longest:
        text = f"{text[: longest // 2]}...of {len(text)} characters"
    return "".join(char if char.isprintable() or char in "\n\t" else _escaped(char) for char in text)


def message(text: str) -> str:
    r"""Return a message for a terminal: control characters are escaped, and the middle of a long line is left out.

    >>> message("got device 'cpu\x1b[31m'; to fix: leave it out")
    "got device 'cpu\\x1b[31m'; to fix: leave it out"
    """
    if len(text) <= _LONGEST_LINE and text.isprintable():
        return text
    return "\n".join(map(_line, text.split("\n")))


def _line(text: str) -> str:
    if len(text) > _LONGEST_LINE:
        text = f"{text[: _LONGEST_LINE // 2]} ... {text[-_LONGEST_LINE // 4 :]}"
    return printable(text, _LONGEST_LINE)


def _escaped(character: str) -> str:
    return repr(character)[1:-1]


def error_text(error: BaseException) -> str:
    """Return an exception's class and message. An exception that raises while it is printed has its class alone.

    >>> error_text(MemoryError())
    'MemoryError'
    """
    name = type(error).__name__
    try:
        message = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # a plugin's own __str__ must not end the call that reports it
        return f"{name}, whose text raises {type(failure).__name__}"
    message = printable(message, 10_000)
    return f"{name}: {message}" if message else name
