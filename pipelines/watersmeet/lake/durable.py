"""Commits that are on the disk before anything relies on them, for a lake in a folder.

Neither delta-rs nor Spark has the operating system write to the disk what they have written to a
folder: after a power cut a new file may be whole, empty, torn, filled with zeros, or absent. So
whoever makes a commit waits here until its data files, its entry in the log, and the folders that
name them are on the disk. Only then does the next layer read it, do offsets count from it, is a
message sent that follows from it, or does a command answer.

What is on the disk then gets checksums (`lake.log_files`), which say so, and say later whether it
still is what was written. They wait for the next commit to be on the disk themselves; what a power
cut leaves of them is deleted.

What a commit has added is what its entry says. A process that relies on the commits of another one
waits for them, too (`rely_on`), since the other may be about to do so, or may have died.

This is the only module that calls fsync.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, wraps
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, TypeVar

from watersmeet.errors import WatersmeetError
from watersmeet.lake.log_files import (
    CHECKPOINT,
    ENTRY,
    LAST_CHECKPOINT,
    LOG,
    actions_of,
    checksum_of,
    entry_of,
    files_named,
    names_in,
    seal,
    version_of,
)

T = TypeVar("T")

RECENT: Final = 8
"""Number of commits of a table, the last ones, that may not be on the disk when a process first
looks at it: whoever commits leaves one at most, and few processes write to a lake.
"""

_THREADS: Final = 32
"""Number of files that are waited for at a time: a disk writes several at once."""

_CANNOT: Final = frozenset([errno.EINVAL, errno.ENOTSUP])
"""What a file system says that cannot sync a folder, or anything: it keeps what it keeps."""


class Durability:
    """What sees to it that the commits of a lake are durable.

    `folder`: that of the tables. None for object stores, catalogs, and a lake that needs no such
    promise: nothing is to be done there.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._logs = dict[str, _Log]()

    def __reduce__(self) -> tuple[type[Durability], tuple[Path | None]]:
        """Pickle it without what it knows, which is of this process."""
        return Durability, (self.folder,)

    @contextmanager
    def committing(self, table: str) -> Iterator[None]:
        """Let one commit be made to a table inside the `with` block, and make it durable.

        No other thread makes one meanwhile: of two commits, none is durable before an earlier one.
        A failure, too, may leave a commit, and is raised once that is durable.
        """
        if self.folder is None:
            yield
            return
        log = self._log(self.folder, table)
        with log.committing:
            try:
                yield
            finally:
                log.sync()

    def rely_on(self, tables: Iterable[str]) -> None:
        """Make durable every commit to these tables that this process can have read."""
        if self.folder is not None:
            for table in tables:
                self._log(self.folder, table).sync()

    def _log(self, folder: Path, table: str) -> _Log:
        return self._logs.setdefault(table, _Log(folder / table))


class _Log:
    """The log of a table, and how far it is known to be durable."""

    def __init__(self, table: Path) -> None:
        self.committing = threading.RLock()
        self._table = table
        self._log = table / LOG
        self._known: int | None = None
        self._checkpoint: tuple[int, int] | None = None
        self._checksums = list[Path]()
        """Written since the last commit, and to be synced with the next one."""

    def sync(self) -> None:
        """Make durable what has been committed since the last time, whoever did so.

        Several threads may do so at once: what is durable stays durable.
        """
        known = self._known
        if known is not None and not entry_of(self._log, known).exists():
            known = None  # the table was made anew
        if known is None:
            found = (version_of(name, ENTRY) for name in names_in(self._log))
            versions = [version for version in found if version is not None]
            if not versions:
                return
            first = max(versions[0], versions[-1] - RECENT + 1)
        else:
            first = known + 1
        version = first
        paths = list[Path]()
        while (entry := entry_of(self._log, version)).exists():
            paths += self._added_by(entry)
            version += 1
        checkpoint, files = self._new_checkpoint()
        paths += files
        if paths:
            paths += self._checksums
            sync([*paths, *self._folders(paths, is_new=first == 0)])
            self._checksums = seal(path for path in paths if self._is_own(path))
        self._checkpoint = checkpoint
        self._known = version - 1 if version > first else known

    def _added_by(self, entry: Path) -> Iterator[Path]:
        yield from _with_checksum(entry)
        yield from _with_checksum(entry.with_suffix(".crc"))  # Spark's, of the table's state
        for named in files_named(self._table, actions_of(entry.read_bytes()) or ()):
            yield from _with_checksum(named.path)

    def _is_own(self, path: Path) -> bool:
        """Return True for a file that never changes: no hint, no checksum, none of a clone."""
        return not path.name.startswith((".", "_")) and self._table in path.parents

    def _new_checkpoint(self) -> tuple[tuple[int, int] | None, list[Path]]:
        """Return what tells one checkpoint from another, and the files of a new one."""
        last = self._log / LAST_CHECKPOINT
        try:
            found = last.stat()
        except FileNotFoundError:
            return None, []
        mark = found.st_ino, found.st_mtime_ns
        if mark == self._checkpoint:
            return mark, []
        every = names_in(self._log)
        names = [name for name in every if version_of(name, CHECKPOINT) is not None]
        self._delete_checksums_without_files(every, before=names[-1] if names else "")
        newest = [name for name in names if name[:20] == names[-1][:20]]
        files = [last, *(self._log / name for name in newest)]
        files += (self._log / "_sidecars").glob("*.parquet")
        return mark, [path for file in files for path in _with_checksum(file)]

    def _delete_checksums_without_files(self, names: Sequence[str], before: str) -> None:
        """Delete checksums of old files of the log: delta-rs leaves them where it deletes those."""
        for name in names:
            file = name.removeprefix(".").removesuffix(".crc")
            if checksum_of(Path(file)).name == name and file < before and file not in names:
                (self._log / name).unlink(missing_ok=True)

    def _folders(self, paths: Iterable[Path], *, is_new: bool) -> Iterator[Path]:
        """Yield the folders that name these files, up to the table's, or to all that may be new."""
        yield self._table
        for folder in {path.parent for path in paths if self._table in path.parents}:
            yield from takewhile(self._table.__ne__, (folder, *folder.parents))
        if is_new:
            yield from self._table.parents


def _with_checksum(path: Path) -> Iterator[Path]:
    yield path
    yield checksum_of(path)


def sync(paths: Iterable[Path]) -> None:
    """Return once these files and folders are on the disk; those that do not exist are left out.

    Raises WatersmeetError where the disk does not take them.
    """
    list(_pool().map(_sync, dict.fromkeys(paths)))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="durable")


def _sync(path: Path) -> None:
    with suppress(FileNotFoundError):
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            raise
        except OSError as error:
            # Folders above the lake's may not be for everybody to list.
            if error.errno in _CANNOT or (error.errno == errno.EACCES and path.is_dir()):
                return
            raise WatersmeetError(
                f"{path} cannot be written to the disk ({error.strerror})",
                fix="what was not written may be lost: look at the disk, then start again",
            ) from error


def durably(method: Callable[..., T]) -> Callable[..., T]:
    """Let what a method commits to the table that is its first argument be durable.

    The method is that of an engine, which has a `lake`.
    """

    @wraps(method)
    def committed(self: Any, table: Any, *args: Any, **kwargs: Any) -> T:
        with self.lake.durable.committing(getattr(table, "name", table)):
            return method(self, table, *args, **kwargs)

    return committed
