"""A count for faults that stand for broken memory: it is no state of the program that nanlocator could see
move, because then it would, rightly, accuse no machine."""


class UnseenCount:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def one_more(self) -> int:
        self.value += 1
        return self.value
