"""``make npu``: says what is missing where there is no device, and writes its one file on the stand-in."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tarfile

ROOT = pathlib.Path(__file__).parents[1]

# torch loads at `import torch` what this entry point names: by the same door comes torch_npu
AUTOLOAD = """
def start():
    import sys
    import torch
    from standin import installed, npu_device
    npu_device.register()
    torch.npu = sys.modules["torch.npu"] = npu_device._module
    sys.path.insert(0, {standin!r})
"""


def script(site: pathlib.Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(site or ""), known.pop("PYTHONPATH", "")])
    return subprocess.run(
        [str(ROOT / "benchmarks" / "npu.sh"), sys.executable],
        env={**known, "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_without_a_device_it_says_what_to_do() -> None:
    done = script()
    assert done.returncode == 1
    assert "the npu backend is not ready: torch_npu is not installed" in done.stderr
    assert "to do: pip install" in done.stderr


def test_on_the_stand_in_it_writes_one_file(tmp_path: pathlib.Path) -> None:
    info = tmp_path / "standin_autoload-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: standin-autoload\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nstandin = standin_autoload:start\n")
    (tmp_path / "standin_autoload.py").write_text(AUTOLOAD.format(standin=str(ROOT / "tests" / "standin")))
    small = "--elements 4096 --seconds 0.001 --dtypes float32 --ops bias_gelu"
    done = script(tmp_path, BENCH=small, CHECK="--op bias_gelu", TESTS="-k gelu", BUILD=str(tmp_path / "build"))
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(tmp_path / "build" / "npu.tar.gz") as file:
        told: dict[str, str] = {}
        for member in file:
            content = file.extractfile(member)
            if content is not None and member.name.endswith(("txt", "jsonl")):
                told[pathlib.Path(member.name).name] = content.read().decode()
    assert told["failed.txt"] == "none\n"
    assert json.loads(told["info.txt"])["devices"]["npu"]
    assert " passed" in told["tests.txt"]
    rows = [json.loads(line) for line in told["large.jsonl"].splitlines()]
    assert {row["provider"] for row in rows} >= {"fusedops.npu", "fusedops.eager", "torch"}
    assert {row["device"] for row in rows} == {"stand-in for an Ascend device"}
    assert told["check.txt"]
