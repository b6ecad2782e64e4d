"""Odd invocations: an error on one line and a documented exit code, and never a traceback."""

from __future__ import annotations

import os
import shlex

import pytest
from command_line import documented_codes, exit_code

from fusedops._cli.main import COMMANDS

GELU = "explain bias_gelu"
SOFTMAX = "explain scaled_masked_softmax"
DROPOUT = "explain bias_dropout_add --x 4,4 --residual 4,4"
ATTENTION = "explain attention --q 1,2,8,4 --k 1,2,8,4 --v 1,2,8,4"
LOSS = "explain cross_entropy --logits 4,8 --target 4"
NORM = "explain rms_norm --x 4,8"
DIGITS = "9" * 5000

# a command line, its exit code, and a part of what it prints; "" where any will do
ODD = [
    ("", 2, "usage: fusedops"),
    ("''", 2, "got command ''"),
    ("explian", 2, "to fix: write 'explain'"),
    ("Info", 2, "to fix: write 'info'"),
    ("version", 2, "to fix: write '--version'"),
    ("--json", 2, "COMMAND"),
    ("info extra", 2, "got argument 'extra'"),
    ("info --jsno", 2, "to fix: write '--json'"),
    ("info --json=1", 2, "--json"),
    ("info --json --json", 0, ""),
    ("explain", 2, "OP"),
    ("plan", 2, "MODEL"),
    ("plan nothing", 2, "expected a config.json"),
    ("plan nothing.json", 2, "No such file"),
    ("plan no_module:build", 2, "No module named 'no_module'"),
    ("plan NoConfig", 2, "has no attribute NoConfig"),
    ("plan torch.nn:Identity --device mps9", 2, "got device 'mps9'"),
    ("plan torch.nn:Identity", 2, "expected them for a model of transformers"),
    ("plan torch.nn:Identity --train --generate 1", 2, "not allowed with"),
    ("plan torch.nn:Identity --require npu:atention", 2, "attention"),
    ("plan OPTConfig:num_hidden_layers=1 --require tritn", 2, "'triton'"),
    ("plan OPTConfig:num_hidden_layers=1 --require npu", 1, "eager"),
    ("plan OPTConfig:num_hidden_layers=1 --require eager:experts", 1, "eager"),
    ("plan OPTConfig:num_hidden_layers=1 --device A2 --require npu:attention", 0, "on Ascend A2"),
    ("explain bias_gel", 2, "to fix: write 'bias_gelu'"),
    (GELU, 2, "got no --x"),
    (f"{GELU} --x", 2, "expected one argument"),
    (f"{GELU} --x ''", 0, "x float32[] on cpu"),
    (f"{GELU} --x none", 2, "x"),
    (f"{GELU} --x 4,,8", 2, "got tensor '4,,8'"),
    (f"{GELU} --x 4,-8", 2, "got tensor '4,-8'"),
    (f"{GELU} --x 4.0,8", 2, "got tensor '4.0,8'"),
    (f"{GELU} --x 4,8:", 2, "got dtype ''"),
    (f"{GELU} --x 4,8:bf17", 2, "to fix: write 'bf16'"),
    (f"{GELU} --x 4,8:int64", 2, "int64"),
    (f"{GELU} --x 4,8:float8_e4m3fn", 2, "float8_e4m3fn"),
    (f"{GELU} --x 4,8@", 2, "got device type ''"),
    (f"{GELU} --x 4,8@cdua", 2, "to fix: write 'cuda'"),
    (f"{GELU} --x 4,8@cuda:abc", 2, "to fix: write it like cuda:0"),
    (f"{GELU} --x 4,8@cuda:{DIGITS}", 2, "to fix: write it like cuda:0"),
    (f"{GELU} --x 0,0", 0, "[0, 0]"),
    (f"{GELU} --x 4,8@meta", 0, "on meta"),
    (f"{GELU} --x {DIGITS}", 2, "expected sizes"),
    (f"{GELU} --x 999999999999999999,999999999999999999,99", 0, ""),
    (f"{GELU} --x {','.join('1' * 300)}", 0, ""),
    (f"{GELU} --x \uff14,8", 2, "expected sizes"),
    (f"{GELU} --x SURROGATE", 2, "expected sizes"),
    (f"{GELU} --x 4,8 --bias 8@npu", 2, "device"),
    (f"{GELU} --x 4,8 --bais 8", 2, "to fix: write '--bias'"),
    (f"{GELU} --x 4,8 --approximate erf", 2, "erf"),
    (f"{GELU} --x 4,8 --x 4", 0, "x float32[4]"),
    (f"{GELU} --x 4,8 --backend ''", 0, ""),
    (f"{GELU} --x 4,8 --backend ,", 2, "empty name"),
    (f"{GELU} --x 4,8 --backend 'bias_gel=eager'", 2, "to fix: write 'bias_gelu'"),
    (f"{GELU} --x 4,8 --policy 'eager;eager'", 2, "two orders"),
    (f"{GELU} --x 4,8 --backend tritn", 2, "to fix: write 'triton'"),
    (f"{GELU} --x 4,8 --fallback warm", 2, "to fix: write 'warn'"),
    (f"{GELU} --x 4,8 --adapt padd", 2, "to fix: write 'pad'"),
    (f"{SOFTMAX} --x 4,8,8 --mask 4,8,8:fp32", 2, "mask"),
    (f"{SOFTMAX} --x 8", 2, "dimension"),
    (f"{SOFTMAX} --x 4,4 --scale nan", 2, "scale"),
    (f"{SOFTMAX} --x 4,4 --scale -inf", 2, "scale"),
    (f"{SOFTMAX} --x 4,4 --causal 2", 2, "expected true or false"),
    (f"{DROPOUT} --p -0.1", 2, "p"),
    (f"{DROPOUT} --seed 2", 2, "seed"),
    (f"{DROPOUT} --residual none", 2, "residual = None"),
    ("matrix --op bias_gel", 2, "to fix: write 'bias_gelu'"),
    ("matrix --backend tritn", 2, "to fix: write 'triton'"),
    ("doctor --fix", 2, "got argument '--fix'"),
    ("check", 2, "NAME"),
    ("check eagre", 2, "to fix: write 'eager'"),
    ("check npu", 2, "npu"),
    ("check eager --op gelu", 2, "to fix: write 'bias_gelu'"),
    ("check eager --device nowhere", 2, "got device type 'nowhere'"),
    ("check eager --device npu", 2, "npu"),
    ("check eager --elements 0", 2, "at least 1"),
    (f"check eager --elements {DIGITS}", 2, "at least 1"),
    ("check eager --device cuda:99", 2, "cuda:99"),
    ("bench --dtype complex64", 2, "floating dtype"),
    ("bench bias_gelu --dtype float8_e5m2 --elements 64", 2, "float8_e5m2"),
    ("bench --seconds inf", 2, "above 0"),
    ("bench --seconds -1e-3", 2, "above 0"),
    ("bench --device cuda:99", 2, "got device 'cuda:99', expected one that is on this machine"),
    ("bench --device npu", 2, "leave out --device, or write --device cpu"),
    ("bench --device cpu:7", 2, "to fix: write --device cpu:0"),
    ("bench bias_gelu --dtype fp8", 2, "to fix: use one of these names"),
    ("try", 2, "MODEL"),
    ("try nowhere.gguf", 2, "expected a GGUF file"),
    ("-- info", 2, "COMMAND"),
    ("--version --json", 0, "fusedops "),
    ("--help explian", 2, "to fix: write 'explain'"),
    ("explain --help bias_gelu", 0, "usage: fusedops explain"),
    (f"{GELU} --x 4,8 --json --help", 0, "usage: fusedops explain bias_gelu"),
    (f"{GELU} --x '[4, 8]'", 2, "expected sizes"),
    (f"{GELU} --x 4,8:torch.bfloat16", 0, "x bfloat16[4, 8]"),
    (f"{GELU} --x 4,8 --policy Auto", 2, "to fix: write 'auto'"),
    (f"{GELU} --x 4,8 --fallback raise --backend npu", 3, "served by no backend"),
    (f"{SOFTMAX} --x 4,4 --causal", 0, "causal True"),
    (f"{SOFTMAX} --x 4,4 --causal --scale -.5", 0, "scale -0.5, causal True"),
    ("check --op bias_gelu", 2, "NAME"),
    (f"{ATTENTION} --causal", 0, "causal upper_left"),
    (f"{ATTENTION} --causal False", 0, "causal none"),
    (f"{ATTENTION} --causal upper_lft", 2, "'upper_lft'"),
    (f"{ATTENTION} --k 1,2,9,4 --v 1,2,9,4 --causal", 2, "with 8 queries and 9 keys"),
    (f"{ATTENTION} --k 1,3,8,4 --v 1,3,8,4", 2, "a multiple of 3"),
    (f"{ATTENTION} --window 1", 2, "two ints"),
    (f"{ATTENTION} --window none", 0, "window None"),
    (f"{ATTENTION} --window '(1, 2)' --backend eager", 0, "window (1, 2)"),
    (f"{LOSS} --target 4:fp32", 2, "expected int64"),
    (f"{LOSS} --reduction avg", 2, "reduction = 'avg'"),
    (f"{LOSS} --ignore-index 1.5", 2, "expected an integer"),
    (f"{LOSS} --ignore_index -1", 2, "to fix: write '--ignore-index'"),
    (f"{LOSS} --softcap 0", 2, "softcap"),
    ("explain swiglu --gate 4,7", 2, "an even last dim"),
    ("explain swiglu --gate 4,8 --up 4,9", 2, "up"),
    ("explain rotary_embedding --q 1,2,8,4 --cos 8,2 --sin 8,2", 0, "k None"),
    ("explain rotary_embedding --q 1,2,8,4 --k none --cos 8,2 --sin 8,3", 2, "the shape of cos"),
    ("explain linear_cross_entropy --x 4,8 --weight 16,8 --target 4 --chunk 0", 2, "chunk = 0"),
    (f"{NORM} --eps 1+2j", 2, "expected a number"),
    ("explain rms_norm --x '4,8\n'", 2, r"'4,8\n'"),
    ("explain rms_norm --x '4,8\x1b[31m'", 2, r"'4,8\x1b[31m'"),
    ("explain rms_norm '--x\n' 4", 2, "to fix: write '--x'"),
    (f"{NORM} --weight 8@cuda", 2, "expected one device"),
    (f"{NORM} --policy '\u65e5\u672c'", 2, "use one of these names"),
    ("explain 'bias_gel\xfc'", 2, "to fix: write 'bias_gelu'"),
    (f"{NORM} --backend {'eager,' * 400}", 2, ""),
    ("matrix --op bias_gelu --backend npu --device cpu", 0, ""),
]


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(("line", "code", "part"), ODD, ids=[line[:60] or "nothing" for line, _, _ in ODD])
def test_no_traceback(
    line: str, code: int, part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))  # bench warns on a busy machine
    argv = [word.replace("SURROGATE", "\udcff") for word in shlex.split(line)]
    assert exit_code(*argv) == code
    captured = capsys.readouterr()
    text = " ".join((captured.err if code == 2 else captured.out).split())
    assert part in text
    if code == 2 and argv:
        assert captured.out == ""
        assert captured.err.startswith("fusedops: ")
        assert captured.err.count("\n") == 1
        assert "; to fix: " in captured.err
        assert captured.err.count("fusedops: ") == 1


#: Codes of a command whose run needs more than a line: the tests of each command end with them.
ELSEWHERE = {
    ("try", 0), ("bench", 0), ("bench", 1), ("check", 0), ("check", 1), ("doctor", 0), ("doctor", 1), ("explain", 1),
}  # fmt: skip


def test_a_code_is_documented_for_its_command_and_each_documented_one_has_a_test() -> None:
    used = {(shlex.split(line)[0], code) for line, code, _ in ODD if line}
    assert {key for key in used if key[0] in COMMANDS} | ELSEWHERE == set(documented_codes())
    assert {command for command, _ in documented_codes()} == set(COMMANDS)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({"FUSEDOPS_BACKEND": "tritn"}, 2),
        ({"FUSEDOPS_BACKEND": "\udcff"}, 2),
        ({"FUSEDOPS_FALLBACK": "maybe"}, 2),
        ({"FUSEDOPS_ADAPT": "all"}, 2),
        ({"FUSEDOPS_PLUGINS": "none"}, 0),
        ({"FUSEDOPS_PLUGINS": "tritn,,"}, 0),
        ({"FUSEDOPS_BACKENDS": "eager"}, 0),
        ({"COLUMNS": "0"}, 0),
        ({"COLUMNS": "-3"}, 0),
        ({"COLUMNS": "wide"}, 0),
        ({"COLUMNS": "1"}, 0),
        ({"NO_COLOR": ""}, 0),
    ],
    ids=str,
)
def test_odd_environments(
    variables: dict[str, str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert exit_code(*GELU.split(), "--x", "4,8") == code
    assert exit_code("info") == 0
    assert exit_code("doctor") in (0, 1)
    assert "Traceback" not in capsys.readouterr().err
