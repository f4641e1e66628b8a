"""The life of a key, as rows of a lake's views (`life.sql`). Times are epoch ms."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, TypeAlias

from watersmeet.ask.answers import (
    Row,
    answer,
    beyond,
    follows,
    literal,
    queries,
    quoted,
    rows,
    values,
)
from watersmeet.core import sequence as sequences
from watersmeet.core.columns import NULL_TIME
from watersmeet.core.inputs import of_source
from watersmeet.core.plan import BatchPlan, OffsetRange, TopicPartition
from watersmeet.core.tenants import TenantClocks
from watersmeet.core.types import TIME
from watersmeet.lake import tables
from watersmeet.lake.history import History
from watersmeet.lake.inputs import by_input, of_input, topic_partition
from watersmeet.lake.progress import read_decisions
from watersmeet.lake.published import last_sink, reached, tail_columns, topic_columns
from watersmeet.lake.state import state_before
from watersmeet.lake.table_reader import TableReader, in_portions
from watersmeet.settings import Settings

NEAR: Final = 5
"""Maximum number of similar keys that are shown for an unknown one."""

_QUERIES: Final = queries("life.sql")

Place: TypeAlias = tuple[int, TopicPartition, int]
"""The generation, topic-partition and offset of a record."""


def place_of(row: Mapping[str, Any]) -> Place:
    """Return where the record of a row is."""
    return row["generation"], topic_partition(row), row["offset"]


@dataclass(frozen=True)
class Life:
    """The rows of a key, of one tenant or (None) of all, at the moment of a reader.

    `settings`: with the rules of the last epoch. `batch`: silver's last one (-1: none).
    """

    reader: TableReader
    settings: Settings
    history: History
    batch: int
    key: str
    tenant: str | None

    def rows(self, query: str, **names: object) -> list[Row]:
        """Return the rows of a query of `life.sql`, in which `names` stand."""
        return rows(self.reader, self._sql(query, **names))

    def _sql(self, query: str, **names: object) -> str:
        own = {}
        for table in "mlcdwb":
            of_tenant = (
                "" if self.tenant is None else f" AND {table}.tenant = {literal(self.tenant)}"
            )
            own[table] = f"{table}.merge_key = {literal(self.key)}{of_tenant}"
        return _QUERIES[query].format(own=own, **names)

    def records(self) -> list[Row]:
        """Return the merge records, by partition and event time. `parts`: how many each has."""
        sizes = (f"coalesce(cardinality({quoted(name)}), 0)" for name in self.settings.sources)
        return self.rows("records", size=" + ".join(sizes))

    def parts(self, records: Sequence[Row]) -> list[Row]:
        """Return the parts of these merge records by event time, source, topic and offset; with
        tenants, the late records, too.

        Each has `opened`, the event time of its merge record (None: it is late), the `batch` that
        read it, its `position`, in its tenant, and that among all records (`of_all`). Positions are
        null where bronze does not have the record any more.
        """
        places = [self._sql("late_places")] if self.settings.merge.has_tenants else []
        for source in self.settings.sources if records else ():
            inputs = of_source(self.settings.inputs, source)
            topic = "part['topic']" if len(inputs) > 1 else f"'{inputs[0].topic}'"
            near = f"{_spans(records, 'partition')} AND {_spans(records, 'batch')}"
            places.insert(0, self._sql("parts", source=source, topic=topic, near=near))
        if not places:
            return []
        read = self.rows("read", places=" UNION ALL ".join(places))
        ranges = defaultdict[str, dict[tuple[int, str, int], Row]](dict)
        for row in read:
            row["offset"] = row.pop("at")
            if row["batch"] is not None:
                span = row["batch"], row["topic"], row["partition"]
                last = ranges[row["source"]].setdefault(span, {**row, "until": row["offset"]})
                last["until"] = max(last["until"], row["offset"])
        of_all = dict[Place, int]()
        for source, spans in ranges.items():
            for portion in in_portions([*spans.values()]):
                of_all |= self._positions(source, portion)
        own = of_all
        if self.settings.merge.has_tenants:
            every = (span for spans in ranges.values() for span in spans.values())
            own = self._positions_in_tenants(every, of_all)
        for row in read:
            row |= {"position": own.get(place_of(row)), "of_all": of_all.get(place_of(row))}
        return sorted(read, key=self.in_order)

    def in_order(self, part: Row) -> tuple[Any, ...]:
        """Return what parts are sorted by: event time, source as configured, topic and offset."""
        number = [*self.settings.sources].index(part["source"])
        return (part["event_time"], number, part["topic"], part["offset"])

    def _positions(self, source: str, spans: Sequence[Row]) -> dict[Place, int]:
        """Return the positions of the key's records in ranges of offsets of a source, each from the
        first one of a batch (`since`) to `until`: the largest event time there, and `before` it.
        """
        names = ("generation", "batch", "topic", "partition", "since", "until", "before")
        found = self.rows(
            "positions",
            source=source,
            bronze=tables.bronze(source),
            ranges=values(names, ([span[name] for name in names] for span in spans)),
            near=" OR ".join(
                f"(b.`partition` = {span['partition']} AND b.offset >= {span['since']} "
                f"AND b.offset <= {span['until']})"
                for span in spans
            ),
        )
        return {place_of({**row, "offset": row["at"]}): row["position"] for row in found}

    def _positions_in_tenants(
        self, spans: Iterable[Row], of_all: Mapping[Place, int]
    ) -> dict[Place, int]:
        first = self.history.first_base
        forgotten = -1 if first is None else first.batch
        own = dict[Place, int]()
        for span in spans:
            last = of_all.get(place_of({**span, "offset": span["until"]}))
            if last is None or span["batch"] <= forgotten:  # what tenants had then is not known
                continue
            tp, batch = topic_partition(span), span["batch"]
            generation = self.history.generations[span["generation"]]
            state = state_before(self.reader, self.history, generation, batch)
            names = {**tp.input._asdict(), "bronze": tables.bronze(tp.input.source)}
            reach = {"since": span["since"], "until": span["until"]}
            sql = self._sql("read_by_batch", partition=tp.partition, **names, **reach)
            records = answer(self.reader, sql)
            read = OffsetRange(span["since"], span["until"] + 1, span["before"], last, last)
            plan = BatchPlan(batch, {tp: read}, {tp.partition: last}, False)
            where = of_input(tp.input, [[("partition", "=", tp.partition)]])
            idle = [each for _, each in read_decisions(self.reader, generation, where)]
            lag_ms = state.rules.lag_ms or 0
            clocks = TenantClocks.of(records, state.heads, plan, {tp: idle}, lag_ms)
            at = zip(records["offset"].to_pylist(), clocks.positions.tolist(), strict=True)
            own |= {(generation.number, tp, o): time for o, time in at if time != NULL_TIME}
        return own

    def ends(self, records: Sequence[Row]) -> list[Row]:
        """Return the heads and clocks at the end of the batches that closed merge records, in their
        partitions, and of the last batch in all.
        """
        closed = [row for row in records if row["status"] != "open"] or [
            {"batch": -1, "partition": -1}
        ]
        batches, partitions = (
            _listed(row[name] for row in closed) for name in ("batch", "partition")
        )
        return self.rows("ends", last=self.batch, batches=batches, partitions=partitions)

    def corrections(self) -> list[Row]:
        """Return the versions that late records have made of merge records, in order, each with its
        parts by source.
        """
        return self.rows("corrections", sources=", ".join(map(quoted, self.settings.sources)))

    def unread(self) -> list[Row]:
        """Return the records in bronze that silver has not read."""
        ends = by_input(reached(self.reader, self.history.newest, self.batch + 1))
        return [
            row
            for i in self.settings.inputs
            for row in self.rows(
                "unread", bronze=tables.bronze(i.source), beyond=beyond(ends[i]), **i._asdict()
            )
        ]

    def near(self) -> list[str]:
        """Return known keys that look like this one, most alike first. Only those that begin or end
        with half of it count.
        """
        key, half = self.key, max(1, len(self.key) // 2)
        ends = {"first": literal(key[:half]), "last": literal(key[-half:])}
        found = self.rows("near", key=literal(key), half=half, **ends)
        return get_close_matches(key, [row["merge_key"] for row in found], NEAR)

    def sent(self, sequence: sequences.Sequence, records: Sequence[Row]) -> dict[int, Row]:
        """Return, by number, where these rows of a sequence, which have a message each, are in its
        topic: `seq`, and `offset` as far as `published` tells. Rows that are not out are left out.
        """
        if not records or not self.reader.exists(tables.PUBLISHED):
            return {}
        if (sink := last_sink(self.reader, sequence)) is None:
            return {}
        order, tails = [*sequence.order], tail_columns(sequence)
        given = [
            [n, row["generation"], row["partition"], *map(row.get, order)]
            for n, row in enumerate(records)
        ]
        names, last_names = ["n", "generation", "partition", *order], [*tails.values()]
        begins = [f"r.{quoted(name)}" for name in order]
        of_topic = {name: literal(text) for name, text in topic_columns(sink).items()}
        found = self.rows(
            "sent",
            places=values(names, given),
            tails=", ".join(f"p.{name}" for name in last_names),
            is_after=follows(_numbers(sequence, "p", last_names), begins, ">="),
            clock=tails[sequence.clock],
            **of_topic,
        )
        ends = {row["n"]: row for row in found}
        columns, behind = _numbers(sequence, "t", order), Counter[int]()
        for numbers in in_portions(sorted(ends, key=lambda n: records[n][sequence.clock])):
            spans = [[*given[n], *map(ends[n].get, last_names)] for n in numbers]
            counted = self.rows(
                "behind",
                places=values([*names, *last_names], spans),
                table=sequence.table,
                is_after=follows(columns, begins, ">"),
                is_up_to=follows(columns, [f"r.{name}" for name in last_names], "<="),
                has_message=" AND ".join(
                    f"t.{name} = {literal(value)}" for name, value in sequence.with_message.items()
                ),
                clock=sequence.clock,
                first=records[numbers[0]][sequence.clock],
                last=max(ends[n][tails[sequence.clock]] for n in numbers),
            )
            behind.update({row["n"]: row["behind"] for row in counted})
        return {
            n: {
                "seq": end["last_seq"] - behind[n],
                "offset": None if (at := end["sink_offset"]) is None else at - behind[n],
            }
            for n, end in ends.items()
        }


def _numbers(sequence: sequences.Sequence, table: str, names: Sequence[str]) -> list[str]:
    """Return these columns of a sequence's order, in a table of a query, with times as numbers."""
    columns = (f"{table}.{quoted(name)}" for name in names)
    kinds = sequence.order.values()
    return [f"ms({c})" if kind == TIME else c for c, kind in zip(columns, kinds, strict=True)]


def _spans(records: Collection[Row], name: str) -> str:
    """Return a condition that rows of these numbers meet, by which files are skipped."""
    numbers = [row[name] for row in records]
    return f"{quoted(name)} BETWEEN {min(numbers)} AND {max(numbers)}"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(numbers))))
