"""Charts of the report, by Altair.

Names from the lake (sources, reasons) are only ever values in a chart's rows, never a part of an
expression or of a field's name. All times are epoch ms, shown in UTC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import altair as alt

from watersmeet.core.times import LAST_EVENT_TIME_MS, utc

Row = dict[str, Any]

COLOURS: Final = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#4D4D4D", "#8C7A00"),
)
"""Okabe and Ito's palette, for people with red-green colour blindness, too. Its yellow is darkened
for paper.
"""

UNITS: Final = (
    *(("days", 86_400_000), ("hours", 3_600_000), ("minutes", 60_000)),
    *(("seconds", 1000), ("milliseconds", 1)),
)
WIDTHS: Final = (
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
    """Steps of time of one width (ms), each from a whole multiple of it on: from `first` up to
    `end`.
    """

    first: int
    end: int
    width: int

    @classmethod
    def over(cls, times: Sequence[int], most: int, narrowest: int = 1) -> Steps:
        """Return at most `most` steps that contain all of the times.

        They are as narrow as possible, but not below `narrowest`.
        """
        first = min(times)
        last = max(times)
        widths = [width for width in WIDTHS if width >= narrowest]
        width = next((w for w in widths if last // w - first // w < most), widths[-1])
        return cls(first - first % width, last - last % width + width, width)

    @property
    def starts(self) -> range:
        """The beginning of each step."""
        return range(self.first, self.end, self.width)

    def of(self, time: str) -> str:
        """Return SQL for the beginning of the step that a time (epoch ms, in SQL) lies in."""
        return f"({time} - {time} % {self.width})"


class Figure(NamedTuple):
    """Rows with their caption, as a chart (Vega-Lite) or, without one, as a table. Without rows,
    the caption says why.
    """

    title: str
    caption: str
    rows: Sequence[Row]
    chart: Row | None = None


def drawn(
    title: str,
    caption: str,
    rows: Sequence[Row],
    *layers: alt.Chart,
    nothing: str = "Nothing yet.",
    height: int = 150,
) -> Figure:
    """Return a figure with a chart of its rows in layers, the first at the bottom.

    Without rows, its caption is the sentence `nothing`.
    """
    if not rows:
        return Figure(title, nothing, rows)
    data = alt.InlineData(values=list(rows))
    chart = alt.layer(*layers, data=data).properties(width="container", height=height)
    with alt.data_transformers.enable(consolidate_datasets=False):
        return Figure(title, caption, rows, chart.to_dict())


# -- layers


def lines(*, is_stepped: bool = True, **channels: Any) -> alt.Chart:
    """Return lines through the rows; without `dots`, one row alone is not seen."""
    shape: dict[str, Any] = {"interpolate": "step-after"} if is_stepped else {}
    # The corner of a wide line would be a spike beyond what it says.
    chart = alt.Chart().mark_line(tooltip=True, strokeJoin="round", **shape)
    return _encoded(chart, **channels)


def dots(names: Sequence[Any], field: str = "of", **channels: Any) -> alt.Chart:
    """Return a dot for each row, in the colours of `told_apart`, with the earlier ones larger: so
    each of several dots that lie on each other is seen.
    """
    sizes = [round((width + 4) ** 2) for width in _widths(len(names))]
    scale = alt.Scale(type="ordinal", domain=list(names), range=sizes)
    size = alt.Size(field, type="nominal", scale=scale, legend=None)
    mark = alt.Chart().mark_point(tooltip=True, filled=True, opacity=1)
    return _encoded(mark, color=colour(names, field), size=size, **channels)


def area(**channels: Any) -> alt.Chart:
    """Return an area below the rows."""
    mark = alt.Chart().mark_area(
        tooltip=True, interpolate="step-after", opacity=0.85, color=COLOURS[0]
    )
    return _encoded(mark, **channels)


def columns(**channels: Any) -> alt.Chart:
    """Return a column for each row."""
    return _encoded(alt.Chart().mark_bar(tooltip=True, color=COLOURS[0]), **channels)


def spans(unit: str, **channels: Any) -> list[alt.Chart]:
    """Return a bar from `least` to `most` for each row, with a dot at `mean`."""
    least = number("least", unit)
    bar = alt.Chart().mark_rule(tooltip=True, strokeWidth=3, opacity=0.35)
    dot = alt.Chart().mark_point(tooltip=True, filled=True, size=22, opacity=1)
    return [
        bar.encode(y=least, y2="most", **channels),
        dot.encode(y=number("mean", unit), **channels),
    ]


def shade(rows: Sequence[Row], x: alt.X) -> alt.Chart:
    """Return shaded stretches of time, each from `at` to `until`."""
    mark = alt.Chart(alt.InlineData(values=list(rows))).mark_rect(color=COLOURS[5], opacity=0.35)
    return _encoded(mark, x=x, x2="until", detail="partition:N")


def _encoded(chart: alt.Chart, **channels: Any) -> alt.Chart:
    encoded: alt.Chart = chart.encode(**channels)
    return encoded


def time(name: str, first: int, end: int) -> dict[str, Any]:
    """Return the settings of a channel of one kind of time from `first` to `end`.

    Its axis says which time it shows, and of which days.
    """
    days = " to ".join(dict.fromkeys(utc(min(at, LAST_EVENT_TIME_MS))[:10] for at in (first, end)))
    scale = alt.Scale(type="utc", domain=[first, end], nice=False)
    axis = alt.Axis(format=time_format(first, end), tickCount=alt.ExprRef("width / 90"))
    # In one line it would be wider than the chart is on a phone.
    title = [f"{name} (UTC)", days]
    return {"type": "temporal", "title": title, "scale": scale, "axis": axis}


def at(name: str, first: int, end: int) -> alt.X:
    """Return the horizontal channel of one kind of time."""
    return alt.X("at", **time(name, first, end))


def number(field: str, title: str, **settings: Any) -> alt.Y:
    """Return a vertical channel of numbers."""
    axis = alt.Axis(tickCount=5, format=settings.pop("format", alt.Undefined))
    return alt.Y(field, type="quantitative", title=title, axis=axis, **settings)


def colour(names: Sequence[Any], field: str = "of") -> alt.Color:
    """Return a channel with a colour for each name, in their order. It has a legend where there are
    several.
    """
    range_ = [COLOURS[i % len(COLOURS)] for i in range(len(names))]
    scale = alt.Scale(domain=list(names), range=range_)
    title = None if field == "of" else field
    legend = alt.Legend(title=title, symbolType="square") if len(names) > 1 else None
    return alt.Color(field, type="nominal", scale=scale, legend=legend)


def told_apart(names: Sequence[Any], field: str = "of") -> dict[str, Any]:
    """Return channels with a colour and a width for each name, the earlier ones wider: so each of
    several lines that lie on each other is seen.
    """
    scale = alt.Scale(type="ordinal", domain=list(names), range=_widths(len(names)))
    width = alt.StrokeWidth(field, type="nominal", scale=scale, legend=None)
    return {"color": colour(names, field), "strokeWidth": width}


def _widths(count: int) -> list[float]:
    step = min(3.0, 8 / max(1, count - 1))
    return [round(1.6 + step * n, 2) for n in reversed(range(count))]


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


def in_unit(rows: Sequence[Mapping[str, Any]], *fields: str) -> tuple[list[Row], str]:
    """Return rows with these durations (ms) in the largest unit that the longest of them fills, and
    that unit.
    """
    longest = max((abs(row[field]) for row in rows for field in fields), default=0)
    unit, length = next((unit for unit in UNITS if longest >= unit[1]), UNITS[-1])
    return [
        {**row, **{field: round(row[field] / length, 3) for field in fields}} for row in rows
    ], unit


def significant(value: float) -> float:
    """Return a number with four digits that count, however small it is."""
    return float(f"{round(value, 12):.4g}")


def extended(rows: Sequence[Row], by: str, end: int) -> list[Row]:
    """Return the rows, and the last one of each value of `by` again at the end: its value holds
    until then.
    """
    last_rows = {row[by]: row for row in rows}
    return [*rows, *({**row, "at": end} for row in last_rows.values())]
