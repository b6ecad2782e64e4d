"""Functions run in threads of their own, and numbers of torch's threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch


def in_threads(*functions: Callable[[], object]) -> None:
    """Run each function in a thread, all at a time, and raise here what the first of them raised."""
    raised: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:  # raised again in the thread of the check
            raised.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


@contextmanager
def torch_threads(count: int) -> Generator[None]:
    """Run a block with a number of threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
