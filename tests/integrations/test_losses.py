"""fusedops.losses beside formulas in float64 that are written here, and beside Liger's own where it is installed."""

from __future__ import annotations

from math import inf, log1p
from typing import Any

import pytest
import torch
from mpmath import exp, log
from torch import Tensor

import fusedops
from fusedops import InvalidInputError
from fusedops.losses import dpo_loss, grpo_loss, kl_divergence

F64 = torch.float64


def _logistic(x: Any) -> Any:
    return 1 / (1 + exp(-x))


# ------------------------------------------------------------------------------------------------------------ dpo_loss


def of_pair(kind: str, c: Any, r: Any, beta: float, e: float, lengths: tuple[float, float]) -> Any:
    """Return the loss of a pair, from the differences from the reference, as the papers have it.

    No number of mpmath is too large, so that far pairs have their limits.
    """
    d = beta * (c - r)
    per_token = c / lengths[0] - r / lengths[1]
    win, lose = _logistic(d), _logistic(-d)
    return {
        "sigmoid": lambda: -log(win),
        "hinge": lambda: max(0.0, 1 - d),
        "ipo": lambda: (per_token - 0.5 / beta) ** 2,
        "sigmoid_norm": lambda: -log(_logistic(beta * per_token)),
        "robust": lambda: (-(1 - e) * log(win) + e * log(lose)) / (1 - 2 * e),
        "exo_pair": lambda: win * log(win / (1 - e)) + lose * log(lose / e),
        "nca_pair": lambda: (
            -log(_logistic(beta * c)) - 0.5 * log(_logistic(-beta * c)) - 0.5 * log(_logistic(-beta * r))
        ),
        "bco_pair": lambda: -log(_logistic(beta * c)) - log(_logistic(-beta * r)),
        "sppo_hard": lambda: (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
        "aot": lambda: -(1 - e) * log(win) - e * log(lose),
        "aot_unpaired": lambda: -(1 - e) * log(win) - e * log(lose),
        "apo_zero": lambda: _logistic(-beta * c) + _logistic(beta * r),
        "apo_down": lambda: _logistic(beta * c) + lose,
        "discopop": lambda: -log(win) * _logistic(-d / 0.05) + exp(-d) * _logistic(d / 0.05),
    }[kind]()


PAIRS = ("sigmoid", "hinge", "ipo", "sigmoid_norm", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard")
PAIRS = (*PAIRS, "apo_zero", "apo_down", "discopop")
SMOOTHED = {"robust": 0.1, "exo_pair": 1e-3, "aot": 0.1, "aot_unpaired": 0.1}


def _numbers(seed: int = 0) -> list[Tensor]:
    """Return chosen, rejected, and both of the reference."""
    generator = torch.Generator().manual_seed(seed)
    return [-30 * torch.rand(6, generator=generator, dtype=F64) for _ in range(4)]


@pytest.mark.parametrize("kind", PAIRS)
def test_a_preference_is_its_formula(kind: str) -> None:
    chosen, rejected, ref_chosen, ref_rejected = _numbers()
    lengths = torch.tensor([[3.0, 1, 7, 2, 5, 9], [2.0, 2, 8, 4, 1, 6]])
    options: dict[str, Any] = {"beta": 0.2, "label_smoothing": SMOOTHED.get(kind, 0.0)}
    by_length = {"chosen_lengths": lengths[0], "rejected_lengths": lengths[1]}
    got = dpo_loss(
        chosen, rejected, ref_chosen, ref_rejected, loss_type=kind, reduction="none", **options,
        **(by_length if kind in ("ipo", "sigmoid_norm") else {}),
    )  # fmt: skip
    c, r = (chosen - ref_chosen).tolist(), (rejected - ref_rejected).tolist()
    want = [
        float(of_pair(kind, c[at], r[at], 0.2, SMOOTHED.get(kind, 0.0), (float(lengths[0, at]), float(lengths[1, at]))))
        for at in range(6)
    ]
    torch.testing.assert_close(got, torch.tensor(want, dtype=F64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["aot", "aot_unpaired"])
def test_a_transport_is_between_sorted_numbers(kind: str) -> None:
    chosen, rejected, ref_chosen, ref_rejected = _numbers()
    got = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, loss_type=kind, label_smoothing=0.1, reduction="none")
    pairs = (chosen - rejected, ref_chosen - ref_rejected)
    if kind == "aot_unpaired":
        pairs = (chosen - ref_chosen, rejected - ref_rejected)
    first, second = (sorted(each.tolist()) for each in pairs)
    want = [float(of_pair(kind, a, b, 0.1, 0.1, (1, 1))) for a, b in zip(first, second)]
    torch.testing.assert_close(got, torch.tensor(want, dtype=F64), rtol=1e-12, atol=1e-12)


def test_preferences_are_reduced_and_take_16_bits_and_no_reference() -> None:
    chosen, rejected, *_ = _numbers()
    each = dpo_loss(chosen, rejected, reduction="none")
    torch.testing.assert_close(dpo_loss(chosen, rejected), each.mean())
    torch.testing.assert_close(dpo_loss(chosen, rejected, reduction="sum"), each.sum())
    narrow = dpo_loss(chosen.bfloat16(), rejected.bfloat16())
    assert narrow.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loss_type": "dpo"}, "got loss_type = 'dpo', expected one of 'sigmoid', 'hinge'"),
        ({"beta": 0.0}, "got beta = 0.0, expected a number in"),
        ({"label_smoothing": 0.1}, "got label_smoothing = 0.1 with loss_type = 'sigmoid', expected 0"),
        ({"loss_type": "exo_pair"}, "got label_smoothing = 0.0, expected"),
        ({"loss_type": "ipo"}, "got chosen_lengths = None, expected a value, by which ipo divides"),
        ({"ref_chosen": torch.zeros(3)}, r"got ref_chosen of shape \(3,\), expected \(6,\)"),
    ],
)
def test_a_wrong_preference_says_what_to_pass(options: dict[str, Any], text: str) -> None:
    chosen, rejected, *_ = _numbers()
    with pytest.raises(InvalidInputError, match=f"dpo_loss: {text}"):
        dpo_loss(chosen, rejected, **options)


# ----------------------------------------------------------------------------------------------------------- grpo_loss

TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
LEVELS = [(kind, "token") for kind in TYPES] + [(kind, "sequence") for kind in ("grpo", "bnpo", "dapo", "luspo")]


def _tokens(dtype: torch.dtype = F64) -> dict[str, Tensor]:
    """Return what a step of 4 sequences of up to 7 tokens has."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    logp = -random(4, 7).abs()
    mask = (torch.arange(7) < torch.tensor([7, 3, 1, 5])[:, None]).to(dtype)
    given = {"logp": logp, "old_logp": logp + 0.3 * random(4, 7), "ref_logp": logp + 0.4 * random(4, 7)}
    given["old_logp"][0, 0] = logp[0, 0]
    given |= {"advantages": random(4), "sampling_ratio": 1 + 0.2 * random(4, 7).abs() * mask}  # 1 elsewhere, as trl's
    return {name: value.to(dtype) for name, value in given.items()} | {"mask": mask}


def _exp(x: float) -> float:
    return inf if x > 700 else float(exp(x))


def _policy(kind: str, log_ratio: float, logp: float, a: float, delta: float | None, of_all: float) -> Any:
    """Return the loss of a token, and its slopes by the logarithm of the ratio and by logp beside it, or their limits.

    ``of_all`` is the ratio of its sequence, for "vespo".
    """
    w, (k, rate) = _exp(log_ratio), (2.0, 3.0) if a >= 0 else (3.0, 2.0)
    if a == 0:
        return 0.0, 0.0, 0.0
    if kind in ("cispo", "vespo"):
        weight = (min(w, 0.3) if kind == "cispo" else of_all**k * _exp(rate - rate * of_all)) * a
        return -weight * logp if weight else 0.0, 0.0, -weight
    if kind == "sapo":
        temperature = 1.0 if a > 0 else 1.05
        gate, rest = (float(_logistic(sign * temperature * (w - 1))) for sign in (1, -1))
        return -4 / temperature * gate * a, -4 * gate * rest * w * a if rest else 0.0, 0.0
    clipped, least = min(max(w, 0.9), 1.3), w if delta is None else min(w, delta)
    return -min(least * a, clipped * a), -w * a if least == w and w * a <= clipped * a else 0.0, 0.0


def _divergence(away: float, log_ratio: float | None) -> tuple[float, float, float]:
    """Return k3, times the ratio if there is one, and the same slopes."""
    if log_ratio is not None and log_ratio < 0:  # here k3 may be infinite
        joint, w = _exp(away + log_ratio), _exp(log_ratio)
        return joint - w * (away + 1), joint - w * (away + 1), w - joint
    w, k3 = 1.0 if log_ratio is None else _exp(log_ratio), _exp(away) - min(away, 1e6) - 1
    value = w * k3 if k3 else 0.0
    return value, 0.0 if log_ratio is None else value, w * (1 - _exp(away)) if away else 0.0


def of_tokens(
    kind: str, level: str, t: dict[str, Tensor], delta: float | None, beta: float = 0.05, corrected: bool = False
) -> tuple[float, list[list[float]]]:
    """Return the loss with epsilon 0.1 and 0.3 and the gradient of logp, one token that counts after another."""
    logp, old, mask = (t[name].tolist() for name in ("logp", "old_logp", "mask"))
    ref, correction = (t[name].tolist() if name in t else None for name in ("ref_logp", "sampling_ratio"))
    advantages = t["advantages"].reshape(len(logp), -1).expand(t["logp"].shape).tolist()
    size, total, slopes = len(logp), 0.0, [[0.0] * len(row) for row in logp]
    count = max(sum(1 for row in mask for each in row if each), 1)
    for b in range(size):
        kept = [at for at, each in enumerate(mask[b]) if each]
        of_row = size * len(kept)
        divisor = {"grpo": of_row, "sapo": of_row, "luspo": size, "dr_grpo": size * 10}.get(kind, count)
        away = {at: logp[b][at] - old[b][at] for at in kept}
        mean = sum(away.values()) / max(len(kept), 1)
        log_w = sum(max(min(each, 20.0), -20.0) for each in away.values())
        if correction and kind == "vespo":
            log_w += sum(log(max(min(correction[b][at], exp(20)), 1e-8)) for at in kept)
        w = _exp(max(min(log_w, 20.0), float(log(1e-8))))
        of_mean = 0.0
        for at in kept:
            log_ratio, a = mean if level == "sequence" else away[at], advantages[b][at]
            parts = _policy(kind, log_ratio, logp[b][at], a, delta, w)
            if correction and kind != "vespo":
                parts = [part * correction[b][at] if part and correction[b][at] else 0.0 for part in parts]
            if ref and beta:
                of_ref = _divergence(ref[b][at] - logp[b][at], log_ratio if corrected else None)
                parts = [part + beta * other for part, other in zip(parts, of_ref)]
            total += parts[0] / divisor
            of_mean += parts[1] / divisor / len(kept)
            slopes[b][at] = parts[2] / divisor + (0.0 if level == "sequence" else parts[1] / divisor)
        for at in kept if level == "sequence" else ():
            slopes[b][at] += of_mean
    return total, slopes


OPTIONS: dict[str, Any] = {"epsilon_low": 0.1, "epsilon_high": 0.3, "beta": 0.05, "max_completion_length": 10}


@pytest.mark.parametrize(("kind", "level"), LEVELS)
@pytest.mark.parametrize("delta", [None, 1.2, 1.5])
def test_a_policy_gradient_is_its_formula(kind: str, level: str, delta: float | None) -> None:
    tokens = _tokens()
    tokens["logp"].requires_grad_()
    options: dict[str, Any] = {**OPTIONS, "loss_type": kind, "importance_sampling_level": level, "delta": delta}
    for corrected in (False, True):
        got = grpo_loss(**tokens, use_bias_correction_kl=corrected, **options)
        want, slopes = of_tokens(kind, level, tokens, delta, corrected=corrected)
        torch.testing.assert_close(got, torch.tensor(want, dtype=F64), rtol=1e-10, atol=1e-12)
        (slope,) = torch.autograd.grad(got, tokens["logp"])
        torch.testing.assert_close(slope, torch.tensor(slopes, dtype=F64), rtol=1e-10, atol=1e-12)


def test_a_step_of_several_batches_is_divided_by_its_tokens() -> None:
    tokens = _tokens()
    mask = tokens["mask"]
    for num_items in (32, torch.tensor([32.0])):
        got = grpo_loss(**tokens, num_items=num_items)
        torch.testing.assert_close(got, grpo_loss(**tokens) * mask.sum() / 32)
    corrected = grpo_loss(**tokens, beta=0.5, use_bias_correction_kl=True) - grpo_loss(**tokens)
    away = tokens["ref_logp"] - tokens["logp"]
    k3 = (torch.exp(away) - away - 1) * torch.exp(tokens["logp"] - tokens["old_logp"])
    torch.testing.assert_close(corrected, 0.5 * (k3 * mask).sum() / mask.sum())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loss_type": "ppo"}, "got loss_type = 'ppo'"),
        ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, "got importance_sampling_level = 'sequence'"),
        ({"beta": 0.1, "ref_logp": None}, "got ref_logp = None, expected a value, for beta"),
        ({"loss_type": "dr_grpo"}, "got max_completion_length = None"),
        ({"mask": torch.ones(4, 6)}, r"got mask of shape \(4, 6\), expected \(4, 7\)"),
    ],
)
def test_a_wrong_policy_gradient_says_what_to_pass(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInputError, match=f"grpo_loss: {text}"):
        grpo_loss(**{**_tokens(), **options})


# ------------------------------------------------------------------------------------------------------- kl_divergence


@pytest.mark.parametrize("beta", [0.0, 1.0, 0.3])
def test_a_divergence_is_its_formula(beta: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias, teacher_x, teacher_weight = (
        torch.randn(*shape, generator=generator, dtype=F64)
        for shape in ((5, 90, 4), (11, 4), (11,), (5, 90, 6), (11, 6))
    )
    mask = torch.rand(5, 90, generator=generator) < 0.8
    leaves = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    student = torch.softmax((x @ weight.T + bias) / 0.7, -1)
    teacher = torch.softmax(teacher_x @ teacher_weight.T / 0.7, -1)
    m = (1 - beta) * student + beta * teacher
    if beta in (0.0, 1.0):
        p, q = (teacher, student) if beta == 0 else (student, teacher)
        want = (p * (p / q).log()).sum(-1)
    else:
        want = beta * (teacher * (teacher / m).log()).sum(-1) + (1 - beta) * (student * (student / m).log()).sum(-1)
    want = torch.where(mask, want, 0.0)
    options: dict[str, Any] = {"mask": mask, "beta": beta, "temperature": 0.7}
    broken = teacher_x.masked_fill(~mask[..., None], torch.nan)
    got = kl_divergence(x, weight, broken, teacher_weight, bias, reduction="none", **options)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    mean = kl_divergence(x, weight, broken, teacher_weight, bias, **options)
    torch.testing.assert_close(mean, want.sum() / mask.sum())
    for one, other in zip(torch.autograd.grad(mean, leaves), torch.autograd.grad(want.sum() / mask.sum(), leaves)):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-12)


def test_a_class_that_the_teacher_leaves_out_adds_0() -> None:
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    bias = torch.tensor([0.0, -torch.inf, 0.0, 0.0, 0.0])
    got = kl_divergence(x, weight, x, weight, None, bias, reduction="none")
    want = torch.logsumexp(x @ weight.T, -1) - torch.logsumexp(x @ weight.T + bias, -1)
    torch.testing.assert_close(got, want)


def test_the_logits_of_all_rows_never_exist_in_a_divergence() -> None:
    x, weight = torch.randn(2048, 8).requires_grad_(), torch.randn(4096, 8).requires_grad_()
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = kl_divergence(x, weight, x.detach(), 2 * weight.detach())
    loss.backward()
    assert max(sizes, default=0) < x.numel() * 4


# --------------------------------------------------------------------------------------------------------------- peers


@pytest.mark.parametrize("kind", [kind for kind in PAIRS if kind not in ("ipo", "sigmoid_norm")])
def test_a_preference_is_ligers(kind: str) -> None:
    module: Any = pytest.importorskip("liger_kernel.chunked_loss.dpo_loss", reason="liger-kernel is not installed")
    chosen, rejected, ref_chosen, ref_rejected = (each.float().requires_grad_() for each in _numbers())
    smoothing = SMOOTHED.get(kind, 0.0)
    got = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, loss_type=kind, label_smoothing=smoothing)
    theirs = module.LigerFusedLinearDPOFunction.preference_loss_fn(
        chosen, rejected, torch.zeros(12, 1), ref_chosen, ref_rejected, loss_type=kind, label_smoothing=smoothing
    )[0]
    torch.testing.assert_close(got, theirs, rtol=1e-6, atol=1e-6)
    slopes = [torch.autograd.grad(each, (chosen, rejected)) for each in (got, theirs)]
    torch.testing.assert_close(*slopes, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "level"), [each for each in LEVELS if each != ("luspo", "token")])
def test_a_policy_gradient_is_ligers(kind: str, level: str) -> None:
    """All but "luspo" by tokens, where Liger's has masked tokens in its mean."""
    module: Any = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss", reason="liger-kernel is not installed")
    tokens = _tokens(torch.float32)
    if kind == "luspo":  # with a number of each token, Liger's has masked tokens in its mean
        tokens = {name: value for name, value in tokens.items() if name not in ("ref_logp", "sampling_ratio")}
    logp, ratio = tokens["logp"].requires_grad_(), tokens.get("sampling_ratio")
    options = {**OPTIONS, "beta": 0.0 if kind == "luspo" else 0.05}
    got = grpo_loss(**tokens, loss_type=kind, importance_sampling_level=level, delta=1.2, **options)
    theirs = module.LigerFusedLinearGRPOFunction.ppo_loss_fn(
        logp, tokens["mask"], tokens["advantages"], tokens["mask"], tokens.get("ref_logp"), tokens["old_logp"],
        loss_type=kind, importance_sampling_level=level, vllm_is_ratio=ratio, delta=1.2, **options,
    )[0]  # fmt: skip
    torch.testing.assert_close(got, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(*[torch.autograd.grad(each, logp)[0] for each in (got, theirs)], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 1.0, 0.3])
def test_a_divergence_is_ligers(beta: float) -> None:
    module: Any = pytest.importorskip("liger_kernel.chunked_loss.jsd_loss", reason="liger-kernel is not installed")
    x, weight, teacher_x, teacher_weight = (torch.randn(*shape) for shape in ((40, 4), (11, 4), (40, 6), (11, 6)))
    target = torch.randint(11, (40,)).masked_fill(torch.arange(40) % 7 == 1, -100)
    got = kl_divergence(x, weight, teacher_x, teacher_weight, mask=target != -100, beta=beta, reduction="sum")
    logits = (x @ weight.T, teacher_x @ teacher_weight.T)
    theirs = module.LigerFusedLinearJSDFunction.distillation_loss_fn(*logits, beta=beta, target=target)
    torch.testing.assert_close(got, theirs, rtol=1e-5, atol=1e-6)


def test_a_step_of_dpo_has_no_logits_of_all_rows() -> None:
    """The whole way: log probabilities of both answers by the op, and the loss; as with all logits."""
    x, weight = torch.randn(4, 9, 8).requires_grad_(), torch.randn(23, 8).requires_grad_()
    target = torch.randint(23, (4, 9)).masked_fill(torch.arange(9) < 3, -100)
    sums = fusedops.linear_log_probs(x, weight, target).sum(-1)
    loss = dpo_loss(sums[:2], sums[2:])
    each = torch.log_softmax(x @ weight.T, -1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    plain = (each * (target != -100)).sum(-1)
    want = -torch.nn.functional.logsigmoid(0.1 * (plain[:2] - plain[2:])).mean()
    torch.testing.assert_close(loss, want)
    slopes = [torch.autograd.grad(one, (x, weight)) for one in (loss, want)]
    torch.testing.assert_close(*slopes)


def test_log1p_of_a_small_share_is_used() -> None:
    """exo_pair with a share that float32 rounds beside 1."""
    one = torch.zeros(1)
    got = dpo_loss(one, one, loss_type="exo_pair", label_smoothing=1e-9)
    assert float(got) == pytest.approx(float(0.5 * (log(0.5) - log1p(-1e-9)) + 0.5 * (log(0.5) - log(1e-9))))
