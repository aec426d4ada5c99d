"""First imports of test_unedited's forked processes."""

import os
import sys

from strategy_ranks import TRAINERS

os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # no thread of pyarrow before the fork
sys.path.append(str(TRAINERS))

import lightning.pytorch  # noqa: F401
import peft  # noqa: F401
import transformers.trainer  # noqa: F401
import trl.trainer.dpo_trainer
import trl.trainer.grpo_trainer
import trl.trainer.sft_trainer  # noqa: F401
