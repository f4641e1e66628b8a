"""The history of a key: its merge records with their parts, how each part came there, when and why
a record was closed, and where it was published.

All of it comes from the tables at one version of silver. Silver has the records, and of each batch
the offsets that it merged, and the clock then. Bronze has the event times of which a position is
the largest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from difflib import get_close_matches
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import pyarrow as pa

from watersmeet.audit.explain_sink import SentMessages, Topics
from watersmeet.audit.explain_tenants import TenantFacts
from watersmeet.audit.explain_versions import CORRECTION_COLUMNS, CorrectionFacts
from watersmeet.audit.show import utc
from watersmeet.core import sequence as sequences
from watersmeet.core.columns import NULL_TIME
from watersmeet.core.idle import IdleDecision
from watersmeet.core.inputs import InputId, input_of_part
from watersmeet.core.plan import Available, Cursor, TopicPartition, positions_of
from watersmeet.core.sequence import CORRECTED, ID, MERGED, message_id
from watersmeet.core.too_large import RECORD_COUNT
from watersmeet.core.types import DUE, NO_TENANT, TENANT
from watersmeet.errors import ConfigurationError, WatersmeetError
from watersmeet.lake import tables
from watersmeet.lake.decisions import read_decisions
from watersmeet.lake.epochs import Epochs, read_epochs
from watersmeet.lake.generations import Generations, read_generations
from watersmeet.lake.inputs import of_input, of_key, of_topic, topic_partition
from watersmeet.lake.progress import BatchVersions, last_batch
from watersmeet.lake.restored import check_not_deleted
from watersmeet.lake.retention_bounds import read_retention_bounds
from watersmeet.lake.snapshot import Snapshot
from watersmeet.lake.table_reader import (
    PARTITIONS_PER_QUESTION,
    Condition,
    TableReader,
    VersionGoneError,
    Where,
    row_count,
    within,
)
from watersmeet.settings import Settings

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MILLISECOND = timedelta(milliseconds=1)
_UNPUBLISHED = {
    "predicate": "; not published: publish.valid does not hold",
    "expression": "; not published: publish.valid fails for it",
    "too_large": "; not published: its message would be larger than publish.max_bytes",
}

_LATE_COLUMNS = ["source", "topic", "partition", "offset", "event_time", "position", "batch"]
_LATE_COLUMNS += TENANT.names
_DUPLICATE_COLUMNS = ["source", "topic", "partition", "offset", "event_time", "id", "of_offset"]
_DUPLICATE_COLUMNS += ["is_late", "batch", *TENANT.names]

_WAITING_COLUMNS = ["source", "topic", "partition", "offset", "event_time", *TENANT.names]
_WAITING_COLUMNS += ["position"]

NEAR = 5
"""Maximum number of similar keys that are shown for an unknown one."""

ALIKE_ROWS = 10_000
"""Maximum number of merge records among whose keys similar ones are looked for."""

JsonObject = dict[str, Any]


def explain(
    reader: TableReader,
    settings: Settings,
    key: str,
    as_of: int | datetime | None = None,
    tenant: str | None = None,
) -> dict[str, Any]:
    """Return the answer of `explain --json`. Times are epoch ms.

    `as_of`: a version of silver, or a time. Beside the contract's fields, the answer has:

    - of a part: `batch`, `version` and `rule` (opened, joined);
    - of a record: `closed` (batch, version, clock, heads by source; null while it is open);
    - the records that late ones have opened (status `late_born`), without `closed`;
    - `late`, `duplicates`, `quarantined` (where Kafka's key is this one) and `waiting` records of
      the key; a duplicate has its `id`, and in `of_offset` the offset of the part that counts;
    - with corrections, of a late record: `u`, `corrected` (event_time, is_late_born and version of
      what it corrected, or null), and `outcome`, a sentence;
    - `near`: keys that look like this one, where nothing is known of it;
    - with tenants: the tenant of each record (all tenants, unless one is named) and why it waits or
      is late; `waiting` then also has the records that wait in silver;
    - `as_of`, where it was asked: the version of silver, its last batch (-1: none), and the time.

    A `version` is null where silver's log has forgotten the commit of that batch.

    Raises ConfigurationError where that version does not exist, where a tenant is named and the
    lake has none, or where a table of a lake with rows is gone.
    """
    settings.merge.check_tenants("--tenant", tenant)
    snapshot = Snapshot(reader, settings)
    check_not_deleted(snapshot, settings)
    answer: dict[str, Any] = {"key": key, "as_of": None}
    if as_of is not None and snapshot.exists(tables.SILVER):
        snapshot, answer["as_of"] = _moment(snapshot, as_of)
    if not snapshot.exists(tables.SILVER):
        nothing = ("records", "late", "duplicates", "quarantined", "waiting", "near")
        return answer | {name: [] for name in nothing}
    settings = read_epochs(snapshot, settings).current.settings
    try:
        history = _KeyHistory(snapshot, settings, key, tenant)
        outcomes = {
            "records": history.records(),
            "late": history.late(),
            "duplicates": history.duplicates(),
            "quarantined": history.quarantined(),
            "waiting": history.waiting(),
        }
    except VersionGoneError as error:
        hours = settings.retention_ms // 3_600_000
        raise WatersmeetError(
            f"version {error.version} of {error.table} cannot be read any more: versions are kept "
            f"for `retention` ({hours} h)"
        ) from error
    near = [] if any(outcomes.values()) else _near(snapshot, key)
    return {**answer, **outcomes, "near": near}


def _moment(snapshot: Snapshot, as_of: int | datetime) -> tuple[Snapshot, JsonObject]:
    """Return the moment of a version of silver, or of a time, and what the answer says of it."""
    version: int | None
    if isinstance(as_of, datetime):
        at = _ms(as_of)
        version = snapshot.version_at(tables.SILVER, at)
        moment = snapshot.as_of(at)
    else:
        version = as_of
        newest = snapshot.version(tables.SILVER)
        if version > newest:
            raise ConfigurationError(
                f"silver has no version {version} yet",
                where="--as-of",
                fix=f"the newest is {newest}",
            )
        commit = snapshot.history(tables.SILVER, newest - version + 1)[-1]
        if commit.number != version:
            raise VersionGoneError(tables.SILVER, version)
        at = commit.committed_at_ms
        moment = snapshot.as_of(at, version)
    last = last_batch(moment) if moment.exists(tables.SILVER) else None
    batch = -1 if last is None else last.batch
    return moment, {"batch": batch, "version": version, "at": at}


def _ms(time: datetime) -> int:
    return (time - _EPOCH) // _MILLISECOND


class _Merged(NamedTuple):
    """How a record was merged: the batch, and the record's position among all records, and in its
    tenant (the same without tenants). Positions are None where bronze does not have the record any
    more.
    """

    batch: int
    position: int | None
    own_position: int | None


@dataclass(frozen=True)
class _KeyHistory:
    """Reader of one key's rows in the tables, as they are at the reader's moment."""

    reader: TableReader
    settings: Settings
    key: str
    tenant: str | None

    @cached_property
    def _batch(self) -> int:
        """Silver's last batch (-1: none)."""
        last = last_batch(self.reader)
        return -1 if last is None else last.batch

    @cached_property
    def _topics(self) -> Topics:
        return Topics(self.settings)

    @cached_property
    def _sent(self) -> SentMessages:
        """The messages of merge records."""
        return self._sent_of(MERGED, self.settings.publish.topic)

    def _sent_of(self, sequence: sequences.Sequence, topic: str) -> SentMessages:
        return SentMessages(self.reader, sequence, self._generations, topic, self._topics)

    def records(self) -> list[JsonObject]:
        """Return the merge records, by partition and event time."""
        parts = self._parts()
        merged = [self._record(row, parts) for row in self._rows]
        late_born = self._corrections.late_born(self._versions)
        return sorted([*merged, *late_born], key=itemgetter("partition", "event_time"))

    @property
    def _key_conditions(self) -> list[Condition]:
        """Conditions on the key, and on the tenant where one is named."""
        return of_key(self.key, self.tenant)

    @cached_property
    def _rows(self) -> list[JsonObject]:
        columns = ["partition", "merge_key", "status", "event_time", "last_event_time"]
        columns += ["valid", "invalid_reason", "batch", *DUE.names, *TENANT.names]
        columns += [RECORD_COUNT.name, *self.settings.sources]
        rows = self.reader.select(tables.MERGED, columns, [self._key_conditions]).to_pylist()
        return sorted(rows, key=itemgetter("partition", "event_time", *TENANT.names))

    @cached_property
    def _shown_times(self) -> Sequence[str]:
        """Columns for when a merge record was closed, where the rules of the moment say it."""
        return DUE.names if self._epochs.of(self._batch).settings.merge.shows_closing else ()

    def _record(
        self,
        row: JsonObject,
        part_index: Mapping[tuple[int, TopicPartition, int], JsonObject],
    ) -> JsonObject:
        is_open = row["status"] == "open"
        p = row["partition"]
        generation = self._generations.of(row["batch"])
        parts = [
            part_index[generation.number, TopicPartition(input_id, p), part["offset"]]
            for input_id, part in self._parts_of(row)
        ]
        # Bronze may have deleted parts by now. Their positions are unknown, and were the smallest.
        first = min(
            parts,
            key=lambda part: (part["position"] is not None, part["position"] or part["event_time"]),
            default=None,
        )
        batch = self._batch if is_open else row["batch"]
        batch_rows = [r for r in self._named if (r["batch"], r["partition"]) == (batch, p)]
        clock = batch_rows[0]["clock"] if batch_rows else None
        names_of_inputs = self.settings.input_names
        heads = {names_of_inputs[InputId(r["source"], r["topic"])]: r["head"] for r in batch_rows}
        closed = {
            "batch": batch,
            "version": self._versions.of(batch),
            "clock": clock,
            "heads": dict(sorted(heads.items())),
        }
        id = message_id(p, row["event_time"], row["merge_key"], row["tenant"])
        published = self._sent.sent_as(row, {ID: id})
        unsent = self._unsent if published is None and self._sent.has_message(row) else ""
        names = ("partition", "event_time", "last_event_time", "status", "valid", "invalid_reason")
        return {
            **{name: row[name] for name in names},
            "reason": self._reason(row, clock) + self._why_too_large(row) + unsent,
            "parts": [{**part, "rule": "opened" if part is first else "joined"} for part in parts],
            "closed": None if is_open else closed,
            **{name: row[name] for name in self._shown_times},
            **_tenant_of(row),
            "published": published,
            "versions": self._corrections.versions(generation.number, row),
        }

    @property
    def _unsent(self) -> str:
        """What to say of a valid record that is in no message."""
        is_once = self.settings.publish.delivery == "at_most_once"
        return "; not published yet" + (", or lost in a failure (at_most_once)" if is_once else "")

    def _why_too_large(self, row: JsonObject) -> str:
        """Return why a merge record has no parts; nothing where it has some."""
        if any(row[source] for source in self.settings.sources):
            return ""
        count = row[RECORD_COUNT.name]
        batch = self._batch if row["status"] == "open" else row["batch"]
        bounds = self._epochs.of(batch).settings.merge.bounds
        why = (
            f"merge.max_parts is {bounds.max_parts:,}"
            if count > bounds.max_parts
            else "their values have more than merge.max_bytes"
        )
        return f"; too large: {count:,} records have joined it, and {why}; each is in `excess`"

    def _reason(self, row: JsonObject, clock: int | None) -> str:
        """Return, in a sentence, which rule has decided."""
        is_open = row["status"] == "open"
        epoch = self._epochs.current if is_open else self._epochs.of(row["batch"])
        window = epoch.settings.merge.window
        generation = self._generations.of(row["batch"])
        if row["invalid_reason"] == "reset":
            return (
                "closed unpublished by a deliberate reset, with which generation "
                f"{generation.number + 1} began"
            )
        # The next batch makes an open row due by the rules of that moment.
        due = window.due(row["event_time"], row["last_event_time"]) if is_open else row["due"]
        due_text = (
            "last event time + gap"
            if due == row["last_event_time"] + window.gap_ms
            else "event time + max"
        )
        limit = f"{'event time + timeout' if window.is_timeout else due_text} ({utc(due)})"
        now = "undefined" if clock is None else utc(clock)
        has_tenant = row["tenant"] != NO_TENANT
        if is_open and has_tenant:
            return self._tenants.why_open(row["partition"], row["tenant"], limit)
        if is_open:
            return f"open: times out once the clock has passed {limit}; it is {now}"
        unpublished = _UNPUBLISHED.get(row["invalid_reason"] or "", "")
        if not any(row[source] for source in self.settings.sources):
            unpublished = "; not published"
        if row["valid"] and self._sent.is_behind(row):
            unpublished = (
                "; not published: it sorts before what was out when generation "
                f"{generation.number} began"
            )
        if has_tenant:
            closed = (
                f"the clock of tenant {row['tenant']!r} passed {limit} when the clock of all came "
                f"to {utc(row['closed_at'])}"
            )
            return f"timed out in batch {row['batch']}, at the clock {now}: {closed}{unpublished}"
        return (
            f"timed out in batch {row['batch']}: the clock, {now}, had passed {limit}{unpublished}"
        )

    @cached_property
    def _epochs(self) -> Epochs:
        return read_epochs(self.reader, self.settings)

    @cached_property
    def _generations(self) -> Generations:
        return read_generations(self.reader, self.settings)

    def _parts(self) -> dict[tuple[int, TopicPartition, int], JsonObject]:
        """Return all parts of the key's merge records, by generation, topic-partition and offset.

        Each has the last batch that merged it, and its position.
        """
        times: dict[tuple[int, TopicPartition], dict[int, int]] = defaultdict(dict)
        for row in self._rows:
            number = self._generations.of(row["batch"]).number
            for input_id, part in self._parts_of(row):
                times[number, TopicPartition(input_id, row["partition"])][part["offset"]] = _ms(
                    part["event_time"]
                )
        parts = {}
        for (number, tp), offset_times in times.items():
            place = self._place(tp)
            for offset, merged in self._merged(tp, sorted(offset_times), number).items():
                came = {
                    "position": merged.own_position,
                    "batch": merged.batch,
                    "version": self._versions.of(merged.batch),
                }
                parts[number, tp, offset] = {
                    **place,
                    "offset": offset,
                    "event_time": offset_times[offset],
                    **came,
                }
        return parts

    def _parts_of(self, row: JsonObject) -> list[tuple[InputId, JsonObject]]:
        """Return the parts in a row of silver, each with its input."""
        return [
            (input_of_part(self.settings.inputs, source, part), part)
            for source in self.settings.sources
            for part in row[source]
        ]

    def _place(self, tp: TopicPartition) -> JsonObject:
        return {**tp.input._asdict(), "partition": tp.partition}

    def _merged(
        self, tp: TopicPartition, offsets: Sequence[int], number: int
    ) -> dict[int, _Merged]:
        """Return how generation `number` merged each of these offsets, which are in order.

        A position is the largest event time up to the offset, counted on from the position that
        the batch before left.
        """
        batch_rows = self._batches_of(tp, offsets, number)
        firsts = [row["from_offset"] for row in batch_rows]
        here: dict[int, list[int]] = defaultdict(list)
        for offset in offsets:
            here[bisect_right(firsts, offset) - 1].append(offset)
        ends = {
            n: (batch_rows[n]["from_offset"], merged_offsets[-1])
            for n, merged_offsets in here.items()
        }
        where = [
            [("partition", "=", tp.partition), ("offset", ">=", a), ("offset", "<=", b)]
            for a, b in ends.values()
        ]
        read = self.reader.select(
            tables.bronze(tp.input.source),
            ["offset", "event_time", *TENANT.names],
            of_topic(tp.input, where),
        ).sort_by("offset")
        offset = read["offset"].to_numpy()
        time = read["event_time"].fill_null(NULL_TIME).to_numpy()
        decided_in = self._decided_in(tp, number, ends)
        before_rows = self._before(tp, [batch_rows[n]["batch"] for n in here], number)
        merged: dict[int, _Merged] = {}
        for n, (since, until) in ends.items():
            batch = batch_rows[n]["batch"]
            is_in_range = (offset >= since) & (offset <= until)
            decided = decided_in[n]
            rows = Available(offset[is_in_range], time[is_in_range]).with_idle(decided)
            before = before_rows.get(batch - 1, {})
            cursor = Cursor(since, before.get("position"))
            positions = dict(
                zip(rows.offsets.tolist(), positions_of(cursor, rows).tolist(), strict=True)
            )
            last = positions.get(here[n][-1])
            own: Mapping[int, int] = positions
            if self.settings.merge.has_tenants:
                begin = (cursor, before.get("clock"))
                batch_records = read.filter(pa.array(is_in_range))
                own = (
                    {}
                    if last is None
                    else self._tenants.positions(tp, batch, begin, batch_records, last, decided)
                )
            merged |= {o: _Merged(batch, positions.get(o), own.get(o)) for o in here[n]}
        return merged

    def _batches_of(
        self, tp: TopicPartition, offsets: Sequence[int], number: int
    ) -> list[JsonObject]:
        """Return the rows of `progress` of the batches of a generation that merged these offsets of
        a topic-partition, in order.
        """
        of_generation = self._generations.batches(self._generations[number])
        rows: dict[int, JsonObject] = {
            row["batch"]: row
            for row in self._now
            if topic_partition(row) == tp
            and row["from_offset"] < row["until_offset"]
            and self._generations.of(row["batch"]).number == number
        }
        in_order = list(rows.values())
        remaining = list(offsets)
        while remaining:
            portion = remaining[:PARTITIONS_PER_QUESTION]
            where = [
                [*of_generation, *_of(tp), ("from_offset", "<=", o), ("until_offset", ">", o)]
                for o in portion
            ]
            rows |= {row["batch"]: row for row in self._read_progress(where)}
            in_order = sorted(rows.values(), key=itemgetter("from_offset"))
            firsts = [row["from_offset"] for row in in_order]
            remaining = [
                o
                for o in remaining[len(portion) :]
                if o >= in_order[bisect_right(firsts, o) - 1]["until_offset"]
            ]
        return in_order

    def _before(
        self, tp: TopicPartition, batches: Iterable[int], number: int
    ) -> dict[int, JsonObject]:
        """Return the rows of `progress` of the batches of a generation before these, by batch."""
        of_generation = self._generations.batches(self._generations[number])
        before: Condition = ("batch", "in", sorted({batch - 1 for batch in batches}))
        rows = self._read_progress([[*of_generation, *_of(tp), before]])
        return {row["batch"]: row for row in rows}

    def _decided_in(
        self, tp: TopicPartition, number: int, ends: Mapping[int, tuple[int, int]]
    ) -> dict[int, list[IdleDecision]]:
        """Return the decisions of the idle policy about a topic-partition, by range of offsets."""
        decided: dict[int, list[IdleDecision]] = {n: [] for n in ends}
        if not ends:
            return decided
        conditions: list[Condition] = [
            *_of(tp),
            ("after_offset", ">=", min(since for since, _ in ends.values()) - 1),
            ("after_offset", "<", max(until for _, until in ends.values())),
        ]
        for _, decision in read_decisions(self.reader, self._generations[number], [conditions]):
            for n, (since, until) in ends.items():
                if since <= decision.after_offset + 1 <= until:
                    decided[n].append(decision)
        return decided

    @cached_property
    def _tenants(self) -> TenantFacts:
        return TenantFacts(self.reader, self._epochs, self._batch, self._now)

    def late(self) -> list[JsonObject]:
        """Return the late records, by position."""
        rows = sorted(self._late, key=itemgetter("position"))
        return [
            {
                **_shown(row, _LATE_COLUMNS),
                "version": self._versions.of(row["batch"]),
                **self._why_late(row),
                **(self._corrections.became(row) if self._has_corrections else {}),
            }
            for row in rows
        ]

    @property
    def _has_corrections(self) -> bool:
        return tables.has_corrections(self.settings)

    @cached_property
    def _corrections(self) -> CorrectionFacts:
        columns = [*CORRECTION_COLUMNS, *self.settings.sources]
        rows = self._rows_of(tables.CORRECTIONS, columns, *self._key_conditions)
        for row in rows:
            row["parts"] = [
                (input_id, part["offset"], _ms(part["event_time"]))
                for input_id, part in self._parts_of(row)
            ]
        repeated = [row for row in self._duplicates if row["is_late"]]
        topic = self.settings.publish.corrections_topic or ""  # without one, there are no rows
        sent = self._sent_of(CORRECTED, topic)
        bounds = read_retention_bounds(self.reader)
        deleted_until = bounds.last_of(tables.CORRECTIONS, tables.DUPLICATES)
        return CorrectionFacts(rows, repeated, self._generations, sent, deleted_until)

    @cached_property
    def _late(self) -> list[JsonObject]:
        names = [*_LATE_COLUMNS, *(("generation", "u") if self._has_corrections else ())]
        return self._rows_of(tables.LATE, names, *self._key_conditions)

    def duplicates(self) -> list[JsonObject]:
        """Return the repeated records, by coordinates, and what each repeats."""
        return [
            {
                **_shown(row, _DUPLICATE_COLUMNS),
                "version": self._versions.of(row["batch"]),
                "reason": _why_repeated(row),
            }
            for row in self._duplicates
        ]

    @cached_property
    def _duplicates(self) -> list[JsonObject]:
        if not self.settings.has_ids:
            return []
        columns = [*_DUPLICATE_COLUMNS, "generation"]
        return self._rows_of(tables.DUPLICATES, columns, *self._key_conditions)

    def _why_late(self, row: JsonObject) -> JsonObject:
        """Return why a tenant's record is late."""
        if row["tenant"] == NO_TENANT:
            return {}
        tp = topic_partition(row)
        number = self._generations.of(row["batch"]).number
        global_position = self._merged(tp, [row["offset"]], number)[row["offset"]].position
        return {"reason": self._tenants.why_late(row["tenant"], row, global_position)}

    def quarantined(self) -> list[JsonObject]:
        """Return the refused records whose Kafka key is this one.

        The key in their value could not be read.
        """
        names = ("source", "topic", "partition", "offset", "reason", "detail")
        return self._rows_of(tables.QUARANTINE, names, ("key", "=", self.key.encode()))

    def waiting(self) -> list[JsonObject]:
        """Return the records in bronze that the clock has not reached.

        With tenants, those in silver that their tenant's clock has not reached come before them.
        """
        records = list[JsonObject]()
        if self.settings.merge.has_tenants:
            rows = self._rows_of(tables.WAITING, _WAITING_COLUMNS, *self._key_conditions)
            records += map(self._waiting, rows)
        for input_id in self.settings.inputs:
            end_offsets = self._end_offsets(input_id)
            unread = within({p: (end, None) for p, end in end_offsets.items()})
            rows = self._rows_of(
                tables.bronze(input_id.source),
                ("topic", "partition", "offset", "event_time", *TENANT.names),
                *self._key_conditions,
                where=of_topic(input_id, unread if end_offsets else ()),
            )
            records += [
                {"source": input_id.source, **_shown(row, row), **_why_unread(row)}
                for row in rows
                if row["offset"] >= end_offsets.get(row["partition"], 0)
            ]
        return records

    def _end_offsets(self, input_id: InputId) -> dict[int, int]:
        """Return, by partition, the offset up to which an input was merged at the moment.

        Before the first batch of a generation, it is the one at which the generation begins.
        """
        if not self._generations:
            return {}
        generation = self._generations.newest
        begin = generation.offsets_of(input_id)
        if self._batch < generation.from_batch:
            return begin
        merged = {
            row["partition"]: row["until_offset"]
            for row in self._now
            if topic_partition(row).input == input_id
        }
        return begin | merged

    def _waiting(self, row: JsonObject) -> JsonObject:
        """Return a waiting row of silver as the answer has it."""
        p, tenant, position = (row[name] for name in ("partition", "tenant", "position"))
        return {**row, "reason": self._tenants.why_waiting(p, tenant, position)}

    def _rows_of(
        self, table: str, names: Sequence[str], *conditions: Condition, where: Where = ((),)
    ) -> list[JsonObject]:
        """Return rows of a table by coordinates."""
        if not self.reader.exists(table):
            return []
        rows = self.reader.select(table, names, [[*conditions, *term] for term in where])
        by_coordinates = [("partition", "ascending"), ("offset", "ascending")]
        return rows.sort_by(by_coordinates).to_pylist()  # type: ignore[no-any-return]

    def _read_progress(self, where: Where) -> list[JsonObject]:
        columns = ["batch", "source", "topic", "partition", "from_offset", "until_offset"]
        columns += ["head", "clock", "position"]
        return self.reader.select(tables.PROGRESS, columns, where).to_pylist()  # type: ignore[no-any-return]

    @cached_property
    def _now(self) -> list[JsonObject]:
        """The rows of `progress` of the last batch."""
        return self._read_progress([[("batch", "=", self._batch)]])

    @cached_property
    def _named(self) -> list[JsonObject]:
        """The rows of `progress` of the batches that have closed merge records of the key, and of
        the last batch.
        """
        where: list[Condition] = [
            (name, "in", sorted({row[name] for row in self._rows}))
            for name in ("batch", "partition")
        ]
        where.append(("batch", "<", self._batch))
        return [*self._read_progress([where]), *self._now]

    @cached_property
    def _versions(self) -> BatchVersions:
        return BatchVersions(self.reader)


def _of(tp: TopicPartition) -> list[Condition]:
    """Return the condition for the rows about a topic-partition."""
    [here] = of_input(tp.input, [[("partition", "=", tp.partition)]])
    return list(here)


def _why_repeated(row: JsonObject) -> str:
    """Return why a record is no part of its merge record."""
    place = f"{row['topic']}[{row['partition']}]@{row['of_offset']}"
    return f"duplicate: it has the id {row['id']!r} of {place}, which is the part that counts"


def _tenant_of(row: JsonObject) -> JsonObject:
    """Return a row's tenant as the answer has it: nothing where there are no tenants."""
    return {} if row["tenant"] == NO_TENANT else {"tenant": row["tenant"]}


def _shown(row: JsonObject, columns: Iterable[str]) -> JsonObject:
    """Return columns of a row as the answer has them, with its tenant last."""
    return {name: row[name] for name in columns if name != "tenant"} | _tenant_of(row)


def _why_unread(row: JsonObject) -> JsonObject:
    """Return why a tenant's record in bronze waits."""
    if row["tenant"] == NO_TENANT:
        return {}
    return {"position": None, "reason": "the clock of all has not come to it"}


def _near(reader: TableReader, key: str) -> list[str]:
    """Return known keys that look like this one, most alike first.

    Only those that begin or end as it does are compared: with half of it, or with more of it where
    too many do.
    """
    shared = max(1, len(key) // 2)
    while shared <= len(key):
        alike: Where = [
            [("merge_key", "begins with", key[:shared])],
            [("merge_key", "ends with", key[-shared:])],
        ]
        if row_count(reader, tables.MERGED, alike) <= ALIKE_ROWS:
            keys = reader.summary(tables.MERGED, ["merge_key"], {"rows": ("count", "*")}, alike)
            return get_close_matches(key, keys["merge_key"].to_pylist(), NEAR)
        shared += max(1, (len(key) - shared) // 2)
    return []
