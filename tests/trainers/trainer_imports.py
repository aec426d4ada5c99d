"""What the forked processes of test_unedited begin with."""

import os
import sys

from strategy_ranks import TRAINERS

os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow would start one, and is to be forked
sys.path.append(str(TRAINERS))

import lightning.pytorch  # noqa: F401
import peft  # noqa: F401
import transformers.trainer  # noqa: F401
import trl.trainer.dpo_trainer
import trl.trainer.grpo_trainer
import trl.trainer.sft_trainer  # noqa: F401
