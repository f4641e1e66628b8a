"""The bronze layer: every committed Kafka record once, raw, with its coordinates.

Each record also has the columns that planning the merge needs. Each input (`core.inputs`) is read
by itself. A batch of it is made in these steps:

1. *plan*: offset ranges behind what the table has; after a failure, and at first, the tables say
   where that is (`running.next_offsets`);
2. *read* the records of the ranges, decoded (`core.reading.read_records`) and counted;
3. *check* that the topic they come from is still the lake's, and how many are refused: no commit
   has a batch with too large a share of them;
4. *commit*: the rows go to `bronze_<source>`, refused ones among them, in one Delta commit.

After a crash before step 4, the records are read from Kafka again; after it nothing is left to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.texts import number_of
from watersmeet.engine import Engine, KafkaInput, Rows
from watersmeet.errors import DataLossError, NewLeaderError, QuarantineLimitError, class_of
from watersmeet.faults import fault_point
from watersmeet.kafka.reading import share
from watersmeet.lake import tables
from watersmeet.lake.erased import read_erased
from watersmeet.lake.maintenance import Maintenance
from watersmeet.monitoring.events import BronzeProgress, RecordsProcessed
from watersmeet.monitoring.observability import Reporter
from watersmeet.running.bronze_table import BatchCounts, BronzeTable, kafka_input
from watersmeet.running.next_offsets import NextOffsets
from watersmeet.running.owner import Owner
from watersmeet.settings import Settings

QUARANTINE_SAMPLE = 1000
"""Number of records after which the share of refused ones is checked: of a few, half may well be
bad.
"""


@dataclass
class _Reading:
    """How an input is read, and where next: offsets by partition."""

    source: KafkaInput
    offsets: dict[int, int]
    span: int
    """Maximum number of offsets of the next batch."""
    beyond: dict[int, int]
    """By partition, where reading has ended behind the last row that the table has of it."""


@dataclass
class Bronze:
    """Reader of one input into its table; one owner at a time."""

    owner: Owner
    settings: Settings
    input: InputId
    next_offsets: NextOffsets
    reporter: Reporter = field(default_factory=Reporter)
    maintenance: Maintenance | None = None
    _unchecked: tuple[int, int] = (0, 0)
    """Numbers of records, and of refused ones among them, that were too few to be judged."""
    _reading: _Reading | None = None
    """None after a failure: only the table knows which commit was made."""

    def __post_init__(self) -> None:
        """Prepare the table."""
        self.table = BronzeTable(self.owner, self.settings, self.input)

    def take(self, ends: Mapping[int, int]) -> bool:
        """Read and commit the next batch before these offsets, by partition.

        Return False where there is none. Raises QuarantineLimitError, DataLossError and what
        reading Kafka raises.
        """
        try:
            reading = self._reading
            if reading is None or any(ends[p] < at for p, at in reading.offsets.items()):
                reading = self._recover()
            self._reading = None
            reached = self._take(reading, ends)
        except Exception as failure:
            if self.table.schemas.note_failure(failure) or self._is_accepted_gap(failure):
                return True  # reading does without the schema, or begins behind the gap
            if class_of(failure) is NewLeaderError:
                return True  # and what was read before is compared with what that leader has
            raise
        reading.offsets.update(reached)
        self._reading = reading
        return bool(reached)

    def _recover(self) -> _Reading:
        self.table.schemas.recover()
        # Before anything is compared: what a later leader appends is not read.
        leader_epochs = self.next_offsets.leader_epochs(self.input)
        beyond = self.next_offsets.beyond_rows(self.input)
        offsets = self.next_offsets.checked(self.input, beyond)
        self._notify_progress(offsets)
        erased = read_erased(self._engine.reader, self.input, offsets)
        source = kafka_input(self.settings, self.input, erased, self.table.schemas)
        source = replace(source, leader_epochs=leader_epochs)
        return _Reading(source, offsets, self.settings.kafka.max_offsets_per_batch, beyond)

    def _take(self, reading: _Reading, ends: Mapping[int, int]) -> Mapping[int, int]:
        backlog = {p: max(ends[p] - offset, 0) for p, offset in reading.offsets.items()}
        self.reporter.left(self.settings.input_names[self.input], sum(backlog.values()))
        counts = {p: count for p, count in share(backlog, reading.span).items() if count}
        if not counts:
            return {}
        ranges = {p: (reading.offsets[p], reading.offsets[p] + n) for p, n in counts.items()}
        with ExitStack() as stack:
            with self.owner.step("bronze", "read"):
                batch = stack.enter_context(
                    self._engine.taken(reading.source, ranges, self.table.summary)
                )
            counted = BatchCounts(batch.groups)
            rows_end = {p: until for p, (_, until) in counted.ranges.items()}
            reached = {**reading.beyond, **batch.reached}
            reading.beyond = {p: at for p, at in reached.items() if at != rows_end.get(p)}
            self._write(batch.rows, counted, reading.beyond)
        taken = sum(batch.reached[p] - since for p, (since, _) in ranges.items())
        # Where records are large, the next batch asks for as many as there was room for. Each
        # batch after it asks for a few more.
        limit = self.settings.kafka.max_offsets_per_batch
        is_short = taken < sum(counts.values())
        reading.span = taken if is_short else min(reading.span + reading.span // 8 + 1, limit)
        return batch.reached

    def _write(self, rows: Rows, counts: BatchCounts, beyond: Mapping[int, int]) -> None:
        """Check and commit the rows of a batch (steps 3 and 4); `beyond` as in `_Reading`."""
        if not counts.records:
            return
        self.next_offsets.check_topic(self.input)
        unchecked = self._check_share(counts)
        fault_point("bronze.append")
        with self.owner.step("bronze", "append"):
            self.table.append(rows, counts, beyond)
        fault_point("bronze.done")
        self._notify(counts)
        if self.maintenance is not None:
            self.maintenance.after_commit()
        self.table.schemas.note_success()
        self._unchecked = unchecked

    def _is_accepted_gap(self, failure: Exception) -> bool:
        is_data_loss = issubclass(class_of(failure), DataLossError)
        return self.settings.kafka.on_data_loss == "continue" and is_data_loss

    def _check_share(self, counts: BatchCounts) -> tuple[int, int]:
        """Return the numbers of records, and of refused ones, that are too few to be judged yet.

        Batches are counted together until they have enough records (`QUARANTINE_SAMPLE`). Raises
        QuarantineLimitError if too large a share of the records is refused.
        """
        records = self._unchecked[0] + counts.records
        refused = self._unchecked[1] + counts.refused
        if records < QUARANTINE_SAMPLE:
            return records, refused
        if counts.refused and refused > self.settings.kafka.quarantine_limit * records:
            reason, partition, offset = counts.worst
            place = f"{self.input.topic}[{partition}]@{offset}"
            raise QuarantineLimitError(
                f"{counts.refused} of {counts.records} records would go to quarantine, most of "
                f"them as {reason} (such as {place}): none of them was written",
                where=self.settings.input_names[self.input],
                fix="correct the configuration, or accept them with a higher "
                "kafka.quarantine_limit",
            )
        return 0, 0

    def _notify(self, counts: BatchCounts) -> None:
        self._notify_progress({p: until for p, (_, until) in counts.ranges.items()})
        self.owner.notify(RecordsProcessed("bronze", {self.input.topic: counts.outcomes}))
        self.reporter.notify(
            tables.bronze(self.settings.input_names[self.input]),
            f"{number_of(counts.records, 'record')}, {counts.refused:,} refused",
            records=counts.records,
            refused=counts.refused,
        )

    def _notify_progress(self, offsets: Mapping[int, int]) -> None:
        ends = {TopicPartition(self.input, p): offset for p, offset in offsets.items()}
        self.owner.notify(BronzeProgress(ends))

    @property
    def _engine(self) -> Engine:
        return self.owner.engine
