"""Every text of a PolicyError, and of the warnings about the environment, word for word."""

from collections.abc import Callable
from typing import Any

import pytest
from error_calls import POLICY, X, gelu
from error_texts import Table
from state import fail_backend, keep_backends

import fusedops

TABLE = Table(__file__, "fakes")
pin = TABLE.pin


def policy(text: Any, **level: Any) -> Callable[[], Any]:
    return lambda: fusedops.set_policy(text, **level)


pin("a backend's name", policy("tritn"), POLICY)
pin("an op's name", policy("bias_glu=eager"), POLICY)
pin("a level", policy(None, fallback="rise"), POLICY)
pin("a level of another library", policy(None, fallback="error"), POLICY)
pin("an adapt setting", policy(None, adapt="padd"), POLICY)
pin("a rows setting", policy(None, rows="independant"), POLICY)
pin("two orders", policy("npu; eager"), POLICY)
pin("two for an op", policy("bias_gelu=npu; bias_gelu=eager"), POLICY)
pin("an empty name", policy("npu,"), POLICY)
pin("no text", policy(5), POLICY)
pin("backend= of no text", gelu(X, backend=["npu"]), POLICY)
pin("explain's op", lambda: fusedops.explain("bias_gel"), POLICY)


def named_after_failing() -> None:
    fail_backend("npu", OSError("libhccl.so is missing"))
    fusedops.set_policy("npu")


pin("a failed one", named_after_failing, fusedops.PluginError)


def environment(name: str, value: str) -> Callable[[], Any]:
    def run() -> None:
        keep_backends("eager")  # the variables of other backends are no part of the text
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, value)
            fusedops.get_policy()

    return run


pin("an unknown variable", environment("FUSEDOPS_BACKENDS", "npu"), fusedops.FusedOpsWarning)

test_a_text, test_no_text_is_left_over = TABLE.tests()
