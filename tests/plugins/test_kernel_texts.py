"""Every text about a plugin's kernels and variables that test_plugin_texts does not have, word for word."""

from error_calls import PLUGIN, made, registering
from error_texts import Table
from two_outputs import OP

import fusedops
from fusedops.constraints import Rank

TABLE = Table(__file__, "fakes")
pin = TABLE.pin


def of_saved() -> None:
    fusedops.register(OP)
    try:
        names = ", ".join(OP.parameters_of("backward"))
        registering(made(Rank("rstd", 2), op=OP.name, direction="backward", form=names))()
    finally:
        fusedops.unregister(OP.name)


pin("variables", registering(variables="A"), PLUGIN)
pin("needs", registering(needs=5), PLUGIN)
pin("packages", registering(packages="a"), PLUGIN)
pin("kernels of another type", lambda: fusedops.register(fusedops.Backend("mine", ("cpu",), 5, 5)), PLUGIN)
pin("a direction", registering(fusedops.Kernel("bias_gelu", "sideways", made().function)), PLUGIN)
pin("a deviation", registering(fusedops.Kernel("bias_gelu", "forward", made().function, deviations=("odd",))), PLUGIN)
pin("no signature", registering(fusedops.kernel("bias_gelu")(min)), PLUGIN)
pin("a saved value", of_saved, PLUGIN)

test_a_text, test_no_text_is_left_over = TABLE.tests()
