"""Reads pickles without executing them.

Python's unpickler imports and calls whatever a pickle names. This one knows the opcodes alone: a global
becomes a `Named`, a call of one a `Call` with its arguments, and nothing is imported or called. So a pickle
with any classes can be read, a hostile one included; whoever reads the result decides what a call means.

The opcodes are those of Lib/pickletools.py, protocols 0 to 5. A memo is a dictionary, keys of dictionaries
are hashed only if that takes constant time, and nothing recurses.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanlocator.check_checkpoint.sources import Source, UnreadError

__all__ = ["MOST_BYTES", "Call", "Named", "Reader"]

MOST_BYTES = 1 << 30  # of one pickle: real ones of large runs have some 100 MB
_MOST_OPCODES = 100_000_000
_MOST_DIGITS = 1024
_LONGEST_KEY = 16  # elements of a tuple; a longer one could be looked at over and over
_BLOCK = 1 << 16
_ASK_EVERY = 1 << 14  # opcodes between two looks at the clock


@dataclass(frozen=True, slots=True)
class Named:
    """What ``import module; module.name`` would give."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Call:
    """An object that a pickle would make by ``function(*arguments)``."""

    function: Any
    arguments: tuple[Any, ...]
    state: Any = None  # for __setstate__ or __dict__
    items: list[Any] = field(default_factory=list)  # appended to it
    pairs: dict[Any, Any] = field(default_factory=dict)  # set in it


class _Mark:
    pass


_MARK = _Mark()
_EMPTY_CONTAINERS: dict[tuple[str, str], Callable[[], Any]] = {
    ("collections", "OrderedDict"): dict,
    ("collections", "defaultdict"): dict,
    ("collections", "Counter"): dict,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("builtins", "set"): list,
    ("builtins", "frozenset"): list,
    ("__builtin__", "set"): list,
}
_PASSED_ON = {("torch", "Size"), ("builtins", "tuple"), ("builtins", "list"), ("builtins", "set")}


class Reader:
    """Reads the pickles that follow each other in ``source`` from ``offset`` on; ``offset`` is then the byte
    after the last one. ``persistent`` makes an object of a persistent id. ``keep_on`` raises if the time is
    up."""

    def __init__(
        self,
        source: Source,
        offset: int,
        end: int,
        persistent: Callable[[Any], Any],
        keep_on: Callable[[], None],
    ) -> None:
        self.offset = offset
        self._source, self._end, self._persistent, self._keep_on = source, end, persistent, keep_on
        self._block, self._block_offset = b"", offset
        self._named: dict[tuple[str, str], Named] = {}

    def next(self) -> Any:
        """The next pickle's object. Raises UnreadError if it is none."""
        began = self.offset
        try:
            return self._run(began)
        except UnreadError:
            raise
        except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error) as error:
            raise UnreadError(
                f"no valid pickle: {type(error).__name__} at byte {self.offset} ({str(error)[:100]})"
            ) from error

    # --- bytes ---

    def _bytes(self, length: int) -> bytes:
        start = self.offset - self._block_offset
        if start + length <= len(self._block):
            self.offset += length
            return self._block[start : start + length]
        if self.offset + length > self._end:
            raise UnreadError(f"the pickle is cut off at byte {self._end}: truncated or damaged")
        wanted = max(length, min(_BLOCK, self._end - self.offset))
        self._block, self._block_offset = self._source.read(self.offset, wanted), self.offset
        self.offset += length
        return self._block[:length]

    def _line(self) -> str:
        line = bytearray()
        while (byte := self._bytes(1)) != b"\n":
            line += byte
            if len(line) > _BLOCK:
                raise UnreadError(f"no valid pickle: a line without an end at byte {self.offset}")
        return line.decode("utf-8", "replace")

    def _number(self, layout: str, length: int) -> Any:
        return struct.unpack(layout, self._bytes(length))[0]

    def _sized(self, layout: str, length: int) -> bytes:
        return self._bytes(self._number(layout, length))

    def _text(self, layout: str, length: int) -> str:
        return self._sized(layout, length).decode("utf-8", "surrogatepass")

    # --- objects ---

    def _global(self, module: Any, name: Any) -> Named:
        if not isinstance(module, str) or not isinstance(name, str):
            raise UnreadError(f"no valid pickle: a global without a name at byte {self.offset}")
        return self._named.setdefault((module, name), Named(module, name))

    @staticmethod
    def _called(function: Any, arguments: Any) -> Any:
        if not isinstance(arguments, tuple):
            arguments = (arguments,)
        if isinstance(function, Named):
            key = (function.module, function.name)
            if key in _PASSED_ON and len(arguments) == 1 and isinstance(arguments[0], (tuple, list)):
                return arguments[0]
            # OrderedDict(items) and the like keep their arguments as a Call.
            if (
                key in _EMPTY_CONTAINERS
                and len(arguments) < _LONGEST_KEY
                and not any(isinstance(each, (dict, list, tuple)) for each in arguments)
            ):
                return _EMPTY_CONTAINERS[key]()
        return Call(function, arguments)

    @staticmethod
    def _key(key: Any) -> Any:
        """Hashing a nested tuple may take time without end."""
        if isinstance(key, tuple) and len(key) < _LONGEST_KEY:
            if all(isinstance(each, (str, int, float, bytes, Named)) for each in key):
                return key
        if key is None or isinstance(key, (str, int, float, bytes, Named, Call)):
            return key
        return Call(None, (key,))

    @classmethod
    def _extend(cls, target: Any, items: list[Any]) -> None:
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, Call):
            target.items.extend(items)
        else:
            raise TypeError(f"items for a {type(target).__name__}")

    @classmethod
    def _set(cls, target: Any, items: list[Any]) -> None:
        pairs = target if isinstance(target, dict) else target.pairs
        for key, value in zip(items[::2], items[1::2], strict=True):
            pairs[cls._key(key)] = value

    # --- the machine ---

    def _run(self, began: int) -> Any:
        stack: list[Any] = []
        memo: dict[int, Any] = {}
        opcodes = 0

        def above_mark() -> list[Any]:
            at = len(stack) - 1
            while stack[at] is not _MARK:
                at -= 1
                if at < 0:
                    raise UnreadError(f"no valid pickle: no mark at byte {self.offset}")
            found = stack[at + 1 :]
            del stack[at:]
            return found

        while True:
            opcodes += 1
            if opcodes % _ASK_EVERY == 0:
                self._keep_on()
            if opcodes > _MOST_OPCODES or self.offset - began > MOST_BYTES:
                raise UnreadError(
                    f"a pickle with more than {_MOST_OPCODES} operations or {MOST_BYTES} bytes is not read"
                )
            code = self._bytes(1)
            match code:
                case b"h":
                    stack.append(memo[self._bytes(1)[0]])
                case b"q":
                    memo[self._bytes(1)[0]] = stack[-1]
                case b"r":
                    memo[self._number("<I", 4)] = stack[-1]
                case b"\x94":
                    memo[len(memo)] = stack[-1]
                case b"j":
                    stack.append(memo[self._number("<I", 4)])
                case b"K":
                    stack.append(self._bytes(1)[0])
                case b"M":
                    stack.append(self._number("<H", 2))
                case b"J":
                    stack.append(self._number("<i", 4))
                case b"X":
                    stack.append(self._text("<I", 4))
                case b"\x8c":
                    stack.append(self._text("<B", 1))
                case b"(":
                    stack.append(_MARK)
                case b")":
                    stack.append(())
                case b"}":
                    stack.append({})
                case b"]" | b"\x8f":  # lists, sets
                    stack.append([])
                case b"t":
                    stack.append(tuple(above_mark()))
                case b"\x85":
                    stack[-1:] = [(stack[-1],)]
                case b"\x86":
                    stack[-2:] = [(stack[-2], stack[-1])]
                case b"\x87":
                    stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
                case b"R":
                    arguments = stack.pop()
                    stack[-1] = self._called(stack[-1], arguments)
                case b"\x81":  # NEWOBJ
                    arguments = stack.pop()
                    stack[-1] = self._called(stack[-1], arguments)
                case b"\x92":  # NEWOBJ_EX
                    keywords = stack.pop()
                    arguments = stack.pop()
                    stack[-1] = Call(stack[-1], (arguments, keywords))
                case b"b":
                    state = stack.pop()
                    if isinstance(stack[-1], Call):
                        stack[-1].state = state if stack[-1].state is None else (stack[-1].state, state)
                case b"c":
                    module = self._line()
                    stack.append(self._global(module, self._line()))
                case b"\x93":
                    name = stack.pop()
                    stack[-1] = self._global(stack[-1], name)
                case b"Q":
                    stack[-1] = self._persistent(stack[-1])
                case b"P":
                    stack.append(self._persistent(self._line()))
                case b"a":
                    item = stack.pop()
                    self._extend(stack[-1], [item])
                case b"e" | b"\x90":  # APPENDS, ADDITEMS
                    items = above_mark()
                    self._extend(stack[-1], items)
                case b"s":
                    pair = stack[-2:]
                    del stack[-2:]
                    self._set(stack[-1], pair)
                case b"u":
                    items = above_mark()
                    self._set(stack[-1], items)
                case b"N":
                    stack.append(None)
                case b"\x88":
                    stack.append(True)
                case b"\x89":
                    stack.append(False)
                case b"G":
                    stack.append(self._number(">d", 8))
                case b"\x8a":
                    stack.append(int.from_bytes(self._sized("<B", 1), "little", signed=True))
                case b"\x8b":
                    length = self._number("<i", 4)
                    if not 0 <= length <= _MOST_DIGITS:
                        raise UnreadError(
                            f"no valid pickle: a number of {length} bytes at byte {self.offset}"
                        )
                    stack.append(int.from_bytes(self._bytes(length), "little", signed=True))
                case b"B" | b"T":
                    stack.append(self._sized("<I", 4))
                case b"C" | b"U":
                    stack.append(self._sized("<B", 1))
                case b"\x8d":
                    stack.append(self._text("<Q", 8))
                case b"\x8e" | b"\x96":  # bytes, bytearray
                    stack.append(self._sized("<Q", 8))
                case b"\x80":
                    if self._bytes(1)[0] > 5:
                        raise UnreadError(f"no pickle of protocols 0 to 5 at byte {began}")
                case b"\x95":
                    self._bytes(8)
                case b"0":
                    stack.pop()
                case b"1":
                    above_mark()
                case b"2":
                    stack.append(stack[-1])
                case b"l":
                    stack.append(above_mark())
                case b"d":
                    items = above_mark()
                    stack.append({})
                    self._set(stack[-1], items)
                case b"\x91":
                    stack.append(above_mark())
                case b"p":
                    memo[int(self._line()[:_MOST_DIGITS])] = stack[-1]
                case b"g":
                    stack.append(memo[int(self._line()[:_MOST_DIGITS])])
                case b"I" | b"L":
                    text = self._line().rstrip("L")
                    if len(text) > _MOST_DIGITS:
                        raise UnreadError(f"no valid pickle: a number of {len(text)} digits")
                    stack.append({"00": False, "01": True}[text] if text in ("00", "01") else int(text))
                case b"F":
                    stack.append(float(self._line()))
                case b"V" | b"S":
                    stack.append(self._line().strip("'\""))
                case b"i":
                    module = self._line()
                    function = self._global(module, self._line())
                    stack.append(self._called(function, tuple(above_mark())))
                case b"o":
                    function, *rest = above_mark()
                    stack.append(self._called(function, tuple(rest)))
                case b".":
                    return stack.pop()
                case _:
                    raise UnreadError(
                        f"no valid pickle: 0x{code[0]:02x} at byte {self.offset - 1} is no operation that "
                        "can be read without executing it"
                    )
