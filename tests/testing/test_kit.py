"""The conformance kit reports each broken backend for its own fault, and excuses declared deviations."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from broken_backends import BROKEN, DECLARED, Broken, float32_dbias, gelu_backward, wrong_signature
from loopback import reference_kernels, registered, with_parameters
from repository import ROOT, SUPPORT_FOLDERS

import fusedops
from fusedops import Deviation, testing
from fusedops.constraints import Capability, Constraint, Dim, DType, Present, Rank, Scalar, When
from fusedops.testing import OPS
from fusedops.testing._failures import RuleError
from fusedops.testing._global_state import check_global_state, global_state
from fusedops.testing._new_memory import filled_memory

SLOW = (
    "opcheck",
    "compile",
    "calls",
    "memory",
    "written",
    "history",
    "infinite",
    "sizes",
    "shared",
    "threads",
    "between",
)


def results(broken: Broken) -> list[testing.Result]:
    """Run all checks but those that take most of the time and run the same kernels in more calls."""
    with registered(broken.backend()):
        checks = testing.checks(broken.name, elements=2**11)
        return [check.run() for check in checks if check.name not in SLOW]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_a_broken_backend_fails_for_its_reason(broken: Broken) -> None:
    failed = {result.check.id: result for result in results(broken) if result.failures}
    assert broken.check in failed, {name: str(result) for name, result in failed.items()}
    for failure in failed[broken.check].failures:
        assert re.match(broken.pattern, failure.seen), failure.seen
    others = {result.check.name for name, result in failed.items() if name != broken.check}
    assert others <= {*broken.also, broken.check.rpartition("/")[2]}, "checks of other things failed"


def test_a_wrong_signature_is_refused_before_any_check() -> None:
    with pytest.raises(
        fusedops.PluginError, match=r"got parameters \(x, bias, form\), expected \(x, bias, approximate\)"
    ):
        fusedops.register(wrong_signature())


def test_a_declared_deviation_excuses_the_check_that_it_names() -> None:
    declared = results(DECLARED)
    assert not [str(result) for result in declared if result.failures]
    excused = {r.check.id: r.excused for r in declared if r.excused}
    assert excused.pop("bias_gelu/backward/determinism") == [("three runs", "nondeterministic")]
    assert set(excused) <= {"bias_gelu/backward/state"}  # which compares bits too


def finite_fill(fill: float) -> Broken:
    """Return a softmax that fills with a number, and declares it."""

    def forward(x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool) -> torch.Tensor:
        right = OPS["scaled_masked_softmax"].reference(x, mask, scale, causal)
        if mask is None:
            return right.contiguous()
        y = torch.softmax((x.float() * scale).masked_fill(mask.bool(), fill), -1)
        dead = (right == 0).all(-1, keepdim=True)
        return torch.where(dead, 0.0, y).to(x.dtype).contiguous()

    declared = fusedops.kernel("scaled_masked_softmax", deviations=[Deviation("finite-fill", "a number")])(forward)
    return Broken("finite_fill", lambda: [declared, reference_kernels(OPS["scaled_masked_softmax"])[1]], "", "")


@pytest.mark.parametrize(("fill", "fails"), [(-10000.0, False), (-100.0, True)])
def test_a_deviation_excuses_within_its_bound(fill: float, fails: bool) -> None:
    with registered(finite_fill(fill).backend()):
        (check,) = [check for check in testing.checks("finite_fill", elements=2**11) if check.name == "special"]
        result = check.run()
    assert result.excused == [("scores of -30000 beside the mask", "finite-fill")]
    assert ("scores of -9000 beside the mask" in [failure.case for failure in result.failures]) == bool(result.failures)
    assert bool(result.failures) == fails


def nan_choice(spreads: bool) -> Broken:
    """Return a routing that has the first experts in rows with NaN, or in all rows, and declares it."""

    def forward(logits: torch.Tensor, k: int, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, index = OPS["top_k_routing"].reference(logits, k, *options)
        wrong = logits.isnan().any(-1, keepdim=True)
        wrong = wrong.any() if spreads else wrong
        first = torch.arange(k, device=logits.device).expand(index.shape)
        return weights.masked_fill(wrong, torch.nan), torch.where(wrong, first, index).contiguous()

    op = OPS["top_k_routing"]
    function = with_parameters(forward, *op.parameters)
    declared = fusedops.kernel("top_k_routing", deviations=[Deviation("nan-choice", "the first ones")])(function)
    return Broken("nan_choice", lambda: [declared, reference_kernels(op)[1]], "", "")


@pytest.mark.parametrize("spreads", [False, True])
def test_a_choice_among_nan_is_excused_where_no_other_row_has_it(spreads: bool) -> None:
    with registered(nan_choice(spreads).backend()):
        special, calls = (
            next(check for check in testing.checks("nan_choice", elements=2**11) if check.name == name).run()
            for name in ("special", "calls")
        )
    assert special.excused == [("NaN", "nan-choice")]
    assert [failure.case for failure in special.failures] == ["NaN in other rows"] * spreads
    assert calls.excused
    assert all("of NaN and inf" in case for case, _ in calls.excused)
    assert not calls.failures


# constraints of every kind, on x and on tensors beside it
CONSTRAINTS = [
    Rank("x", 4),
    Rank("x", 2, 3),
    Rank("mask", 2),
    Dim("x", (-1,), at_least=32, at_most=64, multiple_of=32),
    Dim("x", (0,), at_least=2),
    Dim("x", (-2, -1), at_least=5),
    Dim("mask", (-2,), at_most=1),
    DType("x", torch.float32, torch.float64),
    DType("mask", torch.bool),
    Scalar("scale", abs_at_most=1.0),
    Scalar("causal", one_of=(False,)),
    Present("mask"),
    Present("mask", present=False),
    Capability("x", (8, 0)),
    When(DType("x", torch.float16), Scalar("scale", abs_at_most=1.0)),
    When(Rank("x", 4), Present("mask")),
]


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda constraint: constraint.describe())
def test_a_right_constraint_of_any_kind_passes(constraint: Constraint) -> None:
    constrained = Broken("constrained", lambda: reference_kernels(OPS["scaled_masked_softmax"], constraint), "", "")
    with registered(constrained.backend()):
        (check,) = [check for check in testing.checks("constrained") if check.name == "constraints"]
        result = check.run()
    assert not result.failures, str(result)
    assert result.cases > 1


@pytest.mark.parametrize("for_speed", [True, False])
def test_a_kernel_that_takes_no_call_passes_where_others_are_faster(for_speed: bool) -> None:
    """As on a processor on which torch is as fast. Constraints that no call meets for another reason are a fault."""
    op, nowhere = OPS["scaled_masked_softmax"], Dim("x", (-1,), at_least=2**40)
    (kernel,) = reference_kernels(op, DType("x", torch.float32), nowhere, backward=False)
    backend = fusedops.Backend("slow", ("cpu",), -50, [replace(kernel, for_speed=(nowhere,) if for_speed else ())])
    with registered(backend):
        (check,) = [check for check in testing.checks("slow") if check.name == "constraints"]
        failed = [failure.case for failure in check.run().failures]
    assert failed == ([] if for_speed else ["x: float32"])


def test_one_case_can_be_run_alone() -> None:
    broken = next(broken for broken in BROKEN if broken.name == "off_by_one")
    with registered(broken.backend()):
        (check,) = [check for check in testing.checks(broken.name) if check.id == broken.check]
        (failure,) = check.run().failures
        assert failure.case == "x dim -1 = 80"
        assert failure.reproduce == (
            'python -c \'from fusedops import testing; testing.reproduce("off_by_one", '
            '"scaled_masked_softmax/forward/constraints", "x dim -1 = 80", device="cpu", elements=131072)\''
        )
        with pytest.raises(RuntimeError, match="room for 79 columns"):
            testing.reproduce(broken.name, check.id, failure.case)
        testing.reproduce(broken.name, check.id, "x dim -1 = 79")
        with pytest.raises(fusedops.PolicyError, match="write 'x dim -1 = 8"):
            testing.reproduce(broken.name, check.id, "x dim -1 = 8")
        with pytest.raises(fusedops.PolicyError, match="got check of off_by_one 'constraints'"):
            testing.reproduce(broken.name, "constraints", failure.case)


def test_the_printed_command_runs(program: Callable[..., Any]) -> None:
    broken = next(broken for broken in BROKEN if broken.name == "dead_row")
    with registered(broken.backend()):
        (check,) = [check for check in testing.checks(broken.name, elements=2**11) if check.id == broken.check]
        command = check.run().failures[0].reproduce
    python, *words = shlex.split(command.replace("dead_row", "eager"))
    assert python == "python"
    done = program(*words, path=[ROOT, ROOT / "backends"])
    assert done.returncode == 0, done.stderr
    assert not done.stdout


def test_a_deviation_excuses_no_other_check() -> None:
    """A backend that declares one deviation and has another fault still fails for the fault."""
    deviation = Deviation("nondeterministic", "sums by atomic additions")
    broken = Broken("other_fault", lambda: gelu_backward(float32_dbias, deviations=(deviation,)), "", "")
    failed = {result.check.id for result in results(broken) if result.failures}
    assert "bias_gelu/backward/dtypes" in failed


def test_the_kit_as_pytest_tests(tmp_path: pathlib.Path, program: Callable[..., Any]) -> None:
    (tmp_path / "conftest.py").write_text(
        textwrap.dedent(
            """
            import fusedops
            from broken_backends import BROKEN
            fusedops.register(next(broken for broken in BROKEN if broken.name == "off_by_one").backend())
            """
        )
    )
    run = partial(program, path=[ROOT, ROOT / "backends", *SUPPORT_FOLDERS], folder=tmp_path)
    by_name = ["-p", "no:fusedops", "-p", "_fusedops_pytest"]  # not by the entry point, which is there when installed
    command = ["-m", "pytest", *by_name, "--fusedops-backend", "off_by_one", "-k", "constraints or special"]
    done = run(*command, "--junitxml", "report.xml", "-p", "no:cacheprovider")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed, " in done.stdout
    assert "case       x dim -1 = 80" in done.stdout
    report = ElementTree.parse(tmp_path / "report.xml")
    cases = {case.get("name"): case.find("failure") for case in report.iter("testcase")}
    assert {name for name, failure in cases.items() if failure is None} == {"scaled_masked_softmax/forward/special"}
    failure = cases["scaled_masked_softmax/forward/constraints"]
    assert failure is not None
    assert "the kernel has room for 79 columns" in (failure.text or "")
    (line,) = [line for line in (failure.text or "").splitlines() if line.startswith("reproduce  ")]
    printed = shlex.split(line.removeprefix("reproduce  "))
    assert printed[:3] == ["python", "-m", "pytest"]
    done = run("-m", "pytest", *by_name, *printed[3:], "-p", "no:cacheprovider")
    assert "1 failed in " in done.stdout, done.stdout + done.stderr  # the backend is that of the conftest


@pytest.mark.slow
def test_it_runs_without_numpy(tmp_path: pathlib.Path) -> None:
    """As in the environment of ``pip install .``: torch does not require NumPy."""
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise ModuleNotFoundError('absent', name='numpy')\n")
    code = """
import fusedops.testing as testing
checks = [check for check in testing.checks("eager", op="bias_gelu", elements=64) if check.name in ("float64", "state")]
results = [check.run() for check in checks]
assert len(results) == 4
assert not [str(result) for result in results if result.failures]
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_torchs_compiler_sets_at_its_first_use_is_no_change_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.delenv("MKL_CBWR", raising=False)
    before = global_state(cpu)
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/where/ptxas/is")
    check_global_state(before, cpu)
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    with pytest.raises(RuleError, match="another environment"):
        check_global_state(before, cpu)
    assert "MKL_CBWR" not in os.environ
    assert os.environ["TRITON_PTXAS_PATH"] == "/where/ptxas/is"


@pytest.mark.parametrize("mode", ["default", "warn", "error"])
def test_filled_memory_leaves_the_modes_of_torch_as_they_were(mode: str) -> None:
    deterministic: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode()
    try:
        torch.set_deterministic_debug_mode(mode)
        deterministic.fill_uninitialized_memory = False
        wanted = torch.get_deterministic_debug_mode()
        with filled_memory():
            new = torch.empty(3), torch.empty(3, dtype=torch.int32)
        assert new[0].isnan().all()
        assert (new[1] == 2**31 - 1).all()
        with pytest.raises(ZeroDivisionError), filled_memory():
            _ = 1 / 0
        assert torch.get_deterministic_debug_mode() == wanted
        assert not deterministic.fill_uninitialized_memory
    finally:
        torch.set_deterministic_debug_mode(before)
        deterministic.fill_uninitialized_memory = True
