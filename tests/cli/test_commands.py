"""All commands: width, colours, help, JSON as documented, time to answer; info and matrix."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from command_line import NPU_CALL, PAGE, documented, documented_codes, exit_code, flat, keys, run

import fusedops
from fusedops._cli import main as command_module
from fusedops._cli import output
from fusedops._cli.main import COMMANDS, EXIT_CODES, main

SHOWN = [["info"], ["matrix"], ["doctor"], NPU_CALL, ["explain", "bias_gelu", "--x", "4,8"]]
HELPS = [["--help"], *([name, "--help"] for name in COMMANDS), ["explain", "bias_dropout_add", "--help"]]
OP_HELPS = [["explain", name, "--help"] for name in fusedops.ops.OPS if name != "bias_dropout_add"]


@pytest.mark.parametrize("columns", ["40", "80"])
@pytest.mark.parametrize("argv", [*SHOWN, *HELPS, *OP_HELPS], ids=lambda argv: "-".join(argv[:2]))
def test_lines_fit_the_terminal(
    argv: list[str], columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    exit_code(*argv)
    text = capsys.readouterr().out
    assert text
    assert [line for line in text.splitlines() if len(line) > int(columns)] == []
    assert "\033" not in text, "colours are for terminals"


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_on_a_terminal(
    variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert output.is_coloured() == coloured
    _, text = run("info", capsys=capsys)
    assert ("\033[" in text) == coloured
    assert re.sub(r"\033\[[\d;]*m", "", text).splitlines()[0].startswith("fusedops")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"fusedops {fusedops.__version__}\n"


@pytest.mark.parametrize("argv", HELPS, ids=lambda argv: "-".join(argv[:2]))
def test_each_option_has_a_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*argv) == 0
    text = capsys.readouterr().out
    options = text.partition("options:")[2]
    options = re.sub(r"^  (COMMAND|OP)\n(?=    [a-z])", "", options, flags=re.M)  # the head of a list
    for option in re.findall(r"^  (--[\w-]+|[A-Z]+|[a-z]+)(?: [A-Z]+)?$", options, re.M):
        assert re.search(rf"^  {option}(?: [A-Z]+)?\n {{10,}}\S", options, re.M), f"{option} has no help"


def test_the_help_has_the_exit_codes_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code("--help")
    text = capsys.readouterr().out
    codes = re.findall(r"^  (\d+) +\S", EXIT_CODES, re.M)
    assert re.findall(r"^  (\d+) +\S", text, re.M) == codes
    assert codes == [*map(str, sorted({code for _, code in documented_codes()})), "130"]
    assert "130 is Ctrl-C" in flat(PAGE.read_text("utf-8"))
    for code in codes:  # each command that the help names beside a code is in the page's row of that code
        meaning = text.split(f"\n  {code} ", 1)[1].split("\n  ", 1)[0] if code != "130" else ""
        named = {name for name in COMMANDS if f"{name}:" in meaning}
        assert named <= {name for name, other in documented_codes() if str(other) == code}


def test_no_argument_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("usage: fusedops")


def test_info_has_what_an_issue_needs(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run("info", capsys=capsys)
    assert code == 0
    for part in (fusedops.__version__, torch.__version__, "torch_npu is not installed", "to fix", "eager", "triton"):
        assert part in text


def test_each_package_has_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = run("info", capsys=capsys)
    labels = re.findall(r"^([\w-]+) +\S", text.partition("\n\n")[0], re.M)
    assert sorted(labels) == sorted(set(labels))
    assert {"fusedops", "torch", "python", "policy"} <= set(labels)


def test_json_is_as_documented(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = run("info", "--json", capsys=capsys)
    assert keys(json.loads(text)) == documented("info")
    names: set[str] = set()
    for options in (["--backend", "npu"], ["--adapt", "pad"]):  # refused, for reasons; and served, by an adaptation
        _, text = run(*NPU_CALL, *options, "--json", capsys=capsys)
        names |= keys(json.loads(text))
    assert names == documented("explain")
    sizes = (
        "LlamaConfig:num_hidden_layers=1,num_attention_heads=16"  # refused, adapted; products and attention of torch
    )
    _, text = run("plan", sizes, "--device", "A2", "--length", "64", "--json", capsys=capsys)
    assert keys(json.loads(text)) == documented("plan")
    _, text = run("matrix", "--json", capsys=capsys)
    by_op = json.loads(text)
    assert list(by_op) == list(fusedops.ops.OPS)
    assert keys(next(iter(by_op.values())), "<op>") == documented("matrix")
    monkeypatch.setenv("FUSEDOPS_BACKENDS", "eager")
    _, text = run("doctor", "--json", capsys=capsys)
    assert keys(json.loads(text)) == {"[].level", "[].what", "[].fix"} == documented("doctor")


@pytest.mark.parametrize(
    ("options", "ops", "backends"),
    [
        (["--op", "bias_gelu"], {"bias_gelu"}, {"npu", "triton", "eager"}),
        (["--backend", "eager"], {*fusedops.ops.OPS}, {"eager"}),
        (["--device", "npu"], {*fusedops.ops.OPS}, {"npu", "eager"}),
        (["--device", "npu:1", "--op", "bias_gelu", "--backend", "npu"], {"bias_gelu"}, {"npu"}),
    ],
)
@pytest.mark.usefixtures("fakes")
def test_rows_of_the_matrix_are_selected(
    options: list[str], ops: set[str], backends: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, text = run("matrix", *options, "--json", capsys=capsys)
    data: dict[str, Any] = json.loads(text)
    assert set(data) == ops
    assert {row["backend"] for rows in data.values() for row in rows} == backends
    code, text = run("matrix", *options, capsys=capsys)
    assert code == 0
    assert all(name in text for name in (*ops, *backends))


def test_an_interrupt_has_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(command: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_module, "_run", interrupt)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "fusedops: stopped\n"


def in_a_process(*words: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(words, env={**known, **variables}, capture_output=True, timeout=120, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "value"), [("info", "é"), ("doctor", "\udcff")])
def test_text_that_the_output_cannot_encode(command: str, value: str) -> None:
    done = in_a_process(
        sys.executable, "-m", "fusedops", command, FUSEDOPS_BACKEND=value, PYTHONIOENCODING="ascii:strict"
    )
    assert b"Traceback" not in done.stderr
    assert done.returncode == (0 if command == "info" else 1)
    assert (b"\\xe9" if value == "é" else b"\\udcff") in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("redirection", ["| head -1 >/dev/null", ">/dev/full", ">&-", "2>&-"])
def test_an_output_that_is_closed_or_full(redirection: str) -> None:
    done = in_a_process("bash", "-c", f'"{sys.executable}" -m fusedops matrix {redirection}')
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr
    assert done.returncode == (2 if "full" in redirection else 0)


def test_an_error_never_takes_the_place_of_the_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # closed, as by 2>&-: print(file=None) writes to stdout
    assert main(["explain", "bias_gel", "--json"]) == 2
    assert main(["bench", "--seconds", "0"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "seconds"), [(["--help"], 0.5), (["info"], 1.0), (NPU_CALL, 1.0)], ids=["help", "info", "explain"]
)
def test_time_to_answer_beyond_torch(argv: list[str], seconds: float, python: Any) -> None:
    program = f"""
        import contextlib, io, json, time
        import torch
        before = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            from fusedops._cli.main import main
            main({argv})
        print(json.dumps(time.process_time() - before))
    """
    # one process, as imports of torch differ by half a second on a busy machine; one of three runs
    assert any(python(program, fresh=True) < seconds for _ in range(3))


def test_help_does_not_load_rich(python: Any) -> None:
    program = "import json, sys, fusedops._cli.main; print(json.dumps('rich' in sys.modules))"
    assert python(program) is False


def test_unknown_plugins_are_a_warning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FUSEDOPS_PLUGINS", "tritn,eager")
    assert main(["matrix", "--op", "bias_gelu"]) == 0
    error = capsys.readouterr().err
    assert error.startswith("fusedops: warning: FUSEDOPS_PLUGINS: got plugin 'tritn'")
    assert error.endswith("to fix: write 'triton'\n")
    assert flat(error).count("warning") == 1
