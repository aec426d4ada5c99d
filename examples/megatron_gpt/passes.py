"""Counts passes as broken memory does: without state of the program that a re-run could miss."""

import collections


class Passes:
    """How often each place was reached. Has no attributes in which nanlocator could see that the program's
    state moved: then it would, rightly, accuse no machine."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: collections.Counter = collections.Counter()

    def __getitem__(self, place: object) -> int:
        return self._counts[place]

    def __setitem__(self, place: object, count: int) -> None:
        self._counts[place] = count
