"""Time in steps: however long a stretch is, it is shown as a few hundred equal steps. Times are epoch ms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_SECOND, _MINUTE, _HOUR, _DAY = 1000, 60_000, 3_600_000, 86_400_000
WIDTHS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500),
    *(n * _SECOND for n in (1, 2, 5, 10, 15, 30)),
    *(n * _MINUTE for n in (1, 2, 5, 10, 15, 30)),
    *(n * _HOUR for n in (1, 2, 3, 6, 12)),
    *(n * _DAY for n in (1, 2, 7, 14, 28, 91, 182, 364, 728, 3640, 7280, 36_400)),
)
"""How wide a step may be: widths that people count in. With the last, all times up to the year 9999 are 81 steps."""


class Steps(NamedTuple):
    """A stretch of time in `number` steps of one width; they begin at whole multiples of it."""

    first: int
    width: int
    number: int

    @property
    def end(self) -> int:
        """Where the last one ends."""
        return self.first + self.number * self.width

    @property
    def starts(self) -> range:
        """Where each begins."""
        return range(self.first, self.end, self.width)

    def of(self, time_sql: str) -> str:
        """SQL for the beginning of the step that a time in ms (`time_sql`, not negative) lies in."""
        return f"({time_sql} - {time_sql} % {self.width})"


def steps_over(first: int, last: int, most: int, narrowest: int = 1) -> Steps:
    """At most so many steps, as narrow as they then can be (not below `narrowest`), that have both times in them."""
    fitting = (_over(first, last, width) for width in WIDTHS if width >= narrowest)
    return next((steps for steps in fitting if steps.number <= most), _over(first, last, WIDTHS[-1]))


def _over(first: int, last: int, width: int) -> Steps:
    start = first - first % width
    return Steps(start, width, (last - start) // width + 1)


def in_each(steps: Steps, known: Mapping[int, int]) -> list[tuple[int, int]]:
    """Every step's beginning with what is known of it: 0 where that is nothing, so that no line leaps over a pause."""
    return [(start, known.get(start, 0)) for start in steps.starts]


def span(found: Iterable[tuple[Any, ...]]) -> tuple[int, int] | None:
    """The first and the last of all times that these rows name; None where they name none."""
    times = [time for row in found for time in row if time is not None]
    return (min(times), max(times)) if times else None
