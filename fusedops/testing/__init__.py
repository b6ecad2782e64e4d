"""What a test of a backend needs: the conformance kit, real calls of an op, the float64 answer, the op's own tolerance.

:func:`checks` lists what a backend must hold for each of its kernels; each check runs on its own. ``python -m fusedops
check NAME`` and ``pytest --fusedops-backend NAME`` run them all, and :func:`reproduce` one case of one.

Also what says whether two runs can be compared: :func:`fingerprint`, and :func:`assert_same_choices` for the ranks of
one. Import it explicitly (``import fusedops.testing``); ``import fusedops`` does not.
"""

from fusedops._op import OPS as OPS
from fusedops._op import Case as Case
from fusedops.ops._philox import keep_mask as keep_mask
from fusedops.testing._calls import Expected as Expected
from fusedops.testing._calls import arguments as arguments
from fusedops.testing._calls import assert_within as assert_within
from fusedops.testing._calls import expected as expected
from fusedops.testing._calls import shrunk as shrunk
from fusedops.testing._checks import Check as Check
from fusedops.testing._checks import Failure as Failure
from fusedops.testing._checks import Result as Result
from fusedops.testing._checks import checks as checks
from fusedops.testing._checks import reproduce as reproduce
from fusedops.testing._choices import assert_same_choices as assert_same_choices
from fusedops.testing._choices import fingerprint as fingerprint
