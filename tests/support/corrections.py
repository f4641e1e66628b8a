"""Corrections of cases: what their model makes of them, and what the tables of a lake have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from tests.support.cases import SOURCES, Case
from tests.support.lakes import of_generation
from tests.support.tenants import TenantModels, Window
from tests.support.topics import Access, consume
from watersmeet.core.correction_model import MAX_VERSIONS, Correction, PartitionCorrections
from watersmeet.core.model import MergeRecord, Record
from watersmeet.core.sequence import ID, LATE, SEQ, VERSION, message_id
from watersmeet.lake import tables
from watersmeet.lake.table_reader import TableReader
from watersmeet.settings import PublishSettings

Row = tuple[Any, ...]


class CorrectionsOfCases:
    """What the model of corrections makes of cases, one for each partition.

    `topics`: by source the name of its topic; that of the source by default.
    """

    def __init__(
        self,
        cases: Mapping[int, Case],
        corrections: Mapping[int, PartitionCorrections],
        topics: Mapping[str, str] | None = None,
    ) -> None:
        self.cases, self.corrections, self.topics = cases, corrections, topics or {}

    @classmethod
    def of(
        cls, cases: Mapping[int, Case], publish: PublishSettings, topics: Mapping[str, str]
    ) -> CorrectionsOfCases:
        """The corrections of all that the cases have so far."""
        limits = publish.within_ms, publish.max_versions
        found = {
            p: PartitionCorrections(case.merged(), limits[0], max_versions=limits[1])
            for p, case in cases.items()
        }
        for corrections in found.values():
            corrections.settle()
        return cls(cases, found, topics)

    def rows(self) -> list[Row]:
        """In the form of `corrections_of`."""
        return sorted(
            self._row(p, each)
            for p, found in self.corrections.items()
            for each in [*found.corrections, *found.too_many]
        )

    def _row(self, p: int, each: Correction) -> Row:
        place = each.place
        parts = tuple(
            tuple(
                (part.offset, part.event_time, (self.cases[p].value(s, part) or b"").decode())
                for part in each.parts[s]
            )
            for s in SOURCES
        )
        return (
            *(p, place.settled_at, each.tenant, place.u, place.source.decode(), place.offset),
            *(each.key, each.event_time, each.is_late_born, each.version, each.due, each.closed_at),
            *(each.first_event_time, each.last_event_time, each.late.position, parts),
        )

    def late_duplicates(self) -> list[Row]:
        """In the form of `late_duplicates_of`."""
        return sorted(
            (p, each.record.input.source, each.record.offset, each.of_offset)
            for p, found in self.corrections.items()
            for each in found.duplicates
        )

    def messages(self) -> list[tuple[Any, ...]]:
        """What the topic has by partition, in the form of `corrections_in`."""
        found = []
        for p, corrections in self.corrections.items():
            for seq, each in enumerate(corrections.corrections):
                late = each.late.record
                content = self._json(
                    p, each, event_time=each.first_event_time, last_event_time=each.last_event_time
                )
                found.append((p, each.key, seq, each.version, self._place(p, late), content))
        return sorted(found, key=lambda row: row[:3])

    def consumed(self) -> dict[str, Any]:
        """In the form of `consumed`."""
        kept = dict[str, Any]()
        for p, found in self.corrections.items():
            for row in found.merge.timed_out:
                times = {"event_time": row.event_time, "last_event_time": row.last_event_time}
                name = message_id(p, row.event_time, row.key, row.tenant)
                kept[name] = self._json(p, row, **times)
            opened = dict[tuple[str, str, int], str]()
            for each in found.corrections:
                of_record = each.tenant, each.key, each.event_time
                own = f"late/{self._place(p, each.late.record)}"
                name = message_id(p, each.event_time, each.key, each.tenant)
                if each.is_late_born:
                    name = opened.setdefault(of_record, own)
                times = {
                    "event_time": each.first_event_time,
                    "last_event_time": each.last_event_time,
                }
                kept[name] = self._json(p, each, **times)
        return kept

    def _place(self, p: int, late: Record) -> str:
        topic = self.topics.get(late.input.source, late.input.topic)
        return f"{late.input.source}/{topic}/{p}/{late.offset}"

    def _json(self, p: int, each: Correction | MergeRecord, **times: int) -> dict[str, Any]:
        tenant = {"tenant": each.tenant} if each.tenant else {}
        parts = {
            source: [
                orjson.loads(self.cases[p].value(source, part) or b"") for part in sorted(of_source)
            ]
            for source, of_source in each.parts.items()
        }
        return {"key": each.key, **tenant, **times, **parts}

    def newest(self) -> Counter[tuple[int, str, int]]:
        """How often each record on time that is finished, and each corrected one, is in what a
        consumer of both topics has in the end: by partition, source and offset."""
        records: Counter[tuple[int, str, int]] = Counter()
        for p, corrections in self.corrections.items():
            for row in corrections.merge.timed_out:
                records.update((p, s, part.offset) for s, of in row.parts.items() for part in of)
            records.update(
                (p, each.late.record.input.source, each.late.record.offset)
                for each in corrections.corrections
            )
        return records


class CorrectionModels(TenantModels, CorrectionsOfCases):
    """The model of the corrections of each partition, beside that of the merge."""

    def __init__(
        self,
        cases: Mapping[int, Case],
        rules: Window,
        within_ms: int | None,
        begins: Mapping[tuple[str, int], int] | None = None,
        topics: Mapping[str, str] | None = None,
        max_versions: int = MAX_VERSIONS,
    ) -> None:
        TenantModels.__init__(self, cases, rules, begins)
        corrections = {
            p: PartitionCorrections(model, within_ms, max_versions=max_versions)
            for p, model in self.models.items()
        }
        CorrectionsOfCases.__init__(self, cases, corrections, topics)

    def arrive(self, share: float) -> None:
        super().arrive(share)
        for corrections in self.corrections.values():
            corrections.settle()

    def begin_epoch(
        self, rules: Window, within_ms: int | None = None, max_versions: int = MAX_VERSIONS
    ) -> None:
        super().begin_epoch(rules)
        for corrections in self.corrections.values():
            corrections.within_ms = within_ms
            corrections.max_versions = max_versions


def corrections_in(kafka: Access, topic: str, partitions: int) -> list[tuple[Any, ...]]:
    """The messages of a topic of corrections: partition, key, number, version, late record, and
    value."""
    found = []
    for message in consume(kafka, topic, partitions):
        headers = dict(message.headers() or [])
        numbers = (int(headers[name]) for name in (SEQ, VERSION))
        value = None if message.value() is None else orjson.loads(message.value() or b"")
        key = (message.key() or b"").decode()
        found.append((message.partition(), key, *numbers, headers[LATE].decode(), value))
    return sorted(found, key=lambda row: row[:3])


def consumed(kafka: Access, topics: Sequence[str], partitions: int) -> dict[str, Any]:
    """What a consumer of both topics has in the end: by id, the value of the largest version."""
    newest: dict[str, tuple[int, Any]] = {}
    for topic in topics:
        for message in consume(kafka, topic, partitions):
            headers = dict(message.headers() or [])
            version = int(headers.get(VERSION, b"0"))
            name = headers[ID].decode()
            if name not in newest or newest[name][0] < version:
                newest[name] = version, message.value()
    return {name: orjson.loads(value) for name, (_, value) in newest.items() if value is not None}


_COLUMNS = [
    *("partition", "settled_at", "tenant", "u", "source", "offset", "merge_key", "event_time"),
    *("is_late_born", "version", "due", "closed_at", "first_event_time", "last_event_time"),
    "position",
]


def corrections_of(
    reader: TableReader, sources: Sequence[str] = SOURCES, generation: int | None = None
) -> list[Row]:
    """The corrections of a lake, each with its parts by source as (offset, event time, value)."""
    rows = reader.select(
        tables.CORRECTIONS, [*_COLUMNS, *sources], of_generation(generation)
    ).to_pylist()
    return sorted(
        (*(row[name] for name in _COLUMNS), tuple(_parts(row[source]) for source in sources))
        for row in rows
    )


def _parts(parts: Sequence[Mapping[str, Any]]) -> tuple[Row, ...]:
    return tuple(
        (part["offset"], round(part["event_time"].timestamp() * 1000), part["value"])
        for part in parts
    )


def late_duplicates_of(reader: TableReader) -> list[Row]:
    """Late records that repeat a part: partition, source, offset, and the offset of the part."""
    columns = ["partition", "source", "offset", "of_offset"]
    rows = reader.select(tables.DUPLICATES, columns, [[("is_late", "=", True)]])
    return sorted(tuple(row.values()) for row in rows.to_pylist())
