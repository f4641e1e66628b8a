"""What the report's charts have in common: time axes, colours, texts. A time axis is in UTC and says which time it shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import altair as alt

from pipelines.audit.report_steps import Steps
from pipelines.audit.show import utc

Spec = dict[str, Any]

WIDTH = 820
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#4D4D4D", "#8C7A00")
"""Okabe and Ito's palette, told apart also by those who see no difference of red and green; its yellow darkened for paper."""

CONFIG: Spec = {
    "font": "system-ui, sans-serif",
    "axis": {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal", "gridColor": "#e4e4e4", "labelOverlap": True},
    "legend": {
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "orient": "top",
        "labelLimit": 200,
        "symbolOpacity": 1,
    },
    "title": {"fontSize": 12, "fontWeight": "normal", "anchor": "start"},
    "view": {"stroke": None},
}

_DAY_MS = 86_400_000
UNITS = (("days", _DAY_MS), ("hours", 3_600_000), ("minutes", 60_000), ("seconds", 1000), ("milliseconds", 1))
_TIME = "%Y-%m-%d %H:%M:%S.%L"


class TimeAxis(NamedTuple):
    """One kind of time from `first` to `end`: each chart of a section has the same, at the same place on the page."""

    name: str
    first: int
    end: int
    label_width: int = 80

    @classmethod
    def over(cls, name: str, *steps: Steps, label_width: int = 80) -> TimeAxis:
        """The axis that has all of these steps."""
        return cls(name, min(each.first for each in steps), max(each.end for each in steps), label_width)

    def x(self, field: str) -> alt.X:
        """The horizontal axis."""
        scale = alt.Scale(type="utc", domain=[self.first, self.end], nice=False)
        axis = alt.Axis(format=time_format(self.first, self.end), title=self.title, tickCount=8, grid=True)
        return alt.X(field, type="temporal", scale=scale, axis=axis)

    @property
    def title(self) -> str:
        """What the axis shows, and between which days."""
        return f"{self.name} (UTC), {days([self.first, self.end])}"


def time_format(first: int, end: int) -> str:
    """As much of a time as tells the ticks between the two apart."""
    width = end - first
    if width <= 10_000:
        return "%H:%M:%S.%L"
    if width <= 600_000:
        return "%H:%M:%S"
    if width <= _DAY_MS:
        return "%H:%M"
    return "%m-%d %H:%M" if width <= 8 * _DAY_MS else "%Y-%m-%d"


def unit_for(longest_ms: float) -> tuple[str, int]:
    """The largest unit that the longest duration fills, with its length in ms."""
    return next((unit for unit in UNITS if abs(longest_ms) >= unit[1]), UNITS[-1])


def chart_of(rows: list[dict[str, Any]], height: int | alt.Step) -> alt.Chart:
    """A chart of these rows, as wide as all of them; what it draws is to be said yet."""
    chart: alt.Chart = alt.Chart(alt.InlineData(values=rows)).properties(width=WIDTH, height=height)
    return chart


def spec_of(chart: Any) -> Spec:
    """The specification alone: the page has one configuration and one library for all of them."""
    spec: Spec = chart.to_dict()
    return {name: value for name, value in spec.items() if name not in ("$schema", "config")}


def colour(
    field: str, names: Sequence[str], title: str | None = None, colours: Sequence[str] | None = None, symbol: str = "square"
) -> alt.Color:
    """A colour for each name, in their order; a legend where there is a choice."""
    scale = alt.Scale(domain=list(names), range=list(colours or cycled(len(names))))
    return alt.Color(
        f"{field}:N",
        scale=scale,
        legend=alt.Legend(title=title, symbolType=symbol, symbolStrokeWidth=3) if len(names) > 1 else None,
    )


def cycled(count: int) -> list[str]:
    """So many colours, from the first on."""
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def with_times(chart: Any, *fields: str) -> Any:
    """With each time as text in UTC too, since a tooltip would tell it in the reader's zone."""
    for field in fields:
        chart = chart.transform_calculate(
            **{f"{field}_utc": f"isValid(datum.{field}) ? utcFormat(datum.{field}, '{_TIME}') : '-'"}
        )
    return chart


def tips_of(*fields: str) -> list[alt.Tooltip]:
    """These times, of a chart `with_times`, in its tooltip."""
    return [alt.Tooltip(f"{field}_utc:N", title=f"{field} (UTC)") for field in fields]


def room(axis: TimeAxis) -> dict[str, Any]:
    """The room of the vertical axis, so that the same time stands at the same place in every chart of a section."""
    return {"minExtent": axis.label_width, "maxExtent": axis.label_width}


def has_few(rows: Sequence[Mapping[str, Any]], by: str) -> bool:
    """Whether a line has so few points that one alone, which makes no line, must be seen."""
    return len(rows) <= 30 * len({row[by] for row in rows})


def partitions_in(rows: Iterable[Mapping[str, Any]], field: str) -> list[str]:
    """The partitions among the rows, in order."""
    return sorted({row[field] for row in rows}, key=int)


def days(times: Sequence[int]) -> str:
    """The first and the last day (UTC) of these times."""
    first, last = utc(min(times))[:10], utc(max(times))[:10]
    return first if first == last else f"{first} to {last}"
