"""A backend for two device types with a kernel of one op for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from error_calls import made

import fusedops
from fusedops import TensorSpec
from fusedops.constraints import Dim


@pytest.fixture
def backend() -> Iterator[fusedops.Backend]:
    """A backend whose kernel for a CPU takes other sizes than that for CUDA, and has no other for CUDA's backward."""
    for_cpu = replace(made(Dim("x", (-1,), multiple_of=8)), device_types=("cpu",))
    for_cuda = replace(made(Dim("x", (-1,), multiple_of=32)), device_types=("cuda",))
    backward = made(direction="backward", form="grad, x, bias, approximate, needs")
    kernels = (for_cpu, for_cuda, replace(backward, device_types=("cpu",)))
    plugin = fusedops.Backend("mine", ("cpu", "cuda"), 200, kernels)
    fusedops.register(plugin)
    yield plugin
    fusedops.unregister("mine")


@pytest.mark.parametrize(("device", "multiple", "backward"), [("cpu", 8, "mine"), ("cuda", 32, "eager")])
def test_each_kernel_serves_its_device_type(
    device: str, multiple: int, backward: str, backend: fusedops.Backend
) -> None:
    def decision(size: int) -> fusedops.Decision:
        return fusedops.explain(
            "bias_gelu", TensorSpec((2, size), torch.float32, device), TensorSpec((size,), device=device)
        )

    assert (decision(multiple).backend, decision(multiple).backward) == ("mine", backward)
    refused = decision(multiple + 4)
    assert refused.backend != "mine"
    assert f"expected a multiple of {multiple}" in str(refused)


def test_the_matrix_names_the_device_type_of_each(
    backend: fusedops.Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    from fusedops._cli.main import main

    assert main(["matrix", "--op", "bias_gelu", "--backend", "mine"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-1] for line in lines if "forward" in line] == ["cpu", "cuda"]
