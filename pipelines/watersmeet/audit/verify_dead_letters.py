"""Check 7: a topic of dead letters has the records of `late`, or of `quarantine`.

It has each of them once, as it came, in order of offset.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from watersmeet.audit.evidence import MAX_TIME, Evidence, Ints
from watersmeet.audit.problems import Findings
from watersmeet.audit.verify_evidence import Partition
from watersmeet.core.dead_letters import (
    LATE,
    NEXT_OFFSETS,
    OFFSET,
    PARTITION,
    REASON,
    TOPIC,
    VALUE_BYTES,
    next_offsets,
)
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.reading import FORGOTTEN
from watersmeet.core.sequence import LIFE
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.reading import Range, read_range
from watersmeet.lake import tables
from watersmeet.lake.inputs import of_topic
from watersmeet.lake.published import last_letters
from watersmeet.lake.table_reader import TableReader
from watersmeet.settings import Settings

READ = 5_000
"""Maximum number of dead letters that are in memory at a time, with the records that they were.

It is less where they have more than about `kafka.reading.BATCH_BYTES`.
"""

_COORDINATES = (REASON, TOPIC, PARTITION, OFFSET)
_NOTHING = np.array([], np.int64)


class DeadLetterTopic(NamedTuple):
    """A topic of dead letters, and the table whose records it has (`late` or `quarantine`).

    - `bounds`: by partition, the first offset that it has and the exclusive end, when it was looked
      at.
    - `noted`: by partition and input, up to which offset records were noted as sent.
    """

    table: str
    name: str
    bounds: Mapping[int, tuple[int, int]]
    noted: Mapping[int, Mapping[InputId, int]]

    @property
    def repair_hint(self) -> str:
        """Instruction to repair the topic: what is in it cannot be changed."""
        return f"name a new topic in publish.{self.table}_topic: gold fills it from {self.table}"


class DeadLetter(NamedTuple):
    """A dead letter.

    `where`: its place, for a sentence. `input` and `offset`: those of the record that it was.
    `content`: what it has of that record.
    """

    where: str
    input: InputId
    offset: int
    content: Mapping[str, Any]


def read_dead_letter_topics(
    reader: TableReader, settings: Settings, partitions: int, counts: Mapping[str, int]
) -> list[DeadLetterTopic]:
    """Return the ends of the topics of dead letters as they are now.

    `counts`: has the topics that exist. What was noted as sent is read first, so it is in the
    topic. Raises KafkaTransientError and the other errors of Kafka.
    """
    cluster = Cluster(settings.kafka)
    topics = []
    for table, name in settings.publish.dead_letter_topics.items():
        if name in counts:
            noted = last_letters(reader, cluster.identified(name))
            topics.append(DeadLetterTopic(table, name, cluster.bounds(name, partitions), noted))
    return topics


def check_dead_letters(partition: Partition, topic: DeadLetterTopic, findings: Findings) -> None:
    """Check one partition of a topic of dead letters.

    It has each source's records in order of offset, each once, with reason, place, key, value and
    headers. None is missing up to where the topic stands, and none is unknown.

    What Kafka no longer has is not missing. Not judged is what came before the history of the
    partition, and what a jump, a lost lake or `forget` has changed since. Contents are compared for
    a sample of the records, or for all.
    """
    p = partition.number
    first, end = topic.bounds.get(p, (0, 0))
    table_offsets = _table_offsets(partition, topic)
    sent: dict[InputId, list[Ints]] = {input_id: [_NOTHING] for input_id in table_offsets}
    last = dict.fromkeys(sent, -1)
    sent_until = dict(topic.noted.get(p, {}))
    last_headers: Mapping[str, Any] = {}
    where = ""
    for batch in read_range(
        partition.evidence.settings.kafka, Range(topic.name, p, first, end), READ
    ):
        batch = batch.filter(_is_own(batch, partition.evidence.generation.life))
        if not batch.num_rows:
            continue
        headers = batch["headers"][-1].as_py() or []
        last_headers = {header["key"]: header["value"] for header in headers}
        where = f"{topic.name}[{p}]@{batch['offset'][-1]}"
        by_input = defaultdict(list)
        for letter in _read(batch, partition, topic, findings):
            if letter.offset <= last[letter.input]:
                what = (
                    f"it comes after the record at offset {last[letter.input]}: a repeat, or out "
                    "of order"
                )
                findings.add(what, letter.where, topic.repair_hint)
                continue
            last[letter.input] = letter.offset
            by_input[letter.input].append(letter)
        for input_id, dead_letters in by_input.items():
            sent[input_id].append(np.array([letter.offset for letter in dead_letters], np.int64))
            _compare(
                partition,
                topic,
                TopicPartition(input_id, p),
                dead_letters,
                table_offsets[input_id],
                findings,
            )
    if where:
        names = partition.evidence.settings.input_names
        by_name = {names[input_id]: offset for input_id, offset in last.items()}
        by_header = _read_sent_until(last_headers, by_name, where, topic, findings)
        for input_id in last:
            offset = min(by_header.get(names[input_id], 0), MAX_TIME)
            sent_until[input_id] = max(offset, sent_until.get(input_id, 0))
    for input_id, chunks in sent.items():
        offsets = np.concatenate(chunks)
        # Else retention has deleted letters.
        begin = 0 if first == 0 else int(offsets.min(initial=MAX_TIME))
        missing = np.setdiff1d(table_offsets[input_id], offsets)
        missing = missing[(missing >= begin) & (missing < sent_until.get(input_id, 0))]
        _check_missing(partition, topic, TopicPartition(input_id, p), missing, findings)


def _is_own(batch: pa.RecordBatch, life: str) -> pa.Array:
    """Return True for each message that does not say that it is another lake's."""
    lives = (
        [header["value"] for header in (headers or [])[-2:] if header["key"] == LIFE]
        for headers in batch["headers"].to_pylist()
    )
    return pa.array([its in ([], [life.encode()]) for its in lives], pa.bool_())


def _read(
    batch: pa.RecordBatch, partition: Partition, topic: DeadLetterTopic, findings: Findings
) -> Iterator[DeadLetter]:
    """Yield the dead letters among some messages.

    A record may itself have been one: of headers with one name, ours are the last.
    """
    evidence = partition.evidence
    p = partition.number
    inputs = {input_id.topic: input_id for input_id in evidence.settings.inputs}
    columns = (batch[name].to_pylist() for name in ("offset", "key", "value", "headers"))
    for at, key, value, headers in zip(*columns, strict=True):
        own = [(header["key"], header["value"]) for header in headers or []]
        if own and own[-1][0] == NEXT_OFFSETS:
            own.pop()
        if own and own[-1][0] == LIFE:
            own.pop()
        ours = {
            name: (text or b"").decode(errors="replace") for name, text in own[-len(_COORDINATES) :]
        }
        input_id = inputs.get(ours.get(TOPIC, ""))
        offset = ours.get(OFFSET, "")
        where = f"{topic.name}[{p}]@{at}"
        is_offset = len(offset) < 20 and offset.isdecimal() and int(offset) < MAX_TIME
        if (
            tuple(ours) != _COORDINATES
            or input_id is None
            or not is_offset
            or ours[PARTITION] != str(p)
        ):
            what = (
                f"not a dead letter of these sources: {', '.join(_COORDINATES)} do not say which "
                "record it was"
            )
            findings.add(what, where, topic.repair_hint)
            continue
        rest = own[: -len(_COORDINATES)]
        content = {"key": key, "value": value, "headers": rest, "reason": ours[REASON]}
        if rest and rest[-1][0] == VALUE_BYTES:  # the topic had no room for the value
            size = (rest.pop()[1] or b"").decode(errors="replace")
            is_bare = not rest and key is None
            content = {
                "bytes": size,
                **({} if is_bare else {"key": key, "headers": rest}),
                "reason": ours[REASON],
            }
        place = evidence.at(TopicPartition(input_id, p), int(offset))
        yield DeadLetter(f"{where}: {place}", input_id, int(offset), content)


def _read_sent_until(
    headers: Mapping[str, Any],
    last: Mapping[str, int],
    where: str,
    topic: DeadLetterTopic,
    findings: Findings,
) -> Mapping[str, int]:
    """Return, by name of the input, the offset up to which records are there.

    A partition's last message says it. `last`: the last offset that was sent of each.
    """
    try:
        sent_until = next_offsets(headers)
    except ValueError:
        findings.add(
            f"the last message has no {NEXT_OFFSETS}, by which gold goes on",
            where,
            topic.repair_hint,
        )
        return {source: offset + 1 for source, offset in last.items()}
    for source, offset in last.items():
        until = sent_until.get(source, 0)
        if until <= offset:
            what = f"{NEXT_OFFSETS} has {until} for {source}, and offset {offset} was sent"
            findings.add(what, where, topic.repair_hint)
    return sent_until


def _compare(
    partition: Partition,
    topic: DeadLetterTopic,
    tp: TopicPartition,
    dead_letters: list[DeadLetter],
    table_offsets: Ints,
    findings: Findings,
) -> None:
    """Check that each letter is of a record that the table has, and is as bronze has that record.

    `table_offsets`: the offsets of the table's records, in order.
    """
    evidence = partition.evidence
    offsets = np.array([letter.offset for letter in dead_letters], np.int64)
    is_known = (
        np.append(table_offsets, MAX_TIME)[np.searchsorted(table_offsets, offsets)] == offsets
    )
    is_asked = is_known & ((offsets + evidence.last_batch) % evidence.one_in == 0)
    is_asked[~is_known] = _is_judged(partition, topic, tp, offsets[~is_known])
    records = _records(evidence, tp, offsets[is_asked])
    for i in np.flatnonzero(is_asked).tolist():
        letter = dead_letters[i]
        record = records.get(dead_letters[i].offset)
        if record is not None and _is_forgotten(record):
            continue
        if not is_known[i]:
            findings.add(f"{topic.table} has no such record", letter.where, topic.repair_hint)
        elif record is not None:  # else check 1 says so
            headers = [(header["key"], header["value"]) for header in record["headers"] or []]
            right = {**record, "headers": headers}
            right["bytes"] = str(len(record["value"] or b""))
            right["reason"] = LATE if topic.table == tables.LATE else record["reason"]
            if differing := [
                name for name, value in letter.content.items() if value != right[name]
            ]:
                verb = "differs" if len(differing) == 1 else "differ"
                findings.add(
                    f"{' and '.join(differing)} {verb} from the record's",
                    letter.where,
                    topic.repair_hint,
                )


def _check_missing(
    partition: Partition,
    topic: DeadLetterTopic,
    tp: TopicPartition,
    missing: Ints,
    findings: Findings,
) -> None:
    """Report records as missing from the topic: the table has them at these offsets, and later ones
    were sent.
    """
    missing = missing[~_is_readded(partition, topic, tp, missing)]
    for begin in range(0, len(missing), READ):
        some = missing[begin : begin + READ]
        records = _records(partition.evidence, tp, some)
        for offset in some.tolist():
            if offset not in records or not _is_forgotten(records[offset]):
                where = f"{topic.name}[{tp.partition}]: {partition.evidence.at(tp, offset)}"
                findings.add(
                    f"a record of {topic.table} is missing, although the topic has later ones",
                    where,
                    topic.repair_hint,
                )


def _table_offsets(partition: Partition, topic: DeadLetterTopic) -> dict[InputId, Ints]:
    """Return, by input, the offsets of the records that the table has, in order.

    Only as far as the partition's history goes.
    """
    if topic.table == tables.QUARANTINE:
        return {tp.input: log.refused for tp, log in partition.logs.items()}
    return {input_id: np.unique(offsets) for input_id, (offsets, _) in partition.late.items()}


def _is_judged(
    partition: Partition, topic: DeadLetterTopic, tp: TopicPartition, offsets: Ints
) -> npt.NDArray[np.bool_]:
    """Return, for records that the table lacks, True where they must not be in the topic."""
    evidence = partition.evidence
    log = partition.logs[tp]
    is_judged = ~_is_readded(partition, topic, tp, offsets)
    if (tables.QUARANTINE, tp.partition) in evidence.retention_bounds.times:
        is_judged &= np.isin(offsets, log.offset)  # of others nothing is left
    is_judged &= np.array(
        [partition.is_judged(tp.input, offset) for offset in offsets.tolist()], bool
    )
    first = evidence.generations[0]
    is_judged &= offsets >= first.begin.get(tp, 0)
    if first.kind == "sink" or first.begin.get(tp, 0):
        # The lost lake may have sent records that this one has not come to yet.
        reached = (
            evidence.end.until.get(tp, 0)
            if topic.table == tables.LATE
            else int(log.offset.max(initial=-1)) + 1
        )
        is_judged &= offsets < reached
    return is_judged


def _is_readded(
    partition: Partition, topic: DeadLetterTopic, tp: TopicPartition, offsets: Ints
) -> npt.NDArray[np.bool_]:
    """Return True where a record may have come to the table after later ones had been sent.

    Such a record is not sent. A jump back finds anew which records are late, and reads refused ones
    that bronze lacked. An epoch judges anew what waits for its tenant.
    """
    evidence = partition.evidence
    is_readded = np.zeros(len(offsets), bool)
    if topic.table == tables.LATE and evidence.settings.merge.has_tenants:
        firsts = [e.from_batch for e in evidence.epochs[1:] if evidence.is_own(e.from_batch)]
        late_offsets, batches = partition.late[tp.input]
        is_readded |= np.isin(offsets, late_offsets[np.isin(batches, firsts)])
    for since, until in evidence.reread_ranges.get(tp, ()):
        is_readded |= (offsets >= since) & (offsets < until)
    return is_readded


def _records(evidence: Evidence, tp: TopicPartition, offsets: Ints) -> dict[int, dict[str, Any]]:
    """Return what bronze has of some records of a topic-partition, by offset."""
    if not len(offsets):
        return {}
    span = [
        ("partition", "=", tp.partition),
        ("offset", ">=", int(offsets.min())),
        ("offset", "<=", int(offsets.max())),
    ]
    columns = ["offset", "key", "value", "headers", "reason", "detail", "heartbeat"]
    where = of_topic(tp.input, [[*span, ("offset", "in", offsets.tolist())]])
    rows = evidence.reader.select(tables.bronze(tp.input.source), columns, where)
    return {row["offset"]: row for row in rows.to_pylist()}


def _is_forgotten(record: Mapping[str, Any]) -> bool:
    """Return True where a record was erased.

    Bronze then has it as a heartbeat without a value; a refused one has a detail that says so.
    """
    return record["detail"] == FORGOTTEN or bool(record["heartbeat"] and record["value"] is None)
