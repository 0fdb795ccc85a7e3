"""``python -m torchhal.cli``: the ``torchhal`` command of this interpreter."""

import sys

from torchhal.cli import main

if __name__ == "__main__":
    sys.exit(main())
