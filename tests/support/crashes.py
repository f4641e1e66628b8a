"""Engines that die at a write: so a law says what a start finds, and makes of it."""

from __future__ import annotations

from typing import Any, cast

from watersmeet.engine import Engine
from watersmeet.lake import tables


class CrashError(Exception):
    """The process is gone; nobody got to say a word."""


class _Dying:
    def __init__(
        self, engine: Engine, operation: str, table: str, *, after: bool, times: int
    ) -> None:
        self._engine, self._operation, self._table, self._after, self._times = (
            engine,
            operation,
            table,
            after,
            times,
        )

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        if name != ("append" if self._operation == "decide" else self._operation):
            return found

        def dying(*arguments: Any, **more: Any) -> Any:
            table = tables.SILVER if name == "merge_in_chunks" else arguments[0]
            if self._operation == "decide" and table == tables.JOURNAL:
                table = arguments[1]["kind"][0].as_py()
            if table != self._table or not self._times:
                return found(*arguments, **more)
            self._times -= 1
            if self._after:
                found(*arguments, **more)
            raise CrashError(f"{name} {table}")

        return dying


def dying_at(
    engine: Engine, operation: str, table: str, *, after: bool = False, times: int = 10**6
) -> Engine:
    """The engine, but that `operation` (append, merge, delete) on a table, or `decide` of a kind of
    decision, raises CrashError so often, before or `after` it."""
    return cast(Engine, _Dying(engine, operation, table, after=after, times=times))
