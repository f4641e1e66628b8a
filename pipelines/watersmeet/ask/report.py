"""The content of the report: each figure is the rows of a query, a few hundred of them, however
large the lake is.

All times are epoch ms; wall time, Kafka's timestamps and event time are kept apart.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import altair as alt

from watersmeet.ask import charts
from watersmeet.ask.answers import Row, quoted, rows
from watersmeet.ask.charts import Figure, Steps, drawn, extended, in_unit, number, significant
from watersmeet.ask.page import Sentence
from watersmeet.ask.status import count_outcomes, unfinished_tenants
from watersmeet.audit.doubts import IS_FINISHED, doubts_of_newest, why_incomplete
from watersmeet.core.inputs import InputId
from watersmeet.core.times import LAST_EVENT_TIME_MS, duration, utc
from watersmeet.lake.history import History, read_history
from watersmeet.lake.location import Lake
from watersmeet.lake.newest import bronze_ends
from watersmeet.lake.progress import last_batch
from watersmeet.lake.snapshot import Snapshot
from watersmeet.lake.state import times_of
from watersmeet.lake.table_reader import TableReader
from watersmeet.lake.tables import CORRECTIONS, DUPLICATES, SILVER, bronze
from watersmeet.settings import Settings

LOW_MATCH: Final = 0.5
"""Share of merge records with parts of all sources below which reasons are shown."""
SHOWN_PARTITIONS: Final = 8
"""Maximum number of partitions in a chart: more lines cannot be told apart."""
STEPS: Final = 240
"""Maximum number of steps of time in a chart."""
FEWEST_STEPS = 10
"""With fewer steps of wall time that saw any work, charts are empty axes."""
SHARE_OF: Final = 10
"""Merge records per share on average, as long as FEWEST_SHARES steps are left."""
FEWEST_SHARES: Final = 24
LATEST_ROWS = 2_000_000
"""Maximum number of rows of progress, the latest, of which wall time is drawn."""
SAMPLED_RECORDS = 100_000
"""Where more have finished, about this many are read with their parts."""
AHEAD_MS: Final = 86_400_000
"""How far Kafka's timestamps may lie ahead of the report and be drawn."""
SLOWEST_TENANTS: Final = 10
"""Maximum number of tenants furthest behind that are named."""

ALL_SOURCES: Final = "all sources"
_GOLD: Final = "gold, all sources"
"""Beside the sources' names, none of which has a space in it."""

COUNTS: Final = (
    *("in bronze", "open", "waiting", "timed out", "not valid", "late", "corrections"),
    *("duplicates", "excess", "quarantined", "published"),
)
"""The counts of a partition in their order: those of `count_outcomes`, and `in bronze`."""
_SIZES: Final = (*range(1, 9), *(2**n for n in range(4, 32)))
_OF_SINK: Final = "last_closed_at IS NOT NULL"
_NO_CLOCK: Final = "No partition has a clock: in each there is a source without a record."
_SHOWN: Final = f" Shown are the {SHOWN_PARTITIONS} partitions whose clocks are furthest behind."
_NONE_FINISHED: Final = "No merge record has timed out yet."


class Section(NamedTuple):
    """Figures about one kind of time."""

    title: str
    about: str
    figures: Sequence[Figure]


class Report(NamedTuple):
    """Everything that is on the page: facts by name, then sections from top to bottom."""

    name: str
    facts: Mapping[str, str]
    sections: Sequence[Section]


def read_report(reader: TableReader, settings: Settings, now_ms: int) -> Report:
    """Return the report of the lake as it is now. One that has not begun counts as empty.

    Nothing is written.
    """
    snapshot = Snapshot(reader, settings)
    # The lake goes by its own rules, whatever the file says since.
    history = read_history(snapshot, settings)
    settings = history.epochs.current.settings
    lake = _LakeFigures(snapshot, settings, history)
    about = "When Watersmeet did what, by the clocks of the machines that did it."
    if lake.since:
        about += f" Only the latest batches, since {utc(lake.since)}."
    sent = "When the records were sent, as Kafka has it: by the producers' clocks or the broker's."
    themselves = "What the records say themselves, however fast they were processed."
    doubts = doubts_of_newest(snapshot, settings, bronze_ends(snapshot, settings))
    found = _named(
        ("where", "what", "what helps"), ((p.where, p.what, Sentence(p.fix)) for p in doubts)
    )
    wrong = "What breaks no rule, and may be meant: in the newest records of each source."
    warnings = Figure("Warnings", "As `watersmeet status` says them.", found)
    sections = [
        *([Section("What looks wrong", wrong, [warnings])] if found else []),
        Section("Event time", themselves, [*lake.event_time(), lake.refused()]),
        Section("Partitions", "", [lake.partitions(), *lake.slowest_tenants()]),
        Section("Kafka's timestamps", sent, [lake.arrivals(now_ms)]),
        Section("Wall time", about, list(lake.wall_time())),
    ]
    batch = lake.last_batch
    facts = {
        "made at": utc(now_ms),
        "lake": Lake(settings).location,
        "sources": ", ".join(settings.sources),
        **_window_of(settings),
        "last batch of silver": "none yet"
        if batch["batch"] is None
        else f"{batch['batch']:,}, committed at {utc(batch['committed_at'])}",
    }
    return Report(settings.name, facts, sections)


class _LakeFigures:
    """The figures of a lake at one moment; `settings` have the rules of its last epoch.

    `since`: where progress is long, the time before which it is left out; else 0. `which`: a
    sentence that says which partitions are shown; empty where all are.
    """

    def __init__(self, reader: TableReader, settings: Settings, history: History) -> None:
        self.reader = reader
        self.settings = settings
        self.history = history
        self.sources = tuple(settings.sources)
        self.inputs = tuple(settings.inputs_by_name)
        self.hidden = settings.hidden_names
        self.last_batch = self.one(
            "SELECT max(batch) AS batch, max(committed_at) AS committed_at, count(*) AS n, "
            "min(batch) AS first FROM progress"
        )
        self.since = self._since()
        last = last_batch(reader) if reader.exists(SILVER) else None
        is_newest = last is not None and last.batch >= history.newest.from_batch
        self.clocks = last.clocks if last is not None and is_newest else {}
        self.merged = {tp.partition for tp in last.ranges} if last is not None else set[int]()
        behind = sorted(self.merged, key=lambda p: (p not in self.clocks, self.clocks.get(p, 0), p))
        self.shown = sorted(behind[:SHOWN_PARTITIONS])
        self.which = _SHOWN if len(behind) > SHOWN_PARTITIONS else ""

    def _since(self) -> int:
        count, first, last = (self.last_batch[name] for name in ("n", "first", "batch"))
        if not count or count <= LATEST_ROWS:
            return 0
        earliest = last + 1 - (last + 1 - first) * LATEST_ROWS // count
        sql = f"SELECT min(committed_at) AS at FROM progress WHERE batch >= {earliest}"
        return int(self.one(sql)["at"])

    def rows(self, sql: str, **values: Any) -> list[Row]:
        """Return the rows of a query. With the columns of an input, `of` has its name."""
        found = rows(self.reader, sql.format(**values))
        names = self.settings.input_names
        if found and {"source", "topic"} <= found[0].keys():
            for row in found:
                row["of"] = names[InputId(row.pop("source"), row.pop("topic"))]
        return found

    def one(self, sql: str) -> Row:
        """Return the row of a query of aggregates; where its table is missing, all are null."""
        found = self.rows(sql)
        return found[0] if found else defaultdict(lambda: None)

    # -- partitions

    def partitions(self) -> Figure:
        counts = count_outcomes(self.reader, self.settings, self.history)
        own = " UNION ALL ".join(f"SELECT `partition` FROM {bronze(name)}" for name in self.sources)
        for row in self.rows(
            f"SELECT `partition`, count(*) AS n FROM ({own}) GROUP BY `partition`"
        ):
            counts[row["partition"]]["in_bronze"] = row["n"]
        every = sorted({*counts, *self.merged})
        places = [("all", every, min(self.clocks.values(), default=None))] if every else []
        places += [(str(p), [p], self.clocks.get(p)) for p in every]
        names = [name for name in COUNTS if name not in self.hidden]
        found: list[Row] = []
        for title, partitions, clock in places:
            total = sum((counts[p] for p in partitions), Counter[str]())
            figures = {name: total[name.replace(" ", "_")] for name in names}
            found.append({"partition": title, "clock (UTC)": utc(clock), **figures})
        explained = {
            "waiting": " Waiting: records that were read and wait for their tenants' clocks.",
            CORRECTIONS: " Corrections: late records that have corrected a merge record.",
        }
        caption = (
            "The smallest clock of all, and sums. Merge records that timed out and are not valid "
            "are not published."
        )
        caption += "".join(text for name, text in explained.items() if name in names)
        return Figure(
            "Clocks and counts", caption if found else "The lake has no record yet.", found
        )

    def slowest_tenants(self) -> Iterator[Figure]:
        if not self.settings.merge.has_tenants:
            return
        title = "Slowest tenants"
        found_tenants = unfinished_tenants(self.reader, self.history)
        if found_tenants is None:
            yield Figure(title, "No tenant has anything open or waiting.", [])
            return
        tenant_rows, state = found_tenants
        times = times_of(tenant_rows, state)
        times.sort(key=lambda row: (row[2] or 0) - state.clocks.get(row[0], 0))
        counts = {
            (row["partition"], row["tenant"], row["status"]): row["rows"]
            for row in tenant_rows.to_pylist()
        }
        found: list[Row] = [
            {
                "tenant": tenant,
                "partition": p,
                "its clock (UTC)": utc(clock),
                "behind": duration(None if clock is None else state.clocks[p] - clock),
                "open": counts.get((p, tenant, "open"), 0),
                "waiting": counts.get((p, tenant, "waiting"), 0),
            }
            for p, tenant, clock in times[:SLOWEST_TENANTS]
        ]
        caption = (
            f"How far their clocks are behind that of their partition; of {len(times):,} with "
            "something open or waiting."
        )
        yield Figure(title, caption, found)

    def refused(self) -> Figure:
        order = ("late", "duplicate", "excess")
        found = self.rows(
            "SELECT reason, source, topic, count(*) AS n FROM quarantine "
            "GROUP BY reason, source, topic "
            "UNION ALL SELECT status, source, topic, count(*) FROM silver "
            f"WHERE status IN {order} GROUP BY status, source, topic"
        )
        place = {reason: number for number, reason in enumerate(order)}
        sorted_rows = sorted(
            ((row["reason"], row["of"], row["n"]) for row in found),
            key=lambda row: (place.get(row[0], len(place)), *row),
        )
        repeat = "" if DUPLICATES in self.hidden else "repeat a part, "
        caption = (
            f"Records that are in no merge record: they came too late, {repeat}belong to one that "
            "is too large (excess), or are in quarantine for this reason."
        )
        refused = _named(("reason", "source", "records"), sorted_rows)
        nothing = "No record came late, and none was quarantined."
        return Figure("Late and refused records", caption if refused else nothing, refused)

    # -- wall time

    def wall_time(self) -> Iterator[Figure]:
        """Yield figures of when Watersmeet did what.

        Clocks, leads and idle sources are those of the partitions that are shown.
        """
        work = f"({_WORK}) WHERE t >= {self.since}"
        span = self.one(f"SELECT min(t) AS first, max(t) AS last FROM {work}")
        if span["first"] is None:
            yield Figure("Batches", "Silver has not merged anything yet.", [])
            return
        steps = Steps.over([span["first"], span["last"]], STEPS, narrowest=1000)
        seen = self.one(f"SELECT count(DISTINCT {steps.of('t')}) AS n FROM {work}")
        if seen["n"] < FEWEST_STEPS:
            batches = self.one("SELECT count(DISTINCT batch) AS n FROM progress")["n"]
            noun = "batch" if batches == 1 else "batches"
            caption = f"{batches:,} {noun} of silver: too few to draw what was done when."
            yield Figure("Batches", caption, [])
            return
        x = charts.at("wall time", steps.first, steps.end)
        yield self.clock_figure(steps, x)
        yield from self.lead_figures(steps, x)
        at = steps.of("ms(committed_at)")
        merged = self.rows(
            f"SELECT source, topic, {at} AS at, sum(until_offset - from_offset) AS n "
            f"FROM progress WHERE {self.recent()} GROUP BY source, topic, {at}"
        )
        yield _rate(
            "Silver: offsets merged per second", steps, merged, x, "offsets a second", self.inputs
        )
        sent = self.rows(
            f"SELECT '{_GOLD}' AS of, {at} AS at, sum(last_seq - first_seq + 1) AS n "
            f"FROM published WHERE {_OF_SINK} AND {self.recent()} GROUP BY {at}"
        )
        yield _rate("Gold: messages published per second", steps, sent, x, "messages a second")
        yield self.delay_figure(steps, x)

    def recent(self, column: str = "committed_at") -> str:
        """Return SQL for rows whose time in a column is drawn."""
        return f"ms({column}) >= {self.since}"

    def clock_figure(self, steps: Steps, x: Any) -> Figure:
        at = steps.of("ms(committed_at)")
        found = self.rows(
            "SELECT `partition`, at, clock FROM (SELECT `partition`, {at} + {width} AS at, clock, "
            "row_number() OVER (PARTITION BY `partition`, {at} ORDER BY batch DESC) AS place "
            "FROM progress WHERE {recent}) WHERE place = 1 ORDER BY `partition`, at",
            at=at,
            width=steps.width,
            recent=self.recent(),
        )
        clocks = [row["clock"] for row in found if row["clock"] is not None]
        drawn_rows = [row for row in found if row["partition"] in self.shown] if clocks else []
        y = alt.Y(
            "clock", **charts.time("event time", min(clocks, default=0), max(clocks, default=0))
        )
        layers = [charts.lines(x=x, y=y, **charts.told_apart(self.shown, "partition"))]
        if len(drawn_rows) <= 30 * len(self.shown):
            layers.append(charts.dots(self.shown, "partition", x=x, y=y))
        caption = (
            "How far event time had come, after the last batch of each step of "
            f"{duration(steps.width)}.{self.which}"
        )
        title = "Clock of each partition"
        return drawn(title, caption, drawn_rows, *layers, nothing=_NO_CLOCK, height=240)

    def lead_figures(self, steps: Steps, x: Any) -> Iterator[Figure]:
        at = steps.of("ms(committed_at)")
        found = self.rows(
            f"SELECT source, topic, `partition`, {at} AS at, max(ms(head) - ms(clock)) AS lead "
            f"FROM progress WHERE clock IS NOT NULL AND head IS NOT NULL AND {self.recent()} "
            f"GROUP BY source, topic, `partition`, {at} ORDER BY `partition`, at"
        )
        ahead, unit = in_unit([row for row in found if row["partition"] in self.shown], "lead")
        most = max((row["lead"] for row in ahead), default=0) or 1
        y = number("lead", unit, scale=alt.Scale(domain=[0, most]))
        at = steps.of("ms(decided_at)")
        idle = self.rows(
            f"SELECT source, topic, `partition`, {at} AS at, {at} + {steps.width} AS until "
            f"FROM idle_heartbeats WHERE {self.recent('decided_at')} "
            f"GROUP BY source, topic, `partition`, {at}"
        )
        caption = (
            f"Head minus clock: the largest in each step of {duration(steps.width)}, kept up to "
            "the next batch. The clock waits for the source whose lead is 0. Shaded: the idle "
            f"policy spoke for the source.{self.which}"
        )
        for source in self.inputs:
            source_rows = [row for row in ahead if row["of"] == source]
            shaded = [row for row in idle if row["of"] == source and row["partition"] in self.shown]
            yield drawn(
                f"Lead of {source} over the clock",
                caption,
                extended(source_rows, "partition", steps.end),
                charts.shade(shaded, x),
                charts.lines(x=x, y=y, **charts.told_apart(self.shown, "partition")),
                nothing=_NO_CLOCK,
                height=110,
            )

    def delay_figure(self, steps: Steps, x: Any) -> Figure:
        at = steps.of("ms(committed_at)")

        found = []
        for of, by, since, table, where in (
            ("source, topic", "source, topic, ", "head", "progress", "head IS NOT NULL"),
            (f"'{_GOLD}' AS of", "", "last_closed_at", "published", _OF_SINK),
        ):
            delay = f"ms(committed_at) - ms({since})"
            found += self.rows(
                f"SELECT {of}, {at} AS at, min({delay}) AS least, avg({delay}) AS mean, "
                f"max({delay}) AS most FROM {table} WHERE {where} AND {self.recent()} "
                f"GROUP BY {by}{at} ORDER BY at"
            )
        measured, unit = in_unit(found, "least", "mean", "most")
        names = [*self.inputs, _GOLD]
        caption = (
            "Silver: from a source's head, the latest event time that a batch knew of it, until "
            "the batch's commit. Gold: from when a transaction's last message timed out until its "
            "publication was noted. For old data, that is its age. A dot is the mean in a step of "
            f"{duration(steps.width)}, its bar goes from the shortest to the longest."
        )
        layers = charts.spans(unit, x=x, color=charts.colour(names))
        return drawn("Delay behind event time", caption, measured, *layers)

    # -- Kafka's timestamps

    def arrivals(self, now_ms: int) -> Figure:
        title = "Bronze: records per second"
        # A producer may choose any timestamp: one of the year 9999 would leave no room for others.
        latest = min(now_ms + AHEAD_MS, LAST_EVENT_TIME_MS)
        in_range = f"t BETWEEN 0 AND {latest}"
        is_ahead = f"t BETWEEN {latest + 1} AND {LAST_EVENT_TIME_MS}"
        sent = " UNION ALL ".join(
            f"SELECT '{source}' AS of, ms(kafka_timestamp) AS t FROM {bronze(source)}"
            for source in self.sources
        )
        span = self.one(
            f"SELECT min(CASE WHEN {in_range} THEN t END) AS first, max(CASE WHEN {in_range} THEN "
            f"t END) AS last, count(CASE WHEN {is_ahead} THEN 1 END) AS ahead, "
            f"count(CASE WHEN {in_range} OR {is_ahead} THEN NULL ELSE 1 END) AS beyond "
            f"FROM ({sent})"
        )
        kinds = (("beyond", "that no calendar has"), ("ahead", "that is more than a day ahead"))
        note = "".join(
            f" {n:,} {'record has' if n == 1 else 'records have'} a timestamp of Kafka's {which}, "
            f"and {'is' if n == 1 else 'are'} not drawn."
            for kind, which in kinds
            if (n := span[kind])
        )
        if span["first"] is None:
            nothing = f"Bronze has no record {'to draw' if note else 'yet'}.{note}"
            return Figure(title, nothing, [])
        steps = Steps.over([span["first"], span["last"]], STEPS, narrowest=1000)
        at = steps.of("t")
        found = self.rows(
            f"SELECT of, {at} AS at, count(*) AS n FROM ({sent}) WHERE {in_range} GROUP BY of, {at}"
        )
        x = charts.at("Kafka's timestamp", steps.first, steps.end)
        figure = _rate(title, steps, found, x, "records a second", self.sources)
        return figure._replace(caption=figure.caption + note)

    # -- event time

    def event_time(self) -> Iterator[Figure]:
        """Yield figures of merge records by event time, and of what the finished ones hold.

        Finished are those that timed out and that no jump closed. Where there are many, a sample is
        read: those that begin in the first part of a step.
        """
        span = self.one(
            "SELECT min(event_time) AS first, max(event_time) AS last, max(due) AS due, "
            f"sum(CASE WHEN {IS_FINISHED} THEN 1 ELSE 0 END) AS finished, "
            "sum(CASE WHEN invalid_reason = 'reset' THEN 1 ELSE 0 END) AS closed FROM merged"
        )
        if span["first"] is None:
            yield Figure("Merge records", "Silver has no merge record yet.", [])
            return
        finished = span["finished"]
        steps = Steps.over([span["first"], span["last"]], STEPS)
        part = steps.width * SAMPLED_RECORDS // max(finished, 1)
        is_sampled = finished > SAMPLED_RECORDS
        sample = f"{IS_FINISHED} AND " + (
            f"ms(event_time) % {steps.width} <= {part}" if is_sampled else "TRUE"
        )
        read = self.one(f"SELECT count(*) AS n FROM merged WHERE {sample}")["n"]
        all_or_some = f"{read:,} of the" if is_sampled else "all"
        closed = " (without those that a jump closed)" if span["closed"] else ""
        about = f"Of {all_or_some} {finished:,} that have timed out{closed}."
        yield from self.match_figures(steps, sample, read, about)
        caption = f"How many merge records have this many parts, all sources together. {about}"
        size = " + ".join(f"coalesce(cardinality({quoted(s)}), 0)" for s in self.sources)
        labels = {size: str(size) for size in _SIZES}
        yield self.histogram("Size of merge records", caption, "parts", labels, size, sample)
        caption = f"From the first to the last event time of their parts. {about}"
        lasts = "ms(last_event_time) - ms(event_time)"
        labels = {longest: duration(longest) for longest in (0, *charts.WIDTHS)}
        yield self.histogram(
            "Duration of merge records", caption, "duration", labels, lasts, sample
        )
        yield self.open_figure(span)

    def match_figures(self, steps: Steps, sample: str, read: int, about: str) -> Iterator[Figure]:
        """Yield the share of finished merge records that have parts of each source, and where it is
        small the reasons.

        The steps are so wide that each holds some of them on average.
        """
        most = min(STEPS, max(read // SHARE_OF, FEWEST_SHARES))
        wide = Steps.over([steps.first, steps.end - 1], most, steps.width)
        at = wide.of("ms(event_time)")
        has = {source: f"cardinality({quoted(source)}) > 0" for source in self.sources}
        conditions = {ALL_SOURCES: " AND ".join(has.values()), **has}
        shares = ", ".join(
            f"sum(CASE WHEN {condition} THEN 1 ELSE 0 END) AS {quoted(name)}"
            for name, condition in conditions.items()
        )
        sql = f"SELECT {at} AS at, count(*) AS n, {shares} FROM merged WHERE {sample} GROUP BY {at}"
        by_step = {row["at"]: row for row in self.rows(sql)}
        found: list[Row] = []
        for name in conditions if by_step else ():
            for begin in wide.starts:
                middle = (max(begin, steps.first) + min(begin + wide.width, steps.end)) // 2
                row = by_step.get(begin)
                share = None if row is None else row[name] / row["n"]
                found.append({"of": name, "at": middle, "share": share})
        matched = sum(row[ALL_SOURCES] for row in by_step.values()) / read if read else 1.0
        x = charts.at("event time", steps.first, steps.end)
        scale = alt.Scale(domain=[0, 1])
        y = number("share", "of merge records", scale=scale, format=".0%")
        lines = charts.lines(is_stepped=False, x=x, y=y, **charts.told_apart([*conditions]))
        dots = charts.dots([*conditions], x=x, y=y)
        only = "Only " if matched < LOW_MATCH else ""
        overall = (
            f"{only}{matched:.1%} of the merge records have parts of all sources. " if found else ""
        )
        caption = (
            f"{overall}The shares in steps of {duration(wide.width)}, of all sources and of each. "
            f"{about}"
        )
        yield drawn("Match rate", caption, found, lines, dots, nothing=_NONE_FINISHED, height=200)
        if matched >= LOW_MATCH or not (reasons := why_incomplete(self.reader, self.settings)):
            return
        caption = (
            f"Of {sum(records for _, records, _ in reasons):,} with parts of one source alone, "
            "among the last that have timed out: how many have this reason, as far as it can be "
            "seen."
        )
        columns = ("why", "merge records", "what helps")
        told = [(why, records, Sentence(fix)) for why, records, fix in reasons]
        yield Figure("Why merge records lack a source", caption, _named(columns, told))

    def histogram(
        self,
        title: str,
        caption: str,
        of: str,
        labels: Mapping[int, str],
        value: str,
        sample: str,
    ) -> Figure:
        """Return a chart of how many merge records have a value up to each number, and beyond the
        number before. `of` names what the value is.
        """
        cases = " ".join(f"WHEN size <= {most} THEN {most}" for most in labels)
        counts = {
            row["most"]: row["n"]
            for row in self.rows(
                f"SELECT most, count(*) AS n FROM (SELECT CASE {cases} END AS most FROM "
                f"(SELECT {value} AS size FROM merged WHERE {sample})) GROUP BY most"
            )
        }
        largest = max(counts, default=-1)
        found: list[Row] = [
            {"up to": label, "merge records": counts.get(most, 0)}
            for most, label in labels.items()
            if most <= largest
        ]
        axis = alt.Axis(labelAngle=0)
        columns = charts.columns(
            x=alt.X("up to", type="nominal", title=f"{of}, up to", sort=None, axis=axis),
            y=number("merge records", "merge records"),
        )
        return drawn(title, caption, found, columns, nothing=_NONE_FINISHED, height=180)

    def open_figure(self, span: Mapping[str, int]) -> Figure:
        clock = max([span["last"], *self.clocks.values()])
        until = min(clock, max(span["last"], span["due"] or 0))
        steps = Steps.over([span["first"], span["last"], until], STEPS)
        until = min(clock, steps.end)
        # A share of a step is left after either time in it.
        found = self.rows(
            "SELECT {at} AS at, sum(sign) AS change, sum(sign * (1 - (t % {width}) / "
            "CAST({width} AS DOUBLE))) AS share FROM (SELECT ms(event_time) AS t, 1 AS sign FROM "
            "merged WHERE {kept} UNION ALL SELECT ms(due) AS t, -1 AS sign FROM merged "
            "WHERE due IS NOT NULL AND {kept}) WHERE t < {end} GROUP BY {at}",
            at=steps.of("t"),
            width=steps.width,
            end=steps.end,
            kept="coalesce(invalid_reason, '') <> 'reset'",
        )
        changes = {row["at"]: (row["change"], row["share"]) for row in found}
        by_step = [changes.get(at, (0, 0.0)) for at in steps.starts]
        before = accumulate((change for change, _ in by_step), initial=0)
        # The step that the largest clock is still in is left out: its mean is not known yet.
        means: list[Row] = [
            {"of": "open", "at": at, "open": significant(count + share)}
            for at, count, (_, share) in zip(steps.starts, before, by_step, strict=False)
            if at + steps.width <= until
        ]
        caption = (
            "Computed, not observed: each record counts from its event time on, for as long as it "
            f"can be joined{', but for those that a jump closed' if span['closed'] else ''}. "
            f"The mean of each step of {duration(steps.width)}, all partitions together."
        )
        if clock > steps.end:
            caption += f" Nothing is open from then on; the largest clock is {utc(clock)}."
        x = charts.at("event time", steps.first, steps.end)
        area = charts.area(x=x, y=number("open", "merge records"))
        return drawn("Open merge records", caption, extended(means, "of", until), area, height=200)


_WORK: Final = (
    "SELECT ms(committed_at) AS t FROM progress UNION ALL SELECT ms(committed_at) FROM published "
    "UNION ALL SELECT ms(decided_at) FROM idle_heartbeats"
)
"""The times at which Watersmeet did something."""


def _window_of(settings: Settings) -> dict[str, str]:
    window = settings.merge.window
    lag_ms = settings.merge.tenant_max_lag_ms
    lag = {} if lag_ms is None else {"tenant_max_lag": duration(lag_ms)}
    if window.max_ms is None:
        return {"timeout": duration(window.gap_ms), **lag}
    return {"window": f"gap {duration(window.gap_ms)}, max {duration(window.max_ms)}", **lag}


def _rate(
    title: str, steps: Steps, found: Iterable[Row], x: Any, unit: str, names: Sequence[str] = ()
) -> Figure:
    counts: dict[str, Counter[int]] = {name: Counter() for name in names}
    for row in found:
        counts.setdefault(row["of"], Counter())[row["at"]] += row["n"]
    rates: list[Row] = [
        {"of": name, "at": at, unit: significant(by_step[at] * 1000 / steps.width)}
        for name, by_step in counts.items()
        for at in steps.starts
    ]
    caption = (
        f"In steps of {duration(steps.width)}; in bronze and silver with heartbeats, late and "
        "refused records."
    )
    y = number(unit, unit, stack="zero")
    area = charts.area(x=x, y=y, color=charts.colour([*counts]))
    return drawn(title, caption, extended(rates, "of", steps.end), area)


def _named(names: Sequence[str], found: Iterable[Iterable[Any]]) -> list[Row]:
    return [dict(zip(names, row, strict=True)) for row in found]
