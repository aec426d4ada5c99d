"""First imports of strategy_ranks' ranks. datasets, which the Trainer would import, is still hidden: it
imports pyarrow, which starts a thread."""

import os
import sys

from strategy_ranks import DEEPSPEED, TRAINERS

os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
sys.path.append(str(DEEPSPEED))

import transformers.trainer  # noqa: F401

sys.path.append(str(TRAINERS))

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  (which each engine would import)
import lightning.pytorch.strategies  # noqa: F401
