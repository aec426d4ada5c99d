"""The object that a program holds of its integration; all integrations share it."""

from typing import Any

from nanlocator import _C
from nanlocator.engine.driver import Driver
from nanlocator.engine.this_rank import log_once
from nanlocator.engine.verdict import Verdict
from nanlocator.state.rerun import ObjectState, Stateful

_INSTALLED = "_nanlocator"  # attribute of a framework's object that holds the installed locator


class Locator:
    """The findings of one ``Driver``, and the program's own state that a re-run restores.

    Attributes:
        verdicts: the findings so far, oldest first.
        run_dir: the folder of the run.
        dismissed: number of routine overflows of a dynamic loss scale, which are not findings.
    """

    _driver: Driver

    @property
    def verdicts(self) -> list[Verdict]:
        return self._driver.adapter.verdicts

    @property
    def run_dir(self) -> str:
        return self._driver.run_dir

    def __repr__(self) -> str:
        number = len(self.verdicts)
        findings = "no finding" if number == 0 else f"{number} finding{'s' if number > 1 else ''}"
        return f"<{type(self).__name__}: step {self._driver.step_number}, {findings}, {self.run_dir}>"

    @property
    def dismissed(self) -> int:
        return self._driver.locator.dismissed

    def register_state(self, name: str, owner: Stateful) -> None:
        """Registers an object with ``state_dict`` and ``load_state_dict`` that the program's forward changes,
        such as a sampler. It is restored before a bad step is executed again; the verdict names state that
        cannot be restored."""
        self._driver.add_state(name, ObjectState(owner))


class InstalledLocator(Locator):
    """A locator that is installed on one object of a framework, the ``owner``. An owner has at most one."""

    _owner: Any

    @staticmethod
    def check_owner(owner: Any, kind: str) -> None:
        """Raises ``nanlocator.UsageError`` if ``owner`` (an ``"engine"``, for example) has a locator."""
        if hasattr(owner, _INSTALLED):
            raise _C.UsageError(
                f"nanlocator is already installed on this {kind}; to install it with other options, call "
                "locator.remove() first"
            )

    def remove(self) -> None:
        """Removes every hook and closes the connection. Collective; call it on every rank."""
        if getattr(self._owner, _INSTALLED, None) is not self:
            return
        self._remove_hooks()
        delattr(self._owner, _INSTALLED)
        self._driver.close()

    def _remove_hooks(self) -> None:
        raise NotImplementedError

    def _install_on(self, owner: Any, watched: str, options: _C.LocatorOptions) -> None:
        self._owner = owner
        setattr(owner, _INSTALLED, self)
        log_once(
            f"watching {watched}, level {options.level}, on_bad={options.on_bad}; findings go to "
            f"{self.run_dir}"
        )
        if options.not_covered:
            log_once("not seen in this configuration: " + "; ".join(options.not_covered))
