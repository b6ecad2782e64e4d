"""The bounds of every op's errors are far below the size of its results, also for a sum over 4096 rows.

A bound as large as the result accepts a negated gradient. ``pytest -s`` prints the table.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from loopback import contiguous, reference_kernels, registered, with_parameters
from torch import Tensor

import fusedops
from fusedops import testing
from fusedops.ops.norms import error_bounds
from fusedops.testing import OPS, Case
from fusedops_sdpa.attention import attention_backward
from tests.fuzz.verified import Planted

ROWS = 4096
MOST = 0.2  # of the size of the result: root of the mean of the squares, for both
ARGS: dict[str, dict[str, Any]] = {  # ops whose sample has a number of columns, too, that grows with the rows
    "attention": {"q": (1, 2, ROWS, 16), "k": (1, 1, 64, 16), "v": (1, 1, 64, 16), "return_lse": True},
    # the reference has a step for each position
    "linear_attention": dict(OPS["linear_attention"].evidence.sample(1, ROWS // 16)),
    # with the entropy's gradient, a product of three terms that each have roundings, the bound is 0.4 in bfloat16
    "linear_log_probs": {**OPS["linear_log_probs"].evidence.sample(1, ROWS), "return_entropy": False},
    "scaled_masked_softmax": {"x": (1, ROWS, 64), "scale": 1.0},
    # each row has scores of all keys, and nothing is summed over rows
    "select_keys": dict(OPS["select_keys"].evidence.sample(1, ROWS // 16)),
    "sparse_attention": {
        "q": (1, 2, ROWS, 16),
        "k": (1, 1, 64, 16),
        "v": (1, 1, 64, 16),
        "indices": (1, 1, ROWS, 16),
        "return_lse": True,
    },
    "varlen_attention": {
        "q": (ROWS, 2, 16),
        "k": (64, 1, 16),
        "v": (64, 1, 16),
        "cu_seqlens_q": (3,),
        "cu_seqlens_k": (3,),
        "return_lse": True,
    },
}


def args_of(op: fusedops.Op, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the arguments of a call with 4096 rows of normal numbers."""
    assert op.evidence.sample is not None
    case = Case("rows", ARGS.get(op.name) or dict(op.evidence.sample(1, ROWS)))
    drawn = testing.arguments(op, case, dtype)
    return tuple(arg / 3 if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in drawn)


@pytest.mark.parametrize("name", OPS)
def test_a_bound_is_below_a_fifth_of_the_result(name: str) -> None:
    op, beyond = OPS[name], []
    for dtype in op.evidence.tolerance:
        want = testing.expected(op, args_of(op, dtype))
        results = {f"output {n}": y for n, y in zip(op.outputs, want.outputs)}
        results |= {f"gradient of {n}": g for n, g in want.gradients.items()}
        results |= {f"saved {n}": value for n, value in want.saved.items() if value.is_floating_point()}
        for key, result in results.items():
            limit = want.limits[key].expand(result.shape)
            if not result.any():
                continue  # zeros in place of an output that the call does not want
            ratio = float(limit.square().mean().sqrt() / result.double().square().mean().sqrt())
            line = f"{name} {str(dtype).removeprefix('torch.')}, {key}: bound / size = {ratio:.2g}"
            print(line)
            if not ratio < MOST:
                beyond.append(line)
    assert not beyond, "\n".join(beyond)


def in_16_bits(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of rows, added up one by one in a 16-bit dtype."""
    total = torch.zeros(rows.shape[-1], dtype=dtype)
    for row in rows.to(dtype):
        total += row
    return total


WRONG = {
    "negated": lambda rows, dtype: -rows.sum(0).to(dtype),
    "summed in 16 bits": in_16_bits,
    "without the last 128 rows": lambda rows, dtype: rows[:-128].sum(0).to(dtype),
}


def wrong_weight(name: str, at: int, fault: str) -> fusedops.Backend:
    """Return a backend of an op's own formulas, but for the sum over rows of one gradient."""
    op = OPS[name]
    forward, _ = reference_kernels(op)

    def backward(*args: Any) -> Any:
        named = dict(zip(op.backward_parameters, args))
        results = list(op.backward(*args))
        grad, x = named.get("grad", named.get("grad_y")), named.get("x", named.get("s"))
        if results[at] is not None:
            mean = named["mean"][..., None] if "mean" in named else 0
            normal = (x.float() - mean) * named["rstd"][..., None]
            rows = grad.float() if op.differentiable[at] == "bias" else grad.float() * normal
            results[at] = WRONG[fault](rows.flatten(0, -2), results[at].dtype)
        return tuple(results)

    function = with_parameters(contiguous(backward, *op.backward_parameters), *op.backward_parameters)
    wrong = fusedops.kernel(name, direction="backward")(function)  # pyright: ignore
    return fusedops.Backend("wrong", ("cpu",), -50, [forward, wrong])


SUMS = [
    (name, at)
    for name in ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
    for at, parameter in enumerate(OPS[name].differentiable)
    if parameter in ("weight", "bias")
]


@pytest.mark.parametrize(
    ("dtype", "rows", "against"),
    [
        (torch.bfloat16, 256, "reference"),
        (torch.float16, 256, "reference"),
        (torch.bfloat16, 4096, "eager"),
        (torch.float16, 4096, "reference"),
        (torch.bfloat16, 16384, "reference"),
        (torch.float16, 16384, "eager"),
    ],
)
@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize(("name", "at"), SUMS, ids=lambda value: str(value))
def test_verify_finds_a_wrong_sum_over_rows(
    name: str, at: int, fault: str, dtype: torch.dtype, rows: int, against: str
) -> None:
    op = OPS[name]
    columns = 64 if rows == 256 else 16  # few numbers add up to a smaller error, seen in one of many columns
    generator = torch.Generator().manual_seed(rows)
    x, residual, *grads = (torch.randn(rows, columns, generator=generator).to(dtype) for _ in range(4))
    weight, bias = (torch.randn(columns, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    given = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    args = {name: value for name, value in given.items() if name in op.parameters}
    with registered(wrong_weight(name, at, fault)), fusedops.verify(against):
        outputs = op.as_tuple(op.function(**args, backend="wrong"))
        with pytest.raises(fusedops.MismatchError, match=op.differentiable[at]):
            torch.autograd.backward(outputs, grads[: len(outputs)])


def test_verify_compares_a_saved_value_that_the_other_backend_does_not_keep() -> None:
    op = OPS["cross_entropy"]
    _, backward = reference_kernels(op)

    def forward(*args: Any) -> Any:
        loss, lse, log_prob = op.reference_with_saved(*args)
        return loss, lse, 0 * log_prob

    parameters = (*op.parameters, "save")
    wrong = fusedops.kernel(op.name)(with_parameters(contiguous(forward, *parameters), *parameters))
    logits = torch.randn(3, 8, requires_grad=True)
    backend = fusedops.Backend("wrong", ("cpu",), -50, [wrong, backward])
    mismatch = pytest.raises(fusedops.MismatchError, match="saved log_prob")
    with registered(backend), fusedops.verify("eager"), mismatch:
        fusedops.cross_entropy(logits, torch.tensor([0, 3, 7]), backend="wrong")


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_element_of_16_bits_a_tenth_too_small_is_beyond_its_limit(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    want = testing.expected(op, args_of(op, dtype))
    limit = want.limits["output y"]
    y = want.outputs[0]
    # an element of a normal size; of the sum with a residual, whose rounding large weights magnify, the largest
    large = y.abs() >= (y.abs().max() if "residual" in op.parameters else 1)
    assert bool((2 * limit < 0.1 * y.abs())[large].all())  # twice: against another backend


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_a_row_whose_rstd_is_not_determined_leaves_the_weight_gradient_open(name: str) -> None:
    op = testing.OPS[name]
    call = {"x": torch.zeros(3, 8), "weight": torch.ones(8), "eps": 0.0}
    args = op.bind((), call)
    results = op.reference_with_saved(*args, True)
    given = op.backward_arguments([torch.ones(3, 8)], results, args, (True,) * len(op.differentiable))
    bounds = op.evidence.gradient_error_bound(1e-5, *given)
    assert torch.equal(bounds[1], torch.full((8,), torch.inf, dtype=torch.float64))


def test_an_ignored_row_whose_logits_overflow_leaves_the_bounds_of_the_other_rows() -> None:
    op, x = OPS["linear_cross_entropy"], torch.arange(16, dtype=torch.float16).view(2, 8) / 16
    weight, target = torch.ones(4, 8, dtype=torch.float16), torch.tensor([1, -100])
    call = {"x": x, "weight": weight, "target": target, "bias": torch.zeros(4)}
    plain = testing.expected(op, op.bind((), call)).limits
    x = x.index_fill(0, torch.tensor(1), torch.finfo(torch.float16).max)
    wide = testing.expected(op, op.bind((), {**call, "x": x})).limits
    for result in ("output loss", "gradient of bias"):
        assert bool((plain[result] > 1e-5).all())
        assert torch.equal(wide[result], plain[result])


@pytest.mark.parametrize("scale", [2.0**62, 1.0])
def test_scores_whose_rounding_is_beyond_exp_leave_the_gradients_open(scale: float) -> None:
    """A backward has exp(score - lse), with the lse of another kernel."""
    op, x = OPS["attention"], torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    limits = testing.expected(op, op.bind((), {"q": x, "k": x + 1, "v": x, "scale": scale})).limits
    assert bool(limits["gradient of v"].isinf().any()) == (scale > 1.0)


@pytest.mark.parametrize("size", [1e18, 1e16])
def test_a_product_with_a_state_that_may_overflow_leaves_its_result_open(size: float) -> None:
    """The difference of two products, each near the largest float32: of a row, and a gradient."""
    q, state = torch.full((1, 1, 1, 2), size), torch.tensor([3e20, -2.9e20]).view(1, 1, 2, 1)
    op, call = OPS["linear_attention"], {"q": q, "k": q / size, "v": torch.ones(1, 1, 1, 1), "initial_state": state}
    limits = testing.expected(op, op.bind((), {**call, "scale": 1.0}), grad=torch.full((1, 1, 1, 1), size)).limits
    for result in ("output out", "gradient of q"):
        assert bool(limits[result].isinf().all()) == (size == 1e18), result


def test_a_logit_whose_error_overflows_leaves_its_row_open() -> None:
    weight = torch.ones(3, 2, dtype=torch.float64)
    weight[0, 0] = torch.finfo(torch.float64).max
    x, target = torch.tensor([[-1e-3, 1.0]], dtype=torch.float64), torch.tensor([1])
    for z_loss in (0.0, 0.1):
        args = (x, weight, target, None, -100, 0.0, z_loss, None, "mean", None, None)
        assert bool((testing.expected(OPS["linear_cross_entropy"], args).limits["gradient of weight"][1:] > 1e-4).all())


def test_a_saved_gradient_that_may_overflow_leaves_the_gradient_open() -> None:
    op, x = OPS["linear_cross_entropy"], torch.full((2, 8), 40.0, dtype=torch.float16)
    call = {"x": x, "weight": x.new_ones(4, 8), "target": torch.tensor([1, 2]), "z_loss": 8.0}
    whole = testing.expected(op, op.bind((), call), grad=torch.tensor(1.0))
    assert bool((whole.gradients["weight"].abs() > torch.finfo(torch.float16).max / 2).any())
    small = testing.expected(op, op.bind((), call), grad=torch.tensor(1e-3))
    assert small.limits["gradient of weight"].isinf().any()


@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm"])
def test_a_sum_of_equal_terms_may_drift(name: str) -> None:
    op, rows = OPS[name], 6688
    zeros, ones = torch.zeros(rows, 1), torch.ones(rows, 1)
    call = {"x": zeros, "residual": zeros, "bias": torch.zeros(1)}
    args = op.bind((), {key: value for key, value in call.items() if key in op.parameters})
    limits: list[float] = []
    for signs in (ones, ones.where(torch.arange(rows)[:, None] % 2 == 0, -ones)):
        grads = [signs, zeros][: len(op.outputs)]
        limits.append(float(testing.expected(op, args, grad=grads).limits["gradient of bias"]))
    assert limits[0] > 5 * limits[1]  # of both signs: the sum stays small


def test_the_mean_of_a_row_of_equal_gradients_may_drift() -> None:
    columns, grad = 4096, torch.full((2, 4096), 0.9698492288589478)
    x = torch.randn(2, columns, generator=torch.Generator().manual_seed(0))
    rstd = torch.ones(2)
    (dx, *_) = error_bounds.layer_norm_gradient_error_bound(2e-5, grad, x, torch.zeros(2), rstd, None, None, (True,))
    one_by_one = grad[0].numpy().cumsum(dtype="float32")[-1] / columns  # as NumPy sums an axis that is not the last one
    assert float(dx.min()) > abs(one_by_one - grad[0, 0].item())
    random = torch.randn(2, columns, generator=torch.Generator().manual_seed(1))
    (other, *_) = error_bounds.layer_norm_gradient_error_bound(
        2e-5, random, x, torch.zeros(2), rstd, None, None, (True,)
    )
    assert float(other.mean()) < 1e-3


def test_a_score_of_thousands_of_equal_products_may_drift() -> None:
    limits: list[float] = []
    for size in (512, 4096):
        row = torch.full((1, 1, 1, size), size**-0.5, dtype=torch.float64)
        limit = testing.expected(OPS["attention"], (row, row, row, None, 1.0, "none", None, True)).limits["output lse"]
        limits.append(float(limit))
    assert limits[1] > 0.25 * 4096 * torch.finfo(torch.float64).eps  # of a sum of 1
    assert limits[1] > 2 * limits[0]


def test_a_logit_of_equal_products_may_drift() -> None:
    x, target = torch.ones(2, 576), torch.tensor([0, 1])
    limits: list[float] = []
    for signs in (torch.ones(576), torch.ones(576).where(torch.arange(576) % 2 == 0, -1.0)):
        args = (x, (5 * signs).expand(10, 576), target, None, -100, 0.0, 0.0, None, "mean", None, None)
        limits.append(float(testing.expected(OPS["linear_cross_entropy"], args).limits["output loss"]))
    assert limits[0] > 0.25 * 576 * torch.finfo(torch.float32).eps * 5 * 576  # of a sum of 5 * 576
    assert limits[0] > 5 * limits[1]  # of both signs: the sum stays small


def test_a_sum_whose_rounding_is_larger_than_its_spread_leaves_the_gradient_open() -> None:
    op, x = OPS["add_layer_norm"], torch.full((2, 32), 30.0, dtype=torch.float16)
    for spread, is_open in ((0.01, True), (3.0, False)):
        residual = (spread * torch.randn(2, 32, generator=torch.Generator().manual_seed(0))).half()
        limit = testing.expected(op, (x, residual, None, None, 0.0)).limits["gradient of x"]
        assert bool(limit.isinf().all()) is is_open
    rows = torch.ones(2)  # rounded to equal numbers, whose rstd is that of the sum before
    given = (torch.randn(2, 32).half(), torch.zeros(2, 32), x, 30 * rows, 1000 * rows, None, None)
    limit, *_ = error_bounds.add_layer_norm_gradient_error_bound(2e-5, *given)
    assert limit.isinf().all()


def test_a_kernel_that_rounds_its_sums_after_each_block_of_queries_adds_to_its_own_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(1, 1, 3, 4, generator=generator).bfloat16()
    for rows, factor in ((256, 1.2), (8192, 1.7)):
        q = torch.randn(1, 1, rows, 4, generator=generator).bfloat16()
        args = (q, k, k, None, None, "none", None, False)
        every = [testing.expected(OPS["attention"], args, kernels=kernels) for kernels in ((), (attention_backward,))]
        alone, own = (float(each.limits["gradient of v"].mean()) for each in every)
        assert factor * alone < own < 2 * factor * alone, rows
        assert torch.equal(every[0].limits["gradient of q"], every[1].limits["gradient of q"])


@pytest.mark.parametrize("extra", [None, [2e-3]], ids=["none", "declared"])
def test_an_error_that_a_kernel_declares_is_accepted_of_it(extra: list[float] | None) -> None:
    op = OPS["bias_gelu"]
    _, backward = reference_kernels(op)
    error = None if extra is None else lambda *args: extra
    off = contiguous(lambda *args: op.reference(*args) + 1e-3, *op.parameters)
    forward = fusedops.kernel(op.name, extra_error=error)(with_parameters(off, *op.parameters))
    with registered(fusedops.Backend("off", ("cpu",), -50, [forward, backward])):
        for against in ("reference", "eager"):
            wrong = pytest.raises(fusedops.MismatchError) if extra is None else nullcontext()
            with fusedops.verify(against), wrong:
                fusedops.bias_gelu(torch.ones(3), backend="off")
        (check,) = [each for each in testing.checks("off", op=op.name) if each.id == "bias_gelu/forward/calls"]
        assert bool(check.run().failures) == (extra is None)


def test_equal_queries_round_their_probabilities_alike() -> None:
    op, k = OPS["attention"], torch.randn(1, 1, 9, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    limits: list[float] = []
    for q in (torch.ones(1, 16, 1, 8), torch.randn(1, 16, 1, 8, generator=torch.Generator().manual_seed(1))):
        args = (q.bfloat16(), k * 1e-3, k, None, None, "none", None, False)  # of about equal scores
        limits.append(float(testing.expected(op, args).limits["gradient of v"].mean()))
    assert limits[0] > 1.5 * limits[1]


def test_weights_of_float64_do_not_make_the_arithmetic_of_experts_wider() -> None:
    op, call = OPS["experts"], {"x": torch.ones(1, 1), "index": torch.zeros(1, 1, dtype=torch.int64)}
    call |= {"weights": torch.ones(1, 1).double(), "up": torch.ones(1, 2, 1), "down": torch.ones(1, 1, 1)}
    want = testing.expected(op, op.bind((), call))
    assert bool((want.limits["gradient of weights"] > 1e-7 * want.gradients["weights"].abs()).all())


def test_an_output_of_experts_may_be_rounded_before_it_is_weighted() -> None:
    op, least = OPS["experts"], 2.0**-24  # of float16
    call: dict[str, Any] = {"x": torch.ones(1, 1).half(), "index": torch.zeros(1, 1, dtype=torch.int64)}
    call |= {"weights": torch.full((1, 1), 64.0), "up": torch.ones(1, 2, 1), "down": torch.full((1, 1, 1), least)}
    limit = testing.expected(op, op.bind((), call)).limits["output y"]
    assert 64 * least < float(limit) < 256 * least


def test_equal_terms_of_a_gradient_of_experts_add_up() -> None:
    op, size = OPS["experts"], 64
    call = {"x": torch.zeros(1, size, dtype=torch.float16), "index": torch.zeros(1, 1, dtype=torch.int64)}
    call |= {"weights": torch.ones(1, 1), "up": torch.ones(1, 2, size), "down": torch.ones(1, size, 1)}
    call |= {"up_bias": torch.full((1, 2), 30.01)}
    limits = [
        testing.expected(op, op.bind((), call), grad=grad.half()[None]).limits["gradient of up_bias"][0, 1]
        for grad in (torch.ones(size), torch.ones(size).where(torch.arange(size) % 2 == 0, -1.0))
    ]
    assert limits[0] > size * 30 * torch.finfo(torch.float16).eps / 2  # a kernel may round the gate to float16
    assert limits[0] > 4 * limits[1]  # of both signs: the sum stays small


def test_the_gradient_of_an_activation_may_be_rounded_to_few_bits_of_float16() -> None:
    op, grad = OPS["experts"], torch.full((1, 1), 2e-3).half()
    call = {"x": torch.ones(1, 1).half(), "index": torch.zeros(1, 1, dtype=torch.int64), "weights": torch.zeros(1, 1)}
    down = 1e-3 * torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(2))
    args = op.prepared(op.bind((), {**call, "up": torch.ones(1, 64, 1), "down": down}))
    da = grad.double() * down[0].double()
    rounded = float(da.half().double().sum() - da.sum()) * torch.nn.functional.silu(torch.ones(1)).item()
    assert float(testing.expected(op, args, grad=grad).limits["gradient of weights"]) > abs(rounded)


def test_a_product_of_experts_may_be_rounded_before_a_wider_bias_is_added() -> None:
    op, bias = OPS["experts"], torch.full((1, 2), -15.0)
    limits: list[float] = []
    for x, given in ((16.0, bias), (1.0, None)):  # h is 1 in both
        call: dict[str, Any] = {"x": torch.full((1, 1), x).bfloat16(), "index": torch.zeros(1, 1, dtype=torch.int64)}
        call |= {"weights": torch.ones(1, 1), "up": torch.ones(1, 2, 1).bfloat16(), "down": torch.ones(1, 1, 1)}
        limits.append(float(testing.expected(op, op.bind((), {**call, "up_bias": given})).limits["output y"]))
    assert limits[0] > limits[1] + 2.0**-9 * 16  # by the rounding of a product of 16


@pytest.mark.parametrize(("rows", "outputs", "columns"), [(4096, 8, 8), (64, 4096, 8), (2, 8, 4096)])
def test_a_sum_of_thousands_of_equal_products_is_within_its_bound(rows: int, outputs: int, columns: int) -> None:
    op, offsets = OPS["grouped_matmul"], torch.tensor([rows])
    x, weight = torch.full((rows, columns), 0.1), torch.full((1, outputs, columns), 0.3)
    grad = torch.full((rows, outputs), 0.37)
    want = testing.expected(op, (x, weight, offsets, None, False), grad=grad)
    x.requires_grad_()
    y = fusedops.grouped_matmul(x, weight.requires_grad_(), offsets, backend="eager")
    testing.assert_within(y.detach(), want.y, want.limits["output y"], "y")
    for name, got in zip(("x", "weight"), torch.autograd.grad(y, (x, weight), grad)):
        testing.assert_within(got, want.gradients[name], want.limits[f"gradient of {name}"], name)


def test_infinity_times_a_number_of_unknown_sign_leaves_the_result_open() -> None:
    op = OPS["experts"]
    call: dict[str, Any] = {"x": torch.ones(1, 2), "index": torch.zeros(1, 1, dtype=torch.int64)}
    call |= {"weights": torch.tensor([[-math.inf]]), "up": torch.ones(1, 4, 2)}
    for down, is_open in ((torch.tensor([[1.0, -1.0]]), True), (torch.ones(1, 2), False)):  # the output is 0, or not
        limit = testing.expected(op, op.bind((), {**call, "down": down.expand(1, 2, 2)})).limits["output y"]
        assert bool(limit.isinf().all()) is is_open
    call |= {"weights": torch.ones(1, 1), "down": torch.full((1, 2, 2), math.inf)}
    call["up"] = torch.tensor(
        [[[1.0, -1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]]
    )  # the first gate is 0, its slope is not
    limit = testing.expected(op, op.bind((), call)).limits["gradient of up"]
    assert limit.isinf().all(-1).tolist() == [[False, False, True, False]]


def test_a_small_denominator_scales_the_rounding_of_a_saved_gradient() -> None:
    op, half = OPS["linear_cross_entropy"], torch.finfo(torch.float16)
    x, weight = torch.tensor([[1.0, 0.0]], dtype=torch.float16), torch.tensor([[0.0, 0.0], [16.0, 0.0]])
    call = {"x": x, "weight": weight.half(), "target": torch.tensor([1]), "denominator": torch.tensor([half.tiny])}
    limit = testing.expected(op, op.bind((), call), grad=torch.tensor(1.0)).limits["gradient of weight"]
    assert bool((limit >= half.smallest_normal * half.eps / half.tiny).all())  # also of the column of zeros


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_a_smoothing_that_float32_rounds_to_1_leaves_a_row_with_infinity_open(name: str) -> None:
    logits, target = torch.tensor([[0.0, -torch.inf], [0.0, 1.0]]), torch.tensor([0, 1])
    call: dict[str, Any] = {"logits": logits} if name == "cross_entropy" else {"x": logits, "weight": torch.eye(2)}
    call |= {"target": target, "reduction": "none"}
    for smoothing, is_open in ((1 - 2**-53, True), (1 - 2**-20, False)):
        limit = testing.expected(OPS[name], OPS[name].bind((), {**call, "label_smoothing": smoothing})).limits
        assert limit["output loss"].isinf().tolist() == [is_open, False]


def test_verify_sees_an_element_of_x_grad_a_tenth_too_small() -> None:
    op = OPS["linear_cross_entropy"]
    planted = Planted(op, "forward", 1, 4, torch.bfloat16, "one element a tenth too small", 704807969)
    assert "saved x_grad" in planted.text
    assert planted.seen()


def test_a_row_of_equal_numbers_and_a_tiny_eps_leave_the_gradient_of_x_open() -> None:
    op, x = OPS["layer_norm"], torch.full((3, 15), 3.0, dtype=torch.float16)
    for eps, is_open in ((1e-12, True), (1e-5, False)):
        limit = testing.expected(op, op.bind((), {"x": x, "eps": eps})).limits["gradient of x"]
        assert bool(limit.isinf().all()) is is_open


def test_a_mean_square_that_float32_loses_leaves_the_row_open() -> None:
    op, x = OPS["layer_norm"], torch.ones(3, 8)  # of the same numbers: 0 times the rstd of an eps that is 0 in float32
    assert testing.expected(op, (x, None, None, 1e-320)).limits["output y"].isinf().all()
    assert testing.expected(op, (x, None, None, 1e-5)).limits["output y"].isfinite().all()


def test_a_0_of_float64_may_be_a_smaller_number_than_it_has() -> None:
    tolerance, zero = fusedops.Tolerance(0.0, 1e-12), torch.zeros(1, dtype=torch.float64)
    testing.assert_within(torch.tensor([-5e-324], dtype=torch.float64), zero, tolerance, "x")
    with pytest.raises(AssertionError):  # the expected number of float32 is of float64, which has a wider range
        testing.assert_within(torch.tensor([-1e-45]), zero, tolerance, "x")
