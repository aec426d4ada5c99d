"""``python -m nanlocator.next_steps RUN``: see program.py."""

import sys

from nanlocator.next_steps.program import main

if __name__ == "__main__":
    sys.exit(main())
