"""Runs an unedited training script with nanlocator installed on its model.

    torchrun ... -m nanlocator.megatron [options] pretrain_gpt.py ARGS...

The script runs as Python would run it: as ``__main__``, with its own arguments, its folder first on the
path, its exit code and its traceback.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from nanlocator.engine.launcher import check_script, make_parser, run_script, set_variables
from nanlocator.megatron.scripts import follow

_EXAMPLES = """\
examples:
  torchrun --nproc-per-node 8 -m nanlocator.megatron pretrain_gpt.py --num-layers 12 ...
  torchrun --nproc-per-node 8 -m nanlocator.megatron --on-bad skip --output-dir /logs/nan pretrain_gpt.py ...
  NANLOCATOR_ON_BAD=recover srun python -m nanlocator.megatron pretrain_gpt.py ...

Options go before the script; everything after its name is passed to it. An option that is not given is read
from its environment variable (1 or 0 for switches).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the script that `arguments` name (default: the command line). The script's exceptions pass
    through, SystemExit too; wrong use of the launcher exits with 2."""
    parser = make_parser(
        "python -m nanlocator.megatron",
        "Runs a Megatron training script unchanged, with nanlocator installed on its model.",
        _EXAMPLES,
        "megatron",
    )
    parser.add_argument("script", help="the training script, such as pretrain_gpt.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments, passed on unchanged")
    options = parser.parse_args(arguments)
    check_script(parser, options.script)
    set_variables(options, "megatron")
    installer = follow()
    try:
        run_script(options.script, options.arguments)
    finally:
        if not installer.is_installed and os.environ.get("RANK", "0") == "0":
            print(
                "nanlocator: installed on nothing: the script called neither megatron.training's "
                "setup_model_and_optimizer nor megatron.core's get_megatron_optimizer",
                file=sys.stderr,
                flush=True,
            )
    return 0
