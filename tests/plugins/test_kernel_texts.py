"""Every text about a plugin's kernels and variables that test_plugin_texts does not have, word for word."""

import pytest
from error_calls import PLUGIN, made, registering
from error_texts import Table
from two_outputs import OP

import fusedops
from fusedops.constraints import Rank

TABLE = Table(__file__)
pin = TABLE.pin


def of_saved() -> None:
    fusedops.register(OP)
    try:
        names = ", ".join(OP.parameters_of("backward"))
        registering(made(Rank("rstd", 2), op=OP.name, direction="backward", form=names))()
    finally:
        fusedops.unregister(OP.name)


pin("variables", registering(variables="A"), PLUGIN, "got variables 'A'", "expected pairs", "write (('MY_VARIABLE'")
pin("needs", registering(needs=5), PLUGIN, "got needs 5", "expected a text", "write what it runs on")
pin("packages", registering(packages="a"), PLUGIN, "got packages 'a'", "a tuple of names", "write them as ('name',)")
pin(
    "kernels of another type",
    lambda: fusedops.register(fusedops.Backend("mine", ("cpu",), 5, 5)),  # type: ignore[arg-type]
    PLUGIN, "got kernels of type int", "expected a tuple", "write (forward, backward)",
)  # fmt: skip
pin(
    "a direction",
    registering(fusedops.Kernel("bias_gelu", "sideways", made().function)),  # type: ignore[arg-type]
    PLUGIN, "got direction 'sideways'", "expected 'forward' or 'backward'", "write one of these",
)  # fmt: skip
pin(
    "a deviation",
    registering(fusedops.Kernel("bias_gelu", "forward", made().function, deviations=("odd",))),  # type: ignore[arg-type]
    PLUGIN, "got deviations ('odd',)", "expected fusedops.Deviation", "make them so",
)  # fmt: skip
pin(
    "no signature",
    registering(fusedops.kernel("bias_gelu")(min)),
    PLUGIN, "without a signature", "expected (x, bias, approximate)", "wrap it in a Python",
)  # fmt: skip
pin("a saved value", of_saved, PLUGIN, "on 'rstd', a saved value", "known before forward", "handle every rstd")


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", TABLE.pins)
def test_a_text(name: str) -> None:
    TABLE.check(name)


def test_no_text_is_left_over() -> None:
    TABLE.check_complete()
