"""A cache of bytes in a folder, by name. A file that is unreadable, cut short or changed counts as absent.

Several processes may share a folder: files are written beside and renamed into place, and a reader sees a whole file or
none. The callers know what the bytes mean (cache.py, cli/layouts).
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from xfer.plan import columns as col

_DIGEST = 32
_ABANDONED_S = 3600.0


class FileCache:
    """At most `max_bytes` in files of this suffix; the least recently used go first. Thread- and process-safe.

    magic: first bytes of every file. They differ between versions of the caller's format.
    """

    def __init__(self, directory: str | os.PathLike[str], suffix: str, magic: bytes, max_bytes: int):
        self.directory, self.suffix, self.magic, self.max_bytes = Path(directory), suffix, magic, max_bytes

    def get(self, name: str) -> memoryview | None:
        """The stored bytes, or None: absent, unreadable, cut short or changed. Not copied: they may be megabytes."""
        path = self._path(name)
        head = len(self.magic) + _DIGEST
        try:
            if path.stat().st_size > col.MAX_BYTES:
                return None
            data = path.read_bytes()
        except (OSError, ValueError):  # no path can have that name: a null byte, say
            return None
        body = memoryview(data)[head:]
        if data[: len(self.magic)] != self.magic or data[len(self.magic) : head] != col.digest([body]).encode():
            return None
        with suppress(OSError):
            os.utime(path)
        return body

    def put(self, name: str, body: bytes) -> bool:
        """Store bytes. Returns whether they were stored: a full disk, a read-only folder or too many bytes are no error."""
        path, beside = self._path(name), None
        if len(self.magic) + _DIGEST + len(body) > min(self.max_bytes, col.MAX_BYTES):
            return False
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            handle, beside = tempfile.mkstemp(dir=self.directory, prefix=".", suffix=".part")
            with os.fdopen(handle, "wb") as f:
                f.writelines((self.magic, col.digest([body]).encode(), body))
            os.replace(beside, path)
        except (OSError, ValueError):
            if beside is not None:
                with suppress(OSError):
                    os.unlink(beside)
            return False
        self._shrink(keep=path)
        return True

    def _path(self, name: str) -> Path:
        if not name or not all(c in "0123456789abcdef-" for c in name):
            raise ValueError(f"{name!r} is no name of a cached file: hexadecimal digits and dashes")
        return self.directory / f"{name}{self.suffix}"

    def _shrink(self, keep: Path) -> None:
        with suppress(OSError):  # left by processes that were killed while they wrote; no write takes an hour
            for path in self.directory.glob(".*.part"):
                with suppress(OSError):
                    if path.stat().st_mtime < time.time() - _ABANDONED_S:
                        path.unlink()
        files = []
        with suppress(OSError):
            for path in self.directory.glob(f"*{self.suffix}"):
                with suppress(OSError):  # another process may remove it first
                    stat = path.stat()
                    files.append((path == keep, stat.st_mtime_ns, path.name, stat.st_size, path))
        total = sum(f[3] for f in files)
        for newest, _, _, size, path in sorted(files):
            if total <= self.max_bytes or newest:
                break
            with suppress(OSError):
                path.unlink()
                total -= size
