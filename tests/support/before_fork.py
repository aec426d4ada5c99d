"""The last thing that a RankServer imports: it may fork now."""

import gc
import os

threads = len(os.listdir("/proc/self/task"))
if threads != 1:
    raise RuntimeError(f"{threads} threads run after the imports: a fork would lose them and their locks")
gc.freeze()  # nothing that exists now is garbage: children need not touch (and copy) its pages
