"""``torchrun ... -m nanlocator.megatron [options] script.py ARGS...``; see launcher.py."""

import sys

from nanlocator.megatron.launcher import main

sys.exit(main())
