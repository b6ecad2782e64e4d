"""causal_conv1d on Triton in the interpreter: several tiles of both kinds, several steps of sums, packed sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from right import assert_right

pytest.importorskip("triton", reason="triton is not installed")

from triton_cases import needs_loops

import fusedops
from fusedops_triton.convolution._causal_conv import conv_steps, conv_tile
from fusedops_triton.convolution._causal_conv_octets import takes_octets
from fusedops_triton.launch import launcher, settings

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
BOUNDS = torch.tensor([1, 30, 30, 31, 66], dtype=torch.int32)


def call_of(
    shape: tuple[int, int, int], width: int, by_channel: bool, dtype: torch.dtype = F32, weight: torch.dtype = F32
) -> dict[str, Any]:
    """Return a call with a bias and a state before. dtype: of x and the state. weight: of weight and bias."""
    numbers, (batch, channels, _) = torch.Generator().manual_seed(0), shape
    x, taps, bias, before = (
        torch.randn(each, generator=numbers)
        for each in (shape, (channels, width), (channels,), (batch, channels, width - 1))
    )
    x = (x.mT.contiguous().mT if by_channel else x).to(dtype)
    options = {"activation": "silu", "initial_state": before.to(dtype), "return_state": True}
    return {"x": x, "weight": taps.to(weight), "bias": bias.to(weight), **options}


def check(call: dict[str, Any]) -> None:
    with fusedops.use("triton", fallback="raise"):
        assert_right("causal_conv1d", **call)


@needs_loops
@pytest.mark.parametrize(
    ("by_channel", "shape", "steps"), [(True, (1, 200, 70), 2), (True, (2, 300, 3), 1), (False, (2, 3, 300), 1)]
)
def test_several_tiles_give_one_sum(by_channel: bool, shape: tuple[int, int, int], steps: int) -> None:
    """A program of the backward has one position of 256 channels, or 256 positions of one: 70 are 35 parts of 2."""
    tile = conv_tile(shape[1], shape[2], by_channel, True)
    assert conv_steps(shape[2], tile) == steps
    assert shape[1] > tile.channels or shape[2] > tile.positions
    check(call_of(shape, 4 if by_channel else 2, by_channel))


WALKS = ((2, 5, F32, BF16), (3, 516, BF16, F32), (4, 128, F16, F16), (4, 5, F32, F32))


@needs_loops
@pytest.mark.parametrize(
    ("width", "channels", "dtype", "weight", "positions"),
    # a run that is cut; less than one and whole ones in turn
    [(*walk, positions) for turn, walk in enumerate(WALKS) for positions in ((3, 64)[turn % 2], 70)],
    ids=str,
)
def test_walks_over_several_runs(
    width: int, channels: int, dtype: torch.dtype, weight: torch.dtype, positions: int
) -> None:
    """Channels are next to each other, and there is no state: runs of 32 positions, programs of up to 512 channels."""
    call = call_of((1 if channels > 500 else 2, channels, positions), width, True, dtype, weight)
    del call["initial_state"]
    check({**call, "return_state": False})
    if positions == 70 and dtype == F32:  # each gradient alone
        names = ("x", "weight", "bias")
        given = [call[name] for name in names]
        for name in names:
            results = []
            for backend in ("triton", "eager"):
                leaf = call[name].detach().requires_grad_()
                changed = [leaf if each == name else tensor for each, tensor in zip(names, given)]
                y = fusedops.causal_conv1d(*changed, activation="silu", backend=backend)
                results.append(torch.autograd.grad(y.float().square().sum(), leaf)[0])
            torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


OCTETS = ((2, BF16, F32), (3, F16, F16), (4, BF16, BF16))
LONG = ((256, 0), (2056, 132)), ((1040, 132), (2056, 0)), ((256, 0), (2056, 132))


@needs_loops
@pytest.mark.parametrize(
    ("width", "dtype", "weight", "positions", "processors"),
    [(*octets, *each) for octets, two in zip(OCTETS, LONG) for each in two],
    ids=str,
)
def test_eight_positions_at_a_time(
    width: int,
    dtype: torch.dtype,
    weight: torch.dtype,
    positions: int,
    processors: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of one program, and of several; backward, where few programs fill the processors, of several turns of one,
    the last of which is cut. It has sixteen positions at a time, which 2056 are not.
    """
    monkeypatch.setattr(settings, "chip", settings.chip._replace(processors=processors))
    steps, x = (3 * positions, positions) * 2, torch.empty(2, 3, positions, dtype=dtype)
    assert takes_octets(x, width, steps)
    assert takes_octets(x, width, steps, 16) == (positions != 2056)
    call = call_of((2, 3, positions), width, False, dtype, weight)
    del call["initial_state"]
    launcher.clear_layout_caches()  # launches depend on the processors
    try:
        check({**call, "return_state": False})
    finally:
        launcher.clear_layout_caches()


@needs_loops
@pytest.mark.parametrize(("positions", "by_channel", "dtype"), [(9, True, F32), (64, True, F32), (272, False, BF16)])
def test_nothing_is_added_from_past_the_end(positions: int, by_channel: bool, dtype: torch.dtype) -> None:
    """An infinite weight times the gradient of a position that is not there would be NaN, as would its logistic."""
    call = call_of((1, 4, positions), 4, by_channel, dtype)
    call["weight"][0, 0] = call["weight"][1, 1] = call["weight"][2, 2] = float("inf")
    for activation in ("none", "silu"):
        results = []
        for backend in ("triton", "eager"):
            x, weight = (call[name].detach().requires_grad_() for name in ("x", "weight"))
            y = fusedops.causal_conv1d(x, weight, activation=activation, backend=backend)
            results.append([each.float() for each in torch.autograd.grad(y, (x, weight), torch.ones_like(y))])
        allowed = 1e-2 if dtype == BF16 else 1e-5
        torch.testing.assert_close(*results, equal_nan=True, rtol=allowed, atol=allowed)


@needs_loops
@pytest.mark.parametrize(
    ("by_channel", "dtype", "weight"), [(True, BF16, F32), (False, F16, F16), (True, F32, BF16), (False, F32, F32)]
)
def test_packed_sequences(by_channel: bool, dtype: torch.dtype, weight: torch.dtype) -> None:
    call = call_of((1, 5, 70), 3, by_channel, dtype, weight)
    before = torch.randn(4, 5, 2, generator=torch.Generator().manual_seed(1)).to(dtype)
    check({**call, "cu_seqlens": BOUNDS, "initial_state": before})
