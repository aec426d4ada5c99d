"""The bytes of a checkpoint: regular files, and what is kept in memory."""

import os
import stat
from pathlib import Path

__all__ = ["Bytes", "File", "Source", "UnreadError", "describe"]


class UnreadError(Exception):
    """Something could not be read. The text says what and, if it is known, at which byte."""


class Source:
    """Random access to ``size`` bytes. ``label`` names them for people."""

    label: str
    size: int

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fills all of ``buffer``. Raises UnreadError if there are not that many bytes."""
        raise NotImplementedError

    def read(self, offset: int, length: int) -> bytes:
        """Allocates nothing for bytes that do not exist."""
        self.require(offset, length)
        content = bytearray(length)
        self.read_into(memoryview(content), offset)
        return bytes(content)

    def require(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise UnreadError(
                f"{length} bytes at byte {offset} are expected, but it has {self.size} bytes: truncated or damaged"
            )


class File(Source):
    """A regular file, opened at its first read. `close` lets it be opened again: a checkpoint may have more
    files than a process may open. Devices, pipes and sockets are refused before anything is read."""

    def __init__(self, path: Path, label: str) -> None:
        self.path, self.label = path, label
        self._descriptor: int | None = None
        self._open()
        self.size = os.fstat(self._require_open()).st_size

    def _open(self) -> None:
        try:
            # O_NONBLOCK: opening a pipe would wait for its writer.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise UnreadError(f"cannot be opened: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise UnreadError("is not a regular file")
        self._descriptor = descriptor

    def _require_open(self) -> int:
        if self._descriptor is None:
            self._open()
        assert self._descriptor is not None
        return self._descriptor

    def read_into(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self._require_open(), [buffer[done:]], offset + done)
            except OSError as error:
                raise UnreadError(f"cannot be read at byte {offset + done}: {error.strerror}") from error
            if got == 0:
                raise UnreadError(f"ends at byte {offset + done}, before byte {offset + len(buffer)}: truncated")
            done += got

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Bytes(Source):
    """Bytes that a pickle held, such as a file within a file."""

    def __init__(self, content: bytes, label: str) -> None:
        self._content, self.label, self.size = content, label, len(content)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        self.require(offset, len(buffer))
        buffer[:] = self._content[offset : offset + len(buffer)]


def describe(error: BaseException) -> str:
    """One line for a reason."""
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, UnreadError) else f"{type(error).__name__}: {text}"
