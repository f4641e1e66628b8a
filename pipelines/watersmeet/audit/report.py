"""The content of the report, read from the lake by small questions: figures of a few hundred rows,
however large the lake is.

All times are epoch ms; wall time, Kafka's timestamps and event time are kept apart. No large table
is read whole: totals are summaries, times are read in pieces of bounded size, and the parts of
merge records from a sample.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.audit import report_charts as charts
from watersmeet.audit.doubts import why_incomplete
from watersmeet.audit.newest import doubts_of_newest
from watersmeet.audit.report_charts import (
    Figure,
    Numbers,
    Row,
    Section,
    Spec,
    Steps,
    colour,
    drawn,
    extended,
    in_unit,
    layer,
    number,
    told_apart,
)
from watersmeet.audit.show import duration, utc
from watersmeet.core import sequence as sequences
from watersmeet.core.inputs import InputId
from watersmeet.core.times import LAST_EVENT_TIME_MS
from watersmeet.errors import Problem
from watersmeet.lake.epochs import read_epochs
from watersmeet.lake.generations import read_generations
from watersmeet.lake.location import Lake
from watersmeet.lake.newest import bronze_ends
from watersmeet.lake.progress import last_batch
from watersmeet.lake.published import is_of
from watersmeet.lake.snapshot import Snapshot
from watersmeet.lake.table_reader import TableReader, Where
from watersmeet.lake.tables import (
    CORRECTIONS,
    DUPLICATES,
    EXCESS,
    IDLE_HEARTBEATS,
    LATE,
    MERGED,
    PROGRESS,
    PUBLISHED,
    QUARANTINE,
    SILVER,
    bronze,
)
from watersmeet.lake.tenant_state import BatchEnd
from watersmeet.lake.tenants import clocks_at, times_of, unfinished
from watersmeet.settings import Settings

Columns = dict[str, Numbers]

LOW_MATCH = 0.5  # share of merge records with parts of all sources below which reasons are shown
SHOWN_PARTITIONS = 8  # more lines cannot be told apart, by colour or otherwise
STEPS = 240  # maximum number of steps of time in a chart
FEWEST_STEPS = 10  # with fewer steps of wall time that saw any work, charts are empty axes
SHARE_OF = 10  # merge records per share on average, as long as FEWEST_SHARES steps are left
FEWEST_SHARES = 24
CHUNK_ROWS = 2_000_000  # maximum number of times read at once, and of rows of progress (the latest)
SAMPLED_RECORDS = 100_000  # where more have finished, about this many are read with their parts
# Beside the sources' names, none of which has a space in it.
ALL_SOURCES = "all sources"
_GOLD = "gold, all sources"
NULL = -1  # null in arrays of times, offsets and numbers, none of which is negative

COUNTS = (
    "in bronze",
    "open",
    "waiting",
    "timed out",
    "not valid",
    "late",
    "corrections",
    "duplicates",
    "excess",
    "quarantined",
    "published",
)
SLOWEST_TENANTS = 10  # maximum number of tenants furthest behind that are named
_INPUT = ("source", "topic")
_PROGRESS = (
    "batch",
    *_INPUT,
    "partition",
    "from_offset",
    "until_offset",
    "head",
    "clock",
    "committed_at",
)
_PUBLISHED = (
    "partition",
    "first_seq",
    "last_seq",
    "last_closed_at",
    "committed_at",
)
_IN_MERGE: Where = [[("status", "in", ["open", "waiting", "timed_out"])]]
_NOT_RESET: Where = [[("invalid_reason", "is null", None)], [("invalid_reason", "!=", "reset")]]
_SIZES = (*range(1, 9), *(2**n for n in range(4, 32)))
_NO_CLOCK = "No partition has a clock: in each there is a source without a record."
_SHOWN = f" Of more than {SHOWN_PARTITIONS} partitions, those whose clocks are furthest behind."
_NONE_FINISHED = "No merge record has timed out yet."


class Report(NamedTuple):
    """Everything that is on the page: facts by name, then sections from top to bottom."""

    name: str
    facts: Mapping[str, str]
    sections: Sequence[Section]


def read_report(reader: TableReader, settings: Settings, now_ms: int) -> Report:
    """Return the report of the lake as it is now. A table that does not exist yet counts as empty.

    Nothing is written.
    """
    snapshot = Snapshot(reader, settings)
    # The lake goes by its own rules, whatever the file says since.
    settings = read_epochs(snapshot, settings).current.settings
    lake = _LakeFigures(snapshot, settings)
    about = "When Watersmeet did what, by the clocks of the machines that did it."
    if lake.since:
        about += f" Only the latest batches, since {utc(lake.since)}."
    sent = "When the records were sent, as Kafka has it: by the producers' clocks or the broker's."
    themselves = "What the records say themselves, however fast they were processed."
    doubts = doubts_of_newest(snapshot, settings, bronze_ends(snapshot, settings))
    sections = [
        *_warnings(doubts),
        Section("Event time", themselves, [*lake.event_time(), lake.refused()]),
        Section("Partitions", "", [lake.partitions(), *lake.slowest_tenants()]),
        Section("Kafka's timestamps", sent, [lake.arrivals()]),
        Section("Wall time", about, list(lake.wall_time())),
    ]
    batches = lake.progress["batch"]
    committed = lake.progress["committed_at"]
    facts = {
        "made at": utc(now_ms),
        "lake": Lake(settings).location,
        "sources": ", ".join(settings.sources),
        **_window_of(settings),
        "last batch of silver": f"{batches[-1]:,}, committed at {utc(int(committed[-1]))}"
        if len(batches)
        else "none yet",
    }
    return Report(settings.name, facts, sections)


def _warnings(doubts: Sequence[Problem]) -> Iterator[Section]:
    """Yield a section with what looks wrong, where anything does."""
    if doubts:
        rows = _rows(("where", "what", "what helps"), ((p.where, p.what, p.fix) for p in doubts))
        about = "What breaks no rule, and may be meant: in the newest records of each source."
        warnings = Figure("Warnings", "As `watersmeet status` says them.", rows)
        yield Section("What looks wrong", about, [warnings])


class _LakeFigures:
    """A read of the lake at one moment; `settings` have the rules of its last epoch.

    `progress`: the table in the order of the batches, without batches that were committed before
    `since`.
    """

    def __init__(self, reader: TableReader, settings: Settings) -> None:
        self.reader = reader
        self.settings = settings
        self.lake = Lake(settings)
        self.sources = tuple(settings.sources)
        self.inputs = tuple(settings.inputs_by_name)
        self.hidden = settings.hidden_names
        [(count, first, last)] = self.summary(
            PROGRESS, [], "count *", "min batch", "max batch"
        ) or [(0, 0, 0)]
        is_long = count > CHUNK_ROWS
        earliest = last + 1 - (last + 1 - first) * CHUNK_ROWS // count if is_long else 0
        progress = self.read(PROGRESS, _PROGRESS, [[("batch", ">=", earliest)]])
        progress = _chosen(progress, np.argsort(progress["batch"], kind="stable"))
        self.progress = {**progress, "passed": progress["until_offset"] - progress["from_offset"]}
        self.since = int(progress["committed_at"][0]) if is_long else 0
        generations = read_generations(reader, settings)
        begin = generations.newest.from_batch if generations else 0
        own_clocks = np.where(progress["batch"] >= begin, progress["clock"], NULL)
        clocks = dict(_zipped(progress["partition"], own_clocks))
        self.clocks = {p: clock for p, clock in clocks.items() if clock != NULL}
        behind = sorted(clocks, key=lambda p: (p not in self.clocks, self.clocks.get(p, 0), p))
        self.shown = sorted(behind[:SHOWN_PARTITIONS])

    def partitions(self) -> Figure:
        """Return each partition's clock, and what became of its records."""
        counts: dict[int, Counter[str]] = defaultdict(Counter)
        for p in set(self.progress["partition"].tolist()):
            counts[p] = Counter()
        in_bronze = [("in bronze", bronze(source)) for source in self.sources]
        noted = [
            (name, name)
            for name in (LATE, CORRECTIONS, DUPLICATES, EXCESS)
            if name not in self.hidden
        ]
        for name, table in (*in_bronze, *noted, ("quarantined", QUARANTINE)):
            where: Where = [[("version", ">", 0)]] if table == CORRECTIONS else ()
            for p, count in self.summary(table, ["partition"], "count *", where=where):
                counts[p][name] += count
        for p, status, valid, count in self.summary(
            SILVER, ["partition", "status", "valid"], "count *", where=_IN_MERGE
        ):
            counts[p][status.replace("_", " ")] += count
            counts[p]["not valid"] += count * (valid is False)
        of_sink = [[is_of(sequences.MERGED)]]
        for p, last_seq in self.summary(PUBLISHED, ["partition"], "max last_seq", where=of_sink):
            counts[p]["published"] = last_seq + 1  # the sequence has no gap
        places = [("all", [*counts], min(self.clocks.values(), default=None))] if counts else []
        places += [(str(p), [p], self.clocks.get(p)) for p in sorted(counts)]
        names = [name for name in COUNTS if name not in self.hidden]
        rows: list[Row] = []
        for title, partitions, clock in places:
            total = sum((counts[p] for p in partitions), Counter[str]())
            figures = {name: total[name] for name in names}
            rows.append({"partition": title, "clock (UTC)": utc(clock), **figures})
        caption = (
            "The smallest clock of all, and sums. Merge records that timed out and are not valid "
            "are not published."
        )
        caption += (
            " Waiting: records that were read and wait for their tenants' clocks."
            if "waiting" in names
            else ""
        )
        caption += (
            " Corrections: late records that have corrected a merge record."
            if CORRECTIONS in names
            else ""
        )
        return Figure("Clocks and counts", caption if rows else "The lake has no record yet.", rows)

    def slowest_tenants(self) -> Iterator[Figure]:
        """Yield a table of the tenants that are furthest behind the clock of their partition.

        Only tenants with something open or waiting are in it.
        """
        if not self.settings.merge.has_tenants:
            return
        title = "Slowest tenants"
        last = last_batch(self.reader) if self.reader.exists(PROGRESS) else None
        if last is None or not (tenant_rows := unfinished(self.reader)).num_rows:
            yield Figure(title, "No tenant has anything open or waiting.", [])
            return
        moment = BatchEnd(last.cursors(), last.clocks)
        epochs = read_epochs(self.reader, self.settings)
        times = times_of(tenant_rows, clocks_at(self.reader, epochs, last.batch, moment))
        times.sort(key=lambda row: (row[2] or 0) - moment.clocks.get(row[0], 0))
        counts = {
            (row["partition"], row["tenant"], row["status"]): row["rows"]
            for row in tenant_rows.to_pylist()
        }
        rows: list[Row] = [
            {
                "tenant": tenant,
                "partition": p,
                "its clock (UTC)": utc(clock),
                "behind": duration(None if clock is None else moment.clocks[p] - clock),
                "open": counts.get((p, tenant, "open"), 0),
                "waiting": counts.get((p, tenant, "waiting"), 0),
            }
            for p, tenant, clock in times[:SLOWEST_TENANTS]
        ]
        caption = (
            f"How far their clocks are behind that of their partition; of {len(times):,} with "
            "something open or waiting."
        )
        yield Figure(title, caption, rows)

    def refused(self) -> Figure:
        """Return how many records are in no merge record, and why."""
        counts = [("late", *row) for row in self.summary(LATE, _INPUT, "count *")]
        if DUPLICATES not in self.hidden:
            counts += [("duplicate", *row) for row in self.summary(DUPLICATES, _INPUT, "count *")]
        counts += [("excess", *row) for row in self.summary(EXCESS, _INPUT, "count *")]
        quarantined = self.summary(QUARANTINE, ["reason", *_INPUT], "count *")
        names = self.settings.input_names

        def named(counts: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
            """Return counts by reason and by name of the input."""
            return sorted((reason, names[InputId(*place)], n) for reason, *place, n in counts)

        repeat = "" if DUPLICATES in self.hidden else "repeat a part, "
        caption = (
            f"Records that are in no merge record: they came too late, {repeat}belong to one that "
            "is too large (excess), or are in quarantine for this reason."
        )
        rows = _rows(("reason", "source", "records"), [*named(counts), *named(quarantined)])
        return Figure(
            "Late and refused records",
            caption if rows else "No record came late, and none was quarantined.",
            rows,
        )

    def wall_time(self) -> Iterator[Figure]:
        """Yield figures of when Watersmeet did what.

        Clocks, leads and idle sources are those of the partitions that are shown.
        """
        recent = [("committed_at", ">=", self.since), is_of(sequences.MERGED)]
        published = self.read(PUBLISHED, _PUBLISHED, [recent])
        decisions = self.read(
            IDLE_HEARTBEATS,
            (*_INPUT, "partition", "decided_at"),
            [[("decided_at", ">=", self.since)]],
        )
        committed = self.progress["committed_at"]
        times = np.concatenate([committed, published["committed_at"], decisions["decided_at"]])
        if not len(times):
            yield Figure("Batches", "Silver has not merged anything yet.", [])
            return
        steps = Steps.over(times.tolist(), STEPS, narrowest=1000)
        if np.count_nonzero(steps.totals(times)) < FEWEST_STEPS:
            batches = len(set(self.progress["batch"].tolist()))
            noun = "batch" if batches == 1 else "batches"
            caption = f"{batches:,} {noun} of silver: too few to draw what was done when."
            yield Figure("Batches", caption, [])
            return
        x = charts.time("wall time", steps.first, steps.end)
        yield self.clock_figure(steps, x)
        yield from self.lead_figures(steps, decisions, x)
        offsets_by_source = {
            source: np.where(self.progress["input"] == source, self.progress["passed"], 0)
            for source in self.inputs
        }
        totals = {
            source: steps.totals(committed, counts)
            for source, counts in offsets_by_source.items()
            if len(committed)
        }
        yield _rate("Silver: offsets merged per second", steps, totals, x, "offsets a second")
        messages = steps.totals(
            published["committed_at"], published["last_seq"] - published["first_seq"] + 1
        )
        totals = {_GOLD: messages} if messages.any() else {}
        yield _rate("Gold: messages published per second", steps, totals, x, "messages a second")
        yield self.delay_figure(steps, published, x)

    def clock_figure(self, steps: Steps, x: Spec) -> Figure:
        """Return each partition's clock after the last batch of each step."""
        at = steps.floor(self.progress["committed_at"]) + steps.width
        ends = _zipped(self.progress["partition"], at, self.progress["clock"])
        last = {
            (p, at): None if clock == NULL else clock for p, at, clock in ends if p in self.shown
        }
        clocks = [clock for clock in last.values() if clock is not None]
        rows = (
            _rows(("partition", "at", "clock"), ((*key, last[key]) for key in sorted(last)))
            if clocks
            else []
        )
        # A point alone makes no line, and must be seen.
        mark = charts.LINE | {"point": len(rows) <= 30 * len(self.shown)}
        y = charts.time("event time", min(clocks, default=0), max(clocks, default=0), "clock")
        caption = (
            "How far event time had come, after the last batch of each step of "
            f"{duration(steps.width)}.{_SHOWN}"
        )
        lines = layer(mark, x=x, y=y, **told_apart(self.shown, "partition"))
        return drawn("Clock of each partition", caption, rows, lines, nothing=_NO_CLOCK, height=240)

    def lead_figures(self, steps: Steps, decisions: Columns, x: Spec) -> Iterator[Figure]:
        """Yield each source's largest lead over the clock in each step, all to one scale.

        Steps in which the idle policy decided for the source are shaded.
        """
        progress = self.progress
        ahead = (
            np.isin(progress["partition"], self.shown)
            & (progress["clock"] != NULL)
            & (progress["head"] != NULL)
        )
        leads = {
            "source": progress["input"],
            "partition": progress["partition"],
            "at": steps.floor(progress["committed_at"]),
        }
        largest_leads = _grouped(
            _chosen({**leads, "lead": progress["head"] - progress["clock"]}, ahead), lead="max"
        )
        rows, unit = in_unit(largest_leads, "lead")
        y = number(
            "lead", unit, scale={"domain": [0, max((row["lead"] for row in rows), default=0) or 1]}
        )
        lines = layer(charts.LINE, x=x, y=y, **told_apart(self.shown, "partition"))
        caption = (
            f"Head minus clock: the largest in each step of {duration(steps.width)}, kept up to "
            "the next batch. The clock waits for the source whose lead is 0. Shaded: the idle "
            f"policy spoke for the source.{_SHOWN}"
        )
        marked = sorted(
            set(
                _zipped(
                    decisions["input"],
                    decisions["partition"],
                    steps.floor(decisions["decided_at"]),
                )
            )
        )
        place = {
            "x": x | {"field": "since"},
            "x2": {"field": "until"},
            "detail": {"field": "partition"},
        }
        for source in self.inputs:
            source_rows = extended(
                [row for row in rows if row["source"] == source], "partition", steps.end
            )
            bands = (
                (p, at, at + steps.width)
                for name, p, at in marked
                if name == source and p in self.shown
            )
            shade = layer(charts.SHADE, _rows(("partition", "since", "until"), bands), **place)
            yield drawn(
                f"Lead of {source} over the clock",
                caption,
                source_rows,
                shade,
                lines,
                nothing=_NO_CLOCK,
                height=110,
            )

    def delay_figure(self, steps: Steps, published: Columns, x: Spec) -> Figure:
        """Return the delay of each layer's work behind event time."""
        with_head = _chosen(self.progress, self.progress["head"] != NULL)
        noted = published["committed_at"]
        delays = {
            "of": np.concatenate([with_head["input"], np.full(len(noted), _GOLD, object)]),
            "at": steps.floor(np.concatenate([with_head["committed_at"], noted])),
            "ms": np.concatenate(
                [
                    with_head["committed_at"] - with_head["head"],
                    noted - published["last_closed_at"],
                ]
            ),
        }
        rows, unit = in_unit(
            _grouped(delays, least="min", mean="mean", most="max"), "least", "mean", "most"
        )
        both: dict[str, Any] = {"x": x, "color": colour([*self.inputs, _GOLD])}
        spans = layer(charts.SPAN, y=number("least", unit), y2={"field": "most"}, **both)
        caption = (
            "Silver: from a source's head, the latest event time that a batch knew of it, until "
            "the batch's commit. Gold: from when a transaction's last message timed out until its "
            "publication was noted. For old data, that is its age. A dot is the mean in a step of "
            f"{duration(steps.width)}, its bar goes from the shortest to the longest."
        )
        return drawn(
            "Delay behind event time",
            caption,
            rows,
            spans,
            layer(charts.DOT, y=number("mean", unit), **both),
        )

    def arrivals(self) -> Figure:
        """Return bronze's records by Kafka's timestamps."""
        title = "Bronze: records per second"
        column = "kafka_timestamp"
        in_range: Where = [[(column, ">=", 0), (column, "<=", LAST_EVENT_TIME_MS)]]
        out_of_range: Where = [[(column, "<", 0)], [(column, ">", LAST_EVENT_TIME_MS)]]
        beyond = sum(
            count
            for s in self.sources
            for (count,) in self.summary(bronze(s), [], "count *", where=out_of_range)
        )
        note = (
            f" {beyond:,} records have a timestamp of Kafka's that no calendar has, and are not "
            "drawn."
            if beyond
            else ""
        )
        spans = [
            self.summary(bronze(s), [], f"min {column}", f"max {column}", where=in_range)
            for s in self.sources
        ]
        sent = [time for span in spans for row in span for time in row if time is not None]
        if not sent:
            return Figure(
                title, f"Bronze has no record {'to draw' if beyond else 'yet'}.{note}", []
            )
        steps = Steps.over(sent, STEPS, narrowest=1000)
        none = np.zeros(steps.number)
        chunks = {s: self.times(bronze(s), column, in_range) for s in self.sources}
        totals = {source: sum(map(steps.totals, times), none) for source, times in chunks.items()}
        x = charts.time("Kafka's timestamp", steps.first, steps.end)
        figure = _rate(title, steps, totals, x, "records a second")
        return figure._replace(caption=figure.caption + note)

    def event_time(self) -> Iterator[Figure]:
        """Yield figures of merge records by event time, and of what the finished ones hold.

        Finished are those that timed out and that no jump closed. Where there are many, a sample is
        read: those that begin in the first part of a step.
        """
        figures = "count *", "min event_time", "max event_time", "max due"
        counts = self.summary(MERGED, ["status", "invalid_reason"], *figures)
        if not counts:
            yield Figure("Merge records", "Silver has no merge record yet.", [])
            return
        finished = sum(
            count for status, why, count, *_ in counts if status == "timed_out" and why != "reset"
        )
        event_times = [time for *_, first, last, _ in counts for time in (first, last)]
        steps = Steps.over(event_times, STEPS)

        part = steps.width * SAMPLED_RECORDS // max(finished, 1)
        spans = [[("event_time", ">=", at), ("event_time", "<=", at + part)] for at in steps.starts]
        where = [
            [("status", "=", "timed_out"), *span]
            for span in (spans if finished > SAMPLED_RECORDS else [[]])
        ]
        names = ("event_time", "last_event_time", "invalid_reason")
        rows = self.reader.lengths(SILVER, names, self.sources, where)
        sample = {name: _array(rows[name]) for name in rows.column_names}
        sample = _chosen(sample, sample["invalid_reason"] != "reset")
        times = sample["event_time"]
        lengths = {source: sample[source] for source in self.sources}
        about = (
            f"Of {len(times):,} of the {finished:,} that have timed out (without those that a jump "
            "closed)."
        )
        yield from self.match_figures(steps, times, lengths, about)
        caption = f"How many merge records have this many parts, all sources together. {about}"
        yield _histogram(
            "Size of merge records",
            caption,
            {size: str(size) for size in _SIZES},
            np.asarray(sum(lengths.values())),
        )
        caption = f"From the first to the last event time of their parts. {about}"
        durations = {longest: duration(longest) for longest in (0, *charts.WIDTHS)}
        yield _histogram(
            "Duration of merge records", caption, durations, sample["last_event_time"] - times
        )
        yield self.open_figure(event_times, [due for *_, due in counts if due is not None])

    def match_figures(
        self, steps: Steps, times: Numbers, lengths: Mapping[str, Numbers], about: str
    ) -> Iterator[Figure]:
        """Yield the share of finished merge records that have parts of each source, and where it is
        small the reasons.

        The steps are so wide that each holds some of them on average.
        """
        wide = Steps.over(
            [steps.first, steps.end - 1],
            min(STEPS, max(len(times) // SHARE_OF, FEWEST_SHARES)),
            steps.width,
        )
        fewest_parts = np.minimum.reduce([*lengths.values()])
        rows: list[Row] = []
        for name, length in {ALL_SOURCES: fewest_parts, **lengths}.items() if len(times) else ():
            for at, records, matched in _zipped(
                np.array(wide.starts), wide.totals(times), wide.totals(times[length > 0])
            ):
                middle = (max(at, steps.first) + min(at + wide.width, steps.end)) // 2
                rows.append(
                    {"of": name, "at": middle, "share": matched / records if records else None}
                )
        x = charts.time("event time", steps.first, steps.end)
        y = number("share", "of merge records", scale={"domain": [0, 1]}, format=".0%")
        points = layer(charts.POINTS, x=x, y=y, **told_apart([ALL_SOURCES, *self.sources]))
        matched = float(np.mean(fewest_parts > 0)) if rows else 1.0
        only = "Only " if matched < LOW_MATCH else ""
        overall = (
            f"{only}{matched:.1%} of the merge records have parts of all sources. " if rows else ""
        )
        caption = (
            f"{overall}The shares in steps of {duration(wide.width)}, of all sources and of each. "
            f"{about}"
        )
        yield drawn("Match rate", caption, rows, points, nothing=_NONE_FINISHED, height=200)
        if matched >= LOW_MATCH or not (reasons := why_incomplete(self.reader, self.settings)):
            return
        caption = (
            f"Of {sum(reason.records for reason in reasons):,} with parts of one source alone, "
            "among the last that have timed out: how many have this reason, as far as it can be "
            "seen."
        )
        columns = ("why", "merge records", "what helps")
        yield Figure("Why merge records lack a source", caption, _rows(columns, reasons))

    def open_figure(self, event_times: Sequence[int], dues: Sequence[int]) -> Figure:
        """Return how many merge records are open at a time, up to the largest clock, or until none
        is.
        """
        clock = max([*event_times, *self.clocks.values()])
        until = min(clock, max([*event_times, *dues]))
        steps = Steps.over([*event_times, until], STEPS)
        until = min(clock, steps.end)
        x = charts.time("event time", steps.first, steps.end)
        change = np.zeros(steps.number)
        share = np.zeros(steps.number)
        for sign, column in ((1, "event_time"), (-1, "due")):
            for times in self.times(MERGED, column, _NOT_RESET):
                change += sign * steps.totals(times)
                # A share of that step is left after either time.
                share += sign * steps.totals(times, 1 - times % steps.width / steps.width)
        means = zip(steps.starts, (np.cumsum(change) - change + share).tolist(), strict=True)
        # The step that the largest clock is still in is left out: its mean is not known yet.
        rows = [
            {"of": "open", "at": at, "open": round(mean, 3)}
            for at, mean in means
            if at + steps.width <= until
        ]
        caption = (
            "Computed, not observed: each record counts from its event time on, for as long as it "
            "can be joined, but for those that a jump closed. The mean of each step of "
            f"{duration(steps.width)}, all partitions together."
        )
        if clock > steps.end:
            caption += f" Nothing is open from then on; the largest clock is {utc(clock)}."
        area = layer(charts.AREA, x=x, y=number("open", "merge records"))
        return drawn("Open merge records", caption, extended(rows, "of", until), area, height=200)

    # -- questions

    def summary(
        self, table: str, by: Sequence[str], *figures: str, where: Where = ()
    ) -> list[tuple[Any, ...]]:
        """Return a tuple for each combination of `by`, with figures such as `max batch`.

        A table without rows has none.
        """
        if not self.reader.exists(table):
            return []
        kinds = {figure: (figure.split()[0], figure.split()[1]) for figure in ("count *", *figures)}
        rows = self.reader.summary(table, by, kinds, where)
        rows = rows.filter(pc.greater(rows["count *"], 0)).select([*by, *figures])
        return list(zip(*(column.to_pylist() for column in rows.columns), strict=True))

    def read(self, table: str, columns: Sequence[str], where: Where) -> Columns:
        """Return the columns as arrays: of texts, or else of integers.

        With the columns of an input, `input` has its name.
        """
        is_there = self.reader.exists(table)
        rows = (
            self.reader.select(table, columns, where)
            if is_there
            else self.lake.schema(table).empty_table()
        )
        arrays = {name: _array(rows[name]) for name in columns}
        if not {*_INPUT} <= {*columns}:
            return arrays
        names = self.settings.input_names
        inputs = zip(*(rows[name].to_pylist() for name in _INPUT), strict=True)
        return arrays | {"input": np.array([names[InputId(*i)] for i in inputs], object)}

    def times(self, table: str, column: str, where: Where = ((),)) -> Iterator[Numbers]:
        """Yield a column of times in chunks of at most CHUNK_ROWS."""
        for count, first, last in self.summary(
            table, [], "count *", f"min {column}", f"max {column}", where=where
        ):
            if count > CHUNK_ROWS and first < last:
                for half in (
                    (column, "<=", (first + last) // 2),
                    (column, ">", (first + last) // 2),
                ):
                    yield from self.times(table, column, [[*term, half] for term in where])
            else:
                yield self.read(table, [column], where)[column]


def _window_of(settings: Settings) -> dict[str, str]:
    """Return how long merge records stay open, as a fact for the page."""
    window = settings.merge.window
    lag_ms = settings.merge.tenant_max_lag_ms
    lag = {} if lag_ms is None else {"tenant_max_lag": duration(lag_ms)}
    if window.max_ms is None:
        return {"timeout": duration(window.gap_ms), **lag}
    return {"window": f"gap {duration(window.gap_ms)}, max {duration(window.max_ms)}", **lag}


# -- kinds of figures


def _rate(title: str, steps: Steps, totals: Mapping[str, Numbers], x: Spec, unit: str) -> Figure:
    """Return a chart of the rates per second in every step, stacked by name."""
    rates = {name: (counts * 1000 / steps.width).round(3) for name, counts in totals.items()}
    rows = [
        {"of": name, "at": at, unit: rate}
        for name, rates_of_steps in rates.items()
        for at, rate in _zipped(np.array(steps.starts), rates_of_steps)
    ]
    caption = (
        f"In steps of {duration(steps.width)}; in bronze and silver with heartbeats, late and "
        "refused records."
    )
    area = layer(charts.AREA, x=x, y=number(unit, unit) | {"stack": "zero"}, color=colour(totals))
    return drawn(title, caption, extended(rows, "of", steps.end), area)


def _histogram(title: str, caption: str, most: Mapping[int, str], values: Numbers) -> Figure:
    """Return a chart of how many values lie up to each number, and beyond the number before.

    `most`: the numbers, each with its label.
    """
    counts = np.bincount(np.searchsorted([*most], values)).tolist() if len(values) else []
    rows = [
        {"up to": label, "merge records": count}
        for label, count in zip(most.values(), counts, strict=False)
    ]
    x = {"field": "up to", "sort": None, "axis": {"title": "up to", "labelAngle": 0}}
    columns = layer(charts.COLUMN, x=x, y=number("merge records", "merge records"))
    return drawn(title, caption, rows, columns, nothing=_NONE_FINISHED, height=180)


# -- rows and columns


def _array(column: pa.ChunkedArray) -> Numbers:
    is_text = pa.types.is_string(column.type)
    return np.asarray(column if is_text else pc.fill_null(column.cast(pa.int64()), NULL))


def _chosen(columns: Columns, rows: Numbers) -> Columns:
    return {name: values[rows] for name, values in columns.items()}


def _zipped(*columns: Numbers) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.tolist() for column in columns), strict=True)


def _rows(names: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> list[Row]:
    return [dict(zip(names, row, strict=True)) for row in rows]


def _grouped(columns: Columns, **figures: str) -> list[Row]:
    """Return figures of the last column for each combination of the other columns, in their order.

    `figures`: by name, what Arrow calls the aggregation.
    """
    *by, last = columns
    groups: pa.Table = (
        pa.table(columns).group_by(by).aggregate([(last, figure) for figure in figures.values()])
    )
    rows: list[Row] = (
        groups.rename_columns([*by, *figures])
        .sort_by([(name, "ascending") for name in by])
        .to_pylist()
    )
    return rows
