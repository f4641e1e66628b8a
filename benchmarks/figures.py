"""Writes the figures of one run into README.md and docs/performance.md, and keeps the run beside
this module, so that a test sees that they are its.

python -m benchmarks.figures results.json
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import points
from benchmarks.points import Point, Result
from benchmarks.programs import ROOT

Document = Mapping[str, Any]

RECORDED = Path(__file__).with_name("recorded.json")


def _points(value: object) -> Iterator[Point]:
    """The points in a value, however deep."""
    if isinstance(value, Point):
        yield value
    elif isinstance(value, tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _points(each)


POINTS = {point.name: point for value in vars(points).values() for point in _points(value)}
CHOSEN = (
    (points.BACKLOG,),
    (points.OF_FLOOR_B,),
    (points.OF_KAFKA_STREAMS,),
    (points.OF_MERGE_JOB,),
    (points.LARGE_BACKLOG, points.MEMORY),
    (points.LARGE_OF_FLOOR_B, points.LARGE_OF_KAFKA_STREAMS),
    (points.LATENCY_MEDIAN, points.LATENCY_95),
    (points.MEDIAN_TO_MERGE_JOB, points.MEDIAN_TO_KAFKA_STREAMS),
    (points.SMALL_BATCH, points.CLOCK_BATCH),
    (points.OPEN_STATE,),
    (points.DISK_MAINTAINED,),
    (points.NOTHING_TO_DO, points.STATUS),
)
"""The rows of README, of the first kind of input."""
ENGINES = ("embedded", "spark")


class Row(NamedTuple):
    """A point, its input, its name with what the other took, and a figure for each engine."""

    point: Point
    kind: str
    name: str
    cells: Sequence[str]


def readme(document: Document) -> str:
    """README's figures."""
    results = _results(document)
    kinds = [result.kind for result in results if result.kind is not None]
    first = [result for result in results if result.kind in (None, *kinds[:1])]
    of_input = f", the {kinds[0]} input" if kinds else ""
    lines = [f"| a lake in a folder{of_input} | `embedded` | `spark` |", "|---|---|---|"]
    for chosen in CHOSEN:
        rows = _rows([result for result in first if result.point in chosen], Result.figure)
        if rows:
            names = "; ".join(row.name for row in rows)
            columns = zip(*(row.cells for row in rows), strict=True)
            lines.append(f"| {names} | {' | '.join(map('; '.join, columns))} |")
    return "\n".join([*lines, "", _origin(document)])


def performance(document: Document) -> str:
    """The table of docs/performance.md: every point of the run, with its marks."""
    lines = ["| | point | input | `embedded` | `spark` |", "|---|---|---|---|---|"]
    lines += [
        f"| {row.point.number} | {row.name} | {row.kind} | {' | '.join(row.cells)} |"
        for row in _rows(_results(document), Result.summary)
    ]
    return "\n".join([_origin(document), "", *lines])


PAGES: Mapping[str, Callable[[Document], str]] = {
    "README.md": readme,
    "docs/performance.md": performance,
}
_BLOCK = re.compile(r"(?<=<!-- figures -->\n\n).*?(?=\n\n<!-- /figures -->)", re.DOTALL)


def with_figures(text: str, figures: str) -> str:
    """A page's text with these figures between its marks."""
    changed, count = _BLOCK.subn(lambda _: figures, text)
    if count != 1:
        raise ValueError("a page has its figures once, between <!-- figures --> and its end")
    return changed


def main() -> None:
    """Keeps the run, and writes its figures into the pages."""
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    document = json.loads(text)
    for name, render in PAGES.items():
        page = ROOT / name
        page.write_text(with_figures(page.read_text(encoding="utf-8"), render(document)), "utf-8")
    RECORDED.write_text(text, encoding="utf-8")


def _results(document: Document) -> list[Result]:
    found = [
        Result(POINTS[each["name"]], each["engine"], each["value"], each["details"], each["input"])
        for each in document["results"]
    ]
    return sorted(found, key=lambda result: result.point.number)


def _rows(results: Sequence[Result], text: Callable[[Result], str]) -> list[Row]:
    rows = []
    for point, kind in dict.fromkeys((result.point, result.kind) for result in results):
        of = {r.engine: r for r in results if (r.point, r.kind) == (point, kind)}
        name = point.name + _compared(next(iter(of.values())))
        cells = [text(of[engine]) if engine in of else "" for engine in ENGINES]
        rows.append(Row(point, kind or "", name, cells))
    return rows


def _compared(result: Result) -> str:
    """The seconds that a peer took, where the figure is compared with it."""
    details = result.details
    if "median" in details:
        return f", which had {details['median']} s and {details['p95']} s"
    seconds = details.get("seconds")
    if "records_per_second" in details and isinstance(seconds, list):
        return f", which took {min(seconds)} s"
    return ""


def _origin(document: Document) -> str:
    machine, sizes = document["machine"], document["sizes"]
    large = sizes["records"] * sizes["large_factor"]
    return (
        f'`make bench BENCH="{document["arguments"]}"`, one run on {document["taken_at"][:10]}, '
        f"on {machine['cores']} cores with {machine['memory_gib']} GiB, the broker beside; Python "
        f"{machine['python']}. A backlog has {sizes['records']:,} records, a large one {large:,}; "
        f"latency is measured for {sizes['measured_s']:.0f} s, {sizes['warm_up_s']:.0f} s after "
        "the start. The same run took the times of the others."
    )


if __name__ == "__main__":
    main()
