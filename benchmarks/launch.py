"""The host time of a launch: each launcher of the triton backend, including allocation, and a bare launch.

The bare launch is ``kernel[grid](...)`` of the same kernel with the same, prepared arguments. Both take turns; the
figures are medians. Without a GPU, a stub driver is used: Triton compiles and runs all of its Python code, and the last
call, into the GPU's driver, does nothing. Usage: python -m benchmarks.launch [--out FILE.jsonl]
"""

# ruff: noqa: TID251 - this file measures the launchers of one backend

from __future__ import annotations

import argparse
import json
import os
import statistics
import timeit
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from benchmarks.machine import environment

CALLS, ROUNDS = 300, 31


class StubDriver:
    """A Triton driver for a GPU of compute capability 9.0. Record launches if ``launches`` is a list.

    As a GPU's driver, it loads nothing while ``capturing``.
    """

    def __init__(self) -> None:
        self.device, self.stream = 0, 100
        self.capturing = False
        self.launches: list[tuple[Any, ...]] | None = None
        self.utils = SimpleNamespace(
            load_binary=self._load_binary,
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
        )

    def _load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        if self.capturing:
            raise RuntimeError("Triton Error [CUDA]: operation not permitted when stream is capturing")
        return "module", (name, device), 32, 0, 1024

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream + device

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            if self.launches is not None:
                self.launches.append(args)

        return launch


def bare(launcher: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that repeats the launch of ``launcher`` through Triton, with prepared arguments."""
    launches: list[Callable[[], Any]] = []
    run = JITFunction.run

    def recording_run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        names = (*kernel.arg_names, "num_warps", "enable_fp_fusion")  # Triton adds other arguments
        launch_kwargs = {name: value for name, value in kwargs.items() if name in names}
        launches.append(lambda: kernel[grid](*args, **launch_kwargs))
        return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    JITFunction.run = recording_run
    try:
        launcher()
    finally:
        JITFunction.run = run
    (launch,) = launches
    return launch


def calls(device: str) -> dict[str, Callable[[], Any]]:
    """Return calls of the launchers on small tensors. Each call does one launch."""
    from fusedops_triton.bias._bias_dropout import dropout_backward, dropout_forward
    from fusedops_triton.bias._bias_gelu import gelu_backward, gelu_forward
    from fusedops_triton.softmax._softmax import softmax_backward, softmax_forward

    x = torch.randn(2, 4, 64, 256, device=device).bfloat16()
    mask = torch.zeros(2, 1, 64, 256, dtype=torch.bool, device=device)
    rows, bias = x.view(-1, 256), torch.zeros(256, device=device).bfloat16()
    seed = torch.tensor([7], device=device)
    return {
        "softmax": lambda: softmax_forward(x, None, 0.3, False),
        "softmax, mask": lambda: softmax_forward(x, mask, 0.3, False),
        "softmax backward": lambda: softmax_backward(x, x, 0.3, False),
        "gelu": lambda: gelu_forward(rows, bias, "tanh"),
        "gelu backward, dx": lambda: gelu_backward(rows, rows, bias, "tanh", (True, False)),
        "dropout": lambda: dropout_forward(rows, bias, None, 0.1, True, seed),
        "dropout add": lambda: dropout_forward(rows, bias, rows, 0.1, True, seed),
        "dropout backward, dx": lambda: dropout_backward(rows, seed, bias, 0.1, True, rows.dtype, (True, False)),
    }


def measure(device: str, rounds: int = ROUNDS) -> dict[str, tuple[float, float]]:
    """Return the times in us of the bare launch and of the launcher: medians of rounds, in turns."""
    work = [(name, bare(launcher), launcher) for name, launcher in calls(device).items()]
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name, _, _ in work}
    for _ in range(rounds):
        for name, *both in work:
            for rounds_us, function in zip(times[name], both):
                rounds_us.append(timeit.timeit(function, number=CALLS) / CALLS * 1e6)
                if device == "cuda":
                    torch.cuda.synchronize()  # with a full queue, the time of the GPU would be measured
    return {name: (statistics.median(plain), statistics.median(whole)) for name, (plain, whole) in times.items()}


def main() -> None:
    """Print the table, and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, help="a .jsonl file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        triton.runtime.driver.set_active(StubDriver())
    machine = environment(device, 1, "default")
    where = torch.cuda.get_device_name() if device == "cuda" else f"a stub driver, {machine['device']}"
    print(f"host time of a launch on {where}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"{'launcher':22} {'bare':>9} {'launcher':>9} {'added':>9} {'ratio':>6}")
    times = measure(device, options.rounds)
    for name, (plain, whole) in times.items():
        print(f"{name:22} {plain:6.2f} us {whole:6.2f} us {whole - plain:6.2f} us {whole / plain:6.2f}")
    if options.out:
        rows = [
            {"launcher": name, "bare_us": round(plain, 3), "launcher_us": round(whole, 3), **machine, "device": where}
            for name, (plain, whole) in times.items()
        ]
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
