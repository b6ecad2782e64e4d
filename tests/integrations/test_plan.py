"""fusedops.plan: devices that are absent, what is assumed, odd models, data, the page, comparisons."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import json
import pathlib
import random
import subprocess
import sys
import textwrap
from typing import Any

import browser
import numpy
import pytest
import torch
import transformers
from model_families import FAMILIES
from odd_model import Odd
from torch import Tensor, nn

import fusedops
from fusedops.errors import InvalidInputError
from fusedops.integrations.transformers import apply

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "vocab_size": 128}


def llama(layers: int = 2, **sizes: Any) -> Any:
    """A model of a size that kernels of GPUs and NPUs take, without numbers."""
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": layers, **sizes})
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).bfloat16()


BATCH = {"batch": 2, "length": 64}


def backends(plan: fusedops.Plan) -> dict[tuple[str, str], set[str | None]]:
    """The backends of each op and direction."""
    found: dict[tuple[str, str], set[str | None]] = {}
    for row in plan.rows:
        found.setdefault((row.op, row.direction), set()).add(row.backend)
    return found


# ------------------------------------------------------------------------------------------------------------ devices


def test_a_device_that_is_absent_has_its_own_backend() -> None:
    served = backends(fusedops.plan(llama(), BATCH, device="A2", train=True))
    assert served["rms_norm", "forward"] == served["attention", "backward"] == {"npu"}
    assert served["swiglu", "forward"] == {"eager"}, "the vendor's takes gate and up in one tensor"
    on_gpu = backends(fusedops.plan(llama(), BATCH, device="H100", train=True, policy="triton"))
    assert on_gpu["rms_norm", "forward"] == on_gpu["swiglu", "backward"] == {"triton"}


def test_an_explained_call_has_the_backend_of_the_plan() -> None:
    plan = fusedops.plan(llama(), BATCH, device="A3")
    (row,) = [row for row in plan.rows if row.op == "rotary_embedding"]
    q, k, cos = ((2, 2, 64, 128), (2, 2, 64, 128), (1, 64, 64))
    specs = [fusedops.TensorSpec(shape, torch.bfloat16, "npu") for shape in (q, k, cos, cos)]
    assert row.given.startswith(f"q {specs[0]}, k {specs[1]}, cos {specs[2]}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.npu, "is_available", lambda: False)  # the stand-in's, which is there in all tests
        assert fusedops.explain("rotary_embedding", *specs).backend == row.backend == "npu"


def test_a_function_without_the_vendors_page_is_a_deviation_not_a_refusal() -> None:
    a2, new = (fusedops.plan(llama(), BATCH, device=chip, train=True) for chip in ("A2", "950"))
    assert backends(a2) == backends(new)
    marked = {row.op for row in new.rows if "not documented for Ascend 950" in row.deviations}
    assert marked == {"rms_norm", "rotary_embedding"}, "its attention and its loss have pages"
    assert not any("not documented" in each for row in a2.rows for each in row.deviations)
    lines = a2.compare(new).lines
    assert lines[0] == "rms_norm: new: deviation: not documented for Ascend 950"
    assert not any("calls" in line for line in lines)


def test_an_optional_package_is_assumed_only_where_the_device_has_it() -> None:
    spec = fusedops.DeviceSpec("cuda", "mine", (9, 0))
    plans = [
        fusedops.plan(llama(), BATCH, device=dataclasses.replace(spec, packages=each)) for each in ((), ("flash-attn",))
    ]
    assert [backends(plan)["attention", "forward"] for plan in plans] == [{"sdpa"}, {"flash_attn"}]
    assert plans[0].compare(plans[1]).lines == ("attention: sdpa (2) -> flash_attn (2)",)


def test_an_index_is_left_out() -> None:
    for device in ("cuda:0", torch.device("cuda", 1), fusedops.DeviceSpec("cuda:0")):
        plan = fusedops.plan(llama(1), BATCH, device=device, policy="triton")
        assert (plan.device.type, backends(plan)["rms_norm", "forward"]) == ("cuda", {"triton"})


def test_the_memory_of_a_device_and_the_capability() -> None:
    small = fusedops.DeviceSpec("cuda", "small", (8, 0), memory=2**20)
    assert any("more than the" in note for note in fusedops.plan(llama(), BATCH, device=small).notes)
    plan = fusedops.plan(llama(), BATCH, device=small, capability=(7, 5))
    assert plan.device.capability == (7, 5)


# ---------------------------------------------------------------------------------------- what a plan leaves as it is


def test_a_plan_changes_nothing() -> None:
    family = FAMILIES["DINOv3"]  # whose positions are kept in an lru_cache
    model, inputs = family.build(), family.inputs()
    state, classes = torch.get_rng_state(), [type(each) for each in model.modules()]
    before = [each.clone() for each in model.parameters()]
    fusedops.reset_stats()
    with torch.inference_mode():
        fusedops.plan(model, inputs, device="A2", train=True)
    assert fusedops.stats().counts == ()
    assert torch.equal(torch.get_rng_state(), state)
    assert [type(each) for each in model.modules()] == classes
    assert all(map(torch.equal, model.parameters(), before))
    assert all(each.grad is None for each in model.parameters())
    assert type(model(**inputs).last_hidden_state) is Tensor, "a tensor of the plan is in a cache"


def test_integers_that_a_forward_changes_and_random_numbers_are_those_of_before() -> None:
    model, counted = nn.Sequential(nn.BatchNorm1d(4)), torch.zeros(3, dtype=torch.int64)
    model[0].held = torch.zeros(2, dtype=torch.int64)

    def changed(module: Any, args: Any, y: Tensor) -> Tensor:
        module.held += 1
        counted.add_(1)
        return y * random.random() * numpy.random.rand()

    model[0].register_forward_hook(changed)
    states = random.getstate(), numpy.random.get_state()[1].tolist()
    fusedops.plan(model, torch.zeros(2, 4), device="cpu", train=True)
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states
    assert model[0].num_batches_tracked.item() == model[0].held.sum().item() == 0


@functools.lru_cache
def positions(n: int) -> Tensor:
    return torch.arange(n).float().cos()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_cache_of_functools_is_cleared_which_gc_may_have_frozen(frozen: bool) -> None:
    model = Odd(lambda y: y * positions(64))
    if frozen:
        gc.freeze()
    fusedops.plan(model, torch.zeros(4, 64), device="cpu")
    assert type(model(torch.zeros(4, 64))) is Tensor


@pytest.mark.slow
def test_the_memory_of_a_plan_of_8_billion_parameters() -> None:
    code = """
        import re, torch, transformers, fusedops
        sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151_936}
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).bfloat16()
        assert sum(each.numel() for each in model.parameters()) > 8e9
        fusedops.plan(model, {"batch": 1, "length": 8192}, device="A2", train=True)
        # not ru_maxrss, which begins with that of the process that has started this one
        print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1.5 * 2**20, "KiB"


# --------------------------------------------------------------------------------------------------------- odd models


def planned(then: Any) -> fusedops.Plan:
    return fusedops.plan(Odd(then), torch.zeros(4, 64), device="cpu")


def test_numbers_that_depend_on_data_are_marked() -> None:
    plan = planned(lambda y: fusedops.layer_norm(y[y.sum(-1) > 0]))
    assert sum(row.calls for row in plan.rows) == 2
    assert any("layer_norm[" not in text and "each of 4 elements is taken" in text for text in plan.assumed)
    plan = planned(lambda y: y.argmax(-1).tolist())
    assert plan.assumed[-1].endswith("the index of the largest is 32")
    assert planned(lambda y: (y > 0).tolist()).assumed[0].endswith("256 computed numbers are 0")
    assert planned(lambda y: y.masked_select(y > 0)).assumed
    assert planned(lambda y: torch.arange(4).repeat_interleave(y[:, 0].long())).assumed
    assert planned(lambda y: f"{y.mean():.3f}").assumed[0].endswith("a computed number is 0.0")
    assert planned(lambda y: torch.equal(y, y) or torch.allclose(y, y)).assumed[0].endswith("are not equal (2 times)")
    assert planned(lambda y: torch.bincount(y[0].long())).assumed[0].endswith("the largest of 64 numbers is 64")


def test_a_branch_on_a_value_is_marked_and_on_a_known_one_is_not() -> None:
    def branch(y: Tensor) -> Tensor:
        if y.sum() > 0:
            return y
        return fusedops.layer_norm(y)

    plan = planned(branch)
    assert sum(row.calls for row in plan.rows) == 2, "the branch of False"
    assert plan.assumed == ("branch, `if y.sum() > 0:`: a computed number is False",)

    def known(y: Tensor) -> Tensor:
        return fusedops.layer_norm(y) if torch.ones(4, dtype=torch.bool).all() else y

    plan = planned(known)
    assert (sum(row.calls for row in plan.rows), plan.assumed) == (2, ())


def test_an_error_that_an_assumption_decides_names_it() -> None:
    def finite(y: Tensor) -> Tensor:
        if not y.isfinite().all():
            raise ValueError("mine")
        return y

    with pytest.raises(InvalidInputError, match=r"mine in Odd; assumed before: finite, `if not y.isfinite"):
        planned(finite)


def test_a_model_that_needs_its_numbers_is_refused_and_integers_stay_as_they_are() -> None:
    with pytest.raises(InvalidInputError, match="expected a forward that runs without its numbers"):
        planned(lambda y: y.numpy())
    with torch.library._scoped_library("fusedops_test", "DEF") as library:
        library.define("odd(Tensor x) -> Tensor")
        library.impl("odd", lambda x: x + 1, "CPU")
        with pytest.raises(InvalidInputError, match="got NotImplementedError: fusedops_test::odd"):
            planned(torch.ops.fusedops_test.odd)  # which has no kernel for the meta device
    plan = planned(lambda y: fusedops.layer_norm(torch.add(y, y, out=torch.empty(4, 64)).mul_(2)))
    assert (sum(row.calls for row in plan.rows), plan.left["other"].calls) == (2, 2)
    written = torch.zeros(4, dtype=torch.int64)
    (assumed,) = planned(lambda y: written.add_(y[:, 0].long())).assumed
    assert assumed.endswith("integers that add_ changes by computed numbers are as before")


def test_a_model_of_a_ranks_sizes_has_the_calls_of_that_rank() -> None:
    half = llama(1, num_attention_heads=1, num_key_value_heads=1, head_dim=128)
    given = [row.given for row in fusedops.plan(half, BATCH, device="A2").rows]
    assert any(text.startswith("q bfloat16[2, 1, 64, 128] on npu") for text in given)


@pytest.mark.filterwarnings("ignore::fusedops.FusedOpsWarning")
def test_models_that_are_compiled_or_applied() -> None:
    plain = fusedops.plan(llama(), BATCH, device="A2", train=True)
    model = llama()
    model.compile()
    for each in (model, torch.compile(llama())):
        compiled = fusedops.plan(each, BATCH, device="A2", train=True)
        assert compiled.notes == ("planned as the model runs without torch.compile",)
        assert (compiled.rows, compiled.model) == (plain.rows, plain.model)
    model = llama()
    apply(model, ops=["rms_norm"])
    applied = fusedops.plan(model, BATCH, device="A2", train=True)
    assert {row.op for row in applied.rows} == {"rms_norm"}
    assert applied.notes == ("the model had been applied",)
    fused = llama()
    apply(fused, fused_loss=True)
    assert backends(fusedops.plan(fused, BATCH, device="H100", train=True))["linear_cross_entropy", "backward"]


def test_padding_and_the_attention_of_a_mask_are_those_of_the_values() -> None:
    ids, mask = torch.ones(2, 64, dtype=torch.int64), torch.ones(2, 64, dtype=torch.int64)
    whole = fusedops.plan(llama(), {"input_ids": ids, "attention_mask": mask}, device="A2")
    mask[0, :3] = 0
    padded = fusedops.plan(llama(), {"input_ids": ids, "attention_mask": mask}, device="A2")
    given = [next(row.given for row in plan.rows if row.op == "attention") for plan in (whole, padded)]
    assert "mask None" in given[0]
    assert "mask bool[2, 1, 64, 64] on npu" in given[1]


def test_a_policy_that_no_backend_meets_has_a_row() -> None:
    with fusedops.use("npu", fallback="raise"):
        plan = fusedops.plan(llama(), BATCH, device="A2")
    (row,) = [row for row in plan.rows if row.op == "swiglu"]
    assert row.backend is None
    assert [each.backend for each in row.refused] == ["npu"]
    assert "swiglu            2      none" in repr(plan)
    assert fusedops.plan(llama(), BATCH, device="A2", policy="eager").share["calls"] == 0


# ------------------------------------------------------------------------------------------------------------- outputs


def test_the_data_the_text_and_the_share() -> None:
    plan = fusedops.plan(llama(), BATCH, device="A2", train=True)
    data = json.loads(plan.to_json())
    assert data == json.loads(json.dumps(plan.data))
    again = fusedops.Plan.from_json(plan.to_json())
    assert (again.rows, again.torch, again.data, repr(again)) == (plan.rows, plan.torch, plan.data, repr(plan))
    (swiglu,) = [row for row in data["rows"] if (row["op"], row["direction"]) == ("swiglu", "forward")]
    (refused,) = swiglu["refused"]
    assert (refused["backend"], refused["reason"]) == ("npu", "got a up, expected no up")
    fused = [row for row in data["rows"] if row["backend"] != "eager"]
    for name in ("calls", "bytes"):
        total = sum(row[name] for row in data["rows"]) + sum(work[name] for work in data["torch"].values())
        assert data["share"][name] == sum(row[name] for row in fused) / total
    products = 7 * 2 * 2 * 64 * 256 * 256  # at least: forward and backward of 2 layers
    assert data["torch"]["products"]["products"] > products
    assert max(map(len, repr(plan).splitlines())) <= 100
    assert sum(row.calls for row in plan.fallbacks("npu", ["swiglu"])) == 4
    assert plan.fallbacks("npu", ["rms_norm"]) == []


def test_a_longer_batch_changes_no_backend_and_more_bytes() -> None:
    short, long = (fusedops.plan(llama(), {"batch": 1, "length": n}, device="A2") for n in (64, 128))
    assert short.compare(copy.copy(short)).lines == ()
    assert "nothing changed" in repr(short.compare(short))
    assert all("left to torch" in line or "served by" in line for line in short.compare(long).lines)


HOSTILE = (
    "<script>document.title='x'</script>\"'><img src=http://localhost:1/x.png onerror=\"document.title='x'\">\x1b[31m"
)


def large_page(path: pathlib.Path) -> None:
    """A page of 5,000 rows, with names that are markup."""
    plan = fusedops.plan(llama(), BATCH, device="A2", train=True)
    rows = [
        dataclasses.replace(plan.rows[n % len(plan.rows)], site=HOSTILE if n % 50 == 0 else f"M{n}")
        for n in range(5000)
    ]
    fusedops.Plan(HOSTILE, plan.device, "training", rows, plan.torch, [HOSTILE], [HOSTILE]).to_html(path, plan)


def test_the_page_escapes_every_name(tmp_path: pathlib.Path) -> None:
    large_page(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    assert text.count("<script>") == text.count("</script>") == 1
    assert "<img" not in text
    assert "\x1b" not in text
    assert "default-src 'none'" in text
    assert text.count("<tr ") == 5000 + len(fusedops.plan(llama(), BATCH, device="A2", train=True).rows)


@pytest.mark.skipif(browser.find() is None, reason="needs Chromium")
@pytest.mark.slow
def test_the_page_in_a_browser(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "page.html"
    large_page(path)
    filtered = """(() => {
        const field = document.querySelector("input"), start = performance.now();
        field.value = "swiglu m12"; field.dispatchEvent(new Event("input")); document.body.offsetHeight;
        const shown = [...document.querySelectorAll("tbody tr")].filter(row => !row.hidden);
        return [performance.now() - start, shown.length, shown.every(row => row.textContent.includes("swiglu"))];
    })()"""
    with browser.opened() as page:
        for width in (1280, 390):
            page.size(width, 900)
            page.open(path)
            assert page.run("document.documentElement.scrollWidth") == width
            assert page.run("[...document.querySelectorAll('tbody tr')].filter(row => !row.hidden).length") == 100
            times, count, fits = zip(*(page.run(filtered) for _ in range(3)))
            assert min(times) < 100, "milliseconds"
            assert set(count) <= set(range(1, 101)), fits
        assert page.run("document.title").startswith("Plan of <script>")
        assert {each for each in page.requests if not each.startswith("file:")} <= {"about:blank"}
        assert page.errors == []


def test_the_gradient_is_that_of_the_backend_of_forward() -> None:
    class Gelu(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fusedops.bias_gelu(x, None)

    def never(*_: Any) -> Any:
        raise AssertionError("forward was not served by this backend")

    forward = fusedops.kernel("bias_gelu", fusedops.constraints.Dim("x", (-1,), multiple_of=1000))
    backward = fusedops.kernel("bias_gelu", direction="backward")
    kernels = (
        forward(lambda x, bias, approximate: never()),
        backward(lambda grad, x, bias, approximate, needs: never()),
    )
    fusedops.register(fusedops.Backend("first", ("cpu",), 200, kernels))
    try:
        x = torch.zeros(2, 64, requires_grad=True)
        with fusedops.use(fallback="silent"):
            plan = fusedops.plan(Gelu(), x, device="cpu", train=True)
            fusedops.reset_stats()
            Gelu()(x).sum().backward()
        counts = fusedops.stats().counts
    finally:
        fusedops.unregister("first")
    served = [(row.op, row.direction, row.backend, row.calls) for row in plan.rows]
    assert served == [(each.op, each.direction, each.backend, each.calls) for each in counts]
    assert [len(row.refused) for row in plan.rows] == [1, 0]
