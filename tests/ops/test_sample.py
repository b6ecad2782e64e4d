"""sample: the token of a row depends on its logits, seed, position and filters alone, on every backend, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from calls import has_kernels
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedops
from fusedops import sample
from fusedops.ops.sampling import formulas
from fusedops.philox import philox

NAN, INF = math.nan, math.inf
BACKENDS = [name for name in ("eager", "cpu") if has_kernels(name, "sample")]  # see the last test for triton
on_each_backend = pytest.mark.parametrize("backend", BACKENDS)


def rows_of(count: int, vocabulary: int, seed: int = 0, **changed: Any) -> dict[str, Any]:
    """Return a call of random rows, each with filters of its own."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.rand(count, generator=generator)  # noqa: E731
    call = {
        "logits": torch.randn(count, vocabulary, generator=generator) * 3,
        "temperature": 0.2 + 1.5 * draw(),
        "top_k": (draw() * 1.3 * vocabulary).long(),
        "top_p": 0.05 + 0.95 * draw(),
        "min_p": 0.1 * draw(),
        "seed": torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator),
        "position": torch.randint(2**40, (count,), generator=generator),
    }
    return {**call, **changed}


def some(call: dict[str, Any], index: Any) -> dict[str, Any]:
    """Return some rows of a call."""
    return {name: value[index] if isinstance(value, Tensor) else value for name, value in call.items()}


def kept_of(call: dict[str, Any], row: int) -> np.ndarray:
    """Return the ids that the filters keep, sorted by falling logit, by brute force in float64."""
    z = call["logits"][row].double().numpy()
    order = np.argsort(-z, kind="stable")
    k = int(call["top_k"][row]) or len(z)
    order = order[z[order] >= z[order][min(k, len(z)) - 1]]
    p = np.exp((z - z.max()) / float(call["temperature"][row]))
    sums = np.cumsum(p[order])
    order = order[sums - p[order] < float(call["top_p"][row]) * sums[-1]]
    return order[p[order] >= float(call["min_p"][row])]


# ------------------------------------------------------------------------------------------------------------ filters


@on_each_backend
def test_the_token_and_what_is_kept_are_those_of_float64(backend: str) -> None:
    """The log probability among the kept tokens has their sum; a token whose score is near another's is left out."""
    call = rows_of(60, 97)
    token, log_prob = sample(**call, return_log_prob="filtered", backend=backend)
    compared = 0
    for row in range(60):
        kept, t = kept_of(call, row), float(call["temperature"][row])
        z = call["logits"][row].double().numpy() / t
        counter = torch.arange(25)
        words = torch.stack(philox(counter, call["seed"][row], call["position"][row]), -1).flatten().double().numpy()
        score = z - np.log(-np.log((words[:97] + 0.5) / 2**32))
        best = kept[np.argsort(-score[kept], kind="stable")]
        assert int(token[row]) in kept
        if len(kept) == 1 or score[best[0]] - score[best[1]] > 1e-4:
            compared += 1
            assert int(token[row]) == best[0]
        want = z[int(token[row])] - np.log(np.exp(z[kept] - z.max()).sum()) - z.max()
        assert abs(float(log_prob[row]) - want) < 1e-5
    assert compared > 55


Z = torch.tensor([1.0, 3.0, 3.0, 2.0, -INF, 3.0])


KEPT = [
    ({"top_k": 1}, {1, 2, 5}),  # ties at the last of the k stay
    ({"top_k": 4}, {1, 2, 3, 5}),
    ({"top_k": 6}, {0, 1, 2, 3, 5}),
    ({"top_k": 10**6}, {0, 1, 2, 3, 5}),
    ({"top_k": 0}, {0, 1, 2, 3, 5}),
    ({"top_p": 1e-6}, {1}),  # of equal ones the lowest id, and at least one
    ({"top_p": 0.4}, {1, 2}),
    ({"top_p": 0.85}, {1, 2, 5}),
    ({"top_p": 1.0}, {0, 1, 2, 3, 5}),
    ({"min_p": 1.0}, {1, 2, 5}),
    ({"min_p": 0.3}, {1, 2, 3, 5}),
    ({"min_p": 0.3, "temperature": 0.5}, {1, 2, 5}),  # after the temperature
    ({"top_k": 4, "top_p": 0.88}, {1, 2, 5}),  # of the sum of what top_k keeps: of all, 3 would be needed too
    ({"top_p": 0.97, "temperature": 3.0}, {0, 1, 2, 3, 5}),
    ({"temperature": 0.0, "top_p": 0.5}, {1}),
    ({"mask": torch.tensor([False, True, True, False, False, True])}, {0, 3}),
]


@on_each_backend
@pytest.mark.parametrize(("options", "kept"), KEPT)
def test_what_is_kept(options: dict[str, Any], kept: set[int], backend: str) -> None:
    logits = Z.expand(400, 6)
    token, log_prob = sample(
        logits, **options, seed=3, position=torch.arange(400), return_log_prob=True, backend=backend
    )
    assert {*token.tolist()} == kept
    t = options.get("temperature", 1.0)
    want = (Z / t).log_softmax(-1)[token] if t else torch.zeros(400)  # the mask changes no distribution
    torch.testing.assert_close(log_prob, want)


@on_each_backend
@pytest.mark.parametrize("vocabulary", [1, 5, 64, 65537])
def test_rows_without_a_token_and_the_first_and_last_one(vocabulary: int, backend: str) -> None:
    logits = torch.zeros(7, vocabulary)
    logits[0, -1] = logits[1, 0] = NAN
    logits[2, -1], logits[3] = INF, -INF
    logits[4, 0] += 60
    logits[5, -1] += 60
    mask = torch.zeros(7, vocabulary, dtype=torch.bool)
    mask[1, 0], mask[6] = True, True  # NaN is one under the mask too
    options = {"seed": 1, "position": 2**40, "mask": mask, "backend": backend}
    every = {"top_k": 2, "top_p": 0.9, "min_p": 0.1}
    for filters in ({}, every, {"temperature": 0.0}) if vocabulary < 100 else (every,):
        token, log_prob = sample(logits, **filters, **options, return_log_prob=True)
        assert token.tolist() == [-1, -1, -1, -1, 0, vocabulary - 1, -1]
        assert log_prob.isnan().tolist() == [True] * 4 + [False] * 2 + [True]
        torch.testing.assert_close(log_prob[4:6], torch.zeros(2), atol=1e-6, rtol=0)


@on_each_backend
def test_a_number_of_a_tensor_out_of_its_range_is_a_row_without_a_token(backend: str) -> None:
    wrong = {
        "temperature": [-1.0, NAN, INF, 0.5],
        "top_k": [-1, -(2**63), -5, 3],
        "top_p": [0.0, NAN, 1.5, 0.9],
        "min_p": [-0.1, NAN, 1.5, 0.2],
    }
    for name, values in wrong.items():
        token = sample(torch.ones(4, 9), **{name: torch.tensor(values)}, seed=1, position=0, backend=backend)
        assert (token == -1).tolist() == [True, True, True, False], name


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.5},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 2},
        {"position": -1},
    ],
)
def test_a_number_out_of_its_range_is_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(fusedops.InvalidInputError, match=f"sample: got {next(iter(options))} = .+; to fix: "):
        sample(Z, **{"seed": 0, "position": 0, **options})


# ---------------------------------------------------------------------------------------------------- the same token


@on_each_backend
def test_every_backend_draws_the_tokens_of_eager(backend: str) -> None:
    """Exactly: no score needs a tolerance. Of a padded vocabulary, of other dtypes and under any temperature."""
    for seed, vocabulary in enumerate((1, 3, 17, 64, 1000, 4099)):
        call = rows_of(24, vocabulary, seed)
        call["temperature"][::5] = torch.tensor([0.0, 1e-38, 1e30, 1e-3, 1e-45])
        call["logits"][1::4] *= 30  # few tokens have a chance
        call["logits"][2::4] = call["logits"][2::4].round()  # ties
        for changed in (call, {**call, "top_k": None}, {**call, "top_k": None, "top_p": None, "min_p": None}):
            want = sample(**changed, backend="eager")
            assert torch.equal(sample(**changed, backend=backend), want)
            padded = torch.nn.functional.pad(call["logits"], (0, 61), value=-INF)
            assert torch.equal(sample(**{**changed, "logits": padded}, backend=backend), want)
            narrow = {**changed, "logits": call["logits"].bfloat16()}
            wide = {**changed, "logits": call["logits"].bfloat16().float()}
            assert torch.equal(sample(**narrow, backend=backend), sample(**wide, backend="eager"))


@on_each_backend
def test_a_row_is_the_same_in_every_batch_and_order_beside_every_filter(backend: str) -> None:
    call = rows_of(64, 301)
    want = sample(**call, backend=backend)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sample(**some(call, order), backend=backend), want[order])
    for size in (1, 2, 7, 33):
        found = [sample(**some(call, slice(at, at + size)), backend=backend) for at in range(0, 64, size)]
        assert torch.equal(torch.cat(found), want)
    beside = rows_of(64, 301, seed=9)
    beside = {name: torch.stack([call[name], other], 1).flatten(0, 1) for name, other in beside.items()}
    assert torch.equal(sample(**beside, backend=backend)[::2], want)


@pytest.mark.slow
def test_a_million_draws_are_the_same_on_every_backend_in_every_batch_and_on_every_number_of_threads() -> None:
    threads_before = torch.get_num_threads()
    for part in range(10):
        call = rows_of(100_000, 7, part)
        want = sample(**call, backend="eager")
        if "cpu" in BACKENDS:
            torch.set_num_threads((1, 8)[part % 2])
            assert torch.equal(sample(**call, backend="cpu"), want)
        torch.set_num_threads(threads_before)
        for size in (1, 64) if "cpu" in BACKENDS and not part else ():
            starts = range(0, 200 * size, size)
            found = [sample(**some(call, slice(at, at + size)), backend="cpu") for at in starts]
            assert torch.equal(torch.cat(found), want[: 200 * size])


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the library of cpu is not compiled")
def test_log_probs_are_those_of_a_trainer() -> None:
    """To the bit on cpu, of sums that are exact in any order."""
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randint(-16, 17, size, generator=generator) / 8 for size in ((33, 64), (5000, 64)))
    token, log_prob = sample(x @ weight.T, seed=3, position=torch.arange(33), return_log_prob=True, backend="cpu")
    assert torch.equal(fusedops.linear_log_probs(x, weight, token, backend="cpu"), log_prob)


# ------------------------------------------------------------------------------------------------------- distribution


@on_each_backend
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_tokens_have_their_probabilities(vary: str, backend: str) -> None:
    """Chi-square of 40,000 draws at 20 degrees of freedom: 45.3 has a probability of 0.001."""
    count = 40_000
    logits = torch.randn(21, generator=torch.Generator().manual_seed(3))
    numbers = {"seed": 5, "position": 7, vary: torch.arange(count)}
    token = sample(logits.expand(count, 21), temperature=0.8, **numbers, backend=backend)
    wanted = (logits / 0.8).softmax(-1).double() * count
    assert float(((token.bincount(minlength=21) - wanted) ** 2 / wanted).sum()) < 45.3


def test_accept_keeps_a_token_with_the_ratio_of_its_probabilities() -> None:
    count = 40_000
    draft, positions = torch.randint(50, (count,), generator=torch.Generator().manual_seed(0)), torch.arange(count)
    q = torch.full((count,), math.log(0.5))
    for p, wanted in ((0.0, 0.0), (0.1, 0.2), (0.4, 0.8), (0.5, 1.0), (0.9, 1.0)):
        kept = fusedops.accept(draft, q, torch.full((count,), p).log(), 5, positions)
        assert abs(float(kept.double().mean()) - wanted) < 0.01
        assert bool(kept.all()) == (wanted == 1)
        assert torch.equal(
            fusedops.accept(draft[::7], q[::7], torch.full((count,), p).log()[::7], 5, positions[::7]), kept[::7]
        )
    # independent of the noise that drew the token: a pair is kept as often whatever was drawn
    logits = torch.zeros(count, 2)
    token = sample(logits, seed=5, position=positions)
    kept = fusedops.accept(token, q, q + math.log(0.5), 5, positions).double()
    assert abs(float(kept[token == 0].mean() - kept[token == 1].mean())) < 0.02
    nothing = fusedops.accept(torch.tensor([-1, 2]), torch.zeros(2), torch.tensor([1.0, NAN]), 0, 0)
    assert nothing.tolist() == [False, False]


def test_the_noise_and_the_exponential_are_those_of_float64() -> None:
    words = torch.cat([torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 1]), torch.arange(0, 2**32, 2**13)])
    exact = -torch.log(-torch.log1p(-(2**32 - words.double() - 0.5) / 2**32))
    near_zero = words < 2**31
    exact[near_zero] = -torch.log(-torch.log((words[near_zero].double() + 0.5) / 2**32))
    assert ((formulas.noise_of(words) - exact).abs() / exact.abs().clamp(min=1)).max() < 2e-7
    d = -torch.linspace(0, 87, 100_001)
    assert ((formulas.exponential(d) - d.double().exp()).abs() / d.double().exp()).max() < 1e-7
    assert formulas.exponential(torch.tensor([0.0, -0.0, -88.0, -INF])).tolist() == [1.0, 1.0, 0.0, 0.0]


# ------------------------------------------------------------------------------------------------- torch's features


def test_compiled_fake_batched_and_differentiated_calls() -> None:
    call = rows_of(4, 30)
    logits = call.pop("logits")
    want = sample(logits, **call, return_log_prob=True)
    draw = lambda z: sample(z, **call, return_log_prob=True)  # noqa: E731
    torch.compiler.reset()
    for found in (torch.compile(draw, fullgraph=True, backend="aot_eager")(logits), draw(logits.requires_grad_())):
        assert torch.equal(found[0], want[0])
        torch.testing.assert_close(found[1], want[1])
        assert not found[1].requires_grad
    logits = logits.detach()
    batched = torch.vmap(lambda z, s, p: sample(z, seed=s, position=p, top_p=0.8))(
        logits, call["seed"], call["position"]
    )
    assert torch.equal(batched, sample(logits, seed=call["seed"], position=call["position"], top_p=0.8))
    half = logits.half()
    with FakeTensorMode() as mode:
        token, log_prob = sample(mode.from_tensor(half), seed=1, position=2, return_log_prob="filtered")
    assert (token.shape, token.dtype, log_prob.dtype) == ((4,), torch.int64, torch.float32)
    assert "no gradient" in str(fusedops.explain("sample", logits, seed=1, position=2))


@pytest.mark.skipif(not has_kernels("triton", "sample"), reason="needs triton")
def test_triton_draws_the_tokens_of_eager() -> None:
    """Of few rows: the interpreter takes a tenth of a second for one with filters."""
    bad = torch.full((4, 6), 1.0)
    bad[0, 1], bad[1, 2], bad[2] = NAN, INF, -INF
    calls = [{"logits": Z.expand(2, 6), "seed": 3, "position": torch.arange(2), **options} for options, _ in KEPT]
    calls += [{"logits": bad, "seed": 1, "position": 0, **each} for each in ({}, {"top_k": 2, "top_p": 0.9})]
    calls += [{"logits": torch.tensor([[0.0, -0.0, 0.0, -0.0, -1.0]]), "seed": 1, "position": 3, "top_k": 1}]
    wrong = torch.tensor([-1.0, NAN, INF, 0.5])
    calls += [{"logits": torch.ones(4, 6), "seed": 1, "position": 0, name: wrong} for name in ("top_p", "temperature")]
    calls += [rows_of(2, vocabulary, vocabulary) for vocabulary in (1, 17, 2048)]  # of blocks of 16, 32 and 2048
    mask = torch.arange(140).view(2, 70) < 105  # all of a row, half of the other
    calls += [{**rows_of(2, 70), "logits": rows_of(2, 70)["logits"].bfloat16(), "mask": mask}]
    # of three blocks: equal logits in all of them, NaN or the largest in the first
    ties = torch.arange(4100).remainder(3.0).repeat(4, 1)
    ties[2, 3], ties[3, 5] = NAN, 50.0
    numbers = {"temperature": torch.tensor([0.0, 1.0, 1.0, 0.5]), "seed": 1, "position": torch.arange(4)}
    calls += [{"logits": ties, **numbers}, {"logits": ties, **numbers, "top_p": 0.8}]
    for call in calls:
        for kind in ("filtered",) if {"top_k", "top_p", "min_p"} & {*call} else (False, True):
            found, want = (sample(**call, return_log_prob=kind, backend=name) for name in ("triton", "eager"))
            for got, wanted in zip(found, want, strict=True) if kind else ((found, want),):
                torch.testing.assert_close(got, wanted, equal_nan=True)  # integers exactly
