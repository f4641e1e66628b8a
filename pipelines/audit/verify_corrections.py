"""Compares the table of corrections, and late duplicates, with what their model makes of bronze."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import Any, Final

import pyarrow as pa

from pipelines.audit.evidence import Evidence, read_table
from pipelines.audit.problems import Findings
from pipelines.audit.verify_evidence import Partition, parts_by_source, place
from pipelines.core.correction_model import Correction, PartitionCorrections
from pipelines.core.inputs import InputId
from pipelines.lake import tables
from pipelines.lake.table_reader import Condition

_NAMES: Final = ("source", "topic", "offset", "tenant", "merge_key")
_CONTENT: Final = (
    *("event_time", "is_late_born", "version", "position", "u", "settled_at", "due"),
    *("closed_at", "first_event_time", "last_event_time"),
)
"""The columns that are compared, beside the parts."""

LateRecord = tuple[InputId, int, str, str]
"""Input, offset, tenant and key of a late record."""

Content = tuple[Any, ...]
"""The values of `_CONTENT` and the parts of a correction; of a late duplicate, the offset of the
part with its id."""


def check_corrections(
    partition: Partition,
    model: PartitionCorrections | None,
    erasing: Set[tuple[str, str]],
    findings: Findings,
) -> None:
    """Check that late records with sampled keys have corrected what they should, and nothing else.

    A partition with deleted rows is not judged: what late records belong to may be gone. While the
    notes of the last batch are missing, so may its corrections be.
    """
    evidence = partition.evidence
    is_deleted = evidence.history_of(partition.number).batch >= 0
    if not tables.has_corrections(evidence.settings) or is_deleted:
        return
    actual = _by_record(chain(_in_table(partition), _late_duplicates(partition)))
    of_model = [] if model is None else [*_of_model(partition, model), *_repeated(model)]
    expected = _by_record(of_model)
    if evidence.unnoted.batch is not None:
        expected = {late: content for late, content in expected.items() if late in actual}
    for late in sorted(actual.keys() | expected.keys()):
        input_id, offset, tenant, key = late
        if (tenant, key) in erasing or actual.get(late) == expected.get(late):
            continue
        name = evidence.settings.input_names[input_id]
        table_has, model_has = (_described(side.get(late, ())) for side in (actual, expected))
        findings.add(
            f"of the late record at offset {offset} of {name} the tables have {table_has}, and the "
            f"model {model_has}",
            place(partition.number, key, None, tenant),
        )


def _by_record(
    contents: Iterable[tuple[LateRecord, Content]],
) -> dict[LateRecord, list[Content]]:
    by_record = defaultdict[LateRecord, list[Content]](list)
    for late, content in contents:
        by_record[late].append(content)
    return dict(by_record)


def _here(partition: Partition) -> list[Condition]:
    evidence = partition.evidence
    return [
        ("partition", "=", partition.number),
        ("generation", "=", evidence.generation.number),
        ("batch", "<=", evidence.last_batch),
    ]


def _in_table(partition: Partition) -> Iterator[tuple[LateRecord, Content]]:
    evidence = partition.evidence
    columns = [*_NAMES, *_CONTENT, *evidence.settings.sources]
    rows = read_table(
        evidence.reader, evidence.settings, tables.CORRECTIONS, columns, [_here(partition)]
    )
    contents = zip(*(rows[name].to_pylist() for name in _CONTENT), strict=True)
    parts = zip(*parts_by_source(rows, evidence), strict=True)
    for late, content, by_source in zip(_lates(evidence, rows), contents, parts, strict=True):
        if late is not None:
            yield late, (*content, tuple(chain(*by_source)))


def _lates(evidence: Evidence, rows: pa.Table) -> Iterator[LateRecord | None]:
    """Yield the late record of each row; None where its key is not sampled."""
    for row in rows.select(list(_NAMES)).to_pylist():
        source, topic, offset, tenant, key = row.values()
        is_sampled = evidence.is_sampled(key)
        yield (InputId(source, topic), offset, tenant, key) if is_sampled else None


def _late_duplicates(partition: Partition) -> Iterator[tuple[LateRecord, Content]]:
    evidence = partition.evidence
    where: list[Condition] = [*_here(partition), ("is_late", "=", True)]
    columns = [*_NAMES, "of_offset"]
    rows = read_table(evidence.reader, evidence.settings, tables.DUPLICATES, columns, [where])
    lates = zip(_lates(evidence, rows), rows["of_offset"].to_pylist(), strict=True)
    return ((late, (of_offset,)) for late, of_offset in lates if late is not None)


def _of_model(
    partition: Partition, model: PartitionCorrections
) -> Iterator[tuple[LateRecord, Content]]:
    values = dict[tuple[InputId, int], bytes]()
    for tp, log in partition.logs.items():
        values |= {(tp.input, offset): sampled.kept for offset, sampled in log.sampled.items()}
    return ((_late_record(made), _content(made, values)) for made in model.corrections)


def _late_record(made: Correction) -> LateRecord:
    record = made.late.record
    return record.input, record.offset, made.tenant, made.key


def _content(made: Correction, values: Mapping[tuple[InputId, int], bytes]) -> Content:
    parts = list[tuple[Any, ...]]()
    for source, of_source in made.parts.items():
        for part in of_source:
            at = InputId(source, part.topic), part.offset
            parts.append((*at, part.event_time, values.get(at)))
    return (
        *(made.event_time, made.is_late_born, made.version, made.late.position, made.place.u),
        *(made.place.settled_at, made.due, made.closed_at),
        *(made.first_event_time, made.last_event_time, tuple(parts)),
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
    event_time, is_late_born, version, *_, parts = content
    kind = "a late-born record" if is_late_born else "the merge record"
    return f"version {version} of {kind} at {event_time}, with {len(parts)} parts"
