"""The backends of a run: a machine on which each one that can be tried here is ready, and the sizes that it affords."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
LARGE, SMALL = 2**19, 2**11  # elements of a tensor, on a fast backend and on a slow one

# before torch and triton are imported
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
_kept = contextlib.ExitStack()  # the stand-in is installed until the process ends


def prepare(plugins: Sequence[str] = ()) -> None:
    """Make every backend ready that this machine can try: by stand-ins, interpreters and registration.

    Args:
        plugins: modules of further backends, which are registered.
    """
    for name in [name for name in os.environ if name.startswith("FUSEDOPS_")]:
        del os.environ[name]
    support = ROOT / "tests" / "support"
    for folder in (*filter(pathlib.Path.is_dir, support.iterdir()), support, ROOT / "tests", ROOT / "backends", ROOT):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(ImportError):  # without Triton
        import checked_interpreter
        import quick_interpreter

        quick_interpreter.install()
        checked_interpreter.install()
    from standin import installed, npu_device

    npu_device.register()
    _kept.enter_context(installed())
    atexit.register(_kept.close)
    import fusedops

    names = {info.name for info in fusedops.backends()}
    for module in map(importlib.import_module, plugins):
        if module.fusedops_backend().name not in names:
            fusedops.register(module)


class Target(NamedTuple):
    """What one call of the fuzzer is aimed at.

    Attributes:
        op: its name.
        backend: a backend with a kernel for it.
        device: where the tensors are.
        elements: of the largest tensor.
        others: backends that may be named beside this one: those that afford as much.
    """

    op: str
    backend: str
    device: str
    elements: int
    others: tuple[str, ...] = ()


def targets(ops: Sequence[str] = (), backends: Sequence[str] = ()) -> list[Target]:
    """Return every op and backend that are ready here, or those named, on each device that the backend serves.

    Raises:
        SystemExit: a name is unknown, or the backend is not ready.
    """
    import fusedops
    from fusedops._plugins.registry import registry
    from fusedops.testing import OPS

    known = [info.name for info in fusedops.backends()]
    for kind, name, names in [*(("op", op, [*OPS]) for op in ops), *(("backend", each, known) for each in backends)]:
        if name not in names:
            raise SystemExit(f"fuzz: got {kind} {name!r}, expected one of {', '.join(names)}; to fix: name one of them")
    plugins = {}
    for record in map(registry.find, known):
        assert record is not None
        refusal = record.refusal()
        if refusal is None:
            plugins[record.name] = record
        elif record.name in backends:
            raise SystemExit(f"fuzz: got backend {record.name!r}, which is {refusal.detail}; to fix: {refusal.fix}")
    devices = dict.fromkeys(
        "cpu" if r.backend.serves("cpu") else r.backend.device_types[0] for r in plugins.values() if r.backend
    )
    served = {
        name: [op for op in OPS if op in {each.kernel.op for each in record.kernels}]
        for name, record in plugins.items()
    }
    sizes = {
        # up to the first slow op
        (name, device): LARGE if served[name] and all(_is_fast(op, name, device) for op in served[name]) else SMALL
        for (name, record), device in product(plugins.items(), devices)
        if name in (backends or plugins) and record.backend and record.backend.serves(device)
    }
    return [
        Target(op, name, device, elements, tuple(each for (each, _), size in sizes.items() if size >= elements))
        for (name, device), elements in sizes.items()
        for op in served[name]
        if op in (ops or OPS)
    ]


def _is_fast(op_name: str, backend: str, device: str) -> bool:
    """Return False where a call of 32 Ki elements takes 30 ms of this process: it affords few elements.

    On one machine the slowest op of an interpreter took 80 to 140 ms, that of any other backend 10.
    """
    import torch

    import fusedops
    from fusedops.testing import OPS, arguments, shrunk

    op = OPS[op_name]
    with torch.no_grad(), fusedops.use(backend, fallback="silent"):
        for elements in (2**6, 2**12, 2**15):  # the first call imports the kernel
            cut = (shrunk(case, elements, rows=1) for case in op.evidence.cases)
            calls = (arguments(op, case, torch.float32, device) for case in cut)
            args = next(args for args in calls if op.invalid(args) is None)  # groups may not divide what is left
            start = time.process_time()
            op.call_public(*args)
            if elements > 2**6 and time.process_time() - start > 0.03:
                return False
    return True
