"""Build a release and check it: python tools/release.py; `make release`. CONTRIBUTING.md describes the steps.

The source distribution is built from this tree, and every wheel from the source distribution, unpacked elsewhere. Each
file is checked: metadata, contents, size, libraries, no path of the build inside. The pure wheel and the wheel of this
platform are then installed in a fresh environment, where the conformance kit runs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from packaging.metadata import Metadata
from release_checks import sdist_problems, wheel_problems

ROOT = Path(__file__).resolve().parents[1]
_SHOWN = 6000  # characters of a failed command's output
QEMU_ELEMENTS = "512"  # of the kit's named cases under qemu, which takes some 15 times as long
LOCAL = "local"  # a target: this machine, with its own compiler; not for an index
SMOKE = """
import torch, fusedops
x = torch.randn(4, 64, requires_grad=True)
fusedops.rms_norm(x, torch.ones(64)).sum().backward()
torch.testing.assert_close(fusedops.rms_norm(x), torch.nn.functional.rms_norm(x, (64,), eps=1e-6))
print("rms_norm by", fusedops.explain("rms_norm", x).backend)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check, install, write the checksums. Returns 1 where a check fails."""
    options = parse(arguments)
    version = re.findall(r'__version__ = "(.+)"', (ROOT / "fusedops" / "_version.py").read_text("utf-8"))[0]
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="fusedops-release-") as folder:
        work = Path(folder)
        sdist = build(ROOT, options.out, "--sdist")
        step(f"built {sdist.name}, {sdist.stat().st_size:,} bytes")
        with tarfile.open(sdist) as archive:
            archive.extractall(work, filter="data")
        source = work / f"fusedops-{version}"
        build_paths = sorted({folder, str(ROOT), str(Path.home())} - {"/"})
        if is_wrong(sdist, sdist_problems(sdist, version, build_paths)):
            return 1
        wheels: dict[str, Path] = {}
        for target in ("none", *options.targets):
            wheel = wheels[target] = build(source, options.out, "--wheel", FUSEDOPS_CPU_TARGET=target)
            step(f"built {wheel.name}, {wheel.stat().st_size:,} bytes, from the source distribution")
            if is_wrong(wheel, wheel_problems(wheel, version, build_paths)):
                return 1
        step("checked metadata, contents, sizes and libraries")
        if options.install:
            install(sdist, wheels, work, options)
        aarch64(wheels, work, options)
    names = sorted(path.name for path in options.out.iterdir())
    sums = "".join(f"{hashlib.sha256((options.out / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    (options.out / "SHA256SUMS").write_text(sums, encoding="ascii")
    step(f"wrote {options.out / 'SHA256SUMS'}\n{sums}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "release", help="the folder (dist/release)")
    parser.add_argument("--targets", nargs="*", default=[], help="platforms, as in hatch_build.py, or local")
    parser.add_argument("--no-install", dest="install", action="store_false", help="leave out the environments")
    parser.add_argument("--torch", default="torch", help="pip's requirement of torch in the environments")
    parser.add_argument("--ops", nargs="*", default=[], help="the ops that the kit runs; default: all")
    parser.add_argument("--elements", default="4096", help="of the kit's named cases, at most (%(default)s)")
    return parser.parse_args(arguments)


def is_wrong(distribution: Path, problems: Sequence[str]) -> bool:
    """Print the problems of a file, and return whether there are any."""
    for problem in problems:
        step(f"PROBLEM {distribution.name}: {problem}")
    return bool(problems)


def step(text: str) -> None:
    """Print one line at once."""
    print(text, flush=True)


def build(source: Path, out: Path, kind: str, **variables: str) -> Path:
    """Build one distribution with the build requirements of this environment, and return its file."""
    before = set(out.iterdir())
    environ = {**os.environ, **{name: value for name, value in variables.items() if value != LOCAL}}
    if "SOURCE_DATE_EPOCH" not in environ:  # the same commit gives the same bytes
        git = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
        dated = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        environ["SOURCE_DATE_EPOCH"] = dated or "1700000000"
    command = [sys.executable, "-m", "build", "--no-isolation", kind, "--outdir", str(out), str(source)]
    run(command, source, environ)
    (made,) = set(out.iterdir()) - before
    return made


def run(command: Sequence[str | Path], folder: Path, environ: dict[str, str] | None = None) -> str:
    """Run a command and return its output.

    Raises:
        SystemExit: it fails; with its output.
    """
    done = subprocess.run([*map(str, command)], cwd=folder, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        text = f"{done.stdout}{done.stderr}"[-_SHOWN:]
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}\n{text}")
    return done.stdout


def install(sdist: Path, wheels: dict[str, Path], work: Path, options: argparse.Namespace) -> None:
    """Install each distribution that runs here in an environment with torch and nothing else, and run the kit."""
    venv.create(work / "environment", with_pip=True)
    python = work / "environment" / ("Scripts" if os.name == "nt" else "bin") / "python"

    def inside(*command: str | Path) -> str:
        return run([python, *command], work, clean_environ())

    inside("-m", "pip", "install", "--quiet", options.torch)
    here = this_target()
    for name, wheel in wheels.items():
        if name not in ("none", LOCAL, here):
            step(f"not installed: {wheel.name} is for another machine than this one, {here}")
            continue
        inside("-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", wheel)
        inside("-m", "pip", "install", "--quiet", wheel)  # what it requires
        step(f"installed {wheel.name}: {inside('-c', SMOKE).strip()}")
        backend = "eager" if name == "none" else "cpu"
        step(f"  {kit(inside, backend, options)}")
    inside("-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", sdist)
    step(f"installed {sdist.name}: {inside('-c', SMOKE).strip()}")


def clean_environ() -> dict[str, str]:
    """Return the environment without the variables that change what Python and fusedops do."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("FUSEDOPS_", "PYTHON", "TRITON_"))}


def kit(inside: Callable[..., str], backend: str, options: argparse.Namespace) -> str:
    """Run the conformance kit on a backend; return one line. A failed check ends the release."""
    lines: list[str] = []
    for op in options.ops or ["all ops"]:
        only = ["--op", op] if options.ops else []
        text = inside("-m", "fusedops", "check", backend, "--elements", options.elements, *only)
        lines.append(f"{op}: {text.splitlines()[-1]}")  # "none of 31 checks failed, none of 412 cases"
    return f"the conformance kit on {backend}: {'; '.join(lines)}"


def this_target() -> str:
    """Return the name of this machine's platform, as hatch_build.py has it."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    if sys.platform == "darwin":
        return f"macos-{'arm64' if machine == 'aarch64' else machine}"
    return f"{'windows' if sys.platform == 'win32' else 'linux'}-{machine}"


def aarch64(wheels: dict[str, Path], work: Path, options: argparse.Namespace) -> None:
    """Run the kit of the aarch64 wheel under qemu, where qemu and an aarch64 Python with torch are present."""
    wheel = wheels.get("linux-aarch64")
    if wheel is None or this_target() == "linux-aarch64":
        return
    qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    python = os.environ.get("FUSEDOPS_AARCH64_PYTHON")
    if qemu is None or python is None:
        step(f"not run under qemu: {'no qemu-aarch64' if qemu is None else 'FUSEDOPS_AARCH64_PYTHON is not set'}")
        return
    site = work / "aarch64"
    to_site = [sys.executable, "-m", "pip", "install", "--quiet", "--target", site, "--only-binary=:all:"]
    run([*to_site, "--no-deps", "--platform", "manylinux2014_aarch64", wheel], work)
    run([*to_site, *pure_requirements(wheel)], work)
    environ = {**clean_environ(), "PYTHONPATH": str(site)}
    options.elements = min(options.elements, QEMU_ELEMENTS, key=int)

    def inside(*command: str | Path) -> str:
        return run([qemu, *python.split(), *command], work, environ)

    step(f"under qemu: {inside('-c', SMOKE).strip()}; {kit(inside, 'cpu', options)}")


def pure_requirements(wheel: Path) -> list[str]:
    """Return what a wheel requires beside torch: packages without libraries, the same on every processor."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        needed = Metadata.from_email(archive.read(name)).requires_dist or []
    return [str(each) for each in needed if each.name != "torch" and each.marker is None]


if __name__ == "__main__":
    sys.exit(main())
