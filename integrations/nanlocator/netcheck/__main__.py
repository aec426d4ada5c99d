"""``python -m nanlocator.netcheck [options]``, with or without torchrun; see options.py."""

import os
import sys

from nanlocator.netcheck.run import main

if __name__ == "__main__":  # the fork server also imports this module
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no destructor of a process group may hang after the verdict
