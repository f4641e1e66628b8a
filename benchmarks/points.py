"""The points that are measured, with their marks, and how results are kept and shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from benchmarks.inputs import Kind

_WIDTH = 130
"""Of the table where it goes to a file."""


ENGINES = ("spark", "embedded")
KINDS: tuple[Kind, ...] = ("overlapping", "ordered")
"""Of input: the harder one first, which the points measure that need only one."""


@dataclass(frozen=True)
class Point:
    """A figure of one of the points, and its first and second mark on each engine; one without
    a mark is only reported."""

    number: int
    name: str
    unit: str
    better: Literal["higher", "lower"]
    spark: tuple[float, ...] = ()
    embedded: tuple[float, ...] = ()

    def marks(self, engine: str) -> tuple[float, ...]:
        """The first mark and the second one, as far as there are any."""
        return self.spark if engine == "spark" else self.embedded

    def reaches(self, value: float, mark: float) -> bool:
        """Whether the figure is as good as the mark."""
        return value >= mark if self.better == "higher" else value <= mark


BACKLOG = Point(1, "backlog, whole run", "records/s", "higher")
OF_FLOOR_A = Point(1, "backlog, of floor A (Kafka into nothing)", "x", "higher")
OF_FLOOR_B = Point(1, "backlog, of floor B (raw append)", "x", "higher", (0.5, 0.7), (1.7, 2.2))
OF_KAFKA_STREAMS = Point(1, "backlog, of Kafka Streams", "x", "higher")
OF_MERGE_JOB = Point(1, "backlog, of a tuned MERGE job", "x", "higher")
OF_STATE_JOB = Point(1, "backlog, of transformWithState", "x", "higher")
LATENCY_MEDIAN = Point(2, "latency, median", "s", "lower", (6.0, 4.0), (1.0, 0.5))
LATENCY_95 = Point(2, "latency, 95th percentile", "s", "lower", (10.0, 7.0), (2.0, 1.0))
MIXED_MEDIAN = Point(2, "latency, median, mixed stream to clean", "x", "lower", (1.2,), (1.2,))
MIXED_95 = Point(2, "latency, 95th percentile, mixed stream to clean", "x", "lower", (1.2,), (1.2,))
MEDIAN_TO_MERGE_JOB = Point(2, "latency, median, to that of a tuned MERGE job", "x", "lower")
TAIL_TO_MERGE_JOB = Point(2, "latency, 95th percentile, to that of the job", "x", "lower")
MEDIAN_TO_KAFKA_STREAMS = Point(2, "latency, median, to that of Kafka Streams", "x", "lower")
TAIL_TO_KAFKA_STREAMS = Point(2, "latency, 95th percentile, to that of Kafka Streams", "x", "lower")
CLOCK_BATCH = Point(3, "batch that only moves the clock", "s", "lower", (0.8, 0.5), (0.1, 0.05))
SMALL_BATCH = Point(3, "batch of 1,000 records", "s", "lower", (2.5, 1.5), (0.4, 0.2))
CHANGE_FEED = Point(3, "the same with the change data feed, to without", "x", "lower")
CHANGE_FEED_DISK = Point(3, "bytes that such batches add to silver, to without", "x", "lower")
HISTORY = Point(4, "batch, long history to short", "x", "lower", (1.15,), (1.15,))
HISTORY_RESTART = Point(
    4, "silver's restart, long history to short", "x", "lower", (1.15,), (1.15,)
)
OPEN_STATE = Point(
    5, "batch that touches 1,000 of many open rows", "s", "lower", (5.0,), (3.0, 1.0)
)
OPEN_GROWTH = Point(5, "same batch, many open rows to few", "x", "lower")
OPEN_CONTENT = Point(5, "same batch, open rows of ten times the content", "x", "lower")
LARGE_BACKLOG = Point(6, "large backlog, whole run", "records/s", "higher")
LARGE_OF_FLOOR_B = Point(6, "large backlog, of floor B", "x", "higher", (0.5, 0.7), (0.8, 1.2))
LARGE_OF_KAFKA_STREAMS = Point(6, "large backlog, of Kafka Streams", "x", "higher")
MEMORY = Point(6, "peak memory, large backlog", "GiB", "lower", (3.0,), (1.5,))
MEMORY_GROWTH = Point(6, "peak memory, large backlog to small", "x", "lower", (1.1,), (1.1,))
CORES = Point(7, "seconds, local[1] to local[2]", "x", "higher")
MANY_PARTITIONS = Point(7, "seconds, many partitions to few", "x", "lower", (1.3,), (1.2,))
DISK = Point(8, "lake per byte of input, after a run", "x", "lower")
DISK_MAINTAINED = Point(8, "lake per byte of input, after maintain", "x", "lower", (1.0,), (1.0,))
DISK_PRESENT = Point(8, "the same, without what the retention keeps", "x", "lower")
NOTHING_TO_DO = Point(9, "run --once with nothing to do", "s", "lower", (10.0,), (1.5,))
STATUS = Point(9, "status", "s", "lower", (1.5,), (1.5,))
TENANTS = {
    1_000: Point(10, "seconds, a thousand tenants to none", "x", "lower", (), (1.2,)),
    10_000: Point(10, "seconds, ten thousand tenants to none", "x", "lower"),
}
"""By how many tenants have records in each partition."""
IDS = Point(10, "seconds, with ids of records to without", "x", "lower")
VALID = Point(10, "seconds, with a predicate to without", "x", "lower")
CORRECTED_BATCH = Point(
    11, "batch of 1,000 records, 1,000 late ones more to none", "s more", "lower", (), (1.0,)
)
NOTHING_LATE = Point(
    11, "batch without late records, with corrections to without", "x", "lower", (), (1.15,)
)
STARTS = (
    (
        Point(12, "first start, to the first message", "s", "lower"),
        Point(12, "first start, to a bare session's first task", "x", "lower", (1.1,)),
    ),
    (
        Point(12, "restart, to the first message", "s", "lower"),
        Point(12, "restart, to a bare session's first task", "x", "lower", (1.1,)),
    ),
)
DURABLE = Point(13, "seconds, durable to not", "x", "lower", (1.03,), (1.03,))
DURABLE_MEDIAN = Point(13, "median latency, durable less not", "s", "lower", (0.03,), (0.03,))


@dataclass(frozen=True)
class Result:
    """A point's figure, the engine that it was measured with, what it was made of, and the kind of
    input, where there are several."""

    point: Point
    engine: str
    value: float
    details: Mapping[str, object] = field(default_factory=dict)
    kind: Kind | None = None

    def document(self) -> dict[str, object]:
        """The result as JSON keeps it."""
        return {
            "point": self.point.number,
            "name": self.point.name,
            "engine": self.engine,
            "input": self.kind,
            "lake": "folder",
            "value": round(self.value, 3),
            "unit": self.point.unit,
            "marks": list(self.point.marks(self.engine)),
            "details": dict(self.details),
        }

    def figure(self) -> str:
        """The figure with its unit."""
        figure = f"{self.value:,.0f}" if self.value >= 1000 else f"{self.value:.2f}"
        return f"{figure} {self.point.unit}"

    def summary(self) -> str:
        """The figure, its marks, and the best of them that it reaches."""
        marks = self.point.marks(self.engine)
        if not marks:
            return self.figure()
        reached = [
            name
            for name, mark in zip(("first", "second"), marks, strict=False)
            if self.point.reaches(self.value, mark)
        ]
        return (
            f"{self.figure()} ({' / '.join(f'{mark:g}' for mark in marks)}: "
            f"{reached[-1] if reached else 'no'})"
        )


@dataclass(frozen=True)
class Sizes:
    """How much is measured, and on which engines; `full` is what the marks were set for, the
    defaults are less."""

    engines: tuple[str, ...] = ENGINES
    kinds: tuple[Kind, ...] = KINDS
    records: int = 1_100_000
    large_factor: int = 3
    partitions: int = 4
    many_partitions: int = 64
    history: int = 2_000_000
    short_history: int = 100_000
    open_rows: int = 1_000_000
    few_open_rows: int = 100_000
    closed_rows: int = 10_000_000
    rounds: int = 20
    warm_up_s: float = 60.0
    measured_s: float = 60.0
    rate: int = 1000

    def full(self) -> Sizes:
        """Ten times the records, and twenty million rows of history."""
        return replace(self, large_factor=10, history=20_000_000)

    def scaled(self, scale: float) -> Sizes:
        """The same with so much of every number of records and rows, as far as a batch of a
        thousand can be made of them."""
        names = ("records", "history", "short_history", "open_rows", "few_open_rows")
        changed: dict[str, Any] = {
            name: max(2_000, round(getattr(self, name) * scale)) for name in names
        }
        closed_rows = max(10_000, round(self.closed_rows * scale))
        return replace(self, closed_rows=closed_rows, **changed)


def print_results(results: Sequence[Result], document: Mapping[str, Any]) -> None:
    """A table of the points: by engine the figure, its marks, and which of them it reaches."""
    engines = [engine for engine in ENGINES if any(result.engine == engine for result in results)]
    title = ", ".join(f"{name} {value}" for name, value in document["machine"].items())
    table = Table(
        "point", "", "input", *engines, title=f"{title}; a lake in a folder", title_justify="left"
    )
    of = {(result.point, result.kind, result.engine): result.summary() for result in results}
    rows = {(result.point, result.kind): None for result in results}
    for point, kind in sorted(rows, key=lambda row: row[0].number):
        cells = [of.get((point, kind, engine), "") for engine in engines]
        table.add_row(str(point.number), point.name, kind or "", *cells)
    console = Console()
    (console if console.is_terminal else Console(width=_WIDTH)).print(table)
