"""The commands, their parsers, and their exit codes."""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

import fusedops
from fusedops._cli.output import print_error, print_warning, width
from fusedops._report.suggestion import unknown_name
from fusedops.errors import FusedOpsError, FusedOpsWarning, InvalidInputError, PolicyError

COMMANDS = ("info", "try", "explain", "plan", "matrix", "doctor", "check", "bench")
INTERRUPTED = 130  # as a shell reports Ctrl-C
CLOSED_PIPE = 0  # `fusedops matrix | head`
EXIT_CODES = """\
exit codes:
  0    no problem; explain: no fallback
  1    doctor: a problem; check: a check failed; explain: the call would fall back; plan: a required backend does not
       serve a call, or the model makes none; bench: nothing was measured
  2    the command line, the call that it describes, or a policy is not valid; check: the backend cannot run here;
       try: no model of transformers; plan: the model cannot be planned
  3    explain: no backend serves the call
  130  Ctrl-C; bench prints what it has measured

`fusedops COMMAND --help` describes each command, and `fusedops explain OP --help` the arguments of each op.
Example: fusedops explain scaled_masked_softmax --x 8,16,512,512:bf16@npu --mask 8,1,512,512 --scale 0.125
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; None takes the process's own.

    Returns:
        The exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a text that the terminal's encoding lacks is shown escaped
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", FusedOpsWarning)
            warnings.showwarning = _show_warning
            code = _run(_joined(sys.argv[1:] if argv is None else argv))
        if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison]
            sys.stdout.flush()
        return code
    except FusedOpsError as error:
        print_error(error)
        return 2
    except KeyboardInterrupt:
        print_error("stopped")
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return CLOSED_PIPE
    except OSError as error:  # of the output: /dev/full
        print_error(f"got {error}, expected an output that can be written; to fix: write it elsewhere")
        _discard_output()
        return 2


def _discard_output() -> None:
    """Send the rest of the output nowhere, so that the interpreter's flush at exit raises nothing."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    command = next((word for word in argv if not word.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        fix = "use `fusedops bench --rank`" if command == "rank" else ""
        raise PolicyError(unknown_name("command", command, [*COMMANDS, "--help", "--version"], fix=fix))
    parser = _parser(command, argv)
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    if command == "explain":
        _check_op(argv)
    options, others = parser.parse_known_args(argv)
    if others:
        leaf: argparse.ArgumentParser = options.parser
        known = sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]*", leaf.format_help())))
        leaf.error(unknown_name("argument", others[0], known))
    from fusedops._cli.installation import unknown_plugins

    for message in unknown_plugins() if command != "doctor" else ():  # doctor has it in its report
        print_warning(message)
    return int(_module(options.command).run(options))


def _module(command: str) -> Any:
    return import_module(f"fusedops._cli.{command}")


def _check_op(argv: Sequence[str]) -> None:
    """Raise where the word after ``explain`` is no op, with the nearest name, which argparse does not give."""
    from fusedops._explain import find_op

    after = [word for word in argv[argv.index("explain") + 1 :][:1] if not word.startswith("-")]
    for name in after:
        find_op(name, "explain")


def _joined(argv: Sequence[str]) -> list[str]:
    """Return the arguments with ``--scale -1e-3`` written as ``--scale=-1e-3``: argparse takes -1e-3 for an option."""
    words: list[str] = []
    for word in argv:
        if words and re.fullmatch("--[a-z][a-z0-9_-]*", words[-1]) and re.match(r"-(\.?[0-9]|inf|nan)", word):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are raised, in the form of the other errors."""

    def error(self, message: str) -> NoReturn:
        fix = "" if "; to fix: " in message else f"; to fix: see `{self.prog} --help`"
        command = self.prog.partition(" ")[2]  # print_error writes the program's name
        raise InvalidInputError(f"{command and f'{command}: '}{message}{fix}")

    def format_help(self) -> str:
        """Return the help, no line of it wider than the terminal: argparse indents options by the program's name."""
        columns = width()
        lines: list[str] = []
        for line in super().format_help().splitlines():
            indent = " " * min(len(line) - len(line.lstrip()), columns // 4)
            fits = len(line) <= columns
            lines += [line] if fits else textwrap.wrap(line, columns, initial_indent=indent, subsequent_indent=indent)
        return "\n".join(lines) + "\n"


class _Formatter(argparse.HelpFormatter):
    """A formatter that wraps each line of a description on its own, and keeps its indent."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for line in text.splitlines():
            hanging = re.match(r" *(\d+ +)?", line)
            under = " " * hanging.end() if hanging else ""
            lines += textwrap.wrap(line, width, subsequent_indent=under, break_on_hyphens=False) or [""]
        return "\n".join(indent + line for line in lines)


def _parser(command: str | None, words: Collection[str]) -> argparse.ArgumentParser:
    """Build the parser. Only the parser of ``command`` gets its arguments, and of explain those of the ops in words."""
    description = "Inspect an installation of fusedops, the backends it selects, their speed and their conformance."
    parser = _Parser(
        prog="fusedops", description=description, epilog=EXIT_CODES, formatter_class=_Formatter, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"fusedops {fusedops.__version__}")
    parser.set_defaults(parser=parser)
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for name in COMMANDS:
        module = _module(name)
        description = getattr(module, "DESCRIPTION", "")
        one = parsers.add_parser(
            name,
            help=module.HELP,
            description=f"{module.HELP[0].upper()}{module.HELP[1:]}. {description}",
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        one.set_defaults(parser=one)
        if name != command:
            continue
        if name == "explain":
            module.add_ops(one, words)
            continue
        if hasattr(module, "add_arguments"):
            module.add_arguments(one)
        one.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    if issubclass(category, FusedOpsWarning):
        print_warning(message)
    else:
        print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=sys.stderr)
