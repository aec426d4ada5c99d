"""What is read from Megatron-LM's global arguments, where a script has them."""

import sys
import types

from nanlocator.megatron import configuration


def test_a_run_that_was_loaded_names_its_checkpoint(monkeypatch):
    arguments = types.SimpleNamespace(
        load="/ckpt/run17", save="/ckpt/run17", iteration=600, curr_iteration=640
    )
    module = types.SimpleNamespace(_GLOBAL_ARGS=arguments)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    assert configuration.loaded_checkpoint() == "/ckpt/run17/iter_0000600"
    assert (configuration.checkpoint_dir(), configuration.current_iteration()) == ("/ckpt/run17", 641)
    arguments.iteration = 0  # it began anew, or with --finetune
    assert configuration.loaded_checkpoint() is None
    arguments.iteration, arguments.load = 600, None
    assert configuration.loaded_checkpoint() is None


def test_other_training_loops_have_none(monkeypatch):
    monkeypatch.delitem(sys.modules, "megatron.training.global_vars", raising=False)
    assert configuration.loaded_checkpoint() is None and configuration.current_iteration() is None
