"""`python -m autopar`: the command line, for torchrun and for places without the installed script."""

import sys

from autopar.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
