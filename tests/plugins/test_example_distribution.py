"""The example distribution: a backend like the built-in ones."""

from __future__ import annotations

import importlib.metadata
import pathlib
from typing import Any

from broken_plugins import OP
from repository import EXAMPLE_PLUGIN


def test_the_example_distribution_is_a_backend_like_ours(python: Any, tmp_path: pathlib.Path) -> None:
    path: list[pathlib.Path] = []
    try:
        assert importlib.metadata.distribution("fusedops-backend-example").version == "1.0.0"
    except importlib.metadata.PackageNotFoundError:
        # what pip would write, beside the sources
        declared = (EXAMPLE_PLUGIN / "pyproject.toml").read_text()
        points = declared.partition('[project.entry-points."fusedops.backends"]\n')[2].splitlines()[0]
        site = tmp_path / "fusedops_backend_example-1.0.0.dist-info"
        site.mkdir()
        (site / "METADATA").write_text("Metadata-Version: 2.1\nName: fusedops-backend-example\nVersion: 1.0.0\n")
        (site / "entry_points.txt").write_text(f"[fusedops.backends]\n{points.replace(chr(34), '')}\n")
        path = [tmp_path, EXAMPLE_PLUGIN]
    printed = python(
        """
        import json, warnings, torch, fusedops
        from fusedops import testing
        op = testing.OPS["scaled_masked_softmax"]
        (info,) = [i for i in fusedops.backends() if i.name == "example"]
        call = op.call_public
        with fusedops.use("example", fallback="raise"):
            for case in op.evidence.cases:
                case = testing.shrunk(case, 2**13)
                for dtype in (torch.float32, torch.float64):
                    args = testing.arguments(op, case, dtype)
                    named = dict(zip(op.parameters, args))
                    if fusedops.explain(op.name, **named, backend="example").backend != "example":
                        continue  # outside of its constraints
                    want = testing.expected(op, args)
                    x = args[0].requires_grad_()
                    y = call(*args)
                    y.backward(want.grad.to(dtype))
                    testing.assert_within(y, want.y, op.evidence.tolerance[dtype], case.name)
                    testing.assert_within(x.grad, want.gradients["x"], op.evidence.tolerance[dtype], case.name)
        long = torch.ones(2, 1025)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fusedops.scaled_masked_softmax(long, backend="example,eager")
        decision = fusedops.explain("scaled_masked_softmax", torch.ones(2, 8), backend="example")
        print(json.dumps([
            [info.state, info.distribution, info.version, info.device_types, info.ops],
            [str(w.message) for w in caught], decision.backend, decision.backward,
            fusedops.explain("scaled_masked_softmax", torch.ones(2, 8)).backend in ("cpu", "eager"),
        ]))
        """,
        *path,
    )
    assert printed == [
        ["ready", "fusedops-backend-example", "1.0.0", ["cpu"], [OP.name]],
        [
            "scaled_masked_softmax runs on eager, not on example: got dim -1 of x = 1025, expected a size of at most "
            "1024; to fix: split x so that dim -1 is at most 1024. (Reported once; "
            'fallback="raise" makes this an error, "silent" hides it.)'
        ],
        "example",
        "example",
        True,
    ]
