"""Every text of the command line, word for word."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_calls import INVALID, POLICY, SOFTMAX
from error_texts import Table

from fusedops._cli import main
from fusedops.integrations._benchmark import _call_of

TABLE = Table(__file__, "fakes")
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


def no_tokens() -> None:
    class Images(torch.nn.Module):
        main_input_name = "pixel_values"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("fusedops._cli.try"), "_loaded", lambda name: Images())
        command("try", "vit")()


def too_many_tokens() -> None:
    class Short(torch.nn.Embedding):
        main_input_name, device = "input_ids", torch.device("cpu")

        def get_input_embeddings(self) -> torch.nn.Module:
            return self

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            raise IndexError("of 512 positions")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("fusedops._cli.try"), "_loaded", lambda name: Short(8, 4))
        command("try", "bert", "--length", "600")()


def no_loss() -> None:
    class Headless(torch.nn.Module):
        def forward(self, labels: torch.Tensor) -> torch.Tensor:
            return labels

    _call_of(Headless(), {"labels": torch.ones(2)}, is_step=True)()


pin("fused loss", command("try", "bert", "--fused-loss"), INVALID)
pin("too many tokens", too_many_tokens, INVALID)
pin("no loss", no_loss, INVALID)
pin("a command", command("explian"), POLICY)
pin("rank", command("rank"), POLICY)
pin("no model", command("try", os.devnull), INVALID, form="got .* expected .*to fix")
pin("no tokens", no_tokens, INVALID)
pin("an option", command("explain", SOFTMAX, "--maks", "4"), INVALID)
pin("no tensor", command("explain", SOFTMAX), INVALID)
pin("no arguments", command("explain", "quantized_linear", "--x", "3,512"), INVALID)
pin("an op", command("bench", "bias_gel"), POLICY)
pin("a dtype", command("bench", "--dtype", "bf61"), INVALID)
pin("a floating dtype", command("bench", "--dtype", "int8"), INVALID)
pin("a device", command("bench", "--device", "meta"), INVALID)
pin("an index", command("bench", "--device", "cpu:3"), INVALID)
pin("a device type", command("matrix", "--device", "cdua"), INVALID)
pin("a device text", command("matrix", "--device", "npu:x"), INVALID)
pin("a capability", command("explain", SOFTMAX, "--capability", "9"), INVALID)
pin("a count", command("bench", "--elements", "-5"), INVALID)
pin("seconds", command("bench", "--seconds", "nan"), INVALID)
pin("a backend", command("matrix", "--backend", "egaer"), POLICY)
pin("a tensor", command("explain", SOFTMAX, "--x", "a"), INVALID)
pin("a flag", command("explain", SOFTMAX, "--x", "4,4", "--causal", "x"), INVALID)
pin("a number", command("explain", SOFTMAX, "--x", "4,4", "--scale", "x"), INVALID)

test_a_text, test_no_text_is_left_over = TABLE.tests()
