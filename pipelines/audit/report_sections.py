"""The report's sections, each of one kind of time: what every chart says, or the sentence that stands in its place.

Captions say what is counted, and what is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from pipelines.audit import report_charts as charts
from pipelines.audit.report import SHOWN_PARTITIONS, Report
from pipelines.audit.report_drawing import Spec, TimeAxis
from pipelines.audit.report_merge import EventTime
from pipelines.audit.report_wall import WallTime
from pipelines.audit.show import duration, utc


class Figure(NamedTuple):
    """A chart with its caption; or, where there is nothing to draw, the caption alone says so."""

    title: str
    caption: str
    draw: Callable[[], Spec] | None = None


class Section(NamedTuple):
    """Figures about one kind of time."""

    title: str
    about: str
    figures: Sequence[Figure]


def sections(report: Report) -> list[Section]:
    """The page from top to bottom."""
    return [
        Section("Wall time", "When Watersmeet did what, by the clocks of the machines that did it.", list(_wall_time(report))),
        Section(
            "Kafka's timestamps",
            "When the records were sent, as Kafka has it: by the producers' clocks or the broker's.",
            list(_kafka_time(report)),
        ),
        Section("Event time", "What the records say themselves, however fast they were processed.", list(_event_time(report))),
        Section("In all", "Over the whole of the lake.", list(_totals(report))),
    ]


# -- wall time


def _wall_time(report: Report) -> Iterator[Figure]:
    wall = report.wall
    if wall is None:
        yield Figure("Batches", "Silver has not merged anything yet.")
        return
    places = [f"{source}[{partition}]" for source in report.sources for partition in report.shown]
    # Room for the longest name of a row, so that all charts of the section stand exactly under each other.
    label_width = min(170, max(84, 8 + 7 * max((len(place) for place in places), default=0)))
    axis = TimeAxis.over("wall time", wall.steps, wall.rate_steps, label_width=label_width)
    yield _clocks(report, wall, axis)
    yield _leads(report, wall, axis)
    yield _stretches(report, wall, axis)
    yield _merged(report, wall, axis)
    yield _merge_times(wall, axis)
    yield _published(wall, axis)
    yield _to_silver(report, wall, axis)
    yield _to_gold(wall, axis)
    yield _ages(wall, axis)


def _clocks(report: Report, wall: WallTime, axis: TimeAxis) -> Figure:
    title = "Clock of each partition"
    if all(at.clock is None for at in wall.clocks):
        return Figure(title, "No partition has a clock: in each there is a source without a record.")
    caption = (
        f"How far event time had come, after the last batch of each step of {duration(wall.steps.width)}. "
        f"Where a line is flat, at least one source did not go on. {_shown(report)}"
    )
    return Figure(title, caption, partial(charts.clock_chart, wall.clocks, axis))


def _leads(report: Report, wall: WallTime, axis: TimeAxis) -> Figure:
    title = "Lead of each source over the clock"
    if not wall.leads:
        return Figure(title, "No partition has a clock, so no source has a lead.")
    caption = (
        f"Head minus clock: the largest in each step of {duration(wall.rate_steps.width)}, kept up to the next batch. "
        f"A source whose lead is 0 is the one that the clock waits for. {_shown(report)}"
    )
    return Figure(title, caption, partial(charts.lead_chart, wall.leads, report.sources, axis))


def _stretches(report: Report, wall: WallTime, axis: TimeAxis) -> Figure:
    title = "Held and idle sources"
    if not wall.stretches:
        return Figure(title, "No source had to wait for another one, and the idle policy never spoke.")
    policy = "" if report.idle_after_ms is not None else " (merge.idle_after is null: it is off now)"
    caption = (
        "Held: records of the source waited for another source, in a batch of the step or since the batch before. Whatever is "
        "ahead is held, most often for moments: how far ahead it was, the leads say. "
        f"Idle: the source was silent, and the idle policy spoke for it{policy}. "
        f"In steps of {duration(wall.steps.width)}; topic-partitions that never were either are left out. {_shown(report)}"
    )
    return Figure(title, caption, partial(charts.stretch_chart, wall.stretches, report.sources, axis))


def _merged(report: Report, wall: WallTime, axis: TimeAxis) -> Figure:
    title = "Silver: offsets merged per second"
    if not wall.merged:
        return Figure(title, "No batch has passed an offset yet.")
    caption = (
        f"The offsets that batches passed in each step of {duration(wall.rate_steps.width)}, by the time at which a batch was "
        "decided. Late and refused records and the markers of transactions are offsets too."
    )
    draw = partial(charts.rate_chart, wall.merged, report.sources, wall.rate_steps, axis, "offsets a second")
    return Figure(title, caption, draw)


def _merge_times(wall: WallTime, axis: TimeAxis) -> Figure:
    title = "Silver: time to merge a batch"
    if not wall.merges:
        return Figure(title, "No batch's commit to silver is noted yet.")
    caption = f"From the decision of a batch until its commit to silver. {_dots(wall)}"
    return Figure(title, caption, partial(charts.delay_chart, wall.merges, ["merge"], wall.rate_steps, axis))


def _published(wall: WallTime, axis: TimeAxis) -> Figure:
    title = "Gold: messages published per second"
    if not wall.published:
        return Figure(title, "Nothing was published yet.")
    caption = f"The messages of the transactions that were noted in each step of {duration(wall.rate_steps.width)}."
    draw = partial(charts.rate_chart, wall.published, ["published"], wall.rate_steps, axis, "messages a second")
    return Figure(title, caption, draw)


def _to_silver(report: Report, wall: WallTime, axis: TimeAxis) -> Figure:
    title = "Delay from Kafka to silver"
    if not wall.to_silver:
        return Figure(title, "No batch has passed a record yet.")
    caption = (
        "Of the last record that a batch passed in a topic-partition: from Kafka's timestamp of it until the batch was decided, "
        f"with all the waiting for other sources. Of a backlog it is the age. {_dots(wall)}"
    )
    return Figure(title, caption, partial(charts.delay_chart, wall.to_silver, report.sources, wall.rate_steps, axis))


def _to_gold(wall: WallTime, axis: TimeAxis) -> Figure:
    title = "Delay from silver to gold"
    if not wall.to_gold:
        return Figure(title, "Nothing was published yet.")
    caption = (
        "Of the last message of a transaction: from the decision of the batch in which it timed out, so with that batch's "
        f"merge, until its publication was noted. {_dots(wall)}"
    )
    return Figure(title, caption, partial(charts.delay_chart, wall.to_gold, ["silver to gold"], wall.rate_steps, axis))


def _ages(wall: WallTime, axis: TimeAxis) -> Figure:
    title = "Clock behind wall time"
    if not wall.ages:
        return Figure(title, "No partition has a clock.")
    caption = (
        "Wall time minus the clock when a batch was decided, over all partitions. Of live data it says how far behind the merge "
        f"is; of old data, how old it is. {_dots(wall)}"
    )
    return Figure(title, caption, partial(charts.delay_chart, wall.ages, ["clock"], wall.rate_steps, axis))


def _shown(report: Report) -> str:
    """Says so where not every partition has its line."""
    if len(report.shown) == len(report.partitions):
        return ""
    return f"Shown are {SHOWN_PARTITIONS} of {len(report.partitions)} partitions: those whose clock is furthest behind."


def _dots(wall: WallTime) -> str:
    return f"A dot is the mean in a step of {duration(wall.rate_steps.width)}, its bar goes from the shortest to the longest."


# -- Kafka's timestamps


def _kafka_time(report: Report) -> Iterator[Figure]:
    title, found = "Bronze: records per second", report.arrivals
    if found is None:
        yield Figure(title, "Bronze has no record yet.")
        return
    records = sum(at.total for at in found.records)
    caption = f"{records:,} records, heartbeats and refused ones too, in steps of {duration(found.steps.width)}."
    axis = TimeAxis.over("Kafka's timestamp", found.steps)
    draw = partial(charts.rate_chart, found.records, report.sources, found.steps, axis, "records a second")
    yield Figure(title, caption, draw)


# -- event time


def _event_time(report: Report) -> Iterator[Figure]:
    events = report.events
    if events is None:
        yield Figure("Merge records", "Silver has no merge record yet.")
        return
    axis = TimeAxis.over("event time", events.steps, events.match_steps)
    yield _open(report, events, axis)
    yield _matched(report, events, axis)


def _open(report: Report, events: EventTime, axis: TimeAxis) -> Figure:
    title, clock = "Open merge records", events.complete_until
    if not events.open:
        return Figure(
            title, "All merge records begin so close to the clock that there is no whole step of time to count them in."
        )
    dashed = "" if clock is None else f" Dashed: the smallest clock, {utc(clock)}; after it more may come in any partition."
    caption = (
        "Computed from the merge records, not observed while they were open: each counts from its event time until "
        f"{duration(report.timeout_ms)} (the timeout) later. The mean of each step of {duration(events.steps.width)}, all "
        f"partitions together; records that a jump closed are left out.{dashed}"
    )
    return Figure(title, caption, partial(charts.open_chart, events.open, clock, events.steps, axis))


def _matched(report: Report, events: EventTime, axis: TimeAxis) -> Figure:
    title, records = "Match rate", sum(at.records for at in events.matched)
    if not records:
        return Figure(title, "No merge record has timed out yet.")
    counts = [sum(at.by_source[i] for at in events.matched) for i in range(len(report.sources))]
    shares = ", ".join(f"of {source} {n / records:.1%}" for source, n in zip(report.sources, counts, strict=True))
    in_all = sum(at.by_all for at in events.matched) / records
    caption = (
        f"Of the {records:,} merge records that have timed out, {in_all:.1%} have parts of all sources; {shares}. "
        f"By event time, in steps of {duration(events.match_steps.width)}; records that a jump closed are left out."
    )
    draw = partial(charts.match_chart, events.matched, report.sources, events.match_steps, axis)
    return Figure(title, caption, draw)


# -- totals


def _totals(report: Report) -> Iterator[Figure]:
    title = "Late and quarantined records"
    if report.refused:
        caption = "Late: more than the timeout behind its own topic-partition. The other rows are the reasons of the quarantine."
        yield Figure(title, caption, partial(charts.refused_chart, report.refused, report.sources))
    else:
        yield Figure(title, "No record came late, and none was quarantined.")
    yield _sizes(report)
    yield _durations(report)


def _sizes(report: Report) -> Figure:
    title, records = "Size of merge records", sum(column.records for column in report.sizes)
    if not records:
        return Figure(title, "No merge record has timed out yet.")
    caption = f"How many of the {records:,} that have timed out have so many parts; records that a jump closed are left out."
    return Figure(title, caption, partial(charts.size_chart, report.sizes))


def _durations(report: Report) -> Figure:
    title, lasting = "Duration of merge records", sum(column.records for column in report.durations if column.most)
    if not lasting:
        return Figure(title, "No merge record that has timed out has parts of different times.")
    none = sum(column.records for column in report.durations if not column.most)
    caption = (
        f"From the first to the last event time of their parts, of {lasting:,} that have timed out. Left out: {none:,} with a "
        "single part or all parts at one time, and those that a jump closed."
    )
    return Figure(title, caption, partial(charts.duration_chart, report.durations))
