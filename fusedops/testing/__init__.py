"""Tools for tests of a backend: the conformance kit, real calls of an op, the float64 answer, the op's tolerance.

:func:`checks` lists what a backend must meet for each of its kernels; each check runs on its own. ``python -m fusedops
check NAME`` and ``pytest --fusedops-backend NAME`` run them all, and :func:`reproduce` runs one case of one.

:func:`isolated` keeps a test's changes to fusedops apart from other tests. :func:`fingerprint` and
:func:`assert_same_choices` compare two runs, or the ranks of one run, and :func:`compare_models` two models.
``import fusedops`` does not import this module.
"""

from fusedops._contract.evidence import Case as Case
from fusedops.ops import OPS as OPS
from fusedops.philox import keep_mask as keep_mask
from fusedops.testing._calls import arguments as arguments
from fusedops.testing._calls import random_indices as random_indices
from fusedops.testing._calls import shrunk as shrunk
from fusedops.testing._checks import Check as Check
from fusedops.testing._checks import Result as Result
from fusedops.testing._checks import checks as checks
from fusedops.testing._checks import reproduce as reproduce
from fusedops.testing._choices import assert_same_choices as assert_same_choices
from fusedops.testing._choices import fingerprint as fingerprint
from fusedops.testing._expected import Expected as Expected
from fusedops.testing._expected import assert_within as assert_within
from fusedops.testing._expected import expected as expected
from fusedops.testing._failures import Failure as Failure
from fusedops.testing._isolation import isolated as isolated
from fusedops.testing._models import LayerDifference as LayerDifference
from fusedops.testing._models import ModelComparison as ModelComparison
from fusedops.testing._models import compare_models as compare_models
from fusedops.testing._packed import random_packed as random_packed
from fusedops.testing._packed import random_part as random_part
from fusedops.testing._timing import Times as Times
from fusedops.testing._timing import interleaved as interleaved
