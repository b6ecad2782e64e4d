"""``python -m fusedops``: the command line, as the command ``fusedops``."""

import sys

from fusedops._cli.main import main

if __name__ == "__main__":
    sys.exit(main())
