"""Every text of the command line, word for word."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from error_calls import INVALID, POLICY, SOFTMAX
from error_texts import Table

from fusedops._cli import main

TABLE = Table(__file__)
pin = TABLE.pin


def command(*words: str) -> Callable[[], Any]:
    """A command, with the error that it would print on one line."""

    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(main, "print_error", _raise)
            main.main(words)

    return run


def _raise(text: object) -> None:
    error = sys.exception() if sys.version_info >= (3, 11) else sys.exc_info()[1]
    assert error is not None
    raise error


pin("a command", command("explian"), POLICY, "'explian'", "expected one of", "write 'explain'")
pin("an option", command("explain", SOFTMAX, "--maks", "4"), INVALID, "'--maks'", "expected one of", "write '--mask'")
pin("an op", command("bench", "bias_gel"), POLICY, "'bias_gel'", "expected one of", "write 'bias_gelu'")
pin("a dtype", command("bench", "--dtype", "bf61"), INVALID, "'bf61'", "expected one of", "write 'bf16'")
pin(
    "a floating dtype", command("bench", "--dtype", "int8"), INVALID, "'int8'", "a floating dtype", "write it like bf16"
)
pin("a device", command("bench", "--device", "meta"), INVALID, "'meta'", "on this machine", "leave out --device")
pin("an index", command("bench", "--device", "cpu:3"), INVALID, "'cpu:3'", "at most cpu:0", "write --device cpu:0")
pin("a device type", command("matrix", "--device", "cdua"), INVALID, "'cdua'", "expected one of", "write 'cuda'")
pin("a device text", command("matrix", "--device", "npu:x"), INVALID, "'npu:x'", "with an index", "npu:0")
pin("a capability", command("explain", SOFTMAX, "--capability", "9"), INVALID, "'9'", "two numbers", "--capability 9.0")
pin("a count", command("bench", "--elements", "-5"), INVALID, "'-5'", "at least 1", "write it like 65536")
pin("seconds", command("bench", "--seconds", "nan"), INVALID, "'nan'", "above 0", "write it like 0.2")
pin("a backend", command("matrix", "--backend", "egaer"), POLICY, "'egaer'", "expected one of", "write 'eager'")
pin("a tensor", command("explain", SOFTMAX, "--x", "a"), INVALID, "'a'", "expected sizes", "8,16,512,512:bf16@npu")
pin(
    "a flag",
    command("explain", SOFTMAX, "--x", "4,4", "--causal", "x"),
    INVALID,
    "'x'",
    "expected true or false",
    "write it like true",
)
pin(
    "a number",
    command("explain", SOFTMAX, "--x", "4,4", "--scale", "x"),
    INVALID,
    "'x'",
    "expected a number",
    "write it like 1",
)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", TABLE.pins)
def test_a_text(name: str) -> None:
    TABLE.check(name)


def test_no_text_is_left_over() -> None:
    TABLE.check_complete()
