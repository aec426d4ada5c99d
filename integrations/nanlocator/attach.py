"""Attaches ``watch`` to the models that a process trains, without edits of its script.

    python -m nanlocator train.py ARGS...
    NANLOCATOR=1 torchrun --nproc-per-node 8 train.py ARGS...

It notes optimizers when they are constructed. At the first call of a module that has their parameters, the
first backward that reaches one of them, or their first update, it watches them and the modules that hold
those parameters. For Megatron and DeepSpeed it installs their own integrations instead, and it does nothing
if the script itself sets up ``LocatingOptimizer``, ``watch`` or the Trainer's callback.
"""

import atexit
import contextlib
import functools
import gc
import multiprocessing
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nanlocator import _C, deepspeed_scripts
from nanlocator.calls.modules import class_name, named_by_class
from nanlocator.engine.checkpoint_files import CheckpointFiles
from nanlocator.engine.connection import meet
from nanlocator.engine.driver import Driver
from nanlocator.engine.endings import first_line
from nanlocator.engine.options import resolve_options
from nanlocator.engine.this_rank import is_distributed, log, log_once
from nanlocator.hooks import points
from nanlocator.hooks.patches import Patches
from nanlocator.loops.loaded_batches import LoadedBatches
from nanlocator.loops.optimizer import LocatingOptimizer
from nanlocator.loops.plain import held_parameters, parameters_of
from nanlocator.loops.watch import Watch
from nanlocator.megatron import scripts as megatron_scripts
from nanlocator.sharding.pipelining import follow_steps, stages_of

_PATIENCE = 4  # gather_deadlines: of ranks that begin to train at different times

# Programs that start other processes, which inherit the variable.
_STARTERS = ("torch.distributed", "accelerate.", "lightning.fabric", "ray.", "deepspeed.")


@functools.cache
def follow_process() -> "Attachment":
    """Starts the attachment, once per process."""
    return Attachment()


class Attachment:
    """Attributes:
    watch: the present watch; None before a module that is trained is called, or a backward reaches it.
    """

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._others: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules without their parameters
        self._without_module: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._has_seen_optimizer = self._has_attached = False
        self._patches = Patches(__name__)
        self._waiting = Patches(__name__)  # waits for the first use of what an optimizer trains
        self._waiting_for: set[type[Optimizer]] = set()
        self._is_waiting = False
        self._meetings = 0  # of all ranks
        self._is_alone = False  # one of them has failed
        self._follow_new_optimizers()
        self._batches = LoadedBatches()
        self._files = CheckpointFiles(lambda: None, lambda: ())  # until a watch follows them itself
        megatron_scripts.follow()
        deepspeed_scripts.follow()
        atexit.register(self._say_if_nothing)

    def _follow_new_optimizers(self) -> None:
        def init(original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._optimizers.add(optimizer)
            when_dropped = weakref.finalize(optimizer, self._drop_left_watch)
            when_dropped.atexit = False
            self._has_seen_optimizer = True
            self._wait_for_call()
            self._wait_for_step(type(optimizer))

        def enter_join(original: Any, join: Any) -> Any:
            if join._enable and not self._is_alone:  # ranks make different numbers of steps in it
                self._is_alone = True
                self._stop_waiting()
                if self.watch is None:
                    log("not attached: in torch.distributed.algorithms.Join, ranks step unequally often")
            return original(join)

        self._patches.wrap(points.OPTIMIZER_INIT, init)
        if torch.distributed.is_available():
            self._patches.wrap(points.JOIN, enter_join)

    def _wait_for_call(self) -> None:
        """Waits for a call of a module that an optimizer trains, or a backward through its parameters."""
        if self._is_waiting or self._is_alone:
            return
        self._is_waiting = True

        def around(original: Any) -> Any:
            def call(module: nn.Module, args: Any, kwargs: Any) -> Any:
                if self._is_waiting and torch.is_grad_enabled() and self._attach_to(module):
                    return nn.Module.__call__(module, *args, **kwargs)  # the recorder has wrapped it now
                return original(module, *args, **kwargs)

            return call

        def step(original: Any, schedule: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_waiting and torch.is_grad_enabled():
                for stage in stages_of(schedule):
                    if self._attach_to(stage.submod):
                        return schedule.step(*args, **kwargs)  # the watch has wrapped it now
            return original(schedule, *args, **kwargs)

        def backward(original: Any, roots: Any, *args: Any, **kwargs: Any) -> Any:
            is_training = self._is_waiting and kwargs.get("accumulate_grad", False)
            if (
                is_training
                and not _is_in_transform()
                and not self._trained().isdisjoint(_leaves_of(roots))
                and self._attach()
            ):
                point = points.RUN_BACKWARD  # the recorder has wrapped it now
                return getattr(point.find_owner(), point.attribute)(roots, *args, **kwargs)
            return original(roots, *args, **kwargs)

        def functional(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._is_waiting and torch.is_grad_enabled() and self._attach_to(module):
                point = points.FUNCTIONAL_CALL  # the recorder has wrapped it now
                return getattr(point.find_owner(), point.attribute)(module, *args, **kwargs)
            return original(module, *args, **kwargs)

        self._waiting.wrap(points.MODULE_CALL, around)
        self._waiting.wrap(points.FUNCTIONAL_CALL, functional)
        self._waiting.wrap(points.RUN_BACKWARD, backward)
        follow_steps(self._waiting, step)

    def _stop_waiting(self) -> None:
        self._is_waiting = False
        self._waiting.remove()
        self._waiting_for.clear()

    def _wait_for_step(self, kind: type[Optimizer]) -> None:
        """Waits for the first update of an optimizer of this class: its closure may hold all that is trained,
        and the gradients may be the program's own. Optimizers themselves stay as they are until then: the
        program may have wrapped their ``step``, or take over their attributes."""
        if kind in self._waiting_for or self._is_alone:
            return

        def step(original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._is_waiting and optimizer in self._own_optimizers():
                has_gradients = _has_gradients(optimizer)
                is_attached = (has_gradients or self._has_closure(optimizer, args, kwargs)) and self._attach()
                if is_attached and self.watch is not None:
                    if has_gradients:
                        self.watch.take_earlier_gradients()
                    return self.watch.around_step(
                        optimizer, functools.partial(original, optimizer), *args, **kwargs
                    )
            return original(optimizer, *args, **kwargs)

        with contextlib.suppress(Exception):  # a class may refuse to set it
            self._waiting.wrap(points.OPTIMIZER_STEP, step, of=kind)
            self._waiting_for.add(kind)

    def _has_closure(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a closure is given that may train a module. FSDP may have left the optimizer parameters
        that no module holds."""
        if optimizer in self._without_module or not any(map(callable, (*args, *kwargs.values()))):
            return False
        has_module = bool(_roots_of(self._trained()))
        if not has_module:
            self._without_module.add(optimizer)
        return has_module

    def _attach_to(self, module: nn.Module) -> bool:
        """Returns whether the module is watched from now on."""
        if module in self._others or _is_in_transform():
            return False
        if self._trained().isdisjoint(held_parameters([module])):
            self._others.add(module)
            return False
        return self._attach()

    def _own_optimizers(self) -> list[Optimizer]:
        return [each for each in self._optimizers if not isinstance(each, LocatingOptimizer)]

    def _trained(self) -> set[torch.Tensor]:
        return {p for each in self._own_optimizers() for p in parameters_of(each)}

    def _attach(self) -> bool:
        """Returns whether the program's training is watched from now on."""
        self._stop_waiting()
        self._files.remove()
        if Driver.number_made > (self.watch is not None):
            return False  # the script has its own scan
        if self.watch is not None and self.watch.take_optimizers(self._own_optimizers()):
            return True
        if not self._meet():
            return False
        if self.watch is not None:  # an optimizer of another model was constructed since
            self.watch.remove()
            self.watch = None
            Driver.number_made = 0
            gc.collect()  # an earlier model that the program has dropped
        optimizers, trained = self._own_optimizers(), self._trained()
        models = _roots_of(trained)
        differentiated = set() if models else _with_gradients()
        trains_copies = bool(differentiated)  # the program keeps float32 copies of the parameters
        models = models or _roots_of(differentiated) or {"": nn.Module()}  # bare parameters
        try:
            self.watch = Watch(models, optimizers, {}, trains_copies=trains_copies, batches=self._batches)
        except (_C.Error, OSError) as error:
            log(f"not attached: {error}")
            return False
        self.watch.begins_unrecorded()
        Driver.number_made = 1
        self._has_attached = True
        names = ", ".join(type(each).__name__ for each in optimizers)
        trained = differentiated or trained
        missing = len(trained - held_parameters(models.values()))
        log_once(
            f"attached to {names} and {', '.join(map(class_name, models.values()))} "
            f"({len(trained)} parameters{f', {missing} of them without a name' if missing else ''})"
            f"{_on_ranks()}; findings go to {self.watch.run_dir}"
        )
        return True

    def _meet(self) -> bool:
        """Whether all ranks attach. If some train something that others do not, or if one waits for another
        before it begins, connecting would stop the program."""
        if not is_distributed():
            return True
        self._meetings += 1
        patience = _PATIENCE * resolve_options({}, "watch").gather_deadline
        self._is_alone = True
        try:
            if meet(f"attach {self._meetings}", patience):
                self._is_alone = False
                return True
        except Exception as error:  # there is no Store, or one without these operations
            log(f"not attached: {first_line(error)}")
            return False
        remains = "" if self.watch is None else "; what it has followed so far it follows on"
        log(
            f"not attached: not all ranks had begun to train this after {patience.total_seconds():.0f} s. "
            f"Ranks that do not train alike need nanlocator.watch(model, optimizer), called on each{remains}"
        )
        return False

    def _drop_left_watch(self) -> None:
        """Does not keep a model alive that the program has dropped. Another optimizer may be about to join
        the watch."""
        if self.watch is not None and self.watch.is_left and not self._own_optimizers():
            self.watch.remove()
            self.watch = None
            Driver.number_made = 0

    def _say_if_nothing(self) -> None:
        if (
            self._has_attached
            or self._is_alone
            or Driver.number_made > 0
            or multiprocessing.parent_process() is not None
        ):
            return
        spec = getattr(sys.modules.get("__main__"), "__spec__", None)
        if spec is not None and f"{spec.name}.".startswith(_STARTERS):
            return
        what = (
            "no module that an optimizer trains was called"
            if self._has_seen_optimizer
            else "no optimizer was created"
        )
        log(f"attached to nothing: {what}")


def _on_ranks() -> str:
    return f" on {torch.distributed.get_world_size()} ranks" if is_distributed() else ""


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for p in parameters_of(optimizer))


def _with_gradients() -> set[torch.Tensor]:
    """The parameters of modules that have gradients."""
    return {p for each in _modules() for p in each.parameters(recurse=False) if p.grad is not None}


def _is_in_transform() -> bool:
    """Whether a transform of torch.func runs. What is made inside it belongs to it."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _leaves_of(roots: Any) -> Iterator[torch.Tensor]:
    """The leaves into which a backward from these tensors adds gradients."""
    tensors = _C.tensors_in(roots)
    yield from (each for each in tensors if each.grad_fn is None)
    waiting = [each.grad_fn for each in tensors if each.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _modules() -> list[nn.Module]:
    return [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]


def _roots_of(trained: set[torch.Tensor]) -> dict[str, nn.Module]:
    """The outermost modules of this process that hold these parameters, as few as possible; with several,
    each is named by its class."""
    modules = _modules()
    children = {id(child) for each in modules for child in each.__dict__.get("_modules", {}).values()}
    roots = [each for each in modules if id(each) not in children and "_parameters" in each.__dict__]
    held = {id(root): trained.intersection(held_parameters([root])) for root in roots}
    roots.sort(key=lambda root: len(held[id(root)]), reverse=True)
    chosen: list[nn.Module] = []
    left = set(trained)
    for root in roots:
        if not left.isdisjoint(held[id(root)]):
            chosen.append(root)
            left -= held[id(root)]
    return named_by_class(chosen)
