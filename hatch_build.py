"""Build hook: compile the libraries of the ``cpu`` backend into the wheel.

The compiler is ``$CXX``, else the system's ``g++``, ``clang++`` or ``c++``, else the package ``ziglang``, which an
isolated build installs where there is no other. Without one, or where it fails, the wheel is pure Python, and the
backend is unavailable. pip hides the warnings of a build, so the wheel has the reason in a file.

``FUSEDOPS_CPU_TARGET`` selects a row of ``TARGETS`` to cross-compile for with ziglang; a failure is then an error.
``FUSEDOPS_CPU_TARGET=none`` builds the pure wheel.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CPU = "backends/fusedops_cpu"
SOURCES = f"{CPU}/src"
ZIGLANG = "ziglang>=0.14"
NO_LIBRARY = "no_library.txt"  # the reason, beside the sources
MOST_OF_REASON = 300  # characters
# No fast-math: NaN and inf mean what IEEE 754 gives them. A product and a sum may become one operation.
FLAGS = (
    *("-std=c++17", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
    *("-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics"),
)
X86_LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
NEON = ("aarch64",)


class Target(NamedTuple):
    """A platform to build for.

    Args:
        levels: the instruction sets, one library each, as `launch/library.py` names them.
        suffix: of a shared library.
        tag: the platform tag of the wheel.
        zig: the target as ziglang names it; None: no cross compilation.
        link: flags of the linker.
    """

    levels: tuple[str, ...]
    suffix: str
    tag: str
    zig: str | None = None
    link: tuple[str, ...] = ("-fPIC", "-shared", "-s")


TARGETS = {
    "linux-x86_64": Target(X86_LEVELS, "so", "manylinux_2_17_x86_64.manylinux2014_x86_64", "x86_64-linux-gnu.2.17"),
    "linux-aarch64": Target(NEON, "so", "manylinux_2_17_aarch64.manylinux2014_aarch64", "aarch64-linux-gnu.2.17"),
    "macos-x86_64": Target(X86_LEVELS, "dylib", "macosx_10_13_x86_64", "x86_64-macos.10.13"),
    "macos-arm64": Target(NEON, "dylib", "macosx_11_0_arm64", "aarch64-macos.11.0"),
    "windows-x86_64": Target(X86_LEVELS, "dll", "win_amd64", "x86_64-windows-gnu", ("-shared", "-s")),
}  # fmt: skip


def this_machine() -> Target | None:
    """Return the target of this machine with the tag of a local build, or None where it has no kernels."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    if sys.maxsize < 2**32 or machine not in ("x86_64", "aarch64"):
        return None
    system = {"linux": "linux", "darwin": "macos", "win32": "windows"}.get(sys.platform)
    name = f"{system}-{'arm64' if system == 'macos' and machine == 'aarch64' else machine}"
    target = TARGETS.get(name)
    if target is not None and system == "linux":
        target = target._replace(tag=f"linux_{machine}", link=(*target.link, "-Wl,--as-needed"))
    return target


def compiler(target: Target, cross: bool) -> tuple[list[str], bool] | None:
    """Return the command of a compiler for a target, and whether it is ziglang; or None where there is none."""
    if not cross and sys.platform != "win32":
        if os.environ.get("CXX"):
            return shlex.split(os.environ["CXX"]), False
        for name in ("g++", "clang++", "c++"):
            if path := shutil.which(name):
                return [path], False
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++", "-target", str(target.zig), "-fno-sanitize=undefined"], True
    return None


class Library(NamedTuple):
    """A library to build.

    Args:
        name: of the file.
        level: the instruction set.
    """

    name: str
    level: str


def libraries(target: Target) -> list[Library]:
    """Return the libraries of a platform."""
    return [Library(f"libfusedops_cpu-{level}.{target.suffix}", level) for level in target.levels]


class Compilation(NamedTuple):
    """A command that makes one file of others.

    Args:
        command: without the file that it makes.
        out: the file; its folder has a name that follows from the command and all that it reads.
    """

    command: list[str]
    out: Path

    def run(self, root: Path) -> Path:
        """Make the file, unless it is already there.

        Raises:
            subprocess.CalledProcessError: the compiler fails; its ``stderr`` has the reason.
        """
        if not self.out.exists():
            self.out.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.out.with_suffix(".unfinished")
            subprocess.run([*self.command, "-o", str(unfinished)], cwd=root, check=True, capture_output=True, text=True)
            unfinished.replace(self.out)
        return self.out


def precompiled(root: Path, arguments: list[str]) -> list[str]:
    """Compile the headers of the system, for g++, and return the options that use them: a sixth of a build's time."""
    if not Path(arguments[0]).name.startswith("g++"):
        return []
    header = root / SOURCES / "system.h"
    mine = [*arguments, "-x", "c++-header", header.relative_to(root).as_posix()]
    key = hashlib.sha256("\0".join([*mine, header.read_text("utf-8")]).encode()).hexdigest()[:16]
    out = root / "build" / "cpu" / "headers" / key / "system.h.gch"
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(header, out.with_suffix(""))  # read where the other is not of this compiler
    Compilation(mine, out).run(root)
    return [f"-I{out.parent.relative_to(root).as_posix()}", "-include", "system.h"]


def objects_of(root: Path, target: Target, command: list[str], is_zig: bool, library: Library) -> list[Compilation]:
    """Return the compilations of a library's sources. One runs again where the source, or what it includes, differs."""
    architecture = []
    if library.level in X86_LEVELS:
        architecture = [f"-mcpu={library.level.replace('-', '_')}" if is_zig else f"-march={library.level}"]
    number = f"-DFUSEDOPS_HEADER={_structs(root).number_of_header((root / SOURCES / 'api.h').read_text('utf-8'))}"
    position = [flag for flag in target.link if flag == "-fPIC"]
    arguments = [*command, *FLAGS, *position, *architecture]
    arguments += [*precompiled(root, arguments), number, f"-I{SOURCES}", "-c"]
    compilations = list[Compilation]()
    for source in sorted((root / SOURCES).rglob("*.cpp")):
        mine = [*arguments, source.relative_to(root).as_posix()]  # the same key in every clone
        read = "\0".join([*mine, *(path.read_text("utf-8") for path in _read_by(source, root / SOURCES))])
        folder = root / "build" / "cpu" / "objects" / hashlib.sha256(read.encode()).hexdigest()[:16]
        compilations.append(Compilation(mine, folder / f"{source.stem}.o"))
    return compilations


def link_of(
    root: Path, target: Target, command: list[str], library: Library, objects: list[Compilation]
) -> Compilation:
    """Return the compilation of a library from its objects."""
    # without it the name in the library is the path of the build
    name = [f"-Wl,-install_name,@rpath/{library.name}"] if target.suffix == "dylib" else []
    files = [each.out.relative_to(root).as_posix() for each in objects]
    mine = [*command, *target.link, *name, *files]
    key = hashlib.sha256("\0".join(mine).encode()).hexdigest()[:16]
    return Compilation(mine, root / "build" / "cpu" / key / library.name)


def _read_by(source: Path, folder: Path) -> list[Path]:
    """Return a source and the files of the folder that it includes, and these in turn."""
    found, waiting = {source}, [source]
    while waiting:
        names = re.findall(r'^#include "(.+)"', waiting.pop().read_text("utf-8"), re.MULTILINE)
        new = {folder / name for name in names} - found
        found |= new
        waiting += new
    return sorted(found)


def _structs(root: Path) -> ModuleType:
    """Return ``launch/structs.py`` of the package, which cannot be imported yet."""
    spec = importlib.util.spec_from_file_location("_structs", root / CPU / "launch" / "structs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_libraries(root: Path, target: Target, cross: bool) -> list[Path]:
    """Compile the libraries of a platform, several at a time, and return their files.

    Raises:
        RuntimeError: there is no compiler, or it fails.
    """
    selected = compiler(target, cross)
    if selected is None:
        raise RuntimeError("no C++ compiler was found when fusedops was installed")
    command, is_zig = selected
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            each_library = libraries(target)
            of_each = pool.map(lambda each: objects_of(root, target, command, is_zig, each), each_library)
            objects = dict(zip(each_library, of_each))
            links = [link_of(root, target, command, library, of_library) for library, of_library in objects.items()]
            wanted = {
                each.out: each
                for link, of_it in zip(links, objects.values())
                if not link.out.exists()
                for each in of_it
            }
            list(pool.map(lambda each: each.run(root), wanted.values()))
            return list(pool.map(lambda each: each.run(root), links))
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{command[0]} failed when fusedops was installed: {error.stderr[-2000:]}") from error
    except OSError as error:
        raise RuntimeError(f"{command[0]} did not run when fusedops was installed: {error}") from error


class LibraryHook(BuildHookInterface):
    """Add the libraries to a wheel, and the platform to its tag."""

    def dependencies(self) -> list[str]:
        """Return what an isolated build installs: ziglang, where it is the compiler that remains."""
        named = os.environ.get("FUSEDOPS_CPU_TARGET", "")
        target = None if named == "none" else TARGETS[named] if named else this_machine()
        return [ZIGLANG] if target is not None and compiler(target, bool(named)) is None else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, before hatchling collects the files."""
        named = os.environ.get("FUSEDOPS_CPU_TARGET", "")
        if self.target_name != "wheel" or named == "none":
            return
        root = Path(self.root)
        reason_file = root / (CPU if version == "editable" else "build/cpu") / NO_LIBRARY
        reason_file.unlink(missing_ok=True)
        target = TARGETS[named] if named else this_machine()
        if target is None:
            self.app.display_warning("fusedops: there is no compiled library for this machine; building without it")
            return
        try:
            built = compile_libraries(root, target, bool(named))
        except RuntimeError as error:
            if named:
                raise
            self.app.display_warning(f"fusedops: building without compiled libraries: {error}")
            reason_file.parent.mkdir(parents=True, exist_ok=True)
            reason_file.write_text(f"{str(error)[:MOST_OF_REASON]}\n", "utf-8")
            if version != "editable":
                build_data["force_include"][str(reason_file)] = f"{Path(CPU).name}/{NO_LIBRARY}"
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{target.tag}"
        if version == "editable":  # imported from the source tree
            for path in built:
                unfinished = root / CPU / f"{path.name}.unfinished"
                shutil.copyfile(path, unfinished)
                unfinished.replace(root / CPU / path.name)  # a process may have the old file loaded
        else:
            for path in built:
                build_data["force_include"][str(path)] = f"{Path(CPU).name}/{path.name}"


if __name__ == "__main__" and (machine := this_machine()) is not None:  # beside the downloads of an installation
    with contextlib.suppress(RuntimeError):  # the build that follows says so
        compile_libraries(Path(__file__).parent, machine, cross=False)
