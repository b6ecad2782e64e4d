"""Compare the calls in backends/fusedops_npu with the schemas of torch_npu, release by release.

There is no Ascend device here, and no CANN. Three sources take their place:

- npu_schemas.json: the schemas of the functions that the backend calls, by release. The tests compare with it.
- Each release's wheel, from the package index. Its shared object holds the schemas that it registers, as text.
- For the release that matches the torch at hand, torch_npu itself: `import torch_npu` works when shared objects that
  export what it asks of CANN are on the loader's path. They are made here: functions that return 0. Fake tensors on
  "npu" then go through torch_npu's own dispatcher, shape functions and autograd, up to where a kernel would run. That
  shows names, order, types and derivative formulas; no number is computed, and none is shown.

    python tests/support/standins/npu_contract.py            # writes npu_schemas.json and a block of docs/ascend.md
    python tests/support/standins/npu_contract.py --check    # fails if a call does not fit a release or a file is stale

`make npu-contract` is the second; it downloads 13 wheels, 0.5 GB.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[3]
BACKEND = ROOT / "backends" / "fusedops_npu"
PAGE = ROOT / "docs" / "ascend.md"
BEGIN, END = "<!-- made by make npu-contract -->\n", "<!-- end of it -->\n"
FILE = Path(__file__).with_name("npu_schemas.json")

#: By release, the newest first, and by function: what the release registers.
SCHEMAS: dict[str, dict[str, str]] = json.loads(FILE.read_text(encoding="utf-8"))

#: The torch that fusedops requires: a release for an older one may lack a function.
OLDEST = (2, 10)

_SCHEMA = re.compile(rb"(npu_\w+)\((?:[^()\0]|\([^()\0]*\))*\) -> [^\0]{1,60}")


@dataclass(frozen=True)
class Call:
    """One call of ``torch_npu.<op>`` in the backend's source: the types of its arguments, as far as they are seen."""

    op: str
    where: str
    positional: tuple[str, ...]
    keywords: tuple[tuple[str, str], ...]


def used() -> list[Call]:
    """Every call of a torch_npu op in the backend."""
    found: list[Call] = []
    for path in sorted(BACKEND.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                types = {
                    a.arg: ast.unparse(a.annotation)
                    for a in function.args.args + function.args.kwonlyargs
                    if a.annotation
                }
                for node in ast.walk(function):
                    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                        continue
                    if node.func.attr.startswith("npu_"):
                        found.append(
                            Call(
                                node.func.attr,
                                f"{path.name}:{node.lineno}",
                                tuple(_type(arg, types) for arg in node.args),
                                tuple((keyword.arg or "**", _type(keyword.value, types)) for keyword in node.keywords),
                            )
                        )
    return found


def _type(node: ast.expr, types: dict[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return type(node.value).__name__
    if isinstance(node, ast.List):
        return "list[Tensor]"
    return types.get(node.id, "Tensor") if isinstance(node, ast.Name) else "Tensor"


def misfits(call: Call, schema: str) -> Iterator[str]:
    """Return the parts of a call that do not fit a schema."""
    parameters = torch._C.parse_schema(f"npu::{schema}").arguments
    takes = {
        "Tensor": ("Tensor", "Optional[Tensor]"),
        "Tensor | None": ("Optional[Tensor]",),
        "list[Tensor]": ("List[Tensor]",),
        "list[int]": ("List[int]", "Optional[List[int]]"),
        "float": ("number", "float", "Optional[float]"),
        "int": ("number", "int", "Optional[int]"),
        "bool": ("bool",),
        "str": ("str",),
    }
    by_name = {parameter.name: parameter for parameter in parameters}
    places = [parameter for parameter in parameters if not parameter.kwarg_only]
    given = list(zip(places, call.positional))
    if len(call.positional) > len(places):
        yield f"{len(call.positional)} positional arguments; it takes {len(places)}"
    for name, kind in call.keywords:
        if name not in by_name:
            yield f"no argument is called {name!r}; it takes {', '.join(by_name)}"
        else:
            given.append((by_name[name], kind))
    for parameter, kind in given:
        if str(parameter.type) not in takes.get(kind, (kind,)):
            yield f"{parameter.name} is given {kind}; it takes {parameter.type}"
    missing = {p.name for p in parameters if not p.has_default_value()} - {parameter.name for parameter, _ in given}
    if missing:
        yield f"{', '.join(sorted(missing))} is not given"


# ------------------------------------------------------------------------------------------------ the wheels' own files


def download(release: str, folder: Path) -> Path:
    """The wheel of a release. Of the one to be imported the build for this Python, of the rest any."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
    ]
    if release != matching():
        platforms = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
        pip += ["--python-version", "3.11", *(part for name in platforms for part in ("--platform", name))]
    subprocess.run([*pip, f"torch_npu=={release}"], check=True)
    return next(folder.glob(f"torch_npu-{release}-*.whl"))


def matching() -> str:
    """The release whose torch is the one at hand."""
    return torch.__version__.partition("+")[0]


def schemas(wheel: Path) -> dict[str, str]:
    """Return the schemas that a wheel's shared object registers for the functions that the backend calls."""
    with zipfile.ZipFile(wheel) as files:
        library = files.read("torch_npu/lib/libtorch_npu.so")
    found: dict[str, str] = {}
    for op in sorted({call.op for call in used()}):
        # a search for the name is quick, a pattern over 100 MB is not
        for start in re.finditer(re.escape(op.encode()) + rb"\(", library):
            match = _SCHEMA.match(library, start.start())
            if match is not None:
                found[op] = match[0].decode()
    return found


# ------------------------------------------------------------------------------------- torch_npu itself, without CANN

# What must be more than "return 0": functions that hand out something through a pointer, which is then used.
_HANDS_OUT = """
static char thing[4096];
#define HANDLE(name) long name(void **out) { *out = thing; return 0; }
HANDLE(aclrtCreateStream) HANDLE(aclrtCreateStreamV2) HANDLE(aclrtCreateStreamWithConfig)
HANDLE(aclrtCreateStreamWithConfigV2) HANDLE(aclrtCreateContext) HANDLE(aclrtGetCurrentContext)
long aclrtGetDevice(int *device) { *device = 0; return 0; }
long aclrtGetDeviceCount(unsigned *count) { *count = 1; return 0; }
"""


def live(wheel: Path, folder: Path) -> dict[str, Any]:
    """Return the schemas of torch_npu, imported beside stand-ins for CANN's libraries."""
    site, stubs = folder / "site", folder / "stubs"
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
    stubs.mkdir()
    own = [*(site / "torch_npu" / "lib").glob("*.so"), *(site / "torch_npu").glob("_C*.so")]
    theirs = [*(Path(torch.__file__).parent / "lib").glob("*.so*"), *own]
    wanted = _symbols("--undefined-only", own) - _symbols("--defined-only", theirs)
    # and what it looks up by name when it runs
    wanted |= set(
        re.findall(
            r"\b(?:acl|Hccl|Rt|rt)[A-Za-z0-9_]+\b", (own[0].parent / "libtorch_npu.so").read_bytes().decode("latin1")
        )
    )
    named = set(re.findall(r"\b(aclrt\w+)\b", _HANDS_OUT))
    plain = sorted(
        name
        for name in wanted
        if re.fullmatch(r"[A-Za-z_]\w*", name) and not name.startswith(("Py", "_Py")) and name not in named
    )
    source = folder / "stubs.c"
    source.write_text("\n".join(f"long {name}(void) {{ return 0; }}" for name in plain) + _HANDS_OUT)
    nothing = folder / "nothing.c"
    nothing.write_text("")
    _compile(source, stubs / "libascendcl.so")
    environment = {
        **os.environ,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # `import torch` would import torch_npu, and fail with it
        "LD_LIBRARY_PATH": str(stubs),
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT), str(BACKEND.parent)]),
    }
    for _ in range(30):  # each try names one more library of CANN's
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("npu_contract_live.py"))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
        absent = re.search(r"(lib\w+\.so[\d.]*): cannot open shared object file", done.stderr)
        if absent is None:
            break
        _compile(nothing, stubs / absent[1])
    if done.returncode != 0:
        raise SystemExit(
            f"torch_npu {matching()} did not come up beside the stand-ins for CANN:\n{done.stderr[-3000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def _symbols(which: str, libraries: list[Path]) -> set[str]:
    symbols = subprocess.run(
        ["nm", "-D", which, *map(str, libraries)], capture_output=True, text=True, check=False
    ).stdout
    # with a version behind "@" they are the C library's
    return {line.split()[-1] for line in symbols.splitlines() if line and "@" not in line and not line.endswith(":")}


def _compile(source: Path, library: Path) -> None:
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", str(library), str(source)], check=True)


# ------------------------------------------------------------------------------------------------------------- the page


def differences(registered: dict[str, dict[str, str]]) -> list[str]:
    """Return what does not fit, for each release and each call of the backend.

    A release for an older torch may lack a function or a parameter.
    """
    found: list[str] = []
    for release, schemas_of_release in registered.items():
        for call in used():
            known = schemas_of_release.get(call.op)
            if known is None and _is_old(release):
                continue
            wrong = ["this release has no such function"] if known is None else [*misfits(call, known)]
            if _is_old(release) and any(text.startswith("no argument") for text in wrong):
                continue
            found += [f"torch_npu {release}, {call.op} at {call.where}: {what}" for what in wrong]
    return found


def _is_old(release: str) -> bool:
    """Return True for a release that is for a torch before the oldest one that fusedops supports."""
    major, minor = release.split(".")[:2]
    return (int(major), int(minor)) < OLDEST


def page(registered: dict[str, dict[str, str]]) -> str:
    """Return docs/ascend.md with the table of the releases made again."""
    ops = sorted({call.op for call in used()})
    differ = {text.partition(" at ")[0] for text in differences(registered)}
    rows: list[str] = []
    for release in registered:
        if not _is_old(release):
            wrong = [f"`{op}`" for op in ops if f"torch_npu {release}, {op}" in differ]
            rows.append(f"| {release} | {len(ops) - len(wrong)} of {len(ops)} | {', '.join(wrong) or 'none'} |")
    lines = [
        "| torch_npu | functions that match | functions that differ |",
        "|---|---|---|",
        *rows,
        "",
        f"The functions: {', '.join(f'`{op}`' for op in ops)}.",
        "",
        f"torch_npu {matching()} was also imported, with stand-ins for CANN's libraries, and the kernels called on",
        "fake npu tensors.",
    ]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{chr(10).join(lines)}\n\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """Download the releases, compare, and write or check the two files."""
    failures: list[str] = []
    registered: dict[str, dict[str, str]] = {}
    imported = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for release in SCHEMAS:
            wheel = download(release, folder)
            registered[release] = schemas(wheel)
            print(f"torch_npu {release}: {len(registered[release])} functions")
            if release == matching():
                found = live(wheel, folder)
                print(f"torch_npu {release}, imported: {json.dumps(found, indent=2)}")
                imported = True
                failures += found["failures"]
                failures += [
                    f"{op}: registered as {found['schemas'][op]!r}, read from the wheel as {known!r}"
                    for op, known in registered[release].items()
                    if _plain(found["schemas"][op]) != _plain(known)
                ]
            wheel.unlink()
    if not imported:
        failures.append(f"no release in {tuple(SCHEMAS)} is for torch {matching()}: none was imported")
    failures += differences(registered)
    files = {FILE: json.dumps(registered, indent=1) + "\n", PAGE: page(registered)}
    for path, text in files.items():
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            failures.append(f"{path.relative_to(ROOT)} is stale: run `python tests/support/standins/npu_contract.py`")
    print("\n".join(failures) or f"every call of the npu backend fits torch_npu {', '.join(registered)}")
    return int(bool(failures))


def _plain(schema: str) -> str:
    return str(torch._C.parse_schema(schema if "::" in schema else f"npu::{schema}"))


if __name__ == "__main__":
    sys.exit(main())
