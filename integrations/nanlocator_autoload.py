"""Attaches nanlocator to a process that was started with NANLOCATOR=1, as soon as it has imported torch.

``nanlocator.pth`` imports this module at the interpreter's start, and only where the variable is set. It must
not import torch, nor nanlocator, which does: most of the processes that inherit the variable train nothing.
"""

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``actions[name](module)`` when the module of that name has been loaded, before anyone has it: at
    once for those that are loaded already, when its import ends for one that is being loaded (a package that
    imports torch). Finds no module by itself."""

    def __init__(self, actions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._actions = dict(actions)
        self._asked = ""  # what the other finders are asked for: another one of these asks this one
        for name in [name for name in self._actions if name in sys.modules]:
            _when_loaded(sys.modules[name], self._actions.pop(name))
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._actions or name == self._asked:
            return None
        self._asked = name
        try:
            spec = self._find_by_others(name, path, target)
        finally:
            self._asked = ""
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if (action := self._actions.pop(name, None)) is not None:
                action(module)

        spec.loader.exec_module = exec_module  # of this one loader object
        return spec

    def _find_by_others(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None) if finder is not self else None
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                return spec
        return None


def _when_loaded(module: ModuleType, action: Callable[[ModuleType], None]) -> None:
    spec = module.__spec__
    if spec is None or not getattr(spec, "_initializing", False):
        action(module)
        return
    kind = type(spec)

    class Loading(kind):  # type: ignore[misc, valid-type]
        """The import system's last word on a module (importlib/_bootstrap.py, _load_unlocked)."""

        @property
        def _initializing(self) -> bool:
            return True

        @_initializing.setter
        def _initializing(self, value: bool) -> None:
            self.__class__ = kind
            self._initializing = value
            if sys.modules.get(module.__name__) is module:  # else its import has failed
                action(module)

    spec.__class__ = Loading


@functools.cache
def follow() -> None:
    """Whatever this process trains. Once: in a virtual environment Python reads each .pth twice (site.venv,
    then site.main)."""
    AfterImport({"torch": _attach})


def _attach(_: ModuleType) -> None:
    try:
        from nanlocator import attach

        attach.follow_process()
    except Exception as error:  # the script is not ours to end
        print(f"nanlocator: not attached: {error}", file=sys.stderr, flush=True)
