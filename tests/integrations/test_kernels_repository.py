"""fusedops as a repository of the package kernels, loaded by that package in a process that has no other fusedops."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT, load

pytest.importorskip("kernels", reason="the package kernels is not installed")
pytest.importorskip("hatchling")
TOOL = ROOT / "tools" / "kernels_repository.py"
LAYERS = ["RMSNorm", "RMSNormZeroCentered", "SwiGLUMLP", "GeGLUMLP", "rotary_pos_emb"]
MODEL = """
import json, logging, sys
from pathlib import Path
sys.path.append({site!r})  # as a folder alone: the .pth file of an editable installation is not read
import torch, transformers
from kernels import LocalLayerRepository, Mode, get_local_kernel, kernelize, use_kernel_mapping

repository = Path({repository!r})
assert not any("fusedops" in name for name in sys.modules)
kernel = get_local_kernel(repository)
sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, pad_token_id=0))
ids = torch.arange(1, 9).reshape(2, 4)


def run():
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.item(), [weight.grad.clone() for weight in model.parameters()]


plain, gradients = run()
layers = {{name: {{"cpu": LocalLayerRepository(repository, layer_name=name)}} for name in {layers}}}
with use_kernel_mapping(layers, inherit_mapping=False):
    kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu")
import fusedops
fusedops.reset_stats()
fused, others = run()
for mine, theirs in zip(others, gradients):
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
counts = [(each.op, each.backend, each.calls) for each in fusedops.stats().counts if each.direction == "forward"]
x = torch.randn(3, 8)
torch.testing.assert_close(kernel.rms_norm(x), torch.nn.functional.rms_norm(x, (8,), eps=1e-6))
print(json.dumps({{"plain": plain, "fused": fused, "counts": sorted(counts), "file": fusedops.__file__,
    "names": [name for name in {layers} if issubclass(getattr(kernel.layers, name), torch.nn.Module)],
    "states": {{info.name: info.state for info in fusedops.backends()}}}}))
"""


def wheel(folder: Path, **variables: str) -> Path:
    """Return a wheel built from this tree; the libraries are those of earlier builds where the sources are the same."""
    code = f"from hatchling.build import build_wheel; print(build_wheel({str(folder)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / done.stdout.splitlines()[-1]


def written(folder: Path, *wheels: Path) -> Path:
    done = subprocess.run([sys.executable, TOOL, folder, *wheels], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def loaded(repository: Path) -> dict[str, Any]:
    code = MODEL.format(site=sysconfig.get_path("purelib"), repository=str(repository), layers=LAYERS)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FUSEDOPS_"))}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        env={**environ, "TRITON_INTERPRET": "0", "HF_HUB_OFFLINE": "1"},
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a compiler")
def test_a_model_of_transformers_is_kernelized_from_it(tmp_path: Path) -> None:
    result = loaded(written(tmp_path / "repository", wheel(tmp_path)))
    assert result["names"] == LAYERS
    assert Path(result["file"]).is_relative_to(tmp_path / "repository" / "build")
    assert result["states"]["cpu"] == "ready", "the library of the variant is loaded"
    assert result["fused"] == pytest.approx(result["plain"], abs=1e-5)
    assert result["counts"] == [["rms_norm", "cpu", 5], ["rotary_embedding", "cpu", 2]]


@pytest.mark.slow
def test_without_a_library_it_computes_on_eager(tmp_path: Path) -> None:
    result = loaded(written(tmp_path / "repository", wheel(tmp_path, FUSEDOPS_CPU_TARGET="none")))
    assert result["states"]["cpu"] == "unavailable"
    assert result["counts"] == [["rms_norm", "eager", 5], ["rotary_embedding", "eager", 2]]
    assert result["fused"] == pytest.approx(result["plain"], abs=1e-5)


@pytest.fixture
def variant(tmp_path: Path) -> Callable[[str], Path]:
    """Write a repository from a wheel with no content but a version, and return its variant."""

    def make(version: str, tag: str = "any") -> Path:
        path = tmp_path / f"fusedops-{version}-py3-none-{tag}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("fusedops/__init__.py", f"__version__ = {version!r}\n")
        (folder,) = (written(tmp_path / tag / "repository", path) / "build").iterdir()
        return folder

    return make


def test_metadata_are_what_kernels_reads(variant: Callable[..., Path]) -> None:
    from kernels import Metadata

    folder = variant("1.2.3", "manylinux_2_17_aarch64.manylinux2014_aarch64")
    about = Metadata.read_from_file(folder / "metadata.json")
    assert folder.name == "torch-stable-abi210-cpu-aarch64-linux"
    assert about.name.python_name == "fusedops"
    assert about.license == "Apache-2.0"
    assert about.id.isidentifier()
    assert (folder / "packages" / "pluggy" / "__init__.py").exists()
    assert (folder.parents[1] / "LICENSE").exists()
    assert [path.name for path in (folder / "packages").glob("pluggy-*.dist-info")]


def test_a_folder_named_as_a_clone_is_no_installation(variant: Callable[[str], Path], tmp_path: Path) -> None:
    folder = variant("1.2.3")
    (folder / "packages" / "fusedops" / "ops.py").write_text("__all__ = []\n")
    (folder / "layers.py").write_text("")
    (tmp_path / "fusedops").mkdir()
    shutil.copytree(folder, tmp_path / "kernel")
    code = "import kernel; print(kernel.fusedops.__version__)"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "1.2.3\n", done.stderr


@pytest.mark.parametrize(("installed", "newer"), [("0.0.9", False), ("99.0.0", True)])
def test_an_installed_fusedops_is_used_unless_it_is_older(
    variant: Callable[[str], Path], tmp_path: Path, installed: str, newer: bool
) -> None:
    folder = variant("0.1.0")
    (tmp_path / "installed" / "fusedops").mkdir(parents=True)
    text = f"__version__ = {installed!r}\n"
    (tmp_path / "installed" / "fusedops" / "__init__.py").write_text(text)
    (tmp_path / "installed" / "fusedops" / "ops.py").write_text("__all__ = []\n")
    (folder / "layers.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'installed')!r}); import kernel; print(kernel.fusedops)"
    shutil.copytree(folder, tmp_path / "kernel")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    if newer:
        assert str(tmp_path / "installed") in done.stdout
    else:
        assert "ImportError: got fusedops 0.0.9, installed in" in done.stderr
        assert "expected at least 0.1.0; to fix: upgrade it" in done.stderr


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("manylinux_2_17_x86_64.manylinux2014_x86_64", "torch-stable-abi210-cpu-x86_64-linux"),
        ("linux_aarch64", "torch-stable-abi210-cpu-aarch64-linux"),
        ("macosx_10_13_x86_64", "torch-stable-abi210-cpu-x86_64-darwin"),
        ("macosx_11_0_arm64", "torch-stable-abi210-cpu-aarch64-darwin"),
        ("win_amd64", "torch-stable-abi210-cpu-x86_64-windows"),
        ("any", "torch-universal"),
    ],
)
def test_a_variant_has_a_name_that_kernels_reads(tag: str, name: str) -> None:
    from kernels.variants import parse_variant

    assert load(TOOL).variant_of(tag) == name
    assert parse_variant(name).variant_str == name


def test_a_platform_without_a_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="got a wheel for freebsd_14_amd64, expected one of"):
        load(TOOL).variant_of("freebsd_14_amd64")
