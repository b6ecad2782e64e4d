"""Calls and stubs shared by the tests of autotuning."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedops_triton import _autotune, _launch
from fusedops_triton._softmax import softmax_forward

X = torch.randn(3, 5, 40)


def forget() -> None:
    _autotune.clear_caches()
    _launch.clear_layout_caches()


class Timer:
    """Report the last setting as the quickest, and note how many settings it was given."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, calls: Sequence[Callable[[], object]], home: Tensor) -> list[float]:
        for call in calls:
            call()
        self.asked.append(len(calls))
        return [float(len(calls) - at) for at in range(len(calls))]


def only(folder: pathlib.Path) -> pathlib.Path:
    (file,) = folder.iterdir()
    return file


def softmax(x: Tensor = X) -> Tensor:
    return softmax_forward(x, None, 0.3, False)


#: Runs programs in forks of one process at once, and prints what each has printed as JSON.
AT_ONCE = """
import json, os, sys
outputs = []
for script in {scripts}:
    read, write = os.pipe()
    if os.fork() == 0:
        os.dup2(write, 1)
        exec(script, {})
        sys.stdout.flush()
        os._exit(0)
    os.close(write)
    outputs.append(open(read))
print(json.dumps([json.loads(output.read()) for output in outputs]))
"""
