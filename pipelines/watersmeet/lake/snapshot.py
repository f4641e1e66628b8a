"""One moment of a lake: consistent versions of all its tables, while other processes go on writing.

An answer that takes several queries is wrong where a batch, `keep` or `forget` comes in between. So
the version of each table is read first, and checked again until no table has changed in between:
then all of them were the last ones at the same moment. Every query is answered from these versions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial, wraps
from itertools import islice
from typing import Any, Final, TypeVar, cast

import pyarrow as pa

from watersmeet.lake import tables
from watersmeet.lake.table_reader import (
    NO_VERSIONS,
    QueryError,
    Question,
    TableReader,
    Version,
    VersionGoneError,
    walk,
)
from watersmeet.settings import Settings

_Answer = TypeVar("_Answer", bound=Callable[..., Any])

ATTEMPTS: Final = 100
"""Maximum number of checks until no table has changed.

A check takes far less time than a commit.
"""

_THREADS: Final = 8

_CHANGING: Final = frozenset(["DELETE", "UPDATE", "MERGE", "RESTORE"])
"""Operations, as Delta calls them, of commits that change existing rows."""


def _now(method: _Answer) -> _Answer:
    # A method of a snapshot that answers as its reader does: of the last commit.
    def answered(self: Snapshot, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._reader, method.__name__)(*args, **kwargs)

    return cast("_Answer", wraps(method)(answered))


class Snapshot(TableReader):
    """`TableReader` about one moment: every answer is of that moment.

    A table that did not exist then does not exist here. `is_exact`: True where no table changed
    while the versions were taken.
    """

    def __init__(
        self, reader: TableReader, settings: Settings, names: Collection[str] | None = None
    ) -> None:
        """Take the versions that the tables of a lake have now: all, or those with these names."""
        self._reader = reader
        self.lake, self.dialect = reader.lake, reader.dialect
        self._names = frozenset(tables.layout(settings) if names is None else names)
        self._versions, self.is_exact = _versions(reader, self._names)

    def as_of(self, time_ms: int, version: int | None = None) -> Snapshot:
        """Return an earlier moment: every table as of a time (epoch ms).

        `version`: the version that silver had then, where that is known. A table that did not exist
        then, or whose log does not reach back so far, does not exist there.
        """
        earlier = copy(self)
        found = {name: self.version_at(name, time_ms) for name in self._versions}
        found |= {} if version is None else {tables.SILVER: version}
        earlier._versions = {name: at for name, at in found.items() if at is not None}
        return earlier

    @property
    def is_past(self) -> bool:
        """True where a table has another version by now, or exists and did not then."""
        return any(_is_new(self._reader, name, self._versions.get(name)) for name in self._names)

    def has_changed_since(self, table: str) -> bool:
        """Return True where rows of a table have been deleted or changed since that moment.

        Rows that were added do not count.
        """
        if (version := self._versions.get(table)) is None:
            return False
        since = (commit for commit in walk(self._reader, table) if commit.number > version)
        return any(commit.operation in _CHANGING for commit in since)

    def exists(self, table: str) -> bool:
        """See `TableReader`."""
        table = self._stored(table)
        return table in self._versions if table in self._names else self._reader.exists(table)

    def _stored(self, table: str) -> str:
        """Return the name of a table, or of the (first) one that a view is of."""
        return self.lake.views[table].parts[0].table if table in self.lake.views else table

    def table_rows(self, question: Question) -> pa.Table:
        """See `TableReader`.

        Where a file is missing although the table has not changed, no version is gone: the query is
        repeated at the last version, and raises the error of a query there.
        """
        table, at = question.table, self._version(question.table, question.version)
        try:
            return self._reader.table_rows(question._replace(version=at))
        except VersionGoneError:
            if question.version is not None or at is None or self._reader.has_moved(table, at):
                raise
            return self._reader.table_rows(question)

    def query(
        self, sql: str, names: Collection[str], versions: Mapping[str, int] = NO_VERSIONS
    ) -> pa.RecordBatchReader:
        """See `TableReader`."""
        stored = self.stored_tables(names)
        for table in stored:
            if table in self._names and table not in self._versions and self._reader.exists(table):
                raise QueryError(f"the table {table} did not exist then")
        of_moment = {table: self._versions[table] for table in stored if table in self._versions}
        return self._reader.query(sql, names, {**of_moment, **versions})

    def history(self, table: str, limit: int | None = None) -> list[Version]:
        """See `TableReader`. Commits since that moment are left out."""
        last = self._versions.get(table)
        if last is None:
            return self._reader.history(table, limit)
        versions = (version for version in walk(self._reader, table) if version.number <= last)
        return list(islice(versions, limit))

    def version(self, table: str) -> int:
        """See `TableReader`."""
        last = self._versions.get(table)
        return self._reader.version(table) if last is None else last

    def columns(self, table: str, version: int | None = None) -> pa.Schema:
        """See `TableReader`."""
        return self._reader.columns(table, self._version(table, version))

    functions = _now(TableReader.functions)
    properties = _now(TableReader.properties)
    unknown_features = _now(TableReader.unknown_features)
    file_count = _now(TableReader.file_count)
    has_data_file = _now(TableReader.has_data_file)
    row_bytes = _now(TableReader.row_bytes)

    def _version(self, table: str, version: int | None) -> int | None:
        return self._versions.get(table) if version is None else version


def _versions(reader: TableReader, names: Collection[str]) -> tuple[Mapping[str, int], bool]:
    """Return the last version of each existing table, and whether they belong together.

    True where all of them were the last ones at the same moment.
    """
    versions = dict[str, int]()
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in range(ATTEMPTS):
            is_new = pool.map(partial(_is_new, reader), names, map(versions.get, names))
            new = [name for name, moved in zip(names, is_new, strict=True) if moved]
            if not new:
                return versions, True
            versions |= {name: reader.version(name) for name in new if reader.exists(name)}
    return versions, False


def _is_new(reader: TableReader, table: str, version: int | None) -> bool:
    return reader.exists(table) if version is None else reader.has_moved(table, version)
