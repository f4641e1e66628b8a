"""Check 5 of `verify`: silver is what bronze and the merge model make it, by pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.audit.comparison import Row, as_dicts, as_rows, compare
from watersmeet.audit.evidence import NULL, End, Evidence
from watersmeet.audit.problems import Report
from watersmeet.audit.verify_bronze import Log, Records
from watersmeet.audit.verify_model import Base, Derivation
from watersmeet.audit.verify_rows import place, place_of
from watersmeet.audit.verify_topics import MessageCheck, Topic
from watersmeet.core.columns import row_values
from watersmeet.core.correction_model import CorrectionPlace
from watersmeet.core.inputs import InputId
from watersmeet.core.model import NO_TENANT, MergeRules
from watersmeet.core.sequence import CORRECTED, MERGED, clock_of
from watersmeet.core.too_large import EXCESS
from watersmeet.core.types import DUE
from watersmeet.lake import tables
from watersmeet.lake.inputs import of_topic
from watersmeet.lake.pieces import read_pieces
from watersmeet.lake.views import views

SHOWN: Final = 3
"""Number of rows of a side that a sentence shows."""


def compared_columns(evidence: Evidence) -> list[str]:
    """Return the columns of silver that are compared with the model's."""
    silver = tables.layout(evidence.settings)[tables.SILVER]
    return silver.columns_but(*tables.CUT, *tables.JUDGED)


@dataclass
class PartitionCheck:
    """Check of one partition of a generation.

    It is told what bronze has (`take`), then of the rows of some batches (`check_batches`), again
    and again; and at last of the rows that may still change (`finish`).

    - `erasing`: partitions, tenants and keys that `forget` has begun to erase.
    - `sequences`: the topics whose messages are compared with the rows.
    """

    evidence: Evidence
    number: int
    logs: Mapping[InputId, Log]
    base: Base
    erasing: Set[tuple[int, str, str]]
    sequences: Sequence[Topic]
    report: Report

    def __post_init__(self) -> None:
        of_topics = self.sequences, self.base.corrected_keys or ()
        self.messages = MessageCheck(self.evidence, self.number, *of_topics, self.report)
        self.columns = compared_columns(self.evidence)
        self._key = itemgetter(self.columns.index("tenant"), self.columns.index("merge_key"))
        of_merged = views(self.evidence.settings)[tables.MERGED].schema.names
        self._places = [name for name in EXCESS.names if name not in of_merged]
        """Columns that say where a record is, which merge records lack."""
        self.history_batch = self.evidence.history_batch
        merge, logs = self.evidence.through[0][0].settings.merge, self.logs
        rules = MergeRules(tuple(logs), *merge.window, merge.tenant_max_lag_ms)
        values = {input_id: log.values for input_id, log in logs.items()}
        of_partition = rules, self.number, self.base, self.columns, values
        self.derived = Derivation(*of_partition, lambda i, offset: logs[i].kept(offset))
        self._unequal: tuple[list[Row], list[Row]] = [], []
        """Rows that only silver has, and rows that only the model has."""

    # -- bronze

    def take(self, input_id: InputId, records: Records) -> None:
        """Take note of the next rows of a topic-partition."""
        log = self.logs[input_id]
        self.derived.arrive(input_id, log.arrived)
        log.arrived = []
        first, last = records.offset[:1], records.offset[-1:]
        if len(first):
            passed_over = log.passed_over(int(first[0]), int(last[0]) + 1)
            self.derived.out |= {(input_id, offset) for offset in passed_over}
        at = f"{tables.bronze(input_id.source)}: "
        for offset in records.unread:
            self.report["outcomes"].add(
                "a record with a value was neither read nor refused",
                at + log.tp.at(offset),
                "give the row the event time or the reason that its value has, or start a new lake "
                "while Kafka still has it",
            )

    # -- batches

    def check_batches(self, batches: range, end: End, rows: pa.Table) -> None:
        """Check some batches, at whose end all came to `end`, and the rows that they have finished.

        `rows`: of silver.
        """
        is_judged = batches.start > self.history_batch
        if is_judged:
            self.derived.merge(self.evidence.epochs.of(batches.start), end)
            self._compare(rows, self.derived.finished())
        clock = end.clocks.get(self.number)
        self.messages.check(rows, clock, self.evidence.generation, is_judged=is_judged)

    def finish(self, rows: pa.Table) -> None:
        """Check the rows that may still change, and what is left of the topics."""
        if self.history_batch < self.evidence.last_batch:  # else nothing is left to judge
            fields = ("status", "tenant", "merge_key", "event_time", "last_event_time", "position")
            unfinished = rows.filter(pc.not_equal(rows["status"], "timed_out")).select(fields)
            for row in unfinished.to_pylist():
                self._check_state(row)
            self._compare(rows, self.derived.unfinished())
            self._tell_unequal()
        self.messages.check_unfinished(rows)
        self.messages.finish()

    def _tell_unequal(self) -> None:
        names = self.evidence.settings.input_names
        at = self.columns.index("event_time")
        for difference in compare(*self._unequal, self.columns, self._key):
            tenant, key = difference.key
            if (self.number, *difference.key) in self.erasing:
                continue
            here, model = (
                self._described(side, names) for side in (difference.actual, difference.expected)
            )
            what = f"the tables have {here}, and the merge model {model}"
            if difference.columns:
                what += f": {', '.join(difference.columns)}"
            time = min(row[at] for row in (*difference.actual, *difference.expected))
            self.report["the merge model"].add(what, place(self.number, key, time, tenant))

    # -- rows against the model

    def _compare(self, rows: pa.Table, expected: Iterable[Row]) -> None:
        evidence = self.evidence
        is_sampled = pa.array(map(evidence.is_sampled, rows["merge_key"].to_pylist()), pa.bool_())
        for_model = _for_model(rows.filter(is_sampled), self._places)
        actual: Iterable[Row] = as_rows(for_model, self.columns)
        if evidence.following is not None:
            actual, expected = (map(self._as_ended, side) for side in (actual, expected))
        for difference in compare(actual, expected, self.columns, self._key):
            self._unequal[0].extend(difference.actual)
            self._unequal[1].extend(difference.expected)

    def _as_ended(self, row: Row) -> Row:
        """Return a row as the jump that ended its generation leaves it.

        What was open, what waited, and what was finished and not out is closed.
        """
        values = dict(zip(self.columns, row, strict=True))
        status = values["status"]
        if status in tables.UNFINISHED:  # it loses what tells that it may still change
            values |= dict.fromkeys([*DUE.names, *self._places, "position"])
        elif status != "timed_out" or not self.evidence.is_unpublished(
            MERGED, self.number, MERGED.place(values)
        ):
            return row
        return tuple((values | {"status": "reset"}).values())

    def _described(self, rows: Iterable[Row], names: Mapping[InputId, str]) -> str:
        shown = sorted(rows, key=repr)[:SHOWN]
        texts = (_described(dict(zip(self.columns, row, strict=True)), names) for row in shown)
        return "; ".join(texts) or "nothing"

    # -- rows by themselves

    def _check_state(self, row: Mapping[str, Any]) -> None:
        """Check that a merge record is open as long as it can be joined at the clock of its tenant,
        and a record waits as long as that has not come to its position, and the clock of all has.
        """
        evidence = self.evidence
        epoch, end = evidence.through[-1]
        clock = now = end.clocks.get(self.number)
        if now is not None and evidence.settings.merge.has_tenants:
            clock = self.derived.model.tenant_clock(row["tenant"], now)
        if row["status"] == "waiting":
            position = NULL if row["position"] is None else row["position"]
            is_right = clock is not None and now is not None and clock < position <= now
            what = f"has the position {position}, and the clock of all is {now}"
        else:
            due = epoch.settings.merge.window.due(row["event_time"], row["last_event_time"])
            is_right = clock is None or due >= clock
            what = f"can be joined until {due}"
        has_ended = evidence.following is not None and not evidence.is_closing
        if has_ended or not is_right:
            clock_name = "the clock" if row["tenant"] == NO_TENANT else "its tenant's clock"
            state = f"{row['status']} although {clock_name} is {clock}"
            what = f"the row is {state}, and it {what}"
            self.report["rows of silver"].add(what, place_of({**row, "partition": self.number}))


def _for_model(rows: pa.Table, places: Sequence[str]) -> pa.Table:
    """Return rows of silver without what the model does not say: why rows are not valid, and the
    ids of corrections. What a jump has closed has the status `reset`.
    """
    status = rows["status"]
    is_correction = pc.equal(status, "correction")
    is_reset = pc.equal(rows["invalid_reason"], "reset").fill_null(False)
    is_reset = pc.and_(is_reset, pc.equal(status, "timed_out"))
    is_none = pc.and_(is_correction, pc.equal(rows["version"], 0)).fill_null(False)
    changed = {
        "status": pc.if_else(is_reset, "reset", status),
        "invalid_reason": pc.if_else(is_none, rows["invalid_reason"], None),
        "id": pc.if_else(is_correction, None, rows["id"]),
    }
    changed |= {name: pc.if_else(is_reset, None, rows[name]) for name in places}
    for name, column in changed.items():
        rows = rows.set_column(rows.column_names.index(name), name, column)
    return rows


def _described(row: Mapping[str, Any], names: Mapping[InputId, str]) -> str:
    status, time = row["status"], row["event_time"]
    at = ""
    if row["source"] is not None and status != "waiting":
        input_id = InputId(row["source"], row["topic"])
        at = f"{names.get(input_id, input_id.topic)}@{row['offset']}"
    if status == "correction":
        kind = "a late-born record" if row["is_late_born"] else "the merge record"
        return f"version {row['version']} of {kind} at {time} by {at}"
    last = row["position"] if status in ("late", "passed") else row["last_event_time"]
    optional = {"due": row["due"], "closed at": row["closed_at"], "u": row["u"]}
    optional["position"] = row["position"] if status == "waiting" else None
    times = "".join(f", {name} {t}" for name, t in optional.items() if t is not None)
    last = time if last is None else last
    parts = [f"{at} ({time})"] if at else []
    if status == "duplicate":
        parts = [f"{at} ({time}, the id {row['id']!r} of offset {row['of_offset']})"]
    for input_id, name in names.items():
        for *topic, offset, part_time, value in row.get(input_id.source) or ():
            if not topic or topic == [input_id.topic]:
                parts.append(f"{name}@{offset} ({part_time}, {str(value)[:40]})")
    shown = ", ".join(parts[:5]) + ", ..." * (len(parts) > 5)
    return f"{status} from {time} to {last}{times} of {shown}"


# -- where a history begins


def read_base(evidence: Evidence, partition: int, late: pa.Table) -> Base:
    """Return what the derivation of a partition begins with.

    Where rows have been deleted, that is a saved state, with the rows of silver from before that
    late records may still correct. `late`: the later late records that are to be corrected.
    """
    before = evidence.generation.corrected_before.get(partition)
    recovered = evidence.recovered.filter(pc.equal(evidence.recovered["partition"], partition))
    names = ("merge_key", "event_time", "due", "closed_at", "tenant")
    base = Base(
        recovered=list(row_values(recovered, *names)),
        since=evidence.since.get(partition),
        corrected_before=None if before is None else CorrectionPlace._make(before),
    )
    corrected = set(row_values(late, "tenant", "merge_key"))
    if evidence.base is not None:
        columns = tables.silver_columns(evidence.settings).names
        saved = [[("partition", "=", partition), *evidence.saved]]
        rows = [*as_dicts(evidence.reader.select(tables.BASES, columns, saved), columns)]
        for row in rows:
            if row["status"] == "late":
                corrected.add((row["tenant"], row["merge_key"]))
                row["rules"] = evidence.epochs.of(row["batch"]).settings
        keys = {each for each in corrected if evidence.is_sampled(each[1])}
        rows = [row for row in rows if evidence.is_sampled(row["merge_key"])]
        _give_values(evidence, partition, rows)
        rows += _closed_rows(evidence, partition, keys)
        base = base._replace(state=evidence.base, rows=rows)
    return base._replace(corrected_keys=corrected)


def _closed_rows(
    evidence: Evidence, partition: int, keys: Set[tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of merge records with these tenants and keys, and of corrections, that late
    records may still correct, which batches up to the saved state have made.
    """
    if not keys:
        return
    columns = tables.silver_columns(evidence.settings).names
    where = [evidence.closed_before(partition)]
    before = evidence.generation.corrected_before.get(partition)
    for rows in read_pieces(evidence.reader, tables.SILVER, columns, where, ("event_time",)):
        for row in as_dicts(rows, columns):
            is_correction = row["status"] == "correction"
            if (row["tenant"], row["merge_key"]) not in keys or (
                is_correction and not row["version"]
            ):
                continue
            # The lost lake may have corrected what is not after its last correction.
            is_after = before is None or (
                CORRECTED.place(row) > before
                if is_correction
                else row["closed_at"] > clock_of(before)
            )
            if is_after:
                yield row


def _give_values(evidence: Evidence, partition: int, rows: Iterable[dict[str, Any]]) -> None:
    waiting = [row for row in rows if row["status"] == "waiting"]
    for input_id in evidence.settings.inputs:
        own = {row["offset"]: row for row in waiting if (row["source"], row["topic"]) == input_id}
        if own:
            its = [("partition", "=", partition), ("offset", "in", sorted(own))]
            where = of_topic(input_id, [its])
            table = tables.bronze(input_id.source)
            found = evidence.reader.select(table, ["offset", "value"], where)
            for offset, value in row_values(found, "offset", "value"):
                own[offset]["value"] = value
