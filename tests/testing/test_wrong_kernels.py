"""The conformance kit finds each of a list of wrong kernels, by the check that is about its fault."""

from __future__ import annotations

import pytest
import wrong_attention_kernels  # noqa: F401  adds to the list
import wrong_chunk_kernels  # noqa: F401
import wrong_conv_kernels  # noqa: F401
import wrong_experts_kernels  # noqa: F401
import wrong_gated_norm_kernels  # noqa: F401
import wrong_grouped_kernels  # noqa: F401
import wrong_int8_kernels  # noqa: F401
import wrong_kind_kernels  # noqa: F401
import wrong_linear_attention_kernels  # noqa: F401
import wrong_linear_kernels  # noqa: F401
import wrong_log_prob_kernels  # noqa: F401
import wrong_memory_kernels  # noqa: F401
import wrong_merge_kernels  # noqa: F401
import wrong_modulated_kernels  # noqa: F401
import wrong_packed_attention_kernels  # noqa: F401
import wrong_packed_experts_kernels  # noqa: F401
import wrong_packed_kernels  # noqa: F401
import wrong_paged_kernels  # noqa: F401
import wrong_routing_kernels  # noqa: F401
import wrong_row_kernels  # noqa: F401
import wrong_rows_kernels  # noqa: F401
import wrong_sample_kernels  # noqa: F401
import wrong_situation_kernels  # noqa: F401
import wrong_size_kernels  # noqa: F401
import wrong_sparse_kernels  # noqa: F401
import wrong_state_kernels  # noqa: F401
import wrong_storage_kernels  # noqa: F401
import wrong_store_kernels  # noqa: F401
from loopback import registered
from two_outputs import OP, two_outputs
from wrong_kernels import WRONG, Wrong, every

from fusedops import testing
from fusedops.testing._trial import Trial

pytestmark = pytest.mark.usefixtures("one_thread")


def fails(trial: Trial) -> bool:
    try:
        trial.run()
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("wrong", [pytest.param(each, id=name) for name, each in every()])
def test_the_kit_finds_it(wrong: Wrong) -> None:
    of_plugin = wrong.op == OP.name
    op = OP if of_plugin else testing.OPS[wrong.op]
    backend = wrong.backend(op)
    with two_outputs(backend) if of_plugin else registered(backend):
        wanted = f"{wrong.op}/{wrong.direction}/{wrong.check}"
        (check,) = [check for check in testing.checks("wrong", op=wrong.op, elements=2**14) if check.id == wanted]
        assert any(map(fails, check.trials())), wrong.text


@pytest.mark.parametrize(
    ("op", "direction"), sorted({(each.op, each.direction) for each in WRONG if each.check == "rows"})
)
def test_the_references_of_these_ops_pass_the_check_of_rows(op: str, direction: str) -> None:
    right = Wrong("none", op, direction, "rows", lambda: lambda run, a: run())
    with registered(right.backend(testing.OPS[op])):
        checks = testing.checks("wrong", op=op, elements=2**12)
        (check,) = [check for check in checks if check.id == f"{op}/{direction}/rows"]
        assert not check.run().failures


def test_the_list_has_every_op_and_direction() -> None:
    assert len(WRONG) >= 40
    assert {(each.op, each.direction) for each in WRONG} == {
        (op, direction)
        for op in (*testing.OPS, OP.name)
        for direction in (("forward", "backward") if op == OP.name or testing.OPS[op].has_gradient else ("forward",))
    }
    assert len({(each.op, each.direction, each.text) for each in WRONG}) == len(WRONG)
