"""Building blocks of the report: figures, their charts (Vega-Lite), and steps of time to count rows
in.

Names from the lake (sources, reasons) are only ever values in a figure's rows, never a part of an
expression or of a field's name. All times are epoch ms, shown in UTC.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from watersmeet.audit.show import utc
from watersmeet.core.times import LAST_EVENT_TIME_MS

Spec = dict[str, Any]
Row = dict[str, Any]
Numbers = npt.NDArray[Any]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#4D4D4D", "#8C7A00")
"""Okabe and Ito's palette, for people with red-green colour blindness, too. Its yellow is darkened
for paper.
"""

UNITS = (
    ("days", 86_400_000),
    ("hours", 3_600_000),
    ("minutes", 60_000),
    ("seconds", 1000),
    ("milliseconds", 1),
)
WIDTHS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500),
    *(n * 1000 for n in (1, 2, 5, 10, 15, 30)),
    *(n * 60_000 for n in (1, 2, 5, 10, 15, 30)),
    *(n * 3_600_000 for n in (1, 2, 3, 6, 12)),
    *(n * 86_400_000 for n in (1, 2, 7, 14, 28, 91, 182, 364, 728, 3640, 7280, 36_400)),
)
"""Widths that a step may have (ms), as people count them.

With the last one, all times up to the year 9999 are 81 steps.
"""


class Steps(NamedTuple):
    """A range of time in `number` steps of one width (ms). Each begins at a whole multiple of the
    width.
    """

    first: int
    width: int
    number: int

    @classmethod
    def over(cls, times: Sequence[int], most: int, narrowest: int = 1) -> Steps:
        """Return at most `most` steps that contain all of the times.

        They are as narrow as possible, but not below `narrowest`.
        """
        first = min(times)
        last = max(times)
        widths = [width for width in WIDTHS if width >= narrowest]
        width = next((w for w in widths if last // w - first // w < most), widths[-1])
        return cls(first - first % width, width, last // width - first // width + 1)

    @property
    def end(self) -> int:
        """The end of the last step."""
        return self.first + self.number * self.width

    @property
    def starts(self) -> range:
        """The beginning of each step."""
        return range(self.first, self.end, self.width)

    def floor(self, times: Numbers) -> Numbers:
        """Return the beginning of the step that each time lies in."""
        return np.asarray(times - times % self.width)

    def totals(self, times: Numbers, weights: Numbers | None = None) -> Numbers:
        """Return how many of the times lie in each step, or the sum of their weights.

        Times outside all steps are left out.
        """
        inside = (times >= self.first) & (times < self.end)
        which = (times[inside] - self.first) // self.width
        return np.bincount(
            which, None if weights is None else weights[inside], minlength=self.number
        )


class Figure(NamedTuple):
    """Rows with their caption, as a chart or, without one, as a table. Without rows, the caption
    says why.
    """

    title: str
    caption: str
    rows: Sequence[Row]
    chart: Spec | None = None


class Section(NamedTuple):
    """Figures about one kind of time.

    A chart's horizontal axis of time begins alike in all of them, and ends where nothing more is to
    be drawn.
    """

    title: str
    about: str
    figures: Sequence[Figure]


def drawn(
    title: str,
    caption: str,
    rows: Sequence[Row],
    *layers: Spec,
    nothing: str = "Nothing yet.",
    height: int = 150,
) -> Figure:
    """Return a figure with a chart of its rows in layers, the first at the bottom.

    Without rows, its caption is the sentence `nothing`.
    """
    chart = {
        "width": "container",
        "height": height,
        "data": {"values": rows},
        "layer": list(layers),
    }
    return Figure(title, caption, rows, chart) if rows else Figure(title, nothing, rows)


# -- layers

LINE: Spec = {"type": "line", "interpolate": "step-after"}
POINTS: Spec = {"type": "line", "point": {"size": 14}}
AREA: Spec = {"type": "area", "interpolate": "step-after", "opacity": 0.85, "color": COLOURS[0]}
SHADE: Spec = {"type": "rect", "color": COLOURS[5], "opacity": 0.35}
SPAN: Spec = {"type": "rule", "strokeWidth": 3, "opacity": 0.35}
DOT: Spec = {"type": "point", "filled": True, "size": 22, "opacity": 1}
COLUMN: Spec = {"type": "bar", "color": COLOURS[0]}


def layer(mark: Spec, rows: Sequence[Row] | None = None, **channels: Spec) -> Spec:
    """Return a layer: a mark for each row, or a line or area through the rows.

    `rows`: by default those of the figure. A tooltip tells what the channels show.
    """
    own = {} if rows is None else {"data": {"values": rows}}
    return {**own, "mark": {**mark, "tooltip": True}, "encoding": channels}


def time(name: str, first: int, end: int, field: str = "at") -> Spec:
    """Return a channel of one kind of time from `first` to `end`.

    Its axis says which time it shows, and of which days.
    """
    scale = {"type": "utc", "domain": [first, end], "nice": False}
    days = " to ".join(dict.fromkeys(utc(min(at, LAST_EVENT_TIME_MS))[:10] for at in (first, end)))
    # As the axis's `format`, tooltips would have it too.
    labels = f"utcFormat(datum.value, '{time_format(first, end)}')"
    axis = {
        "title": f"{name} (UTC), {days}",
        "labelExpr": labels,
        "tickCount": {"expr": "width / 90"},
    }
    return {"field": field, "type": "temporal", "scale": scale, "axis": axis}


def number(field: str, title: str, scale: Spec | None = None, **axis: Any) -> Spec:
    """Return a channel of numbers."""
    return {
        "field": field,
        "type": "quantitative",
        "scale": scale or {},
        "axis": {"title": title, "tickCount": 5, **axis},
    }


def colour(names: Iterable[Any], field: str = "of") -> Spec:
    """Return a channel with a colour for each name, in their order. It has a legend where there are
    several.
    """
    scale = {
        "domain": (domain := list(names)),
        "range": [COLOURS[i % len(COLOURS)] for i in range(len(domain))],
    }
    title = None if field == "of" else field
    return {
        "field": field,
        "scale": scale,
        "legend": {"title": title, "symbolType": "square"} if len(domain) > 1 else None,
    }


def told_apart(names: Sequence[Any], field: str = "of") -> dict[str, Any]:
    """Return channels with a colour and a width for each name, the earlier ones wider: so each of
    several lines that lie on each other is seen.
    """
    step = min(3.0, 8 / max(1, len(names) - 1))
    widths = [round(1.6 + step * n, 2) for n in reversed(range(len(names)))]
    scale = {"type": "ordinal", "domain": list(names), "range": widths}
    width = {"field": field, "type": "nominal", "scale": scale, "legend": None}
    return {"color": colour(names, field), "strokeWidth": width}


def time_format(first: int, end: int) -> str:
    """Return a format with as much of a time as tells the ticks between the two apart."""
    formats = [
        (10_000, "%H:%M:%S.%L"),
        (600_000, "%H:%M:%S"),
        (86_400_000, "%H:%M"),
        (8 * 86_400_000, "%m-%d %H:%M"),
    ]
    return next((text for width, text in formats if end - first <= width), "%Y-%m-%d")


# -- rows


def in_unit(rows: Iterable[Mapping[str, Any]], *fields: str) -> tuple[list[Row], str]:
    """Return rows with these durations (ms) in the largest unit that the longest of them fills, and
    that unit.
    """
    converted = [dict(row) for row in rows]
    longest = max((abs(row[field]) for row in converted for field in fields), default=0)
    unit, length = next((unit for unit in UNITS if longest >= unit[1]), UNITS[-1])
    for row in converted:
        row.update({field: round(row[field] / length, 3) for field in fields})
    return converted, unit


def extended(rows: Sequence[Row], by: str, end: int) -> list[Row]:
    """Return the rows, and the last one of each value of `by` again at the end: its value holds
    until then.
    """
    last_rows = {row[by]: row for row in rows}
    return [*rows, *({**row, "at": end} for row in last_rows.values())]
