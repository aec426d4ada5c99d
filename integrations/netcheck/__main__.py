"""``torchrun ... -m nanlocator.netcheck [options]``; see options.py."""

import sys

from nanlocator.netcheck.run import main

sys.exit(main())
