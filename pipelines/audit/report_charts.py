"""The report's charts: plain rows in, Vega-Lite specifications out.

Names out of the lake (sources, reasons) are only ever values in a chart's data, never a part of an expression or a field's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from pipelines.audit.report_drawing import (
    COLOURS,
    Spec,
    TimeAxis,
    chart_of,
    colour,
    cycled,
    days,
    has_few,
    partitions_in,
    room,
    spec_of,
    time_format,
    tips_of,
    unit_for,
    with_times,
)
from pipelines.audit.report_merge import Column, MatchedIn, OpenIn, Refused
from pipelines.audit.report_steps import Steps
from pipelines.audit.report_wall import HELD, IDLE, ClockAt, CountIn, DelayIn, LeadIn, Stretch
from pipelines.audit.show import duration

ALL_SOURCES = "all sources"
"""Beside the sources' names, none of which has a space in it."""

_WIDE_COLOUR = "#b8b8b8"

_SHORTENED = "length(datum.label) > 26 ? slice(datum.label, 0, 13) + '…' + slice(datum.label, -12) : datum.label"
"""A long name without its middle: its end, with the partition, tells it from others."""


# -- over wall time


def clock_chart(clocks: Sequence[ClockAt], axis: TimeAxis) -> Spec:
    """A line for each partition: wall time across, event time up."""
    times = [at.clock for at in clocks if at.clock is not None]
    y = alt.Y(
        "clock:T",
        scale=alt.Scale(type="utc", nice=False),
        axis=alt.Axis(format=time_format(min(times), max(times)), title=f"event time (UTC), {days(times)}", **room(axis)),
    )
    rows = [{"partition": str(at.partition), "at": at.at, "clock": at.clock} for at in clocks]
    lines = chart_of(rows, 240).mark_line(interpolate="step-after", strokeWidth=1.8, point=has_few(rows, "partition"))
    encoded = lines.encode(
        axis.x("at"),
        y,
        colour("partition", partitions_in(rows, "partition"), "partition", symbol="stroke"),
        tooltip=["partition:N", *tips_of("at", "clock")],
    )
    return spec_of(with_times(encoded, "at", "clock"))


def lead_chart(leads: Sequence[LeadIn], sources: Sequence[str], axis: TimeAxis) -> Spec:
    """A panel for each source, in them a line for each partition."""
    unit, length = unit_for(max(at.lead for at in leads))
    top = max(at.lead for at in leads) / length or 1
    rows = [
        {"source": at.source, "partition": str(at.partition), "at": at.at, "lead": at.lead / length, "text": duration(at.lead)}
        for at in _held_to_the_end(leads, axis.end)
    ]
    tips = ["source:N", "partition:N", *tips_of("at"), alt.Tooltip("text:N", title="lead")]
    panels = []
    for source in sources:
        mine = [row for row in rows if row["source"] == source]
        y = alt.Y("lead:Q", scale=alt.Scale(domain=[0, top]), axis=alt.Axis(title=unit, tickCount=4, **room(axis)))
        lines = chart_of(mine, 110).mark_line(interpolate="step-after", strokeWidth=1.8)
        encoded = lines.encode(
            axis.x("at"), y, colour("partition", partitions_in(rows, "partition"), "partition", symbol="stroke"), tooltip=tips
        )
        panels.append(with_times(encoded, "at").properties(title=source))
    return spec_of(alt.vconcat(*panels, spacing=8))


def stretch_chart(stretches: Sequence[Stretch], sources: Sequence[str], axis: TimeAxis) -> Spec:
    """A bar for each stretch, in a row for each topic-partition that has one."""
    rank = {source: i for i, source in enumerate(sources)}
    ordered = sorted(stretches, key=lambda s: (rank.get(s.source, len(rank)), s.partition))
    places = list(dict.fromkeys(_place(stretch) for stretch in ordered))
    rows = [
        {"place": _place(s), "kind": s.kind, "since": s.since, "until": s.until, "text": duration(s.until - s.since)}
        for s in stretches
    ]
    y = alt.Y("place:N", sort=places, axis=alt.Axis(title=" ", grid=True, labelExpr=_SHORTENED, **room(axis)))
    colours = colour("kind", [HELD, IDLE], colours=(COLOURS[1], COLOURS[0]))
    tips = ["place:N", "kind:N", *tips_of("since", "until"), alt.Tooltip("text:N", title="for")]
    bars = (
        chart_of(rows, alt.Step(16))
        .mark_bar(minBandSize=3)
        .encode(axis.x("since"), alt.X2("until"), y, colours, yOffset=alt.YOffset("kind:N", sort=[HELD, IDLE]), tooltip=tips)
    )
    return spec_of(with_times(bars, "since", "until"))


def rate_chart(counts: Sequence[CountIn], names: Sequence[str], steps: Steps, axis: TimeAxis, title: str) -> Spec:
    """How many a second in every step, one upon the other."""
    seconds = steps.width / 1000
    rows = [
        {"of": at.of, "place": names.index(at.of), "at": time, "rate": round(at.total / seconds, 3), "total": at.total}
        for at in counts
        for time in ([at.at, steps.end] if at.at == steps.starts[-1] else [at.at])
    ]
    y = alt.Y("rate:Q", stack="zero", axis=alt.Axis(title=title, tickCount=5, **room(axis)))
    tips = [
        "of:N",
        *tips_of("at"),
        alt.Tooltip("rate:Q", title="a second", format=",.1f"),
        alt.Tooltip("total:Q", title="in all", format=","),
    ]
    areas = chart_of(rows, 150).mark_area(interpolate="step-after", opacity=0.85)
    colours = colour("of", names)
    return spec_of(with_times(areas.encode(axis.x("at"), y, colours, alt.Order("place:Q"), tooltip=tips), "at"))


def delay_chart(delays: Sequence[DelayIn], names: Sequence[str], steps: Steps, axis: TimeAxis) -> Spec:
    """In every step the mean as a dot, on a bar from the shortest to the longest; those of one step stand side by side."""
    unit, length = unit_for(max(max(at.most, -at.least) for at in delays))
    rows = [
        {
            "of": at.of,
            "at": at.at + steps.width * (names.index(at.of) + 1) // (len(names) + 1),
            "least": at.least / length,
            "mean": at.mean / length,
            "most": at.most / length,
            "text": " / ".join(_signed(ms) for ms in (at.least, at.mean, at.most)),
        }
        for at in delays
    ]
    base = with_times(chart_of(rows, 150), "at").encode(
        axis.x("at"),
        colour("of", names),
        tooltip=["of:N", *tips_of("at"), alt.Tooltip("text:N", title="shortest / mean / longest")],
    )
    y = alt.Axis(title=unit, tickCount=5, **room(axis))
    ranges = base.mark_rule(strokeWidth=3, opacity=0.35).encode(alt.Y("least:Q", axis=y), alt.Y2("most"))
    return spec_of(ranges + base.mark_point(filled=True, size=22, opacity=1).encode(alt.Y("mean:Q", axis=y)))


# -- over event time


def open_chart(means: Sequence[OpenIn], complete_until: int | None, steps: Steps, axis: TimeAxis) -> Spec:
    """How many are open, and a line where the smallest clock is."""
    rows = [{"at": known.at, "open": round(known.mean, 2)} for known in means]
    rows.append({"at": means[-1].at + steps.width, "open": rows[-1]["open"]})
    y = alt.Y("open:Q", axis=alt.Axis(title="merge records", tickCount=5, **room(axis)))
    area = chart_of(rows, 200).mark_area(interpolate="step-after", color=COLOURS[0], opacity=0.85)
    tips = [*tips_of("at"), alt.Tooltip("open:Q", format=",.1f")]
    chart: Any = with_times(area.encode(axis.x("at"), y, tooltip=tips), "at")
    if complete_until is not None and axis.first <= complete_until <= axis.end:
        chart += chart_of([{"at": complete_until}], 200).mark_rule(strokeDash=[4, 3], color=COLOURS[6]).encode(axis.x("at"))
    return spec_of(chart)


def match_chart(matched: Sequence[MatchedIn], sources: Sequence[str], steps: Steps, axis: TimeAxis) -> Spec:
    """The share with parts of each source, and of all of them."""
    names = [ALL_SOURCES, *sources]
    known = {at.at: at for at in matched}
    rows = [
        {
            "of": name,
            "at": start + steps.width // 2,
            "share": None if at is None else n / at.records,
            "records": at and at.records,
        }
        for start in steps.starts
        for at in [known.get(start)]
        for name, n in zip(names, (at.by_all, *at.by_source) if at else [0] * len(names), strict=True)
    ]
    y = alt.Y(
        "share:Q",
        scale=alt.Scale(domain=[0, 1]),
        axis=alt.Axis(title="of merge records", format=".0%", tickCount=5, **room(axis)),
    )
    colours = colour("of", names, "parts of", (_WIDE_COLOUR, *cycled(len(sources))), symbol="stroke")
    # The share of all sources lies under the others as a wide line: it is often that of the rarest of them.
    widths = alt.Scale(type="ordinal", domain=names, range=[5, *([1.8] * len(sources))])
    tips = [alt.Tooltip("of:N"), *tips_of("at"), alt.Tooltip("share:Q", format=".1%"), alt.Tooltip("records:Q", format=",")]
    lines = (
        chart_of(rows, 200)
        .mark_line(point=alt.OverlayMarkDef(size=14, strokeWidth=0))
        .encode(axis.x("at"), y, colours, alt.StrokeWidth("of:O", scale=widths, legend=None), tooltip=tips)
    )
    return spec_of(with_times(lines, "at"))


# -- without a time


def refused_chart(refused: Sequence[Refused], sources: Sequence[str]) -> Spec:
    """A bar for each reason and source, with its number."""
    reasons = list(dict.fromkeys(row.why for row in refused))
    names = [*sources, *sorted({row.source for row in refused} - set(sources))]
    rows = [row._asdict() for row in refused]
    most = max(row.records for row in refused)
    y = alt.Y("why:N", sort=reasons, axis=alt.Axis(title=None, labelLimit=180))
    x = alt.X("records:Q", scale=alt.Scale(domain=[0, most * 1.12]), axis=alt.Axis(title="records", tickCount=6))
    offset = alt.YOffset("source:N", sort=names)
    tips = [alt.Tooltip("why:N"), alt.Tooltip("source:N"), alt.Tooltip("records:Q", format=",")]
    base = chart_of(rows, alt.Step(18)).encode(x, y, offset, tooltip=tips)
    numbers = base.mark_text(align="left", dx=4, fontSize=11).encode(text=alt.Text("records:Q", format=","))
    return spec_of(base.mark_bar().encode(colour("source", names)) + numbers)


def size_chart(columns: Sequence[Column]) -> Spec:
    """How many merge records have how many parts."""
    rows = [{"parts": _range_text(column), "records": column.records} for column in columns]
    x = alt.X("parts:N", sort=None, axis=alt.Axis(title="parts (all sources together)", labelAngle=0))
    return _histogram(rows, x, alt.Tooltip("parts:N"))


def duration_chart(columns: Sequence[Column]) -> Spec:
    """How many merge records last how long, those of no duration left out."""
    unit, length = unit_for(max(column.most for column in columns))
    rows = [
        {"since": (c.least - 1) / length, "until": c.most / length, "records": c.records, "text": f"up to {duration(c.most)}"}
        for c in columns
        if c.most
    ]
    scale = alt.Scale(domain=[0, max(column.most for column in columns) / length], nice=False)
    x = alt.X("since:Q", scale=scale, axis=alt.Axis(title=unit, tickCount=10))
    return _histogram(rows, x, alt.Tooltip("text:N", title="duration"), alt.X2("until"))


def _histogram(rows: list[dict[str, Any]], x: alt.X, tip: alt.Tooltip, *more: alt.X2) -> Spec:
    y = alt.Y("records:Q", axis=alt.Axis(title="merge records", tickCount=5))
    bars = chart_of(rows, 180).mark_bar(color=COLOURS[0], stroke="white", strokeWidth=0.5)
    return spec_of(bars.encode(x, y, alt.Y2(datum=0), *more, tooltip=[tip, alt.Tooltip("records:Q", format=",")]))


def _held_to_the_end(leads: Sequence[LeadIn], end: int) -> list[LeadIn]:
    """A lead holds until the next batch: the last one of each line up to the axis' end."""
    last = {(at.source, at.partition): at for at in sorted(leads, key=lambda at: at.at)}
    return [*leads, *(at._replace(at=end) for at in last.values())]


def _place(stretch: Stretch) -> str:
    return f"{stretch.source}[{stretch.partition}]"


def _range_text(column: Column) -> str:
    return str(column.most) if column.least == column.most else f"{column.least}–{column.most}"


def _signed(ms: int) -> str:
    return f"-{duration(-ms)}" if ms < 0 else duration(ms)
