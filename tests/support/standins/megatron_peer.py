"""The peer of the parity tests: megatron-core itself, on a CPU."""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode


@cache
def modules() -> Any:
    """Megatron's modules by short names, and its version; skips the test where it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of other packages that are not installed, and of what is deprecated in torch.compile
            found = {
                name: importlib.import_module(f"megatron.core.{path}")
                for name, path in (
                    ("softmax", "fusions.fused_softmax"),
                    ("gelu", "fusions.fused_bias_gelu"),
                    ("dropout", "fusions.fused_bias_dropout"),
                    ("utils", "utils"),
                    ("layers", "transformer.utils"),
                    ("enums", "transformer.enums"),
                )
            }
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron"):
            raise
        pytest.skip("needs megatron-core, the peer to compare with; install the dev dependencies")
    version = tuple(int(part) for part in importlib.metadata.version("megatron-core").split(".")[:2])
    return SimpleNamespace(version=version, **found)


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Run Megatron's code on a CPU: its masks are made on "cuda", its functions are compiled with torch.compile."""
    with torch.compiler.set_stance("force_eager"), _CudaMeansCpu():
        yield
