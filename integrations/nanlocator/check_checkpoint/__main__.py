"""``python -m nanlocator.check_checkpoint PATH``: see program.py."""

import sys

from nanlocator.check_checkpoint.program import main

if __name__ == "__main__":
    sys.exit(main())
