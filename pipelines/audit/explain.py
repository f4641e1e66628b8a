"""The life of a key: every merge record with its parts, how each came there, when and why it was closed, where it was published.

What is told comes from the tables: silver holds the records, `progress` the batch that merged an offset and the time it was
then, bronze the event times that a position is the largest of, `versions` the version of silver that a batch made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from pipelines import tables
from pipelines.adapters.decisions import Decided, read_decisions
from pipelines.adapters.lake import Lake
from pipelines.adapters.local import At
from pipelines.audit.published import Sink
from pipelines.audit.show import utc
from pipelines.core.plan import Cursor, Rows, TopicPartition, positions_of
from pipelines.errors import ConfigurationError, WatersmeetError
from pipelines.settings import Settings

_EPOCH, _MILLISECOND = datetime(1970, 1, 1, tzinfo=timezone.utc), timedelta(milliseconds=1)

NEAR = 5
"""So many keys that look like an unknown one are shown."""


class Moment(NamedTuple):
    """Up to which batch of silver something was known (-1: none), in which of its versions, and when (epoch ms; None: now)."""

    batch: int
    version: int | None
    at: int | None


class _Merged(NamedTuple):
    """How a record came into silver: its position (ms), and the batch that merged it."""

    position: int
    batch: int


def explain(lake: Lake, settings: Settings, key: str, as_of: int | datetime | None = None) -> dict[str, Any]:
    """The answer of `explain --json`; `as_of`: a version of silver, or a time. Times in epoch ms.

    Beside the contract's fields: of a part `batch`, `version` and `rule` (opened, joined); of a record `closed` (batch, version,
    clock, heads by source; null while it is open); `late`, `quarantined` (where Kafka's key is this one) and `waiting` records of
    the key; `near`, keys that look like it where nothing is known of it. Raises ConfigurationError where that version does not
    exist.
    """
    if not lake.exists(tables.SILVER):
        return {"key": key, "as_of": None, "records": [], "late": [], "quarantined": [], "waiting": [], "near": []}
    life = _Life(lake, settings, key, _moment(lake, as_of))
    found = {"records": life.records(), "late": life.late(), "quarantined": life.quarantined(), "waiting": life.waiting()}
    near = [] if any(found.values()) else _near(lake, key)
    moment = None if as_of is None else life.moment._asdict()
    return {"key": key, "as_of": moment, **found, "near": near}


def _moment(lake: Lake, as_of: int | datetime | None) -> Moment:
    if as_of is None:
        last = lake.last_commit(tables.SILVER)
        return Moment(-1 if last is None else last.number - 1, None, None)
    newest = lake.version_of(tables.SILVER)
    if isinstance(as_of, datetime):
        at = _ms(as_of)
        [(batch, version)] = lake.rows(
            f"SELECT MAX(batch), MAX(version) FROM {{versions}} WHERE committed_at <= {lake.time_literal(at)}"
        )
        return Moment(-1, 0, at) if version is None else Moment(batch, version, at)
    if as_of > newest:
        raise ConfigurationError(f"--as-of: silver has no version {as_of} yet; the newest is {newest}")
    [(batch, made_at)] = lake.rows(f"SELECT MAX(batch), MAX(committed_at) FROM {{versions}} WHERE version <= {as_of}")
    if batch is None:  # it stands before the first batch
        return Moment(-1, as_of, lake.history(tables.SILVER, newest - as_of + 1)[-1].committed_at)
    return Moment(batch, as_of, made_at)


@dataclass(frozen=True)
class _Life:
    """What the tables tell of one key, as it was known at a moment."""

    lake: Lake
    settings: Settings
    key: str
    moment: Moment

    def records(self) -> list[dict[str, Any]]:
        """Merge records, by partition and event time."""
        names = ("partition", "status", "event_time", "last_event_time", "valid", "invalid_reason", "batch")
        columns = ", ".join(f"`{name}`" for name in names)
        found = self._silver(f"SELECT {columns} FROM {{silver}} WHERE {self._is_key}")
        if not found:
            return []
        rows = [dict(zip(names, values, strict=True)) for values in sorted(found, key=lambda row: (row[0], row[2]))]
        parts = self._parts(rows)
        versions = self._versions([row["batch"] for row in rows] + [m.batch for mine in parts.values() for _, _, m in mine])
        sink = Sink(self.lake, self.settings, self.moment.at)
        return [self._record(row, parts[row["partition"], row["event_time"]], versions, sink) for row in rows]

    def _record(
        self, row: Mapping[str, Any], parts: Sequence[tuple[str, _Part, _Merged]], versions: Mapping[int, int], sink: Sink
    ) -> dict[str, Any]:
        is_out = row["status"] == "timed_out" and row["valid"]
        progress = self._progress_of(row["batch"] if row["status"] == "timed_out" else self.moment.batch, row["partition"])
        first = min(parts, key=lambda part: part[2].position, default=None)
        return {
            "partition": row["partition"],
            "event_time": row["event_time"],
            "last_event_time": row["last_event_time"],
            "status": row["status"],
            "reason": self._reason(row, progress),
            "valid": row["valid"],
            "invalid_reason": row["invalid_reason"],
            "parts": [
                {
                    "source": source,
                    "topic": self.settings.sources[source].topic,
                    "partition": row["partition"],
                    "offset": part.offset,
                    "event_time": part.event_time,
                    "position": merged.position,
                    "rule": "opened" if (source, part, merged) == first else "joined",
                    "batch": merged.batch,
                    "version": versions.get(merged.batch),
                }
                for source, part, merged in parts
            ],
            "closed": None
            if row["status"] == "open"
            else {
                "batch": row["batch"],
                "version": versions.get(row["batch"]),
                "clock": progress.clock,
                "heads": dict(progress.heads),
            },
            "published": sink.place_of(row["partition"], row["event_time"], self.key) if is_out else None,
        }

    def _reason(self, row: Mapping[str, Any], progress: _Progress) -> str:
        """Which rule has decided, in a sentence."""
        limit = row["event_time"] + self.settings.merge.timeout_ms
        clock = "undefined" if progress.clock is None else utc(progress.clock)
        if row["status"] == "open":
            return f"open: times out once the clock has passed event time + timeout ({utc(limit)}); it is {clock}"
        if row["invalid_reason"] == "reset":
            return f"closed unpublished by a deliberate reset in batch {row['batch']}"
        unpublished = {
            "predicate": "; not published: publish.valid does not hold",
            "too_large": "; not published: its message would be larger than publish.max_bytes",
        }.get(row["invalid_reason"] or "", "")
        return (
            f"timed out in batch {row['batch']}: the clock, {clock}, had passed event time + timeout ({utc(limit)}){unpublished}"
        )

    def _parts(self, rows: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], list[tuple[str, _Part, _Merged]]]:
        """By partition and event time of the merge record: its parts in order of their sources, each with how it came there."""
        sources = list(self.settings.sources)
        times = [self.lake.time_literal(pick(row["event_time"] for row in rows)) for pick in (min, max)]
        found = self._silver(
            f"SELECT `partition`, event_time, {', '.join(f'`{name}`' for name in sources)} FROM {{silver}} "
            f"WHERE {self._is_key} AND event_time >= {times[0]} AND event_time <= {times[1]}"
        )
        parts = {
            (partition, time): [
                (source, _Part(part["offset"], _ms(part["event_time"])))
                for source, mine in zip(sources, of_sources, strict=True)
                for part in mine
            ]
            for partition, time, *of_sources in found
        }
        merged = self._merged((TopicPartition(s, p), part.offset) for (p, _), mine in parts.items() for s, part in mine)
        return {
            (p, time): [(source, part, merged[TopicPartition(source, p), part.offset]) for source, part in mine]
            for (p, time), mine in parts.items()
        }

    def _merged(self, offsets: Iterable[tuple[TopicPartition, int]]) -> dict[tuple[TopicPartition, int], _Merged]:
        """How each of these records came into silver: the last batch that has it in its range, and the position there."""
        by_topic_partition: dict[TopicPartition, set[int]] = {}
        for tp, offset in offsets:
            by_topic_partition.setdefault(tp, set()).add(offset)
        merged: dict[tuple[TopicPartition, int], _Merged] = {}
        for tp, mine in by_topic_partition.items():
            by_batch: dict[_Range, list[int]] = {}
            ranges = self._ranges(tp, min(mine), max(mine))
            for offset in sorted(mine):
                by_batch.setdefault(max(r for r in ranges if r.since <= offset < r.until), []).append(offset)
            for done, here in by_batch.items():
                positions = self._positions(tp, done, here)
                merged |= {(tp, offset): _Merged(position, done.batch) for offset, position in positions.items()}
        return merged

    def _ranges(self, tp: TopicPartition, first: int, last: int) -> list[_Range]:
        """What batches have merged of a topic-partition between two offsets."""
        return [
            _Range(*row)
            for row in self.lake.rows(
                f"SELECT batch, from_offset, until_offset FROM {{progress}} WHERE {self._of(tp)} AND reason IS NULL "
                f"AND batch <= {self.moment.batch} AND from_offset <= {last} AND until_offset > {first}"
            )
        ]

    def _positions(self, tp: TopicPartition, done: _Range, offsets: Sequence[int]) -> dict[int, int]:
        """The largest event time from the beginning up to each offset: from the position that the batch before has left on."""
        before = self.lake.rows(f"SELECT position FROM {{progress}} WHERE {self._of(tp)} AND batch = {done.batch - 1}")
        spoken = [d for of, d in self._decisions if of == tp and done.since <= d.after_offset + 1 < done.until]
        found = self.lake.query(
            f"SELECT `offset`, event_time FROM {{{tables.bronze(tp.source)}}} WHERE `partition` = {tp.partition} "
            f"AND `offset` >= {done.since} AND `offset` <= {offsets[-1]} AND event_time IS NOT NULL ORDER BY `offset`"
        )
        rows = Rows(found["offset"].to_numpy(), found["event_time"].to_numpy()).with_idle(spoken)
        positions = positions_of(Cursor(done.since, before[0][0] if before else None), rows)
        return {offset: int(positions[np.searchsorted(rows.offsets, offset, side="right") - 1]) for offset in offsets}

    @cached_property
    def _decisions(self) -> list[Decided]:
        return read_decisions(self.lake)

    def late(self) -> list[dict[str, Any]]:
        """Records that came after their time, by position."""
        names = ("source", "topic", "partition", "offset", "event_time", "position", "batch")
        rows = self._named(tables.LATE, names, f"{self._is_key} AND batch <= {self.moment.batch}")
        versions = self._versions([row["batch"] for row in rows])
        return [{**row, "version": versions.get(row["batch"])} for row in sorted(rows, key=lambda row: int(row["position"]))]

    def quarantined(self) -> list[dict[str, Any]]:
        """Refused records whose Kafka key is this one: what key their value has, nobody could read."""
        names = ("source", "topic", "partition", "offset", "reason", "detail")
        return self._named(tables.QUARANTINE, names, f"`key` = X'{self.key.encode().hex()}'")

    def waiting(self) -> list[dict[str, Any]]:
        """Records in bronze that the clock has not reached."""
        passed = f"SELECT source, `partition`, until_offset FROM {{progress}} WHERE batch = {self.moment.batch}"
        until = {TopicPartition(source, p): offset for source, p, offset in self.lake.rows(passed)}
        names = ("topic", "partition", "offset", "event_time")
        found: list[dict[str, Any]] = []
        for source in self.settings.sources:
            mine = {tp.partition: offset for tp, offset in until.items() if tp.source == source}
            is_near = f"`offset` >= {min(mine.values())}" if mine else "TRUE"
            rows = self._named(tables.bronze(source), names, f"{self._is_key} AND {is_near}")
            found += [{"source": source, **row} for row in rows if row["offset"] >= mine.get(row["partition"], 0)]
        return found

    def _named(self, table: str, names: Sequence[str], condition: str) -> list[dict[str, Any]]:
        """Rows of a table as it was at the moment, by coordinates."""
        if not self.lake.exists(table):
            return []
        at: At = {} if self.moment.at is None else {table: _time(self.moment.at)}
        columns = ", ".join(f"`{name}`" for name in names)
        rows = self.lake.rows(f"SELECT {columns} FROM {{{table}}} WHERE {condition} ORDER BY `partition`, `offset`", at)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def _silver(self, sql: str) -> list[tuple[Any, ...]]:
        version = self.moment.version
        if version is None:
            return self.lake.rows(sql)
        try:
            return self.lake.rows(sql, {tables.SILVER: version})
        except Exception as error:
            raise WatersmeetError(
                f"version {version} of silver cannot be read any more: versions are kept for `retention` "
                f"({self.settings.retention_ms // 3_600_000} h)"
            ) from error

    def _versions(self, batches: Iterable[int]) -> dict[int, int]:
        """The version of silver that each of some batches made, where it is known."""
        wanted = ", ".join(str(batch) for batch in sorted(set(batches)))
        if not wanted or not self.lake.exists(tables.VERSIONS):
            return {}
        return dict(self.lake.rows(f"SELECT batch, version FROM {{versions}} WHERE batch IN ({wanted})"))

    def _progress_of(self, batch: int, partition: int) -> _Progress:
        rows = self.lake.rows(
            f"SELECT source, head, clock FROM {{progress}} WHERE batch = {batch} AND `partition` = {partition} ORDER BY source"
        )
        return _Progress(rows[0][2] if rows else None, {source: head for source, head, _ in rows})

    @property
    def _is_key(self) -> str:
        return f"merge_key = {self.lake.text_literal(self.key)}"

    @staticmethod
    def _of(tp: TopicPartition) -> str:
        return f"source = '{tp.source}' AND `partition` = {tp.partition}"


class _Part(NamedTuple):
    offset: int
    event_time: int


class _Range(NamedTuple):
    """`[since, until)` of a topic-partition, which a batch has merged."""

    batch: int
    since: int
    until: int


class _Progress(NamedTuple):
    """The time that it was in a batch: clock and heads (ms) of one partition."""

    clock: int | None
    heads: Mapping[str, int | None]


def _near(lake: Lake, key: str) -> list[str]:
    """Known keys that look like it, most alike first: of those that begin or end as it does, so that few have to be compared."""
    literal, length = lake.text_literal(key), len(key)
    half = (length + 1) // 2
    begins, ends = lake.text_literal(key[:half]), lake.text_literal(key[half:])
    rows = lake.rows(
        f"SELECT merge_key, MIN(levenshtein(merge_key, {literal})) AS distance FROM {{silver}} WHERE merge_key <> {literal} "
        f"AND character_length(merge_key) BETWEEN {length - 3} AND {length + 3} "
        f"AND (left(merge_key, {half}) = {begins} OR right(merge_key, {length - half}) = {ends}) "
        f"GROUP BY merge_key ORDER BY distance, merge_key LIMIT {NEAR}"
    )
    return [near for near, distance in rows if distance <= length // 2]


def _ms(time: datetime) -> int:
    return (time - _EPOCH) // _MILLISECOND


def _time(ms: int) -> datetime:
    return _EPOCH + ms * _MILLISECOND
