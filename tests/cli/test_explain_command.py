"""fusedops explain: its exit codes are those of the call, its settings are those of a program."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from command_line import NPU_CALL, flat, run
from fakes import Fakes

import fusedops
from fusedops._cli.main import main
from fusedops.constraints import Dim

SOFTMAX = "scaled_masked_softmax"


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--x", "4,8,16,16"], 0),
        (["--x", "4,8,512,512:bf16@npu"], 0),
        (["--x", "4x8x512x512:bf16@npu:3"], 0),
        (["--x", "4,8,512,500:bf16@npu"], 1),
        (["--x", "4,8,512,500:bf16@npu", "--adapt", "pad"], 0),
        (["--x", "4,8,512,500:bf16@npu", "--policy", "eager"], 0),
        (["--x", "4,8,512,500:bf16@npu", "--policy", "npu,eager"], 1),
        (["--x", "4,8,512,500:bf16@npu", "--policy", "npu", "--backend", "eager"], 0),
        (["--x", "4,8,512,500:bf16@npu", "--fallback", "silent"], 1),
        (["--x", "4,8,512,500:bf16@npu", "--fallback", "raise"], 3),
        (["--x", "4,8,512,500:bf16@npu", "--fallback", "raise", "--adapt", "pad"], 0),
        (["--x", "4,8,512,512:fp64@npu"], 1),
        (["--x", "4,8,512,512:bf16@npu", "--backend", "eager"], 0),
        (["--x", "4,8,512,512:bf16@npu", "--mask", "512,512", "--scale", "0.125", "--causal", "true"], 0),
        (["--x", "4,8,16,16", "--mask", "none", "--scale", "-1e-3"], 0),
        (["--x", "4,8,16,16", "--backend", "npu"], 1),
        (["--x", "4,8,16,16", "--backend", "npu,eager"], 0),
    ],
)
@pytest.mark.usefixtures("fakes")
def test_exit_codes(argv: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", SOFTMAX, *argv]) == code
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("policy", [None, "a", "b", "b,a", "c", "c,b", "a,c", "bias_gelu=b", "d", "b,d"])
@pytest.mark.parametrize("fallback", ["warn", "raise"])
@pytest.mark.parametrize("size", [8, 12, 13])
def test_the_exit_code_is_what_the_call_does(policy: str | None, fallback: str, size: int, fakes: Fakes) -> None:
    """Backend a takes multiples of 8, b multiples of 4, c is for another device type, d is optional: of 16."""

    def kernels(multiple: int) -> list[fusedops.Kernel]:
        op = fusedops.ops.OPS["bias_gelu"]
        condition = Dim("x", (-1,), multiple_of=multiple)
        return [
            fusedops.kernel(op.name, condition)(op.reference),
            fusedops.kernel(op.name, direction="backward")(op.backward),
        ]

    fusedops.register(fusedops.Backend("a", ("cpu",), 200, kernels(8)))
    fusedops.register(fusedops.Backend("b", ("cpu",), 150, kernels(4)))
    fusedops.register(fusedops.Backend("c", ("npu",), 400, kernels(1)))
    fusedops.register(fusedops.Backend("d", ("cpu",), 500, kernels(16), optional=True))
    with fusedops.use(policy, fallback=fallback), warnings.catch_warnings(record=True) as caught:  # type: ignore[arg-type]
        warnings.simplefilter("always")
        try:
            fusedops.bias_gelu(torch.ones(2, size))
        except fusedops.NoBackendError:
            expected = 3
        else:
            expected = int(any(issubclass(each.category, fusedops.FallbackWarning) for each in caught))
    options = [] if policy is None else ["--policy", policy]
    assert main(["explain", "bias_gelu", "--x", f"2,{size}", "--fallback", fallback, *options]) == expected


def test_no_backend_serves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FUSEDOPS_FALLBACK", "raise")
    code, output = run("explain", SOFTMAX, "--x", "4,8,512,500:bf16@npu", "--backend", "npu", capsys=capsys)
    assert code == 3
    assert "served by no backend" in output
    assert "fallback  raise" in output


def test_the_mask_is_bool_on_the_device_of_x(capsys: pytest.CaptureFixture[str]) -> None:
    _, output = run(*NPU_CALL, capsys=capsys)
    assert "mask bool[8, 1, 512, 500] on npu" in flat(output)
    assert "pad dim -1 of x from 500 to 512" in flat(output)


def test_a_seed_is_int64(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run("explain", "bias_dropout", "--x", "4,8", "--seed", "1", capsys=capsys)
    assert code == 0
    assert "seed int64[1] on cpu" in flat(output)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("add_rms_norm --x 4,8:bf16 --residual 4,8 --weight 8", "residual bfloat16[4, 8] on cpu, weight bfloat16[8]"),
        ("attention --q 1,2,8,64:fp16@cuda --k 1,2,8,64 --v 1,2,8,64", "v float16[1, 2, 8, 64] on cuda"),
        ("attention --q 1,2,8,4:fp16 --k 1,2,8,4 --v 1,2,8,4 --mask 8,8", "mask bool[8, 8] on cpu"),
        ("cross_entropy --logits 4,8:bf16 --target 4", "target int64[4] on cpu"),
        ("rms_norm --x 4,8:bf16 --weight 8:fp32", "weight float32[8] on cpu"),
        ("rms_norm --x (4,8) --weight (8,)", "x float32[4, 8] on cpu, weight float32[8] on cpu"),
        ("rms_norm --x 4x8 --weight none", "x float32[4, 8] on cpu, weight None"),
    ],
)
def test_what_a_tensor_does_not_write_is_that_of_the_first(
    words: str, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = run("explain", *words.split(), capsys=capsys)
    assert code == 0
    assert given in flat(output)


def test_the_compute_capability_of_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["explain", "attention", "--q", "1,2,8,64:bf16@cuda", "--k", "1,2,8,64", "--v", "1,2,8,64", "--json"]
    answers = {}
    for capability in ("7.5", "8.0", "12.1"):
        _, output = run(*call, "--capability", capability, capsys=capsys)
        answers[capability] = json.loads(output)["backend"]
    assert answers == {"7.5": "eager", "8.0": "flash_attn", "12.1": "flash_attn"}
    assert main([*call, "--capability", "8"]) == 2
    assert "write it like --capability 9.0" in capsys.readouterr().err


def test_backends_that_take_no_such_call_are_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["explain", "swiglu", "--gate", "4,8"]
    _, output = run(*call, capsys=capsys)
    assert "refused" not in output
    assert "others for other devices: npu, flash_attn; without a kernel for it: zentorch, sdpa" in flat(output)
    _, output = run(*call, "--backend", "npu,sdpa", capsys=capsys)  # those that a policy names are refusals
    assert "refused npu serves npu, not cpu refused sdpa has no kernel for swiglu" in flat(output)
    assert "others for other devices: flash_attn; without a kernel for it: zentorch" in flat(output)
    assert "sdpa" not in output.rpartition("others")[2]


def test_no_argument_is_cut_at_a_line_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for columns in range(40, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        _, output = run("explain", "rms_norm", "--x", "4,4096", "--weight", "4096", capsys=capsys)
        lines = [line.strip() for line in output.splitlines()]
        assert not [line for line in lines if line.endswith((" eps", " offset", " on")) or line in ("0", "cpu,")]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("explain rms_norm --x 4,8 --backend cuda", "cuda is a device type, and its backends are flash_attn, sdpa"),
        ("explain rms_norm --x 4,8 --policy gpu", "write 'flash_attn': cuda is a device type"),
        ("check gpu", "write 'flash_attn': cuda is a device type"),
        ("matrix --backend cuda", "write 'flash_attn': cuda is a device type"),
        ("explain rms_norm --x 4,8 --backend mps", "write 'eager': mps is a device type"),
        ("explain rms_norm --x 4,8@gpu", "to fix: write 'cuda'"),
        ("explain rms_norm --x 4,8:bfloat", "to fix: write 'bfloat16'"),
        ("explain rms_norm --x 4,8:fp8", "to fix: use one of these names"),
        ("explain softmax --x 4,8", "to fix: write 'scaled_masked_softmax'"),
        ("explain swiglu --x 4,8", "to fix: use one of these names"),
        ("foo", "to fix: use one of these names"),
    ],
)
def test_a_name_of_something_else_gets_its_own_answer(words: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert fix in capsys.readouterr().err


@pytest.mark.parametrize("bias", [[], ["--bias", "none"], ["--bias", "None"]])
def test_a_tensor_that_may_be_none(bias: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run("explain", "bias_dropout_add", "--x", "4,8", *bias, "--residual", "4,8", capsys=capsys)
    assert code == 0
    assert "bias None" in flat(output)


def test_settings_and_where_they_were_set(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*NPU_CALL, "--backend", "npu", "--policy", "eager", "--fallback", "silent", "--adapt", "pad"]
    code, output = run(*argv, capsys=capsys)
    assert code == 0
    text = flat(output)
    assert "served by npu (backward: npu)" in text
    assert 'prefer backend=: "npu" prefer use(): "eager" (overridden) fallback silent adapt pad' in text
    assert "adapts: pad" in text
