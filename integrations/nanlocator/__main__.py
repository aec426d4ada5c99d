"""``python -m nanlocator train.py ARGS...``: any training script, unedited."""

import os
import sys
from collections.abc import Sequence

from nanlocator.attach import follow_process
from nanlocator.engine.launcher import check_script, make_parser, run_module, run_script, set_variables

_INTEGRATION = "watch"  # has all options
_EXAMPLES = """\
examples:
  python -m nanlocator train.py --lr 1e-4
  python -m nanlocator --on-bad skip -m my_package.train --config big.yaml
  torchrun --nproc-per-node 8 -m nanlocator train.py ...
  NANLOCATOR=1 accelerate launch train.py ...          the same, if another program starts the workers

Options go before the script; everything after its name is passed to it. An option that is not given is read
from its environment variable (1 or 0 for switches). Megatron-Core and DeepSpeed get their own integrations.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the script that `arguments` name (default: the command line). The script's exceptions pass
    through, SystemExit too; wrong use of the launcher exits with 2."""
    parser = make_parser(
        "python -m nanlocator",
        "Runs a training script unchanged and finds where NaN or Inf in its gradients started.",
        _EXAMPLES,
        _INTEGRATION,
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="script is the name of a module, as with python -m"
    )
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs="...", help="its arguments, passed on unchanged")
    options = parser.parse_args(arguments)
    if not options.module:
        check_script(parser, options.script)
    set_variables(options, _INTEGRATION)
    os.environ["NANLOCATOR"] = "1"  # for worker processes of the script
    follow_process()
    (run_module if options.module else run_script)(options.script, options.arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
