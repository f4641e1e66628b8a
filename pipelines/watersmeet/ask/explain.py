"""The history of a key: its merge records with their parts, how each part came there, when and why
a record was closed, and where it was published.

All of it is rows of the lake's views at one version of silver (`ask.life`), with a sentence for
each decision.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from watersmeet.ask.answers import Row
from watersmeet.ask.life import Life, Place, place_of
from watersmeet.ask.moment import moment
from watersmeet.core import sequence as sequences
from watersmeet.core.columns import row_values
from watersmeet.core.inputs import InputId, input_of_part
from watersmeet.core.sequence import (
    CORRECTED,
    EXCESS,
    ID,
    MERGED,
    SEQ,
    TOO_MANY,
    VERSION,
    late_born_id,
    message_id,
)
from watersmeet.core.state import State
from watersmeet.core.times import epoch_ms, utc
from watersmeet.core.types import DUE, NO_TENANT
from watersmeet.errors import WatersmeetError
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.reading import Range, read_range
from watersmeet.lake import tables
from watersmeet.lake.history import longest_ms, read_history
from watersmeet.lake.progress import BatchVersions, last_batch
from watersmeet.lake.restored import check_not_deleted
from watersmeet.lake.snapshot import Snapshot
from watersmeet.lake.state import state_at
from watersmeet.lake.table_reader import TableReader, VersionGoneError, Where, extremes
from watersmeet.settings import MergeSettings, Settings

_UNPUBLISHED: Final = {
    None: "",
    "predicate": "; not published: publish.valid does not hold",
    "expression": "; not published: publish.valid fails for it",
    "too_large": "; not published: its message would be larger than publish.max_bytes",
}

_MARKERS = 1000
PATIENCE_S = 3.0
"""Seconds after which a broker that does not answer counts as away: the tables know nearly as much.
"""

JsonObject: TypeAlias = dict[str, Any]


def explain(
    reader: TableReader,
    settings: Settings,
    key: str,
    as_of: int | datetime | None = None,
    tenant: str | None = None,
) -> JsonObject:
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
    answer: JsonObject = {"key": key, "as_of": None}
    if as_of is not None and snapshot.exists(tables.SILVER):
        snapshot, found = moment(snapshot, as_of, "--as-of")
        answer["as_of"] = found._asdict()
    needed = (tables.SILVER, *map(tables.bronze, settings.sources))
    missing = [name for name in needed if not snapshot.exists(name)]
    # Silver's first version may be earlier than bronze's.
    if tables.SILVER in missing or (missing and last_batch(snapshot) is None):
        nothing = ("records", "late", "duplicates", "quarantined", "waiting", "near")
        return answer | {name: [] for name in nothing}
    try:
        return answer | _Explained(snapshot, settings, key, tenant).answer()
    except VersionGoneError as error:
        hours = settings.retention_ms // 3_600_000
        raise WatersmeetError(
            f"version {error.version} of {error.table} cannot be read any more: versions are kept "
            f"for `retention` ({hours} h)"
        ) from error


class _Explained:
    """The rows of a key's life as the answer has them, each with why it is as it is."""

    def __init__(
        self, reader: TableReader, settings: Settings, key: str, tenant: str | None
    ) -> None:
        self.history = read_history(reader, settings)
        self.epochs, self.generations = self.history.epochs, self.history.generations
        self.settings = self.epochs.current.settings
        self.names = self.settings.input_names
        last = last_batch(reader)
        self.batch = -1 if last is None else last.batch
        self.reader = reader
        self.life = Life(reader, self.settings, self.history, self.batch, key, tenant)
        self.versions = BatchVersions(reader)
        self.topics = Topics(self.settings)
        self.has_corrections = tables.has_corrections(self.settings)

    def answer(self) -> JsonObject:
        """Return everything but the key and the moment."""
        rows = self.life.records()
        self.corrections = self.life.corrections() if self.has_corrections else []
        self.parts = self.life.parts(rows)
        self.ends = defaultdict[tuple[int, int], list[Row]](list)
        for end in self.life.ends(rows):
            self.ends[end["batch"], end["partition"]].append(end)
        records = [*self._records(rows), *self._late_born()]
        outcomes = {
            "records": sorted(records, key=itemgetter("partition", "event_time")),
            "late": self._late(),
            "duplicates": self._duplicates(),
            "quarantined": self.life.rows("quarantined", key=self.life.key.encode().hex()),
            "waiting": self._waiting(),
        }
        near = [] if any(outcomes.values()) else self.life.near()
        return {**outcomes, "near": near}

    # -- merge records

    def _records(self, rows: Sequence[Row]) -> list[JsonObject]:
        parts = defaultdict[_Record, list[Row]](list)
        for part in self.parts:
            if part["opened"] is not None:
                parts[_record_of(part | {"event_time": part["opened"]})].append(part)
        sent = self._sent(MERGED, rows, self.settings.publish.topic)
        return [self._record(row, parts[_record_of(row)], sent[n]) for n, row in enumerate(rows)]

    def _record(self, row: Row, parts: Sequence[Row], published: JsonObject | None) -> JsonObject:
        is_open = row["status"] == "open"
        batch = self.batch if is_open else row["batch"]
        ends = self.ends[batch, row["partition"]]
        heads = {self.names[InputId(end["source"], end["topic"])]: end["head"] for end in ends}
        clock = ends[0]["clock"] if ends else None
        closed = {
            "batch": batch,
            "version": self.versions.of(batch),
            "clock": clock,
            "heads": dict(sorted(heads.items())),
        }
        # Bronze may have deleted parts by now. Their positions are unknown, and were the smallest.
        first = min(
            parts,
            key=lambda part: (part["position"] is not None, part["position"] or part["event_time"]),
            default=None,
        )
        is_unsent = published is None and self._has_message(MERGED, row)
        is_at_most_once = self.settings.publish.delivery == "at_most_once"
        return {
            **_columns(row, "partition", "event_time", "last_event_time", "status", "valid"),
            "invalid_reason": row["invalid_reason"],
            "reason": (
                self._reason(row, clock)
                + self._why_too_large(row, batch)
                + ("; not published yet" if is_unsent else "")
                + (", or lost in a failure (at_most_once)" if is_unsent and is_at_most_once else "")
            ),
            "parts": [
                {
                    **_columns(part, *_PART, "position", "batch"),
                    "version": self.versions.of(part["batch"]),
                    "rule": "opened" if part is first else "joined",
                }
                for part in parts
            ],
            "closed": None if is_open else closed,
            # When it was closed, where the rules of the moment say it.
            **_columns(row, *(DUE.names if self.merge_of(self.batch).shows_closing else ())),
            **_tenant_of(row),
            "published": published,
            "versions": self._versions[_record_of(row)],
        }

    def merge_of(self, batch: int) -> MergeSettings:
        """Return the rules of a batch's epoch."""
        return self.epochs.of(batch).settings.merge

    def _why_too_large(self, row: Row, batch: int) -> str:
        if row["parts"]:
            return ""
        count, bounds = row["record_count"], self.merge_of(batch).bounds
        why = (
            f"merge.max_parts is {bounds.max_parts:,}"
            if count > bounds.max_parts
            else "their values have more than merge.max_bytes"
        )
        return f"; too large: {count:,} records have joined it, and {why}; each is in `excess`"

    def _reason(self, row: Row, clock: int | None) -> str:
        is_open, tenant = row["status"] == "open", row["tenant"]
        merge = self.settings.merge if is_open else self.merge_of(row["batch"])
        window = merge.window
        if row["invalid_reason"] == "reset":
            return (
                "closed unpublished by a deliberate reset, with which generation "
                f"{row['generation'] + 1} began"
            )
        # The next batch makes an open row due by the rules of that moment.
        due = window.due(row["event_time"], row["last_event_time"]) if is_open else row["due"]
        is_by_gap = due == row["last_event_time"] + window.gap_ms
        limit = "last event time + gap" if is_by_gap else "event time + max"
        limit = f"{'event time + timeout' if window.is_timeout else limit} ({utc(due)})"
        now = "undefined" if clock is None else utc(clock)
        if is_open:
            whose = "" if tenant == NO_TENANT else f" of tenant {tenant!r}"
            now = now if tenant == NO_TENANT else self._tenant_clock(row["partition"], tenant)
            return f"open: times out once the clock{whose} has passed {limit}; it is {now}"
        unpublished = _UNPUBLISHED.get(row["invalid_reason"], "")
        if not row["parts"]:
            unpublished = "; not published"
        if row["valid"] and self._is_behind(MERGED, row):
            unpublished = (
                "; not published: it sorts before what was out when generation "
                f"{row['generation']} began"
            )
        passed = f"timed out in batch {row['batch']}: the clock, {now}, had passed {limit}"
        if tenant != NO_TENANT:
            passed = (
                f"timed out in batch {row['batch']}, at the clock {now}: the clock of tenant "
                f"{tenant!r} passed {limit} when the clock of all came to {utc(row['closed_at'])}"
            )
        return f"{passed}{unpublished}"

    # -- messages

    def _is_behind(self, sequence: sequences.Sequence, row: Row) -> bool:
        """Return True where a finished row sorts at or before the tail behind which its generation
        publishes.
        """
        tails = self.generations[row["generation"]].tails_of(sequence)
        tail = tails.get(row["partition"])
        return tail is not None and sequence.place(row) <= tail.place

    def _has_message(self, sequence: sequences.Sequence, row: Row) -> bool:
        is_valid = all(row[name] == value for name, value in sequence.with_message.items())
        return is_valid and not self._is_behind(sequence, row)

    def _sent(
        self, sequence: sequences.Sequence, rows: Sequence[Row], topic: str
    ) -> dict[int, JsonObject | None]:
        """Return, by number, the message of each row; None where it is not published."""
        numbers = [n for n, row in enumerate(rows) if self._has_message(sequence, row)]
        found: dict[int, JsonObject | None] = dict.fromkeys(range(len(rows)))
        for place, out in self.life.sent(sequence, [rows[n] for n in numbers]).items():
            row, is_out = rows[numbers[place]], True
            partition = row["partition"]
            seq = None if self._may_lack_later(sequence, row) else out["seq"]
            guess = Numbers(out["offset"], seq)
            message, is_out = self.topics.numbers_of(topic, partition, _headers(row), guess)
            if is_out:
                found[numbers[place]] = {"partition": partition, **message._asdict()}
        return found

    def _may_lack_later(self, sequence: sequences.Sequence, row: Row) -> bool:
        """Return True where rows that were published after this one may be deleted by now: then
        those that are left do not say which number its message has.
        """
        deleted_until = self._deleted_until.get(row["partition"])
        if deleted_until is None:
            return False
        return sequence is CORRECTED or row[sequence.clock] <= deleted_until

    @cached_property
    def _deleted_until(self) -> dict[int, int]:
        """By partition, the largest clock (ms) at which a merge record can have closed that `keep`
        or `forget` has deleted. A partition without any is absent.
        """
        until = self.history.floors.last_of(tables.SILVER, tables.CORRECTIONS)
        if self.reader.exists(tables.ERASED):
            of_merged: Where = [[("source", "is null", None)]]
            erased = extremes(self.reader, tables.ERASED, "event_time", of_merged)
            until = {p: max(until.get(p, 0), erased.get(p, 0)) for p in {**until, **erased}}
        return {p: time + longest_ms(self.epochs) + 1 for p, time in until.items()}

    # -- corrections

    @cached_property
    def _versions(self) -> Mapping[_Record, list[JsonObject]]:
        sent = self._sent(
            CORRECTED, self.corrections, self.settings.publish.corrections_topic or ""
        )
        names = ("version", "source", "topic", "partition", "offset", "settled_at", "valid")
        versions = defaultdict[_Record, list[JsonObject]](list)
        for n, row in enumerate(self.corrections):
            version = _columns(row, *names, "invalid_reason") | {"published": sent[n]}
            versions[_record_of(row)].append(version)
        return versions

    def _late_born(self) -> list[JsonObject]:
        newest = {_record_of(row): row for row in self.corrections if row["is_late_born"]}
        came = {place_of(row): row for row in self.corrections}
        return [
            {
                **_columns(row, "partition", "event_time", "last_event_time"),
                "status": "late_born",
                **_columns(row, "valid", "invalid_reason"),
                "reason": "late-born: no merge record that had closed could hold it",
                "parts": sorted(
                    (
                        self._late_part(row, source, part, came)
                        for source in self.settings.sources
                        for part in row[source]
                    ),
                    key=self.life.in_order,
                ),
                "closed": None,
                **_tenant_of(row),
                "published": None,
                "versions": self._versions[record],
            }
            for record, row in newest.items()
        ]

    def _late_part(self, row: Row, source: str, part: Row, came: Mapping[Place, Row]) -> JsonObject:
        input_id = input_of_part(self.settings.inputs, source, part)
        place = {**input_id._asdict(), **_columns(row, "partition"), "offset": part["offset"]}
        # `keep` may have deleted the version of an earlier part, the first one's, too.
        of_late = came.get(place_of(place | _columns(row, "generation")), {})
        is_first = row["id"] == late_born_id(*input_id, row["partition"], part["offset"])
        return {
            **place,
            "event_time": epoch_ms(part["event_time"]),
            "position": of_late.get("position"),
            "batch": of_late.get("batch"),
            "version": self.versions.of(of_late.get("batch")),
            "rule": "opened" if is_first else "joined",
        }

    def _outcome(self, row: Row) -> JsonObject:
        if row["version"] is None:
            return {"u": row["u"], "corrected": None, "outcome": self._why_not_corrected(row)}
        corrected = None
        record = "the late-born record" if row["is_late_born"] else "the merge record"
        record += f" of {utc(row['corrected'])}"
        if row["version"]:
            corrected = {"event_time": row["corrected"], **_columns(row, "is_late_born", "version")}
            outcome = f"version {row['version']} of {record} has it"
            if row["invalid_reason"] == "reset":
                outcome += "; closed unpublished by a deliberate reset"
        elif row["invalid_reason"] == EXCESS:
            outcome = (
                f"not corrected: {record} is too large, or would be with it (merge.max_parts, "
                "merge.max_bytes)"
            )
        else:
            outcome = (
                f"not corrected: {record} has as many versions as publish.corrections.max_versions "
                f"lets it have ({TOO_MANY})"
            )
        return {"u": row["u"], "corrected": corrected, "outcome": outcome}

    def _why_not_corrected(self, row: Row) -> str:
        if row["u"] is None:
            return "not corrected: further behind than publish.corrections.within, or without it"
        if row["is_repeated"]:
            return "not corrected: its merge record has a part with its id"
        # Nothing that is not settled yet is so old: `keep.silver` is larger than `within`.
        floors = self.history.floors.last_of(tables.CORRECTIONS, tables.DUPLICATES)
        if row["event_time"] < floors.get(row["partition"], row["event_time"]):
            return "settled; `keep` has deleted what came of it"
        if row["generation"] != self.generations.newest.number:
            return "not corrected: its generation ended before it was settled"
        return f"settled once the clock has passed {utc(row['u'])}"

    # -- what was not merged

    def _late(self) -> list[JsonObject]:
        positions = {place_of(part): part["of_all"] for part in self.parts}
        return [
            {
                **_columns(row, *_PART, "position", "batch"),
                **_tenant_of(row),
                "version": self.versions.of(row["batch"]),
                **self._why_late(row, positions),
                **(self._outcome(row) if self.has_corrections else {}),
            }
            for row in self.life.rows("late")
        ]

    def _why_late(self, row: Row, positions: Mapping[Place, int | None]) -> JsonObject:
        if (tenant := row["tenant"]) == NO_TENANT:
            return {}
        merge = self.merge_of(row["batch"])
        position, of_all = row["position"], positions.get(place_of(row))
        limit = position - merge.window.gap_ms
        if row["event_time"] >= limit:
            why = f"before what an earlier epoch had timed out of tenant {tenant!r}"
            return {"reason": f"late: {why}"}
        name = "timeout" if merge.window.is_timeout else "gap"
        why = (
            f"before {utc(limit)}, which is the position of tenant {tenant!r}, {utc(position)}, "
            f"less the {name}"
        )
        if of_all is not None and position == of_all - (merge.tenant_max_lag_ms or 0):
            why += (
                f"; that is as far behind the position of all, {utc(of_all)}, as "
                "merge.tenant_max_lag lets it be"
            )
        return {"reason": f"late: {why}"}

    def _duplicates(self) -> list[JsonObject]:
        rows = self.life.rows("duplicates") if self.settings.has_ids else []
        return [
            {
                **_columns(row, *_PART, "id", "of_offset", "is_late", "batch"),
                **_tenant_of(row),
                "version": self.versions.of(row["batch"]),
                "reason": (
                    f"duplicate: it has the id {row['id']!r} of {row['topic']}[{row['partition']}]@"
                    f"{row['of_offset']}, which is the part that counts"
                ),
            }
            for row in rows
        ]

    def _waiting(self) -> list[JsonObject]:
        waiting = self.life.rows("waiting") if self.settings.merge.has_tenants else []
        for row in waiting:
            row["reason"] = (
                f"read at {utc(row['position'])} of tenant {row['tenant']!r}, whose clock is "
                f"{self._tenant_clock(row['partition'], row['tenant'])}"
            )
        unread = [{**_columns(row, *_PART), **_tenant_of(row)} for row in self.life.unread()]
        for row in unread:
            if "tenant" in row:
                row |= {"position": None, "reason": "the clock of all has not come to it"}
        return [*waiting, *unread]

    @cached_property
    def _state(self) -> State:
        return state_at(self.reader, self.history, self.generations.of(self.batch), self.batch)

    def _tenant_clock(self, partition: int, tenant: str) -> str:
        if partition not in self._state.clocks:
            return "undefined"
        tenants = pa.chunked_array([[tenant]], pa.string())
        clock = int(self._state.tenant_clocks(np.array([partition]), tenants)[0])
        if clock == (of_all := self._state.clocks[partition]):
            return utc(clock)
        held_by = [self.names[tp.input] for tp in self._state.held_by(partition, tenant)]
        return f"{utc(clock)}, held by {' and '.join(held_by)}; the clock of all is {utc(of_all)}"


_PART: Final = ("source", "topic", "partition", "offset", "event_time")
_Record: TypeAlias = tuple[int, int, str, int, str]
"""Generation, partition, tenant and event time of a merge record, and the id of a late-born one:
several may have one event time where a lake was lost.
"""


def _record_of(row: Row) -> _Record:
    generation, partition = row["generation"], row["partition"]
    id = row["id"] if row.get("is_late_born") else ""
    return generation, partition, row["tenant"], row["event_time"], id


def _headers(row: Row) -> dict[str, str]:
    if "version" in row:
        return {ID: row["id"], VERSION: str(row["version"])}
    own = _columns(row, "partition", "event_time", "merge_key", "tenant")
    return {ID: message_id(*own.values())}


def _columns(row: Row, *names: str) -> JsonObject:
    return {name: row[name] for name in names}


def _tenant_of(row: Row) -> JsonObject:
    return {} if row["tenant"] == NO_TENANT else {"tenant": row["tenant"]}


# -- messages in their topics


class Numbers(NamedTuple):
    """The offset of a message, and its number in its sequence; None where they are not known."""

    offset: int | None
    seq: int | None


class Topics:
    """Reader of the topics that gold publishes to, while Kafka answers."""

    def __init__(self, settings: Settings) -> None:
        self._kafka = settings.kafka
        self._cluster = Cluster(settings.kafka, PATIENCE_S)
        self._is_away = False

    def numbers_of(
        self, topic: str, partition: int, headers: Mapping[str, str], guess: Numbers
    ) -> tuple[Numbers, bool]:
        """Return the numbers of the message with these headers, and True where it was sent.

        The offset is None where the topic does not have the message. It is the guess, as its other
        number, where there is no guess of it, or where Kafka does not answer. A message that is
        missing may have been removed by retention. Otherwise it was never sent: it sorts before
        what a lost lake or a jump had left.

        The guess of an offset is never too small: between a message and the last of its transaction
        there may be markers of other transactions, and messages of rows that are deleted.
        """
        last = guess.offset
        if last is None:
            return guess, True
        if self._is_away:
            return guess, True
        expected = [{"key": name, "value": value.encode()} for name, value in headers.items()]
        try:
            first, end = self._cluster.bounds_of(topic, [partition])[partition]
            for start in (max(first, last - _MARKERS), first):
                until = Range(topic, partition, start, min(last + 1, end))
                for batch in read_range(self._kafka, until, timeout_s=PATIENCE_S):
                    for offset, own in row_values(batch, "offset", "headers"):
                        if all(header in (own or []) for header in expected):
                            return Numbers(int(offset), _seq(own)), True
        except WatersmeetError:
            self._is_away = True
            return guess, True
        return guess._replace(offset=None), first > 0


def _seq(headers: list[dict[str, Any]]) -> int | None:
    numbers = [header["value"] for header in headers if header["key"] == SEQ]
    return int(numbers[-1]) if numbers and (numbers[-1] or b"").isdigit() else None
