"""A RankServer imports this last, before it forks."""

import gc
import os

threads = len(os.listdir("/proc/self/task"))
if threads != 1:
    raise RuntimeError(f"{threads} threads run after the imports: a fork would lose them and their locks")
gc.freeze()  # children need not touch (and copy) the pages of existing objects
