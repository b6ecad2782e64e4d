"""Every text of a PolicyError, and of the warnings about the environment, word for word."""

from collections.abc import Callable
from typing import Any

import pytest
from error_calls import POLICY, X, gelu
from error_texts import Table
from state import fail_backend, keep_backends

import fusedops

TABLE = Table(__file__)
pin = TABLE.pin


def policy(text: Any, **level: Any) -> Callable[[], Any]:
    return lambda: fusedops.set_policy(text, **level)


pin("a backend's name", policy("tritn"), POLICY, "'tritn'", "expected one of", "write 'triton'")
pin("an op's name", policy("bias_glu=eager"), POLICY, "'bias_glu'", "expected one of", "write 'bias_gelu'")
pin("a level", policy(None, fallback="rise"), POLICY, "'rise'", "expected one of raise, silent", "write 'raise'")
pin("an adapt setting", policy(None, adapt="padd"), POLICY, "'padd'", "expected one of none, pad", "write 'pad'")
pin("two orders", policy("npu; eager"), POLICY, 'got "npu; eager"', "expected one", "as in")
pin(
    "two for an op",
    policy("bias_gelu=npu; bias_gelu=eager"),
    POLICY,
    "two orders for bias_gelu",
    "expected one",
    "join them",
)
pin("an empty name", policy("npu,"), POLICY, 'got "npu,"', "expected backends", 'write "npu,triton"')
pin("no text", policy(5), POLICY, "of type int", "expected a str", '"npu,triton"')
pin("backend= of no text", gelu(X, backend=["npu"]), POLICY, "of type list", "expected a str", '"npu,triton"')
pin("explain's op", lambda: fusedops.explain("bias_gel"), POLICY, "'bias_gel'", "expected one of", "write 'bias_gelu'")


def named_after_failing() -> None:
    fail_backend("npu", OSError("libhccl.so is missing"))
    fusedops.set_policy("npu")


pin(
    "a failed one",
    named_after_failing,
    fusedops.PluginError,
    "libhccl.so is missing",
    "expected one that loads",
    "see its traceback",
)


def environment(name: str, value: str) -> Callable[[], Any]:
    def run() -> None:
        keep_backends("eager")  # the variables of other backends are no part of the text
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, value)
            fusedops.get_policy()

    return run


pin(
    "an unknown variable",
    environment("FUSEDOPS_BACKENDS", "npu"),
    fusedops.FusedOpsWarning, "'FUSEDOPS_BACKENDS'", "expected one of", "write 'FUSEDOPS_BACKEND'",
)  # fmt: skip


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", TABLE.pins)
def test_a_text(name: str) -> None:
    TABLE.check(name)


def test_no_text_is_left_over() -> None:
    TABLE.check_complete()
