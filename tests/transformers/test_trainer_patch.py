"""patch(): the stock --debug underflow_overflow with this package's debugger, through real Trainers."""

import gc
import re

import pytest
import torch
import transformers.debug_utils
import transformers.trainer
from test_trainer import USES_CPU, bert
from transformers import Trainer, TrainingArguments

import nanlocator.transformers as ours

ORIGINAL = transformers.trainer.DebugUnderflowOverflow


def debuggers():
    """All models' debuggers; the original's hooks are only on its model."""
    found = (o for o in gc.get_objects() if type(o) is ours.DebugUnderflowOverflow)
    return [debugger for debugger in found if debugger._hooks]


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = debuggers()
    yield
    assert transformers.trainer.DebugUnderflowOverflow is ORIGINAL
    assert not [debugger for debugger in debuggers() if debugger not in before]


def trainer_of(scale=1.0):
    model = bert()
    with torch.no_grad():
        model.bert.encoder.layer[1].intermediate.dense.weight.fill_(scale)
    ids = torch.arange(8)
    mask = torch.tensor([1] * 6 + [0] * 2)  # sdpa makes a bool tensor of it
    data = [{"input_ids": ids, "attention_mask": mask, "labels": ids}] * 4
    args = TrainingArguments(
        "out",
        debug="underflow_overflow",
        max_steps=2,
        per_device_train_batch_size=2,
        use_cpu=USES_CPU,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    return Trainer(model, args, train_dataset=data)


def test_a_bool_mask_that_the_original_does_not_survive_is_trained_with():
    if USES_CPU:
        with pytest.raises(NotImplementedError, match="not implemented for 'Bool'"):
            trainer_of().train()
    with ours.patch():
        trainer = trainer_of()
        assert trainer.train().global_step == 2
        assert trainer.train().global_step == 2  # one debugger: frames are not printed twice
        assert len([debugger for debugger in debuggers() if debugger.model is trainer.model]) == 1


def test_an_overflow_ends_training_with_the_frames(capsys):
    with ours.patch(), pytest.raises(ValueError, match="inf/nan detected"):
        trainer_of(scale=3e38).train()
    text = capsys.readouterr().out
    assert "Detected inf/nan during batch_number=0" in text
    assert "bert.encoder.layer.1.intermediate.dense Linear" in text
    assert re.search(r" (inf|nan) output\n", text)  # the sum of a row: kernels add in different orders


def test_patching_is_idempotent_and_reversible():
    names = ("DebugUnderflowOverflow", "detect_overflow", "get_abs_min_max")
    originals = [getattr(transformers.debug_utils, name) for name in names]
    patched = ours.patch()
    assert ours.patch() is patched
    for name in names:
        assert getattr(transformers.debug_utils, name) is getattr(ours, name)
    patched.remove()
    patched.remove()
    assert [getattr(transformers.debug_utils, name) for name in names] == originals
    again = ours.patch()
    assert again is not patched
    again.remove()


def test_a_name_that_someone_has_replaced_since_stays(monkeypatch):
    patched = ours.patch()
    monkeypatch.setattr(transformers.debug_utils, "detect_overflow", print)
    patched.remove()
    assert transformers.debug_utils.detect_overflow is print
    from nanlocator.transformers import detect_overflow

    assert detect_overflow is ours.detect_overflow
    monkeypatch.undo()
    transformers.debug_utils.detect_overflow = _original_detect_overflow


_original_detect_overflow = transformers.debug_utils.detect_overflow
