"""Compares the table of corrections, and late duplicates, with what their model makes of bronze,
and with what `publish` makes of their content.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import Any, Final

from watersmeet.audit.evidence import NULL
from watersmeet.audit.problems import Findings
from watersmeet.audit.verify_evidence import CorrectionRow, Partition, place
from watersmeet.audit.verify_validity import Validator
from watersmeet.core.correction_model import Correction, PartitionCorrections
from watersmeet.core.inputs import InputId
from watersmeet.core.message import correction_header_bytes
from watersmeet.core.plan import TopicPartition
from watersmeet.core.sequence import EXCESS, TOO_MANY, late_born_id, message_id
from watersmeet.lake import tables

_CONTENT: Final = (
    *("event_time", "is_late_born", "version", "position", "u", "settled_at", "due"),
    *("closed_at", "first_event_time", "last_event_time"),
)
"""The columns that are compared, beside the parts."""

LateRecord = tuple[InputId, int, str, str]
"""Input, offset, tenant and key of a late record."""

Content = tuple[Any, ...]
"""The values of `_CONTENT` of a correction, why it is none, and its parts; of a late duplicate, the
offset of the part with its id."""


def check_corrections(
    partition: Partition,
    model: PartitionCorrections | None,
    erasing: Set[tuple[str, str]],
    validator: Validator,
    findings: Findings,
) -> None:
    """Check that late records with sampled keys have corrected what they should, and nothing else,
    and that corrections are valid where predicate and size say so.

    Each is of the batch that has settled it. Where rows were deleted, what late records belong to
    may be gone: then only the rest is checked.
    """
    evidence = partition.evidence
    if not tables.has_corrections(evidence.settings):
        return
    rows = [row for row in partition.corrections if evidence.is_own(row.batch)]
    _check_validity(partition, rows, validator, findings)
    _check_batches(partition, rows, findings)
    if evidence.history_of(partition.number).batch >= 0:
        return
    rows = [row for row in rows if evidence.is_sampled(row.key)]
    actual = _by_record(chain(map(_of_row, rows), _late_duplicates(partition)))
    of_model = [] if model is None else [*_of_model(partition, model), *_repeated(model)]
    expected = _by_record(of_model)
    unlike = set(erasing)
    for late in sorted(actual.keys() | expected.keys()):
        input_id, offset, tenant, key = late
        if (tenant, key) in erasing or actual.get(late) == expected.get(late):
            continue
        unlike.add((tenant, key))
        name = evidence.settings.input_names.get(input_id, input_id.topic)
        table_has, model_has = (_described(side.get(late, ())) for side in (actual, expected))
        findings.add(
            f"of the late record at offset {offset} of {name} the tables have {table_has}, and the "
            f"model {model_has}",
            place(partition.number, key, None, tenant),
        )
    alike = [row for row in rows if row.has_content and (row.tenant, row.key) not in unlike]
    _check_messages(partition, alike, validator, findings)


def _check_validity(
    partition: Partition, rows: Iterable[CorrectionRow], validator: Validator, findings: Findings
) -> None:
    """Check `valid` and `invalid_reason`."""
    more_bytes = correction_header_bytes(partition.evidence.settings.inputs)
    for row in rows:
        actual = row.columns["valid"], row.columns["invalid_reason"]
        right: tuple[bool, str | None] = False, TOO_MANY
        if row.has_content:
            right = validator.validity(row, more_bytes)
        elif actual[1] == EXCESS:  # which of the two, the model says
            right = False, EXCESS
        if actual != right:
            what = "valid is {} ({}), and must be {} ({})".format(*actual, *right)
            findings.add(what, _place(partition, row))


def _check_batches(partition: Partition, rows: Iterable[CorrectionRow], findings: Findings) -> None:
    """Check that a correction is of the batch whose clock was the first to come to `settled_at`."""
    clocks = partition.clocks
    for row in rows:
        settled_at = row.columns["settled_at"]
        before, after = clocks.get(row.batch - 1, NULL), clocks.get(row.batch, settled_at)
        if not before < settled_at <= after:
            what = (
                f"it is of batch {row.batch}, which takes the clock from {before} to {after}, and "
                f"was settled at {settled_at}"
            )
            findings.add(what, _place(partition, row))


def _check_messages(
    partition: Partition, rows: Iterable[CorrectionRow], validator: Validator, findings: Findings
) -> None:
    """Check `has_message` and `id` of corrections, all those of a merge record among them.

    A correction has a message where it, an earlier one, or the merge record itself is valid. What a
    late record has opened is named by the first correction.
    """
    p = partition.number
    more_bytes = correction_header_bytes(partition.evidence.settings.inputs)
    had = dict[str, bool]()
    for silver_row in partition.rows:
        outcome = silver_row.outcome
        record_id = message_id(p, outcome.event_time, outcome.key, outcome.tenant)
        # Where a jump has closed it later, it was valid all the same.
        had[record_id], _ = validator.validity(silver_row)
    for row, record_id in _with_ids(partition, rows):
        columns = row.columns
        is_valid, _ = validator.validity(row, more_bytes)
        had[record_id] = is_valid or had.get(record_id, False)
        if had[record_id] != columns["has_message"]:
            what = f"has_message is {columns['has_message']}, and must be {had[record_id]}"
            findings.add(what, _place(partition, row))
        if columns["id"] != record_id:
            what = f"id is {columns['id']!r}, and must be {record_id!r}"
            findings.add(what, _place(partition, row))


def _with_ids(
    partition: Partition, rows: Iterable[CorrectionRow]
) -> Iterator[tuple[CorrectionRow, str]]:
    """Yield corrections in order of their version, each with the id of its merge record."""
    p = partition.number
    corrected_before = partition.evidence.generation.corrected_before.get(p)
    opened = dict[tuple[str, str, int], str]()
    for row in sorted(rows, key=lambda row: row.columns["version"]):
        identity = row.tenant, row.key, row.columns["event_time"]
        (source, topic), offset = row.late
        own_id = late_born_id(source, topic, p, offset)
        if not row.columns["is_late_born"]:
            yield row, message_id(p, row.columns["event_time"], row.key, row.tenant)
        elif corrected_before is not None and row.place <= corrected_before:
            yield row, own_id
        else:
            yield row, opened.setdefault(identity, own_id)


def _place(partition: Partition, row: CorrectionRow) -> str:
    """Return a correction's coordinates, for a sentence."""
    input_id, offset = row.late
    tp = TopicPartition(input_id, partition.number)
    return f"corrections: {partition.evidence.at(tp, offset)}"


def _by_record(
    contents: Iterable[tuple[LateRecord, Content]],
) -> dict[LateRecord, list[Content]]:
    by_record = defaultdict[LateRecord, list[Content]](list)
    for late, content in contents:
        by_record[late].append(content)
    return dict(by_record)


def _of_row(row: CorrectionRow) -> tuple[LateRecord, Content]:
    content = (row.columns[name] for name in _CONTENT)
    reason = None if row.has_content else row.columns["invalid_reason"]
    return (*row.late, row.tenant, row.key), (*content, reason, row.parts)


def _late_duplicates(partition: Partition) -> Iterator[tuple[LateRecord, Content]]:
    for input_id, offset, tenant, key, of_offset in partition.late_duplicates:
        if partition.evidence.is_sampled(key):
            yield (input_id, offset, tenant, key), (of_offset,)


def _of_model(
    partition: Partition, model: PartitionCorrections
) -> Iterator[tuple[LateRecord, Content]]:
    values = dict[tuple[InputId, int], bytes]()
    for tp, log in partition.logs.items():
        values |= {(tp.input, offset): sampled.kept for offset, sampled in log.sampled.items()}
    every = {None: model.corrections, TOO_MANY: model.too_many, EXCESS: model.too_large}
    return (
        (_late_record(made), _content(made, reason, values))
        for reason, some in every.items()
        for made in some
    )


def _late_record(made: Correction) -> LateRecord:
    record = made.late.record
    return record.input, record.offset, made.tenant, made.key


def _content(
    made: Correction, reason: str | None, values: Mapping[tuple[InputId, int], bytes]
) -> Content:
    parts = list[tuple[Any, ...]]()
    for source, of_source in made.parts.items():
        for part in of_source:
            at = InputId(source, part.topic), part.offset
            parts.append((*at, part.event_time, values.get(at)))
    return (
        *(made.event_time, made.is_late_born, made.version, made.late.position, made.place.u),
        *(made.place.settled_at, made.due, made.closed_at),
        *(made.first_event_time, made.last_event_time, reason, tuple(parts)),
    )


def _repeated(model: PartitionCorrections) -> Iterator[tuple[LateRecord, Content]]:
    for record, of_offset in model.duplicates:
        late = record.input, record.offset, record.tenant or "", record.key or ""
        yield late, (of_offset,)


def _described(contents: Sequence[Content]) -> str:
    """Return what became of a late record, for a sentence."""
    return " and ".join(map(_one_described, contents)) or "nothing"


def _one_described(content: Content) -> str:
    if len(content) == 1:
        return f"a duplicate of offset {content[0]}"
    event_time, is_late_born, version, *_, reason, parts = content
    kind = "a late-born record" if is_late_born else "the merge record"
    if not version:
        why = "is too large" if reason == EXCESS else "has too many"
        return f"no version of {kind} at {event_time}, which {why}"
    return f"version {version} of {kind} at {event_time}, with {len(parts)} parts"
