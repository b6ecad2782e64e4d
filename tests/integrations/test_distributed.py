"""The ops on several processes of this machine, by gloo: DTensor, FSDP2, torchrun. Each rank runs ranks.py."""

from __future__ import annotations

import csv
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest
import ranks
import torch
from repository import ROOT

import fusedops
from fusedops import testing

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
)

ranks.load()
RUNS = ((2, False), (2, True), (4, False))  # each world, and compiled or not
OPS = [name for name, op in testing.OPS.items() if op.has_gradient]


def checks(wanted: Callable[[str], bool]) -> pytest.MarkDecorator:
    """Parametrize ``name`` and ``world`` by the checks of each run, without the ops' names."""
    names = {run: sorted({name.partition(" ")[0] for name in ranks.checks_of(*run) if wanted(name)}) for run in RUNS}
    rows = [pytest.param(name, run[0], marks=pytest.mark.slow) for run in RUNS for name in names[run]]
    return pytest.mark.parametrize(("name", "world"), rows)


RUN = """
import json, pathlib, sys
import ranks
ranks.load()
print(json.dumps(ranks.run_on({world}, pathlib.Path({folder!r}), {rank}, start="fork")))
"""


@pytest.fixture(scope="module")
def outcome(
    tmp_path_factory: pytest.TempPathFactory, python: Callable[..., dict[str, list[str]]]
) -> Callable[[int, str], None]:
    """Asserts that a check passed on every rank of a world; each run is started once."""
    seen: dict[tuple[int, bool], dict[str, list[str]]] = {}

    def look(world: int, name: str) -> None:
        run = (world, name.partition(" ")[0] in ranks.COMPILED)
        if run not in seen:
            rank = "ranks.compiled_rank" if run[1] else None
            code = RUN.format(world=world, folder=str(tmp_path_factory.mktemp(f"world{world}")), rank=rank)
            seen[run] = python(code, *sys.path, TRITON_INTERPRET="1")
        results = seen[run][name]
        assert len(results) == world
        assert not any(results), "\n".join(results)

    return look


@checks(lambda name: " " in name and not name.startswith("fsdp2 "))
@pytest.mark.parametrize("op", OPS)
def test_dtensor(op: str, name: str, world: int, outcome: Callable[[int, str], None]) -> None:
    outcome(world, f"{name} {op}")


@checks(lambda name: name.startswith("fsdp2 "))
@pytest.mark.parametrize("op", OPS)
def test_fsdp2(op: str, name: str, world: int, outcome: Callable[[int, str], None]) -> None:
    outcome(world, f"{name} {op}")


@checks(lambda name: " " not in name)
def test_on_every_rank(name: str, world: int, outcome: Callable[[int, str], None]) -> None:
    outcome(world, name)


@pytest.mark.slow
def test_the_demo_over_two_processes_loses_what_one_process_does(tmp_path: pathlib.Path) -> None:
    """Of a residual stream that is cut too; without, gpt_spread_over_ranks has what is sent and the losses."""
    demo = ROOT / "examples" / "train_gpt.py"
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ["OMP_NUM_THREADS"] = "1"  # as torchrun would set it, with a page of warning
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(demo)]
    command += ["--steps", "8", "--block", "32", "--device", "cpu", "--out", str(tmp_path), "--sequence-parallel"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "A GPT over 2 processes on cpu" in done.stdout
    assert "FallbackWarning" not in done.stderr
    with (tmp_path / "parallel.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 9)]
    for row in rows:
        assert float(row["parallel"]) == pytest.approx(float(row["whole"]), abs=1e-4)
    assert float(rows[-1]["whole"]) < float(rows[0]["whole"])


def test_a_fingerprint_is_json_and_follows_the_policy() -> None:
    found = testing.fingerprint()
    assert json.loads(json.dumps(found)) == found == testing.fingerprint()
    assert found["fusedops"] == fusedops.__version__
    assert found["torch"] == torch.__version__
    assert found["packages"]["triton"]  # what a backend needs is in it by name, with None where it is not there
    assert "torch-npu" in found["packages"] or "torch_npu" in found["packages"]
    (eager,) = [backend for backend in found["backends"] if backend["name"] == "eager"]
    own = fusedops.__version__
    assert eager == {"name": "eager", "state": "ready", "distribution": "fusedops", "version": own}
    with fusedops.use("triton; bias_gelu=eager", fallback="silent", adapt="pad"):
        inside = testing.fingerprint()
    assert inside["policy"] == {
        "texts": [{"channel": "use()", "text": "triton; bias_gelu=eager"}],
        "fallback": "silent",
        "adapt": "pad",
        "rows": "any",
    }
    assert {**inside, "policy": None} == {**found, "policy": None}


def test_a_fingerprint_is_the_same_in_another_process(python: Callable[..., object]) -> None:
    code = "import json, fusedops.testing; print(json.dumps(fusedops.testing.fingerprint()))"
    assert python(code) == python(code, PYTHONHASHSEED="7")


def test_dtensor_is_not_loaded_before_there_is_one(python: Callable[..., object]) -> None:
    code = """
    import sys, torch, fusedops, json
    fusedops.bias_dropout(torch.ones(4), seed=1)
    torch.ops.fusedops.bias_gelu(torch.ones(4))
    before = "torch.distributed.tensor" in sys.modules or "fusedops._dispatch.distributed.dtensor" in sys.modules
    from torch.distributed import device_mesh, init_process_group, tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore
    torch.ops.fusedops.bias_gelu(torch.ones(4))
    plain = "fusedops._dispatch.distributed.dtensor" in sys.modules
    init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch.ops.fusedops.bias_gelu(tensor.zeros(4, device_mesh=device_mesh.init_device_mesh("cpu", (2,))))
    print(json.dumps([before, plain, "fusedops._dispatch.distributed.dtensor" in sys.modules]))
    """
    assert python(code) == [False, False, True]
