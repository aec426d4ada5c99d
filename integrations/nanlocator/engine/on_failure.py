"""A block whose failure needs a clean-up; entered several times in each step, so no generator."""

from collections.abc import Callable


class OnFailure:
    """Calls ``clean_up`` if the block ends with an exception, which goes on."""

    __slots__ = ("_clean_up",)

    def __init__(self, clean_up: Callable[[], object]) -> None:
        self._clean_up = clean_up

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._clean_up()
