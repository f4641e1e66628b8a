"""What another command does while one is answered: not by luck, but between two of its
questions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.location import Lake
from watersmeet.lake.table_reader import Version
from watersmeet.settings import Settings


class Meanwhile(DeltaRsReader):
    """Questions of a lake in which something else happens just before the n-th one, counted from 0
    over all threads.

    `asked`: how many questions there were.
    """

    def __init__(self, settings: Settings, act: Callable[[], object], before: int) -> None:
        super().__init__(Lake(settings))
        self._act, self._before, self.asked = act, before, 0
        self._counting = threading.Lock()

    @property
    def has_acted(self) -> bool:
        return self.asked > self._before

    def _count(self) -> None:
        with self._counting:
            self.asked += 1
            is_now = self.asked == self._before + 1
        if is_now:
            self._act()

    def rows(self, table: str, columns: Sequence[str], *arguments: Any) -> pa.Table:
        self._count()
        return super().rows(table, columns, *arguments)

    def summary(self, table: str, *arguments: Any, **more: Any) -> pa.Table:
        self._count()
        return super().summary(table, *arguments, **more)

    def history(self, table: str, limit: int | None = None) -> list[Version]:
        self._count()
        return super().history(table, limit)

    def version(self, table: str) -> int:
        self._count()
        return super().version(table)

    def has_moved(self, table: str, version: int) -> bool:
        self._count()
        return super().has_moved(table, version)
