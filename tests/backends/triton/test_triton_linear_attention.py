"""linear_attention on Triton in the interpreter: edges of chunks and columns, several blocks, rows that are not there.

tests/ops/test_linear_attention.py and the conformance kit compare its numbers with float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pairwise import pairwise
from right import assert_right

pytest.importorskip("triton", reason="triton is not installed")

from triton_cases import needs_loops

import fusedops
from fusedops_triton.launch import launcher, settings
from fusedops_triton.launch.chips import CHIPS
from fusedops_triton.linear_attention import (
    _linear_attention,
    _linear_attention_backward,
    _linear_attention_chunk_gradients,
    _linear_attention_parts,
)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
KINDS = ("", "decay", "beta", "decay beta")


def call_of(
    positions: int, sizes: tuple[int, int], kind: str, dtypes: tuple[torch.dtype, ...] = (F32,) * 3, **options: Any
) -> dict[str, Any]:
    """Return a call with 1 key head and 2 value heads; sizes: Dk and Dv; dtypes: of q, k and v."""
    generator = torch.Generator().manual_seed(positions)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    (size_k, size_v), rows = sizes, (1, positions, 2)
    call = {"q": normal(1, positions, 1, size_k), "k": normal(1, positions, 1, size_k), "v": normal(*rows, size_v)}
    call = {name: each.to(dtype) for (name, each), dtype in zip(call.items(), dtypes)}
    if "decay" in kind:
        call["decay"] = -normal(*rows).exp() / 8
    if "beta" in kind:
        call["beta"] = normal(*rows).sigmoid()
    return {**call, "normalize": "beta" in kind, "return_state": True, **options}


def check(call: dict[str, Any]) -> None:
    with fusedops.use("triton", fallback="raise"):
        assert_right("linear_attention", **call)


@needs_loops
@pytest.mark.parametrize(
    ("positions", "sizes", "kind", "dtypes"),
    pairwise(
        [_linear_attention.FEW, _linear_attention.FEW + 1, 33, 65],
        [(3, 5), (16, 40), (20, 16), (70, 1)],
        KINDS,
        [(F32,) * 3, (BF16,) * 3, (BF16, F16, F16), (F32, BF16, BF16)],
    ),
    ids=str,
)
def test_edges_of_chunks_and_blocks(
    positions: int, sizes: tuple[int, int], kind: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    check(call_of(positions, sizes, kind, dtypes))


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, tuple[int, int]], None]]:
    """Pretend that there is a chip, with a version of Triton."""

    def pretend(target: str, triton: tuple[int, int]) -> None:
        monkeypatch.setattr(settings, "chip", CHIPS[target])
        monkeypatch.setattr(_linear_attention_parts, "TRITON", triton)
        launcher.clear_layout_caches()

    yield pretend
    launcher.clear_layout_caches()


def constants_of(sizes: _linear_attention_parts.Sizes) -> dict[str, dict[str, Any]]:
    """Return the compile-time numbers of each kernel with several products."""
    launches = (
        _linear_attention_parts._parts_launch(sizes, True),
        _linear_attention._walk_launch(sizes),
        _linear_attention_backward._back_launch(sizes),
        _linear_attention_chunk_gradients._scores_launch(sizes, True),
        _linear_attention_chunk_gradients._chunk_launch(sizes, True)[0],
    )
    return {launch.kernel.__name__: launch.constants for launch in launches}


@pytest.mark.parametrize("sizes", [(4096, 128, 128), (4096, 16, 16), (40, 100, 70)])
def test_where_triton_multiplies_small_sides_wrongly_there_are_none(
    sizes: tuple[int, int, int], version: Callable[[str, tuple[int, int]], None]
) -> None:
    positions, size_k, size_v = sizes
    call = _linear_attention_parts.Sizes(1, positions, 32, 2, size_k, size_v, False, BF16, True)
    version("sm_90", (3, 8))
    sides = {
        (name, side): each.get(side, 64) for name, each in constants_of(call).items() for side in ("C", "BK", "BV")
    }
    assert min(sides.values()) == 64, sides
    version("sm_90", (3, 9))
    assert min(each.get("BV", 64) for each in constants_of(call).values()) < 64


def test_walks_on_sm_100_have_one_chunk_at_a_time_and_separate_sums_where_triton_needs_it(
    version: Callable[[str, tuple[int, int]], None],
) -> None:
    sizes = _linear_attention_parts.Sizes(1, 4096, 32, 2, 128, 128, False, BF16, True)
    for target, triton, stages, split in (
        ("sm_100", (3, 7), 1, "separate"),
        ("sm_100", (3, 8), 2, "separate"),
        ("sm_90", (3, 7), 2, "chained"),
    ):
        version(target, triton)
        walks = [constants_of(sizes)[name] for name in ("_walk", "_walk_back")]
        assert [(walk["STAGES"], walk["SPLIT"]) for walk in walks] == [(stages, split)] * 2


@needs_loops
@pytest.mark.parametrize(("target", "dtype"), [("sm_90", BF16), ("sm_100", BF16), ("sm_100", F16)], ids=str)
def test_settings_of_earlier_versions_of_triton_give_the_numbers(
    target: str, dtype: torch.dtype, version: Callable[[str, tuple[int, int]], None]
) -> None:
    version(target, (3, 6))
    check(call_of(70, (20, 16), "decay beta", (dtype,) * 3))


@needs_loops
@pytest.mark.parametrize("kind", ["", "decay beta"])
def test_packed_sequences_of_several_chunks_and_of_none(kind: str) -> None:
    """The first and the last positions are of no sequence; 170 positions of 5 sequences have 8 numbers of chunks."""
    bounds = torch.tensor([3, 3, 70, 134, 134, 160], dtype=torch.int32)
    check(call_of(170, (8, 4), kind, (BF16,) * 3, cu_seqlens=bounds))


@needs_loops
def test_few_packed_positions_are_computed_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of decoding of several sequences has no chunks, however many these are."""
    monkeypatch.setattr(_linear_attention, "parts_of", None)
    bounds = torch.arange(0, 41, 2)
    call = call_of(40, (8, 4), "decay beta", cu_seqlens=bounds)
    with torch.no_grad(), fusedops.use("triton", fallback="raise"):
        out, state = fusedops.linear_attention(**call)
    want = fusedops.linear_attention(**call, backend="eager")
    torch.testing.assert_close((out, state), want, rtol=1e-5, atol=1e-5)


@needs_loops
def test_keys_that_repeat_have_an_inverse_of_small_numbers() -> None:
    """The powers of the triangular matrix reach 10**18 here; the inverse, block by block, stays at 1."""
    call = call_of(64, (16, 8), "beta")
    call["k"] = call["k"][:, :1].expand(-1, 64, -1, -1)
    call["beta"] = torch.ones_like(call["beta"])
    check(call)


def test_a_decay_of_each_row_goes_to_the_next_backend() -> None:
    call = call_of(20, (8, 4), "")
    call["decay"] = torch.zeros(1, 20, 2, 8)
    with fusedops.use("triton,eager", fallback="silent"):
        decision = fusedops.explain("linear_attention", **call)
    assert decision.backend == "eager"
    assert "got decay with 4 dimensions, expected one decay for each head, (B, S, Hv): chunks of" in str(decision)
    assert "to fix: pass decay as (B, S, Hv), or use another backend" in str(decision)


@pytest.mark.slow
@needs_loops
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_rows_of_many_blocks(dtype: torch.dtype, kind: str) -> None:
    """Dk of 130 has chunks of half the positions, and three blocks of rows backward; Dv of 70 three of columns."""
    check(call_of(200, (130, 70), kind, (dtype,) * 3, initial_state=torch.randn(1, 2, 130, 70)))
