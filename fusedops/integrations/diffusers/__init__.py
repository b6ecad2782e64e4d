"""fusedops in models of diffusers, without a change to the model's code."""

from fusedops.integrations._required import require

require("diffusers", "0.42", "diffusers")

from fusedops.integrations._applied import Applied as Applied
from fusedops.integrations._applied import Row as Row
from fusedops.integrations.diffusers._apply import apply as apply

__all__ = ["Applied", "Row", "apply"]
