"""Faults for the training scripts beside this file: FAULT names one, FAULT_STEP (from 0) its step.

    kind    what the script does with it                                          born as
    norm    a module divides a vector of zeros by its norm: 0 / 0                 aten::div, in forward
    sqrt    a module adds its epsilon outside of the square root of zero          aten::sqrt, in backward
    log     a module takes the logarithm of zero                                  aten::log, in forward
    loss    the loss, outside of the model, is the mean of nothing: 0 / 0         aten::div (gan: aten::log)
    once    one number in memory becomes NaN once, and never again                no operator

The first four are bugs in the line of the script, or of tiny_llama.py, that ends with ``# the fault: KIND``.
They are inactive until the data of the step triggers them, which is the same in a re-run: the data of the
last micro-batch if gradients are accumulated, and of the last rank if there are several.
"""

import ctypes
import hashlib
import os

import torch

KIND = os.environ.get("FAULT", "none")
STEP = int(os.environ.get("FAULT_STEP", "3"))
BLANK = 0  # no healthy batch has this token; its embedding is zeros (padding_idx)


class _Damage:
    """Without attributes that a re-run could compare: broken memory is no state of the program."""

    __slots__ = ("calls", "is_done")

    def __init__(self):
        self.calls, self.is_done = 0, False


_damage = _Damage()


def wakes(kind, step):
    """Whether the data of `step` must trigger the bug `kind`, or any bug inside the model for kind
    "model"."""
    is_kind = KIND in ("norm", "sqrt", "log") if kind == "model" else KIND == kind
    return is_kind and step == STEP


def blank(tokens, step, row=0):
    """`tokens` with one sample of BLANK only, if a bug in the model must be triggered."""
    if wakes("model", step):
        tokens[row] = BLANK
    return tokens


def flip(tensor, now):
    """Damages `tensor` (an activation, a gradient) like broken memory, the first time `now` holds."""
    if KIND == "once" and now and not _damage.is_done:
        _damage.is_done = True
        ctypes.c_float.from_address(tensor.data_ptr()).value = float("nan")
    return tensor


def flip_activation(tensor, calls_per_step=1):
    """The same for a module that does not know the step: it calls this `calls_per_step` times in a step."""
    if not torch.is_grad_enabled():  # generation of text
        return tensor
    _damage.calls += 1
    return flip(tensor, _damage.calls == STEP * calls_per_step + 1)


def summary(losses, *models):
    digest = hashlib.sha256()
    for model in models:
        for parameter in model.parameters():
            digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return f"losses: {[float(loss) for loss in losses]}\nweights: {digest.hexdigest()}"


def report(losses, *models):
    print(summary(losses, *models), flush=True)
