"""Runs an unedited training script with nanlocator installed on its model.

    torchrun ... -m nanlocator.megatron [options] pretrain_gpt.py ARGS...

The script runs as Python would run it: as ``__main__``, with its own arguments, its folder first on the
path, its exit code and its traceback. Two functions are wrapped the moment their modules have been
imported, wherever the script finds them: Megatron-LM's ``setup_model_and_optimizer``, and Megatron-Core's
``get_megatron_optimizer`` for scripts with a loop of their own.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from nanlocator.launcher import check_script, make_parser, run_script, set_variables
from nanlocator_autoload import AfterImport

_EXAMPLES = """\
examples:
  torchrun --nproc-per-node 8 -m nanlocator.megatron pretrain_gpt.py --num-layers 12 ...
  torchrun --nproc-per-node 8 -m nanlocator.megatron --on-bad skip --output-dir /logs/nan pretrain_gpt.py ...
  NANLOCATOR_ON_BAD=recover srun python -m nanlocator.megatron pretrain_gpt.py ...

Options stand before the script; what follows it is the script's. An option that is not given is read from its
variable, which holds 1 or 0 for those that are on or off.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the script that `arguments` (default: the command line) name. Whatever it raises, SystemExit
    too, passes through; wrong use of the launcher exits with 2."""
    parser = make_parser(
        "python -m nanlocator.megatron",
        "Runs a Megatron training script, unedited, with nanlocator installed on its model.",
        _EXAMPLES,
        ["grads", "boundaries", "modules", "operators"],
    )
    parser.add_argument("script", help="the training script, such as pretrain_gpt.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments, untouched")
    options = parser.parse_args(arguments)
    check_script(parser, options.script)
    set_variables(options)
    installer = follow()
    try:
        run_script(options.script, options.arguments)
    finally:
        if not installer.is_installed and os.environ.get("RANK", "0") == "0":
            print(
                "nanlocator: installed on nothing: the script has called neither megatron.training's "
                "setup_model_and_optimizer nor megatron.core's get_megatron_optimizer",
                file=sys.stderr,
                flush=True,
            )
    return 0


# --- installing --------------------------------------------------------------------------------------


@functools.cache
def follow() -> "_Installer":
    """Once per process."""
    return _Installer()


class _Installer:
    """Wraps two functions as soon as their modules have been loaded, before anyone can have imported these
    functions by name."""

    def __init__(self) -> None:
        self.is_installed = False
        self._is_in_setup = False  # of Megatron-LM, which loads the checkpoint after the optimizer is made
        self._wrappers: dict[str, tuple[str, Callable[..., Any]]] = {
            "megatron.training.training": ("setup_model_and_optimizer", self._around_setup),
            "megatron.core.optimizer": ("get_megatron_optimizer", self._around_get_optimizer),
        }
        AfterImport({name: self._wrap for name in self._wrappers})

    def _wrap(self, module: ModuleType) -> None:
        name, wrap = self._wrappers[module.__name__]
        original = getattr(module, name)
        setattr(module, name, functools.wraps(original)(functools.partial(wrap, original)))

    def _around_setup(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._is_in_setup = True
        try:
            result = original(*args, **kwargs)  # model chunks, optimizer, scheduler
        finally:
            self._is_in_setup = False
        self._install(result[0], result[1])
        return result

    def _around_get_optimizer(
        self, original: Callable[..., Any], config: Any, model_chunks: Any, *args: Any, **kwargs: Any
    ) -> Any:
        optimizer = original(config, model_chunks, *args, **kwargs)
        if not self._is_in_setup:
            self._install(model_chunks, optimizer)
        return optimizer

    def _install(self, model_chunks: Any, optimizer: Any) -> None:
        if optimizer is None:  # evaluation
            return
        from nanlocator.megatron import install

        install(model_chunks, optimizer)
        self.is_installed = True
