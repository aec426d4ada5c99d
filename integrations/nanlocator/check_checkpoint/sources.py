"""The bytes of a checkpoint: regular files, and what is kept in memory."""

import contextlib
import mmap
import os
import stat
from pathlib import Path

__all__ = ["Bytes", "File", "Source", "UnreadError"]


_MAP_NORESERVE = 0x4000  # Linux; in mmap from Python 3.13 on


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
                f"{length} bytes at byte {offset} are expected, but it has {self.size} bytes: truncated or "
                "damaged"
            )


class File(Source):
    """A regular file, opened at its first read. `close` lets it be opened again: a checkpoint may have more
    files than a process may open. Devices, pipes and sockets are refused before anything is read. `open`,
    `map` and `close` by one thread at a time; reads by any number."""

    def __init__(self, path: Path, label: str) -> None:
        self.path, self.label = path, label
        self._descriptor: int | None = None
        self._mapping: mmap.mmap | None = None
        self.size = os.fstat(self.open()).st_size

    def open(self) -> int:
        if self._descriptor is None:
            try:
                # O_NONBLOCK: opening a pipe would wait for its writer.
                descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError as error:
                raise UnreadError(f"cannot be opened: {error.strerror}") from error
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise UnreadError("is not a regular file")
            self._descriptor = descriptor
        return self._descriptor

    def map(self) -> mmap.mmap | None:
        """All of it in memory, read when it is looked at. An error of the file system, or a file that
        somebody truncates meanwhile, is then a SIGBUS. None: it cannot be mapped, but perhaps be read."""
        if self._mapping is None:
            flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
            with contextlib.suppress(OSError, ValueError, UnreadError):
                # Writable, though nobody writes, because torch warns of memory that is not.
                self._mapping = mmap.mmap(self.open(), self.size, flags, mmap.PROT_READ | mmap.PROT_WRITE)
                self._mapping.madvise(mmap.MADV_SEQUENTIAL)
        return self._mapping

    def read_into(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self.open(), [buffer[done:]], offset + done)
            except OSError as error:
                raise UnreadError(f"cannot be read at byte {offset + done}: {error.strerror}") from error
            if got == 0:
                raise UnreadError(
                    f"ends at byte {offset + done}, before byte {offset + len(buffer)}: truncated"
                )
            done += got

    def close(self) -> None:
        self._mapping = None  # unmapped when no tensor looks at it any more
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
