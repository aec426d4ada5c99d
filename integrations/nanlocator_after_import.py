"""Calls a function with a module as soon as the module has been loaded. It is beside the package, because the
package imports torch, and ``nanlocator_autoload`` uses this to wait for torch."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``actions[name](module)`` when the module of that name has been loaded, before its importers get
    it: at once if it is loaded already, at the end of its import if that is running (a package that imports
    torch). It finds no modules itself."""

    def __init__(self, actions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._actions = dict(actions)
        self._asked = ""  # name requested from the other finders: another AfterImport asks this one
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

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader object
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

    class Loading(kind):  # type: ignore[misc, valid-type]  # a class that is known here only
        """The import system's last access to a loading module (importlib/_bootstrap.py, _load_unlocked)."""

        @property
        def _initializing(self) -> bool:
            return True

        @_initializing.setter
        def _initializing(self, value: bool) -> None:
            self.__class__ = kind  # type: ignore[assignment]  # the original class
            self._initializing = value
            if sys.modules.get(module.__name__) is module:  # otherwise its import has failed
                action(module)

    spec.__class__ = Loading
