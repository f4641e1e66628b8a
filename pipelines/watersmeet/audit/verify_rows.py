"""What of silver needs no merge model, as queries (`ask/verify.sql`): rows that are there twice, or
are of a batch that could not make them, batches that bronze does not bear out, and records that
have not exactly one trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from watersmeet.ask.answers import literal, queries, rows, values
from watersmeet.audit.evidence import MAX_TIME, NULL, Evidence
from watersmeet.audit.problems import Report
from watersmeet.core.inputs import InputId, of_source
from watersmeet.core.model import NO_TENANT
from watersmeet.core.plan import TopicPartition
from watersmeet.lake import tables

Row = Mapping[str, Any]

_QUERIES: Final = queries("verify.sql")


def place(partition: int, key: str, event_time: int | None = None, tenant: str = NO_TENANT) -> str:
    """Return a merge record's coordinates, for a sentence; event time in ms."""
    tenant_text = "" if tenant == NO_TENANT else f"tenant {tenant!r}, "
    return f"silver: partition {partition}, {tenant_text}key {key!r}" + (
        "" if event_time is None else f", event_time {event_time}"
    )


def place_of(row: Row) -> str:
    """Return the coordinates of the merge record that a row has."""
    return place(row["partition"], row["merge_key"], row["event_time"], row["tenant"])


_CHECKS: Final[Mapping[str, tuple[str, str | None]]] = {
    "numbers": ("batches", "silver: generation {generation}"),
    "repeated": ("rows of silver", None),
    "closed": ("rows of silver", None),
    "passed": ("outcomes", "silver: {topic}[{partition}]@{offset}"),
    "batches": ("batches", "progress: batch {batch}, {topic}[{partition}]"),
    "decisions": ("batches", "idle_heartbeats: {topic}[{partition}]"),
    "positions": ("batches", "{at}"),
    "in_two_messages": ("sink", "silver: {at}"),
}
"""By query the check that it belongs to, and where a row of it is (None: the coordinates of a merge
record). What is wrong there is in the column `what`."""


class RowChecks:
    """The queries, about a generation and what they find.

    - `erasing`: partitions, tenants and keys that `forget` has begun to erase.
    """

    def __init__(self, evidence: Evidence, report: Report) -> None:
        self.evidence = evidence
        self.report = report
        since = evidence.generation.from_batch
        first = max(evidence.history_batch + 1, since)
        begin = max(evidence.history_batch, since)
        last = evidence.last_batch
        holding = [*tables.statuses_of(tables.MERGED), *tables.statuses_of(tables.WAITING)]
        others = [*holding, *tables.statuses_of(tables.CORRECTIONS)]
        alone = (status for status in tables.STATUSES if status not in others)
        self._is_merged = last >= first
        self._names_of_all = {
            "own": f"batch >= {first} AND batch <= {last}",
            "begin": begin,
            "first": first,
            "last": last,
            "generation": evidence.generation.number,
            "holding": tuple(holding),
            "alone": tuple(alone),
        }
        self.erasing = set[tuple[int, str, str]]()

    def check(self) -> None:
        """Find what is wrong."""
        evidence = self.evidence
        numbers = ", ".join(str(each.number) for each in evidence.generations)
        self._find("numbers", since=evidence.generation.from_batch, numbers=numbers)
        self._find("repeated")
        self._find("closed", epochs=self._windows())
        epochs = evidence.epochs[1:] if evidence.settings.merge.has_tenants else []
        # By new rules a record may be late that has waited for its tenant.
        rejudging = ", ".join(str(epoch.from_batch) for epoch in epochs) or "-1"
        self._find("passed", rejudging=rejudging)
        if self._is_merged:
            self._check_batches()
        for input_id in evidence.settings.inputs:
            self._check_outcomes(input_id)
            if self._is_merged:
                # Every record whose position the clock has reached is passed, and no other.
                self._find("positions", **self._names(input_id))

    def check_messages(self) -> None:
        """Find records that are in two messages, of whichever generations."""
        for input_id in self.evidence.settings.inputs:
            self._find("in_two_messages", **self._names(input_id))

    def _find(self, query: str, **names: object) -> None:
        check, place = _CHECKS[query]
        for row in self._rows(query, **names):
            where = place_of(row) if place is None else place.format_map(row)
            self.report[check].add(row["what"], where)

    def _check_batches(self) -> None:
        evidence, inputs = self.evidence, self.evidence.settings.inputs
        every = [TopicPartition(i, p) for i in inputs for p in range(evidence.partitions)]
        found = ((*tp.input, tp.partition, evidence.begin_of(tp)) for tp in every)
        begins = values(("source", "topic", "number", "since_offset"), found)
        self._find("batches", epochs=self._windows(), begins=begins)
        # A lost lake's decisions, which were read back, are of no batch.
        is_read_back = str(evidence.generation.kind == "sink").upper()
        batches = {"since": evidence.generation.from_batch, "history": evidence.history_batch}
        self._find("decisions", is_read_back=is_read_back, **batches)

    def _check_outcomes(self, input_id: InputId) -> None:
        names = self._names(input_id)
        kinds = ("parts", "alone", *(["repeats"] if self.evidence.settings.has_ids else []))
        names["places"] = " UNION ALL ".join(self._sql(kind, **names) for kind in kinds)
        erased = dict[int, list[int]]()
        for row in self._rows("outcomes", **names):
            p, offset, n = row["partition"], row["at"], row["n"]
            if row["is_erased"]:
                erased.setdefault(p, []).append(offset)
                continue
            what = f"appears {n} times" if n > 1 else "must not be there" if n else "is missing"
            at = f"{names['bronze']}: {TopicPartition(input_id, p).at(offset)}"
            self.report["outcomes"].add(f"silver: the record {what}", at)
        for p, offsets in erased.items():
            own = f"`partition` = {p} AND at IN ({', '.join(map(str, offsets))})"
            for row in self._rows("erasing", erased=own, **names):
                self.erasing.add((p, row["tenant"], row["merge_key"]))
                self.report["forgotten keys"].add(
                    "`forget` was cut short: silver still has a record of the key "
                    f"({row['status']})",
                    place_of(row),
                    "call `watersmeet forget` for the key again",
                )

    def _rows(self, query: str, **names: object) -> list[dict[str, Any]]:
        return rows(self.evidence.reader, self._sql(query, **names))

    def _sql(self, query: str, **names: object) -> str:
        return _QUERIES[query].format(**self._names_of_all, **names)

    def _windows(self) -> str:
        # An epoch may start later than the clock at which it begins, by 1 ms for each before it.
        epochs = self.evidence.epochs
        ends = [*(epoch.from_batch - 1 for epoch in epochs[1:]), MAX_TIME]
        windows = (epoch.settings.merge.window for epoch in epochs)
        found = (
            (epoch.number, epoch.from_batch, end, window.gap_ms, window.longest_ms)
            for epoch, end, window in zip(epochs, ends, windows, strict=True)
        )
        return values(("number", "since", "until", "gap", "longest"), found)

    def _names(self, input_id: InputId) -> dict[str, str]:
        """Return what a query about an input has in its place; `spans`: by partition, the offset
        with which history begins, and the span of those that the generation has merged.
        """
        evidence = self.evidence
        spans = []
        for tp in (TopicPartition(input_id, p) for p in range(evidence.partitions)):
            cursor = evidence.cursor_of(tp)
            before = NULL if cursor.position is None else cursor.position
            until = evidence.end.until.get(tp, 0)
            spans.append((tp.partition, cursor.next_offset, evidence.begin_of(tp), until, before))
        has_several = len(of_source(evidence.settings.inputs, input_id.source)) > 1
        topic = literal(input_id.topic)
        return {
            "bronze": tables.bronze(input_id.source),
            "source": input_id.source,
            "source_text": literal(input_id.source),
            "topic": topic,
            "of_part": "part['topic']" if has_several else topic,
            "spans": values(("number", "origin", "since", "until", "before"), spans),
        }
