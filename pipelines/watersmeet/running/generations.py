"""Begins generations: the first one of a lake, and another one with each reset.

One decision of the journal begins each of them. A generation says at which offsets the merge
begins to read, and behind which messages of the sink it publishes. Nothing else crosses from the
generation before it. It is made in these steps:

1. the records from its offsets on that bronze lacks are read, if bronze has already read further;
2. what it must know of published messages is written to silver under its number (rows `out`, and
   the idle decisions of a lost lake);
3. *decide*: the journal gets it.

Before step 3 nobody looks at what step 2 has written, and another attempt writes it again. What
follows for the generation before it is completed by `end_earlier`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from watersmeet.core.columns import Int64s, groups, int64s
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.recovery import SinkState
from watersmeet.core.sequence import CORRECTED, MERGED, Tail, clock_of
from watersmeet.core.sequence import Sequence as Order
from watersmeet.core.silver import in_silver
from watersmeet.core.times import time_text
from watersmeet.core.types import DUE
from watersmeet.errors import ConfigurationError, OpenTransactionError
from watersmeet.faults import fault_point
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.publisher import Publisher
from watersmeet.kafka.reading import open_transactions
from watersmeet.lake import tables
from watersmeet.lake.erased import read_erased
from watersmeet.lake.history import Generation, Generations, InKafka, generation_body, read_history
from watersmeet.lake.inputs import of_topic
from watersmeet.lake.journal import BEGIN, CLOSED
from watersmeet.lake.progress import Decided, decision_rows, last_batch
from watersmeet.lake.published import last_tails, reached, topic_of, unpublished
from watersmeet.lake.recovered import out_rows, read_back_until, rows_of_parts
from watersmeet.lake.table_reader import TableReader, Where, in_portions, row_count, within
from watersmeet.lake.tables import RESETTING
from watersmeet.running.beginnings import first_beginning, read_in_kafka
from watersmeet.running.bronze_table import BatchCounts, BronzeTable, kafka_input
from watersmeet.running.correcting import Correcting
from watersmeet.running.next_offsets import NextOffsets
from watersmeet.running.owner import Owner, now_ms
from watersmeet.running.published_parts import offsets_out, passed_over
from watersmeet.running.writer_schemas import ReadAgainError
from watersmeet.settings import Settings

# -- the first generation


def begin_first(
    owner: Owner, settings: Settings, partitions: int, publishers: Sequence[Publisher] = ()
) -> None:
    """Begin a lake that has not begun, as `kafka.start` says.

    `publishers`: those of a process that owns gold as well, that of the sink first. They fence
    every other publisher of their topics before these are read. Raises ConfigurationError if the
    lake cannot begin like that.
    """
    if owner.history(settings).generations:
        return
    for publisher in publishers:
        publisher.begin()
    of_sink = next(iter(publishers), None)
    generation, states = first_beginning(settings, partitions, of_sink)
    decided = [
        (TopicPartition(input_id, p), decision)
        for p, state in states.items()
        for input_id, name in settings.input_names.items()
        for decision in state.decisions.get(name, ())
    ]
    known = _write_published(owner, 0, _recovered_rows(states), decided)
    _decide(owner, generation._replace(known=known))


def check_beginning(settings: Settings, partitions: int) -> None:
    """Raise ConfigurationError if a lake that has not begun cannot begin as `kafka.start` says.

    This is checked before anything of the lake is created. While a transaction is open in the sink,
    nothing is raised: `begin_first` reads the sink when nobody else can publish.
    """
    with suppress(OpenTransactionError):
        first_beginning(settings, partitions)


def _recovered_rows(states: Mapping[int, SinkState]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"partition": p, "event_time": message.event_time, **MERGED.values(message.place)}
        for p, state in states.items()
        for message in state.read_back
    ]
    rows += [
        {"partition": p, "position": state.since}
        for p, state in states.items()
        if state.since is not None
    ]
    return rows


def preview(reader: TableReader, settings: Settings, partitions: int) -> list[dict[str, Any]]:
    """Return what a run would read now, without changing anything.

    Each row has a source, a partition, `[from_offset, until_offset)`, and `because`: the reason.
    It has the `transaction` of another producer if one is open behind these offsets. Raises what a
    run would raise.
    """
    rows = []
    generations = read_history(reader, settings).generations
    next_offsets = NextOffsets(reader, settings, partitions)
    newest = generations.newest if generations else first_beginning(settings, partitions).generation
    reason = "the lake" if generations else newest.reason
    for input_id, name in settings.input_names.items():
        cluster = Cluster(settings.kafka)
        bounds, transactions = open_transactions(cluster, input_id.topic, range(partitions))
        begin = newest.offsets_of(input_id)
        offsets = next_offsets.of(input_id, newest) if generations else begin
        lost = next_offsets.lost(input_id, offsets, bounds)
        next_offsets.replaced(input_id, offsets, bounds)
        for p, (first, end) in bounds.items():
            place = {
                "source": name,
                "partition": p,
                "from_offset": max(first, offsets[p]),
                "until_offset": end,
            }
            transaction = {"transaction": transactions[p].as_row()} if p in transactions else {}
            why = reason + (", on_data_loss: continue" if p in lost else "")
            rows.append({**place, **transaction, "because": why})
    return rows


# -- a reset


class TopicJump(NamedTuple):
    """A reset of one topic-partition.

    It has the offset that would be merged next, the one that will be, and the end of what Kafka
    has.
    """

    tp: TopicPartition
    from_offset: int
    to_offset: int
    end: int

    @property
    def skipped(self) -> int:
        """The number of offsets that will never be merged."""
        return max(0, self.to_offset - self.from_offset)

    @property
    def read_again(self) -> int:
        """The number of offsets that will be merged a second time."""
        return max(0, self.from_offset - self.to_offset)


class Target(NamedTuple):
    """The offset that a topic-partition is reset to, and what Kafka has."""

    offset: int
    in_kafka: InKafka


def targets_of(settings: Settings, partitions: int, to: str | int) -> dict[TopicPartition, Target]:
    """Return the targets of a reset to `earliest`, `latest` or a Kafka timestamp (ms)."""
    in_kafka = read_in_kafka(settings, partitions)
    if to == "latest":
        return {tp: Target(kafka.end_offset, kafka) for tp, kafka in in_kafka.items()}
    if to == "earliest":
        return {tp: Target(kafka.first_offset, kafka) for tp, kafka in in_kafka.items()}
    cluster = Cluster(settings.kafka)
    offsets = {
        TopicPartition(input_id, p): offset
        for input_id in settings.inputs
        for p, offset in cluster.offsets_at(input_id.topic, partitions, int(to)).items()
    }
    return {tp: Target(offset, in_kafka[tp]) for tp, offset in offsets.items()}


@dataclass
class Jump:
    """A reset of every topic-partition of a lake.

    `to`: the target in words. `tails`: the last message of the sink, by partition, and
    `correction_tails` that of the topic of corrections; `topics`: these topics, as a generation has
    them. To commit the reset, the layers must be owned, and what a crash has left must be complete,
    since the reset starts from the current state.
    """

    owner: Owner
    settings: Settings
    partitions: int
    to: str
    targets: Mapping[TopicPartition, Target]
    tails: Mapping[int, Tail]
    correction_tails: Mapping[int, Tail] = field(default_factory=dict)
    topics: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    @cached_property
    def _before(self) -> Generations:
        """The generations so far; of a lake that has not begun, the one that would be first."""
        existing = read_history(self._reader, self.settings).generations
        return existing or Generations([first_beginning(self.settings, self.partitions).generation])

    @cached_property
    def jumps(self) -> list[TopicJump]:
        """The reset of each topic-partition."""
        next_offsets = reached(self._reader, self._before.newest, self._next_batch)
        return [
            TopicJump(tp, next_offsets[tp], target.offset, target.in_kafka.end_offset)
            for tp, target in self.targets.items()
        ]

    @cached_property
    def _generation(self) -> Generation:
        begin = {jump.tp: jump.to_offset for jump in self.jumps}
        epoch = read_history(self._reader, self.settings).epochs.current.number
        reason = f"reset --to {self.to}"
        number = self._before.newest.number + 1
        return Generation(
            number,
            self._next_batch,
            begin,
            self.tails,
            "reset",
            0,
            reason,
            epoch,
            self._before.newest.life,
            correction_tails=self.correction_tails,
            reached={jump.tp: jump.from_offset for jump in self.jumps},
            in_kafka={tp: target.in_kafka for tp, target in self.targets.items()},
            topics=self.topics,
        )

    @property
    def _next_batch(self) -> int:
        last = last_batch(self._reader)
        return max(self._before.newest.from_batch, 0 if last is None else last.batch + 1)

    def _check(self) -> None:
        sequences = MERGED, CORRECTED
        self.check_filled([last_tails(self._reader, sequence) for sequence in sequences])
        self._check_known()

    def check_filled(self, published: Sequence[Mapping[int, Tail]]) -> None:
        """Raise ConfigurationError where a topic does not have yet what the lake has published: one
        that was made again or has another name now, or that lacks a message before its last one.

        `published`: by partition the last message of the sink, and of the topic of corrections.
        """
        kinds = (MERGED, self.tails), (CORRECTED, self.correction_tails)
        for (sequence, tails), last in zip(kinds, published, strict=True):
            topic = topic_of(self.settings, sequence)
            for p, tail in sorted(last.items()):
                if p not in tails or tails[p].place < tail.place:
                    raise ConfigurationError(
                        f"{topic}[{p}] does not have yet all that this lake has published",
                        where="--to",
                        fix="run the lake until it has, then jump",
                    )

    def _check_known(self) -> None:
        """Raise ConfigurationError where a lake that was taken up from its sink does not know which
        records are out: those that are in messages and not read yet, and all before it.
        """
        first = self._before[0]
        for jump in self.jumps:
            if first.kind == "sink" and jump.to_offset < first.begin[jump.tp]:
                raise ConfigurationError(
                    "this lake does not know what lies before offset "
                    f"{first.begin[jump.tp]} of {jump.tp.input.topic}[{jump.tp.partition}]: its "
                    "sink was taken up there",
                    where="--to",
                    fix="jump to a later time or to the latest, or begin a lake with another "
                    "`publish.topic`",
                )
        last = last_batch(self._reader)
        clocks = {} if last is None else last.clocks
        newest, longest_ms = self._before.newest, self.settings.merge.longest_ms
        merged = read_back_until(self._reader, newest, longest_ms)
        corrected = {p: clock_of(at) - 1 for p, at in newest.corrected_before.items()}
        for p, until in (*merged.items(), *corrected.items()):
            if clocks.get(p, 0) <= until:
                raise ConfigurationError(
                    f"records that are out are still to be read in partition {p}",
                    where="--to",
                    fix=f"run the lake until its clock has passed {time_text(until)}, then jump",
                )

    def preview(self) -> dict[str, Any]:
        """Return what the reset does.

        That is: its offsets by topic-partition, how many open records it closes, how many finished
        ones and corrections that are not published, and how many late records it leaves that would
        have made a correction; and whether it reads records for the first time that may have a key
        which was forgotten before.
        """
        self._check()
        return {
            "to": self.to,
            "open_records_closed": row_count(self._reader, tables.SILVER, [[tables.IS_UNFINISHED]]),
            "unpublished_records_closed": self._unpublished(MERGED),
            "corrections_closed": self._unpublished(CORRECTED),
            "late_records_closed": self._pending_corrections(),
            "forget_again": self._may_bring_a_forgotten_key(),
            "jumps": [
                {
                    "source": self.settings.input_names[jump.tp.input],
                    "partition": jump.tp.partition,
                    "from_offset": jump.from_offset,
                    "to_offset": jump.to_offset,
                    "end": jump.end,
                    "skipped": jump.skipped,
                    "read_again": jump.read_again,
                }
                for jump in self.jumps
            ],
        }

    def _may_bring_a_forgotten_key(self) -> bool:
        history = read_history(self._reader, self.settings)
        to = {jump.tp: jump.to_offset for jump in self.jumps}
        begin = {tp: at for tp, at in self._before[0].begin.items() if at}
        unread = [*begin.items(), *((skip.tp, skip.to_offset) for skip in history.skips)]
        return bool(history.erased) and any(to[tp] < until for tp, until in unread if tp in to)

    def _unpublished(self, sequence: Order) -> int:
        where = unpublished(sequence, self._before.newest, self._generation)
        portions = in_portions(list(where))
        return sum(row_count(self._reader, sequence.table, portion) for portion in portions)

    def _pending_corrections(self) -> int:
        if not tables.has_corrections(self.settings):
            return 0
        last = last_batch(self._reader)
        clocks = {} if last is None else last.clocks
        correcting = Correcting(self.owner.engine, self.settings, self._before.newest)
        return correcting.count_pending(clocks)

    def commit(self) -> None:
        """Make the reset. Raises ConfigurationError if it is not possible."""
        self._check()
        generation = self._generation
        for input_id in self.settings.inputs:
            self._read_missing(input_id)
        spans = {
            jump.tp: (jump.to_offset, jump.from_offset) for jump in self.jumps if jump.read_again
        }
        if spans:
            tails = {MERGED.table: self.tails, CORRECTED.table: self.correction_tails}
            published = offsets_out(self._reader, self.settings, self._before, tails, spans)
        else:
            published = passed_over(self._reader, self._before.newest)
        known = _write_published(self.owner, generation.number, rows_of_parts(published))
        _decide(self.owner, generation._replace(known=known))
        end_earlier(self.owner, self.settings)

    def _read_missing(self, input_id: InputId) -> None:
        """Read what bronze lacks between the target of a reset to earlier offsets and bronze's next
        one.

        Each record is read once.
        """
        of_bronze = NextOffsets(self._reader, self.settings, self.partitions)
        next_offsets = of_bronze.of(input_id, self._before.newest)
        ranges = {
            jump.tp.partition: (jump.to_offset, next_offsets[jump.tp.partition])
            for jump in self.jumps
            if jump.tp.input == input_id
        }
        existing = self._existing(
            input_id, {p: (since, until) for p, (since, until) in ranges.items() if since < until}
        )
        ranges = _lacking(ranges, existing)
        if not ranges:
            return
        bronze = BronzeTable(self.owner, self.settings, input_id)
        erased = read_erased(self._reader, input_id, {p: since for p, (since, _) in ranges.items()})
        between = {
            p: own[(own >= ranges[p][0]) & (own < ranges[p][1])]
            for p, own in existing.items()
            if p in ranges
        }
        while ranges:
            bronze.schemas.recover()
            source = kafka_input(self.settings, input_id, erased, bronze.schemas)
            source = replace(source, existing=between)
            taken = self.owner.engine.taken(source, ranges, bronze.summary)
            with suppress(ReadAgainError), taken as batch:
                counts = BatchCounts(batch.groups)
                if counts.records:
                    fault_point("reset.read")
                    beyond = of_bronze.beyond_rows(input_id)
                    bronze.append(batch.rows, counts, beyond)
                reached = batch.reached
                left = {p: (reached[p], end) for p, (_, end) in ranges.items()}
                ranges = {p: (since, end) for p, (since, end) in left.items() if since < end}

    def _existing(
        self, input_id: InputId, ranges: Mapping[int, tuple[int, int]]
    ) -> dict[int, Int64s]:
        table = tables.bronze(input_id.source)
        where = of_topic(input_id, within(ranges))
        rows = self._reader.select(table, ["partition", "offset"], where)
        offsets = int64s(rows["offset"])
        return {p: offsets[own] for p, own in groups(int64s(rows["partition"])).items()}

    @property
    def _reader(self) -> TableReader:
        return self.owner.engine.reader


def _lacking(
    ranges: Mapping[int, tuple[int, int]], existing: Mapping[int, Int64s]
) -> dict[int, tuple[int, int]]:
    """Return, by partition, the range from the first to the last offset that bronze lacks.

    A partition that lacks none is absent.
    """
    lacking = {}
    for p, (since, until) in ranges.items():
        missing = np.setdiff1d(np.arange(since, until), existing.get(p, ()))
        if len(missing):
            lacking[p] = int(missing[0]), int(missing[-1]) + 1
    return lacking


# -- the steps of both


def _write_published(
    owner: Owner,
    number: int,
    rows: Iterable[Mapping[str, Any]],
    decided: Iterable[Decided] = (),
) -> int:
    """Write what a generation must know of published messages (step 2), and return how many rows
    without a key that are.

    This replaces what an attempt that was never committed has written.
    """
    engine = owner.engine
    application = tables.BESIDE
    undecided: Where = [[("status", "in", ["out", "idle"]), ("generation", "=", number)]]
    if row_count(engine.reader, tables.SILVER, undecided):
        delete = partial(engine.delete, tables.SILVER, undecided)
        owner.change(tables.SILVER, application, delete)
    fault_point("beginning.known")
    schema = engine.lake.schema(tables.SILVER)
    idle = _rows_of_decisions(decided, now_ms(), number)
    out = out_rows(rows, number, schema)
    known = pa.concat_tables([out, in_silver(idle, "idle", schema)])
    if known.num_rows:
        owner.append(tables.SILVER, known, application)
    return int(out["merge_key"].null_count)


def _rows_of_decisions(decided: Iterable[Decided], now: int, number: int) -> pa.Table:
    # Decisions after the same offset are a millisecond apart, since rows of one time are one
    # decision.
    counts: Counter[tuple[TopicPartition, int]] = Counter()
    by_time: dict[int, list[Decided]] = {now: []}
    for tp, decision in decided:
        place = tp, decision.after_offset
        by_time.setdefault(now + counts[place], []).append((tp, decision))
        counts[place] += 1
    return pa.concat_tables(
        [decision_rows(decisions, time, None, number) for time, decisions in by_time.items()]
    )


def _decide(owner: Owner, generation: Generation) -> None:
    fault_point("beginning.decide")
    owner.decide(BEGIN, generation_body(generation), generation.number)


_CLOSED: Final = {"valid": False, "invalid_reason": "reset"}


def end_earlier(owner: Owner, settings: Settings) -> None:
    """Close what the generation before the newest has left, and note that it is closed.

    Afterwards no row of an earlier generation is open, waits, or is to be published.
    """
    history = owner.history(settings)
    if history.is_closed:
        return
    generations = history.generations
    newest = generations.newest
    fault_point("reset.close")
    ended = generations[-2]
    never = dict.fromkeys([*DUE.names, "position"])
    unfinished: Where = [[tables.IS_UNFINISHED, *generations.batches(ended)]]
    _change(owner, newest, unfinished, {"status": "timed_out", **_CLOSED, **never})
    for portion in in_portions(list(unpublished(MERGED, ended, newest))):
        _change(owner, newest, portion, _CLOSED)
    for portion in in_portions(list(unpublished(CORRECTED, ended, newest))):
        corrections = [[("status", "=", "correction"), *term] for term in portion]
        _change(owner, newest, corrections, {**_CLOSED, "has_message": False})
    fault_point("reset.told")
    owner.decide(CLOSED, {"versions": owner.versions()}, newest.number)


def _change(owner: Owner, newest: Generation, where: Where, values: Mapping[str, Any]) -> None:
    if row_count(owner.engine.reader, tables.SILVER, where):
        owner.change(
            tables.SILVER,
            RESETTING,
            lambda commit: owner.engine.update(tables.SILVER, where, values, commit),
            facts={"generation": newest.number},
        )
