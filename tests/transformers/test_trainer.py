"""NanLocatorCallback in real Trainers: faults planted in a chosen step, and healthy runs."""

import gc
import json
import random
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from accelerate.utils import DistributedType
from ranks import run_python
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.training_args import OptimizerNames

import nanlocator
from nanlocator import NonFiniteGradientError
from nanlocator.transformers import NanLocatorCallback
from nanlocator.transformers.trainer import _check as check

NAN, INF = float("nan"), float("inf")
USES_CPU = torch.get_default_device().type == "cpu"


def gpt2(**changes):
    set_seed(3)
    small = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**{**small, **ends, **changes}))


def bert():
    set_seed(3)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    return BertForMaskedLM(config)


def sentences(count=24):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 50, (count, 8), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def trainer_of(model, *callbacks, data=None, cls=Trainer, optimizers=(None, None), **arguments):
    fixed = {"per_device_train_batch_size": 2, "max_steps": 4, "logging_steps": 1, "learning_rate": 1e-2}
    quiet = {"use_cpu": USES_CPU, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    return cls(
        model,
        TrainingArguments("out", **{**fixed, **quiet, **arguments}),
        train_dataset=data or sentences(),
        eval_dataset=sentences(4),
        callbacks=list(callbacks),
        optimizers=optimizers,
    )


class AtStep(TrainerCallback):
    """Calls `action` once, immediately before that step's forward (counted from 1)."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_begin(self, args, state, control, **_):
        if state.global_step + 1 == self.step:
            self.action()


def found_by(trainer):
    """The verdict that stops training."""
    with pytest.raises(NonFiniteGradientError) as raised:
        trainer.train()
    return raised.value.verdict


def only_origin(verdict):
    (origin,) = verdict["origins"]
    return origin


def without_times(log_history):
    return [
        {k: v for k, v in entry.items() if "runtime" not in k and "per_second" not in k}
        for entry in log_history
    ]


def same_bits(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def generators():
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()


# --- healthy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "level, arguments",
    [
        ("modules", {}),
        ("modules", {"gradient_accumulation_steps": 3}),
        ("modules", {"max_grad_norm": 0.0}),
        ("modules", {"eval_strategy": "steps", "eval_steps": 1, "gradient_checkpointing": True}),
        ("modules", {"bf16": True}),
        ("grads", {"gradient_accumulation_steps": 3}),
        ("operators", {"gradient_accumulation_steps": 3}),
    ],
    ids=str,
)
def test_a_healthy_run_has_the_same_bits_with_and_without(level, arguments):
    def run(*callbacks):
        model = gpt2()
        trainer = trainer_of(model, *callbacks, **arguments)
        trainer.train()
        return model, without_times(trainer.state.log_history), generators()

    callback = NanLocatorCallback(level=level, check_params=True)
    alone, with_it = run(), run(callback)
    assert same_bits(alone[0], with_it[0])
    assert alone[1:] == with_it[1:]
    assert callback.verdicts == []


def test_a_repeat_of_a_healthy_step_has_the_same_bits(capfd):
    trainer = trainer_of(gpt2(), NanLocatorCallback(rerun="always"), gradient_accumulation_steps=2)
    trainer.train()
    assert "have other bits" not in capfd.readouterr().err  # dropout draws the same numbers again


def test_a_repeat_that_differs_is_told(capfd):
    class Drifting(Trainer):
        calls = 0

        def training_step(self, model, inputs, num_items_in_batch=None):
            self.calls += 1
            with torch.no_grad():
                model.transformer.wpe.weight[0] += self.calls  # cannot be restored
            return super().training_step(model, inputs, num_items_in_batch)

    trainer_of(gpt2(), NanLocatorCallback(rerun="always"), cls=Drifting, max_steps=1).train()
    assert "have other bits" in capfd.readouterr().err


# --- faults ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_nan_from_a_gradient_hook_names_parameter_hook_and_step(accumulation):
    model = gpt2()
    parameter = model.transformer.h[0].attn.c_attn.weight

    def plant():
        parameter.register_hook(lambda g: g.index_fill(0, torch.tensor([3], device=g.device), NAN))

    before = {}
    remember = AtStep(3, lambda: before.update({n: p.clone() for n, p in model.named_parameters()}))
    trainer = trainer_of(
        model, NanLocatorCallback(), AtStep(3, plant), remember, gradient_accumulation_steps=accumulation
    )
    verdict = found_by(trainer)
    origin = only_origin(verdict)
    assert (verdict["iteration"], trainer.state.global_step) == (3, 2)
    assert (origin["parameter"], origin["cause"]) == ("transformer.h.0.attn.c_attn.weight", "user_hook")
    assert (origin["phase"], origin["direction"]) == ("backward", "backward")
    assert origin["tensor"]["first_bad_index"] == [3, 0]
    assert verdict["rerun"]["reproduced"] is True and verdict["rerun"]["not_restored"] == []
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_an_overflow_names_module_and_operator_and_its_bundle_replays():
    model = gpt2()

    def grow():
        with torch.no_grad():
            model.transformer.h[1].mlp.c_fc.weight.mul_(1e22)
            model.transformer.h[1].mlp.c_proj.weight.fill_(1e20)

    callback = NanLocatorCallback()
    verdict = found_by(trainer_of(model, callback, AtStep(2, grow)))
    origin = only_origin(verdict)
    assert verdict["iteration"] == 2
    assert (origin["module"], origin["operator"]) == ("transformer.h.1.mlp.c_proj", "aten::addmm")
    assert (origin["phase"], origin["cause"]) == ("forward", "operator_overflow")
    assert callback.run_dir == "out/nanlocator_run/a0"
    bundle = Path(callback.run_dir) / origin["bundle"]
    call = nanlocator.replay.load(bundle)
    again = call.bind(model.transformer.h[1].mlp.c_proj)
    assert torch.equal(again().outputs.isfinite(), call.outputs.isfinite())
    replayed = subprocess.run(["nanlocator", "replay", bundle], capture_output=True, text=True, timeout=120)
    assert "deterministic_overflow" in replayed.stdout + replayed.stderr, replayed
    page = (Path(callback.run_dir) / "report.html").read_text()
    assert "transformer.h.1.mlp.c_proj" in page
    told = json.loads((Path(callback.run_dir) / "verdict.json").read_text())
    assert told["origins"] == verdict["origins"]


def test_labels_that_all_are_ignored_are_an_empty_loss():
    model, data = bert(), sentences()

    def ignore_labels():
        for item in data:
            item["labels"].fill_(-100)

    origin = only_origin(
        found_by(trainer_of(model, NanLocatorCallback(), AtStep(1, ignore_labels), data=data))
    )
    assert origin["operator"].startswith("aten::nll_loss")
    assert origin["cause"] == "empty_loss_mask"


def test_a_loss_that_divides_by_no_items_is_told_with_their_number():
    data = sentences()
    for item in data:
        item["labels"].fill_(-100)
    callback = NanLocatorCallback()
    origin = only_origin(found_by(trainer_of(gpt2(), callback, data=data)))
    assert (origin["operator"], origin["cause"]) == ("aten::div.Tensor", "empty_loss_mask")
    (ledger,) = Path(callback.run_dir).glob("ledger_*.jsonl")
    assert '"valid_labels":0' in ledger.read_text()


def test_a_nan_in_the_data_is_a_bad_input_of_its_microbatch():
    generator = torch.Generator().manual_seed(1)
    data = [
        {"inputs_embeds": torch.randn(8, 16, generator=generator), "labels": row["labels"]}
        for row in sentences()
    ]
    order = []
    model = gpt2()
    with torch.random.fork_rng():
        trainer = trainer_of(model, max_steps=1, data=[{**d, "number": i} for i, d in enumerate(data)])
        trainer.args.remove_unused_columns = False
        set_seed(trainer.args.seed)
        for batch in trainer.get_train_dataloader():
            order += batch["number"].tolist()
    data[order[2 * 2 * 1 + 3]]["inputs_embeds"][5, 2] = NAN  # step 2: its second microbatch's second sample
    verdict = found_by(trainer_of(model, NanLocatorCallback(), data=data, gradient_accumulation_steps=2))
    origin = only_origin(verdict)
    assert (verdict["iteration"], origin["microbatch"]) == (2, 1)
    assert (origin["phase"], origin["cause"]) == ("forward", "bad_input")
    assert origin["tensor"]["first_bad_index"] == [1, 5, 2]


def test_a_weight_that_has_turned_bad_is_named():
    model = bert()

    def corrupt():
        with torch.no_grad():
            model.bert.encoder.layer[1].output.dense.weight[2, 7] = NAN

    verdict = found_by(trainer_of(model, NanLocatorCallback(check_params=True), AtStep(4, corrupt)))
    origin = only_origin(verdict)
    assert (verdict["iteration"], origin["cause"]) == (4, "bad_weight")
    assert origin["parameter"] == "bert.encoder.layer.1.output.dense.weight"
    assert origin["tensor"]["first_bad_index"] == [2, 7]


def test_a_step_that_a_user_overrides_is_followed_as_it_is():
    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            logits = model(**inputs).logits
            scores = logits.mean(1)
            if self.state.global_step == 1:
                scores = (scores - scores).sqrt()  # finite forward; 0 * inf in backward
            return nn.functional.cross_entropy(scores, labels[:, 0])

    verdict = found_by(trainer_of(gpt2(), NanLocatorCallback(), cls=Own))
    origin = only_origin(verdict)
    assert verdict["iteration"] == 2 and verdict["rerun"]["reproduced"] is True
    assert (origin["direction"], origin["cause"]) == ("backward", "operator_undefined")
    assert origin["forward_operator"] == "aten::sqrt"


def test_inputs_that_the_step_writes_to_are_named():
    class Writing(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            inputs["labels"].add_(0)
            return super().compute_loss(model, inputs, *args, **kwargs) * NAN

    verdict = found_by(trainer_of(gpt2(), NanLocatorCallback(), cls=Writing))
    (lost,) = verdict["rerun"]["not_restored"]
    assert "'labels' was written in place" in lost


def test_what_training_step_moves_can_be_registered():
    class Counter:
        value = 0

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    class FailsOnOdd(Trainer):
        counter = Counter()

        def compute_loss(self, model, *args, **kwargs):
            self.counter.value += 1
            loss = super().compute_loss(model, *args, **kwargs)
            return loss * NAN if self.counter.value % 2 else loss

    for is_registered, outcome in [(False, False), (True, True)]:
        FailsOnOdd.counter = Counter()
        callback = NanLocatorCallback()
        if is_registered:
            callback.register_state("the counter", FailsOnOdd.counter)
        verdict = found_by(trainer_of(gpt2(), callback, cls=FailsOnOdd))
        assert verdict["rerun"]["reproduced"] is outcome


# --- policies ----------------------------------------------------------------------------------------


class FailsOnce(Trainer):
    """Step 2 is bad, but not in its re-run."""

    is_due = True

    def compute_loss(self, model, *args, **kwargs):
        loss = super().compute_loss(model, *args, **kwargs)
        if self.state.global_step == 1 and self.is_due:
            self.is_due = False
            loss = loss * NAN
        return loss


@pytest.mark.parametrize("accumulation", [1, 3])
def test_recover_goes_on_as_if_the_fault_had_never_been(accumulation):
    healthy, recovered = gpt2(), None
    reference = trainer_of(healthy, gradient_accumulation_steps=accumulation, logging_nan_inf_filter=False)
    reference.train()
    recovered = gpt2()
    callback = NanLocatorCallback(on_bad="recover")
    trainer = trainer_of(
        recovered,
        callback,
        cls=FailsOnce,
        gradient_accumulation_steps=accumulation,
        logging_nan_inf_filter=False,
    )
    trainer.train()
    assert same_bits(healthy, recovered)
    assert without_times(trainer.state.log_history) == without_times(reference.state.log_history)
    (verdict,) = callback.verdicts
    assert verdict["rerun"]["reproduced"] is False
    assert only_origin(verdict)["cause"] == "not_reproduced"


class AlwaysFails(Trainer):
    """Step 2 is bad in every execution."""

    def compute_loss(self, model, *args, **kwargs):
        loss = super().compute_loss(model, *args, **kwargs)
        return loss * NAN if self.state.global_step == 1 else loss


def test_recover_stops_where_the_fault_repeats():
    assert (
        found_by(trainer_of(gpt2(), NanLocatorCallback(on_bad="recover"), cls=AlwaysFails))["iteration"] == 2
    )


def test_skip_leaves_the_update_out_and_goes_on():
    model, weights = gpt2(), []

    class Weights(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            weights.append(model.transformer.wte.weight.detach().clone())

    callback = NanLocatorCallback(on_bad="skip")
    trainer = trainer_of(model, callback, Weights(), cls=AlwaysFails)
    trainer.train()
    assert [v["iteration"] for v in callback.verdicts] == [2]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
    assert trainer.state.global_step == 4
    assert all(p.isfinite().all() for p in model.parameters())


def test_report_writes_every_verdict_and_goes_on():
    model = gpt2()
    callback = NanLocatorCallback(on_bad="report")
    trainer = trainer_of(model, callback, cls=AlwaysFails)
    trainer.train()
    assert trainer.state.global_step == 4
    assert [v["iteration"] for v in callback.verdicts] == [2, 3, 4]  # the weights are NaN from step 2 on
    assert not model.transformer.wte.weight.isfinite().all()


# --- fp16's loss scale -------------------------------------------------------------------------------


def with_loss_scaler(trainer, scale):
    """accelerate makes a loss scaler only on CUDA, but uses it in the same way on the CPU."""
    accelerator = trainer.accelerator
    accelerator.scaler = torch.amp.GradScaler(
        "cpu" if USES_CPU else "cuda", init_scale=scale, growth_interval=1000
    )
    accelerator.unscale_gradients = lambda: accelerator.scaler.unscale_(trainer.optimizer.optimizer)
    return accelerator.scaler


def test_overflows_with_which_the_scaler_looks_for_its_scale_are_dismissed():
    model = gpt2()
    callback = NanLocatorCallback()
    trainer = trainer_of(model, callback, max_steps=8)
    scaler = with_loss_scaler(trainer, 2.0**127)
    start = [p.clone() for p in model.parameters()]
    # Large gradients: the first few steps overflow, then the scale fits.
    model.transformer.h[0].attn.c_attn.weight.register_hook(lambda g: g * 256.0)
    trainer.train()
    assert callback.dismissed > 0 and callback.verdicts == []
    assert scaler.get_scale() == 2.0 ** (127 - callback.dismissed)
    assert callback.dismissed < 8 and not torch.equal(start[0], next(model.parameters()))


def test_a_loss_that_is_not_finite_is_no_doing_of_the_scaler():
    trainer = trainer_of(gpt2(), NanLocatorCallback(), cls=AlwaysFails)
    with_loss_scaler(trainer, 1024.0)
    assert found_by(trainer)["iteration"] == 2


def test_an_overflow_below_scale_one_is_a_finding():
    model = gpt2()
    trainer = trainer_of(model, NanLocatorCallback(), max_steps=2)
    with_loss_scaler(trainer, 0.5)
    model.transformer.h[0].attn.c_attn.weight.register_hook(lambda g: g * INF)
    assert only_origin(found_by(trainer))["cause"] == "user_hook"


def test_skip_keeps_the_scaler_going():
    callback = NanLocatorCallback(on_bad="skip")
    trainer = trainer_of(gpt2(), callback, cls=AlwaysFails)
    scaler = with_loss_scaler(trainer, 1024.0)
    trainer.train()
    assert [v["iteration"] for v in callback.verdicts] == [2]
    assert (trainer.state.global_step, scaler.get_scale()) == (4, 512.0)


# --- the life of a Trainer ---------------------------------------------------------------------------


def is_untouched(trainer):
    step = trainer.optimizer.step
    return (
        "training_step" not in vars(trainer)
        and "nanlocator" not in getattr(step, "func", step).__module__
        and nn.Module.__call__.__module__.startswith("torch")
    )


def test_each_train_is_a_run_of_its_own_and_leaves_no_hook():
    gc.collect()
    callback = NanLocatorCallback()
    trainer = trainer_of(gpt2(), callback)
    for expected in ("a0", "a1"):
        trainer.train()
        assert Path(callback.run_dir).name == expected
        assert is_untouched(trainer)
        trainer.evaluate()
    assert callback.verdicts == []


def test_hooks_are_off_after_an_error_and_training_can_begin_again():
    gc.collect()
    callback = NanLocatorCallback()
    trainer = trainer_of(gpt2(), callback, cls=FailsOnce)
    assert found_by(trainer)["iteration"] == 2
    assert is_untouched(trainer)
    trainer.train()
    assert [v["iteration"] for v in callback.verdicts] == [2]


def test_an_error_of_the_model_goes_on_its_way():
    def fail():
        raise KeyError("the user's own")

    gc.collect()
    trainer = trainer_of(gpt2(), NanLocatorCallback(), AtStep(2, fail))
    with pytest.raises(KeyError, match="the user's own"):
        trainer.train()
    assert is_untouched(trainer)


def test_what_is_bad_in_evaluation_is_no_finding_of_training():
    trainer = trainer_of(gpt2(), callback := NanLocatorCallback(), eval_strategy="steps", eval_steps=1)
    trainer.eval_dataset = [{"inputs_embeds": torch.full((8, 16), NAN), "labels": torch.arange(8)}] * 4
    trainer.train()
    assert callback.verdicts == [] and trainer.state.global_step == 4


def test_a_resumed_run_counts_its_steps_on():
    arguments = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer_of(gpt2(), NanLocatorCallback(), **{**arguments, "max_steps": 2}).train()
    healthy = gpt2()
    trainer_of(healthy, **arguments).train(resume_from_checkpoint="out/checkpoint-2")
    resumed = gpt2()
    trainer_of(resumed, NanLocatorCallback(), **arguments).train(resume_from_checkpoint="out/checkpoint-2")
    assert same_bits(healthy, resumed)
    model = gpt2()

    def plant():
        model.lm_head.weight.register_hook(lambda g: g * NAN)

    trainer = trainer_of(model, NanLocatorCallback(), AtStep(4, plant), **arguments)
    with pytest.raises(NonFiniteGradientError) as raised:
        trainer.train(resume_from_checkpoint="out/checkpoint-2")
    verdict = raised.value.verdict
    assert (verdict["iteration"], verdict["launch"]["loaded"]) == (4, "checkpoint-2")


def test_options_come_from_variables_where_no_argument_is_given(monkeypatch):
    monkeypatch.setenv("NANLOCATOR_OUTPUT_DIR", "elsewhere")
    monkeypatch.setenv("NANLOCATOR_ON_BAD", "report")
    callback = NanLocatorCallback()
    trainer_of(gpt2(), callback, cls=AlwaysFails).train()
    assert callback.run_dir == "elsewhere/a0" and len(callback.verdicts) == 3


# --- wrong use ---------------------------------------------------------------------------------------


def test_a_trainer_with_a_train_of_its_own_is_refused():
    class Own(Trainer):
        def train(self):
            self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)

    with pytest.raises(nanlocator.UsageError, match="LocatingOptimizer"):
        trainer_of(gpt2(), NanLocatorCallback(), cls=Own).train()


def test_a_second_callback_in_one_trainer_is_refused():
    with pytest.raises(nanlocator.UsageError, match="keep one"):
        trainer_of(gpt2(), NanLocatorCallback(), NanLocatorCallback()).train()


def test_one_callback_follows_one_trainer_at_a_time():
    callback = NanLocatorCallback()
    inner = trainer_of(gpt2(), callback)
    outer = trainer_of(gpt2(), callback, AtStep(1, inner.train))
    with pytest.raises(nanlocator.UsageError, match="give each Trainer its own"):
        outer.train()


@pytest.mark.parametrize(
    "options, text",
    [
        ({"on_bad": "panic"}, "panic"),
        ({"rerun": "sometimes"}, "'always'"),
    ],
)
def test_options_that_cannot_work_are_refused(options, text):
    with pytest.raises(nanlocator.UsageError, match=text):
        trainer_of(gpt2(), NanLocatorCallback(**options)).train()


@pytest.mark.parametrize(
    "kind, n_gpu, optim, text",
    [
        ("FSDP", 1, "adamw_torch", "which FSDP keeps elsewhere or in shards"),
        ("DEEPSPEED", 1, "adamw_torch", "installs nanlocator.deepspeed"),
        ("NO", 2, "adamw_torch", "start the script with torchrun"),
        ("NO", 1, "adalomo", "updates weights during backward"),
        ("NO", 1, "galore_adamw_layerwise", "updates weights during backward"),
    ],
)
def test_gradients_that_cannot_be_scanned_are_refused(kind, n_gpu, optim, text):
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(distributed_type=DistributedType(kind)),
        args=SimpleNamespace(n_gpu=n_gpu, optim=OptimizerNames(optim)),
    )
    with pytest.raises(nanlocator.UsageError, match=text):
        check(trainer)


def test_an_optimizer_that_scans_itself_is_refused():
    model = gpt2()
    optimizer = nanlocator.LocatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    trainer = trainer_of(model, NanLocatorCallback(), optimizers=(optimizer, None))
    with pytest.raises(nanlocator.UsageError, match="pass the optimizer inside it"):
        trainer.train()


def test_without_transformers_the_package_works_and_the_callback_says_what_to_install():
    script = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "accelerate"):
            raise ImportError(f"No module named {name!r}")
sys.meta_path.insert(0, Hidden())
import nanlocator.transformers as nt
nt.DebugUnderflowOverflow, nt.no_autocast
for use in (lambda: nt.NanLocatorCallback, nt.patch):
    try:
        use()
    except ImportError as error:
        assert "pip install transformers accelerate" in str(error), error
    else:
        raise SystemExit("no error")
print("fine")
"""
    Path("script.py").write_text(script)
    result = run_python("script.py")
    assert result.stdout == "fine\n", result.stderr
