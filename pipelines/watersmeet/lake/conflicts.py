"""Conflicts with another writer of a table, recognised by the classes of their errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from deltalake.exceptions import CommitFailedError

from watersmeet.errors import TableConflictError


def is_conflict(error: BaseException) -> bool:
    """Return True where a commit was refused because of another writer's commit.

    Reading the table again and retrying may succeed. Spark's error classes are those of
    `delta.exceptions`, which have no common base. Where that module has not been imported, no error
    is one of them.
    """
    module = sys.modules.get("delta.exceptions")
    spark_errors = () if module is None else tuple(getattr(module, name) for name in module.__all__)
    return isinstance(error, (CommitFailedError, TableConflictError, *spark_errors))


@contextmanager
def suppress_conflict() -> Iterator[None]:
    """End the block silently on a conflict. The caller then reads the table and tries again."""
    try:
        yield
    except Exception as error:
        if not is_conflict(error):
            raise
