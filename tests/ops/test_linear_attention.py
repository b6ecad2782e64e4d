"""linear_attention: closed forms, the functions of transformers, parts of a sequence, packed sequences, decays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise as neighbours
from typing import Any

import pytest
import torch
from calls import has_kernels
from pairwise import pairwise
from torch import Tensor

import fusedops
from fusedops import InvalidInputError, testing
from fusedops.testing import OPS

OP = OPS["linear_attention"]
INF = float("inf")
BACKENDS = [name for name in ("eager", "cpu", "triton") if has_kernels(name, "linear_attention")]
every_backend = pytest.mark.parametrize("backend", BACKENDS)

# what each kind of linear attention has besides q, k and v
KINDS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "constant decay": ("constant",),
    "GLA": ("rows",),
    "Mamba-2": ("decay",),
    "DeltaNet": ("beta",),
    "gated DeltaNet": ("decay", "beta"),
    "KDA": ("rows", "beta"),
}


@pytest.fixture(autouse=True)
def gradients_of_another_backend() -> Iterator[None]:
    """Let eager compute the gradients of a backend that has none, without a report."""
    with fusedops.use(fallback="silent"):
        yield


def tensors(
    kind: str, positions: int, dtype: torch.dtype = torch.float64, batch: int = 1, size: int = 8
) -> dict[str, Any]:
    """Return the arguments of a call with 2 key heads and 4 value heads, and an initial state."""
    parts, generator = KINDS[kind], torch.Generator().manual_seed(positions)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    call: dict[str, Any] = {"q": normal(batch, positions, 2, size), "k": normal(batch, positions, 2, size)}
    call["v"], call["initial_state"] = normal(batch, positions, 4, 6), normal(batch, 4, size, 6)
    if "constant" in parts:
        call["decay"] = -(2.0 ** -torch.arange(3.0, 7.0, dtype=torch.float64)).expand(batch, positions, 4)
    if "decay" in parts:
        call["decay"] = -normal(batch, positions, 4).exp() / 8
    if "rows" in parts:
        call["decay"] = -normal(batch, positions, 4, size).exp() / 8
    if "beta" in parts:
        call["beta"] = normal(batch, positions, 4).sigmoid()
    made = {name: value.to(dtype) for name, value in call.items()}
    return {**made, "normalize": "beta" in parts}


def takes(backend: str, kind: str) -> bool:
    """Return True for a backend that takes the calls of a kind, in float32 and forward."""
    return fusedops.explain("linear_attention", **tensors(kind, 2, torch.float32), backend=backend).backend == backend


def on_backends(*kinds: str) -> pytest.MarkDecorator:
    """Parametrize ``kind`` and ``backend`` by the pairs where the backend takes the kind.

    The interpreter is slow: it has the kind with a decay and beta among the quick tests, and the others among the
    slow ones.
    """
    pairs = [
        pytest.param(kind, backend, marks=[pytest.mark.slow] * (backend == "triton" and kind != "gated DeltaNet"))
        for kind in kinds
        for backend in BACKENDS
        if takes(backend, kind)
    ]
    return pytest.mark.parametrize(("kind", "backend"), pairs)


every_kind = on_backends(*KINDS)


def cut(call: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    """Return some positions of a call."""
    names = [name for name, value in call.items() if isinstance(value, Tensor) and name != "initial_state"]
    return {**call, **{name: call[name][:, start:end] for name in names}}


def run(backend: str, **call: Any) -> tuple[Tensor, Tensor]:
    return fusedops.linear_attention(**call, return_state=True, backend=backend)


def with_gradients(backend: str, **call: Any) -> dict[str, Tensor]:
    """Return the outputs and the gradients of all tensors."""
    leaves = {n: v.clone().requires_grad_() for n, v in call.items() if isinstance(v, Tensor) and v.is_floating_point()}
    out, state = run(backend, **{**call, **leaves})
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in (out, state)]
    gradients = torch.autograd.grad((out, state), [*leaves.values()], grads)
    return {"out": out.detach(), "state": state.detach(), **dict(zip(leaves, gradients))}


def test_linear_attention_is_attention_without_softmax() -> None:
    call = tensors("linear", 20, batch=2)
    q, k = (call[name].repeat_interleave(2, 2).transpose(1, 2) for name in ("q", "k"))
    want = (q @ k.mT).tril() @ call["v"].transpose(1, 2) * 0.3
    out = fusedops.linear_attention(call["q"], call["k"], call["v"], scale=0.3)
    torch.testing.assert_close(out, want.transpose(1, 2))


def test_a_decay_of_each_row_weights_each_product() -> None:
    call = tensors("GLA", 20, batch=2)
    sums = call["decay"].cumsum(1)
    weights = (sums[:, :, None] - sums[:, None]).exp()  # (B, S, S, Hv, Dk)
    q, k = (call[name].repeat_interleave(2, 2) for name in ("q", "k"))
    scores = torch.einsum("bthi,bshi,btshi->bhts", q, k, weights).tril()
    want = (scores @ call["v"].transpose(1, 2)).transpose(1, 2) / 8**0.5
    del call["initial_state"]
    torch.testing.assert_close(fusedops.linear_attention(**call), want)


@every_backend
@pytest.mark.parametrize("chunked", [False, True], ids=["recurrent", "chunked"])
def test_the_functions_of_transformers(chunked: bool, backend: str) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next", reason="needs transformers")
    call = tensors("gated DeltaNet", 70, torch.float32)
    repeated = {name: call[name].repeat_interleave(2, 2) for name in ("q", "k")}
    function = modeling.torch_chunk_gated_delta_rule if chunked else modeling.torch_recurrent_gated_delta_rule
    want, state = function(
        repeated["q"], repeated["k"], call["v"], g=call["decay"], beta=call["beta"],
        initial_state=call["initial_state"], output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    out, last = run(backend, **call)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, state, rtol=1e-4, atol=1e-5)


@every_kind
def test_two_parts_are_the_whole(kind: str, backend: str) -> None:
    call = tensors(kind, 75, torch.float32)
    whole, last = run(backend, **call)
    for at in (1, 64, 70):
        first, state = run(backend, **cut(call, 0, at))
        second, end = run(backend, **{**cut(call, at, 75), "initial_state": state})
        torch.testing.assert_close(torch.cat((first, second), 1), whole, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(end, last, rtol=1e-4, atol=1e-5)


BOUNDS = (0, 7, 7, 80, 81, 90)


@every_kind
def test_packed_sequences_are_sequences(kind: str, backend: str) -> None:
    call = tensors(kind, BOUNDS[-1], torch.float32)
    states = torch.randn(len(BOUNDS) - 1, 4, 8, 6, generator=torch.Generator().manual_seed(0))
    leaves = {name: v.requires_grad_() for name, v in call.items() if isinstance(v, Tensor) and name != "initial_state"}
    call["initial_state"] = leaves["initial_state"] = states.requires_grad_()
    outs: list[Tensor] = []
    ends: list[Tensor] = []
    for n, (start, end) in enumerate(neighbours(BOUNDS)):
        out, last = run(backend, **{**cut(call, start, end), "initial_state": states[n : n + 1]})
        outs.append(out)
        ends.append(last)
    want, got = (torch.cat(outs, 1), torch.cat(ends)), run(backend, **call, cu_seqlens=torch.tensor(BOUNDS))
    grads = [torch.randn(y.shape, generator=torch.Generator().manual_seed(3)) for y in want]
    wanted, found = (torch.autograd.grad(each, [*leaves.values()], grads) for each in (want, got))
    for name, one, other in zip(("out", "state", *leaves), (*got, *found), (*want, *wanted)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@every_kind
def test_a_packed_sequence_does_not_depend_on_the_others(kind: str, backend: str) -> None:
    """The bits of the first and the last sequence, forward and backward, where the one between has other numbers."""
    call = tensors(kind, 90, torch.float32)
    call["initial_state"] = call["initial_state"].expand(3, -1, -1, -1)
    bounds = torch.tensor([0, 7, 81, 90], dtype=torch.int32)
    found: list[dict[str, Tensor]] = []
    for number in (0.5, float("nan")):
        changed = dict(call)
        for name in ("q", "k", "v"):
            changed[name] = call[name].clone()
            changed[name][:, 7:81] = number
        found.append(with_gradients(backend, **changed, cu_seqlens=bounds))
    for name, one in found[0].items():
        other = found[1][name]
        kept = [0, 2] if name in ("state", "initial_state") else [*range(7), *range(81, 90)]
        dim = 0 if name in ("state", "initial_state") else 1
        one, other = (each.index_select(dim, torch.tensor(kept)) for each in (one, other))
        assert torch.equal(one, other), name
        assert one.isfinite().all(), name


@on_backends("KDA", "gated DeltaNet")
@pytest.mark.parametrize(("positions", "first", "end"), [(9, 2, 6), (70, 40, 60)])
def test_positions_of_no_sequence_are_0(positions: int, first: int, end: int, kind: str, backend: str) -> None:
    call = {**tensors(kind, positions, torch.float32), "cu_seqlens": torch.tensor([first, end])}
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    try:
        found = with_gradients(backend, **call)
    finally:
        torch.use_deterministic_algorithms(False)
    for name in ("out", "q", "k", "v", "decay", "beta"):
        assert not torch.cat((found[name][:, :first], found[name][:, end:]), 1).any(), name
        assert found[name][:, first:end].any(), name


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        (
            [0, 4, 3],
            r"got cu_seqlens\[2\] = 3 after 4, expected a bound from 4 to 9, the positions of q; to fix: pass 0",
        ),
        ([0, 10], r"got cu_seqlens\[1\] = 10 after 0, expected a bound from 0 to 9"),
        ([-1, 9], r"got cu_seqlens\[0\] = -1, expected a bound from 0 to 9"),
    ],
)
def test_wrong_bounds_are_an_error_on_a_cpu(bounds: list[int], text: str) -> None:
    call = tensors("linear", 9)
    del call["initial_state"]
    with pytest.raises(InvalidInputError, match=f"linear_attention: {text}"):
        fusedops.linear_attention(**call, cu_seqlens=torch.tensor(bounds))


def test_the_reference_clamps_wrong_bounds() -> None:
    call = tensors("linear", 9)
    del call["initial_state"]
    wrong, right = torch.tensor([-2, 5, 3, 12]), torch.tensor([0, 5, 5, 9])
    got, want = (
        OP.reference(*OP.bind((), {**call, "cu_seqlens": each, "return_state": True})) for each in (wrong, right)
    )
    assert all(map(torch.equal, got, want))


@on_backends("gated DeltaNet", "KDA", "Mamba-2", "GLA")
def test_a_decay_of_minus_infinity_forgets_everything(kind: str, backend: str) -> None:
    call = tensors(kind, 70, torch.float32)
    call["decay"][:, 40] = -INF
    found = with_gradients(backend, **call)
    other = with_gradients(backend, **{**cut(call, 40, 70), "initial_state": torch.zeros_like(call["initial_state"])})
    assert all(each.isfinite().all() for each in found.values())
    torch.testing.assert_close(found["out"][:, 40:], other["out"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["state"], other["state"], rtol=1e-4, atol=1e-5)
    assert not found["decay"][:, 40].any()


def test_verify_takes_keys_without_elements() -> None:
    k = torch.zeros(1, 1, 1, 0)
    with fusedops.verify(against="reference") as report:
        y = fusedops.linear_attention(k, k, torch.ones(1, 1, 1, 1), k)
    assert (report.mismatches, y.item()) == (0, 0)


@on_backends("Mamba-2", "GLA")
def test_a_decay_above_0_follows_the_formula(kind: str, backend: str) -> None:
    call = tensors(kind, 40)
    call["decay"] = -call["decay"] / 4
    want = OP.reference(*OP.bind((), {**call, "return_state": True}))
    got = run(backend, **{name: v.float() if isinstance(v, Tensor) else v for name, v in call.items()})
    for one, other in zip(got, want):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@every_backend
def test_a_decay_and_a_state_may_be_wider_than_the_rest(backend: str) -> None:
    call = tensors("gated DeltaNet", 70, torch.bfloat16)
    wide = {**call, **{name: call[name].float() for name in ("decay", "beta", "initial_state")}}
    found = with_gradients(backend, **wide)
    dtypes = {name: each.dtype for name, each in wide.items() if isinstance(each, Tensor)}
    assert {name: each.dtype for name, each in found.items()} == {
        "out": torch.bfloat16,
        "state": torch.float32,
        **dtypes,
    }
    plain = run(backend, **{name: each.float() if isinstance(each, Tensor) else each for name, each in call.items()})
    torch.testing.assert_close(found["out"].float(), plain[0], rtol=1e-2, atol=2e-2)
    if backend != "triton":  # which refuses float64
        doubles = {**call, "v": call["v"].double()}
        assert fusedops.linear_attention(**doubles, return_state=True, backend=backend)[1].dtype is torch.float64


def assert_lengths(kind: str, positions: int, dtype: torch.dtype, backends: Sequence[str]) -> None:
    """Compare forward and backward of each backend with float64, which is computed once."""
    call = {**tensors(kind, positions, dtype, size=16), "return_state": True}
    args = OP.bind((), call)
    want = testing.expected(OP, args)
    for backend in backends:
        leaves = [arg.clone().requires_grad_() if isinstance(arg, Tensor) else arg for arg in args]
        outputs = OP.call_public(*leaves, backend=backend)
        given = [arg for arg in leaves if isinstance(arg, Tensor)]
        names = [name for name, arg in zip(OP.parameters, leaves) if isinstance(arg, Tensor)]
        grads = [grad.to(y.dtype) for grad, y in zip(want.grads, outputs)]
        for name, y, wanted in zip(OP.outputs, outputs, want.outputs):
            testing.assert_within(y.detach(), wanted, want.limits[f"output {name}"], f"{backend}: {name}")
        for name, gradient in zip(names, torch.autograd.grad(outputs, given, grads)):
            what = f"gradient of {name}"
            testing.assert_within(gradient, want.gradients[name], want.limits[what], f"{backend}: {what}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "positions", "dtype"),
    pairwise([*KINDS], [1, 2, 63, 64, 65, 300], [torch.float32, torch.bfloat16]),
    ids=str,
)
def test_lengths_within_the_tolerance(kind: str, positions: int, dtype: torch.dtype) -> None:
    assert_lengths(kind, positions, dtype, [backend for backend in BACKENDS if takes(backend, kind)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "positions"),
    [
        ("gated DeltaNet", torch.bfloat16, 1100),
        *(  # each takes half a minute
            pytest.param(kind, dtype, 4096, marks=pytest.mark.long)
            for kind in KINDS
            for dtype in (torch.float32, torch.bfloat16)
        ),
    ],
    ids=str,
)
def test_many_positions_within_the_tolerance(kind: str, dtype: torch.dtype, positions: int) -> None:
    assert_lengths(kind, positions, dtype, [backend for backend in BACKENDS if takes(backend, kind)])
