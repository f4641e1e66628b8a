"""Errors of the libraries that read and write tables, as sentences that name the table.

Every reader and every engine goes through here, so nothing that delta-rs, DataFusion, pyarrow or
Spark raises reaches a user as it is.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, Final, TypeVar

import pyarrow as pa
from deltalake.exceptions import DeltaError

from watersmeet.errors import (
    ConstraintError,
    MissingFileError,
    StoreBehindError,
    StoreUnreachableError,
    TableConflictError,
    TableError,
    WatersmeetError,
    is_known,
    root_cause,
)
from watersmeet.lake.commits import is_conflict
from watersmeet.lake.log_files import damaged_file
from watersmeet.lake.table_reader import TableReader

T = TypeVar("T")

BRING_BACK: Final = (
    "bring it back from a copy of the lake, or begin a new lake elsewhere (with `kafka.start: "
    "sink` it takes up the sink)"
)
"""The way out where rows of a table are gone that nothing else has."""

_CONSTRAINT: Final = "delta.constraints."
"""Prefix of the properties of a table that are its CHECK constraints."""

_REFUSED: Final = re.compile("failed validation check|DELTA_VIOLATE_CONSTRAINT")
"""What delta-rs and Delta on Spark say of rows that a constraint refuses."""

_MISSING: Final = re.compile(
    r"not found|NotFound|not_exist|does not exist|no such file", re.IGNORECASE
)
_BROKEN_OFF: Final = re.compile(r"Error getting \w+ response body|error reading a body")
"""What delta-rs says of an answer of a store that ends in its midst."""

_BEHIND: Final = re.compile(
    r"no new commits were found after existing snapshot|is older than the existing snapshot"
    r"|LogSegment end version \d+ not the same|^Invalid table version: \d+$"
)
"""What delta-rs says where it has made or read a commit that a list of the log lacks."""

_FILE: Final = re.compile(r"([^\s/'\"`]+)/(?:\w+=[^\s/]*/)?([^\s/'\"`]+\.parquet)\b")
"""The path of a data file: its table's folder, perhaps a partition's, and its name."""
_DAMAGED: Final = re.compile(
    r"(?:[Cc]hecksum error: |Not a checksum file: |checksum mismatch for )"
    r"\S*/(?!_delta_log/|\w+=)([^\s/]+)/((?:_delta_log/|\w+=[^\s/]*/)?[^\s/]*\w)"
)
"""The path of a file that Hadoop, or delta-rs a deletion vector, finds damaged by its checksum."""

_CUT_SHORT: Final = re.compile(
    r"DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION\].*location \('([^']+)'\)", re.DOTALL
)
"""What Delta says where a catalog is to have a table in a folder with files, but without a log."""


def names_tables(kind: type[T]) -> type[T]:
    """Let what the public methods of a class raise name the table that is their first argument, or
    that their question is about.
    """
    for name, method in [*vars(kind).items()]:
        parameters = [*inspect.signature(method).parameters] if inspect.isfunction(method) else []
        if parameters[1:2] in (["table"], ["question"], ["selection"]) and not name.startswith("_"):
            setattr(kind, name, names_table(method))
    return kind


def names_table(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let what a method raises name the table that is its first argument.

    The method is a reader's, or an engine's with a `reader`.
    """

    @wraps(method)
    def named(self: Any, table: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the method; rows that are given to it are of no table."""
        name = getattr(table, "name", getattr(table, "table", table))
        if not isinstance(name, str):
            return method(self, table, *args, **kwargs)
        with naming(getattr(self, "reader", self), name):
            return method(self, table, *args, **kwargs)

    return named


@contextmanager
def naming(reader: TableReader, table: str) -> Iterator[None]:
    """Raise, in place of an error of a library inside the `with` block, one that names the table.

    Where the error names a file of another table, it names that one: Spark reads what it writes.
    """
    try:
        yield
    except Exception as error:
        if is_known(error) or isinstance(error, WatersmeetError) or not _is_of_library(error):
            raise
        raise _explained(reader, table, error) from error


def _is_of_library(error: Exception) -> bool:
    """Return True for errors of delta-rs, pyarrow, Spark, and of files; DataFusion's have no class
    of their own.
    """
    spark = [
        getattr(sys.modules[module], name)
        for module, name in (("pyspark.errors", "PySparkException"), ("py4j.protocol", "Py4JError"))
        if module in sys.modules
    ]
    classes = (DeltaError, pa.ArrowException, OSError, *spark)
    return isinstance(error, classes) or type(error) is Exception


def _explained(reader: TableReader, table: str, error: Exception) -> WatersmeetError:
    text = str(error)
    file = _FILE.search(text)
    with suppress(Exception):
        if file and reader.exists(file[1]):
            table = file[1]
    if is_conflict(error):
        other = root_cause(error)
        with suppress(Exception):  # history tells more, if it can be read
            last = reader.history(table, 1)[0]
            other = f"{last.operation}, version {last.number}"
        return TableConflictError(
            f"the commit of another job came first ({other})",
            where=table,
            fix="try again; runs compact and vacuum the tables themselves, so let no other job do "
            "so while one goes on",
        )
    if _REFUSED.search(text):
        with suppress(Exception):
            constraints = [
                f"{name.removeprefix(_CONSTRAINT)}: {expression}"
                for name, expression in sorted(reader.properties(table).items())
                if name.startswith(_CONSTRAINT)
            ]
            return ConstraintError(
                "rows do not meet a CHECK constraint that somebody has added "
                f"({', '.join(constraints)})",
                where=table,
                fix="drop it (ALTER TABLE ... DROP CONSTRAINT): the tables take whatever comes",
            )
    if damaged := _DAMAGED.search(text):
        return damaged_file(damaged[1], damaged[2])
    if file and _MISSING.search(text):
        with suppress(Exception):
            is_needed = reader.has_data_file(table, file[2])
            remedy = "put it back from a copy of the lake" if is_needed else "try again"
            missing = MissingFileError(
                f"its file {file[2]} was deleted by somebody else",
                where=table,
                fix=f"{remedy}; let no VACUUM delete what is younger than the lake's `retention`",
            )
            missing.retriable = not is_needed
            return missing
    if _BROKEN_OFF.search(text):
        return StoreUnreachableError(
            f"the object store broke off an answer about {table} ({root_cause(error)})",
            fix="try again; if it goes on, look at the store",
        )
    if _BEHIND.search(text):
        return behind(table)
    if folder := _CUT_SHORT.search(text):
        return TableError(
            f"{folder[1]} has files, but no table, as a creation that was cut short leaves it",
            where=table,
            fix="look at what is there, delete that folder, and start again",
        )
    return TableError(f"{table}: {root_cause(error)}")


def behind(table: str) -> StoreBehindError:
    """Return the error that says that an object store lists a log without a commit of it."""
    return StoreBehindError(
        f"the log of {table} was listed without its last commit",
        fix="try again; if it goes on, use an object store that lists all that was written",
    )
