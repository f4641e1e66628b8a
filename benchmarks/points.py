"""The points that are measured, with their marks, and how results are kept and shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Point:
    """A figure of one of the eight points; a mark is None where the figure is only reported."""

    number: int
    name: str
    unit: str
    first_mark: float | None
    second_mark: float | None
    better: Literal["higher", "lower"]

    def reaches(self, value: float, mark: float) -> bool:
        """Whether the figure is as good as the mark."""
        return value >= mark if self.better == "higher" else value <= mark


BACKLOG = Point(1, "backlog, whole run", "records/s", None, None, "higher")
OF_FLOOR_A = Point(1, "backlog, of floor A (Kafka into nothing)", "x", None, None, "higher")
OF_FLOOR_B = Point(1, "backlog, of floor B (raw append)", "x", 0.5, 0.7, "higher")
OF_MERGE_JOB = Point(1, "backlog, of a tuned MERGE job", "x", 2.0, None, "higher")
OF_STATE_JOB = Point(1, "backlog, of transformWithState", "x", 2.0, None, "higher")
LATENCY_MEDIAN = Point(2, "latency, median", "s", 3.0, 2.0, "lower")
LATENCY_95 = Point(2, "latency, 95th percentile", "s", 5.0, 3.5, "lower")
CLOCK_BATCH = Point(3, "batch that only moves the clock", "s", 0.8, 0.5, "lower")
SMALL_BATCH = Point(3, "batch of 1,000 records", "s", 2.5, 1.5, "lower")
CHANGE_FEED = Point(3, "the same with the change data feed, to without", "x", None, None, "lower")
CHANGE_FEED_DISK = Point(3, "bytes that such batches add to silver, to without", "x", None, None, "lower")
HISTORY = Point(4, "batch, long history to short", "x", 1.15, None, "lower")
HISTORY_RESTART = Point(4, "silver's restart, long history to short", "x", 1.15, None, "lower")
OPEN_STATE = Point(5, "batch that touches 1,000 of many open rows", "s", 3.0, None, "lower")
OPEN_GROWTH = Point(5, "same batch, many open rows to few", "x", None, None, "lower")
OPEN_CONTENT = Point(5, "same batch, open rows of ten times the content", "x", None, None, "lower")
LARGE_BACKLOG = Point(6, "large backlog, whole run", "records/s", None, None, "higher")
MEMORY = Point(6, "peak memory, large backlog", "GiB", 3.0, None, "lower")
MEMORY_GROWTH = Point(6, "peak memory, large backlog to small", "x", 1.0, None, "lower")
CORES = Point(7, "local[2] to local[1]", "x", 1.6, None, "higher")
MANY_PARTITIONS = Point(7, "seconds, many partitions to few", "x", 1.2, None, "lower")
DISK = Point(8, "lake per byte of input, after a run", "x", None, None, "lower")
DISK_MAINTAINED = Point(8, "lake per byte of input, after maintain", "x", None, None, "lower")
DISK_PRESENT = Point(8, "the same, without what the retention keeps", "x", None, None, "lower")


@dataclass(frozen=True)
class Result:
    """A point's figure, the engine and the kind of lake that it was measured with, and what it was made of."""

    point: Point
    value: float
    details: Mapping[str, object] = field(default_factory=dict)
    engine: str = "spark"
    lake: str = "folder"

    def document(self) -> dict[str, object]:
        """The result as JSON keeps it."""
        point = self.point
        return {
            "point": point.number,
            "name": point.name,
            "engine": self.engine,
            "lake": self.lake,
            "value": round(self.value, 3),
            "unit": point.unit,
            "first_mark": point.first_mark,
            "second_mark": point.second_mark,
            "details": dict(self.details),
        }


@dataclass(frozen=True)
class Sizes:
    """How much is measured, and on which engine; `full` is what the marks were set for, the defaults are less."""

    engine: str = "spark"
    records: int = 1_100_000
    large_factor: int = 3
    partitions: int = 4
    many_partitions: int = 64
    history: int = 2_000_000
    short_history: int = 100_000
    open_rows: int = 1_000_000
    few_open_rows: int = 100_000
    rounds: int = 20
    warm_up_s: float = 60.0
    measured_s: float = 60.0
    rate: int = 1000

    def full(self) -> Sizes:
        """Ten times the records, and twenty million rows of history."""
        return replace(self, large_factor=10, history=20_000_000)

    def scaled(self, scale: float) -> Sizes:
        """The same with so much of every number of records and rows, as far as a batch of a thousand can be made of them."""
        names = ("records", "history", "short_history", "open_rows", "few_open_rows")
        changed: dict[str, Any] = {name: max(2_000, round(getattr(self, name) * scale)) for name in names}
        return replace(self, **changed)


def print_results(results: Sequence[Result], document: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> None:
    """A table of the points: figure, marks, which of them are reached, and what the figure was in the baseline."""
    known = {} if baseline is None else {_key(result): result["value"] for result in baseline["results"]}
    columns = ["point", "", "engine", "lake", "figure", "first mark", "second mark", "reached"]
    columns += ["baseline"] if baseline else []
    table = Table(*columns, title=_title(document, baseline), title_justify="left")
    for result in sorted(results, key=lambda result: result.point.number):
        point = result.point
        cells = [
            str(point.number),
            point.name,
            result.engine,
            result.lake,
            f"{_figure(result.value)} {point.unit}",
            _mark(point, point.first_mark),
            _mark(point, point.second_mark),
            _reached(result),
        ]
        if baseline is not None:
            before = known.get(_key(result.document()))
            cells.append("–" if before is None else _figure(before))
        table.add_row(*cells)
    Console().print(table)


def _key(result: Mapping[str, Any]) -> tuple[str, str, str]:
    """What two figures must have in common to be compared; documents of earlier versions know one engine and one kind of lake."""
    return result["name"], result.get("engine", "spark"), result.get("lake", "folder")


def _title(document: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in document["machine"].items())
    if baseline is None:
        return machine
    others = _names_of(
        {
            "another machine": baseline["machine"] != document["machine"],
            "other sizes": baseline["sizes"] != document["sizes"],
        }
    )
    return f"{machine}\nthe baseline is of {others or 'this machine'}"


def _names_of(facts: Mapping[str, bool]) -> str:
    return " and ".join(name for name, is_so in facts.items() if is_so)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def _mark(point: Point, mark: float | None) -> str:
    return "–" if mark is None else f"{'>=' if point.better == 'higher' else '<='} {mark:g}"


def _reached(result: Result) -> str:
    """The best of the marks that the figure reaches."""
    marks: Iterable[tuple[str, float | None]] = (("second", result.point.second_mark), ("first", result.point.first_mark))
    named = [(name, mark) for name, mark in marks if mark is not None]
    if not named:
        return "–"
    return next((name for name, mark in named if result.point.reaches(result.value, mark)), "no")
